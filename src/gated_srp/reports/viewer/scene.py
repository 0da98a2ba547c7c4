"""What the viewer shows of one slide: its patches, the layers of each run as colours and numbers, the answers.

Shapes: N patches of the file, L of them that a model sees.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gated_srp.data.annotations import NOTHING, Annotations, annotations_of
from gated_srp.data.loader import SlideBag
from gated_srp.data.matching import slide_stem
from gated_srp.data.prepared import Preparation
from gated_srp.errors import Note, UserError
from gated_srp.models import SlideModel
from gated_srp.reports import maps
from gated_srp.reports.draw import Scaled, describe, find_image, in_image_pixels, no_image, past_the_bar, scaled_map
from gated_srp.reports.explain import MEANING, in_words
from gated_srp.reports.maps import Patches, PatchMap, SlideView, run_of_slides, view_bag
from gated_srp.reports.pictures import describe_slide
from gated_srp.slides.reader import SlideImage, SlideInfo
from gated_srp.training.trained import TrainedRun, average, open_slide

TOP = 12  # patches of the strip
OUTLINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000")  # a colour per class
_DIFFERENCE = "Where the second run looks more (orange) or less (purple) than the first, each in multiples of its own mean on the slide."
_AS_STORED = Preparation()
_NONE = 255  # the colour of a patch that the model did not see


@dataclass(frozen=True, eq=False)
class Layer:
    """One map: raw ``values`` (N,), NaN where the run did not see the patch, and how it is coloured."""

    run: int  # -1: of two runs
    value: str
    one: PatchMap
    values: np.ndarray
    scaled: Scaled

    @property
    def top(self) -> list[int]:
        """The rows with the highest values, the highest first. Of rows with one value none is better: they are listed all or not at all."""
        known = np.flatnonzero(np.isfinite(self.values))
        order = known[np.argsort(-self.values[known], kind="stable")]
        if len(order) > TOP:
            order = order[self.values[order] > self.values[order[TOP]]]
        return [int(row) for row in order[:TOP]]


@dataclass(frozen=True, eq=False)
class Scene:
    """One slide with everything that runs show of it, in level-0 pixels of its image (of the feature file, without one)."""

    name: str
    file: Path
    image: Path | None
    info: SlideInfo | None
    patches: Patches  # all N
    runs: tuple[str, ...]
    answers: tuple[dict[str, str], ...]  # of each run
    layers: tuple[Layer, ...]
    rows: tuple[np.ndarray, ...]  # of each run (L,): the patches that it saw, in the order of its bag
    notes: tuple[Note, ...]
    drawn: Annotations = NOTHING

    @property
    def size(self) -> tuple[int, int]:
        """Width and height that can be panned over."""
        if self.info is not None:
            return self.info.size
        reach = self.patches.corners.max(0) + self.patches.side
        width, height = np.maximum(reach, self.patches.header.level0_size or (0, 0))
        return int(np.ceil(width)), int(np.ceil(height))

    def content(self, *, finest: int, coarsest: int) -> dict[str, Any]:
        """As the page reads it; arrays as base64. ``finest`` and ``coarsest``: levels of tiles that are there."""
        colours = {layer.scaled.colours for layer in self.layers}
        header = self.patches.header  # has what the image says where the file says nothing: a known pixel size stays
        microns = header.unit == "um"
        return {
            "name": self.name,
            "size": self.size,
            "levels": [coarsest, finest],
            "mpp": 1.0 if microns else header.mpp,
            "magnification": None if microns else header.magnification,
            "image": self.image is not None,
            "about": describe_slide(header, self.patches.side),
            "side": self.patches.side,
            "corners": _packed(self.patches.corners.astype("<f4")),
            "runs": [{"name": name, "answers": found} for name, found in zip(self.runs, self.answers, strict=True)],
            "layers": [_layer(layer) for layer in self.layers],
            "colours": {name: _table(name) for name in sorted(colours)},
            "notes": [note.line for note in self.notes],
            "drawn": _outlines(self.drawn),
        }

    def script(self, *, finest: int, coarsest: int) -> str:
        """The content as a script: a page that is opened from the disk may load no other form."""
        return f"GatedSRP.show({json.dumps(self.content(finest=finest, coarsest=coarsest), allow_nan=False)});\n"


def _layer(layer: Layer) -> dict[str, Any]:
    places = np.where(np.isfinite(layer.scaled.places), (layer.scaled.places * 254).round(), _NONE)
    return {
        "run": layer.run,
        "value": layer.value,
        "title": layer.one.title.replace("\n", " "),
        "values": _packed(layer.values.astype("<f4")),
        "places": _packed(places.astype(np.uint8)),
        "ticks": layer.scaled.ticks,
        "colours": layer.scaled.colours,
        "label": layer.scaled.label,
        "note": describe(layer.one) + past_the_bar(layer.scaled),
        "beyond": layer.scaled.beyond,
        "unit": layer.one.unit,
        "signed": layer.one.signed,
        "words": MEANING.get(layer.value, _DIFFERENCE),
        "top": layer.top,
    }


def _outlines(drawn: Annotations) -> list[dict[str, Any]]:
    """The rings of each class, in level-0 pixels, with the line that it is drawn with."""
    import shapely

    found = []
    for number, name in enumerate(drawn.classes):
        rings = shapely.get_rings(shapely.get_parts(drawn.shape([name])))
        corners = [_packed(shapely.get_coordinates(ring).astype("<f4")) for ring in rings]
        found.append(
            {
                "name": name,
                "colour": OUTLINES[number % len(OUTLINES)],
                "dashed": number >= len(OUTLINES),
                "rings": corners,
            }
        )
    return found


def _packed(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _table(name: str) -> str:
    """255 colours, RGB."""
    from matplotlib import colormaps

    return _packed(colormaps[name](np.linspace(0, 1, 255), bytes=True)[:, :3])


def open_scene(
    file: Path, asked: Sequence[Asked], *, image: Path | None = None, annotations: Path | None = None
) -> Scene:
    """Run every model on a feature file, and lay what they show, and what was drawn, over the slide."""
    views = [one.view(file) for one in asked]
    header = views[0].patches.header
    patches = Patches.of(header)
    given, image, info = image, find_image(patches, image), None
    if image is not None:
        with SlideImage(image) as slide:
            info = slide.info
            patches = in_image_pixels(patches, info)
    layers = [layer for number, view in enumerate(views) for layer in _layers_of(number, view, len(header.coords))]
    names = tuple(view.run for view in views)
    layers += _differences(layers, names)
    drawn = NOTHING if annotations is None else annotations_of(annotations, patches.header, patches.bounds)
    notes = tuple(dict.fromkeys([*(note for view in views for note in view.warnings), *drawn.notes]))
    if given is not None and image is None:
        notes += (no_image(given, file.name),)
    return Scene(
        slide_stem(file),
        file,
        image,
        info,
        patches,
        names,
        tuple(one.answers() for one in asked),
        tuple(layers),
        tuple(view.patches.rows for view in views),
        notes,
        drawn,
    )


@dataclass(frozen=True, eq=False)
class Asked:
    """A run and a slide that stay in memory while the model is asked."""

    run: TrainedRun
    model: SlideModel
    bag: SlideBag
    reading: Preparation
    file: Path

    @property
    def rows(self) -> slice:
        """Those of the file in the bag, which may be a patient's."""
        return maps.rows_of(self.bag, self.file)[0]

    @classmethod
    def open(
        cls, run: Path, file: Path, *, known: Mapping[str, Any], reading: Preparation = _AS_STORED, force: bool = False
    ) -> Asked:
        trained = run_of_slides(run)
        bag = open_slide(trained, file, reading=reading, force=force, **known)
        return cls(trained, trained.load(), bag, reading, file)

    def view(self, file: Path) -> SlideView:
        """What the run shows of each patch."""
        return view_bag(self.run, self.bag, file, model=self.model, reading=self.reading)

    def answers(self) -> dict[str, str]:
        """The prediction in words, as `predict` gives it; empty for a model without a task."""
        if "task" not in self.run.card:
            return {}
        with torch.no_grad():
            logits = self.model(self.bag.features[None], self.bag.graph).float()
        row = average([self.run], [logits]).iloc[0]
        return dict(in_words(str(name), value) for name, value in row.items())


