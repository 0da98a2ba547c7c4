"""What a folder holds for its page: comparisons, runs, checks, figures and heatmaps, read so that nothing in them can run or load."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from gated_srp.errors import UserError
from gated_srp.files import as_stored
from gated_srp.models import arm_title, is_gated
from gated_srp.records import Budget, Check, Comparison, Localized, Record, read_record, read_rows
from gated_srp.tasks import Task, find_task, task_from_card
from gated_srp.training.folder import RunFolder

_ABOUT = 20_000  # characters of about.txt that are shown
_STUDY = {"comparison.json", "reproduction.csv"}
_SVG = "http://www.w3.org/2000/svg"
_LINK = "http://www.w3.org/1999/xlink"
_DRAWN = {"svg", "g", "defs", "clipPath", "pattern", "path", "rect", "use", "text", "tspan", "title", "line", "circle"}
_DRAWN |= {"ellipse", "polygon", "polyline", "image", "linearGradient", "stop"}
_OUTSIDE = re.compile(r"url\((?!#)|javascript:|@import", re.IGNORECASE)
_LARGEST = 3_000_000  # bytes of an SVG file; matplotlib's are a hundredth
_DEEPEST = 100  # elements inside each other; matplotlib's drawings have ten
_WRITE_AGAIN = "Write it again with the command that made it."
_WIDEST = 1400  # pixels of a PNG
_COLOURS = 128
_SHRINK = 0.6
_TRUTH = "true focus"  # of the demo: shown first, to compare the others with
_NAME = re.compile(
    r"^(?P<slide>.*?)[._-]*(?P<value>attention|beta|homogeneity|correction|change|true_focus)"
    r"(?P<rest>.*?)(?:_layer(?P<layer>\d+))?(?P<end>(?:_head\d+)?(?:_positive)?)$"
)


class FinishedRun(RunFolder):
    """A finished run, read from its folder wherever that was moved."""

    @cached_property
    def results(self) -> dict[str, Any]:  # read once
        return super().results

    @cached_property
    def settings(self) -> dict[str, Any]:  # read once
        return super().settings

    @cached_property
    def environment(self) -> dict[str, Any]:  # read once
        return super().environment

    @property
    def cohort(self) -> str:
        return str(self.results.get("cohort", self.path.parent.parent.name))

    @property
    def arm(self) -> str:
        return str(self.results.get("arm", self.path.parent.name))

    @property
    def unit(self) -> str:
        return self.path.name.removeprefix("seed")

    @property
    def name(self) -> str:
        """The arm, and the settings that a study varied: runs of one arm with other settings lie below ``variants``."""
        above = self.path.absolute().parents
        varied = above[2].name if len(above) > 3 and above[3].name == "variants" else ""
        return arm_title(self.arm) + (f" ({varied.replace('model.', '').replace(',', ', ')})" if varied else "")

    @property
    def scores(self) -> dict[str, Any]:
        """Metrics of the test set at the level that scores; None where one is not defined."""
        return dict((self.results.get("test") or {}).get(self.results.get("score")) or {})

    @property
    def task(self) -> type[Task]:
        """What its predictions mean; a task of a package that is not installed here is shown as any."""
        try:
            return find_task(str(self.settings.get("task")))
        except UserError:
            return Task

    @property
    def truth(self) -> tuple[str, ...]:
        """Columns of its predictions that hold the truth; the model's card says them where they differ by cohort."""
        if isinstance(self.task.truth, tuple):
            return self.task.truth
        with suppress(UserError, KeyError):
            return task_from_card(self.card).truth
        return ()

    @property
    def model_hash(self) -> str:
        with suppress(OSError), self.model.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
        return ""

    def tested(self) -> pd.DataFrame | None:
        """Predictions of the test set at the level that scores."""
        with suppress(UserError):
            return self.predictions("test", self.results.get("score", "slide"))
        return None


@dataclass(frozen=True)
class StudyFolder:
    """A folder with comparison.json, or with reproduction.csv."""

    path: Path
    comparison: dict[str, Any]
    results: tuple[dict[str, str], ...]
    reproduction: tuple[dict[str, str], ...]

    @property
    def cohorts(self) -> set[str]:
        """Those with a result of this study."""
        run = [row for row in self.reproduction if row.get("mean")]
        return {str(row.get("cohort")) for row in (*self.results, *run)}

    @property
    def drawings(self) -> list[Path]:
        return sorted({*self.path.glob("figures/*.svg"), *self.path.glob("*.svg")})


