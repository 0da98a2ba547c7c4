"""Repeating the paper's studies: `reproduce` trains what is missing and puts our numbers beside the published ones."""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import yaml

from gated_srp.config.cohort import CohortConfig, CohortData, open_cohort
from gated_srp.config.load import load_config
from gated_srp.config.presets import find_cohort
from gated_srp.errors import UserError, counted
from gated_srp.models import find_arm
from gated_srp.progress import Progress, silent
from gated_srp.study import paper
from gated_srp.study.cells import Cell, Row, distinct, plan, run_notes
from gated_srp.study.comparison import collect, compare_cells
from gated_srp.study.paper import PublishedTable, Study, read_studies, studies_folder
from gated_srp.study.results import COLUMNS, Comparison, StudyResult, html
from gated_srp.study.statistics import judge

if TYPE_CHECKING:
    from gated_srp.study.engine import Cost, EngineName, Running

_LOG = logging.getLogger(__name__)
Counts = Mapping[tuple[str, str], tuple[int, int]]  # slides of a row and cohort: ours, and the paper's
Present = Mapping[tuple[str, str | None], int]  # slides with a file, of a cohort with an encoder's features
Places = str | Path | Mapping[str, str | Path] | None  # one for all cohorts, or by cohort


@dataclass(frozen=True, eq=False)
class ReproducedStudy:
    """One study of the paper. ``table``: ours beside the published."""

    study: Study
    cells: tuple[Cell, ...]
    table: pd.DataFrame | None = None
    comparison: Comparison | None = None
    folder: Path | None = None
    files: tuple[Path, ...] = ()

    @property
    def command(self) -> str:
        """Of a figure that `reproduce` does not draw."""
        return self.study.command

    @property
    def text(self) -> str:
        """The table as Markdown, with its notes; empty for a figure."""
        if self.table is None or self.folder is None:
            return ""
        return (self.folder / "table.md").read_text(encoding="utf-8")

    def plan(self) -> pd.DataFrame:
        """One row per cell: cohort, row, seed, untuned (a row that the paper does not have), and the settings in words."""
        own = {row.name for row in self.study.rows}
        rows = [(c.cohort, c.row, c.unit, c.row not in own, paper_settings(c)) for c in self.cells]
        return pd.DataFrame(rows, columns=["cohort", "row", "seed", "untuned", "settings"])


@dataclass(frozen=True, eq=False)
class ReproduceResult(StudyResult):
    """What `reproduce` found, beside what a `StudyResult` has; in a notebook it shows the tables.

    Attributes:
        studies: each study with its table, comparison and files.
        notes: what was left out, and why.
        runs: distinct runs that the studies need together.
    """

    studies: tuple[ReproducedStudy, ...]
    notes: tuple[str, ...]
    runs: int

    @property
    def verdict(self) -> str:
        return "\n".join(one.text for one in self.studies if one.text)

    def _repr_html_(self) -> str:
        tables = [(one.study.title, one.table) for one in self.studies if one.table is not None]
        return "".join(f"<h4>{title}</h4>{html(table)}" for title, table in tables)


