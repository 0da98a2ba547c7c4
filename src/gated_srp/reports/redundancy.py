"""How alike a patch is to its neighbours (the paper's Fig. 1c): its cosine to their mean, beside the same for random patches.

Measured on features, on tokens after attention and on photographs; a table and a figure.
Shapes: N patches, M of them with neighbours, E neighbour entries, S side of a patch,
L rows (CLS first, square padding last), H heads, D head width, C channels.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from gated_srp.config.cohort import find_files, open_cohort, preparation
from gated_srp.config.load import load_config
from gated_srp.data.files.siblings import find_bags, may_be_same
from gated_srp.data.matching import slide_stem
from gated_srp.data.prepared import Preparation, open_header, prepare
from gated_srp.errors import Note, UserError, counted
from gated_srp.files import write_whole
from gated_srp.models import load_model
from gated_srp.models.attention import merge_heads
from gated_srp.models.slide import SlideTransformer
from gated_srp.progress import Event, Progress, silent
from gated_srp.records import csv_text
from gated_srp.slides.encoders import PatchEncoder, find_encoder
from gated_srp.slides.extract import best_device, encode
from gated_srp.slides.tiles import cut_photograph, find_photographs
from gated_srp.srp.graph import PatchGraph
from gated_srp.srp.projection import along, neighbour_mean
from gated_srp.srp.projection import unit as unit_rows

T = TypeVar("T")
POOLED = "all slides"
_QUANTILES = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}
_BATCH = 16


@dataclass(frozen=True, eq=False)
class Redundancy:
    """Of one slide, or of several pooled. ``rows`` says what was compared: features, or tokens of a layer."""

    slide: str
    rows: str
    neighbours: Tensor  # (M,) cosine of each patch with neighbours to their mean
    random: Tensor  # (M,) the same for as many random other patches of the slide


def redundancy(rows: Tensor, graph: PatchGraph, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Cosine of each patch that has neighbours to their mean, and to the mean of as many random patches: (N, C) -> two (M,).

    A patch's random partners differ from each other and from the patch: the neighbour lists are relabelled by one
    permutation; where that gives the patch itself, the patch's own image stands in, which its list cannot hold yet.

    >>> line = PatchGraph.from_coords(torch.tensor([[0, 0], [1, 0], [2, 0]]), stride=1)
    >>> features = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> [round(cosine, 2) for cosine in redundancy(features, line, torch.Generator())[0].tolist()]
    [1.0, 0.71, 0.0]
    """
    counts = graph.neighbour_count
    alive = counts > 0
    own = torch.arange(len(rows)).repeat_interleave(counts)  # (E,)
    image = torch.randperm(len(rows), generator=generator)
    drawn = image[graph.neighbours]
    drawn = torch.where(drawn == own, image[own], drawn)
    axis = unit_rows(rows)  # (N, C)
    near, far = (unit_rows(neighbour_mean(rows, lists, graph.offsets)) for lists in (graph.neighbours, drawn))
    return along(axis, near)[alive].clamp(-1, 1), along(axis, far)[alive].clamp(-1, 1)  # rounding may exceed 1


