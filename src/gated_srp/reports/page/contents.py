"""What a folder holds for its page: comparisons, runs, checks, figures, maps."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from gated_srp.errors import UserError
from gated_srp.tasks import Task, find_task
from gated_srp.training.folder import RunFolder

_ABOUT = 20_000  # characters of about.txt that are shown
_STUDY = {"comparison.json", "reproduction.csv"}


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, read from its folder wherever that was moved; ``results`` is its metrics.json."""

    folder: RunFolder
    results: dict[str, Any]

    @property
    def path(self) -> Path:
        return self.folder.path

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
    def scores(self) -> dict[str, Any]:
        """Metrics of the test set at the level that scores; None where one is not defined."""
        return dict((self.results.get("test") or {}).get(self.results.get("score")) or {})

    @property
    def task(self) -> type[Task]:
        """What its predictions mean; a task of a package that is not installed here is shown as any."""
        try:
            return find_task(str(self.folder.settings.get("task")))
        except UserError:
            return Task

    @cached_property
    def environment(self) -> dict[str, Any]:
        return self.folder.environment

    @property
    def config_text(self) -> str:
        return _read_text(self.path / "config.yaml")

    @property
    def model_hash(self) -> str:
        try:
            with self.folder.model.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            return ""

    def predictions(self) -> pd.DataFrame | None:
        """Of the test set at the level that scores."""
        try:
            return self.folder.predictions("test", self.results.get("score", "slide"))
        except UserError:
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
    def run_folders(self) -> list[str]:
        """Of the comparison's cells, relative to its own folder."""
        found = self.comparison.get("runs")
        return [str(folder) for folder in found.values()] if isinstance(found, dict) else []

    @property
    def drawings(self) -> list[Path]:
        return sorted({*self.path.glob("figures/*.svg"), *self.path.glob("*.svg")})


@dataclass(frozen=True)
class Contents:
    """Everything on one page. ``drawings``: those of no study; ``maps``: PNGs without an SVG of the same name."""

    home: Path
    about: str
    studies: tuple[StudyFolder, ...]
    runs: tuple[FinishedRun, ...]
    checks: tuple[dict[str, Any], ...]
    drawings: tuple[Path, ...]
    maps: tuple[Path, ...]


def read_contents(home: Path) -> Contents:
    """Look through a folder; refuse one that holds nothing to report."""
    if not home.is_dir():
        cure = "Expected the folder of a run, of a comparison, or one above them."
        raise UserError("no such folder", where=home, cure=cure)
    files = sorted(_files(home))
    studies = tuple(_study(folder) for folder in sorted({f.parent for f in files if f.name in _STUDY}))
    runs = _runs(files) or _runs(_beside(home, studies))
    checks = tuple(found for f in files if f.suffix == ".json" and "check" in f.name and (found := _check(f)))
    drawn = {drawing for study in studies for drawing in study.drawings}
    drawings = tuple(f for f in files if f.suffix == ".svg" and f not in drawn)
    maps = tuple(f for f in files if f.suffix == ".png" and not f.with_suffix(".svg").is_file())
    if not studies and not runs:
        raise UserError(
            "nothing to report: no finished run (metrics.json) and no comparison (comparison.json) in it",
            where=home,
            cure="Point at what `gated-srp train`, `compare` or `reproduce` wrote.",
        )
    return Contents(home, _read_text(home / "about.txt")[:_ABOUT], studies, runs, checks, drawings, maps)


def _files(home: Path) -> Iterator[Path]:
    """All files of a folder and those below it; hidden folders are skipped."""
    for here, folders, names in os.walk(home):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(here, name) for name in names)


def _beside(home: Path, studies: tuple[StudyFolder, ...]) -> list[Path]:
    """Runs of a comparison that are not below it: those it lists, else those of its cohorts in the folders above it."""
    listed = [study.path / folder / "metrics.json" for study in studies for folder in study.run_folders]
    if found := list(dict.fromkeys(path.resolve() for path in listed if path.is_file())):
        return found
    cohorts = {name for study in studies for name in study.cohorts}
    roots = list(home.absolute().parents[:2]) if studies else []
    found = [path for root in roots for path in sorted(root.glob("*/*/seed*/metrics.json"))]
    return [path for path in found if path.parents[2].name in cohorts]


def _runs(files: list[Path]) -> tuple[FinishedRun, ...]:
    folders = [RunFolder(path.parent) for path in files if path.name == "metrics.json"]
    found = [FinishedRun(folder, results) for folder in folders if "test" in (results := folder.results)]
    return tuple(sorted(found, key=lambda run: (run.cohort, run.arm, run.unit)))


def _study(folder: Path) -> StudyFolder:
    results, reproduction = (tuple(_read_rows(folder / f"{name}.csv")) for name in ("results", "reproduction"))
    return StudyFolder(folder, _read_json(folder / "comparison.json"), results, reproduction)


def _check(path: Path) -> dict[str, Any] | None:
    found = _read_json(path)
    return found if {"name", "must_fix", "summary", "findings"} <= set(found) else None


def _read_text(path: Path) -> str:
    """The text; empty where there is no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_json(path: Path) -> dict[str, Any]:
    """The content if that is a mapping; nothing where there is no such file; a torn file is refused by name."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        cure = "Write it again with the command that made it."
        raise UserError(f"cannot be read ({error})", where=path, cure=cure) from None
    return found if isinstance(found, dict) else {}


def _read_rows(path: Path) -> list[dict[str, str]]:
    """A CSV as it is written: texts."""
    rows = csv.DictReader(io.StringIO(_read_text(path), newline=""))
    return [{str(key): str(value) for key, value in row.items()} for row in rows]
