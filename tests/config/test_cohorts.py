"""The paper's cohorts: numbers of its tables, and the public files where they are at hand."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from gated_srp.cli.cohorts import splits
from gated_srp.config.presets import COHORTS, Cohort, Gate, find_cohort
from gated_srp.data.splits import write_split
from gated_srp.errors import UserError

SHARED = Path(__file__).resolve().parents[3] / "shared"
PUBLIC = [name for name in COHORTS if name != "KGH"]


@pytest.fixture
def shared() -> Path:
    if not (SHARED / "labels").is_dir():
        pytest.skip(f"the public label files are not in {SHARED.name}/labels beside the checkout")
    return SHARED


def test_gates_are_those_of_the_papers_four_tables() -> None:
    uni = {
        name: (cohort.gates["uni_v2"].delta, cohort.gates["uni_v2"].hidden_dim)
        for name, cohort in COHORTS.items()
        if name != "ADP"
    }
    assert uni == {
        **{"CAMELYON16": (1.0, 16), "CAMELYON17": (2.0, 64), "KGH": (1.0, 64), "PANDA": (0.5, 16), "BRACS": (0.5, 128)},
        **{"TCGA-KIRC": (1.5, 128), "TCGA-KIRP": (2.0, 32), "TCGA-LUAD": (1.0, 128)},
        **{"TCGA-STAD": (0.5, 128), "TCGA-UCEC": (1.5, 32)},
    }
    others = {
        name: [
            (cohort.gate(encoder).delta, cohort.gate(encoder).hidden_dim) for encoder in ("vit_b16", "medsiglip_448")
        ]
        for name, cohort in COHORTS.items()
        if not cohort.gate("vit_b16").note and name != "ADP"
    }
    assert others == {
        "KGH": [(1.0, 64), (1.0, 64)],
        "PANDA": [(0.5, 16), (0.5, 16)],
        "BRACS": [(2.0, 128), (0.5, 32)],
        "TCGA-KIRP": [(0.5, 64), (2.0, 32)],
        "TCGA-LUAD": [(2.0, 32), (1.0, 128)],
        "TCGA-STAD": [(0.5, 128), (0.5, 128)],
    }
    assert COHORTS["PANDA"].gate(trunk="vit4") == Gate(2.0, 32)
    assert COHORTS["ADP"].gate() == Gate(0.5, 128)


def test_a_gate_that_the_paper_does_not_have_is_uni_v2s_with_a_note() -> None:
    gate = COHORTS["TCGA-KIRC"].gate("medsiglip_448")
    assert (gate.delta, gate.hidden_dim) == (1.5, 128)
    assert "no gate for TCGA-KIRC with medsiglip_448" in gate.note
    dense = COHORTS["BRACS"].gate(trunk="vit4")
    assert (dense.delta, dense.hidden_dim, bool(dense.note)) == (0.5, 128, True)


def test_training_settings_are_those_of_the_appendix() -> None:
    def settings(cohort: Cohort) -> tuple[object, ...]:
        r = cohort.recipe
        return r.epochs, r.lr, r.weight_decay, r.accumulation, r.batch_size, cohort.cap, cohort.metric, cohort.score

    assert settings(COHORTS["CAMELYON16"]) == (15, 2e-4, 0.05, 16, 1, 16_384, "macro_f1", "slide")
    assert settings(COHORTS["CAMELYON17"]) == (15, 2e-4, 0.05, 16, 1, 49_152, "macro_f1", "slide")
    assert (
        settings(COHORTS["KGH"]) == settings(COHORTS["BRACS"]) == (15, 2e-4, 0.05, 16, 1, 32_768, "macro_f1", "slide")
    )
    assert settings(COHORTS["PANDA"]) == (20, 2e-4, 0.05, 16, 1, None, "quadratic_kappa", "slide")
    for name in ("KIRC", "KIRP", "LUAD", "STAD", "UCEC"):
        assert settings(find_cohort(name)) == (20, 1e-4, 1e-5, 1, 1, 49_152, "c_index", "case")
    assert settings(COHORTS["ADP"]) == (20, 5e-4, 0.05, 1, 256, None, "macro_map", "slide")
    assert [name for name, cohort in COHORTS.items() if cohort.recipe.drop_last] == ["ADP"]  # 55 steps of 256 per epoch
    assert {cohort.seeds for cohort in COHORTS.values()} == {(42, 43, 44, 45, 46)}


def test_a_wrong_name_gets_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"no cohort 'camelyon18' in the paper. Did you mean CAMELYON1[67]"):
        find_cohort("camelyon18")


# Small files in the public layouts, always


def test_camelyon17_takes_slides_and_leaves_patients_rows(tmp_path: Path) -> None:
    text = (
        "patient,stage,center\npatient_000.zip,pN0,0\npatient_000_node_0.tif,negative,0\npatient_000_node_1.tif,itc,0\n"
    )
    (tmp_path / "stages.csv").write_text(text + "patient_001_node_0.tif,micro,1\npatient_002_node_0.tif,macro,1\n")
    table = COHORTS["CAMELYON17"].read_labels(tmp_path)
    assert table.frame.to_numpy().tolist() == [
        ["patient_000_node_0", "patient_000", 0, "0"],
        ["patient_000_node_1", "patient_000", 1, "0"],
        ["patient_001_node_0", "patient_001", 2, "1"],
        ["patient_002_node_0", "patient_002", 3, "1"],
    ]
    assert table.notes[-1].line.startswith("warning: stages.csv is not the released file")


def test_tcga_takes_overall_survival_of_its_cohort_and_drops_non_positive_times(tmp_path: Path) -> None:
    head = "cohort,endpoint,case_barcode,filename,event,time_days\n"
    rows = [
        "TCGA_KIRP,OS,TCGA-AA-0001,TCGA-AA-0001-01Z.U1.svs,1,30",
        "TCGA_KIRP,OS,TCGA-AA-0002,TCGA-AA-0002-01Z.U2.svs,0,0.0",
        "TCGA_KIRP,PFI,TCGA-AA-0001,TCGA-AA-0001-01Z.U1.svs,0,9",
        "TCGA_LUAD,OS,TCGA-BB-0003,TCGA-BB-0003-01Z.U3.svs,0,4",
    ]
    (tmp_path / "tcga_survival").mkdir()
    (tmp_path / "tcga_survival" / "all_matched_survival_labels_long.csv").write_text(head + "\n".join(rows))
    table = find_cohort("KIRP").read_labels(tmp_path)
    assert table.frame.to_numpy().tolist() == [["TCGA-AA-0001-01Z.U1", "TCGA-AA-0001", 30.0, 1, "AA"]]
    assert table.dropped == ("row 3 (TCGA-AA-0002-01Z.U2): its time is not positive",)


def test_kgh_is_split_by_rule_from_a_table_of_ones_own(tmp_path: Path) -> None:
    kgh = COHORTS["KGH"]
    rows = [f"s{i:03},{kgh.classes[i % 4]}\n" for i in range(100)] + ["n1,NORMAL\n"]
    (tmp_path / "mine.csv").write_text("slide_id,label\n" + "".join(rows))
    split = kgh.read_split(tmp_path / "mine.csv", 42)
    assert split.counts == {"train": 72, "val": 8, "test": 20}  # of each 25: 5 test, 2 of 20 val
    rng, wanted = np.random.default_rng(42), set()
    for k in range(4):
        members = [f"s{i:03}" for i in range(100) if i % 4 == k]
        rng.shuffle(members)
        wanted |= set(members[:5])
    assert {slide for slide, part in split.parts.items() if part == "test"} == wanted


def test_panda_groups_by_provider_and_grade_in_the_tables_own_order(tmp_path: Path) -> None:
    rows = [(f"{i * 37 % 101:03}", "radboud" if i % 3 else "karolinska", i % 6) for i in range(100)]
    body = "".join(f"{name},{provider},{grade},x\n" for name, provider, grade in rows)
    (tmp_path / "train.csv").write_text("image_id,data_provider,isup_grade,gleason_score\n" + body)
    rng, wanted = np.random.default_rng(45), set()
    for key in sorted({(provider, grade) for _, provider, grade in rows}):
        members = [name for name, provider, grade in rows if (provider, grade) == key]
        rng.shuffle(members)
        wanted |= set(members[: min(max(1, round(0.2 * len(members))), len(members) - 2)])
    split = COHORTS["PANDA"].read_split(tmp_path, 45)
    assert {slide for slide, part in split.parts.items() if part == "test"} == wanted


@pytest.mark.parametrize("name", PUBLIC)
def test_a_missing_or_foreign_label_file_is_a_users_error_that_says_where_to_get_it(tmp_path: Path, name: str) -> None:
    cohort = COHORTS[name]
    with pytest.raises(UserError, match="Where to get it"):
        cohort.read_labels(tmp_path)
    path = tmp_path / cohort.labels.name
    if path.suffix == ".xlsx":
        pd.DataFrame({"x": [1]}).to_excel(path, index=False)
    else:
        path.write_text("x,y\n1,2\n")
    with pytest.raises(UserError, match=cohort.labels.name):
        cohort.read_labels(tmp_path)


# The public files themselves


@pytest.mark.parametrize("name", PUBLIC)
def test_inventories_equal_the_papers(shared: Path, name: str) -> None:
    cohort = COHORTS[name]
    table = cohort.read_labels(shared / "labels")
    extra = 1 if name in {"CAMELYON17", "PANDA", "BRACS"} else 0  # the slide that the paper lacked; the preset says so
    assert len(table.frame) == cohort.inventory.slides + extra
    assert bool(extra) == ("the paper used" in cohort.note)
    assert not any("not the released file" in note.what for note in table.notes)
    if cohort.inventory.cases is not None:
        assert table.frame["case"].nunique() == cohort.inventory.cases
    if cohort.task == "survival":
        assert table.cases["event"].sum() == cohort.inventory.events
    if cohort.inventory.by_class:
        counts = table.frame["label"].value_counts().sort_index().tolist()
        surplus = np.subtract(counts, cohort.inventory.by_class)
        assert (surplus.min(), surplus.sum()) == (0, extra)
    if name == "ADP":
        assert len(table.classes) == 38
        assert (table.frame[list(table.classes)].sum() > 0).all()


def test_every_split_that_is_shown_is_equal_to_the_last_byte(shared: Path, tmp_path: Path) -> None:
    files = sorted((shared / "splits").glob("*_seed*.csv"))
    assert files
    for path in files:
        name, seed = path.stem.rsplit("_seed", 1)
        write_split(find_cohort(name).read_split(shared / "labels", int(seed)), tmp_path / "split.csv")
        assert (tmp_path / "split.csv").read_bytes() == path.read_bytes(), path.name


def test_the_command_writes_the_split_and_prints_counts(tmp_path: Path) -> None:
    rows = "".join(
        f"{kind}_{i:03},{kind},{label}\n" for label, kind in enumerate(("normal", "tumor")) for i in range(20)
    )
    (tmp_path / "slides.csv").write_text("slide_id,class_name,label\n" + rows)
    app = typer.Typer()
    app.command()(splits)
    result = CliRunner().invoke(
        app, ["camelyon16", "--labels", str(tmp_path), "--seed", "43", "-o", str(tmp_path / "out.csv")]
    )
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert lines[0] == "slide_id,split"
    assert len(lines) == 41
    assert "train      28 by slide_id      28 slides" in result.output  # of each 20: 4 test, 2 of 16 val
    assert " test       8 by slide_id       8 slides" in result.output
