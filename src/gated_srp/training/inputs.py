"""What a run learns from: its slides and their parts, their bags, the task that gives the labels meaning; what the features look like.

Shapes: S training slides, N patches, C channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor

from gated_srp.config.cohort import CohortConfig, CohortData, open_cohort, preparation
from gated_srp.config.reach import unnamed_encoder
from gated_srp.data.loader import SlideDataset
from gated_srp.data.prepared import Preparation, files_of, identify, inside_regions, open_header
from gated_srp.data.splits import Split
from gated_srp.data.table import mixed_truth, refuse_mixed_truth
from gated_srp.errors import Note, UserError, counted
from gated_srp.files import full_hash, sampled_hash
from gated_srp.progress import Event, Progress, silent
from gated_srp.srp.graph import LONG
from gated_srp.tasks import Task
from gated_srp.tasks.task import Level
from gated_srp.training.folder import RunFolder

if TYPE_CHECKING:
    from gated_srp.data.covariates import Covariates, Named

MOST_SLIDES = 256  # training slides whose features are summarised, evenly spaced over all of them
_FAR = 3.0  # times the farthest training slide is "unlike training"


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Slides that have a file and a part, in the table's order; row i of ``slides`` is bag i of ``bags``.

    Where a bag is a patient, ``slides`` has one row per patient, under its id, and ``members`` one per slide.
    """

    slides: pd.DataFrame  # slide, case, truth, file, part
    split: Split
    task: Task
    bags: SlideDataset
    score: Level  # what selects and is reported: slides, or cases
    notes: tuple[Note, ...] = ()
    sampling: Tensor | None = None  # how likely each training bag is drawn, (training bags,); None: each is seen once
    joined: pd.DataFrame | None = None  # the slides that bags of patients are made of
    covariates: Covariates | None = None  # what the head sees beside the slides, fitted on the training part

    @property
    def members(self) -> pd.DataFrame:
        """One row per slide, whatever a bag is."""
        return self.slides if self.joined is None else self.joined

    @property
    def hash(self) -> str:
        """Over who is in which part with which label: a run may only go on with what it began with."""
        return slides_hash(self.members, self.task.truth, self.covariates)

    def rows(self, part: str) -> list[int]:
        """Bags of train, val or test."""
        return [int(row) for row in self.slides.index[self.slides["part"] == part]]

    def targets(self, rows: list[int]) -> Tensor:
        """Encoded truth of these bags, (B, ...)."""
        assert self.bags.targets is not None
        return self.bags.targets[rows]

    def predictions(self, rows: list[int], logits: Tensor, temperature: float = 1.0) -> pd.DataFrame:
        """One row per slide: slide, case, truth, predictions; calibrated ones too where a temperature was fitted."""
        chosen = self.slides.loc[rows].reset_index(drop=True)
        columns = {**self.task.answers(chosen), **self.task.predict(logits)}
        columns |= self.task.calibrated(logits.double() / temperature) if temperature != 1.0 else {}
        return chosen[["slide", "case"]].assign(**columns)

    def by_case(self, slides: pd.DataFrame) -> pd.DataFrame:
        """One row per case. Where the slides of a case differ in their truth, the table has none."""
        if mixed_truth(slides, self.task.truth):
            slides = slides.drop(columns=list(self.task.truth))
        cases = self.task.by_case(slides)
        if self.joined is not None:
            cases["slides"] = cases["case"].map(self.slides.set_index("case")["slides"])
        return cases


def slides_hash(slides: pd.DataFrame, truth: Iterable[str], covariates: Named | None) -> str:
    """`TrainingData.hash` of rows of the table with their part."""
    beside = []
    if covariates is not None:
        from gated_srp.data.covariates import stored  # not above: rarely asked for

        beside = [stored(name) for name in (*covariates.numeric, *covariates.categorical)]
    rows = slides[["slide", "case", *truth, "part", *beside]].to_csv(index=False)
    return hashlib.sha256(rows.encode()).hexdigest()


