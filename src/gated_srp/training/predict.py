"""Trained models on slides without labels: probabilities, or risk and survival; several runs as an ensemble.

Shapes: M runs, B slides, C channels, K outputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import torch

from gated_srp.data.loader import BagLoader, SlideBag
from gated_srp.data.prepared import Preparation
from gated_srp.errors import Note, UserError, counted, joined
from gated_srp.files import write_whole
from gated_srp.progress import Event, Progress, silent
from gated_srp.records import csv_text
from gated_srp.tasks import Task
from gated_srp.tasks.metrics import FEWEST
from gated_srp.training.inputs import slide_mean
from gated_srp.training.known import files_for, low_for, with_ids
from gated_srp.training.loop import error_context
from gated_srp.training.ranks import Ranks
from gated_srp.training.seen import compare_with_training
from gated_srp.training.trained import TrainedRun, average, drawn_for, fitting_bags, open_runs

if TYPE_CHECKING:
    from torch import Tensor

    from gated_srp.data.cache import BagCache

_AS_STORED = Preparation()
_NAMED = ("slide", "case", "file")
_MOST = 10  # kinds of warnings that are reported


@dataclass(frozen=True, eq=False)
class Predictions:
    """One row per slide in ``table``, and what could not be predicted.

    Columns: slide, case (empty where unknown), file, patches; then, as in a run's own predictions, ``predicted``, ``prob_<class>`` (raw)
    and, where a temperature was fitted, ``calibrated_<class>``, or ``risk`` and ``survival_at_<time>``; with several runs their mean, and
    ``<name>_std`` over the runs (n - 1); ``training_distance`` (1: as far from the training slides' mean as the farthest of them) and
    ``unlike_training``; ``seen_in_training``: that the model was trained or validated on the slide, or on its patient.
    With a budget ``budget`` and ``kept_patches``, how many of them the models saw.
    Of a model whose bags are patients there is one row per patient: ``slide`` and ``file`` list them in their order, the distance is
    that of the farthest slide.
    """

    table: pd.DataFrame
    skipped: pd.DataFrame  # slide, file, problem
    notes: tuple[Note, ...]
    runs: tuple[TrainedRun, ...]

    @property
    def task(self) -> Task:
        """What the columns mean."""
        return self.runs[0].task

    def summary(self) -> list[str]:
        """What the table says at a glance."""
        return self.task.summary(self.table)

    def stamp(self, target: str = "label") -> pd.DataFrame:
        """One row per patient with STAMP's columns; a slide of an unknown patient is one of its own."""
        from gated_srp.data.prediction_tables import stamp_table

        known = self.table["case"].fillna("").astype(str)
        return stamp_table(
            self.task.by_case(self.table.assign(case=known.where(known != "", self.table["slide"]))), target
        )

    def write(self, path: str | Path, layout: Literal["stamp"] | None = None) -> list[Path]:
        """The table, and beside it NAME_skipped.csv if a slide was skipped; gives the files that were written. ``layout``: as another tool's."""
        path = Path(path)
        beside = path.with_name(f"{path.stem}_skipped.csv")
        written = [path]
        if len(self.skipped) or beside.exists():  # a list of an earlier prediction would mislead
            write_whole(beside, csv_text(self.skipped))
            written.append(beside)
        write_whole(path, csv_text(self.stamp() if layout else self.table))
        return written

    def _repr_html_(self) -> str:
        skipped = f"<p>{len(self.skipped)} skipped</p>{self.skipped.to_html()}" if len(self.skipped) else ""
        return f"{self.table.to_html()}{skipped}"


def predict(
    runs: str | Path | TrainedRun | Sequence[str | Path | TrainedRun],
    features: str | Path | Sequence[str | Path],
    *,
    features_key: str | None = None,
    coords_key: str | None = None,
    coords: str | Path | None = None,
    table: str | Path | None = None,
    annotations: str | Path | None = None,
    features_low: str | Path | None = None,
    stride: float | None = None,
    force: bool = False,
    workers: int = 1,
    budget: float | None = None,
    progress: Progress = silent,
) -> Predictions:
    """Predict slides with one finished run, or with several as an ensemble.

    Args:
        runs: a run's folder or model file, or several of one task on the same features.
        features: a folder of feature files (of images, for a model of images), one file, or a list of files.
        features_key: name of the feature array, where it is unusual.
        coords_key: name of the array of positions, where it is unusual.
        coords: the folder of the positions, where it is not beside the features.
        table: a spreadsheet of slides and their patients, or a cohort's YAML: the ids are then its own, and the model's patients are found.
            A run with covariates needs it, with their columns.
        annotations: folder of what was drawn on the slides, for runs that were trained on ``regions``; other runs refuse it.
        features_low: folder of the slides' lower magnification, for runs that were trained on two; other runs refuse it.
        stride: distance between patches, where what the file says is wrong.
        force: another stride than in training, or an encoder's name that we do not know, is a warning rather than a reason to skip.
        workers: processes that read ahead.
        budget: the share of each slide's patches that the models see, the most homogeneous thinned out; columns ``budget`` and
            ``kept_patches`` say so. docs/method.md defines it.
        progress: called after each slide.

    Returns:
        `Predictions`: ``table``, ``skipped``, ``notes``, ``write(path)``. Files that cannot be used are skipped, with the reason;
        if none can be used, that is an error.

    Example:
        >>> import gated_srp
        >>> found = gated_srp.predict("runs/BRACS/gated_srp/seed42", "feats/")  # doctest: +SKIP
        >>> found.table[["slide", "predicted"]]  # doctest: +SKIP
    """
    several = list(runs) if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs]
    members = open_runs(several)
    files = files_for(members[0], features) if isinstance(features, str | Path) else list(features)
    slides = with_ids(files, table, members[0].covariates)
    keys: dict[str, Any] = {"features_key": features_key, "coords_key": coords_key, "stride": stride, "coords": coords}
    reading = reading_of(members, annotations=annotations, features_low=features_low, **keys)
    kept, how = dict[str, int](), dict[str, Any](workers=workers, progress=progress)
    if budget is not None:
        from gated_srp.training.budget import ThinnedModel  # not above: rarely asked for

        how["model"] = partial(ThinnedModel, share=budget, kept=kept)
    found = run_models(members, slides, reading=reading, force=force, **how)
    about = found.slides
    thinned = pd.DataFrame({"budget": budget, "kept_patches": about["slide"].map(kept)}) if budget is not None else None
    seen, notes = seen_by(members, slides, about)
    if members[0].patients:
        names = slides.sort_values("slide").groupby("case")[["slide", "file"]].agg("; ".join)  # as in the bag
        about = about.assign(slide=about["case"].map(names["slide"]), file=about["case"].map(names["file"]))
    named, likeness = about[["slide", "case", "file", "patches"]], about[["training_distance", "unlike_training"]]
    answers = pd.concat([named, average(members, found.logits), likeness], axis=1).assign(seen_in_training=seen)
    if thinned is not None:
        answers = pd.concat([answers, thinned], axis=1)
        share = float((thinned["kept_patches"] / answers["patches"]).mean())
        what = f"budget {budget:g}: the models saw {share:.1%} of the patches per slide; see the column kept_patches"
        notes = (*notes, Note("note", "budget", what))
    cures = {
        "seen_in_training": "Their predictions are no test of it; see the column seen_in_training.",
        "patients_unknown": "Name their spreadsheet with --table.",
    }
    said = tuple(replace(note, cure=cures.get(note.kind, "")) for note in notes)
    return Predictions(answers, found.skipped, (*found.notes, *said), tuple(members))


