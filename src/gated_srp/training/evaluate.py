"""A trained model on another, labelled cohort: metrics with intervals over resampled patients."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from gated_srp.config.cohort import CohortConfig, open_cohort, preparation
from gated_srp.config.load import load_config
from gated_srp.data.cache import BagCache
from gated_srp.data.covariates import needed
from gated_srp.data.files.siblings import may_be_same
from gated_srp.data.prepared import Preparation
from gated_srp.errors import Note, UserError, counted
from gated_srp.files import write_whole
from gated_srp.progress import Progress, silent
from gated_srp.records import csv_text
from gated_srp.tasks import Task
from gated_srp.tasks.task import Findings, Level
from gated_srp.training.folder import defined
from gated_srp.training.predict import run_models, seen_by
from gated_srp.training.seen import external_validation, refuse_seen
from gated_srp.training.trained import TrainedRun

LEVEL = 0.05


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What a model is worth on a cohort. ``metrics`` has the columns metric, value, low, high, resamples."""

    run: TrainedRun
    cohort: str
    score: Level
    metrics: pd.DataFrame
    slides: pd.DataFrame
    cases: pd.DataFrame
    skipped: pd.DataFrame  # slide, file, problem
    notes: tuple[Note, ...]
    repeats: int
    seed: int
    findings: Findings | None = None  # what the task says besides: risk groups of survival
    target: str = "label"  # the column of the truth

    @property
    def patients(self) -> int:
        return int(self.slides["case"].nunique())

    @property
    def remarks(self) -> dict[str, str]:
        """What to say beside metrics, by metric."""
        return self.run.task.remarks(self.slides if self.score == "slide" else self.cases)

    @property
    def external(self) -> tuple[bool | None, str]:
        """Whether this may be called an external validation (None: the model's card does not say), and the sentence that says so."""
        return external_validation(self.run.seen, list(self.slides["seen_in_training"]))

    def as_json(self) -> dict[str, Any]:
        """Plain values; what is undefined is None."""
        card = self.run.card
        about = {key: card.get(key) for key in ("cohort", "arm", "seed", "fold", "split_hash")}
        found = {
            "run": str(self.run.path),
            "trained": about,
            "cohort": self.cohort,
            "score": self.score,
            "slides": int(self.cases["slides"].sum()),
            "patients": self.patients,
            "skipped": len(self.skipped),
            "unlike_training": int(self.slides["unlike_training"].sum()),
            "temperature": self.run.temperature,
            "bootstrap": {"resampled": "patients", "repeats": self.repeats, "seed": self.seed, "interval": 1 - LEVEL},
            "metrics": self.metrics.set_index("metric").to_dict("index"),
            "remarks": self.remarks,
            "external_validation": self.external[0],
            "validation": self.external[1],
            "overlap": dict(Counter(filter(None, self.slides["seen_in_training"]))),
            "notes": [note.line for note in self.notes],
        }
        if self.findings is not None:
            found |= self.findings.facts
        return dict(defined(found))

    def stamp(self) -> pd.DataFrame:
        """One row per patient with STAMP's columns."""
        from gated_srp.data.prediction_tables import stamp_table

        return stamp_table(self.cases, self.target)

    def write(self, folder: str | Path, layout: Literal["stamp"] | None = None) -> list[Path]:
        """All tables, and evaluation.json last; gives what was written. ``layout``: patients also as another tool's table."""
        folder = Path(folder)
        tables = {
            "metrics": self.metrics,
            **({} if self.run.patients else {"predictions_slide": self.slides}),
            "predictions_case": self.cases,
            "skipped": self.skipped,
        }
        if self.findings is not None:
            tables |= self.findings.tables
        if layout or (folder / "patient-preds.csv").exists():  # that of an earlier evaluation would mislead
            tables["patient-preds"] = self.stamp()
        paths = []
        for name, table in tables.items():
            paths.append(folder / f"{name}.csv")
            write_whole(paths[-1], csv_text(table))
        paths.append(folder / "evaluation.json")
        write_whole(paths[-1], json.dumps(self.as_json(), indent=2, allow_nan=False) + "\n")
        return paths

    def _repr_html_(self) -> str:
        about = escape(f"{self.run.path} on {self.cohort}, scored by {self.score}")
        return f"<p>{about}</p><p><b>{escape(self.external[1])}</b></p>{self.metrics.to_html(index=False)}"


