"""How alike a patch is to its neighbours (the paper's Fig. 1c): its cosine to their mean, beside the same for random patches.

Measured on features, on tokens after attention and on photographs; a table and a figure.
Shapes: N patches, M of them with neighbours, E neighbour entries, S side of a patch,
L rows (CLS first, square padding last), H heads, D head width, C channels.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from gated_srp.config.cohort import find_files, open_cohort, preparation
from gated_srp.config.load import load_config
from gated_srp.data.files.siblings import find_bags
from gated_srp.data.matching import slide_stem
from gated_srp.data.prepared import Preparation, prepare
from gated_srp.errors import Note, UserError, counted
from gated_srp.files import write_whole
from gated_srp.models import load_model
from gated_srp.models.attention import merge_heads
from gated_srp.models.slide import SlideTransformer
from gated_srp.progress import Event, Progress, silent
from gated_srp.reports.figures import COLOURS, save, tidy
from gated_srp.slides.encoders import PatchEncoder, find_encoder
from gated_srp.slides.extract import best_device, encode
from gated_srp.slides.tiles import lattice
from gated_srp.srp.graph import PatchGraph
from gated_srp.srp.projection import along, neighbour_mean
from gated_srp.srp.projection import unit as unit_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")
POOLED = "all slides"
PHOTOGRAPHS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_NEAR, _FAR = (COLOURS[0], COLOURS[2]), (COLOURS[1], COLOURS[3])
_QUANTILES = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}
_BINS = 80
_BATCH = 16
_FEWEST = 4  # least patches of a photograph: there must be neighbours, and others to compare with


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
    write_whole(path, pd.DataFrame(rows).to_csv(index=False, lineterminator="\n", float_format="%.6f"))


def quantiles(cosines: Tensor) -> dict[str, float]:
    """Of any number of values, by linear interpolation; torch's own quantile refuses large inputs."""
    values = np.quantile(cosines.double().numpy(), list(_QUANTILES.values()))
    return dict(zip(_QUANTILES, values.tolist(), strict=True))


# The figure -----------------------------------------------------------------------------------------------------------


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
        table = Path(folder) / "redundancy.csv"
        write_table([*self.pooled, *self.slides], table)
        title = f"{self.name}: local redundancy of {self.what}"
        return [table, *draw_redundancy(self.slides, Path(folder) / "redundancy", title=title, unit=self.unit)]


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
    model = None if run is None else load_model(Path(run) / "model.safetensors" if Path(run).is_dir() else Path(run))
    if model is not None and not isinstance(model, SlideTransformer):
        raise UserError(
            f"a {type(model).__name__} has no attention layers whose tokens could be measured", where=str(run)
        )
    if model is not None:
        _refuse_layer(model, layer)

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
    at_most: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Measured:
    """As `measure_cohort`, for ordinary photographs: their patches (side ``size``, else the encoder's) encoded as tiles of slides are."""
    files = _evenly(find_photographs(Path(folder)), at_most)
    spec = find_encoder(encoder)
    model = spec.load(None if weights is None else Path(weights)).to(best_device())
    measured, left_out = measure_photographs(files, model, size=size or spec.tile, seed=seed, progress=progress)
    return Measured(Path(folder).resolve().name, f"patch features of {encoder}", "photograph", measured, left_out)


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
    if config.table or config.labels:
        return config.name, list(open_cohort(config).matches.found.items()), preparation(config)
    return config.name, [(slide_stem(path), path) for path in find_files(config).files], preparation(config)


