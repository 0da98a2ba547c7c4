"""A study as cells: which runs it needs, where they are, and whether those of one seed share their split.

A cell is a run folder. Its path follows from what it computes (OUT/COHORT/ARM/seed42, or OUT/variants/SETTINGS/COHORT/ARM/seed42
where settings differ from the cohort's), so studies that need the same run share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from gated_srp.config.cohort import CohortConfig, CohortData, open_cohort, preparation
from gated_srp.config.load import for_arm, with_changes
from gated_srp.config.reach import gate_reach, gates_moved
from gated_srp.data.loader import SlideDataset
from gated_srp.data.splits import Split, assign_parts
from gated_srp.errors import Note, UserError, counted
from gated_srp.models import arm_settings, find_arm
from gated_srp.training.folder import RunFolder, departures, settings_of
from gated_srp.training.inputs import fingerprints, refuse_other_files, slides_hash

QUICK_EPOCHS = 5  # a quick study trains a fifth of the epochs
QUICK_SEEDS = 3


@dataclass(frozen=True)
class Row:
    """A row of a table of results: an arm with changed settings, e.g. ``{"window": 5, "model.delta": 1.0}``.

    ``by_unit``: further changes for single seeds (or folds), by `Cell.unit`.
    """

    name: str
    arm: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    by_unit: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str) -> Row:
        """An arm with the cohort's settings, or with some of its own: ``gated_srp@train.gate_lr=10``."""
        return cls(name, *arm_settings(name))


@dataclass(frozen=True)
class Cell:
    """One run of a study; ``row`` is the name under which tables show its arm."""

    row: str
    arm: str
    seed: int
    fold: int
    config: CohortConfig

    @property
    def cohort(self) -> str:
        return self.config.name

    @property
    def unit(self) -> str:
        """What pairs it with other arms: the seed, or the seed and the fold."""
        return unit_name(self.config, self.seed, self.fold)

    @cached_property
    def run(self) -> RunFolder:
        return RunFolder.of(self.config, arm=self.arm, seed=self.seed, fold=self.fold)

    @property
    def key(self) -> Path:
        """The run folder; cells with the same key are one run."""
        return self.run.path

    @property
    def settings(self) -> dict[str, Any]:
        return settings_of(self.config, arm=self.arm, seed=self.seed)

    def metrics(self, part: str = "test") -> dict[str, float]:
        """Of a finished run, at the level that scores (slide or case)."""
        return self.run.metrics(part, self.config.score)

    def predictions(self) -> pd.DataFrame:
        """Of the test set, at the level that scores."""
        return self.run.predictions("test", self.config.score)

    def epochs_done(self) -> int:
        """How far a run in progress has come."""
        done = self.run.history["epoch"]
        return int(done.max()) if len(done) else 0

    def spec(self) -> dict[str, Any]:
        """Plain values for another process; `from_spec` reads them."""
        plain = {name: getattr(self, name) for name in ("row", "arm", "seed", "fold")}
        return plain | {"config": self.config.model_dump(mode="json")}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Cell:
        return cls(**{**spec, "config": CohortConfig.model_validate(spec["config"])})

    def __str__(self) -> str:
        return f"{self.cohort} {self.row} seed {self.unit}"


def folds(config: CohortConfig) -> range:
    """The numbers of the cohort's folds; one where it has none."""
    return range(config.folds.number if config.folds else 1)


def unit_name(config: CohortConfig, seed: int, fold: int) -> str:
    """``42``, or ``42_fold0`` where the cohort has folds."""
    return f"{seed}_fold{fold}" if config.folds else str(seed)


def plan(config: CohortConfig, rows: Sequence[Row], seeds: Sequence[int]) -> tuple[Cell, ...]:
    """All cells of a cohort, seed by seed, so that a study that is stopped early has complete pairs."""
    for row in rows:
        find_arm(row.arm)  # refuses an unknown name before anything runs
    if not rows or not seeds:
        raise UserError("nothing to run; name at least one arm and one seed.", where=config.name)
    cells = []
    for seed in seeds:
        for fold in folds(config):
            for row in rows:
                changes = {**row.changes, **row.by_unit.get(unit_name(config, seed, fold), {})}
                cells.append(Cell(row.name, row.arm, seed, fold, changed(config, changes, row.arm)))
    return tuple(cells)


def changed(config: CohortConfig, changes: Mapping[str, Any], arm: str) -> CohortConfig:
    """The cohort with other settings; its runs go into a folder named after the settings that really differ for this arm."""
    base, asked = config.resolved(arm), with_changes(config, changes).resolved(arm)

    def value(settings: Mapping[str, Any], key: str) -> Any:
        section, _, name = key.rpartition(".")
        return ((settings.get(section) or {}) if section else settings).get(name)  # a section may be absent

    different = {key: one for key, one in sorted(changes.items()) if value(base, key) != value(asked, key)}
    if not different:
        return config
    names = ",".join(f"{key}={one}" for key, one in different.items())
    return with_changes(config, {**different, "out": config.out / "variants" / names})