def evaluate(
    run: str | Path | TrainedRun,
    cohort: str | Path | CohortConfig,
    *,
    score: Level | None = None,
    repeats: int = 1000,
    seed: int = 0,
    force: bool = False,
    allow_overlap: bool = False,
    progress: Progress = silent,
) -> Evaluation:
    """Score a finished run on another labelled cohort, with intervals over resampled patients.

    Args:
        run: a run's folder or its model file.
        cohort: the cohort's YAML, or its config. It says which files and labels; how bags are made comes from the model's card.
        score: ``"slide"`` or ``"case"``; None: as in training.
        repeats: how often patients are resampled.
        seed: of the resampling.
        force: another stride than in training, or an encoder's name that we do not know, is a warning rather than a reason to skip.
        allow_overlap: score slides and patients that trained or validated the model too, which is else refused; the results say so.
        progress: called after each slide.

    Returns:
        `Evaluation`: ``metrics`` with intervals, predictions of ``slides`` and ``cases``, ``skipped``, ``notes``, ``write(folder)``.

    Example:
        >>> import gated_srp
        >>> gated_srp.evaluate("runs/BRACS/gated_srp/seed42", "other.yaml").metrics  # doctest: +SKIP
    """
    if score not in (None, "slide", "case"):
        raise UserError("expected slide or case.", where=f"--score {score}")
    trained = TrainedRun.open(run)
    config = _fitting_config(trained, cohort if isinstance(cohort, CohortConfig) else load_config(cohort))
    data = open_cohort(config)
    frame = data.table.frame
    frame = frame.assign(file=frame["slide"].map(data.matches.found)).dropna(subset="file").reset_index(drop=True)
    slides, notes = trained.task.matched(frame, data.table.classes, where=config.name)
    notes += refuse_seen(trained.seen, slides, where=config.name, allowed=allow_overlap)
    level: Level = score or trained.card.get("score", "slide")
    units = slides
    if trained.patients:
        from gated_srp.data.patients import as_patients, refuse_torn  # not above: rarely so

        if score == "slide":
            raise UserError("the model's bags are patients, so slides have no score", where="--score slide")
        refuse_torn(slides, trained.task.truth, where=config.name)
        units = as_patients(slides)
    found = run_models(
        [trained],
        slides,
        reading=Preparation(**config.reading, regions=preparation(config).regions, features_low=config.features_low),
        cache=BagCache(config.cache.folder) if config.cache.folder else None,
        force=force,
        workers=config.train.workers,
        progress=progress,
    )
    kept = units.set_index("slide").loc[found.slides["slide"]].reset_index()
    logits = found.logits[0].double()
    columns = {**trained.task.answers(kept), **trained.task.predict(logits)}
    columns |= trained.calibrated(logits) if trained.temperature != 1.0 else {}
    predicted = found.slides[["slide", "case"]].assign(
        **columns, **{name: found.slides[name] for name in ("training_distance", "unlike_training")}
    )
    predicted["seen_in_training"] = seen_by([trained], slides, found.slides)[0]
    cases = _by_case(trained.task, predicted, needed=level == "case")
    if trained.patients:
        cases["slides"] = kept["slides"]
    scored = predicted if level == "slide" else cases
    metrics = bootstrap(scored, trained.task.metrics, repeats=repeats, seed=seed)
    findings = trained.task.examine(cases, trained.card)
    if findings is not None:
        cases = cases.assign(**findings.columns)
    said = (*data.notes, *notes, *found.notes, *_cautions(predicted))
    tables = (metrics, predicted, cases, found.skipped)
    target = config.target if isinstance(config.target, str) else "label"
    return Evaluation(trained, config.name, level, *tables, said, repeats, seed, findings, target)


def bootstrap(
    predictions: pd.DataFrame,
    metrics: Callable[[pd.DataFrame], Mapping[str, float]],
    *,
    repeats: int = 1000,
    seed: int = 0,
) -> pd.DataFrame:
    """Each metric with its 95 % percentile interval over resampled patients: metric, value, low, high, resamples.

    As many patients (column ``case``) as there are, drawn with replacement; one drawn twice counts with all slides twice.
    ``resamples`` counts those in which the metric is defined; the others cannot speak.
    """
    whole = metrics(predictions)
    place = {case: number for number, case in enumerate(sorted(set(predictions["case"])))}
    patient = predictions["case"].map(place).to_numpy(np.int64)
    rng = np.random.default_rng(seed)
    drawn: dict[str, list[float]] = {name: [] for name in whole}
    for _ in range(repeats):
        times = np.bincount(rng.integers(0, len(place), len(place)), minlength=len(place))
        chosen = predictions.iloc[np.repeat(np.arange(len(patient)), times[patient])]
        for name, value in metrics(chosen).items():
            drawn[name].append(value)
    rows = []
    for name, value in whole.items():
        known = np.asarray(drawn[name])[~np.isnan(drawn[name])]
        low, high = np.quantile(known, (LEVEL / 2, 1 - LEVEL / 2)) if len(known) else (np.nan, np.nan)
        rows.append((name, value, float(low), float(high), len(known)))
    return pd.DataFrame(rows, columns=["metric", "value", "low", "high", "resamples"])


def _fitting_config(run: TrainedRun, config: CohortConfig) -> CohortConfig:
    """The cohort with the model's encoder; another task or encoder is refused before any file is read."""
    if config.task is not None and config.task != run.task.name:
        raise UserError(
            f"a table for {config.task}, but {run.path} was trained for {run.task.name}",
            where=config.name,
            cure="Name the columns of that task (`target`, or `time` and `event`), or another run.",
        )
    if (run.images is None) != (config.images is None):
        kinds = ("feature files", "images")
        raise UserError(
            f"a cohort of {kinds[config.images is not None]}, but {run.path} was trained on {kinds[run.images is not None]}",
            where=config.name,
            cure=f"Name those with `{'features' if run.images is None else 'images'}`, or another run.",
        )
    if run.covariates is not None:  # by their names in the training table, whatever else the cohort may name
        if config.table is None:
            raise needed(run.covariates, config.name)
        config = config.model_copy(update={"covariates": run.covariates})
    if run.encoder is None:
        return config
    if config.encoder is not None and not may_be_same(config.encoder, run.encoder):
        raise UserError(
            f"encoder {config.encoder}, but {run.path} was trained on {run.encoder}",
            where=config.name,
            cure="Point `features` at that encoder's files, or name another run.",
        )
    return config.model_copy(update={"encoder": run.encoder})


def _by_case(task: Task, slides: pd.DataFrame, *, needed: bool) -> pd.DataFrame:
    """One row per case; without truth where the slides of a case differ in it, unless it is needed."""
    try:
        return task.by_case(slides)
    except UserError:
        if needed:
            raise
        return task.by_case(slides.drop(columns=list(task.truth)))


def _cautions(slides: pd.DataFrame) -> Iterator[Note]:
    """Reasons to trust the numbers less."""
    if unlike := int(slides["unlike_training"].sum()):
        yield Note("warning", "unlike_training", f"{counted(unlike, 'slide')} unlike the training slides")
