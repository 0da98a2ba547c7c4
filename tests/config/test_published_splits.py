"""Inventories and published splits, checked against what is committed: where a table cannot be, by its split's SHA-256.

CAMELYON16's slides and CAMELYON17's patients have numbers for names and need no table, so their splits are drawn on any machine.
"""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import yaml

from gated_srp.config.presets import COHORTS, SEEDS
from gated_srp.data.splits import hold_out, write_split

ROOT = Path(__file__).resolve().parents[2]
LABELS = ROOT.parent / "shared" / "labels"
SPLITS = yaml.safe_load((ROOT / "tests" / "golden" / "splits.yaml").read_text(encoding="utf-8"))

# As the paper's appendix counts: slides, patients or cases, events, slides by class.
PAPER = {
    "CAMELYON16": (270, None, None, (159, 111)),
    "CAMELYON17": (499, 100, None, (318, 36, 59, 86)),
    "KGH": (837, None, None, (212, 201, 207, 217)),
    "PANDA": (10_615, None, None, (2891, 2666, 1343, 1242, 1249, 1224)),
    "BRACS": (546, None, None, (44, 147, 73, 41, 48, 61, 132)),
    "ADP": (17_668, None, None, ()),
    "TCGA-KIRC": (517, 511, 171, ()),
    "TCGA-KIRP": (296, 272, 42, ()),
    "TCGA-LUAD": (528, 465, 163, ()),
    "TCGA-STAD": (409, 383, 156, ()),
    "TCGA-UCEC": (275, 249, 34, ()),
}


def csv_of(unit: str, parts: dict[str, str]) -> bytes:
    """The file of a split, without the package."""
    return "".join([f"{unit},split\n", *(f"{name},{parts[name]}\n" for name in sorted(parts))]).encode()


def naive_hold_out(strata: dict[str, list[str]], seed: int) -> dict[str, str]:
    """Groups by name, units sorted and shuffled in place: a fifth tests, a tenth of the rest validates."""
    rng, parts = np.random.default_rng(seed), {}
    for group in sorted(strata):
        units = sorted(strata[group])
        rng.shuffle(units)
        n = len(units)
        test = min(max(1, round(0.2 * n)), n - 2)
        val = min(max(1, round(0.1 * (n - test))), n - test - 1)
        for number, unit in enumerate(units):
            parts[unit] = "test" if number < test else "val" if number < test + val else "train"
    return parts


CAMELYON16 = {
    "0": [f"normal_{number:03}" for number in range(1, 161) if number != 86],  # 86 is not in the release
    "1": [f"tumor_{number:03}" for number in range(1, 112)],
}
CAMELYON17 = {str(centre): [f"patient_{20 * centre + number:03}" for number in range(20)] for centre in range(5)}
DRAWN = {"CAMELYON16": ("slide_id", CAMELYON16), "CAMELYON17": ("patient_id", CAMELYON17)}


@pytest.mark.parametrize("name", PAPER)
def test_inventories_are_the_papers(name):
    slides, cases, events, by_class = PAPER[name]
    found = COHORTS[name].inventory
    assert found.slides == slides and found.by_class == by_class
    assert by_class == () or sum(by_class) == slides
    assert (cases, events) == (None, None) or (found.cases == cases and (events is None or found.events == events))


def test_every_public_cohort_has_its_five_splits_committed():
    assert set(SPLITS) == {name for name, cohort in COHORTS.items() if cohort.rule is not None} - {"KGH"}
    for name, seeds in SPLITS.items():
        assert [seed for seed in seeds if seed != "shown"] == list(SEEDS)
        sizes = {sum(seeds[seed][part] for part in ("train", "val", "test")) for seed in SEEDS}
        assert len(sizes) == 1, name
    assert {
        name: SPLITS[name][42]["train"] + SPLITS[name][42]["val"] + SPLITS[name][42]["test"] for name in SPLITS
    } == {
        "CAMELYON16": 270,
        "CAMELYON17": 100,
        "PANDA": 10_616,  # whole tables: the slide that the paper lacked is split, too
        "BRACS": 189,
        **{f"TCGA-{name}": PAPER[f"TCGA-{name}"][1] for name in ("KIRC", "KIRP", "LUAD", "STAD", "UCEC")},
    }
    kirc = SPLITS["TCGA-KIRC"][42]
    assert (kirc["train"], kirc["val"], kirc["test"]) == (351, 55, 105)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", DRAWN)
def test_camelyons_splits_are_drawn_without_a_table(tmp_path, name, seed):
    unit, strata = DRAWN[name]
    wanted = SPLITS[name][seed]["sha256"]
    assert hashlib.sha256(csv_of(unit, naive_hold_out(strata, seed))).hexdigest() == wanted
    groups = {member: group for group, members in strata.items() for member in members}
    assert hashlib.sha256(csv_of(unit, hold_out(groups, seed))).hexdigest() == wanted


@pytest.mark.shared
@pytest.mark.parametrize("name", SPLITS)
def test_the_splits_of_the_public_tables_have_the_committed_hashes(tmp_path, name):
    if not LABELS.is_dir():
        pytest.skip(
            "the public label files are not beside the checkout; the rules are tested in tests/data/test_splits.py"
        )
    cohort = COHORTS[name]
    table = cohort.read_labels(LABELS)
    for seed in SEEDS:
        split = cohort.read_split(LABELS, seed, table=table)
        write_split(split, tmp_path / "split.csv")
        found = {"sha256": hashlib.sha256((tmp_path / "split.csv").read_bytes()).hexdigest(), **split.counts}
        assert found == SPLITS[name][seed], seed