def load_inputs(config: CohortConfig, seed: int, fold: int = 0) -> TrainingData:
    """Read the table, find the files, draw the split; everything that can be wrong before the first bag is refused here."""
    data = open_cohort(config)
    if problem := data.table.kind.window_problem(config.train.accumulation * config.train.batch_size):
        raise problem
    split = data.split(seed, fold)
    slides = data.with_parts(split)
    lacking = _check_parts(slides, split, data)
    members = slides
    if config.bag == "patient":
        from gated_srp.data.patients import patient_table  # not above: rarely asked for

        slides = patient_table(data.table, members, where=config.name)
    training = slides[slides["part"] == "train"]
    task = data.table.kind.fit(training, data.table.classes, config.metric)
    task = task.with_loss(training, loss=config.train.loss, class_weights=config.train.class_weights)
    bags = slide_dataset(config, members, task.encode(slides))
    joined = None if slides is members else members
    notes = (*data.notes, *split.notes, *lacking)
    sampling = covariates = None
    if config.train.sampling:
        from gated_srp.tasks.imbalance import sampling_weights  # not above: rarely asked for

        sampling = torch.from_numpy(sampling_weights(task, training))
    if config.covariates is not None:
        from gated_srp.data.covariates import BagCovariates, Covariates  # not above: rarely asked for

        covariates = Covariates.fit(training, config.covariates, where=config.name)
        bags.covariates = BagCovariates(covariates.encode(slides))
        notes = (*notes, *covariates.notes(slides))
    if config.score == "case":
        refuse_mixed_truth(slides, task.truth)
    return TrainingData(slides, split, task, bags, config.score, notes, sampling, joined, covariates)


def slide_dataset(config: CohortConfig, slides: pd.DataFrame, targets: Tensor | None = None) -> SlideDataset:
    """The bags of these slides (as `CohortData.slides` gives them), with the settings and the cache of a cohort.

    Where a bag is a patient, ``targets`` are those of the patients.
    """
    cache = None
    if config.cache.folder:
        from gated_srp.data.cache import BagCache

        cache = BagCache(config.cache.folder)
    if config.bag == "patient":
        from gated_srp.data.patients import PatientDataset

        return PatientDataset(SlideDataset(slides, preparation(config), cache=cache), targets=targets)
    return SlideDataset(slides, preparation(config), targets=targets, cache=cache)


def _check_parts(slides: pd.DataFrame, split: Split, data: CohortData) -> list[Note]:
    """Refuse parts without which nothing can be learnt; gives what the training part lacks besides."""
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
    kind, classes = data.table.kind, data.table.classes
    for note in kind.scarce(slides, classes):
        if note.level == "error":
            raise UserError(note.what, where=data.config.name, cure=note.cure, kind=note.kind)
    lacking = list(kind.lacks(slides[slides["part"] == "train"], classes, "train"))
    for note in lacking:
        if note.level == "error":
            cure = "Add slides or files, another seed, or give your own `split`."
            raise UserError(note.what, where=data.config.name, cure=cure, kind=note.kind)
    return lacking


def check_files(inputs: TrainingData, config: CohortConfig, progress: Progress = silent) -> tuple[Note, ...]:
    """Open the files of all parts, features aside: what a run would fail at after hours is refused before it begins; and notes."""
    headers: list[tuple[Path, int, str | None, float | None]] = []
    patches: list[tuple[int, int]] = []  # of two magnifications: fine ones without a parent, and all of them
    errors: list[tuple[int, UserError]] = []
    classes: set[str] = set()
    files, settings, members = inputs.bags.members.files, inputs.bags.settings, inputs.members
    for row, file in enumerate(files):
        try:
            width, encoder, um, drawn, lone = _header(file, identify(file, settings), settings)
            patches += [lone] if lone else []
            headers.append((file, width, encoder, um))
            classes.update(drawn)
        except UserError as found:
            errors.append((row, found))
        progress(Event("files", row + 1, len(files)))
    if settings.regions is not None and (classes or not errors):
        settings.regions.refuse_unknown_classes(classes)
    for row, error in errors:
        where = f"{files[row]} (slide {members['slide'][row]!r}, in {members['part'][row]})"
        more = f"; {counted(len(errors) - 1, 'more file')} of {len(files)} cannot be used" if len(errors) > 1 else ""
        raise error.changed(
            what=f"{error.what}{more}",
            where=where,
            cure=f"{error.cure} {_LEAVE_OUT if len(errors) < len(files) else ''}".strip(),
        )
    notes: tuple[Note, ...] = ()
    if patches:
        from gated_srp.data.two_scales import lone_notes  # not above: rarely so

        notes = lone_notes(patches)
    encoders = {name for _, _, name, _ in headers if name}
    notes += tuple(unnamed_encoder(config, encoders))
    if len({(width, um) for _, width, _, um in headers}) == 1 >= len(encoders):
        return notes
    from gated_srp.checks import findings, survey  # not above: it is rarely needed

    facts = [survey.FileFacts(file, width=width, encoder=name, stride_um=um) for file, width, name, um in headers]
    for note in findings.of_encoders(facts):
        if note.level == "error":
            where = ", ".join(note.where[:3]) + (", ..." if len(note.where) > 3 else "")
            raise UserError(note.what, where=where, cure=f"{note.cure} {_LEAVE_OUT}", kind=note.kind)
    return (*notes, *(replace(note, where=note.where[:3]) for note in findings.of_strides(facts)))


