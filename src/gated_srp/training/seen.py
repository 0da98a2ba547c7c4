"""Which slides and patients a model has seen: salted hashes in its card, and other slides compared with them.

A hash is of a salt, the run's own and kept in its card, and an id. The salt is a digest of the trained weights: no other run has it, nobody
can prepare a dictionary for it, and a run that is repeated bit for bit still gives the same file. The ids themselves are not there: whoever has a list of
ids can tell which of them are in the training, and nobody can read the list out of the model.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from gated_srp.data.matching import slide_stem, tcga_patient
from gated_srp.data.splits import Split
from gated_srp.errors import Note, UserError, counted
from gated_srp.training.folder import RunFolder

_DIGITS = 20  # of a SHA-256 in hexadecimal: no two ids of any cohort share them by chance
_PARTS = {"train": "training", "val": "validation"}


def seen_card(slides: pd.DataFrame, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """For a model's card, from the slides of a run (slide, case, file, part): the salt, and hashes by part of slides and patients."""
    digest = hashlib.sha256()
    for tensor in weights.values():
        digest.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    salt = digest.hexdigest()[:32]
    card: dict[str, Any] = {"salt": salt}
    for part in _PARTS:
        own = slides[slides["part"] == part]
        names = {slide_stem(name) for column in ("slide", "file") for name in own[column]}
        patients = {
            one for slide, case in zip(own["slide"], own["case"], strict=True) for one in patients_of(slide, case)
        }
        card[part] = {"slides": _hashes(salt, names), "patients": _hashes(salt, patients)}
    return card


def patients_of(slide: str, case: str = "") -> set[str]:
    """Ids by which the patient of a slide may be known: the table's, and that of a TCGA barcode. A slide is no patient."""
    barcode = tcga_patient(slide)
    return ({case} if case and slide_stem(case) != slide_stem(slide) else set()) | ({barcode} if barcode else set())


@dataclass(frozen=True)
class Seen:
    """What a model has seen: hashes, each with its part (training, validation)."""

    salt: str
    slides: Mapping[str, str]
    patients: Mapping[str, str]
    before: Seen | None = None  # of the weights that its training started from

    def of(self, slide: str, case: str = "", file: str = "") -> str:
        """``training slide``, ``validation slide``, ``training patient``, ``validation patient``, or nothing."""
        names = {slide_stem(name) for name in (slide, file) if name}
        for kind, known, ids in (("slide", self.slides, names), ("patient", self.patients, patients_of(slide, case))):
            parts = {known.get(one) for one in _hashes(self.salt, ids)}
            if part := next((part for part in _PARTS.values() if part in parts), None):
                return f"{part} {kind}"
        return self.before.of(slide, case, file) if self.before else ""


def read_seen(card: Mapping[str, Any], folder: Path) -> Seen | None:
    """From a model's card; of an older one from the split.csv beside the model; None where neither says it."""
    before = None if not (card.get("init") or {}).get("seen") else read_seen(card["init"], folder)
    if (stored := card.get("seen")) is not None:
        salt, parts = stored["salt"], {part: stored[part] for part in _PARTS}
    elif (split := RunFolder(folder).split) is not None:
        salt, unit = "", str(split.columns[0])
        kind = "slides" if Split(unit, {}, "").by_slide else "patients"
        stems = split[unit].map(slide_stem) if kind == "slides" else split[unit]
        parts = {part: {kind: _hashes(salt, stems[split["split"] == part])} for part in _PARTS}
    else:
        return None
    slides, patients = (
        {one: _PARTS[part] for part in reversed(_PARTS) for one in parts[part].get(kind, ())}
        for kind in ("slides", "patients")
    )
    return Seen(salt, slides, patients, before)


def compare_with_training(known: Sequence[Seen | None], slides: pd.DataFrame) -> tuple[list[str], tuple[Note, ...]]:
    """For each slide (columns slide, case, file) what models have seen of it, and what to say: of overlap, and of what is unknown."""
    rows = list(zip(slides["slide"], slides["case"], slides["file"], strict=True))
    found = [next((word for one in known if one and (word := one.of(*map(str, row)))), "") for row in rows]
    notes = []
    if any(one is None for one in known):
        said = "the model's card does not say which slides it was trained on, so none can be told apart from them"
        notes.append(Note("note", "seen_unknown", said))
    if words := overlap_in_words(found):
        notes.append(Note("warning", "seen_in_training", words))
    unknown = sum(not patients_of(slide, case) and not word for (slide, case, _), word in zip(rows, found, strict=True))
    if unknown and any(known):
        who = f"the patient{'s' * (unknown > 1)} of {counted(unknown, 'slide')} {'are' if unknown > 1 else 'is'} not known"
        notes.append(
            Note("note", "patients_unknown", f"{who}, so only slides were compared with those of the training")
        )
    return found, tuple(notes)


def refuse_seen(known: Seen | None, slides: pd.DataFrame, *, where: str, allowed: bool = False) -> tuple[Note, ...]:
    """For `evaluate` and `localize`: what to say of slides (slide, case, file) that the model has seen; refused unless allowed."""
    notes = compare_with_training([known], slides)[1]
    told = {note.kind: replace(note, what=f"{note.what}, so this is no external validation") for note in notes}
    if "seen_in_training" in told and not allowed:
        cure = (
            "Leave them out with `exclude`, or score them all the same with --allow-overlap (allow_overlap=True), which the results then "
            "say. Ids are compared: other patients may happen to have the same."
        )
        raise UserError(told["seen_in_training"].what, where=where, cure=cure, kind="overlap")
    return tuple(told[note.kind] if note.kind == "seen_in_training" else note for note in notes)


def external_validation(known: Seen | None, found: Sequence[str]) -> tuple[bool | None, str]:
    """Whether results on slides (``found``: what `compare_with_training` gave for each) may be called external validation, and a sentence.

    >>> external_validation(None, ["", ""])[0], external_validation(Seen("", {}, {}), ["", "training slide"])
    (None, (False, 'NOT AN EXTERNAL VALIDATION: 1 of 2 slides is known to the model: 1 training slide'))
    """
    if words := overlap_in_words(found):
        return False, f"NOT AN EXTERNAL VALIDATION: {words}"
    if known is None:
        return (
            None,
            "whether this is an external validation is not known: the model's card does not say which slides it was trained on",
        )
    return True, "no slide or patient of this cohort, by its id, was in the model's training or validation part"


def overlap_in_words(found: Sequence[str]) -> str:
    """
    >>> overlap_in_words(["", "training slide", "validation patient", "validation patient"])
    '3 of 4 slides are known to the model: 1 training slide, 2 slides of validation patients'
    """
    counts = Counter(filter(None, found))
    listed = [
        counted(counts[word], word) if kind == "slide" else f"{counted(counts[word], 'slide')} of {part} patients"
        for kind in ("slide", "patient")
        for part in _PARTS.values()
        if (word := f"{part} {kind}") in counts
    ]
    verb = "is" if counts.total() == 1 else "are"
    whole = f"{counts.total()} of {counted(len(found), 'slide')} {verb} known to the model"
    return f"{whole}: {', '.join(listed)}" if counts else ""


def _hashes(salt: str, ids: Iterable[str]) -> list[str]:
    composed = (unicodedata.normalize("NFC", str(one).strip()) for one in ids)
    return sorted({hashlib.sha256(f"{salt}{one}".encode()).hexdigest()[:_DIGITS] for one in composed})