def seen_by(
    runs: Sequence[TrainedRun], slides: pd.DataFrame, predicted: pd.DataFrame
) -> tuple[list[str], tuple[Note, ...]]:
    """What the models have seen of each bag that was predicted, and notes; of a patient what is known of the first such slide."""
    if not runs[0].patients:
        return compare_with_training([run.seen for run in runs], predicted)
    chosen = slides[slides["case"].isin(predicted["case"])]
    words, notes = compare_with_training([run.seen for run in runs], chosen)
    by_case: dict[str, str] = {}
    for case, word in zip(chosen["case"], words, strict=True):
        by_case[case] = by_case.get(case) or word
    return [by_case[case] for case in predicted["case"]], notes


def reading_of(
    runs: Sequence[TrainedRun],
    *,
    coords: str | Path | None = None,
    annotations: str | Path | None = None,
    features_low: str | Path | None = None,
    **keys: Any,
) -> Preparation:
    """How files are read: the arguments of `predict` that say so, and what the runs need besides."""
    drawn: dict[str, Any] = {"regions": drawn_for(runs, annotations), "features_low": low_for(runs, features_low)}
    return Preparation(**keys, **drawn, coords=Path(coords) if coords else None)


# Models on slides ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Outputs:
    """What runs' models gave for slides. Row b of ``slides`` belongs to row b of each run's logits."""

    slides: pd.DataFrame  # slide, case, file, patches, training_distance, unlike_training
    logits: list[Tensor]  # M of (B, K), before calibration
    skipped: pd.DataFrame  # slide, file, problem
    notes: tuple[Note, ...]


