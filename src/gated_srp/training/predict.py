"""Trained models on slides without labels: calibrated probabilities, or risk and survival; several runs as an ensemble.

Shapes: M members, B slides, K outputs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from gated_srp.data.cache import BagCache
from gated_srp.data.files.images import find_images
from gated_srp.data.files.siblings import find_bags
from gated_srp.data.loader import BagLoader, SlideBag
from gated_srp.data.prepared import Preparation
from gated_srp.data.tables.matching import slide_stem
from gated_srp.errors import UserError, joined
from gated_srp.files import write_whole
from gated_srp.models import SlideModel
from gated_srp.tasks import Task
from gated_srp.training.answers import combined
from gated_srp.training.domain import slide_mean
from gated_srp.training.loop import blaming
from gated_srp.training.start import accelerator, choose_precision
from gated_srp.training.trained import FittingDataset, Member, open_members

Progress = Callable[[int], Callable[[object], None]]
_PLAIN = Preparation()
_MOST = 10  # kinds of warnings that are told


def no_progress(total: int) -> Callable[[object], None]:
    """Nobody looks on."""
    return lambda item: None


@dataclass(frozen=True, eq=False)
class Outputs:
    """What members' models gave for slides. Row b of ``slides`` belongs to row b of each member's logits."""

    slides: pd.DataFrame  # slide, case, file, patches, training_distance, unlike_training
    logits: list[Tensor]  # M of (B, K), before calibration
    skipped: pd.DataFrame  # slide, file, problem
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Predictions:
    """A table with one row a slide, and what could not be predicted.

    Columns: slide, file, patches; then ``predicted`` and ``prob_<class>``, or ``risk`` and ``survival_at_<time>``; with several runs
    their mean, and ``<name>_std`` over the runs (n - 1); ``training_distance`` (1: as far from the training slides' mean as the
    farthest of them) and ``unlike_training``.
    """

    table: pd.DataFrame
    skipped: pd.DataFrame  # slide, file, problem
    notes: tuple[str, ...]
    task: Task

    def write(self, path: str | Path) -> list[Path]:
        """The table, and beside it NAME_skipped.csv if a slide was skipped; gives the files that were written."""
        path = Path(path)
        beside = path.with_name(f"{path.stem}_skipped.csv")
        written = [path]
        if len(self.skipped) or beside.exists():  # a list of an earlier prediction would mislead
            write_whole(beside, self.skipped.to_csv(index=False, lineterminator="\n"))
            written.append(beside)
        write_whole(path, self.table.to_csv(index=False, lineterminator="\n"))
        return written


def predict_files(
    runs: Sequence[str | Path],
    files: Sequence[str | Path],
    *,
    reading: Preparation = _PLAIN,
    force: bool = False,
    workers: int = 1,
    progress: Progress = no_progress,
) -> Predictions:
    """Predict feature files with one run, or with several as an ensemble.

    ``runs``: folders or model files. ``reading``: how to read the files where that is not plain (features_key, coords_key, stride).
    ``force``: another encoder or stride than in training is a warning rather than a reason to skip the file.
    """
    members = open_members(runs)
    slides = pd.DataFrame({"slide": slide_names(files), "file": [str(file) for file in files]})
    found = run_models(
        members, slides.assign(case=slides["slide"]), reading=reading, force=force, workers=workers, progress=progress
    )
    answers = combined(members, found.logits)
    about = found.slides.drop(columns="case")
    table = pd.concat([about[["slide", "file", "patches"]], answers, about.iloc[:, 3:]], axis=1)
    return Predictions(table, found.skipped, found.notes, members[0].task)


def feature_files(place: str | Path, encoder: str | None) -> list[Path]:
    """The feature files of a folder, or the one file. Of a folder with several encoders, the wanted one's."""
    place = Path(place)
    if place.is_file():
        return [place]
    found = find_bags(place, encoder=encoder) or find_bags(place)  # only others: each is refused with its reason
    if not found:
        raise UserError(f"{place}: no feature file in it. Expected a folder of feature files, or one of them.")
    return found


def files_for(member: Member, place: str | Path) -> list[Path]:
    """The files of a folder that a model reads, images or features; or the one file."""
    if member.images is not None and not Path(place).is_file():
        return find_images(place)
    return feature_files(place, member.encoder)


def slide_names(files: Sequence[str | Path]) -> list[str]:
    """Names without endings; with the last folders where they would be the same.

    >>> slide_names(["a/s1.h5", "a/s2.h5"]), slide_names(["a/s1.h5", "b/s1.h5"])
    (['s1', 's2'], ['a/s1', 'b/s1'])
    """
    names = [slide_stem(file) for file in files]
    folders = [list(Path(file).parts[:-1]) for file in files]
    while len(set(names)) < len(names) and any(folders):
        names = [f"{folder.pop()}/{name}" if folder else name for name, folder in zip(names, folders, strict=True)]
    return names


# Models on slides ----------------------------------------------------------------------------------------------------


