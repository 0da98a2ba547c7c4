"""Finished runs as they are used on other slides: the model, its task, whether a feature file fits it, and the answers of several.

    run = TrainedRun.open("runs/BRACS/gated_srp/seed42")
    bag = open_slide(run, "feats/s17.h5")              # refused where width, encoder or stride are not those of the training

Shapes: M runs, B slides, K outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd

from gated_srp.data.bag import BagError, BagHeader, same_stride
from gated_srp.data.files.images import ImageGrid
from gated_srp.data.files.siblings import about_old_name, is_known, may_be_same
from gated_srp.data.loader import SlideBag, SlideDataset, Variation
from gated_srp.data.matching import slide_stem
from gated_srp.data.prepared import Preparation, open_header
from gated_srp.errors import Note, UserError, joined
from gated_srp.files import as_stored
from gated_srp.models import SlideModel, load_card, load_model, model_file
from gated_srp.tasks import Task, refuse_pretrained, task_from_card
from gated_srp.tasks.task import Columns
from gated_srp.training.inputs import FeatureStatistics
from gated_srp.training.seen import Seen, read_seen

if TYPE_CHECKING:
    from torch import Tensor

    from gated_srp.data.cache import BagCache
    from gated_srp.data.covariates import Covariates
    from gated_srp.data.regions import Regions

_AS_STORED = Preparation()


@dataclass(frozen=True, eq=False)
class TrainedRun:
    """A trained model that predicts, alone or with others. Its card says what it was trained on; `load` reads the weights."""

    path: Path  # as it was named: a run's folder, or a model file
    card: dict[str, Any]

    @classmethod
    def open(cls, run: str | Path | TrainedRun) -> TrainedRun:
        """From a run's folder, or its model.safetensors."""
        if isinstance(run, TrainedRun):
            return run
        run = as_stored(run)
        found = cls(run, load_card(model_file(run)))
        try:
            refuse_pretrained(found.card)
        except UserError as error:
            raise error.changed(where=str(run)) from None
        return found

    def load(self) -> SlideModel:
        """The model, on the CPU, in evaluation mode."""
        return load_model(model_file(self.path))

    @cached_property
    def task(self) -> Task:
        """What the outputs mean; a model that `gated-srp train` has not trained may have none, which is an error."""
        cure = "Train the run again, or correct its card."
        try:
            return task_from_card(self.card)
        except UserError as error:
            raise error.changed(where=str(self.path), cure=error.cure or cure) from None
        except (KeyError, TypeError, ValueError) as error:
            what = f"its card does not describe the task {self.card['task']!r} ({error!r:.200})"
            raise UserError(what, where=str(self.path), cure=cure, kind="card") from None

    @property
    def width(self) -> int:
        """Channels of the features it was trained on."""
        return int(self.card["settings"]["in_dim"])

    @property
    def encoder(self) -> str | None:
        """None where the training files named none, or several."""
        return self.card.get("encoder")

    @property
    def images(self) -> ImageGrid | None:
        """How the images it was trained on are cut; None: it was trained on features."""
        return ImageGrid(**self.card["images"]) if "images" in self.card else None

    @property
    def patients(self) -> bool:
        """Whether its bags are patients: all slides of one at once."""
        return bool(self.card.get("bag") == "patient")

    @cached_property
    def covariates(self) -> Covariates | None:
        """What its head sees beside slides, with the statistics of its training; None: nothing."""
        wanted, card = self.card["settings"].get("covariates", 0), self.card.get("covariates")
        if not wanted and card is None:
            return None
        from gated_srp.data.covariates import Covariates  # not above: rarely so

        with suppress(KeyError, TypeError):
            if (found := Covariates.from_card(card or ())).width == wanted:
                return found
        cure = "Train the run again, or correct its card."
        raise UserError("its card does not describe its covariates", where=str(self.path), cure=cure, kind="card")

    @property
    def temperature(self) -> float:
        """By which logits are divided; 1 where the task does not calibrate, or validation could not determine one."""
        return float(self.card.get("temperature", 1.0)) if self.task.calibrates else 1.0

    @cached_property
    def features(self) -> FeatureStatistics | None:
        """What its training slides looked like."""
        known = self.card.get("features")
        return None if known is None else FeatureStatistics(**known)

    @cached_property
    def seen(self) -> Seen | None:
        """Which slides and patients trained and validated it; None where neither its card nor its folder says it."""
        return read_seen(self.card, self.path if self.path.is_dir() else self.path.parent)

    def __str__(self) -> str:
        """What it predicts and from what, in one line."""
        names = self.task.outputs
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        strides = ", ".join(f"{entry['value']:g} {entry['unit']}" for entry in self.card.get("stride", [])[:4])
        apart = f", patches {strides} apart" if strides else ""
        what = self.encoder or "an unnamed encoder"
        if self.images is not None:
            what = f"images of {self.images.size} x {self.images.size} pixels"
        beside = f", with {', '.join(self.covariates.names)}" if self.covariates else ""
        return f"{self.card['task']} ({shown}) from {what}, {self.width} channels{apart}{beside}"

    def preparation(self, reading: Preparation = _AS_STORED) -> Preparation:
        """Bags as they were made for its training, from files that are read as ``reading`` says."""
        made = {key: self.card[key] for key in ("order", "window", "lattice", "cap", "dtype") if key in self.card}
        rule, regions = self.card.get("regions"), reading.regions
        if rule is not None or regions is not None:
            from gated_srp.data.regions import as_trained  # not above: rarely so

            regions = as_trained(rule, regions, self.path)
        other: dict[str, Any] = {"images": self.images, "features_low": self._low(reading.features_low)}
        return replace(reading, **made, **other, encoder=self.encoder or reading.encoder, regions=regions)

    def _low(self, folder: Path | None) -> Path | None:
        """The folder of a second magnification, if it was trained on two; then it must be given."""
        if self.card.get("features_low") is None:
            return None
        if folder is None:
            what = "trained on patches of two magnifications, and nothing says where the lower one of other slides is"
            cure = "predict, embed and heatmap take its folder with --features-low, evaluate by the cohort's `features_low`."
            raise UserError(what, where=self.path, cure=cure, kind="scales")
        return folder

    def calibrated(self, logits: Tensor) -> Columns:
        """Calibrated columns of (B, K) logits: those over the temperature that was fitted on validation."""
        return self.task.calibrated(logits.double() / self.temperature)