def run_models(
    runs: Sequence[TrainedRun],
    slides: pd.DataFrame,
    *,
    reading: Preparation = _AS_STORED,
    cache: BagCache | None = None,
    force: bool = False,
    workers: int = 1,
    progress: Progress = silent,
    model: Callable[[TrainedRun], RunModel] | None = None,
) -> Outputs:
    """Every run's logits of slides (columns slide, case, file). Files that cannot be used are skipped; all of them: an error.

    ``model``: what is called for each run, if not its model: it may give something else than logits.
    """
    groups: dict[Any, list[int]] = defaultdict(list)  # runs that see the same bags, and covariates in the same units
    for number, run in enumerate(runs):
        groups[run.preparation(reading), run.covariates].append(number)
    datasets = [
        fitting_bags(runs[numbers[0]], slides, reading, cache=cache, force=force) for numbers in groups.values()
    ]
    if runs[0].patients:
        from gated_srp.data.patients import as_patients

        slides = as_patients(slides)
    total, done = len(slides) * len(groups), 0
    collected = _Collected(slides)
    for numbers, dataset in zip(groups.values(), datasets, strict=True):
        models = {number: (model or RunModel)(runs[number]) for number in numbers}
        rows = [row for row in range(len(slides)) if row not in collected.problems]
        # The first bag has nothing to be read behind, and one that is passed on is in memory twice.
        with BagLoader(dataset, workers=min(workers, max(len(rows) - 1, 0))) as loader:
            for row, bag in _each(loader, rows):
                collected.add(row, bag, models)
                done += 1
                progress(Event("slides", done, total))
    return collected.outputs(runs)


class RunModel:
    """A run's model on the device, in the precision of its training."""

    def __init__(self, run: TrainedRun) -> None:
        self.known = run.features
        self.ranks = Ranks.one(run.card.get("precision", "32"))
        self.model = run.load().to(self.ranks.device)

    @torch.no_grad()
    def __call__(self, bag: SlideBag) -> Tensor:
        """(K,) in float32 on the CPU."""
        device = self.ranks.device
        with error_context([bag]), self.ranks.autocast():
            logits: Tensor = self.model(bag.features.to(device)[None], bag.graph.to(device))
        return logits[0].float().cpu()


def _each(loader: BagLoader, rows: Sequence[int]) -> Iterator[tuple[int, SlideBag | UserError]]:
    """Each row's bag, or why there is none: the loader stops at a bad file, and is started again behind it."""
    done = 0
    while done < len(rows):
        bags = loader.epoch(rows[done:])
        for row in rows[done:]:
            done += 1
            try:
                yield row, next(bags)
            except UserError as error:
                yield row, error
                break


