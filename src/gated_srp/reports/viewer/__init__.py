"""`gated_srp.view`: slides that can be zoomed, with what runs show of each patch; served on this machine, or as a folder."""

from __future__ import annotations

import json
import logging
import math
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from gated_srp.data.annotations import find_annotations
from gated_srp.data.files.containers import CONTAINERS
from gated_srp.data.matching import slide_stem
from gated_srp.data.prepared import Preparation
from gated_srp.data.regions import folder_of
from gated_srp.errors import UserError
from gated_srp.files import write_whole
from gated_srp.progress import Event, Progress, silent
from gated_srp.reports.draw import place_of_images
from gated_srp.reports.explain import features_of_slide
from gated_srp.reports.heatmap import feature_files
from gated_srp.reports.viewer.scene import Asked, Scene, open_scene
from gated_srp.reports.viewer.tiles import SIDE, TileReader, grid, levels
from gated_srp.slides.ome_zarr import is_ome_zarr
from gated_srp.slides.reader import ENDINGS, SlideImage
from gated_srp.training.known import files_for, known_of
from gated_srp.training.trained import TrainedRun

if TYPE_CHECKING:
    from gated_srp.reports.viewer.what_if import WhatIf

Known = Mapping[Path, Mapping[str, Any]]  # arguments of `open_slide` for each file
_LOG = logging.getLogger(__name__)
STATIC = ("index.html", "viewer.js", "viewer.css", "openseadragon.min.js", "openseadragon.LICENSE.txt")
_TILES = 2000  # of a slide in an exported folder, about 30 MB; beyond, the finest levels are left out
_EXTRACT_FIRST = ("no_encoder", "no_magnification", "low_magnification", "no_weights")  # mended by options of `extract`
_COARSEST = int(math.log2(SIDE))  # the level that one tile holds


@dataclass(frozen=True)
class ViewedSlide:
    """A feature file and, where there is one, the image it was made from, or the folder that has it."""

    file: Path
    image: Path | None = None
    annotations: Path | None = None  # what was drawn on it


@dataclass(frozen=True)
class ExportedViewer:
    """A folder that opens from the disk: ``page`` in any browser, without a server."""

    page: Path
    size: int  # bytes
    notes: tuple[str, ...] = ()

    @property
    def written(self) -> list[Path]:
        return [self.page]