def open_runs(runs: Sequence[str | Path | TrainedRun]) -> list[TrainedRun]:
    """Several runs that may be averaged: one task, the same classes, encoder and width."""
    if not runs:
        raise UserError("no run is named. Expected a run's folder, or its model.safetensors.")
    members = [TrainedRun.open(run) for run in runs]
    first, places = members[0], [model_file(member.path).resolve() for member in members]
    for number, member in enumerate(members):
        if places[number] in places[:number]:
            raise UserError("named twice; an ensemble counts each run once.", where=member.path)
        for what, mine, others in (
            ("task", member.task.name, first.task.name),
            ("classes", member.card.get("classes"), first.card.get("classes")),
            ("encoder", member.encoder, first.encoder),
            ("width of features", member.width, first.width),
            ("bags of", "patients" if member.patients else "slides", "patients" if first.patients else "slides"),
            ("covariates", *(one.covariates.names if one.covariates else None for one in (member, first))),
        ):
            if mine != others:
                raise UserError(
                    f"{what} {_listed(mine)}, but {_listed(others)} in {first.path}",
                    where=member.path,
                    cure="Only runs of one task on the same features can be averaged; predict with each by itself.",
                )
    return members


def drawn_for(runs: Sequence[TrainedRun], annotations: str | Path | None) -> Regions | None:
    """The folder of annotations for runs that were trained on regions, whose rule is in their cards; useless for others."""
    if annotations is None:
        return None
    if not any(run.card.get("regions") for run in runs):
        what = "no run was trained on regions, so annotations would change nothing"
        raise UserError(what, where=annotations, cure="Leave --annotations out.", kind="regions")
    from gated_srp.data.regions import folder_of  # not above: rarely so

    return folder_of(annotations)


