"""What a run learns from: its slides and their parts, their bags, and the task that gives the labels meaning."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd
from torch import Tensor

from gated_srp.config.cohort import CohortConfig, CohortData, open_cohort, slide_dataset
from gated_srp.data.loader import SlideDataset
from gated_srp.data.splits import Split
from gated_srp.errors import Note, UserError
from gated_srp.tasks import Task
from gated_srp.tasks.task import Level


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Slides that have a file and a part, in the table's order; row i of ``slides`` is bag i of ``bags``."""

    slides: pd.DataFrame  # slide, case, truth, file, part
    split: Split
    task: Task
    bags: SlideDataset
    score: Level  # what selects and is reported: slides, or cases
    notes: tuple[Note, ...] = ()

    @property
    def hash(self) -> str:
        """Over who is in which part with which label: a run may only go on with what it began with."""
        rows = self.slides[["slide", "case", *self.task.truth, "part"]].to_csv(index=False)
        return hashlib.sha256(rows.encode()).hexdigest()

    def rows(self, part: str) -> list[int]:
        """Bags of train, val or test."""
        return [int(row) for row in self.slides.index[self.slides["part"] == part]]

    def targets(self, rows: list[int]) -> Tensor:
        """Encoded truth of these bags, (B, ...)."""
        assert self.bags.targets is not None
        return self.bags.targets[rows]

    def predictions(self, rows: list[int], logits: Tensor) -> pd.DataFrame:
        """One row per slide: slide, case, truth, predictions."""
        chosen = self.slides.loc[rows].reset_index(drop=True)
        columns = {**self.task.answers(chosen), **self.task.predict(logits)}
        return chosen[["slide", "case"]].assign(**columns)

    def by_case(self, slides: pd.DataFrame) -> pd.DataFrame:
        """One row per case. Where the slides of a case differ in their truth, the table has none."""
        if self.mixed_truth(slides):
            slides = slides.drop(columns=list(self.task.truth))
        return self.task.by_case(slides)

    def mixed_truth(self, slides: pd.DataFrame) -> bool:
        """Whether some case's slides differ in their truth."""
        distinct = slides[["case", *self.task.truth]].drop_duplicates()
        return bool(distinct["case"].duplicated().any())


def load_inputs(config: CohortConfig, seed: int, fold: int = 0) -> TrainingData:
    """Read the table, find the files, draw the split; everything that can be wrong before the first bag is refused here."""
    data = open_cohort(config)
    split = data.split(seed, fold)
    slides = data.with_parts(split)
    _check_parts(slides, split, data)
    task = data.table.kind.fit(slides[slides["part"] == "train"], data.table.classes, config.metric)
    bags = slide_dataset(config, slides, task.encode(slides))
    inputs = TrainingData(slides, split, task, bags, config.score, (*data.notes, *split.notes))
    if config.score == "case" and inputs.mixed_truth(slides):
        truth = " or ".join(task.truth)
        raise UserError(
            f"score: case, but the slides of some patients differ in {truth}, so a case has no single truth",
            cure="Set `score: slide`, or correct the table.",
        )
    return inputs


def _check_parts(slides: pd.DataFrame, split: Split, data: CohortData) -> None:
    counts = slides["part"].value_counts()
    absent: Iterable[str] = [part for part in ("train", "val") if not counts.get(part, 0)]
    if absent:
        found = ", ".join(f"{part} {split.counts[part]}" for part in split.counts)
        raise UserError(
            f"no slide with a feature file is left in {' and '.join(absent)} (units of the split: {found}; "
            f"slides without a file: {len(data.matches.missing)})",
            where=data.config.name,
            cure="Add slides or files, or give your own `split`.",
        )