_LEAVE_OUT = "`exclude` leaves slides out: `gated-srp check COHORT --quarantine broken.txt` writes a list for it."


@lru_cache(maxsize=2**16)  # the runs of a study read the same files
def _header(
    file: Path, identity: str, settings: Preparation
) -> tuple[int, str | None, float | None, tuple[str, ...], tuple[int, int] | None]:
    """Width, encoder, stride in microns; the classes drawn where regions choose patches, `lone_patches` where there are two magnifications."""
    header = open_header(file, settings)
    kept = inside_regions(header, settings)
    lone = None
    if settings.features_low is not None:
        from gated_srp.data.two_scales import lone_patches

        lone = lone_patches(file, settings)
    return header.shape[1], header.encoder, header.stride_um, () if kept is None else kept.classes or (), lone


# The files it learns from, known again ---------------------------------------------------------------------------------


def fingerprints(bags: SlideDataset, *, deep: bool = False) -> pd.DataFrame:
    """One row per slide for features.csv: bytes, time and sampled blocks of its files; with ``deep`` a hash of all of them."""
    slides = bags.members
    order = bags.member_rows(range(len(bags)))  # of patients: as their slides stand in the bags
    found = [(slides.slides["slide"][row], slides.slides["case"][row], slides.files[row]) for row in order]
    rows = [(slide, case, *_fingerprint(files_of(file, bags.settings), deep=deep)) for slide, case, file in found]
    table = pd.DataFrame(rows, columns=["slide", "case", "bytes", "modified", "blocks", "sha256"], dtype=str)
    return table.drop(columns="case") if slides is bags else table


def changed_files(known: pd.DataFrame, bags: SlideDataset, *, deep: bool = False) -> list[tuple[str, Path]]:
    """Slides, and their files, whose content is not that of their `fingerprints`; another time alone is no change.

    Whole files are read where that was done before, and with ``deep`` or where the time has changed.
    """
    bags = bags.members
    there, found = known.set_index("slide"), []
    for slide, file in zip(bags.slides["slide"], bags.files, strict=True):
        if slide not in there.index:
            continue
        files = files_of(file, bags.settings)
        was, (size, time, blocks, _) = there.loc[slide], _fingerprint(files)
        same = (size, blocks) == (was["bytes"], was["blocks"])
        if same and was["sha256"] and (deep or time != was["modified"]):
            same = _fingerprint(files, deep=True)[-1] == was["sha256"]
        if not same:
            found.append((slide, file))
    return found


def refuse_other_inputs(run: RunFolder, inputs: TrainingData, *, deep: bool = False) -> tuple[Note, ...]:
    """A begun run goes on with the slides, labels, parts and files that it began with; notes on what could not be compared."""
    run.refuse_other_slides(inputs.hash)
    known = run.features
    if known.empty:
        what = "begun by a version that kept no fingerprints of feature files: whether they have changed cannot be told"
        return (Note("warning", "no_fingerprints", what, cure="From now on it can."),)
    refuse_changed_files(run, inputs.bags, deep=deep)
    if deep and not known["sha256"].all():
        return (Note("note", "no_fingerprints", "begun without --deep: feature files are compared by samples of them"),)
    return ()