class Viewer:
    """Slides with the maps of runs. `export` writes a folder; `gated_srp.reports.viewer.server` serves it on this machine.

    Models run when a slide is asked for, once.
    """

    def __init__(
        self, slides: Sequence[ViewedSlide], runs: Sequence[Path], known: Sequence[Known] = (), **reading: Any
    ) -> None:
        self.slides, self.runs, self._reading = tuple(slides), tuple(runs), reading
        self._known = known or [{}] * len(runs)
        self._scenes: dict[int, Scene] = {}
        self._readers: dict[int, TileReader] = {}
        self._asked: tuple[int, tuple[Asked, ...]] = (-1, ())  # of the slide that was opened last: bags are large
        self._lock = Lock()

    def scene(self, number: int) -> Scene:
        with self._lock:
            if number not in self._scenes:
                one = self.slides[number]
                self._scenes[number] = open_scene(
                    one.file, self._ask(number), image=one.image, annotations=one.annotations
                )
            return self._scenes[number]

    def _ask(self, number: int) -> tuple[Asked, ...]:
        """The runs with this slide in memory; the slide before it is let go."""
        if self._asked[0] != number:
            self._asked = (-1, ())
            file = self.slides[number].file
            both = zip(self.runs, self._known, strict=True)
            asked = (Asked.open(run, file, known=known.get(file, {}), **self._reading) for run, known in both)
            self._asked = (number, tuple(asked))
        return self._asked[1]

    def reader(self, number: int) -> TileReader | None:
        """The tiles of a slide; None where there is no image of it."""
        image = self.scene(number).image
        with self._lock:
            if image is not None and number not in self._readers:
                self._readers[number] = TileReader(SlideImage(image))
            return self._readers.get(number)

    def open_ahead(self) -> None:
        """The first slide before a page asks for it. What is wrong with it is said to the page that asks."""
        with suppress(UserError):
            if (reader := self.reader(0)) is not None:
                reader.whole()

    def what_if(self, number: int, run: int, **gates: Any) -> WhatIf:
        """The answer of a run with its gates set otherwise; see `what_if.ask`."""
        from gated_srp.reports.viewer.what_if import ask

        scene = self.scene(number)
        with self._lock:
            return ask(self._ask(number)[run], scene.patches.corners[scene.rows[run]] + scene.patches.side / 2, **gates)

    def index(self, *, served: bool, numbers: Sequence[int] | None = None) -> str:
        """The list of slides, or of those with these ``numbers``, as a script."""
        shown = self.slides if numbers is None else [self.slides[number] for number in numbers]
        content = {"slides": [slide_stem(one.file) for one in shown], "served": served}
        return f"var GatedSRPIndex = {json.dumps(content)};\n"

    def close(self) -> None:
        for reader in self._readers.values():
            reader.slide.close()

    def export(self, folder: str | Path, *, progress: Progress = silent) -> ExportedViewer:
        """Everything as a folder that needs no server; it appears whole or not at all, and replaces an earlier one."""
        folder = Path(folder)
        taken = folder.exists() and not (folder / "viewer.js").is_file()
        if taken and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError("is there already and is no viewer", where=folder, cure="Name a new folder.")
        if folder.resolve() == Path.cwd().resolve():
            raise UserError("is the folder that you are in", where=folder, cure="Name a folder below it.")
        draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.part")
        notes: list[str] = []
        kept: list[int] = []
        try:
            for name in STATIC:
                write_whole(draft / name, static(name))
            for number in range(len(self.slides)):
                place = draft / "slide" / str(len(kept))
                try:
                    notes += self._export_slide(number, place)
                    kept.append(number)
                except UserError as error:  # one of several is left out, as by `heatmap`
                    if number + 1 == len(self.slides) and not kept:
                        raise
                    shutil.rmtree(place, ignore_errors=True)
                    notes.append(f"left out: {error}")
                progress(Event("slides", number + 1, len(self.slides)))
            write_whole(draft / "index.js", self.index(served=False, numbers=kept))
            if folder.exists():
                shutil.rmtree(folder)
            draft.rename(folder)
        except OSError as error:
            cure = "Free some space or choose another folder."
            raise UserError(f"cannot be written ({error.strerror or error})", where=folder, cure=cure) from error
        finally:
            with suppress(OSError):
                shutil.rmtree(draft)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return ExportedViewer(folder / "index.html", size, tuple(notes))

    def _export_slide(self, number: int, place: Path) -> list[str]:
        scene, reader = self.scene(number), self.reader(number)
        finest = levels(scene.size)
        if reader is None:
            write_whole(place / "data.js", scene.script(finest=finest, coarsest=finest))
            return []
        full, finest = finest, _finest(scene.size)
        write_whole(place / "data.js", scene.script(finest=finest, coarsest=min(_COARSEST, finest)))
        for level in range(min(_COARSEST, finest), finest + 1):
            columns, rows = grid(scene.size, level)
            for column, row in ((c, r) for r in range(rows) for c in range(columns)):
                write_plain(place / "tiles" / str(level) / f"{column}_{row}.jpg", reader.tile(level, column, row))
        for row in sorted({row for layer in scene.layers for row in layer.top}):
            corner, side = scene.patches.corners[row], scene.patches.side
            write_plain(place / "patch" / f"{row}.jpg", reader.patch(corner, side))
        if finest == full:
            return []
        return [f"{scene.name}: tiles up to 1/{2 ** (full - finest)} of full resolution; the server has all of it"]


def _finest(size: tuple[int, int]) -> int:
    """The finest level whose tiles, with those of all coarser ones, are few enough for a folder."""
    finest, total = _COARSEST, 0
    for level in range(_COARSEST, levels(size) + 1):
        columns, rows = grid(size, level)
        total += columns * rows
        if total > _TILES:
            break
        finest = level
    return min(finest, levels(size))