def run_models(
    members: Sequence[Member],
    slides: pd.DataFrame,
    *,
    reading: Preparation = _PLAIN,
    cache: BagCache | None = None,
    force: bool = False,
    workers: int = 1,
    progress: Progress = no_progress,
) -> Outputs:
    """Every member's logits of slides (columns slide, case, file). Files that cannot be used are skipped; all of them: an error."""
    groups: dict[Preparation, list[int]] = defaultdict(list)  # members that see the same bags
    for number, member in enumerate(members):
        groups[member.preparation(reading)].append(number)
    step = progress(len(slides) * len(groups))
    gathered = _Gathered(slides)
    for numbers in groups.values():
        dataset = FittingDataset.fitting(members[numbers[0]], slides, reading, cache=cache, force=force)
        runners = {number: _Runner(members[number]) for number in numbers}
        rows = [row for row in range(len(slides)) if row not in gathered.problems]
        with BagLoader(dataset, workers=workers) as loader:
            for row, bag in _each(loader, rows):
                gathered.take(row, bag, runners)
                step(row)
    return gathered.outputs(members)


class _Runner:
    """A member's model on the device, in the precision of its training."""

    def __init__(self, member: Member) -> None:
        self.known = member.features
        self.device = torch.device(accelerator())
        self.half = choose_precision(member.card.get("precision", "32"), self.device.type) == "bf16"
        self.model: SlideModel = member.load().to(self.device)

    @torch.no_grad()
    def __call__(self, bag: SlideBag) -> Tensor:
        """(K,) in float32 on the CPU."""
        with blaming([bag], None), torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            logits: Tensor = self.model(bag.features.to(self.device)[None], bag.graph.to(self.device))
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


class _Gathered:
    """Collects what the models give, slide by slide, and what is wrong with those that have to be skipped."""

    def __init__(self, slides: pd.DataFrame) -> None:
        self.slides = slides
        self.logits: dict[tuple[int, int], Tensor] = {}  # of a member and a row
        self.about: dict[int, tuple[int, float, bool]] = {}  # patches, training_distance, unlike_training
        self.problems: dict[int, str] = {}
        self.warnings: dict[str, list[str]] = defaultdict(list)

    def take(self, row: int, bag: SlideBag | UserError, runners: Mapping[int, _Runner]) -> None:
        """One slide by the models that see this bag."""
        try:
            if isinstance(bag, UserError):
                raise bag
            for number, runner in runners.items():
                self.logits[number, row] = runner(bag)
        except UserError as error:
            self.problems[row] = joined(error.what, cure=error.cure)  # the file and the slide stand beside it
            return
        mean = slide_mean(bag.features)[None]  # (1, C): a slide of its mean
        known = [runner.known for runner in runners.values() if runner.known is not None]
        far = [one.distance(mean) / max(one.largest_distance, 1.0) for one in known]
        _, before, unlike = self.about.get(row, (0, np.nan, False))
        farthest = float(np.fmax.reduce([before, *far]))  # by the member that finds it farthest
        self.about[row] = bag.num_patches, farthest, unlike or any(one.unlike(mean) for one in known)
        for warning in bag.warnings:
            if warning.kind != "cap":  # which is as in training
                self.warnings[re.sub(r"[\d.,]+", "#", warning.what)].append(f"{bag.slide}: {warning}")

    def outputs(self, members: Sequence[Member]) -> Outputs:
        rows = [row for row in range(len(self.slides)) if row not in self.problems]
        bad = sorted(self.problems)
        skipped = self.slides.loc[bad, ["slide", "file"]].assign(problem=[self.problems[row] for row in bad])
        if not rows:
            raise _none_left(skipped)
        columns = ["patches", "training_distance", "unlike_training"]
        about = pd.DataFrame([self.about[row] for row in rows], columns=columns)
        return Outputs(
            self.slides.loc[rows, ["slide", "case", "file"]].reset_index(drop=True).join(about),
            [torch.stack([self.logits[number, row] for row in rows]) for number in range(len(members))],
            skipped.reset_index(drop=True),
            _notes(members, self.warnings),
        )


def _none_left(skipped: pd.DataFrame) -> UserError:
    reasons = skipped["problem"].value_counts(sort=False)
    listed = "\n".join(
        f"  {count} x, e.g. {skipped.loc[skipped['problem'] == problem, 'file'].iloc[0]}: {problem}"
        for problem, count in reasons.head(5).items()
    )
    more = f"\n  and {len(reasons) - 5} other reasons" if len(reasons) > 5 else ""
    return UserError(f"none of {len(skipped)} slides can be predicted; nothing was written.\n{listed}{more}")


def _notes(members: Sequence[Member], warnings: dict[str, list[str]]) -> tuple[str, ...]:
    """What a person should know, warnings that differ in numbers alone once."""
    notes = [
        texts[0] + (f" (and {len(texts) - 1} more like it)" if len(texts) > 1 else "") for texts in warnings.values()
    ]
    notes = notes[:_MOST] + ([f"and {len(notes) - _MOST} warnings of other kinds"] if len(notes) > _MOST else [])
    if members[0].encoder is None and members[0].images is None:
        notes.append("the model's card names no encoder, so only the width of the features could be compared")
    if any(member.task.calibrates and member.temperature == 1.0 for member in members):
        notes.append("probabilities are as the model gives them: the run's validation could not tell a temperature")
    if any(member.features is None for member in members):
        notes.append("a model's card has no statistics of its training slides: unlike slides cannot all be told")
    return tuple(notes)