def reproduce(
    name: str,
    *,
    features: Places = None,
    labels: Places = None,
    cohorts: Sequence[str] = (),
    seeds: Sequence[int] = (),
    out: str | Path = "runs",
    settings: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    jobs: int | None = None,
    engine: EngineName = "local",
    address: str | None = None,
    confirm: Callable[[Cost], bool] = lambda cost: True,
    progress: Progress = silent,
) -> ReproduceResult:
    """Repeat a study of the paper: its rows and columns, with the published numbers and the differences beside ours.

    Args:
        name: a table or figure, e.g. ``survival``, or ``all``; ``gated-srp reproduce --list`` names them.
        features, labels: folder of feature files and of the public label files, for all cohorts or by cohort.
        cohorts: only these columns of the table.
        settings: changes to the paper's settings, e.g. ``{"train.workers": 4}``.
        dry_run: plan only; ``studies[0].plan()`` then lists the cells with their settings.
        seeds, out, jobs, engine, address, confirm, progress: as for `compare`.

    Returns:
        For every study its table (ours, published, difference, verdict), and the files written.

    Example:
        >>> plan = gated_srp.reproduce("survival", dry_run=True).studies[0].plan()  # doctest: +SKIP
    """
    from gated_srp.study.engine import Running, run_cells

    running = Running(jobs, engine, address, confirm, progress)
    sources = Sources(_by_cohort(features), _by_cohort(labels), Path(out), settings or {})
    every = read_studies(name, studies_folder())
    studies = [study.only(cohorts) for study in every]
    if cohorts and not any(study.columns for study in studies):
        there = ", ".join(dict.fromkeys(cohort for study in every for cohort in study.columns)) or "none"
        what, cure = f"{name} has no such cohort", f"Its cohorts: {there}."
        raise UserError(what, where=f"cohorts {','.join(cohorts)}", cure=cure)
    studies.sort(key=lambda study: study.kind == "claims")  # they read what the others have written
    plans = [(study, *plan_study(study, sources, cohorts=cohorts, seeds=seeds)) for study in studies]
    notes = tuple(dict.fromkeys(note for _, _, notes in plans for note in notes))
    for note in notes:
        running.say(f"note: {note}")
    planned = [cell for _, cells, _ in plans for cell in cells]
    if dry_run:
        return ReproduceResult(tuple(ReproducedStudy(s, c) for s, c, _ in plans), notes, len(distinct(planned)))
    data, present = _open(planned)
    plans = [(study, tuple(c for c in cells if _files(c) in present), notes) for study, cells, notes in plans]
    trained = [cell for study, cells, _ in plans if study.kind != "runtime" for cell in cells]
    ran = run_cells(trained, data, running) if trained else None
    count = len(distinct(trained))
    if ran and ran.script:
        return ReproduceResult(tuple(ReproducedStudy(s, c) for s, c, _ in plans), notes, count, script=ran.script)
    place = sources.out / "reproduce"
    found = [write_study(place / s.name, s, cells, about, running, present=present) for s, cells, about in plans]
    files = tuple(path for one in found for path in one.files)
    return ReproduceResult(tuple(found), notes, count, files=files, failed=ran.failed if ran else {})


def _by_cohort(places: Places) -> dict[str, Path]:
    given = places if isinstance(places, Mapping) else {} if places is None else {"": places}
    return {cohort: Path(place) for cohort, place in given.items()}


def _files(cell: Cell) -> tuple[str, str | None]:
    return cell.cohort, cell.config.encoder


def _open(cells: Sequence[Cell]) -> tuple[dict[str, CohortData], dict[tuple[str, str | None], int]]:
    """The cohorts by name; and how many slides have a file, by cohort and encoder: those without any are left out with a warning."""
    data: dict[str, CohortData] = {}
    present: dict[tuple[str, str | None], int] = {}
    for cell in {_files(cell): cell for cell in cells}.values():
        try:
            found = open_cohort(cell.config)
            data.setdefault(cell.cohort, found)
            present[_files(cell)] = len(found.matches.found)
        except UserError as error:
            _LOG.warning("note: %s, %s: left out. %s", cell.cohort, cell.config.encoder, error)
    if cells and not data:
        cure = "Name them with --features and --labels, or look with --dry-run."
        raise UserError("no cohort of this study has its files", cure=cure)
    return data, present


def slides_used(cells: Sequence[Cell], present: Present) -> dict[tuple[str, str], tuple[int, int]]:
    """Of each row and cohort the fewest slides that a run had (one of an earlier version: that have a file now), and the paper's."""
    used: dict[tuple[str, str], tuple[int, int]] = {}
    for cell in cells:
        if (preset := cell.config.preset) is None or (there := present.get(_files(cell))) is None:
            continue
        here = int(cell.run.environment.get("slides") or there) if cell.run.finished else there
        before = used.get((cell.row, cell.cohort), (here, 0))[0]
        used[cell.row, cell.cohort] = (min(before, here), preset.inventory.slides)
    return used


# Planning ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sources:
    """Where a user keeps files; by cohort, or ``""`` for all. ``settings`` replace the paper's."""

    features: Mapping[str, Path]
    labels: Mapping[str, Path]
    out: Path
    settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self, cohort: str) -> CohortConfig:
        """The paper's settings for a cohort, on the user's files; for one of images ``features`` is their folder."""
        images = find_cohort(cohort).images
        place: dict[str, Any] = ({} if images else {"encoder": "uni_v2"}) | {"out": str(self.out), **self.settings}
        found, labels = self.features_of(cohort), self.labels.get(cohort, self.labels.get(""))
        place |= {"images.folder" if images else "features": str(found)} if found else {}
        place |= {"labels": str(labels)} if labels else {}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cohort.yaml"
            path.write_text(yaml.safe_dump({"cohort": cohort}), encoding="utf-8")
            return load_config(path, place)

    def features_of(self, cohort: str) -> Path | None:
        """The folder named for the cohort; otherwise its subfolder of the common one; otherwise the common one."""
        if cohort in self.features or "" not in self.features:
            return self.features.get(cohort)
        root = self.features[""]
        names = {cohort.lower(), cohort.lower().replace("-", "_"), cohort.lower().removeprefix("tcga-")}
        below = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        return next((path for path in below if path.name.lower() in names), root)

    def why_not(self, cohort: str) -> str | None:
        """Why a cohort cannot be run: KGH is private, so it needs a local copy."""
        labels = self.labels.get(cohort, self.labels.get(""))
        if cohort != "KGH" or cohort in self.labels or (labels and (labels / "kgh" / "slides.csv").is_file()):
            return None
        return "private; name a local copy with --labels KGH=TABLE.csv --features KGH=FOLDER"