@dataclass(frozen=True)
class Contents:
    """Everything on one page. ``drawings``: those of no study; ``maps``: PNGs without an SVG of the same name."""

    home: Path
    about: str
    studies: list[StudyFolder]
    runs: list[FinishedRun]
    checks: list[dict[str, Any]]
    drawings: list[Path]
    maps: list[Path]
    localized: list[dict[str, Any]]  # maps against annotations
    budgets: list[dict[str, Any]]  # predictions from shares of the patches

    @property
    def compared(self) -> set[str]:
        """Cohorts of all studies."""
        return {name for study in self.studies for name in study.cohorts}


def read_contents(home: Path) -> Contents:
    """Look through a folder; refuse one that holds nothing to report."""
    home = as_stored(home)
    if not home.is_dir():
        cure = "Expected the folder of a run, of a comparison, or one above them."
        raise UserError("no such folder", where=home, cure=cure)
    files: list[Path] = []
    for here, folders, names in os.walk(home):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(here, name) for name in names]
    files.sort()
    studies = [_study(folder) for folder in sorted({f.parent for f in files if f.name in _STUDY})]
    runs = _runs(files) or _runs(_beside(home, studies))
    found = [_read_json(f, Check) for f in files if f.suffix == ".json" and "check" in f.name]
    checks = [check for check in found if {"name", "must_fix", "summary", "findings"} <= set(check)]
    localized = [_read_json(f, Localized) for f in files if f.name == "localization.json"]
    budgets = [_read_json(f, Budget) for f in files if f.name == "budget.json"]
    drawn = {drawing for study in studies for drawing in study.drawings}
    drawings = [f for f in files if f.suffix == ".svg" and f not in drawn]
    maps = [f for f in files if f.suffix == ".png" and not f.with_suffix(".svg").is_file()]
    if not studies and not runs:
        raise UserError(
            "nothing to report: no finished run (metrics.json) and no comparison (comparison.json) in it",
            where=home,
            cure="Point at what `gated-srp train`, `compare` or `reproduce` wrote.",
        )
    about = read_text(home / "about.txt")[:_ABOUT]
    return Contents(home, about, studies, runs, checks, drawings, maps, localized, budgets)


def _beside(home: Path, studies: Sequence[StudyFolder]) -> list[Path]:
    """Runs of a comparison that are not below it: those it lists, else those of its cohorts in the folders above it."""
    listed = [study.path / str(run) for study in studies for run in (study.comparison.get("runs") or {}).values()]
    if found := list(dict.fromkeys(path.resolve() for run in listed if (path := run / "metrics.json").is_file())):
        return found
    cohorts = {name for study in studies for name in study.cohorts}
    roots = list(home.absolute().parents[:2]) if studies else []
    found = [path for root in roots for path in sorted(root.glob("*/*/seed*/metrics.json"))]
    return [path for path in found if path.parents[2].name in cohorts]


def _runs(files: Iterable[Path]) -> list[FinishedRun]:
    found = [FinishedRun(path.parent) for path in files if path.name == "metrics.json"]
    return sorted(
        (run for run in found if "test" in run.results),
        key=lambda run: (run.cohort, not is_gated(run.arm), run.arm, run.unit),
    )


def _study(folder: Path) -> StudyFolder:
    results, reproduction = (_read_rows(folder / f"{name}.csv") for name in ("results", "reproduction"))
    return StudyFolder(folder, _read_json(folder / "comparison.json", Comparison), results, reproduction)


