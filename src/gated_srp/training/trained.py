"""Finished runs as they are used on other slides: the model, its task, and whether a feature file fits it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import pandas as pd
from torch import Tensor

from gated_srp.data.bag import BagError, BagHeader
from gated_srp.data.cache import BagCache
from gated_srp.data.files.encoders import is_known
from gated_srp.data.files.images import ImageGrid
from gated_srp.data.loader import SlideBag, SlideDataset
from gated_srp.data.prepared import Preparation, open_header
from gated_srp.errors import Note, UserError
from gated_srp.models import SlideModel, load_card, load_model, model_file
from gated_srp.tasks import Task, task_from_card
from gated_srp.training.domain import FeatureStatistics

_SAME = 0.1  # relative difference of two strides that are one: scanners of one magnification differ by some per cent


@dataclass(frozen=True, eq=False)
class Member:
    """A trained model that predicts, alone or with others."""

    run: Path  # as it was named
    card: dict[str, Any]
    task: Task

    @classmethod
    def open(cls, run: str | Path) -> Member:
        """From a run's folder, or its model.safetensors; the weights are read by `load`."""
        run = Path(run)
        card = load_card(model_file(run))
        try:
            return cls(run, card, task_from_card(card))
        except UserError as error:
            raise UserError(f"{run}: {error}") from None

    def load(self) -> SlideModel:
        return load_model(model_file(self.run))

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
    def temperature(self) -> float:
        return float(self.card.get("temperature", 1.0)) if self.task.calibrates else 1.0

    @cached_property
    def features(self) -> FeatureStatistics | None:
        """What its training slides looked like."""
        known = self.card.get("features")
        return None if known is None else FeatureStatistics(**known)

    def __str__(self) -> str:
        """What it predicts and from what, in one line."""
        names = self.task.outputs
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        strides = ", ".join(f"{entry['value']:g} {entry['unit']}" for entry in self.card.get("stride", [])[:4])
        apart = f", patches {strides} apart" if strides else ""
        what = self.encoder or "an unnamed encoder"
        if self.images is not None:
            what = f"images of {self.images.size} x {self.images.size} pixels"
        return f"{self.card['task']} ({shown}) from {what}, {self.width} channels{apart}"

    def preparation(self, reading: Preparation) -> Preparation:
        """Bags as they were made for its training, from files that are read as ``reading`` says."""
        made = {key: self.card[key] for key in ("order", "window", "lattice", "cap", "dtype") if key in self.card}
        return replace(reading, **made, encoder=self.encoder or reading.encoder, images=self.images)

    def calibrated(self, logits: Tensor) -> Tensor:
        """(B, K) logits over the temperature that was fitted on validation."""
        return logits.double() / self.temperature


def open_members(runs: Sequence[str | Path]) -> list[Member]:
    """Several runs that may be averaged: one task, the same classes, encoder and width."""
    if not runs:
        raise UserError("no run is named. Expected a run's folder, or its model.safetensors.")
    members = [Member.open(run) for run in runs]
    first, places = members[0], [model_file(member.run).resolve() for member in members]
    for number, member in enumerate(members):
        if places[number] in places[:number]:
            raise UserError(f"{member.run}: named twice; an ensemble counts each run once.")
        for what, mine, others in (
            ("task", member.card["task"], first.card["task"]),
            ("classes", member.card.get("classes"), first.card.get("classes")),
            ("encoder", member.encoder, first.encoder),
            ("width of features", member.width, first.width),
        ):
            if mine != others:
                raise UserError(
                    f"{member.run}: {what} {_listed(mine)}, but {_listed(others)} in {first.run}. "
                    "Only runs of one task on the same features can be averaged; predict with each by itself."
                )
    return members


class FittingDataset(SlideDataset):
    """A dataset that refuses files unlike those a model was trained on, before it reads their features.

    Compared are the width, the encoder where both sides name one, and the stride (see `stride_problem`).
    ``force`` makes a warning of another stride, and of another encoder's name if one of the two is not in our table.
    """

    member: Member
    force: bool

    @classmethod
    def fitting(
        cls, member: Member, slides: pd.DataFrame, reading: Preparation, *, cache: BagCache | None, force: bool
    ) -> Self:
        """The slides (columns slide, case, file) as the member's model needs them."""
        dataset = cls(slides, member.preparation(reading), cache=cache)
        dataset.member, dataset.force = member, force
        return dataset

    def __getitem__(self, index: int) -> SlideBag:
        try:
            notes = self._fit(self.files[index])
            bag = super().__getitem__(index)
        except UserError:
            raise
        except Exception as error:  # one odd file must not end the others' predictions
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise UserError(
                f"cannot be read ({said})", where=self.files[index], cure="Extract the slide again."
            ) from error
        return replace(bag, warnings=(*bag.warnings, *(Note("warning", "input", note) for note in notes)))

    def _fit(self, path: Path) -> tuple[str, ...]:
        header, member = self._header(path), self.member
        stride = stride_problem(header, member.card.get("stride") or [])
        hard, soft = [], [stride] if stride else []
        if member.encoder and header.encoder and header.encoder != member.encoder:
            said = f"encoder: features of {header.encoder!r}, but the model was trained on {member.encoder!r}. "
            if is_known(member.encoder) and is_known(header.encoder):
                hard.append(f"{said}Point at the right folder, or extract the slides with that encoder.")
            else:
                soft.append(f"{said}Point at the right folder; if it is one encoder under two names: --force.")
        if header.shape[1] != member.width:
            hard.append(
                f"width: {header.shape[1]} channels, but the model was trained on {member.width}"
                f"{f' of {member.encoder}' if member.encoder else ''}. Extract the slides with the encoder of the training."
            )
        if refused := hard + ([] if self.force else soft):
            raise UserError(" ".join(refused), where=path, kind="input")
        if member.encoder and header.encoder is None:
            soft.append(f"encoder: the file names none; taken for {member.encoder}, since the width fits")
        return tuple(soft)

    def _header(self, path: Path) -> BagHeader:
        """With what the file itself, or its folder, says of the encoder; a file of several is asked for the model's."""
        try:
            return open_header(path, replace(self.settings, encoder=None))
        except BagError as error:
            if error.kind != "several_encoders":
                raise
            return open_header(path, self.settings)


def stride_problem(header: BagHeader, trained: Sequence[dict[str, Any]]) -> str | None:
    """What is wrong with a file's stride for a model whose card lists ``trained``, or None.

    Level-0 pixels are no measure across scanners: 256 at 20x and 512 at 40x are the same tissue. So microns are compared, from the
    file's magnification or pixel size, where the card has them too; else the plain numbers, if the units agree; else nothing.
    """
    mine = header.stride_um
    physical = [entry["um"] for entry in trained if entry.get("um")]
    plain = [entry["value"] for entry in trained if entry["unit"] == header.unit]
    known, value, unit = (physical, mine, "um") if physical and mine else (plain, header.stride, header.unit)
    if not known or value is None or any(math.isclose(value, one, rel_tol=_SAME) for one in known):
        return None
    listed = ", ".join(f"{one:g}" for one in sorted(set(known)))
    scan = "" if unit == "um" else " (level-0 pixels; if only the scan's magnification differs: --force)"
    return (
        f"stride: patches lie {value:g} {unit} apart, but {listed} {unit} in training{scan}. "
        "Extract the slides with the patch size and magnification of the training slides."
    )


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value or "unknown")