def plan_study(
    study: Study, sources: Sources, *, cohorts: Sequence[str] = (), seeds: Sequence[int] = ()
) -> tuple[tuple[Cell, ...], tuple[str, ...]]:
    """The cells of a study, and notes on what is left out. Columns stay in the paper's order."""
    wanted = {find_cohort(name).name for name in cohorts}
    notes = []
    if sources.settings:
        changed = ", ".join(f"{name} = {value}" for name, value in sources.settings.items())
        notes.append(
            f"set by hand: {changed}. Where the paper set it otherwise, the judgement says nothing about the paper"
        )
    cells: list[Cell] = []
    for cohort in study.columns:
        if wanted and cohort not in wanted:
            continue
        if reason := study.skip.get(cohort) or sources.why_not(cohort):
            notes.append(f"{cohort}: skipped, {reason}")
            continue
        config = sources.config(cohort)
        other = study.arms.get(cohort, {})
        shorter = {} if study.epochs is None else {"train.epochs": study.epochs}
        rows = [Row(r.name, other.get(r.arm, r.arm), {**r.changes, **shorter}) for r in study.all_rows]
        cells += plan(config, rows, tuple(seeds) or study.seeds)
    return tuple(cells), tuple(notes)


def paper_settings(cell: Cell) -> str:
    """The settings that a cell trains with, in words."""
    config, train = cell.config, cell.config.train
    parts = [
        f"{counted(train.epochs, 'epoch')}, lr {train.lr:g}, decay {train.weight_decay:g}, accumulation {train.accumulation}"
    ]
    parts += [f"batch {train.batch_size}"] if train.batch_size > 1 else []
    if config.images:
        parts.append(f"images of {config.images.size} pixels, patches of {config.images.patch}")
    else:
        parts += [f"cap {config.cap}" if config.cap else "no cap", str(config.encoder)]
    parts += [f"window {config.window}"] if config.window != 3 else []
    if find_arm(cell.arm).gated:
        gate = config.gate(cell.arm)
        parts.append(f"delta {gate.delta:g}, h {gate.hidden_dim}" + (f" ({gate.note})" if gate.note else ""))
    return ", ".join(parts)


# Writing -------------------------------------------------------------------------------------------------------------


def write_study(
    folder: Path,
    study: Study,
    cells: Sequence[Cell],
    notes: tuple[str, ...],
    running: Running,
    *,
    present: Present | None = None,
) -> ReproducedStudy:
    """The table or figure of a study from its finished cells, into ``folder``. ``present``: slides that have a file."""
    from gated_srp.reports.gates import draw_signed_gate, draw_trajectories

    files: list[Path] = []
    if study.kind == "signed-gate":
        files = draw_signed_gate(folder / "signed_gate")
    elif study.kind == "trajectories":
        for name, cohorts in study.panels.items():
            runs = {c: [cell.run for cell in cells if cell.cohort == c and cell.run.finished] for c in cohorts}
            files += draw_trajectories(runs, folder / f"trajectories_{name}", title=study.rows[0].name)
    elif study.kind == "claims":
        claims = paper.read_claims(studies_folder() / f"{study.name}.yaml")
        published = paper.read_published(studies_folder() / "published.yaml")
        table = paper.judge_claims(claims, published, folder.parent.parent)
        files = paper.write_claims(folder, study.title, table)
        return ReproducedStudy(study, (), table, folder=folder, files=tuple(files))
    elif study.kind != "elsewhere" and cells:
        return _write_table(folder, study, cells, notes, running, slides=slides_used(cells, present or {}))
    return ReproducedStudy(study, tuple(cells), folder=folder, files=tuple(files))


