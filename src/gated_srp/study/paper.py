"""The paper's studies by name, as data: the printed numbers, which rows and columns a table has, and the cells it needs.

A study's file (``studies/NAME.yaml``) takes rows and columns from a table of ``published.yaml``, or lists its own.
"""

from __future__ import annotations

import difflib
import site
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import yaml

from gated_srp.config.cohort import CohortConfig
from gated_srp.config.load import load_config
from gated_srp.config.presets import SEEDS, find_cohort
from gated_srp.errors import UserError
from gated_srp.models import Sizes, find_arm
from gated_srp.study.cells import Cell, Row, plan

Kind = Literal["table", "runtime", "trajectories", "signed-gate", "claims", "elsewhere"]
UNTUNED = {"model.delta": Sizes.delta, "model.hidden_dim": Sizes.hidden_dim}


@dataclass(frozen=True)
class PublishedTable:
    """One table; ``frame`` has one row per number: name (as printed), arm, cohort, metric, value, and the row's settings."""

    name: str
    source: str
    statistic: Literal["mean", "std"]
    frame: pd.DataFrame

    def as_results(self) -> pd.DataFrame:
        """In the form of results: each printed number is one "seed"."""
        return self.frame.assign(seed=self.statistic)[["cohort", "arm", "seed", "metric", "value"]]


def read_published(path: str | Path) -> dict[str, PublishedTable]:
    """All tables of a file in the form of ``studies/published.yaml``."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        return {name: _table(name, table) for name, table in content["tables"].items()}
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        what = f"not a file of published tables ({error})"
        raise UserError(what, where=path, cure="Restore studies/published.yaml.") from None


def _table(name: str, table: dict[str, Any]) -> PublishedTable:
    columns = [(cohort, metric) for cohort, metrics in table["columns"].items() for metric in metrics]
    rows = []
    for row in table["rows"]:
        about = {key: value for key, value in row.items() if key != "values"}
        for (cohort, metric), value in zip(columns, row["values"], strict=True):
            rows.append({**about, "cohort": cohort, "metric": metric, "value": value})
    return PublishedTable(name, table["source"], table["statistic"], pd.DataFrame(rows))


@dataclass(frozen=True)
class Study:
    """One table or figure.

    ``columns``: metrics by cohort; ``panels``: cohorts by figure; ``skip``: reasons by cohort; ``arms``: by cohort, the arm that
    stands for a row's where the cohort needs another kind of model.
    """

    name: str
    title: str
    kind: Kind
    rows: tuple[Row, ...]
    columns: Mapping[str, tuple[str, ...]]
    published: PublishedTable | None = None
    std: PublishedTable | None = None
    seeds: tuple[int, ...] = SEEDS
    untuned: bool = False
    epochs: int | None = None
    panels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    skip: Mapping[str, str] = field(default_factory=dict)
    arms: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    command: str = ""  # of a figure that another command draws

    @property
    def all_rows(self) -> tuple[Row, ...]:
        """With an untuned one after each Gated SRP row, where the study asks for it."""
        found: list[Row] = []
        for row in self.rows:
            found.append(row)
            if self.untuned and find_arm(row.arm).method:
                found.append(untuned(row))
        return tuple(found)

    def only(self, cohorts: Sequence[str]) -> Study:
        """The same with the columns of these cohorts; with all of them where none is named."""
        wanted = {find_cohort(name).name for name in cohorts}
        kept = {cohort: metrics for cohort, metrics in self.columns.items() if cohort in wanted}
        return replace(self, columns=kept) if wanted else self


def untuned(row: Row) -> Row:
    """The same row with delta 1 and h 64, as an untuned user would take them."""
    return Row(f"{row.name}, untuned (δ 1, h 64)", row.arm, {**row.changes, **UNTUNED})


# Reading -------------------------------------------------------------------------------------------------------------


def studies_folder() -> Path:
    """``studies/`` of the checkout, or of the installed package."""
    shares = [Path(sysconfig.get_path("data")), Path(site.getuserbase())]
    places = [Path(__file__).resolve().parents[3] / "studies", *(share / "share/gated-srp/studies" for share in shares)]
    found = next((place for place in places if (place / "published.yaml").is_file()), None)
    if found is None:
        raise UserError("the folder studies/ of gated-srp is missing", cure="Install the package again.")
    return found


def study_names(folder: Path) -> list[str]:
    """In alphabetical order; ``all`` stands for all of them."""
    return sorted(path.stem for path in folder.glob("*.yaml") if path.stem != "published")


def read_studies(name: str, folder: Path) -> tuple[Study, ...]:
    """The study of this name; all of them for ``all``."""
    names = study_names(folder)
    if name != "all" and name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        guess = f"Did you mean {near[0]}? " if near else ""
        raise UserError(f"no study {name!r}", cure=f"{guess}There are: {', '.join(names)}, all.")
    published = read_published(folder / "published.yaml")
    return tuple(_read(folder / f"{one}.yaml", published) for one in (names if name == "all" else [name]))


def _read(path: Path, published: Mapping[str, PublishedTable]) -> Study:
    try:
        content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        table = published[content["published"]] if "published" in content else None
        columns = {str(cohort): tuple(metrics) for cohort, metrics in content.get("columns", {}).items()}
        panels = {str(name): tuple(cohorts) for name, cohorts in content.get("panels", {}).items()}
        columns |= {cohort: () for cohorts in panels.values() for cohort in cohorts}
        if table is not None:
            pairs = table.frame[["cohort", "metric"]].drop_duplicates()
            columns = {str(cohort): tuple(part["metric"]) for cohort, part in pairs.groupby("cohort", sort=False)}
        return Study(
            name=path.stem,
            title=content["title"],
            kind=content.get("kind", "table"),
            rows=tuple(_row(row) for row in content.get("rows", [])) or _rows_of(table),
            columns=columns,
            published=table,
            std=published[content["std"]] if "std" in content else None,
            seeds=tuple(content.get("seeds", SEEDS)),
            untuned=content.get("untuned", False),
            epochs=content.get("epochs"),
            panels=panels,
            skip=content.get("skip", {}),
            arms=content.get("arms", {}),
            command=content.get("command", ""),
        )
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"not a study ({error!r})", where=path, cure="Restore it from the repository.") from None


def _row(row: Mapping[str, Any]) -> Row:
    return Row(row["name"], row["arm"], {key: value for key, value in row.items() if key not in ("name", "arm")})


def _rows_of(table: PublishedTable | None) -> tuple[Row, ...]:
    """The rows of a published table: arms, and settings such as the encoder or the window."""
    if table is None:
        return ()
    about = table.frame.drop(columns=["cohort", "metric", "value"]).drop_duplicates("name")
    return tuple(_row({str(key): _plain(value) for key, value in row.items()}) for row in about.to_dict("records"))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


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
        reason = study.skip.get(cohort) or sources.why_not(cohort)
        if reason:
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
    parts = [f"{train.epochs} epochs, lr {train.lr:g}, decay {train.weight_decay:g}, accumulation {train.accumulation}"]
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
