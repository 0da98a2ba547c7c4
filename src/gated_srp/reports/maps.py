"""What a model shows of each patch of a slide: attention, beta, correction, homogeneity, and what the gates change.

Shapes: N patches of the file, L patches that the model sees (a cap leaves some out), H heads.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gated_srp.data.bag import BagHeader
from gated_srp.data.loader import SlideBag
from gated_srp.data.prepared import Preparation, inside_regions, kept_rows, open_header
from gated_srp.errors import Note, UserError, counted
from gated_srp.models import SlideModel, arm_title, model_file
from gated_srp.records import parse_numbers
from gated_srp.srp.module import GatedSRP
from gated_srp.srp.trace import LayerTrace, set_gates, trace
from gated_srp.training.trained import TrainedRun, average, open_slide

SHUT = 0.05  # absolute beta below which a gate does next to nothing; the paper's regimes begin at 0.5
GATES = {"off": 0.0, "projection": 1.0, "reflection": 2.0, "amplification": -1.0}  # what-ifs of heatmap by name
SCORES = (".csv", ".tsv")  # endings of tables with a user's own scores


@dataclass(frozen=True, eq=False)
class Patches:
    """Squares on a slide in level-0 pixels (or microns, where a file has nothing else): top-left corners (L, 2), one side."""

    corners: np.ndarray
    side: float
    header: BagHeader
    rows: np.ndarray  # (L,) their row numbers in the file
    bounds: tuple[int, int] | None = None  # of the image that they lie on, see `SlideInfo`

    @classmethod
    def of(cls, header: BagHeader, rows: np.ndarray | None = None) -> "Patches":
        """All patches of a file, or some rows. Where the side of a patch is unknown, patches are taken to touch."""
        coords = header.coords.double().numpy()
        rows = np.arange(len(coords)) if rows is None else rows
        return cls(coords[rows], float(header.patch_size_level0 or header.stride), header, rows)


@dataclass(frozen=True, eq=False)
class PatchMap:
    """One number per patch, (L,), raw, and on which fixed scale it is shown, so that a map in which nothing happens shows nothing.

    ``signed``: zero is the middle. ``limit``: from -limit or 0 to limit. ``unit``: as multiples of this number, the slide's mean.
    ``regimes``: the numbers are betas. ``clipped``: values below zero (Nystrom's approximation of a small weight) count as zero.
    """

    name: str  # for file names: attention_layer4
    title: str
    values: np.ndarray
    signed: bool = False
    limit: float | None = None
    unit: float | None = None
    regimes: bool = False
    clipped: bool = False
    shut: bool = False  # the gate behind it does next to nothing

    @property
    def shown(self) -> np.ndarray:
        return self.values.clip(0) if self.clipped else self.values


@dataclass(frozen=True, eq=False)
class SlideView:
    """What one run shows of one slide. ``layers`` as `trace` returns them."""

    run: str
    patches: Patches
    layers: Sequence[LayerTrace]
    trace_ungated: Callable[[], Sequence[LayerTrace]] | None  # None: the model has no gates
    homogeneity: np.ndarray  # (L,)
    signed: tuple[bool, ...]  # layers whose attention is a difference of two
    limits: tuple[float, ...]  # of each layer: the size that its beta cannot exceed
    warnings: tuple[Note, ...]  # about the file
    prediction: str = ""  # in words
    arm: str = "model"

    @cached_property
    def ungated(self) -> Sequence[LayerTrace] | None:
        """The layers with every gate at zero. Computed on first use: it costs a second forward pass."""
        return None if self.trace_ungated is None else self.trace_ungated()


def view_slide(
    run: Path | TrainedRun,
    file: Path,
    *,
    known: Mapping[str, Any] = MappingProxyType({}),
    reading: Preparation = Preparation(),  # noqa: B008 - frozen
    layer: int | None = None,
    gates: str | None = None,
    every: bool = False,
    model: SlideModel | None = None,
    force: bool = False,
) -> SlideView:
    """Run the model of ``run`` (a folder, or a model file) on a feature file and keep what it shows.

    A file that does not fit the model is refused as `gated_srp.predict` does, and ``force`` means the same. ``reading``: how to
    read the file, where that is not plain.
    ``known``: arguments of `open_slide` from `known_of`: the patient's other slides, of whose bag this slide's share is shown; covariates.
    ``layer``: whose attention is kept, from 1; None: the last one's. Attention of all layers would need more memory than the model.
    ``every``: attention of all of them all the same. ``model``: the run's, where it is loaded already.
    ``gates``: one of `GATES`, to which every gate is set instead of what it learned.
    """
    trained = run_of_slides(run)
    bag = open_slide(trained, file, reading=reading, force=force, **known)
    model = trained.load() if model is None else model
    return view_bag(trained, bag, file, model=model, reading=reading, layer=layer, gates=gates, every=every)


def run_of_slides(run: Path | TrainedRun) -> TrainedRun:
    """A run whose maps can be drawn: one of images is refused."""
    trained = TrainedRun.open(run)
    if trained.images is None:
        return trained
    cure = "`gated_srp.trace` returns its attention and beta per patch, in Python."
    raise UserError("a model of images; maps are drawn of slides", where=trained.path, cure=cure)


def view_bag(
    trained: TrainedRun,
    bag: SlideBag,
    file: Path,
    *,
    model: SlideModel,
    reading: Preparation = Preparation(),  # noqa: B008 - frozen
    layer: int | None = None,
    gates: str | None = None,
    every: bool = False,
) -> SlideView:
    """The same of a slide that `open_slide` has opened, and of the run's model."""
    run, settings = trained.path, trained.preparation(reading)
    header = open_header(file, settings)
    own, which = rows_of(bag, file)
    if bag.parts and settings.cap:
        settings = replace(settings, cap=own.stop - own.start)  # its share
    rows = kept_rows(header.coords, settings, inside_regions(header, settings))
    patches = Patches.of(header, None if rows is None else rows.numpy())
    traced = [m for m in model.modules() if hasattr(m, "correction") and hasattr(m, "cls_attention")]
    if layer is not None and layer > len(traced):
        raise UserError(f"{run} has layers 1 to {len(traced)}", where=f"layer {layer}")
    mapped = range(len(traced)) if every else ((layer or len(traced)) - 1,)
    gated = any(isinstance(getattr(m, "correction", None), GatedSRP) for m in model.modules())
    with nullcontext() if gates is None else _set_to(gates, model, gated, run):
        logits, layers = _trace(model, bag, mapped, own)
    ungated = partial(_trace_ungated, model, bag, mapped, own) if gated else None
    signed = tuple(getattr(getattr(m, "attn", None), "signed", False) for m in traced)
    limits = tuple(m.correction.coefficient.largest if isinstance(m.correction, GatedSRP) else 0.0 for m in traced)
    arm = str(trained.card["settings"].get("arm", "model"))
    label = f"{arm_title(arm)}, {model_file(run).resolve().parent.name}"
    label += f", gates set to {gates}" if gates else ""
    homogeneity = bag.graph.homogeneity.numpy()[own]
    notes = [note for note in bag.warnings if note.kind != "cap"]  # the cap is as in training
    if bag.graph.scales > 1:
        notes.append(Note("note", "scales", "maps show the fine patches; the model saw coarse ones beside them"))
    warnings = tuple(replace(note, where=note.where or (str(file),)) for note in notes)
    answer = _answer(trained, logits) + which
    return SlideView(label, patches, layers, ungated, homogeneity, signed, limits, warnings, answer, arm)


def _set_to(gates: str, model: nn.Module, gated: bool, run: Path) -> AbstractContextManager[None]:
    if gates not in GATES:
        raise UserError(f"expected one of {', '.join(GATES)}", where=f"--gates {gates}")
    if not gated:
        raise UserError("this model has no gates to set", where=run, cure="Leave out --gates.")
    return set_gates(model, GATES[gates])


def _answer(run: TrainedRun, logits: Tensor) -> str:
    """The prediction in words, ``predicted tumour``; nothing where the card does not say what the outputs mean."""
    if "task" not in run.card:
        return ""
    answers = average([run], [logits]).iloc[0]
    name, value = str(answers.index[0]), answers.iloc[0]
    return f"{name.replace('_', ' ')} {value if isinstance(value, str) else format(value, '.3g')}"


def rows_of(bag: SlideBag, file: Path) -> tuple[slice, str]:
    """The rows of one slide in a patient's bag, and which of its slides that is, in words; all rows of a slide's own bag."""
    start = 0
    for number, (_, path, rows) in enumerate(bag.parts, 1):
        if path == file:
            return slice(start, start + rows), f" (patient; slide {number} of {len(bag.parts)})"
        start += rows
    return slice(0, bag.graph.lengths[0]), ""  # of two magnifications the fine patches


def _trace(model: nn.Module, bag: SlideBag, mapped: Container[int], own: slice) -> tuple[Tensor, Sequence[LayerTrace]]:
    shows = any(hasattr(part, "cls_attention") for part in model.modules())  # else there is nothing to trace
    with torch.no_grad(), trace(model, attention=mapped) if shows else nullcontext(()) as seen:
        logits = model(bag.features[None], bag.graph)
    found = ((layer.beta, layer.correction, layer.cls_attention) for layer in seen)  # (H, N) each
    # A last layer that reads CLS alone has no rows of patches, (H, 0): nothing of it can be mapped.
    return logits, [
        LayerTrace(*(None if one is None or not one.shape[-1] else one[..., own] for one in parts)) for parts in found
    ]


def _trace_ungated(model: nn.Module, bag: SlideBag, mapped: Container[int], own: slice) -> Sequence[LayerTrace]:
    with set_gates(model, 0.0):
        return _trace(model, bag, mapped, own)[1]


# Maps of a view -------------------------------------------------------------------------------------------------------


def attention(view: SlideView, layer: int | None, head: int | None) -> list[PatchMap]:
    """From CLS to the patches: last layer, mean over heads, unless others are named. A signed one also as its positive part."""
    number, seen = _layers_with(view, layer, [one.cls_attention for one in view.layers], "attention")[-1]
    values = _head(seen, head)
    name, title = _named("attention", number, head)
    if view.signed[number]:
        unit = float(np.abs(values).mean())
        positive = values.clip(0)
        return [
            PatchMap(name, f"{title}, signed", values, signed=True, unit=unit),
            PatchMap(f"{name}_positive", f"{title}, positive part", positive, unit=float(positive.mean())),
        ]
    return [PatchMap(name, title, values, unit=float(values.clip(0).mean()), clipped=True)]


def beta(view: SlideView, layer: int | None, head: int | None) -> list[PatchMap]:
    """Of every layer that has a gate, or of one."""
    found = _layers_with(view, layer, [one.beta for one in view.layers], "beta")
    return [
        PatchMap(*_named("beta", i, head), _head(seen, head), signed=True, limit=view.limits[i], regimes=True)
        for i, seen in found
    ]


def _is_shut(layer: LayerTrace) -> bool:
    return layer.beta is not None and float(layer.beta.abs().max()) < SHUT


def correction(view: SlideView, layer: int | None, head: int | None) -> list[PatchMap]:
    """Length of what was removed, of every layer that has a gate, or of one."""
    found = _layers_with(view, layer, [one.correction for one in view.layers], "correction")
    lengths = [(_named("correction", i, head), _head(seen, head), _is_shut(view.layers[i])) for i, seen in found]
    return [PatchMap(*named, values, unit=float(values.mean()), shut=shut) for named, values, shut in lengths]


def homogeneity(view: SlideView, layer: int | None, head: int | None) -> list[PatchMap]:
    return [PatchMap("homogeneity", "homogeneity: mean cosine to the neighbours", view.homogeneity, limit=1.0)]


def change(view: SlideView, layer: int | None, head: int | None) -> list[PatchMap]:
    """Attention minus attention with every gate at zero: above zero, the correction drew attention to the patch."""
    if view.ungated is None:
        raise UserError(
            "this model has no gates, so nothing changes without them", where=view.run, cure="Choose another --value."
        )
    number, seen = _layers_with(view, layer, [one.cls_attention for one in view.layers], "attention")[-1]
    before = view.ungated[number].cls_attention
    assert before is not None
    name, title = _named("change", number, head)
    title += ":\nattention gained (+) or lost (−) by the gates"
    unit = float(_head(before, head).clip(0).mean())
    return [PatchMap(name, title, _head(seen - before, head), signed=True, unit=unit)]


def spread_over(one: PatchMap, rows: np.ndarray, count: int) -> PatchMap:
    """A map of some rows as one of all ``count`` patches of the file; NaN where the model did not look."""
    values = np.full(count, np.nan)
    values[rows] = one.values
    return replace(one, values=values)


def difference(first: PatchMap, second: PatchMap, *, title: str) -> PatchMap:
    """The second attention minus the first, each in multiples of its own mean on the slide: both over the same patches.

    >>> one, two = (PatchMap("attention", "", np.array(values)) for values in ([1.0, 3.0], [30.0, 10.0]))
    >>> difference(one, two, title="two minus one").values
    array([ 1., -1.])
    """
    mine, base = (one.values / np.nanmean(one.values) for one in (second, first))
    return PatchMap("difference", title, mine - base, signed=True, unit=1.0)


VALUES: dict[str, Callable[[SlideView, int | None, int | None], list[PatchMap]]] = {
    "attention": attention,
    "beta": beta,
    "homogeneity": homogeneity,
    "correction": correction,
    "change": change,
}


def maps_of(view: SlideView, value: str, *, layer: int | None = None, head: int | None = None) -> list[PatchMap]:
    """The maps of a value of `VALUES`, or of a table of a user's own scores."""
    if value in VALUES:
        return VALUES[value](view, layer, head)
    if Path(value).suffix.lower() in SCORES:
        return [read_scores(Path(value), view.patches)]
    raise UserError(
        f"expected one of {', '.join(VALUES)}, or a CSV file with one score per patch.", where=f"--value {value}"
    )


def all_values(view: SlideView) -> dict[str, np.ndarray]:
    """Every map that the model has, by name, mean over heads: for tables."""
    found: dict[str, np.ndarray] = {}
    for make in VALUES.values():
        try:
            found |= {one.name: one.values for one in make(view, None, None)}
        except UserError:
            continue  # this model has no such value
    return found


def _layers_with(view: SlideView, layer: int | None, found: list[Tensor | None], what: str) -> list[tuple[int, Tensor]]:
    """The layers that have a value; ``layer`` counts from 1."""
    having = [(i, seen) for i, seen in enumerate(found) if seen is not None]
    chosen = [(i, seen) for i, seen in having if layer is None or i == layer - 1]
    if not chosen:
        listed = ", ".join(str(i + 1) for i, _ in having)
        where = "in no layer" if not having else f"in layers {listed}, not in {layer}"
        raise UserError(f"this model has {what} {where}", where=view.run, cure="Choose another --layer or --value.")
    return chosen


def _head(seen: Tensor, head: int | None) -> np.ndarray:
    """(H, L) -> (L,): the mean over heads, or one head, counted from 1."""
    if head is not None and not 1 <= head <= len(seen):
        raise UserError(f"this layer has heads 1 to {len(seen)}", where=f"head {head}")
    values: np.ndarray = (seen.float().mean(0) if head is None else seen[head - 1].float()).numpy()
    return values


def _named(what: str, layer: int, head: int | None) -> tuple[str, str]:
    which = "mean over heads" if head is None else f"head {head}"
    suffix = "" if head is None else f"_head{head}"
    return f"{what}_layer{layer + 1}{suffix}", f"{what}, layer {layer + 1}, {which}"


# A user's own scores --------------------------------------------------------------------------------------------------


def read_scores(path: Path, patches: Patches) -> PatchMap:
    """A table with one row per patch in the file's order, or with columns x and y that say which patch is meant."""
    import pandas as pd

    try:
        separator = "\t" if path.suffix.lower() == ".tsv" else ","
        table = pd.read_csv(path, sep=separator, encoding="utf-8-sig", float_precision="round_trip")
    except (OSError, ValueError) as error:
        cure = "Expected a CSV with one score per patch."
        raise UserError(f"cannot be read as a table ({error})", where=path, cure=cure) from None
    numeric = [c for c in table.select_dtypes("number") if str(c).lower() not in ("x", "y", "row", "patch", "index")]
    named = [c for c in numeric if str(c).lower() in ("score", "value", "attention", "prob", "probability")]
    if len(named or numeric) != 1:
        raise UserError(
            f"expected one column of scores, found {', '.join(map(str, numeric)) or 'none'}",
            where=path,
            cure="Name the right one `score`.",
        )
    column = (named or numeric)[0]
    given = table[column].to_numpy(float)
    places = {str(c).lower(): c for c in table}
    if {"x", "y"} <= set(places):
        corners = table[[places["x"], places["y"]]].apply(parse_numbers)
        if corners.isna().to_numpy().any():
            row = int(corners.isna().any(axis=1).to_numpy().argmax())
            what = f"row {row + 2} has no x or y that is a number"
            raise UserError(what, where=path, cure="Expected top-left corners as in the feature file's coords.")
        values = _by_place(path, corners.to_numpy(float), given, patches)
    elif len(table) == patches.header.shape[0]:
        values = given[patches.rows]
    else:
        raise UserError(
            f"{counted(len(table), 'row')} for {counted(patches.header.shape[0], 'patch')}",
            where=path,
            cure="Expected one row per patch in the file's order, or columns x and y with the patches' top-left corners.",
        )
    signed, most = bool(np.nanmin(values) < 0), float(np.nanmax(np.abs(values)))
    return PatchMap(
        str(column), f"{column} ({path.name})", values, signed=signed, limit=max(most, 1.0 if most else 0.0)
    )


def _by_place(path: Path, places: np.ndarray, values: np.ndarray, patches: Patches) -> np.ndarray:
    known = {tuple(place): value for place, value in zip(places.tolist(), values.tolist(), strict=True)}
    found = np.array([known.get(tuple(corner), np.nan) for corner in patches.corners.tolist()])
    if np.isnan(found).all():
        raise UserError(
            f"none of its x and y is a patch of {patches.header.path}",
            where=path,
            cure="Expected top-left corners as in that file's coords.",
        )
    return found