def measure(slide: str, rows: Tensor, graph: PatchGraph, *, what: str = "features", seed: int = 0) -> Redundancy:
    """The redundancy of one slide; its random draw depends on the seed and the slide's name alone."""
    digest = hashlib.sha256(f"{seed}/{slide}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return Redundancy(slide, what, *redundancy(rows, graph, generator))


def pooled(slides: Sequence[Redundancy], *, name: str = POOLED) -> list[Redundancy]:
    """All patches together, once for each kind of rows, in the order these appear."""
    found = []
    for kind in dict.fromkeys(one.rows for one in slides):
        same = [one for one in slides if one.rows == kind]
        near, far = (torch.cat([getattr(one, which) for one in same]) for which in ("neighbours", "random"))
        found.append(Redundancy(name, kind, near, far))
    return found


def write_table(measured: Iterable[Redundancy], path: Path) -> None:
    """One row for each slide, kind of rows and kind of partners: number of patches, mean and quantiles of the cosine."""
    rows = []
    for one in measured:
        for partners in ("neighbours", "random"):
            cosines = getattr(one, partners)
            numbers = {"patches": len(cosines), "mean": float(cosines.mean()), **quantiles(cosines)}
            rows.append({"slide": one.slide, "rows": one.rows, "partners": partners, **numbers})
    write_whole(path, csv_text(pd.DataFrame(rows), float_format="%.6f"))


def quantiles(cosines: Tensor) -> dict[str, float]:
    """Of any number of values, by linear interpolation; torch's own quantile refuses large inputs."""
    values = np.quantile(cosines.double().numpy(), list(_QUANTILES.values()))
    return dict(zip(_QUANTILES, values.tolist(), strict=True))


# Of a cohort, of photographs, of both --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Measured:
    """The redundancy of a cohort's slides, or of photographs: ``what`` was compared, and why some were left out."""

    name: str
    what: str
    unit: str
    slides: list[Redundancy]
    left_out: list[Note]

    @property
    def pooled(self) -> list[Redundancy]:
        """All patches together, once per kind of rows."""
        return pooled(self.slides, name=f"all {self.unit}s")

    def lines(self) -> list[str]:
        """Medians and quartiles in words."""
        everything = self.pooled
        said = []
        for one in everything:
            near, far = quantiles(one.neighbours), quantiles(one.random)
            said.append(
                f"{one.rows}: cosine to the neighbours' mean {near['median']:.3f} (half of the patches {near['q25']:.3f} to "
                f"{near['q75']:.3f}), to the mean of as many random patches {far['median']:.3f} ({far['q25']:.3f} to {far['q75']:.3f})"
            )
        patches, units = len(everything[0].neighbours), len(self.slides) // len(everything)
        return [*said, f"{counted(patches, 'patch')} with neighbours, {counted(units, self.unit)}"]

    def write(self, folder: str | Path) -> list[Path]:
        """The table and the figure."""
        from gated_srp.reports.redundancy_figure import draw_redundancy

        table = Path(folder) / "redundancy.csv"
        write_table([*self.pooled, *self.slides], table)
        title = f"{self.name}: local redundancy of {self.what}"
        return [table, *draw_redundancy(self.slides, Path(folder) / "redundancy", title=title, unit=self.unit)]


@dataclass(frozen=True, eq=False)
class Together:
    """Slides and photographs, measured alike: the paper's Fig. 1c."""

    slides: Measured
    photographs: Measured

    @property
    def left_out(self) -> list[Note]:
        return [*self.slides.left_out, *self.photographs.left_out]

    def lines(self) -> list[str]:
        """Medians and quartiles in words."""
        return [f"{one.unit}s, {line}" for one in (self.slides, self.photographs) for line in one.lines()]

    def write(self, folder: str | Path) -> list[Path]:
        """The table, and the figure with both on one axis."""
        from gated_srp.reports.redundancy_figure import draw_together

        table, both = Path(folder) / "redundancy.csv", (self.slides, self.photographs)
        write_table(
            [*(all_ for one in both for all_ in one.pooled), *(each for one in both for each in one.slides)], table
        )
        title = f"{self.slides.name} beside the photographs of {self.photographs.name}: local redundancy"
        return [table, *draw_together(self.slides, self.photographs, Path(folder) / "redundancy", title=title)]


def measure_together(
    cohort: str | Path,
    images: str | Path,
    encoder: str,
    *,
    run: str | Path | None = None,
    layer: int = 1,
    at_most: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
    **cutting: Any,
) -> Together:
    """`measure_cohort` and `measure_folder` on one axis, on features and with ``run`` also on tokens after attention ``layer``.

    ``cutting``: weights and size, as `measure_folder` takes them.
    """
    name, files, settings = _files(Path(cohort))
    made_by = open_header(files[0][1], settings).encoder if files else None
    if made_by and not may_be_same(made_by, find_encoder(encoder).name):
        what = f"its features are of {made_by}, but the photographs would be encoded by {encoder}"
        raise UserError(
            what, where=str(cohort), cure=f"Cosines of two encoders cannot be compared: --encoder {made_by}."
        )
    shared: dict[str, Any] = {"layer": layer, "at_most": at_most, "seed": seed, "progress": progress}
    parts = [measure_cohort(cohort, run=one, **shared) for one in ((None,) if run is None else (None, run))]
    slides = Measured(name, "patches", "slide", [one for part in parts for one in part.slides], parts[0].left_out)
    return Together(slides, measure_folder(images, encoder, run=run, **shared, **cutting))


def measure_cohort(
    cohort: str | Path,
    *,
    run: str | Path | None = None,
    layer: int = 1,
    at_most: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Measured:
    """How alike neighbouring patches of slides are, beside random ones: the paper's Fig. 1c.

    Args:
        cohort: a cohort's YAML, or a folder of feature files. Labels are not needed.
        run: a run's folder or a model file: compare its tokens after attention ``layer`` instead of the features.
        at_most: so many slides, evenly chosen.
        seed: of the random patches.
        progress: called after each slide.
    """
    name, files, settings = _files(Path(cohort))
    files = _evenly(files, at_most)
    model = None if run is None else _open_model(Path(run), layer)

    def measure_slide(named: tuple[str, Path]) -> list[Redundancy]:
        slide, path = named
        bag = prepare(path, settings)
        if not bag.graph.neighbour_count.any():
            raise UserError("no patch has a neighbour", where=path)
        kinds = {"features": bag.features}
        if model is not None:
            kinds = attention_tokens(model, bag.features, bag.graph, layer)
        return [measure(slide, rows, bag.graph, what=what, seed=seed) for what, rows in kinds.items()]

    measured, left_out = _measure_each(files, measure_slide, "slides", progress)
    if not measured:
        first = f"The first: {left_out[0]} " if left_out else ""
        cure = f"{first}`gated-srp check` says what is wrong with each."
        raise UserError("no slide can be measured", where=cohort, cure=cure)
    what = "patch features" if run is None else "patch tokens after attention"
    return Measured(name, what, "slide", measured, left_out)


def measure_folder(
    folder: str | Path,
    encoder: str,
    *,
    weights: str | Path | None = None,
    size: int | None = None,
    run: str | Path | None = None,
    layer: int = 1,
    at_most: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Measured:
    """As `measure_cohort`, for ordinary photographs: their patches (side ``size``, else the encoder's) encoded as tiles of slides are.

    ``run``: also the tokens that this model makes of the features, after attention ``layer``.
    """
    files = _evenly(find_photographs(Path(folder)), at_most)
    spec = find_encoder(encoder)
    model = None if run is None else _open_model(Path(run), layer)
    if model is not None and model.in_proj.in_features != spec.width:
        what = f"takes {model.in_proj.in_features} channels, but {encoder} gives {spec.width}"
        raise UserError(what, where=str(run), cure="Name the encoder that the run was trained on.")
    encode_patches = spec.load(None if weights is None else Path(weights)).to(best_device())
    tokens = None if model is None else partial(attention_tokens, model, layer=layer)
    measured, left_out = measure_photographs(
        files, encode_patches, size=size or spec.tile, tokens=tokens, seed=seed, progress=progress
    )
    return Measured(Path(folder).resolve().name, f"patch features of {encoder}", "photograph", measured, left_out)


def _open_model(run: Path, layer: int) -> SlideTransformer:
    """Of a run's folder or a model file; refused where it has no tokens after that layer."""
    model = load_model(run / "model.safetensors" if run.is_dir() else run)
    if not isinstance(model, SlideTransformer):
        what = f"a {type(model).__name__} has no attention layers whose tokens could be measured"
        raise UserError(what, where=str(run))
    _refuse_layer(model, layer)
    return model


def _evenly(found: Sequence[T], at_most: int | None) -> list[T]:
    """At most so many of them, evenly chosen."""
    taken = len(found) if at_most is None else min(at_most, len(found))
    return [found[i * len(found) // taken] for i in range(taken)]


def _measure_each(
    items: Sequence[T], measure_one: Callable[[T], list[Redundancy]], stage: str, progress: Progress
) -> tuple[list[Redundancy], list[Note]]:
    """The redundancy of each, and why some were left out."""
    measured, left_out = list[Redundancy](), []
    for number, item in enumerate(items, 1):
        try:
            measured += measure_one(item)
        except UserError as error:
            left_out.append(Note.of(error))
        progress(Event(stage, number, len(items)))
    return measured, left_out


def _files(cohort: Path) -> tuple[str, list[tuple[str, Path]], Preparation]:
    """Slides with their files: without a table every file of the folder is a slide."""
    if cohort.is_dir():
        found = find_bags(cohort)
        names = [slide_stem(path) for path in found]
        if len(set(names)) < len(names):  # the same slide in several folders
            names = [str(path.relative_to(cohort).with_suffix("")) for path in found]
        return cohort.resolve().name, list(zip(names, found, strict=True)), Preparation()
    config = load_config(cohort)
    settings = replace(preparation(config), features_low=None)  # of two magnifications the fine patches
    if config.table or config.labels:
        return config.name, list(open_cohort(config).matches.found.items()), settings
    return config.name, [(slide_stem(path), path) for path in find_files(config).files], settings


# Tokens after attention -----------------------------------------------------------------------------------------------


def attention_tokens(model: SlideTransformer, features: Tensor, graph: PatchGraph, layer: int) -> dict[str, Tensor]:
    """What attention layer ``layer`` (from 1) adds to each patch's token, (N, C), by name.

    That is W_o of the merged heads: the row that enters the residual sum. Where the layer has a correction it is returned
    twice, for the heads before the correction (y) and after it (z); the run itself uses the corrected one.
    """
    _refuse_layer(model, layer)
    if model.covariates is not None:  # of which only the head, after all layers, knows
        graph = graph.with_covariates(torch.zeros(1, model.covariates.in_features))
    block: Any = model.blocks[layer - 1]
    seen: dict[str, Tensor] = {}

    def keep(module: Any, args: tuple[Any, ...], heads: tuple[Tensor, Tensor]) -> None:
        y, v = heads  # (1, H, L, D)
        patches = slice(1, 1 + graph.num_rows)
        before = module.proj(merge_heads(y))[0, patches]  # (N, C)
        if block.correction is None:
            seen[f"layer {layer}"] = before
            return
        z = block.correction(y, v, args[1])
        seen[f"layer {layer}, before correction"] = before
        seen[f"layer {layer}, corrected"] = module.proj(merge_heads(z))[0, patches]

    handle = block.attn.register_forward_hook(keep)
    try:
        with torch.no_grad():
            model(features.unsqueeze(0), graph)
    finally:
        handle.remove()
    return seen


def _refuse_layer(model: SlideTransformer, layer: int) -> None:
    depth = len(model.blocks)
    if not 1 <= layer < depth:
        what = f"this model has {depth} attention layers, of which 1 to {depth - 1} give every patch a token "
        what += "(the last one computes CLS alone)"
        raise UserError(what, where=f"layer {layer}", cure="Choose one of those.")


# Photographs, cut and encoded as slides are: what the paper compares slides with --------------------------------------


def measure_photographs(
    paths: Sequence[Path],
    encoder: PatchEncoder,
    *,
    size: int,
    tokens: Callable[[Tensor, PatchGraph], dict[str, Tensor]] | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> tuple[list[Redundancy], list[Note]]:
    """The redundancy of each photograph's patch features and of the ``tokens`` made of them, and why some were left out."""
    folder = Path(os.path.commonpath([path.parent for path in paths]))  # below it, names are unique

    def measure_photograph(path: Path) -> list[Redundancy]:
        tiles, corners = cut_photograph(path, size)
        parts = [encode(encoder, tiles[i : i + _BATCH]) for i in range(0, len(tiles), _BATCH)]
        features = torch.from_numpy(np.concatenate(parts))  # (N, D)
        graph = PatchGraph.from_coords(torch.from_numpy(corners), features, stride=size)
        kinds = {"features": features, **(tokens(features, graph) if tokens else {})}
        name = path.relative_to(folder).as_posix()
        return [measure(name, rows, graph, what=what, seed=seed) for what, rows in kinds.items()]

    measured, left_out = _measure_each(paths, measure_photograph, "photographs", progress)
    if not measured:
        raise UserError(f"no photograph can be measured. The first: {left_out[0]}")
    return measured, left_out
