"""Runs a plan of this folder and adds a row to its tables for each finished run; what the tables have is not computed again.

    python docs/evidence/run.py docs/evidence/breakhis.yaml --data FOLDER --out RUNS [--tables FOLDER]

One run after the other, in the order of the plan; a run that was interrupted goes on where it was. The same command in a second
process takes the runs that the first one has not begun. Tables (beside the plan):
PLAN.csv (test metrics: cohort, arm, seed, metric, value), PLAN_gates.csv and, where the plan has `fields` and `repeats`,
PLAN_homogeneity.csv and PLAN_bootstrap.csv. An arm with train.init=pretrained is pretrained first, as its cohort's `pretraining` says;
where the plan says `pretraining_alone`, every arm is, and nothing is trained on labels.
"""

import argparse
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

import gated_srp
from gated_srp.config import CohortConfig, load_config
from gated_srp.files import write_whole
from gated_srp.models import find_arm
from gated_srp.reports.maps import view_slide
from gated_srp.study.cells import Cell, Row, plan
from gated_srp.study.comparison import metrics_of
from gated_srp.study.statistics import paired_bootstrap

KEY = ["cohort", "arm", "seed"]


class Table:
    """A CSV that grows by whole runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read()

    def read(self) -> None:
        known = self.path.is_file()
        self.frame = pd.read_csv(self.path, dtype={"seed": str}, keep_default_na=False) if known else pd.DataFrame()

    @property
    def runs(self) -> set[tuple[str, ...]]:
        self.read()  # another process may have added some
        return set(self.frame[KEY].itertuples(index=False, name=None)) if len(self.frame) else set()

    def add(self, rows: pd.DataFrame) -> None:
        """The rows of one run, in place of those that an interrupted driver may have left."""
        self.read()
        if len(self.frame):
            run = rows[KEY].iloc[0] if len(rows) else None
            kept = self.frame if run is None else self.frame[~(self.frame[KEY] == run).all(axis=1)]
            rows = pd.concat([kept, rows], ignore_index=True)
        self.frame = rows
        self.write()

    def write(self) -> None:
        write_whole(self.path, self.frame.to_csv(index=False, lineterminator="\n", float_format="%.6g"))


@contextmanager
def only_one(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Whether this process holds the lock; it is let go at the end, or when the process ends in any way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def config_of(content: dict, name: str, data: Path, out: Path) -> CohortConfig:
    """The settings of a cohort of the plan: those of all, changed by its own."""
    data = data / content["cohorts"][name].get("folder", "")
    settings = {key: dict(value) if isinstance(value, dict) else value for key, value in content["settings"].items()}
    for key, value in content["cohorts"][name]["settings"].items():
        settings[key] = {**settings.get(key, {}), **value} if isinstance(value, dict) else value
    settings |= {"name": name, "features": str(data / "features"), "table": str(data / "slides.csv"), "out": str(out)}
    settings["cache"] = str(out / "cache")  # prepared once; the numbers are the same
    path = out / "plans" / f"{name}.yaml"
    write_whole(path, yaml.safe_dump(settings, sort_keys=False))
    return load_config(path)


def cells_of(content: dict, data: Path, out: Path) -> Iterator[Cell]:
    """In the order of the plan: stage by stage, seed by seed, arm by arm; none of a stage that was withdrawn."""
    for stage in content["stages"]:
        if "withdrawn" in stage:
            continue
        config = config_of(content, stage["cohort"], data, out)
        yield from plan(config, [Row.of(arm) for arm in stage["arms"]], stage["seeds"])


def key_of(cell: Cell) -> tuple[str, ...]:
    return (cell.cohort, cell.row, cell.unit)


def labelled(cell: Cell, rows: pd.DataFrame) -> pd.DataFrame:
    """With the columns that say which run it is."""
    for place, (name, value) in enumerate(zip(KEY, key_of(cell), strict=True)):
        rows.insert(place, name, value)
    return rows


def homogeneity(cell: Cell, data: Path, fields: int) -> pd.DataFrame:
    """Per layer: the correlation of beta (mean over heads) with homogeneity over patches, and beta in the outer fifths."""
    slides = sorted(cell.run.predictions("test", "slide")["slide"])[:fields]
    views = [view_slide(cell.run.path, data / "features" / f"{slide}.h5") for slide in slides]
    alike = np.concatenate([view.homogeneity for view in views])
    low, high = np.quantile(alike, (0.2, 0.8))
    rows = []
    for number in range(len(views[0].layers)):
        betas = [view.layers[number].beta for view in views]
        if any(beta is None for beta in betas):
            continue
        beta = np.concatenate([one.mean(0).numpy() for one in betas])  # (patches,)
        found = float(np.corrcoef(alike, beta)[0, 1]) if beta.std() > 0 else float("nan")
        rows.append((number, len(slides), found, beta[alike <= low].mean(), beta[alike >= high].mean()))
    return pd.DataFrame(rows, columns=["layer", "fields", "correlation", "beta_lowest_fifth", "beta_highest_fifth"])


def bootstrap(cells: list[Cell], repeats: int, known: pd.DataFrame, references: dict[str, str]) -> pd.DataFrame:
    """Differences to a cohort's reference (else NA) over resampled patients, of all run folders that are here; rows of more seeds are kept."""
    done = {key_of(cell): cell for cell in cells if cell.run.finished}
    old = {(row.cohort, row.arm, row.metric): row for row in known.itertuples()} if len(known) else {}
    for cohort, arm in dict.fromkeys((cell.cohort, cell.row) for cell in done.values()):
        base = references.get(cohort, "na")
        units = [unit for name, row, unit in done if (name, row) == (cohort, arm) and (cohort, base, unit) in done]
        if arm == base:
            continue
        if any(name == cohort and row == arm and one.seeds >= len(units) for (name, row, _), one in old.items()):
            continue
        pairs = [(done[cohort, arm, u].predictions(), done[cohort, base, u].predictions()) for u in units]
        for metric, found in paired_bootstrap(pairs, metrics_of, repeats=repeats).items():
            values = (cohort, arm, metric, len(units), found.difference, found.low, found.high, found.repeats)
            columns = ["cohort", "arm", "metric", "seeds", "difference", "low", "high", "repeats"]
            old[cohort, arm, metric] = next(pd.DataFrame([values], columns=columns).itertuples())
    return pd.DataFrame(list(old.values())).drop(columns="Index", errors="ignore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tables", type=Path)
    given = parser.parse_args()
    given.data, given.out = given.data.absolute(), given.out.absolute()  # files of settings lie elsewhere
    content = yaml.safe_load(given.plan.read_text(encoding="utf-8"))
    references = {stage["cohort"]: stage["reference"] for stage in content["stages"] if "reference" in stage}
    tables, name = given.tables or given.plan.parent, given.plan.stem
    results, gates, alike, patients = (
        Table(tables / f"{name}{part}.csv") for part in ("", "_gates", "_homogeneity", "_bootstrap")
    )
    cells = list(cells_of(content, given.data, given.out))
    for cell in cells:
        with only_one(given.out / "locks" / "-".join(key_of(cell))) as mine:
            if not mine or key_of(cell) in results.runs:
                continue
            print(cell, flush=True)
            which = {"arm": cell.arm, "seed": cell.seed, "fold": cell.fold}
            found, run, alone = {}, cell.run, content.get("pretraining_alone", False)
            if cell.config.train.init or alone:
                base = config_of(content, cell.cohort, given.data, given.out)
                before = gated_srp.pretrain(base, **which, **content["cohorts"][cell.cohort]["pretraining"])
                found, run = {"pretraining_r2": before.metrics("val")["r2"]}, before if alone else run
            if not alone:
                gated_srp.train(cell.config, **which)
                found = cell.metrics() | found
            gated, fields = find_arm(cell.arm).gated, content.get("fields")
            seen = labelled(cell, homogeneity(cell, given.data, fields)) if gated and fields else None
            with only_one(given.out / "locks" / "tables", wait=True):
                if gated:
                    gates.add(labelled(cell, run.gates))
                if seen is not None:
                    alike.add(seen)
                patients.read()
                if "repeats" in content:
                    patients.frame = bootstrap(cells, content["repeats"], patients.frame, references)
                if len(patients.frame):
                    patients.write()
                rows = pd.DataFrame(found.items(), columns=["metric", "value"])
                results.add(labelled(cell, rows))  # last: it says that the run is done


if __name__ == "__main__":
    main()
