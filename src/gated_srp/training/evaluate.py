"""A trained model on another, labelled cohort: metrics with intervals over resampled patients."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gated_srp.config.cohort import CohortData, open_cohort
from gated_srp.config.schema import CohortConfig
from gated_srp.data.cache import BagCache
from gated_srp.data.files.encoders import canonical
from gated_srp.data.prepared import Preparation
from gated_srp.errors import UserError
from gated_srp.files import write_whole
from gated_srp.tasks import Task
from gated_srp.tasks.task import Findings
from gated_srp.training.folder import defined
from gated_srp.training.inputs import Level
from gated_srp.training.predict import Progress, no_progress, run_models
from gated_srp.training.trained import Member

LEVEL = 0.05


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What a model is worth on a cohort. ``metrics`` has the columns metric, value, low, high, resamples."""

    member: Member
    cohort: str
    score: Level
    metrics: pd.DataFrame
    slides: pd.DataFrame
    cases: pd.DataFrame
    skipped: pd.DataFrame  # slide, file, problem
    notes: tuple[str, ...]
    repeats: int
    seed: int
    findings: Findings | None = None  # what the task says besides: risk groups of survival

    @property
    def patients(self) -> int:
        return int(self.slides["case"].nunique())

    def as_json(self) -> dict[str, Any]:
        """Plain values; what is undefined is None."""
        card = self.member.card
        about = {key: card.get(key) for key in ("cohort", "arm", "seed", "fold", "split_hash")}
        found = {
            "run": str(self.member.run),
            "trained": about,
            "cohort": self.cohort,
            "score": self.score,
            "slides": len(self.slides),
            "patients": self.patients,
            "skipped": len(self.skipped),
            "unlike_training": int(self.slides["unlike_training"].sum()),
            "temperature": self.member.temperature,
            "bootstrap": {"resampled": "patients", "repeats": self.repeats, "seed": self.seed, "interval": 1 - LEVEL},
            "metrics": self.metrics.set_index("metric").to_dict("index"),
            "notes": list(self.notes),
        }
        if self.findings is not None:
            found |= self.findings.facts
        return dict(defined(found))

    def write(self, folder: str | Path) -> list[Path]:
        """All tables, and evaluation.json last; gives what was written."""
        folder = Path(folder)
        tables = {
            "metrics": self.metrics,
            "predictions_slide": self.slides,
            "predictions_case": self.cases,
            "skipped": self.skipped,
        }
        if self.findings is not None:
            tables |= self.findings.tables
        paths = []
        for name, table in tables.items():
            paths.append(folder / f"{name}.csv")
            write_whole(paths[-1], table.to_csv(index=False, lineterminator="\n"))
        paths.append(folder / "evaluation.json")
        write_whole(paths[-1], json.dumps(self.as_json(), indent=2, allow_nan=False) + "\n")
        return paths


def evaluate_run(
    run: str | Path,
    config: CohortConfig,
    *,
    score: Level | None = None,
    repeats: int = 1000,
    seed: int = 0,
    force: bool = False,
    progress: Progress = no_progress,
) -> Evaluation:
    """Predict every slide of a cohort's table that has a file, and score slides or cases (``score``; None: as in training).

    How bags are made comes from the model's card, not from ``config``; which files and labels, from ``config``.
    """
    member = Member.open(run)
    config = _fitting_config(member, config)
    data = open_cohort(config)
    slides, notes = _labelled(data, member.task)
    level: Level = score or member.card.get("score", "slide")
    found = run_models(
        [member],
        slides,
        reading=Preparation(**config.reading),
        cache=BagCache(config.cache.folder) if config.cache.folder else None,
        force=force,
        workers=config.train.workers,
        progress=progress,
    )
    kept = slides.set_index("slide").loc[found.slides["slide"]].reset_index()
    columns = {**member.task.answers(kept), **member.task.predict(member.calibrated(found.logits[0]))}
    predicted = found.slides[["slide", "case"]].assign(
        **columns, **{name: found.slides[name] for name in ("training_distance", "unlike_training")}
    )
    cases = _by_case(member.task, predicted, needed=level == "case")
    scored = predicted if level == "slide" else cases
    metrics = bootstrap(scored, member.task.metrics, repeats=repeats, seed=seed)
    findings = member.task.examine(cases, member.card)
    if findings is not None:
        cases = cases.assign(**findings.columns)
    said = (*(note.line for note in data.notes), *notes, *found.notes, *_cautions(member, predicted))
    return Evaluation(
        member, config.name, level, metrics, predicted, cases, found.skipped, said, repeats, seed, findings
    )


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


def _fitting_config(member: Member, config: CohortConfig) -> CohortConfig:
    """The cohort with the model's encoder; another task or encoder is refused before any file is read."""
    if config.task is not None and config.task != member.card["task"]:
        raise UserError(
            f"{config.name}: a table for {config.task}, but {member.run} was trained for {member.card['task']}. "
            "Name the columns of that task (`target`, or `time` and `event`), or another run."
        )
    if (member.images is None) != (config.images is None):
        kinds = ("feature files", "images")
        raise UserError(
            f"{config.name}: a cohort of {kinds[config.images is not None]}, but {member.run} was trained on "
            f"{kinds[member.images is not None]}. Name those with `{'features' if member.images is None else 'images'}`, or another run."
        )
    if member.encoder is None:
        return config
    if config.encoder is not None and canonical(config.encoder) != member.encoder:
        raise UserError(
            f"{config.name}: encoder {config.encoder}, but {member.run} was trained on {member.encoder}. "
            "Point `features` at that encoder's files, or name another run."
        )
    return config.model_copy(update={"encoder": member.encoder})


def _labelled(data: CohortData, task: Task) -> tuple[pd.DataFrame, list[str]]:
    """Slides with a file, their labels in the model's terms, and what to know about them."""
    frame = data.table.frame
    frame = frame.assign(file=frame["slide"].map(data.matches.found)).dropna(subset="file").reset_index(drop=True)
    frame, notes = task.matched(frame, data.table.classes, where=data.config.name)
    return frame, [note.line for note in notes]


def _by_case(task: Task, slides: pd.DataFrame, *, needed: bool) -> pd.DataFrame:
    """One row a case; without truth where the slides of a case differ in it, unless it is needed."""
    try:
        return task.by_case(slides)
    except UserError:
        if needed:
            raise
        return task.by_case(slides.drop(columns=list(task.truth)))


def _cautions(member: Member, slides: pd.DataFrame) -> list[str]:
    """Reasons to trust the numbers less."""
    cautions = []
    split = (member.run if member.run.is_dir() else member.run.parent) / "split.csv"
    if split.is_file():
        parts = pd.read_csv(split, dtype=str, keep_default_na=False)
        used = set(parts.loc[parts["split"].isin(["train", "val"]), parts.columns[0]])
        again = slides["case"].isin(used) | slides["slide"].isin(used)
        if again.any():
            cautions.append(
                f"warning: {int(again.sum())} of {len(slides)} slides trained or validated this model, "
                "so this is no external validation"
            )
    if len(slides) and slides["unlike_training"].any():
        cautions.append(f"warning: {int(slides['unlike_training'].sum())} slides are unlike the training slides")
    return cautions
