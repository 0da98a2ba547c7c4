"""Pretraining without labels: `pretrain`, a run of the usual loop on masked patches; and what start weights must be to serve a run.

A pretraining learns from the training part of a split and chooses its epoch on the validation part; test patients are never read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gated_srp.config.cohort import CohortConfig, CohortData, find_files, open_cohort
from gated_srp.config.load import arm_notes, for_arm, with_changes
from gated_srp.data.files.siblings import look_into, may_be_same, nothing_found
from gated_srp.data.loader import SlideBag, SlideDataset, Variation
from gated_srp.data.matching import files_of_cases, match_features, match_slides, slide_stem, tcga_patient
from gated_srp.data.prepared import open_header
from gated_srp.data.splits import Split, assign_parts
from gated_srp.errors import Note, UserError, counted
from gated_srp.models import SlideModel, find_arm
from gated_srp.models.masked import MaskedGraph, Masking, copying_r2, pretrainable
from gated_srp.models.parts import Arm, PeerArm
from gated_srp.progress import Progress, silent
from gated_srp.streams import stream
from gated_srp.tasks import PRETRAINING
from gated_srp.tasks.pretraining import MaskedFeatures
from gated_srp.training.folder import RunFolder, pretraining_place
from gated_srp.training.inputs import TrainingData, evenly, slide_dataset
from gated_srp.training.seen import overlap_in_words, read_seen
from gated_srp.training.train import Job, run_job

_JUDGED = 32  # validation slides that say what copying neighbours would explain
_NOT_HERE = ("loss", "class_weights", "sampling", "only", "init")  # of train: what labels or start weights need


def pretrain(
    cohort: str | Path | CohortConfig,
    *,
    arm: str | None = None,
    seed: int | None = None,
    fold: int = 0,
    mask: float = 0.5,
    block: int = 3,
    unlabelled: Sequence[str | Path] = (),
    out: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    devices: int = 1,
    save_every: float = 300.0,
    deep: bool = False,
    progress: Progress = silent,
) -> RunFolder:
    """Pretrain an arm without labels: it predicts the features of masked patches (`gated_srp.models.masked` has the loss).

    An unfinished run goes on where it was, bit for bit; a finished one is left alone. ``train(..., init=run.path)``, or the setting
    ``train.init: pretrained`` for all seeds of a study, starts from its weights.

    It learns from the slides of the training part of the seed's split, and from rows of the table without a label whose patients are not in
    validation or test; the epoch is chosen on the validation part. Slides of test patients are not opened.

    Args:
        cohort: the cohort's YAML, or its config; its table gives the split, labels are not used otherwise. Without a table all files are
            used, a tenth of the patients to choose the epoch; then nobody is held out for a test.
        arm: which model; None: Gated SRP, or the first of the cohort's arms where it has none.
        seed: of the split, the start weights, the order of slides and the masks; None: the cohort's first.
        fold: where the cohort sets ``folds``.
        mask: share of a slide's patches that is masked.
        block: side, in places of the lattice, of the windows that are masked together; 1 masks single patches.
        unlabelled: folders of further feature files without a row in the table. Files named after a patient or slide of validation or test
            are left out; whose patient a file's name does not tell is said, and kept in the model's card.
        out: where runs are written, instead of the cohort's ``out``.
        settings: settings of the YAML to change, e.g. ``{"train.epochs": 50}``.
        devices: processes that share the bags of each update.
        save_every: seconds between saved states within an epoch.
        deep: know feature files again by all of their bytes, not by a sample of them.
        progress: as in `train`.

    Returns:
        The finished run's folder, OUT/pretrained/COHORT/ARM/seed42; ``metrics("val")["r2"]`` is the share of the variance of masked patches,
        around the mean of their slide, that the model explains.

    Example:
        >>> import gated_srp
        >>> run = gated_srp.pretrain("cohort.yaml", arm="gated_srp", seed=42)  # doctest: +SKIP
        >>> gated_srp.train("cohort.yaml", arm="gated_srp", seed=42, init=run.path)  # doctest: +SKIP
    """
    masking = Masking(mask, block)
    with _saying_that_a_split_needs_labels():
        config = with_changes(cohort, settings, out)
    arm = arm or config.main_arm
    pretrainable(arm)
    if config.images is not None:
        raise UserError("a cohort of images", where=config.name, cure="Pretraining is for features of patches.")
    seed = config.seeds[0] if seed is None else seed
    said = tuple(note.line for note in arm_notes(config, arm))
    config = pretraining_place(without_labels(for_arm(config, arm)), config.out)
    folders = tuple(Path(folder).absolute() for folder in unlabelled)
    own: dict[str, Any] = {"masking": masking, "unlabelled": folders}
    job = PretrainingJob(config, arm, seed, fold, devices=devices, deep=deep, said=said, **own)
    return run_job(job, save_every=save_every, progress=progress)


def without_labels(config: CohortConfig) -> CohortConfig:
    """The cohort's settings without those that speak of labels, of patients as bags or of the head; its table still gives the split."""
    train = config.train.model_copy(update=dict.fromkeys(_NOT_HERE))
    own = {"train": train, "bag": "slide", "score": "slide", "metric": MaskedFeatures.selects[0], "covariates": None}
    return config.model_copy(update=own)


