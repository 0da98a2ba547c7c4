"""Who trains, who validates, who tests: a `Split`, the rules that draw one, and the check that no patient is in two parts.

The rules are those of the published splits, to the last draw of the random stream: seeds 42 to 46 give the paper's own.
"""

import csv
import hashlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from gated_srp.data.columns import USUAL, plain
from gated_srp.data.table import Table
from gated_srp.errors import Note, UserError, counted
from gated_srp.files import spreadsheet_safe, whole

PARTS = ("train", "val", "test")
Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Split:
    """Each unit's part. ``unit`` is the name of the units' column: a slide's (slide_id, image_id) or a patient's."""

    unit: str
    parts: Mapping[str, str]
    source: str
    notes: tuple[Note, ...] = ()

    @property
    def hash(self) -> str:
        """Over the sorted rows: two arms are paired when they share it."""
        rows = "".join(f"{unit},{part}\n" for unit, part in sorted(self.parts.items()))
        return hashlib.sha256(rows.encode()).hexdigest()

    @property
    def by_slide(self) -> bool:
        """Whether the units are slides rather than patients."""
        return plain(self.unit) in (*USUAL["slide"], "patch_id")

    @property
    def counts(self) -> dict[str, int]:
        """Units in train, val and test."""
        tally = Counter(self.parts.values())
        return {part: tally[part] for part in PARTS}


def write_split(split: Split, path: str | Path) -> None:
    """Header ``<unit>,split``, sorted by unit; written whole or not at all."""
    with whole(Path(path)) as draft, draft.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([split.unit, "split"])
        writer.writerows((spreadsheet_safe(unit), part) for unit, part in sorted(split.parts.items()))


def assign_parts(split: Split, table: Table) -> "pd.Series[Any]":
    """The part of each row of the table (missing: in none). A patient in two parts is an error."""
    parts = table.frame["slide" if split.by_slide else "case"].map(dict(split.parts))
    if parts.isna().all():
        what = f"none of its {split.unit}s is in the table, e.g. {next(iter(split.parts), 'none')!r}"
        raise UserError(what, where=split.source, cure="Check that the split is of this cohort.", kind="split")
    spread = parts.groupby(table.frame["case"]).nunique()
    crossing = spread.index[spread > 1]
    if len(crossing):
        what = f"{counted(len(crossing), 'patient')} in more than one part ({', '.join(crossing[:10])}), so the test would know them"
        cure = "Split by patient, or correct the patient column."
        raise UserError(what, where=split.source, cure=cure, kind="split")
    return parts


# The published rules -------------------------------------------------------------------------------------------------


def hold_out(groups: Mapping[str, Hashable], seed: int) -> dict[str, str]:
    """Of each group a fifth to test and a tenth of the rest to validation, units taken in the order of ``groups``."""
    parts: dict[str, str] = {}
    for units in shuffled_strata(groups, np.random.default_rng(seed)):
        n = len(units)
        test = min(max(1, round(0.2 * n)), n - 2) if n > 2 else 0
        val = test + _tenth(n - test)
        parts |= dict.fromkeys(units[:test], "test") | dict.fromkeys(units[test:val], "val")
        parts |= dict.fromkeys(units[val:], "train")
    return parts


def dealt_hold_out(strata: Mapping[str, str], seed: int) -> dict[str, str]:
    """Each stratum dealt round-robin into five parts, the first tests; the rest into eight, the first validates."""
    test = _dealt_first(strata, 5, seed)
    rest = {case: stratum for case, stratum in strata.items() if case not in test}
    val = _dealt_first(rest, 8, seed * 1000 + 17)
    return {case: "test" if case in test else "val" if case in val else "train" for case in strata}


def shuffled_strata(groups: Mapping[str, Hashable], rng: np.random.Generator) -> list[list[str]]:
    """Units of each group in random order, groups sorted by their text: one stream serves all, so order matters."""
    strata = defaultdict(list)
    for unit, group in groups.items():
        strata[str(group)].append(unit)
    for group in sorted(strata):
        rng.shuffle(strata[group])
    return [strata[group] for group in sorted(strata)]