def _write_table(
    folder: Path, study: Study, cells: Sequence[Cell], notes: tuple[str, ...], running: Running, *, slides: Counts
) -> ReproducedStudy:
    from gated_srp.machine import this_machine
    from gated_srp.reports.tables import write_comparison, write_reproduction

    if study.kind == "runtime":
        results, notes = measured(cells, running), (*notes, f"Measured on {this_machine().name}.")
    else:
        results = collect(cells)
        notes += run_notes(cells)
    few = dict.fromkeys((cohort, *counts) for (_, cohort), counts in slides.items() if counts[0] < counts[1])
    why = "so its numbers say nothing about the paper's and are not judged"
    notes += tuple(f"{cohort}: {have:,} of {all_of:,} slides, {why}" for cohort, have, all_of in few)
    table, comparison = beside_published(study, results, slides), None
    files = write_reproduction(folder, study, table, notes)
    rows = [row.name for row in study.rows if row.name in set(results["arm"])]
    if study.kind == "table" and len(rows) > 1:
        bases = [row.name for row in study.rows if row.name in rows and find_arm(row.arm).base == row.arm]
        comparison = compare_cells(cells, results, (bases or rows[-1:])[0], repeats=0, notes=notes)
        files += write_comparison(folder / "comparison", cells, results, comparison, title=study.title)
    return ReproducedStudy(study, tuple(cells), table, comparison, folder, tuple(files))


def measured(cells: Sequence[Cell], running: Running) -> pd.DataFrame:
    """Speed and memory, one cell after the other with nothing running beside it; results in the usual form."""
    from gated_srp.study.worker import measure

    rows = []
    for cell in cells:
        try:
            found = measure(cell.spec())
        except UserError as error:
            raise UserError(f"could not be measured ({error})", where=str(cell)) from None
        running.say(f"{cell}: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))
        rows += [(cell.cohort, cell.row, cell.unit, name, value) for name, value in found.items()]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def beside_published(study: Study, results: pd.DataFrame, slides: Counts | None = None) -> pd.DataFrame:
    """One line per number of the paper's table and of further rows: ours, published, difference, verdict.

    ``slides``: of `slides_used`; where a cohort has fewer than the paper's, the verdict is withheld: ``incomplete``.
    """
    lines = []
    for row, cohort in product([row.name for row in study.all_rows], study.columns):
        for metric in study.columns[cohort]:
            at = {"row": row, "cohort": cohort, "metric": metric}
            mine = (results["cohort"] == cohort) & (results["arm"] == row) & (results["metric"] == metric)
            values = results.loc[mine, "value"].dropna().to_numpy(np.float64)
            n, printed, std = len(values), _number(study.published, **at), _number(study.std, **at)
            found = judge([], 0.0) if printed is None else judge(list(values), printed, std)
            ours = {
                "mean": values.mean() if n else math.nan,
                "std": values.std(ddof=1) if n > 1 else math.nan,
                "seeds": n,
            }
            theirs = {
                "published": math.nan if printed is None else printed,
                "published_std": math.nan if std is None else std,
            }
            verdict = "not published" if printed is None else found.word if n else "not run"
            have, all_of = (slides or {}).get((row, cohort), (math.nan, math.nan))
            judged = {"difference": found.difference, "low": found.low, "high": found.high, "verdict": verdict}
            if n and have < all_of and printed is not None:
                judged |= {"low": math.nan, "high": math.nan, "verdict": "incomplete"}
            lines.append(at | ours | theirs | judged | {"slides": have, "paper_slides": all_of})
    frame = pd.DataFrame(lines).astype({"slides": "Int64", "paper_slides": "Int64"})  # whole numbers, or missing
    return _beside_base(frame, study.rows[0].name) if study.kind == "runtime" else frame


def _beside_base(lines: pd.DataFrame, base: str) -> pd.DataFrame:
    """With ratios to the base row, which can be compared between machines. Nothing is judged."""
    own = lines[lines["row"] == base].set_index(["cohort", "metric"])
    at = pd.MultiIndex.from_frame(lines[["cohort", "metric"]])
    ratios = {
        name: lines[column].to_numpy() / own[column].reindex(at).to_numpy()
        for name, column in (("times_base", "mean"), ("published_times_base", "published"))
    }
    verdict = lines["verdict"].replace(["compatible", "not compatible", "incomplete"], "not judged")
    return lines.assign(**ratios, low=math.nan, high=math.nan, verdict=verdict)


def _number(table: PublishedTable | None, row: str, cohort: str, metric: str) -> float | None:
    if table is None:
        return None
    frame = table.frame
    found = frame.loc[(frame["name"] == row) & (frame["cohort"] == cohort) & (frame["metric"] == metric), "value"]
    return float(found.iloc[0]) if len(found) else None