def refuse_changed_files(run: RunFolder, bags: SlideDataset, *, deep: bool = False) -> None:
    """The feature files must be those that the run was begun with."""
    if changed := changed_files(run.features, bags, deep=deep):
        (slide, file), more = changed[0], f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        drawn = ", or what was drawn on it," if bags.settings.regions else ""
        raise _changed(run, f"slide {slide!r} ({file}){more}{drawn}")


def refuse_other_files(run: RunFolder, now: pd.DataFrame) -> None:
    """The same for a run of a study, finished or not, of which `fingerprints` were taken once for all."""
    both = run.features.merge(now, on="slide", suffixes=("", "_now"))
    changed = both[(both["blocks"] != both["blocks_now"]) | (both["bytes"] != both["bytes_now"])]["slide"]
    if len(changed):
        raise _changed(
            run, f"the feature file of {', '.join(map(repr, changed[:5]))}{' ...' if len(changed) > 5 else ''}"
        )


def _changed(run: RunFolder, what: str) -> UserError:
    return UserError(
        f"{what} has changed since the run was begun",
        where=run.path,
        cure="Restore the files; or to train on the new ones, choose another `out` or remove the folder.",
        kind="changed_files",
    )


def _fingerprint(files: list[Path], *, deep: bool = False) -> tuple[str, str, str, str]:
    size, time, blocks, contents = 0, 0, [], []
    for file in files:
        with suppress(OSError):  # a missing file is reported by the reader
            info = file.stat()
            blocks.append(sampled_hash(file))
            contents.append(full_hash(file) if deep else "")
            size, time = size + info.st_size, max(time, info.st_mtime_ns)
    return str(size), str(time), _joined(blocks), _joined(contents) if deep else ""


def _joined(hashes: list[str]) -> str:
    return hashes[0] if len(hashes) == 1 else hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:32]


# What the training slides look like ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FeatureStatistics:
    """Mean and spread over training slides of a slide's mean feature, and how far single training slides lie from it."""

    slides: int
    mean: list[float]  # (C,)
    std: list[float]  # (C,)
    median_distance: float
    largest_distance: float

    @classmethod
    def fit(cls, means: Tensor) -> FeatureStatistics:
        """From the mean features of training slides, (S, C)."""
        means = means.double()
        centre, spread = means.mean(0), means.std(0, correction=0)
        far = torch.stack([_distance(mean, centre, spread) for mean in means])
        return cls(len(means), _short(centre), _short(spread), float(far.median()), float(far.max()))

    def distance(self, features: Tensor) -> float:
        """Root mean square over channels of how many spreads a slide's mean feature, (N, C), lies from the training mean."""
        mean = slide_mean(features).double().cpu()
        return float(_distance(mean, torch.tensor(self.mean).double(), torch.tensor(self.std).double()))

    def unlike(self, features: Tensor) -> bool:
        """Whether a slide lies far beyond every training slide."""
        return self.distance(features) > _FAR * max(self.largest_distance, 1.0)

    def as_card(self) -> dict[str, Any]:
        """For the card of a model file; ``FeatureStatistics(**card["features"])`` reads it."""
        return asdict(self)


def slide_mean(features: Tensor) -> Tensor:
    """(N, C) -> (C,), in float32 whatever the features' type; PyTorch widens halves as a whole, so of a long slide some channels at a time."""
    parts = features.split(64 if len(features) > LONG else features.shape[1], dim=1)
    return torch.cat([part.mean(0, dtype=torch.float32) for part in parts])


def evenly(rows: list[int], most: int = MOST_SLIDES) -> list[int]:
    """At most so many of the rows, evenly spaced.

    >>> evenly([10, 11, 12, 13, 14], 3)
    [10, 12, 14]
    """
    if len(rows) <= most:
        return rows
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def _distance(mean: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
    # A channel that never varied in training counts in units of its own size, so that a change in it is still seen.
    unit = torch.where(spread > 0, spread, centre.abs().clamp_min(1e-6))
    return ((mean - centre) / unit).square().mean().sqrt()


def _short(values: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]