def _dealt_first(strata: Mapping[str, str], hands: int, seed: int) -> set[str]:
    dealt = shuffled_strata(strata, np.random.default_rng(seed))
    return set(chain.from_iterable(units[::hands] for units in dealt))


def _tenth(rest: int) -> int:
    return min(max(1, round(0.1 * rest)), rest - 1) if rest > 1 else 0


# A user's own cohort -------------------------------------------------------------------------------------------------


def case_groups(table: Table) -> dict[str, str]:
    """What a patient is stratified by; the task knows."""
    return table.kind.strata(table.frame, table.classes)


def own_split(table: Table, seed: int) -> Split:
    """The published rule on the user's patients."""
    rules = {"shuffled": hold_out, "dealt": dealt_hold_out}
    return _by_case(rules[table.kind.hold_out](case_groups(table), seed), f"hold-out by {_unit(table)}, seed {seed}")


def k_folds(table: Table, folds: int, seed: int) -> tuple[Split, ...]:
    """Every patient tests once; of the others a tenth of each group validates."""
    groups = case_groups(table)
    _check_folds(folds, len(groups), "patients")
    order = list(chain.from_iterable(shuffled_strata(groups, np.random.default_rng(seed))))
    splits = []
    for fold in range(folds):
        test = set(order[fold::folds])
        rest = {case: group for case, group in groups.items() if case not in test}
        parts = dict.fromkeys(test, "test") | validation_of(rest, seed)
        splits.append(_by_case(parts, f"fold {fold} of {folds} by {_unit(table)}, seed {seed}"))
    return tuple(splits)


def site_folds(table: Table, folds: int, seed: int) -> tuple[Split, ...]:
    """Folds in which no site is in two parts, classes balanced greedily: knowing the scanner then gains nothing.

    The seed only matters where a single site is left to train: its validation patients are drawn from it.
    """
    site_of = _sites(table)
    groups = case_groups(table)
    names = sorted(set(groups.values()))
    vectors = {site: np.zeros(len(names)) for site in sorted(set(site_of.values()))}
    for case, site in site_of.items():
        vectors[site][names.index(groups[case])] += 1
    _check_folds(folds, len(vectors), "sites")
    splits = []
    for fold, test in enumerate(balanced_parts(vectors, folds)):
        rest = {site: vector for site, vector in vectors.items() if site not in test}
        if len(rest) > 1:
            val = nearest_part(balanced_parts(rest, min(10, len(rest))), rest)
            parts = {case: "val" if site in val else "train" for case, site in site_of.items()}
        else:
            parts = validation_of({case: groups[case] for case, site in site_of.items() if site in rest}, seed)
        parts |= {case: "test" for case, site in site_of.items() if site in test}
        splits.append(_by_case(parts, f"fold {fold} of {folds} by site, seed {seed}"))
    return tuple(splits)


def validation_of(groups: Mapping[str, Hashable], seed: int) -> dict[str, str]:
    """A tenth of each group validates, the rest trains; its own stream, so that it does not depend on the test draw."""
    parts: dict[str, str] = {}
    for units in shuffled_strata(groups, np.random.default_rng(seed * 1000 + 17)):
        val = _tenth(len(units))
        parts |= dict.fromkeys(units[:val], "val") | dict.fromkeys(units[val:], "train")
    return parts


def _unit(table: Table) -> str:
    return "slide" if table.patients in ("slide", "unknown") else "patient"


def _by_case(parts: Mapping[str, str], source: str) -> Split:
    absent = [part for part in PARTS if part not in parts.values()]
    what = f"no patient in {', '.join(absent)}: the cohort is too small for this split"
    notes = (Note("warning", "split", what, cure="Use more patients."),) if absent else ()
    return Split("case_id", parts, source, notes)


def _sites(table: Table) -> dict[str, str]:
    """Each patient's one site."""
    if "site" not in table.frame or table.frame["site"].isna().any():
        cure = "Name its column with `site` in the config, fill its gaps."
        raise UserError("folds by site need the site of every slide", cure=cure, kind="split")
    spread = table.frame.groupby("case")["site"].nunique()
    if (spread > 1).any():
        who = ", ".join(map(str, spread.index[spread > 1][:10]))
        what = f"{counted(int((spread > 1).sum()), 'patient')} with slides of several sites ({who})"
        raise UserError(what, cure="Give each patient one site.", kind="split")
    return dict(table.cases["site"])


