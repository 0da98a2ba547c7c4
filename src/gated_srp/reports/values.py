"""What a model shows of each patch of a slide: attention, beta, correction, homogeneity, and what the gates changed.

Shapes: N patches of the file, L patches that the model sees (a cap leaves some out), H heads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gated_srp.data.bag import BagHeader
from gated_srp.data.files.formats import read_header
from gated_srp.data.prepared import Preparation, PreparedBag, kept_rows, prepare
from gated_srp.errors import UserError
from gated_srp.models import load_card, load_model, model_file
from gated_srp.models.differential import DifferentialAttention
from gated_srp.srp.module import GatedSRP
from gated_srp.srp.trace import LayerTrace, trace

BAGS = ("order", "window", "lattice", "cap", "dtype")  # of a model's card: how its bags were made


@dataclass(frozen=True, eq=False)
class Patches:
    """Squares on a slide, in level-0 pixels (or microns, where a file has nothing else): corners (L, 2), one side."""

    corners: np.ndarray
    side: float
    header: BagHeader
    rows: np.ndarray  # (L,) which rows of the file they are


@dataclass(frozen=True, eq=False)
class PatchMap:
    """A number for each patch, (L,), raw. ``signed``: zero is the middle; ``regimes``: the numbers are betas.

    ``clipped``: what lies below zero (Nystrom's approximation of a small weight) is shown as zero.
    """

    name: str  # for files: attention_layer4
    title: str
    values: np.ndarray
    signed: bool = False
    regimes: bool = False
    clipped: bool = False

    @property
    def shown(self) -> np.ndarray:
        return self.values.clip(0) if self.clipped else self.values


@dataclass(frozen=True, eq=False)
class View:
    """One run looking at one slide. ``layers`` as `trace` gives them, ``idle`` the same with every gate at zero."""

    run: str
    patches: Patches
    layers: Sequence[LayerTrace]
    look_idle: Callable[[], Sequence[LayerTrace]] | None  # None: the model has no gates
    homogeneity: np.ndarray  # (L,)
    signed: tuple[bool, ...]  # layers whose attention is a difference of two

    @cached_property
    def idle(self) -> Sequence[LayerTrace] | None:
        """Looked at when first asked for: it costs as much as the slide itself."""
        return None if self.look_idle is None else self.look_idle()


def look(run: Path, file: Path, *, stride: float | None = None, layer: int | None = None) -> View:
    """Run the model of ``run`` (a folder, or a model file) on a feature file and keep what it shows.

    ``layer``: whose attention is kept, from 1; None: the last one's. Maps of all would take more memory than the model.
    """
    path = model_file(run)
    card = load_card(path)
    if "images" in card:
        raise UserError(
            f"{run}: a model of images; maps are drawn of slides. `gated_srp.trace` gives its attention and beta by patch, in Python."
        )
    bag, patches = open_patches(file, card, stride=stride)
    width = card["settings"]["in_dim"]
    if bag.features.shape[1] != width:
        raise UserError(
            f"{file}: {bag.features.shape[1]} channels, but {run} was trained on {width} of {card.get('encoder') or 'its encoder'}. "
            "Point at features of the same encoder."
        )
    model: nn.Module = load_model(path)
    watched = [m for m in model.modules() if hasattr(m, "correction") and hasattr(m, "cls_attention")]
    if layer is not None and layer > len(watched):
        raise UserError(f"--layer {layer}: {run} has layers 1 to {len(watched)}.")
    mapped = (layer or len(watched)) - 1
    layers = _trace(model, bag, mapped)
    gated = any(isinstance(getattr(m, "correction", None), GatedSRP) for m in model.modules())
    idle = partial(_trace_idle, model, bag, mapped) if gated else None
    signed = tuple(isinstance(getattr(m, "attn", None), DifferentialAttention) for m in watched)
    return View(_label(run, card), patches, layers, idle, bag.graph.homogeneity.numpy(), signed)


def open_patches(file: Path, card: Mapping[str, Any], *, stride: float | None = None) -> tuple[PreparedBag, Patches]:
    """The bag as the model of a card sees it, and where its patches lie."""
    made = {key: card[key] for key in BAGS if key in card}
    settings = replace(Preparation(), **made, encoder=card.get("encoder"), stride=stride)
    bag = prepare(file, settings)
    header = read_header(file, **settings.reading)
    rows = kept_rows(header.coords, settings)
    return bag, patches_of(header, None if rows is None else rows.numpy())


def patches_of(header: BagHeader, rows: np.ndarray | None = None) -> Patches:
    """All patches of a file, or some rows of it. Where the side is not known the patches are taken to touch."""
    coords = header.coords.double().numpy()
    rows = np.arange(len(coords)) if rows is None else rows
    return Patches(coords[rows], float(header.patch_size_level0 or header.stride), header, rows)


@contextmanager
def without_corrections(model: nn.Module) -> Iterator[None]:
    """The model as if every beta were zero, for the length of a ``with``."""
    held = [(m, m.correction) for m in model.modules() if isinstance(getattr(m, "correction", None), GatedSRP)]
    for module, _ in held:
        module.correction = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, correction in held:
            module.correction = correction


# Maps of a view -------------------------------------------------------------------------------------------------------


def attention(view: View, layer: int | None, head: int | None) -> list[PatchMap]:
    """Of CLS to the patches: the last layer, mean over heads, unless others are named. A difference also as its positive part."""
    number, seen = _layer(view, layer, [one.cls_attention for one in view.layers], "attention")
    values = _head(seen, head)
    name, title = _named("attention", number, head)
    if view.signed[number]:
        return [
            PatchMap(name, f"{title}, signed", values, signed=True),
            PatchMap(f"{name}_positive", f"{title}, positive part", values.clip(0)),
        ]
    return [PatchMap(name, title, values, clipped=True)]


def beta(view: View, layer: int | None, head: int | None) -> list[PatchMap]:
    """Of every layer that has a gate, or of one."""
    found = _each_layer(view, layer, [one.beta for one in view.layers], "beta")
    return [PatchMap(*_named("beta", i, head), _head(seen, head), signed=True, regimes=True) for i, seen in found]


def correction(view: View, layer: int | None, head: int | None) -> list[PatchMap]:
    """Length of what was removed, of every layer that has a gate, or of one."""
    found = _each_layer(view, layer, [one.correction for one in view.layers], "correction")
    return [PatchMap(*_named("correction", i, head), _head(seen, head)) for i, seen in found]


def homogeneity(view: View, layer: int | None, head: int | None) -> list[PatchMap]:
    return [PatchMap("homogeneity", "homogeneity: mean cosine to the neighbours", view.homogeneity)]


def change(view: View, layer: int | None, head: int | None) -> list[PatchMap]:
    """Attention as the model is, less attention with every gate at zero: above zero the correction drew attention here."""
    if view.idle is None:
        raise UserError(
            f"{view.run}: this model has no gates, so nothing changes without them. Choose another --value."
        )
    number, seen = _layer(view, layer, [one.cls_attention for one in view.layers], "attention")
    before = view.idle[number].cls_attention
    assert before is not None
    name, title = _named("change", number, head)
    return [
        PatchMap(
            name, f"{title}:\nattention gained (+) or lost (−) by the gates", _head(seen - before, head), signed=True
        )
    ]


VALUES: dict[str, Callable[[View, int | None, int | None], list[PatchMap]]] = {
    "attention": attention,
    "beta": beta,
    "homogeneity": homogeneity,
    "correction": correction,
    "change": change,
}


def all_values(view: View) -> dict[str, np.ndarray]:
    """Every map of a view that exists, by name, mean over heads: for tables."""
    found: dict[str, np.ndarray] = {}
    for make in VALUES.values():
        try:
            found |= {one.name: one.values for one in make(view, None, None)}
        except UserError:
            continue  # this model has no such thing
    return found


def maps_of(view: View, value: str, *, layer: int | None = None, head: int | None = None) -> list[PatchMap]:
    """By the name of a value, or from a CSV of one's own scores."""
    if value in VALUES:
        return VALUES[value](view, layer, head)
    if Path(value).suffix.lower() in (".csv", ".tsv"):
        return [scores(Path(value), view.patches)]
    raise UserError(f"--value {value}: expected one of {', '.join(VALUES)}, or a CSV file with a score a patch.")


def scores(path: Path, patches: Patches) -> PatchMap:
    """Anybody's scores: a row a patch in the file's order, or columns x and y that say which patch is meant."""
    import pandas as pd

    try:
        table = pd.read_csv(path, sep="\t" if path.suffix.lower() == ".tsv" else ",", encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as a table ({error}). Expected a CSV with a score a patch.") from None
    numeric = [c for c in table.select_dtypes("number") if str(c).lower() not in ("x", "y", "row", "patch", "index")]
    named = [c for c in numeric if str(c).lower() in ("score", "value", "attention", "prob", "probability")]
    if len(named or numeric) != 1:
        raise UserError(
            f"{path}: expected one column of scores, found {', '.join(map(str, numeric)) or 'none'}. Name the right one `score`."
        )
    column = (named or numeric)[0]
    places = {str(c).lower(): c for c in table}
    if {"x", "y"} <= set(places):
        values = _by_place(
            path, table[[places["x"], places["y"]]].to_numpy(float), table[column].to_numpy(float), patches
        )
    elif len(table) == patches.header.shape[0]:
        values = table[column].to_numpy(float)[patches.rows]
    else:
        raise UserError(
            f"{path}: {len(table)} rows for {patches.header.shape[0]} patches. Expected a row a patch in the file's order, or "
            "columns x and y with the patches' top-left corners."
        )
    return PatchMap(str(column), f"{column} ({path.name})", values, signed=bool(np.nanmin(values) < 0))


def _by_place(path: Path, places: np.ndarray, values: np.ndarray, patches: Patches) -> np.ndarray:
    known = {tuple(place): value for place, value in zip(places.tolist(), values.tolist(), strict=True)}
    found = np.array([known.get(tuple(corner), np.nan) for corner in patches.corners.tolist()])
    if np.isnan(found).all():
        raise UserError(
            f"{path}: none of its x and y is a patch of {patches.header.path}. Expected top-left corners as in that file's coords."
        )
    return found


def _trace(model: nn.Module, bag: PreparedBag, mapped: int) -> Sequence[LayerTrace]:
    with torch.no_grad(), trace(model, attention=(mapped,)) as seen:
        model(bag.features[None], bag.graph)
    return seen


def _trace_idle(model: nn.Module, bag: PreparedBag, mapped: int) -> Sequence[LayerTrace]:
    with without_corrections(model):
        return _trace(model, bag, mapped)


def _label(run: Path, card: Mapping[str, Any]) -> str:
    """The arm, and the run's folder where that says more."""
    arm = str(card["settings"].get("arm", "model"))
    folder = run.resolve().name if run.is_dir() else run.resolve().parent.name
    return f"{arm}, {folder}"


def _layer(view: View, layer: int | None, found: list[Tensor | None], what: str) -> tuple[int, Tensor]:
    return _each_layer(view, layer, found, what)[-1]


def _each_layer(view: View, layer: int | None, found: list[Tensor | None], what: str) -> list[tuple[int, Tensor]]:
    """The layers that have it; ``layer`` counts from 1."""
    having = [(i, seen) for i, seen in enumerate(found) if seen is not None]
    chosen = [(i, seen) for i, seen in having if layer is None or i == layer - 1]
    if not chosen:
        listed = ", ".join(str(i + 1) for i, _ in having)
        where = "in no layer" if not having else f"in layers {listed}, not in {layer}"
        raise UserError(f"{view.run}: this model has {what} {where}. Choose another --layer or --value.")
    return chosen


def _head(seen: Tensor, head: int | None) -> np.ndarray:
    """(H, L) -> (L,): the mean over heads, or one head, counted from 1."""
    if head is None:
        values: np.ndarray = seen.float().mean(0).numpy()
        return values
    if not 1 <= head <= len(seen):
        raise UserError(f"--head {head}: this layer has heads 1 to {len(seen)}.")
    one: np.ndarray = seen[head - 1].float().numpy()
    return one


def _named(what: str, layer: int, head: int | None) -> tuple[str, str]:
    which = "mean over heads" if head is None else f"head {head}"
    suffix = "" if head is None else f"_head{head}"
    return f"{what}_layer{layer + 1}{suffix}", f"{what}, layer {layer + 1}, {which}"