def read_text(path: Path) -> str:
    """The text; empty where there is no such file."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _read_json(path: Path, record: type[Record]) -> dict[str, Any]:
    """The content if it is what the schema says; nothing where there is no such file; a torn file is refused by name."""
    try:
        return read_record(path, record, cure=_WRITE_AGAIN)
    except FileNotFoundError:
        return {}


def _read_rows(path: Path) -> tuple[dict[str, str], ...]:
    """A CSV as it is written: texts."""
    try:
        rows = read_rows(path, texts=None, cure=_WRITE_AGAIN).to_dict("records")
    except FileNotFoundError:
        return ()
    return tuple({str(key): str(value) for key, value in row.items()} for row in rows)


# SVG ------------------------------------------------------------------------------------------------------------------


def inline_svg(path: Path, prefix: str) -> str | None:
    """The drawing as markup for a page, its ids prefixed; None where the file is no drawing.

    Only elements that draw stay, without event handlers, and nothing that points outside the drawing itself.
    """
    try:
        if path.stat().st_size > _LARGEST:
            return None
        text = path.read_text(encoding="utf-8")
        root = ET.fromstring(text)
    except (OSError, ValueError, ET.ParseError):
        return None
    if root.tag != f"{{{_SVG}}}svg" or "<!ENTITY" in text or _depth(root) > _DEEPEST:
        return None
    _clean(root, prefix)
    for name in ("height", "version"):
        root.attrib.pop(name, None)
    # On a phone it shrinks to this width and scrolls from there on.
    if width := re.match(r"([\d.]+)(pt|px)?$", root.get("width", "")):
        root.set("style", f"min-width: {float(width[1]) * _SHRINK:.0f}{width[2] or 'px'}")
    root.attrib |= {"aria-hidden": "true", "focusable": "false"}  # the figure around it has the words
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _LINK)
    return ET.tostring(root, encoding="unicode")


def _depth(root: ET.Element) -> int:
    """Levels of elements, level by level: what is nested without end must not end this."""
    depth, level = 0, [root]
    while level:
        depth, level = depth + 1, [child for element in level for child in element]
    return depth


def _clean(element: ET.Element, prefix: str) -> None:
    for child in list(element):
        if not isinstance(child.tag, str) or child.tag.removeprefix(f"{{{_SVG}}}") not in _DRAWN:
            element.remove(child)
        else:
            _clean(child, prefix)
    for name, value in list(element.attrib.items()):
        plain = name.rsplit("}", 1)[-1].lower()
        inside = value.startswith(("#", "data:image/png;base64,"))
        if plain.startswith("on") or (plain == "href" and not inside) or _OUTSIDE.search(value):
            del element.attrib[name]
        elif plain == "id":
            element.attrib[name] = prefix + value
        elif plain == "href":
            element.attrib[name] = f"#{prefix}{value[1:]}" if value.startswith("#") else value
        else:
            element.attrib[name] = re.sub(r"url\(#", f"url(#{prefix}", value)


# Heatmaps -------------------------------------------------------------------------------------------------------------


def small_png(path: Path) -> bytes | None:
    """A PNG of at most 1400 pixels width and 128 colours; None where the file is no picture."""
    from PIL import Image

    try:
        # in memory: PIL asks a file for as many bytes as a chunk claims to have
        with Image.open(io.BytesIO(path.read_bytes()), formats=["PNG"]) as picture:
            picture.load()
            shown = picture.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    if shown.width > _WIDEST:
        shown = shown.resize((_WIDEST, max(1, round(shown.height * _WIDEST / shown.width))), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    shown.quantize(_COLOURS).save(out, "PNG", optimize=True)
    return out.getvalue()


class Picture(NamedTuple):
    slide: str
    value: str
    layer: str
    uri: str

    @property
    def words(self) -> str:
        """For a reader who does not see it."""
        return f"{self.value}{f', layer {self.layer}' if self.layer else ''}, slide {self.slide}"


def read_name(name: str) -> tuple[str, str, str]:
    """Slide, value and layer of a picture by its name; what the name does not say stays empty.

    >>> read_name("heatmaps/P001_a_beta_layer2"), read_name("heatmaps/overview")
    (('P001_a', 'beta', '2'), ('heatmaps', 'overview', ''))
    """
    folder, _, stem = name.rpartition("/")
    found = _NAME.match(stem)
    if not found:
        return folder, stem, ""
    end = f"{found['rest']}{found['end']}".replace("_", " ")
    return found["slide"] or folder, (found["value"].replace("_", " ") + end).strip(), found["layer"] or ""


def within(paths: Iterable[Path], budget: int) -> tuple[list[Picture], list[str]]:
    """Pictures as long as they fit into so many bytes, and the names of those left out."""
    kept, left_out = [], []
    for path in paths:
        name, png = f"{path.parent.name}/{path.stem}", small_png(path)
        if png is None:
            continue
        uri = "data:image/png;base64," + base64.b64encode(png).decode("ascii")
        if len(uri) <= budget:
            budget -= len(uri)
            kept.append(Picture(*read_name(name), uri))
        else:
            left_out.append(name)
    return sorted(kept, key=lambda one: one.value != _TRUTH), left_out