def average(runs: Sequence[TrainedRun], logits: Sequence[Tensor]) -> pd.DataFrame:
    """Answers of each run's (B, K) logits: of one run, or the mean of several with its spread (n - 1).

    Where a run has a temperature there are calibrated columns too; runs without one enter their means as they are.
    """
    task = runs[0].task
    each = type(task).member_numbers([run.task for run in runs], logits)
    if any(run.temperature != 1.0 for run in runs):
        both = zip(each, runs, logits, strict=True)
        each = [{**numbers, **run.calibrated(one)} for numbers, run, one in both]
    values = {name: np.stack([one[name] for one in each]) for name in each[0]}  # (M, B)
    table = task.decided(pd.DataFrame({name: value.mean(0) for name, value in values.items()}))
    if len(runs) > 1:
        table = table.assign(**{f"{name}_std": value.std(0, ddof=1) for name, value in values.items()})
    return table


# Does a file fit? ----------------------------------------------------------------------------------------------------


def open_slide(
    run: str | Path | TrainedRun,
    file: str | Path,
    *,
    beside: Sequence[str | Path] | None = None,
    covariates: Mapping[str, Any] | None = None,
    reading: Preparation = _AS_STORED,
    force: bool = False,
) -> SlideBag:
    """One feature file (or image) as a finished run sees it. Whatever uses a finished run on a slide goes through here.

    Args:
        run: a run's folder, its model file, or an open `TrainedRun`.
        file: the feature file.
        beside: files of the patient's other slides, for a run whose bags are patients; empty where there are none.
        covariates: values by the names of the training table, for a run that has covariates, e.g. ``{"age": 61, "sex": "f"}``.
        reading: how to read it where that is not plain: ``Preparation(stride=..., features_key=..., coords_key=...)``.
        force: another stride, or an encoder's name that we do not know, is a warning of the bag rather than an error.

    Returns:
        The bag with its graph: order, cap, window, lattice and precision as in training. ``run.preparation(reading)`` are these
        settings. A file of another width or encoder, or with another stride, raises `UserError`.
    """
    name = slide_stem(file)
    trained = TrainedRun.open(run)
    if trained.patients and beside is None:
        cure = "Name the patient's other slides: `beside` in Python, a table of slides and patients with --table."
        raise UserError(
            "the model sees all slides of a patient at once", where=file, cure=cure, kind="patients_unknown"
        )
    files = [str(one) for one in (file, *(beside or ()))] if trained.patients else [str(file)]
    slides = pd.DataFrame({"slide": list(map(slide_stem, files)), "case": name, "file": files})
    if trained.covariates is not None:
        slides = slides.assign(**trained.covariates.row(covariates, file))
    bag = fitting_bags(trained, slides, reading, cache=None, force=force)[0]
    if not (word := trained.seen.of(name) if trained.seen else ""):
        return bag
    return replace(bag, warnings=(*bag.warnings, Note("warning", "seen_in_training", f"the model has seen it: {word}")))


def fitting_bags(
    run: TrainedRun, slides: pd.DataFrame, reading: Preparation, *, cache: BagCache | None, force: bool
) -> SlideDataset:
    """The bags that the run's model needs of these slides (columns slide, case, file, covariates): one per slide, or per patient."""
    dataset: SlideDataset = FittingDataset.fitting(run, slides, reading, cache=cache, force=force)
    if run.patients:
        from gated_srp.data.patients import (
            PatientDataset,
            as_patients,
            refuse_torn,
            without_patients,
        )  # not above: rarely so

        if note := without_patients(slides):
            raise UserError(note.what, cure="Name a table of slides and patients with --table.", kind=note.kind)
        refuse_torn(slides, run.covariates.stored if run.covariates else (), where=str(run.path))
        dataset, slides = PatientDataset(dataset), as_patients(slides)
    if run.covariates is not None:
        from gated_srp.data.covariates import BagCovariates

        dataset.covariates = BagCovariates.of(run.covariates, slides)
    return dataset


