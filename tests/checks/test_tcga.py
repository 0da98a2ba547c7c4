"""TCGA: barcodes say the patient, the site and the kind of section; `check` says what does not belong, and splits keep patients and sites whole."""

import pytest
from factories import make_slide, write_trident
from training.toy_cohorts import write_yaml

from gated_srp.checks.check import check
from gated_srp.config import load_config
from gated_srp.config.cohort import open_cohort

SITES = ("3Z", "A3", "B0", "CJ", "DV")


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    """Twenty patients of five sites with a diagnostic slide each; the first also has two frozen sections, one of them normal."""
    folder, rows = tmp_path_factory.mktemp("tcga"), ["slide_id,label"]
    names = [f"TCGA-{SITES[i % 5]}-A{i:03d}-01Z-00-DX1.{i:04X}" for i in range(20)]
    names += ["TCGA-3Z-A000-01A-01-TS1.AA", "TCGA-3Z-A000-11A-02-BS2.BB"]
    for i, name in enumerate(names):
        write_trident(folder / "feats", name, make_slide(i, width=8))
        rows.append(f"{name}.svs,{'ab'[i // 5 % 2] if i < 20 else 'a'}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    return write_yaml(folder, target="label")


def test_frozen_and_normal_slides_are_named(cohort):
    notes = {note.kind: note for note in check(cohort, seeds=[42]).notes}
    frozen, normal = notes["not_diagnostic"], notes["normal_tissue"]
    assert frozen.level == normal.level == "warning"
    assert "2 of 22 TCGA slides (BS 1, TS 1; DX is diagnostic)" in frozen.what
    assert [name[:23] for name in frozen.where] == ["TCGA-3Z-A000-01A-01-TS1", "TCGA-3Z-A000-11A-02-BS2"]
    assert [name[:23] for name in normal.where] == ["TCGA-3Z-A000-11A-02-BS2"]
    assert "5 tissue source sites" in notes["site"].what and "by: site" in notes["site"].cure


def test_site_and_patient_come_from_the_barcode_and_stay_whole(cohort):
    data = open_cohort(load_config(cohort, {"folds": {"number": 5, "by": "site"}}))
    assert set(data.table.frame["site"]) == set(SITES) and data.table.patients == "barcode"
    tested = []
    for fold in range(5):
        rows = data.slides(42, fold)
        assert (rows.groupby("site")["part"].nunique() == 1).all() and (
            rows.groupby("case")["part"].nunique() == 1
        ).all()
        tested += sorted(set(rows[rows["part"] == "test"]["site"]))
    assert sorted(tested) == sorted(SITES)
    assert not [note for note in check(data.config, seeds=[42]).notes if note.kind == "site"]


def test_three_slides_of_one_patient_are_in_one_part_of_every_seed(cohort):
    data = open_cohort(load_config(cohort))
    for seed in range(42, 52):
        rows = data.slides(seed)
        assert rows[rows["case"] == "TCGA-3Z-A000"]["part"].nunique() == 1
        assert len(rows[rows["case"] == "TCGA-3Z-A000"]) == 3