def quick_version(config: CohortConfig, seeds: Sequence[int]) -> tuple[CohortConfig, tuple[int, ...], str]:
    """A fair small version (fewer epochs and seeds for all arms alike, in its own folder), and a note that says so."""
    epochs = min(config.train.epochs, max(2, round(config.train.epochs / QUICK_EPOCHS)))
    kept = tuple(seeds[:QUICK_SEEDS])
    plain = config.model_dump()
    plain["train"]["epochs"], plain["out"] = epochs, config.out / "quick"
    mark = f"QUICK: {epochs} of {config.train.epochs} epochs, {len(kept)} of {counted(len(seeds), 'seed')}, for all arms alike; no result to report"
    return CohortConfig.model_validate(plain), kept, mark


def distinct(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """One cell per run folder: the first."""
    found: dict[Path, Cell] = {}
    for cell in cells:
        found.setdefault(cell.key, cell)
    return tuple(found.values())


def refuse_mismatches(cells: Iterable[Cell], data: Mapping[str, CohortData]) -> tuple[str, ...]:
    """Existing run folders must have been made with these settings and start weights, and the slides, labels, splits and files that
    ``data`` (by cohort) now gives; notes on what could not be compared."""
    expected: dict[tuple[str, str], str] = {}
    inputs = _Inputs(data)
    for cell in distinct(cells):
        cell.run.refuse_other_settings(cell.settings)
        _refuse_other_start(cell)
        at = (cell.cohort, cell.unit)
        if at not in expected and cell.cohort in data:
            expected[at] = data[cell.cohort].split(cell.seed, cell.fold).hash
        there = split_hash(cell)
        if there is not None and there != expected.get(at, there):
            done = "trained" if cell.run.finished else "begun"
            raise UserError(
                f"was {done} on another split than the table gives now ({there[:12]}, expected {expected[at][:12]}), "
                "so it cannot be paired",
                where=cell.key,
                cure="Restore the table, choose another `out`, or remove the folder.",
                kind="other_split",
            )
        if cell.cohort in data:
            inputs.refuse_others(cell)
    return tuple(inputs.notes)


class _Inputs:
    """What runs would be given now, read once for all cells that share it."""

    def __init__(self, data: Mapping[str, CohortData]) -> None:
        self.data, self.notes = data, dict[str, None]()
        self.opened: dict[str, CohortData] = {}  # by the settings that say which slides there are
        self.hashes: dict[tuple[str, str, tuple[str, ...]], str] = {}  # also by unit, and slides that lost their file
        self.files: dict[tuple[str, bool], pd.DataFrame] = {}  # fingerprints, of both magnifications or one

    def refuse_others(self, cell: Cell) -> None:
        """Nothing is asked of a folder without a run, or of a version that kept neither a hash of slides nor fingerprints."""
        run, known, config = cell.run, cell.run.features, for_arm(cell.config, cell.arm)
        if not (run.finished or run.begun) or (known.empty and "slides_hash" not in run.environment):
            return
        self.opened = self.opened or {_slides_of(one.config): one for one in self.data.values()}
        here = _slides_of(config)
        data = self.opened[here] if here in self.opened else self.opened.setdefault(here, open_cohort(config))
        gone = tuple(sorted(set(data.matches.missing) & set(known.get("slide", ())))) if run.finished else ()
        if gone:
            what = f"{len(gone)} of {len(known)} slides have no feature file any more, e.g. {gone[0]!r}"
            self.notes[f"{cell.cohort}, seed {cell.unit}: {what}; whether those files changed cannot be told"] = None
        at = (here, cell.unit, gone)
        if at not in self.hashes:
            rows = data.table.frame.assign(part=assign_parts(data.split(cell.seed, cell.fold), data.table))
            rows = rows[rows["part"].notna() & rows["slide"].isin({*data.matches.found, *gone})]
            task = data.table.kind.fit(rows[rows["part"] == "train"], data.table.classes, config.metric)
            self.hashes[at] = slides_hash(rows, task.truth, config.covariates)
        run.refuse_other_slides(self.hashes[at])
        files = (here, config.features_low is not None)
        if not known.empty and files not in self.files:
            slides = data.slides(cell.seed, cell.fold)
            self.files[files] = fingerprints(SlideDataset(slides, preparation(config)))
        if not known.empty:
            refuse_other_files(run, self.files[files])


def _slides_of(config: CohortConfig) -> str:
    """The settings without those that have no say in which slides, labels and parts there are."""
    return config.model_dump_json(exclude={"train", "model", "out", "arms", "seeds", "window", "features_low"})


def _refuse_other_start(cell: Cell) -> None:
    """A cell that starts from a pretraining needs it before anything runs, and what is there must have started from it, or from fresh weights."""
    there = cell.run.begun or cell.run.finished
    if cell.config.train.only and not cell.config.train.init and not there:
        how = f"--arm {cell.arm} --seed {cell.seed}{f' --fold {cell.fold}' if cell.config.folds else ''}"
        how += f" --set train.only={cell.config.train.only} --out '{cell.config.out}'"
        cure = f"Fit it first: `gated-srp train COHORT --init MODEL {how}`; a study then takes the finished run."
        raise UserError(
            "gate fits the gates of a trained base, which a study cannot name", where="train.only", cure=cure
        )
    if not (cell.config.train.init or cell.run.environment.get("init")):
        return
    from gated_srp.training.pretrain import pretrained_model  # not above: few studies need them
    from gated_srp.training.train import Job, refuse_other_weights

    job = Job(cell.config, cell.arm, cell.seed, cell.fold)
    start = pretrained_model(job) if cell.config.train.init else None
    if there:
        refuse_other_weights(replace(job, init=start))


def refuse_unpaired(cells: Iterable[Cell]) -> None:
    """All cells of a cohort and seed, finished or begun, must have the same split; otherwise their differences mean nothing."""
    seen: dict[tuple[str, str], tuple[str, Cell]] = {}
    for cell in distinct(cells):
        there = split_hash(cell)
        if there is None:
            continue
        first, other = seen.setdefault((cell.cohort, cell.unit), (there, cell))
        if first != there:
            raise UserError(
                f"different splits ({there[:12]}, {first[:12]}), so they are no pair",
                where=f"{cell.key} and {other.key}",
                cure="Remove the older folder and start the same command again.",
                kind="other_split",
            )


def split_hash(cell: Cell) -> str | None:
    """Of a finished run as it says itself, of an unfinished one from its split.csv; None if there is neither."""
    run = cell.run
    if run.finished:
        found = run.results.get("split_hash")
        return None if found is None else str(found)
    if not run.begun or (rows := run.split) is None:
        return None
    units = rows.columns[0]
    return Split(str(units), dict(zip(rows[units], rows["split"], strict=True)), str(run.path)).hash


def run_notes(cells: Iterable[Cell]) -> tuple[str, ...]:
    """What finished runs say of themselves that belongs beside their numbers: ties between epochs, remarks on test metrics."""
    done = [(cell, cell.run.results) for cell in distinct(cells) if cell.run.finished]
    tied = [(cell, found["ties"]) for cell, found in done if (found.get("ties") or {}).get("epochs", 1) > 1]
    notes = []
    if tied:
        first, ties = tied[0]
        notes.append(
            f"in {len(tied)} of {counted(len(done), 'run')} the kept epoch tied with others on validation, e.g. {first} with "
            f"{ties['epochs']} epochs in all (select.ties: {ties['rule']})"
        )
    asked = {cell: departures(cell.run.settings) for cell, _ in done}
    for words in dict.fromkeys(line for lines in asked.values() for line in lines):
        rows = dict.fromkeys(cell.row for cell, lines in asked.items() if words in lines)
        notes.append(words if all(words in lines for lines in asked.values()) else f"{', '.join(rows)}: {words}")
    said: dict[tuple[str, str, str], list[str]] = {}
    for cell, found in done:
        for metric, remark in ((found.get("remarks") or {}).get("test") or {}).items():
            said.setdefault((cell.cohort, metric, remark), []).append(cell.unit)
    for (cohort, metric, remark), units in said.items():
        distinct_units = list(dict.fromkeys(units))
        seeds = f"seed{'s' if len(distinct_units) > 1 else ''} {', '.join(distinct_units)}"
        notes.append(f"{cohort}, {seeds}, {metric}: {remark}")
    return tuple(notes)


def short_gates(cells: Sequence[Cell], data: CohortData) -> tuple[Note, ...]:
    """A warning for each row whose gates can hardly leave the identity in the steps of its first cell."""
    found: dict[str, Note] = {}
    for cell in cells:
        if cell.row not in found and not cell.config.train.init:  # those of a pretraining start from learned gates
            frame = data.slides(cell.seed, cell.fold)
            bags = int(frame.loc[frame["part"] == "train", cell.config.unit].nunique())
            reach = gate_reach(cell.config, bags, cell.arm) if bags else None
            if reach and reach.short:
                found[cell.row] = reach.note(cell.row)
    return tuple(found.values())


def moved_gates(cells: Iterable[Cell]) -> tuple[str, ...]:
    """What the gates of each row did in the last epoch of each of its finished runs, means over runs."""
    rows: dict[str, list[pd.DataFrame]] = {}
    for cell in cells:
        if cell.run.finished and len(gates := cell.run.gates):
            last = gates[gates["epoch"] == gates["epoch"].max()]  # its own: some runs stop early
            rows.setdefault(cell.row, []).append(last.assign(epoch=0))
    means = {row: pd.concat(runs).groupby("layer", as_index=False).mean() for row, runs in rows.items()}
    return tuple(f"gates of {row} in the last epoch: {gates_moved(found)}" for row, found in means.items())