def write_plain(path: Path, content: bytes) -> None:
    """One of many files of a folder that is renamed as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def static(name: str) -> bytes:
    """A file of the page."""
    return files("gated_srp.reports.viewer").joinpath("static", name).read_bytes()


def view(
    slides: str | Path | Sequence[str | Path],
    runs: str | Path | Sequence[str | Path],
    *,
    wsi: str | Path | None = None,
    export: str | Path | None = None,
    features: str | Path = "viewed",
    annotations: str | Path | None = None,
    size: int | None = None,
    coords: str | Path | None = None,
    table: str | Path | None = None,
    stride: float | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Viewer | ExportedViewer:
    """Slides that can be zoomed, with the maps of one run or of several side by side.

    Args:
        slides: feature files, folders of them, or slide images (their features are extracted first).
        runs: run folders or model files; the first one is what the others are compared with.
        wsi: the slide image, or the folder with the images (and folders below it); without it there are the patches alone.
        export: write a folder that opens from the disk, and return it.
        features: folder for features of slide images.
        annotations: as in `heatmap`: outlines are shown, a layer per class, and runs that were trained on ``regions`` find them there.
        size: pixels of a patch of slide images; the encoder's own if not set.
        coords: folder of positions, where feature files have none and they do not lie beside them.
        table: as in `heatmap`, for runs whose bags are patients, or with covariates.
        stride: distance between patches, where the file's is wrong.
        force: as in `predict`.
        progress: called after each slide of an export.

    Returns:
        The exported folder, or a `Viewer` to serve: ``gated_srp.reports.viewer.server.serve(viewer)``.

    Example:
        >>> gated_srp.view("feats/s1.h5", ["runs/na/seed42", "runs/gated_srp/seed42"], export="s1").page  # doctest: +SKIP
        PosixPath('s1/index.html')
    """
    paths = [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]
    given = [Path(slides)] if isinstance(slides, str | Path) else [Path(slide) for slide in slides]
    if not paths or not given:
        raise UserError("expected at least one slide and one run", cure="gated-srp view SLIDE --runs RUN")
    found: list[ViewedSlide] = []
    for place in given:
        if (place.suffix.lower() in ENDINGS and place.suffix.lower() not in CONTAINERS) or is_ome_zarr(place):
            how: dict[str, Any] = {"size": size, "force": force, "progress": progress}
            try:
                file, notes = features_of_slide(paths[0], place, Path(features), **how)
            except UserError as error:
                if error.kind not in _EXTRACT_FIRST:
                    raise
                cure = f"Make its features first: `gated-srp extract {place} -o FOLDER`, with --encoder, --weights or --mpp; then view their file."
                raise error.changed(cure=cure) from None
            for note in notes:
                _LOG.warning("%s", note)
            found.append(ViewedSlide(file, place))
        else:
            found += [ViewedSlide(file) for file in feature_files(place, paths)]
    images = place_of_images(wsi, sum(one.image is None for one in found))
    found = [replace(one, image=one.image or images) for one in found]
    if annotations is not None:
        drawn = find_annotations(annotations, [slide_stem(one.file) for one in found])
        found = [replace(one, annotations=drawn.get(slide_stem(one.file))) for one in found]
    reading = Preparation(coords=Path(coords) if coords else None, stride=stride, regions=folder_of(annotations))
    known = [_known(TrainedRun.open(run), [one.file for one in found], table) for run in paths]
    viewer = Viewer(found, paths, known, reading=reading, force=force)
    if export is None:
        return viewer
    try:
        return viewer.export(export, progress=progress)
    finally:
        viewer.close()


def _known(run: TrainedRun, files: Sequence[Path], table: str | Path | None) -> Known:
    """`known_of` each; the other slides of patients are looked for in the folders of these."""
    folders = dict.fromkeys(file.parent for file in files) if run.patients else ()
    pool = [other for folder in folders for other in files_for(run, folder)]
    return known_of(run, list(dict.fromkeys([*files, *pool])), table)