class FittingDataset(SlideDataset):
    """A dataset that refuses files unlike those a model was trained on, before it reads their features.

    Compared are the width, the encoder where both sides name one, and the stride (see `stride_problem`).
    ``force`` makes a warning of another stride, and of another encoder's name if one of the two is not in our table.
    """

    run: TrainedRun
    force: bool

    @classmethod
    def fitting(
        cls, run: TrainedRun, slides: pd.DataFrame, reading: Preparation, *, cache: BagCache | None, force: bool
    ) -> Self:
        """The slides (columns slide, case, file) as the run's model needs them."""
        dataset = cls(slides, run.preparation(reading), cache=cache)
        dataset.run, dataset.force = run, force
        return dataset

    def varied(self, index: int, variation: Variation | None) -> SlideBag:
        try:
            notes = self._fit(self.files[index])
            bag = super().varied(index, variation)
        except UserError:
            raise
        except Exception as error:  # one odd file must not end the others' predictions
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise UserError(
                f"cannot be read ({said})", where=self.files[index], cure="Extract the slide again."
            ) from error
        return replace(bag, warnings=(*bag.warnings, *notes))

    def _fit(self, path: Path) -> tuple[Note, ...]:
        header, run = self._header(path), self.run
        stride = stride_problem(header, run.card.get("stride") or [])
        hard, soft, noted = list[Note](), [stride] if stride else [], list[Note]()
        if self.settings.features_low is not None:
            from gated_srp.data.two_scales import Scales  # not above: rarely so

            ratio = Scales.open(path, self.settings).problem(run.card["features_low"])
            hard += [ratio] if ratio else []
        if run.encoder and header.encoder and header.encoder != run.encoder:
            said = f"encoder: features of {header.encoder!r}, but the model was trained on {run.encoder!r}"
            if may_be_same(run.encoder, header.encoder):
                cure = "Make sure that the training had these features."
                said += about_old_name(header.encoder, run.encoder)
                noted.append(Note("warning", "encoder", said, cure=cure))
            elif is_known(run.encoder) and is_known(header.encoder):
                cure = "Point at the right folder, or extract the slides with that encoder."
                hard.append(Note("error", "encoder", said, cure=cure))
            else:
                cure = "Point at the right folder; if it is one encoder under two names: --force."
                soft.append(Note("warning", "encoder", said, cure=cure))
        if header.shape[1] != run.width:
            of = f" of {run.encoder}" if run.encoder else ""
            said = f"width: {header.shape[1]} channels, but the model was trained on {run.width}{of}"
            cure = "Extract the slides with the encoder of the training."
            hard.append(Note("error", "width", said, cure=cure))
        if refused := hard + ([] if self.force else soft):
            before = "".join(f"{joined(note.what, cure=note.cure)} " for note in refused[:-1])
            last = refused[-1]
            raise UserError(f"{before}{last.what}", where=path, cure=last.cure, kind=refused[0].kind)
        if run.encoder and header.encoder is None:
            said = f"encoder: the file names none; taken for {run.encoder}, since the width fits"
            noted.append(Note("warning", "unnamed_encoder", said))
        return (*soft, *noted)

    def _header(self, path: Path) -> BagHeader:
        """With what the file itself, or its folder, says of the encoder; a file of several is asked for the model's."""
        try:
            return open_header(path, replace(self.settings, encoder=None))
        except BagError as error:
            if error.kind != "several_encoders":
                raise
            return open_header(path, self.settings)


def stride_problem(header: BagHeader, trained: Sequence[dict[str, Any]]) -> Note | None:
    """What is wrong with a file's stride for a model whose card lists ``trained``, or None.

    Level-0 pixels are no measure across scanners: 256 at 20x and 512 at 40x are the same tissue. So microns are compared, from the
    file's magnification or pixel size, where the card has them too; else the plain numbers, if the units agree; else nothing.
    """
    if not header.stride_known:
        return None
    mine = header.stride_um
    physical = [entry["um"] for entry in trained if entry.get("um")]
    plain = [entry["value"] for entry in trained if entry["unit"] == header.unit]
    known, value, unit = (physical, mine, "um") if physical and mine else (plain, header.stride, header.unit)
    if not known or value is None or any(same_stride(value, one) for one in known):
        return None
    listed = ", ".join(f"{one:g}" for one in sorted(set(known)))
    scan = "" if unit == "um" else " (level-0 pixels; if only the scan's magnification differs: --force)"
    return Note(
        "warning",
        "stride",
        f"stride: patches lie {value:g} {unit} apart, but {listed} {unit} in training{scan}",
        cure="Extract the slides with the patch size and magnification of the training slides.",
    )


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value or "unknown")
