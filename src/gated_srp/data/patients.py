"""Patients as bags: the slides of one patient side by side in one bag, without neighbours across slides.

Shapes: S slides of a patient, L rows of them all, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from gated_srp.data.loader import Cached, SlideBag, SlideDataset, Variation
from gated_srp.data.prepared import inside_regions, open_header
from gated_srp.data.table import Table
from gated_srp.errors import Note, UserError
from gated_srp.srp.graph import PatchGraph


def patients_of(slides: pd.DataFrame) -> list[list[int]]:
    """Row numbers of each patient's slides (columns slide, case): patients as they first appear, slides sorted by name.

    >>> patients_of(pd.DataFrame({"slide": ["b", "x", "a"], "case": ["p", "q", "p"]}))
    [[2, 0], [1]]
    """
    names = list(slides["slide"])
    groups: dict[str, list[int]] = {}
    for row, case in enumerate(slides["case"]):
        groups.setdefault(case, []).append(row)
    return [sorted(rows, key=lambda row: names[row]) for rows in groups.values()]


def as_patients(slides: pd.DataFrame) -> pd.DataFrame:
    """One row per patient, as `patients_of` orders them: that of the first slide, with the patient as ``slide``, and ``slides``, their number."""
    groups = patients_of(slides)
    first = slides.iloc[[rows[0] for rows in groups]].reset_index(drop=True)
    return first.assign(slide=first["case"], slides=[len(rows) for rows in groups])


def patient_table(table: Table, slides: pd.DataFrame, *, where: str) -> pd.DataFrame:
    """`as_patients`, refused where nobody knows the patients, or where their slides differ in label or part."""
    if table.patients in ("unknown", "slide"):
        cure = "Name the column of patients with `case`, or set `bag: slide`."
        raise UserError("bag: patient, but nothing says which slides are of one patient", where=where, cure=cure)
    once = [str(name) for name in slides if name not in ("slide", "case", "site", "file")]
    refuse_torn(slides, once, where=where)
    return as_patients(slides)


def refuse_torn(slides: pd.DataFrame, facts: Sequence[str], *, where: str) -> None:
    """The slides of a patient must agree in what a bag has once: its labels, its part."""
    for name in facts:
        torn = slides.groupby("case", sort=False)[name].nunique(dropna=False)
        if (torn > 1).any():
            case = torn.idxmax()
            values = dict.fromkeys(
                f"{v!r}" if isinstance(v, str) else f"{v}" for v in slides.loc[slides["case"] == case, name]
            )
            what = f"bag: patient, but the slides of patient {case!r} differ in {name} ({', '.join(values)})"
            raise UserError(
                what,
                where=where,
                cure="Correct the table, leave slides out with `exclude`, or set `bag: slide`.",
                kind="torn_patient",
            )


def shares(sizes: Sequence[int], cap: int) -> list[int]:
    """How many rows of each slide a cap on the whole bag leaves: in proportion, one at least, rounded to the largest remainders.

    >>> shares([100, 300], 40), shares([1, 999], 10), shares([5, 5], 20)
    ([10, 30], [1, 9], [5, 5])
    """
    if sum(sizes) <= cap:
        return list(sizes)
    exact = np.array(sizes) * (cap / sum(sizes))
    found = np.maximum(np.floor(exact).astype(int), 1)
    for place in np.argsort(found - exact, kind="stable")[: max(0, cap - int(found.sum()))]:
        found[place] += 1
    while found.sum() > cap:  # slides that got their one row at the cost of the largest
        found[int(found.argmax())] -= 1
    return [int(one) for one in found]


class PatientDataset(SlideDataset):
    """Item i: the bag of patient i, of the slides of ``members``. ``slides`` has one row per patient, under its id."""

    def __init__(self, members: SlideDataset, *, targets: Tensor | None = None) -> None:
        self.groups = patients_of(members.slides)
        self._members = members
        self._shared: set[int] = set()  # bags whose slides' caps are known
        frame = members.slides.assign(file=[str(file) for file in members.files])
        super().__init__(as_patients(frame), members.settings, targets=targets, cache=members.cache)

    @property
    def members(self) -> SlideDataset:
        return self._members

    def member_rows(self, rows: Sequence[int]) -> list[int]:
        return [member for row in rows for member in self.groups[row]]

    def cached(self, index: int) -> list[Cached]:
        self._share(index)
        return [one for row in self.groups[index] for one in self.members.cached(row)]

    def varied(self, index: int, variation: Variation | None) -> SlideBag:
        self._share(index)
        bags = [self.members.varied(row, variation) for row in self.groups[index]]
        target = None if self.targets is None else self.targets[index]
        return self.informed(joined(bags, index=index, case=self.slides["case"][index], target=target))

    def _share(self, index: int) -> None:
        """The cap of the bag, shared by its slides; read once per patient from the headers."""
        group, cap = self.groups[index], self.settings.cap
        if cap is None or len(group) == 1 or index in self._shared:
            return
        if cap < len(group):
            what = f"a cap of {cap} for the {len(group)} slides of patient {self.slides['case'][index]!r}"
            raise UserError(what, where="cap", cure="Raise it: each slide keeps one patch at least.", kind="cap")
        headers = [open_header(self.members.files[row], self.settings) for row in group]
        kept = [inside_regions(header, self.settings) for header in headers]
        sizes = [h.shape[0] if one is None else len(one.rows) for h, one in zip(headers, kept, strict=True)]
        self._shared.add(index)
        if sum(sizes) > cap:
            self.members.caps |= dict(zip(group, shares(sizes, cap), strict=True))


def joined(bags: Sequence[SlideBag], *, index: int, case: str, target: Tensor | None) -> SlideBag:
    """One bag of the slides of a patient: rows one slide after the other, each slide's graph as it was."""
    first = bags[0]
    notes = tuple(replace(note, where=note.where or (bag.slide,)) for bag in bags for note in bag.warnings)
    common = {field.name: getattr(first, field.name) for field in fields(first)}
    return SlideBag(
        **common
        | {
            "features": first.features if len(bags) == 1 else torch.cat([bag.features for bag in bags]),  # (L, C)
            "coords": torch.cat([bag.coords for bag in bags]),  # (L, 2), each in the pixels of its own slide
            "graph": PatchGraph.side_by_side([bag.graph for bag in bags]),
            "num_patches": sum(bag.num_patches for bag in bags),
            "warnings": tuple(dict.fromkeys(notes)),
            "index": index,
            "slide": case,
            "case": case,
            "target": target,
            "parts": tuple((bag.slide, bag.path, len(bag.features)) for bag in bags),
        }
    )


def without_patients(slides: pd.DataFrame) -> Note | None:
    """Slides (slide, case) of which nobody says whose they are."""
    unknown = slides.loc[slides["case"] == "", "slide"]
    if not len(unknown):
        return None
    names = ", ".join(map(repr, unknown[:3])) + (", ..." if len(unknown) > 3 else "")
    return Note(
        "error",
        "patients_unknown",
        f"the model sees all slides of a patient at once, and the patient of {names} is not known",
    )