class _Collected:
    """What the models give, slide by slide, and what is wrong with slides that have to be skipped."""

    def __init__(self, slides: pd.DataFrame) -> None:
        self.slides = slides
        self.logits: dict[tuple[int, int], Tensor] = {}  # of a run and a row
        self.about: dict[int, tuple[int, float, bool]] = {}  # patches, training_distance, unlike_training
        self.problems: dict[int, str] = {}
        self.warnings: dict[str, list[Note]] = defaultdict(list)  # by kind

    def add(self, row: int, bag: SlideBag | UserError, models: Mapping[int, RunModel]) -> None:
        """One slide by the models that see this bag."""
        try:
            if isinstance(bag, UserError):
                raise bag
            for number, model in models.items():
                self.logits[number, row] = model(bag)
        except UserError as error:
            whose = (
                "" if self.slides.get("slides") is None else error.where
            )  # else the file and the slide stand beside it
            self.problems[row] = joined(error.what, whose, error.cure)
            return
        sizes = [rows for _, _, rows in bag.parts] or [len(bag.features)]
        means = [slide_mean(part)[None] for part in bag.features.split(sizes)]  # (1, C) each: a slide of its mean
        known = [model.known for model in models.values() if model.known is not None]
        far = [one.distance(mean) / max(one.largest_distance, 1.0) for one in known for mean in means]
        _, before, unlike = self.about.get(row, (0, np.nan, False))
        farthest = float(np.fmax.reduce([before, *far]))  # by the run that finds it farthest
        self.about[row] = bag.num_patches, farthest, unlike or any(one.unlike(m) for one in known for m in means)
        for warning in bag.warnings:
            if warning.kind != "cap":  # which is as in training
                self.warnings[warning.kind].append(replace(warning, where=(bag.slide,)))

    def outputs(self, runs: Sequence[TrainedRun]) -> Outputs:
        rows = [row for row in range(len(self.slides)) if row not in self.problems]
        bad = sorted(self.problems)
        skipped = self.slides.loc[bad, ["slide", "file"]].assign(problem=[self.problems[row] for row in bad])
        if not rows:
            raise _none_left(skipped)
        columns = ["patches", "training_distance", "unlike_training"]
        about = pd.DataFrame([self.about[row] for row in rows], columns=columns)
        return Outputs(
            self.slides.loc[rows, [*_NAMED, *(set(self.slides) & {"slides"})]].reset_index(drop=True).join(about),
            [torch.stack([self.logits[number, row] for row in rows]) for number in range(len(runs))],
            skipped.reset_index(drop=True),
            (*_one_of_each_kind(self.warnings), *_limits(runs)),
        )


def _none_left(skipped: pd.DataFrame) -> UserError:
    """Reasons that differ in the slide's name alone are one."""
    from gated_srp.data.files.stride import unnamed_source

    kinds = [unnamed_source(Path(file), text) for file, text in zip(skipped["file"], skipped["problem"], strict=True)]
    reasons = (
        skipped.assign(times=1).groupby(kinds, sort=False).agg({"file": "first", "problem": "first", "times": "sum"})
    )
    shown = reasons.head(5).itertuples(index=False)
    listed = "\n".join(f"  {one.times} x, e.g. {one.file}: {one.problem}" for one in shown)
    more = f"\n  and {counted(len(reasons) - 5, 'other reason')}" if len(reasons) > 5 else ""
    return UserError(f"no slide of {len(skipped)} can be predicted; nothing was written.\n{listed}{more}")


def _one_of_each_kind(warnings: Mapping[str, Sequence[Note]]) -> Iterator[Note]:
    """The first warning of each kind, and how many more there are."""
    for notes in list(warnings.values())[:_MOST]:
        first, more = notes[0], len({note.where for note in notes}) - 1
        yield replace(first, what=f"{first.what} (and {more} more like it)") if more else first
    if len(warnings) > _MOST:
        yield Note("note", "more_warnings", f"and {counted(len(warnings) - _MOST, 'warning')} of other kinds")


def _limits(runs: Sequence[TrainedRun]) -> Iterator[Note]:
    """What could not be checked or calibrated."""
    if runs[0].encoder is None and runs[0].images is None:
        said = "the model's card names no encoder, so only the width of the features could be compared"
        yield Note("note", "unnamed_encoder", said)
    for run in [run for run in runs if run.task.calibrates and run.temperature == 1.0][:1]:
        why = "the run's validation could not determine a temperature"
        if (count := run.card.get("calibration_slides", FEWEST)) < FEWEST:
            why = f"{counted(count, 'validation slide')}, {FEWEST} are needed to fit a temperature"
        yield Note("note", "uncalibrated", f"probabilities are as the model gives them: {why}")
    if any(run.features is None for run in runs):
        said = "a model's card has no statistics of its training slides: not every slide unlike them can be found"
        yield Note("note", "no_statistics", said)