def _layers_of(number: int, view: SlideView, count: int) -> list[Layer]:
    found = []
    for value in maps.VALUES:
        try:
            shown = maps.maps_of(view, value)
        except UserError:
            continue  # this model has no such value
        found += [made_layer(number, value, one, view.patches.rows, count) for one in shown]
    return found


def made_layer(run: int, value: str, one: PatchMap, rows: np.ndarray, count: int) -> Layer:
    """A map of some rows as a layer over all ``count`` patches."""
    places = np.full(count, np.nan)
    scaled = scaled_map(one)
    places[rows] = scaled.places
    return Layer(run, value, one, maps.spread_over(one, rows, count).values, replace(scaled, places=places))


def _differences(layers: Sequence[Layer], runs: Sequence[str]) -> list[Layer]:
    """How each further run's attention differs from the first one's, both as multiples of their slide's mean."""
    firsts = {layer.run: layer for layer in reversed(layers) if layer.value == "attention" and not layer.one.signed}
    found = []
    for number in sorted(firsts):
        if number == 0 or 0 not in firsts:
            continue
        base, mine = (replace(firsts[k].one, values=firsts[k].values) for k in (0, number))
        title = f"attention of {runs[number]} minus {runs[0]}, in multiples of the slide's mean"
        one = maps.difference(base, mine, title=title)
        found.append(made_layer(-1, "difference", one, np.arange(len(one.values)), len(one.values)))
    return found