def check_fold(fold: int, number: int, available: int = 1) -> None:
    """Refuse a fold that a cohort of so many has not; ``available``: how many its split has."""
    if not 0 <= fold < number:
        more = available > number
        what = f"this cohort has {counted(number, 'fold')}, counted from 0" + (
            f"; its split has {available}" if more else ""
        )
        cure = f"Set `folds: {available}`, then choose with --fold." if more else "Set `folds` for more."
        raise UserError(what, where=f"fold {fold}", cure=cure, kind="split")


def _check_folds(folds: int, available: int, what: str) -> None:
    if not 2 <= folds <= available:
        wrong, cure = f"{folds} folds of {available} {what}", f"`folds` must be at least 2 and at most {available}."
        raise UserError(wrong, cure=cure, kind="split")


# Parts that share several classes fairly although a unit (patient, site) brings a vector of them: the rule of BRACS ----


def balanced_parts(vectors: Mapping[str, Vector], parts: int) -> list[list[str]]:
    """Units, those with rare and many classes first, each to the part where the whole stays nearest to even.

    The published rule also draws permutations that decide nothing; they are left out. The order of summation does
    decide: many choices are equal but for rounding, so the score is numpy's sum over all parts at once, as published.
    """
    vectors = {unit: np.asarray(vector, float) for unit, vector in vectors.items()}
    total = np.sum(list(vectors.values()), axis=0)
    even, even_size = total / parts, total.sum() / parts
    rarity = np.maximum(total, 1)

    def first(unit: str) -> tuple[float, int, float, str]:
        vector = vectors[unit]
        return -float(np.sum(vector / rarity)), -int((vector > 0).sum()), -vector.sum(), unit

    held = np.zeros((parts, len(total)))  # (P, classes)
    chosen: list[list[str]] = [[] for _ in range(parts)]
    for unit in sorted(vectors, key=first):
        keys = []
        for part in range(parts):
            after = held.copy()
            after[part] += vectors[unit]
            sizes = after.sum(axis=1)
            by_size = 0.05 * np.sum((sizes - even_size) ** 2 / (even_size + 1))
            keys.append((float(np.sum((after - even) ** 2 / (even + 1)) + by_size), float(sizes[part]), part))
        best = min(keys)[2]
        held[best] += vectors[unit]
        chosen[best].append(unit)
    return chosen


def validation_part(parts: Sequence[Sequence[str]], vectors: Mapping[str, Vector]) -> list[str]:
    """The part most like a tenth of the pool; one that lacks a class only if all do."""

    def key(part: list[str]) -> tuple[float, int, float, list[str]]:
        held, pool = _sum(part, vectors), _sum(list(vectors), vectors)
        missing = int((held == 0).sum())
        return 1000 * missing + _distance(held, pool), missing, abs(held.sum() - round(0.1 * pool.sum())), part

    return min((sorted(part) for part in parts), key=key)


def nearest_part(parts: Sequence[Sequence[str]], vectors: Mapping[str, Vector]) -> list[str]:
    """The part most like a tenth of the pool, whatever it lacks: of few sites the fullest may be half the data."""
    pool = _sum(list(vectors), vectors)
    filled = [sorted(part) for part in parts if part]
    return min(filled, key=lambda part: (_distance(_sum(part, vectors), pool), part))


def _sum(units: Sequence[str], vectors: Mapping[str, Vector]) -> Vector:
    width = len(next(iter(vectors.values())))
    return np.sum([np.asarray(vectors[unit], float) for unit in units], axis=0) if units else np.zeros(width)


def _distance(held: Vector, pool: Vector) -> float:
    wanted, size = 0.1 * pool, 0.1 * pool.sum()
    return float(np.sum(np.abs(held - wanted) / (wanted + 1)) + 0.25 * abs(held.sum() - size) / (size + 1))