def draw_redundancy(slides: Sequence[Redundancy], stem: Path, *, title: str, unit: str = "slide") -> list[Path]:
    """Distribution over all patches (left) and slide by slide (right); ``unit``: what to call a slide, where these are none."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.25, 1])
    _draw_pooled(left, slides, unit)
    _draw_slides(right, slides, unit)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return save(figure, stem, title=title)


def _draw_pooled(axes: "Axes", slides: Sequence[Redundancy], unit: str) -> None:
    everything = pooled(slides)
    low = min(float(min(one.neighbours.min(), one.random.min())) for one in everything)
    edges = torch.linspace(max(-1.0, low - 0.02), 1.0, _BINS + 1).tolist()
    for place, one in enumerate(everything):
        near, far = _NEAR[place % 2], _FAR[place % 2]
        name = "" if len(everything) == 1 else f"{one.rows}: "
        for cosines, colour, style, partners in (
            (one.neighbours, near, "-", "neighbours"),
            (one.random, far, "--", "random patches"),
        ):
            shared: dict[str, Any] = {"bins": edges, "density": True, "color": colour}
            axes.hist(cosines.numpy(), histtype="stepfilled", alpha=0.18, **shared)
            median = float(cosines.median())
            label = f"{name}{partners} (median {median:.2f})"
            axes.hist(cosines.numpy(), histtype="step", linestyle=style, linewidth=1.6, label=label, **shared)
            axes.axvline(median, color=colour, linestyle=":", linewidth=1.2)
    count, number = len(everything[0].neighbours), len({one.slide for one in slides})
    title = f"All patches together ({counted(count, 'patch')}, {counted(number, unit)})"
    what = f"cosine of a patch to the mean of its neighbours,\nor of as many random patches of its {unit}"
    tidy(axes, x=what, y="density of patches", title=title)


def _draw_slides(axes: "Axes", slides: Sequence[Redundancy], unit: str) -> None:
    """Each slide's median with its quartiles, slides ordered by the median of the first kind of rows."""
    kinds = list(dict.fromkeys(one.rows for one in slides))
    first = {one.slide: float(one.neighbours.median()) for one in slides if one.rows == kinds[0]}
    rank = {slide: place for place, slide in enumerate(sorted(first, key=lambda slide: (first[slide], slide)), 1)}
    size = max(1.5, min(5.0, 200 / len(rank)))
    for place, kind in enumerate(kinds):
        same = [one for one in slides if one.rows == kind]
        ranks = [rank[one.slide] for one in same]
        for partners, colour, marker in (("neighbours", _NEAR[place % 2], "o"), ("random", _FAR[place % 2], "s")):
            spreads = [quantiles(getattr(one, partners)) for one in same]
            low, middle, high = ([spread[name] for spread in spreads] for name in ("q25", "median", "q75"))
            axes.vlines(ranks, low, high, colors=colour, alpha=0.45, linewidth=1)
            axes.plot(ranks, middle, marker=marker, color=colour, markersize=size, linestyle="none")
    title = f"{unit.capitalize()} by {unit} (median and quartiles)"
    tidy(axes, x=f"{unit}s, ordered by their median", y="cosine", title=title, whole_numbers=True)


# Tokens after attention -----------------------------------------------------------------------------------------------


def attention_tokens(model: SlideTransformer, features: Tensor, graph: PatchGraph, layer: int) -> dict[str, Tensor]:
    """What attention layer ``layer`` (from 1) adds to each patch's token, (N, C), by name.

    That is W_o of the merged heads: the row that enters the residual sum. Where the layer has a correction it is returned
    twice, for the heads before the correction (y) and after it (z); the run itself uses the corrected one.
    """
    _refuse_layer(model, layer)
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


def find_photographs(folder: Path) -> list[Path]:
    """Image files of a folder and those below it."""
    if not folder.is_dir():
        cure = f"Expected a folder of photographs ({', '.join(PHOTOGRAPHS)})."
        raise UserError("no such folder", where=folder, cure=cure)
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in PHOTOGRAPHS and not p.name.startswith("."))
    if not found:
        what = f"no photographs (endings {', '.join(PHOTOGRAPHS)})"
        raise UserError(what, where=folder, cure="Point at the folder that has them.")
    return found


def cut_photograph(path: Path, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Patches that do not overlap, (N, S, S, 3) bytes, and their corners (N, 2)."""
    try:
        with Image.open(path) as opened:
            pixels = np.asarray(opened.convert("RGB"))
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise UserError(f"cannot be read as a picture ({error}).", where=path) from None
    corners = lattice((pixels.shape[1], pixels.shape[0]), size, size)
    if len(corners) < _FEWEST:
        given = f"{pixels.shape[1]} x {pixels.shape[0]} pixels give {counted(len(corners), 'patch')} of {size}"
        cure = "Use larger photographs, or a smaller --size."
        raise UserError(f"{given}, fewer than {_FEWEST}", where=path, cure=cure)
    return np.stack([pixels[y : y + size, x : x + size] for x, y in corners.tolist()]), corners


def measure_photographs(
    paths: Sequence[Path], encoder: PatchEncoder, *, size: int, seed: int = 0, progress: Progress = silent
) -> tuple[list[Redundancy], list[Note]]:
    """The redundancy of each photograph's patch features, and why some were left out."""
    folder = Path(os.path.commonpath([path.parent for path in paths]))  # below it, names are unique

    def measure_photograph(path: Path) -> list[Redundancy]:
        tiles, corners = cut_photograph(path, size)
        parts = [encode(encoder, tiles[i : i + _BATCH]) for i in range(0, len(tiles), _BATCH)]
        features = torch.from_numpy(np.concatenate(parts))  # (N, D)
        graph = PatchGraph.from_coords(torch.from_numpy(corners), stride=size)
        return [measure(path.relative_to(folder).as_posix(), features, graph, seed=seed)]

    measured, left_out = _measure_each(paths, measure_photograph, "photographs", progress)
    if not measured:
        raise UserError(f"no photograph can be measured. The first: {left_out[0]}")
    return measured, left_out