@dataclass(frozen=True)
class PretrainingJob(Job):
    """One pretraining to do."""

    masking: Masking = field(default_factory=Masking)
    unlabelled: tuple[Path, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        own = {"mask": self.masking.share, "block": self.masking.block, "unlabelled": list(map(str, self.unlabelled))}
        return super().settings | {"pretraining": own}

    def load(self) -> TrainingData:
        if self.config.table is None and self.config.preset is None:
            slides, split, notes = files_without_table(self.config, self.seed, self.unlabelled)
        else:
            with _saying_that_a_split_needs_labels():
                data = open_cohort(self.config)
            split = data.split(self.seed, self.fold)
            slides, notes = pretraining_slides(data, split, self.unlabelled)
            notes = (*data.notes, *split.notes, *notes)
        settings = slide_dataset(self.config, slides)
        width = open_header(settings.files[0], settings.settings).shape[1]
        task = MaskedFeatures(width, self.masking.share, self.masking.block)
        bags = MaskedDataset(slides, settings.settings, targets=task.encode(slides), cache=settings.cache)
        bags.masking, bags.seed = self.masking, self.seed
        found = TrainingData(slides, split, task, bags, "slide", notes)
        return (
            found if self.run.begun or self.run.finished else replace(found, notes=(*found.notes, self.copying(found)))
        )

    def copying(self, inputs: TrainingData) -> Note:
        """What r2 of this run should exceed."""
        chosen = evenly(inputs.rows("val"), _JUDGED)
        found = copying_r2((bag.features, bag.graph) for bag in map(inputs.bags.__getitem__, chosen))
        said = f"copying, the mean of visible neighbours at its best scale, explains {found:.4f} of masked patches in validation"
        return Note("note", "copying", f"{said}; r2 below says what the model explains")


class MaskedDataset(SlideDataset):
    """Bags with some of their patches masked: in an epoch of training by a stream of seed, epoch and slide, otherwise always alike."""

    masking: Masking
    seed: int

    def varied(self, index: int, variation: Variation | None) -> SlideBag:
        bag = super().varied(index, None)
        when = "validation" if variation is None else variation[1]
        drawn = self.masking.draw(bag.coords, bag.stride, stream(self.seed, f"mask/{when}/{bag.slide}"))
        return replace(bag, graph=MaskedGraph.of(bag.graph, bag.features, drawn))


def pretraining_slides(
    data: CohortData, split: Split, folders: Sequence[Path]
) -> tuple[pd.DataFrame, tuple[Note, ...]]:
    """slide, case, file and part (train or val) of what a pretraining sees, and what to say of it.

    Slides without a label train if their patient is in neither validation nor test. Of ``folders`` all files count that no row names.
    """
    columns = ["slide", "case", "file", "part"]
    labelled = data.with_parts(split)[columns]
    parts = assign_parts(split, data.table)
    theirs = data.table.frame[parts.isin(["val", "test"])]
    held = {*theirs["case"], *map(tcga_patient, theirs["slide"])} - {
        None
    }  # a barcode tells the patient, whatever the table calls them
    more, notes = [], []
    rows = data.table.unlabelled
    if rows is not None and len(rows):
        of_held = rows["case"].isin(held) | rows["slide"].map(tcga_patient).isin(held)
        free = rows[~of_held & ~rows["slide"].isin(data.table.frame["slide"])]
        found = (
            match_features(list(free["slide"]), list(data.matches.unused), data.config.exclude)[0].found
            if len(free)
            else {}
        )
        free = free[free["slide"].isin(found)].drop_duplicates("slide")
        more.append(free.assign(file=free["slide"].map(found), part="train"))
        said = f"trains on {counted(len(free), 'slide')} without a label, {len(rows) - len(free)} left out"
        said += " (of patients in validation or test, or without a file)"
        notes.append(Note("note", "unlabelled", said))
    for folder in folders:
        own, note = _folder_slides(
            folder, data, held, taken=[*labelled["file"], *(f for one in more for f in one["file"])]
        )
        more.append(own)
        notes.append(note)
    used = [labelled[labelled["part"].isin(["train", "val"])], *more]
    slides = pd.concat([one for one in used if len(one)], ignore_index=True)[columns]
    counts = slides["part"].value_counts()
    for part in ("train", "val"):
        if not counts.get(part, 0):
            cure = "Add slides or files, or give your own `split`."
            raise UserError(f"no slide with a feature file is left in {part}", where=data.config.name, cure=cure)
    said = f"pretraining on {counts['train']} slides, epoch chosen on {counts['val']}; {int((parts == 'test').sum())} of test patients are not read"
    return slides, (*notes, Note("note", "pretraining", said))


def files_without_table(
    config: CohortConfig, seed: int, folders: Sequence[Path]
) -> tuple[pd.DataFrame, Split, tuple[Note, ...]]:
    """slide, case, file and part of all feature files where no table names any: a tenth of the patients choose the epoch, the rest train."""
    if config.folds or config.split:
        cure = "Name a labelled table with `table`, or leave them out."
        raise UserError("`folds` and `split` are of a table, and there is none", where=config.name, cure=cure)
    files, notes = find_files(config)
    for folder in folders:
        files = [*files, *(more := look_into(folder, encoder=config.encoder).bags)]
        if not more:
            raise nothing_found(folder, encoder=config.encoder)
    matches, said = match_features(list(dict.fromkeys(map(slide_stem, files))), files, config.exclude)
    rows = [(slide, tcga_patient(file) or slide, file) for slide, file in matches.found.items()]
    slides = pd.DataFrame(rows, columns=["slide", "case", "file"])
    cases = sorted(set(slides["case"]))
    if len(cases) < 2:
        what = f"{counted(len(cases), 'patient')} with a feature file: one chooses the epoch, at least one trains"
        raise UserError(what, where=config.name, cure="Add files.")
    order = np.random.default_rng(seed).permutation(len(cases))
    chosen = {cases[i] for i in order[: max(1, round(0.1 * len(cases)))]}
    split = Split("case", {case: "val" if case in chosen else "train" for case in cases}, "drawn without a table")
    slides["part"] = slides["case"].map(split.parts)
    trained, validated = (int((slides["part"] == part).sum()) for part in ("train", "val"))
    words = f"no table: pretraining on {counted(trained, 'slide')}, epoch chosen on {validated}"
    words += "; nobody is held out for a test. A run that tests on these slides, or on a patient whom a TCGA barcode tells, refuses these weights"
    unknown = sum(not tcga_patient(file) for file in slides["file"])
    if unknown:
        words += f". The names of {counted(unknown, 'file')} tell no patient: whether another slide of the same patient is tested on later is yours to know"
    left = tuple(Note("note", "files", line) for line in matches.report()) if len(matches.found) < len(files) else ()
    return slides, split, (*notes, *said, *left, Note("warning", "no_table", words))


@contextmanager
def _saying_that_a_split_needs_labels() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        if error.kind != "no_labels":
            raise
        cure = "The split needs labels. Leave `table` out to pretrain on all files, or name a labelled table and give the rest with --unlabelled."
        raise error.changed(cure=f"{cure} {error.cure}") from None


def _folder_slides(
    folder: Path, data: CohortData, held: set[str], *, taken: Sequence[Path]
) -> tuple[pd.DataFrame, Note]:
    """Files of a folder that no row of the table names; not those that a patient or slide of validation or test may own."""
    files = look_into(folder, encoder=data.config.encoder).bags
    if not files:
        raise nothing_found(folder, encoder=data.config.encoder)
    table = data.table.frame
    known = [*table["slide"], *(() if data.table.unlabelled is None else data.table.unlabelled["slide"])]
    matches = match_slides(known, files)
    named = {path for paths in ([path] for path in matches.found.values()) for path in paths}
    named |= {path for paths in matches.several.values() for path in paths} | set(matches.shared)
    theirs = {path for paths in files_of_cases(held, files).values() for path in paths}
    stems = {slide_stem(file) for file in taken}
    free = [file for file in files if file not in named | theirs and slide_stem(file) not in stems]
    free = list({slide_stem(file): file for file in free if tcga_patient(file) not in held}.values())
    cases = [tcga_patient(file) for file in free]
    unknown = sum(case is None for case in cases)
    names = [slide_stem(file) for file in free]
    own = [case or name for case, name in zip(cases, names, strict=True)]
    rows = pd.DataFrame({"slide": names, "case": own, "file": free, "part": "train"})
    said = f"{folder}: trains on {counted(len(free), 'slide')} without a row, {len(files) - len(free)} left out"
    said += " (those of the table, and those named after patients of validation or test)"
    if not unknown:
        return rows, Note("note", "unlabelled", said)
    what = f"{said}; {unknown} of their names do not tell the patient: if one is in validation or test, nobody notices"
    return rows, Note("warning", "patients_unknown", what)


# Weights to start from -------------------------------------------------------------------------------------------------


def pretrained_model(job: Job) -> Path | None:
    """The model that `pretrain` left for the run's arm, seed and fold, in ``out`` or in a folder above it (a study writes into folders below)."""
    if job.config.train.only:
        raise _headless("train.init")
    out = job.config.out
    places = [RunFolder.of(pretraining_place(job.config, one), **job.which) for one in (out, *out.parents[:3])]
    found = [run.model for run in places if run.finished]
    if found or job.run.begun or job.run.finished:
        return found[0] if found else None
    which = f"--arm {job.arm} --seed {job.seed}" + (f" --fold {job.fold}" if job.config.folds else "")
    wanted = places[0].path.relative_to(out)
    what = f"train.init: pretrained, but there is no finished run {wanted} in `out` or a folder above it"
    cure = f"Run `gated-srp pretrain COHORT {which}` first, with the same `out`."
    raise UserError(what, where=str(job.run.path), cure=cure)


def _headless(where: str) -> UserError:
    what = "a pretraining has no head for labels: train.only: gate would freeze an untrained one"
    return UserError(
        what, where=where, cure="Train from it without train.only; then fit the gates on that run's model."
    )


def check_start(
    card: Mapping[str, Any], model: SlideModel, inputs: TrainingData, *, where: Path, only: str | None = None
) -> tuple[dict[str, Any], list[str]]:
    """What a run keeps of a model that it starts from, and what to say. A pretraining that does not fit, or that has seen slides which
    this run validates or tests on, is refused; of other models the latter is said."""
    pretrained = card.get("task") == PRETRAINING
    if pretrained and only:
        raise _headless(f"--init {where}")
    notes = _fitting(card, model, inputs, where) if pretrained else []
    seen = read_seen(card, where.parent)
    slides = inputs.members
    rows = list(zip(slides["slide"], slides["case"], slides["file"], slides["part"], strict=True))
    found = [(part, seen.of(str(slide), str(case), str(file))) for slide, case, file, part in rows] if seen else []
    # Both choose their epoch on the validation part: that it is the same is as it should be.
    known = [word for part, word in found if part == "test" or (part == "val" and word.startswith("training"))]
    if words := overlap_in_words(known):
        what = f"of the slides that this run validates and tests on, {words.replace('known to the model', 'known to these weights')}"
        cure = "Pretrain with the same seed, fold and table; or start from other weights."
        if pretrained:
            raise UserError(what, where=f"--init {where}", cure=cure, kind="overlap")
        notes.append(f"warning: {what}: its results are not those of unseen patients")
    if seen is None:
        notes.append("note: the start weights do not say which slides they have seen")
    facts = {key: card[key] for key in ("cohort", "arm", "seed", "fold", "task", "masking", "seen") if key in card}
    return facts, notes


def _fitting(card: Mapping[str, Any], model: SlideModel, inputs: TrainingData, where: Path) -> list[str]:
    """Refuses a pretraining of another family, other sizes or another encoder; what else differs is said."""
    theirs, ours = card["settings"], model.settings
    own, other = find_arm(ours["arm"]), find_arm(theirs["arm"])
    place, cure = f"--init {where}", f"Pretrain this arm: `gated-srp pretrain COHORT --arm {ours['arm']}`."
    if _blocks(own) != _blocks(other):
        what = f"pretrained as {theirs['arm']}, whose blocks are not those of {ours['arm']}"
        raise UserError(what, where=place, cure=cure)
    sizes = ["in_dim", "dim", "depth", "num_heads", "num_landmarks"]
    sizes += ["delta", "hidden_dim"] if own.gated and other.gated else []
    if wrong := [f"{size} {theirs[size]}, here {ours[size]}" for size in sizes if theirs[size] != ours[size]]:
        raise UserError(
            f"pretrained with other sizes: {'; '.join(wrong)}", where=place, cure=f"{cure} Or set `model` as there."
        )
    header = open_header(inputs.bags.members.files[0], inputs.bags.settings)
    if header.encoder and card.get("encoder") and not may_be_same(card["encoder"], header.encoder):
        what = f"pretrained on features of {card['encoder']}; those of this cohort are of {header.encoder}"
        raise UserError(what, where=place, cure="Pretrain on the features that you train on.")
    notes = []
    if ours["arm"] != theirs["arm"]:
        gates = "; its gates start as an identity" if own.gated and not other.gated else ""
        notes.append(f"note: pretrained as {theirs['arm']}, trained as {ours['arm']}{gates}")
    settings = inputs.bags.settings
    now = {key: getattr(settings, key) for key in ("window", "lattice", "order", "cap")}
    notes += [
        f"warning: pretrained with {key} {card[key]}, here {one}"
        for key, one in now.items()
        if key in card and card[key] != one
    ]
    strides = [one["um"] for one in card.get("stride") or [] if one.get("um")]
    if header.stride_um and strides and not any(abs(header.stride_um - one) <= 0.01 * one for one in strides):
        said = ", ".join(f"{one:g}" for one in strides)
        notes.append(f"warning: pretrained on patches {said} um apart, here {header.stride_um:g}")
    return notes


def _blocks(arm: Arm | PeerArm) -> tuple[Any, ...]:
    """What arms have in common whose blocks have the same weights, gates aside."""
    return (arm.attention, arm.position) if isinstance(arm, Arm) else ()
