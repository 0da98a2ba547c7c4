"""Splits, tables and configurations in the layouts of other tools, written here by plain code that shares nothing with the readers."""

import json
from pathlib import Path

import neighbours
import pandas as pd
import pytest
import yaml
from training.toy_cohorts import SMALL
from typer.testing import CliRunner

import gated_srp
from gated_srp.cli import app
from gated_srp.config import load_config
from gated_srp.config.cohort import open_cohort
from gated_srp.data.exported_splits import export_splits
from gated_srp.data.imported_splits import count_folds, import_split
from gated_srp.data.splits import Split, assign_parts, hold_out, k_folds
from gated_srp.data.table import Table
from gated_srp.errors import UserError


def patients(number: int = 20) -> Table:
    """Every third patient has two slides."""
    rows = [(f"S{i:02d}{part}", f"P{i:02d}", i % 2) for i in range(number) for part in "ab"[: 1 + (i % 3 == 0)]]
    return Table(pd.DataFrame(rows, columns=["slide", "case", "label"]), "classification", ("benign", "tumour"))


def write(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def part_of(table: Table, split: Split) -> dict[str, str]:
    return dict(zip(table.frame["slide"], assign_parts(split, table), strict=True))


# Reading -------------------------------------------------------------------------------------------------------------


def test_a_clam_folder_with_bool_files_alone_is_read_fold_by_fold(tmp_path):
    table = patients(6)
    expected = [{}, {}]
    for fold in range(2):
        lines = [",train,val,test"]
        for slide, case in zip(table.frame["slide"], table.frame["case"], strict=True):
            place = (int(case[1:]) + fold) % 3
            lines.append(f"{slide},{place == 0},{place == 1},{place == 2}")
            expected[fold][slide] = ("train", "val", "test")[place]
        write(tmp_path / f"splits_{fold}_bool.csv", lines)
        write(tmp_path / f"splits_{fold}_descriptor.csv", [",train,val,test", "benign,1,1,1"])
    assert count_folds(tmp_path) == 2
    assert [part_of(table, import_split(tmp_path, table, fold=fold)) for fold in range(2)] == expected


def write_patho_bench(folder: Path, table: Table, folds: int, *, task: str = "TP53_mutation", **more) -> list[dict]:
    """<dataset>/<task>/k=all.tsv and config.yaml; train and test only, as its released splits are."""
    header = ["case_id", "slide_id", task, *more, *(f"fold_{k}" for k in range(folds))]
    lines, expected = ["\t".join(header)], [{} for _ in range(folds)]
    for i, row in enumerate(table.frame.itertuples()):
        parts = ["test" if int(row.case[1:]) % folds == fold else "train" for fold in range(folds)]
        lines.append(
            "\t".join([row.case, row.slide, str(row.label), *(str(cells[i]) for cells in more.values()), *parts])
        )
        for fold, part in enumerate(parts):
            expected[fold][row.slide] = part
    write(folder / "k=all.tsv", lines)
    about = {"datasets": ["cptac_x"], "task_col": task, "extra_cols": list(more), "metrics": ["macro-ovr-auc"]}
    about |= {"task_type": "survival" if more else "classification", "label_dict": {0: "wildtype", 1: "mutant"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(about | {"sample_col": "case_id", "num_samples": 20}))
    return expected


def test_a_patho_bench_task_folder_is_a_split_with_its_folds(tmp_path):
    table = patients()
    expected = write_patho_bench(tmp_path / "cptac_x" / "TP53_mutation", table, 4)
    assert count_folds(tmp_path / "cptac_x" / "TP53_mutation") == 4
    for fold in range(4):
        split = import_split(tmp_path / "cptac_x" / "TP53_mutation", table, fold=fold)
        found = part_of(table, split)
        assert {slide for slide, part in found.items() if part == "test"} == {
            slide for slide, part in expected[fold].items() if part == "test"
        }
        assert "val" in found.values() and "no validation part" in split.notes[-1].what


def test_a_folder_of_stamps_crossval_is_a_split(tmp_path):
    table = patients()
    folds = [{"train_patients": [], "test_patients": []} for _ in range(5)]
    for i in range(20):
        for k, fold in enumerate(folds):
            fold["test_patients" if i % 5 == k else "train_patients"].append(f"P{i:02d}")
    (tmp_path / "splits.json").write_text(json.dumps({"splits": folds}, indent=4))
    for k in range(5):
        write(tmp_path / f"split-{k}" / "patient-preds.csv", ["PATIENT,isMSIH,pred"])
    assert count_folds(tmp_path) == 5
    found = part_of(table, import_split(tmp_path, table, fold=3))
    assert {slide[1:3] for slide, part in found.items() if part == "test"} == {"03", "08", "13", "18"}


# Both ways -----------------------------------------------------------------------------------------------------------


def by_slide(table: Table) -> Split:
    """As some published splits are: of slides, one of them in no part."""
    parts = hold_out({case: str(int(case[1:]) % 2) for case in dict.fromkeys(table.frame["case"])}, 43)
    slides = dict(zip(table.frame["slide"], table.frame["case"].map(parts), strict=True))
    del slides["S01a"]
    return Split("image_id", slides, "published, seed 43")


@pytest.mark.parametrize("layout", ["clam", "stamp", "patho-bench"])
def test_splits_are_read_back_equal_from_every_layout(layout, tmp_path):
    table = patients()
    for name, splits in (("folds", k_folds(table, 3, 42)), ("published", (by_slide(table),))):
        export_splits(splits, table, tmp_path / name, layout)
        assert count_folds(tmp_path / name) == len(splits)
        for fold, split in enumerate(splits):
            back = part_of(table, import_split(tmp_path / name, table, fold=fold, seed=7))  # nothing is drawn
            pd.testing.assert_series_equal(pd.Series(back), pd.Series(part_of(table, split)))


def test_what_is_written_is_what_the_tools_read(tmp_path):
    """Their own reading, in a few lines of pandas and json."""
    table, (split, *_) = patients(), k_folds(patients(), 3, 42)
    expected = part_of(table, split)
    for layout in ("clam", "stamp", "patho-bench"):
        export_splits(k_folds(table, 3, 42), table, tmp_path / layout, layout)
    clam = pd.read_csv(tmp_path / "clam" / "splits_0.csv", index_col=0)
    assert {slide: part for part in ("train", "val", "test") for slide in clam[part].dropna()} == expected
    flags = pd.read_csv(tmp_path / "clam" / "splits_0_bool.csv", index_col=0)
    assert flags.idxmax(axis=1).to_dict() == expected and (flags.sum(axis=1) == 1).all()
    (stamp, *_), case = (
        json.loads((tmp_path / "stamp" / "splits.json").read_text())["splits"],
        dict(zip(table.frame["slide"], table.frame["case"], strict=True)),
    )
    assert set(stamp["test_patients"]) == {case[s] for s, part in expected.items() if part == "test"}
    assert set(stamp["train_patients"]) == {case[s] for s, part in expected.items() if part != "test"}
    tsv = pd.read_csv(tmp_path / "patho-bench" / "k=all.tsv", sep="\t")
    assert dict(zip(tsv["slide_id"], tsv["fold_0"], strict=True)) == expected
    about = yaml.safe_load((tmp_path / "patho-bench" / "config.yaml").read_text())
    assert about["label_dict"] == {0: "benign", 1: "tumour"} and about["sample_col"] == "case_id"
    assert list(tsv[about["task_col"]]) == list(table.frame["label"])


def test_slides_are_exported_under_the_names_of_their_files(tmp_path):
    """STAMP's table has uni2/block_00.h5; CLAM looks for block_00.pt."""
    table = patients()
    other = Table(
        table.frame.assign(slide=[f"uni2/{slide}.h5" for slide in table.frame["slide"]]), table.task, table.classes
    )
    for layout, file in (("clam", "splits_0.csv"), ("patho-bench", "k=all.tsv")):
        export_splits(k_folds(table, 2, 42)[:1], table, tmp_path / "a", layout)
        export_splits(k_folds(other, 2, 42)[:1], other, tmp_path / "b", layout)
        assert (tmp_path / "a" / file).read_text() == (tmp_path / "b" / file).read_text()


def test_a_patient_in_two_parts_is_not_exported(tmp_path):
    torn = Split("slide_id", {"S00a": "train", "S00b": "test", "S01a": "val"}, "by hand")
    with pytest.raises(UserError, match="in more than one part"):
        export_splits([torn], patients(), tmp_path, "clam")
    assert list(tmp_path.iterdir()) == []


# Configurations ------------------------------------------------------------------------------------------------------


def write_stamp_config(root: Path, cohort: neighbours.Cohort, **own) -> Path:
    """As `stamp init` writes it: all sections, made-up paths in those that are not used."""
    made_up = {
        "output_dir": "/path/to/save/files/to",
        "clini_table": "/path/of/clini.csv",
        "slide_table": "/path/of/slide.csv",
    }
    made_up |= {"feature_dir": "/path/your/extracted/features/are/stored/in", "ground_truth_label": "KRAS"}
    real = {"output_dir": str(root / "stamp_out"), "clini_table": str(cohort.table), "slide_table": str(cohort.slides)}
    real |= {"feature_dir": str(cohort.features), "patient_label": "PATIENT", "filename_label": "FILENAME"} | own
    content = {"preprocessing": {"extractor": "uni2"}, "training": made_up, "crossval": real, "deployment": made_up}
    content |= {
        "statistics": {"pred_csvs": []},
        "advanced_config": {"task": "classification", "max_epochs": 32, "patience": 16},
    }
    (root / "config.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return root / "config.yaml"


def test_init_from_stamps_config_opens_the_cohort_with_its_folds(tmp_path):
    cohort = neighbours.stamp(tmp_path)
    source = write_stamp_config(
        tmp_path, cohort, ground_truth_label="isMSIH", categories=["nonMSIH", "MSIH"], n_splits=3
    )
    shown = CliRunner().invoke(app, ["init", "--from", str(source), "-o", str(tmp_path / "cohort.yaml")])
    assert shown.exit_code == 0, shown.output
    config = load_config(tmp_path / "cohort.yaml", {"model": SMALL})
    assert (config.target, config.classes, config.case, config.score) == (
        "isMSIH",
        ("nonMSIH", "MSIH"),
        "PATIENT",
        "case",
    )
    assert config.folds and config.folds.number == 3 and config.split is None
    data = open_cohort(config)
    assert sorted(data.matches.found) and len(data.matches.found) == len(cohort.corners)
    assert "max_epochs 32, patience 16" in shown.output and "section `crossval`" in shown.output


def test_init_from_stamp_takes_the_folds_that_it_drew(tmp_path):
    cohort = neighbours.stamp(tmp_path)
    ids = [f"P{i}" for i in range(len(cohort.corners))]
    folds = [
        {"train_patients": ids[2:], "test_patients": ids[:2]},
        {"train_patients": ids[:-2], "test_patients": ids[-2:]},
    ]
    (tmp_path / "stamp_out").mkdir()
    (tmp_path / "stamp_out" / "splits.json").write_text(json.dumps({"splits": folds}))
    gated_srp.init(
        source=write_stamp_config(tmp_path, cohort, ground_truth_label="isMSIH"), out=tmp_path / "cohort.yaml"
    )
    data = open_cohort(load_config(tmp_path / "cohort.yaml"))
    assert data.config.folds.number == 2
    for fold, tested in enumerate((ids[:2], ids[-2:])):
        rows = data.slides(42, fold)
        assert set(rows[rows["part"] == "test"]["case"]) == set(tested)


def test_init_from_stamp_reads_survival_columns(tmp_path):
    cohort = neighbours.stamp(tmp_path)
    rows = [f"P{i},{100 + i},{('alive', 'dead')[i % 2]}" for i in range(len(cohort.corners))]
    write(cohort.table, ["PATIENT,followup,vital", *rows])
    source = write_stamp_config(tmp_path, cohort, time_label="followup", status_label="vital")
    gated_srp.init(source=source, out=tmp_path / "cohort.yaml")
    data = open_cohort(load_config(tmp_path / "cohort.yaml"))
    assert data.config.task == "survival"
    assert data.table.cases.loc["P3", ["time", "event"]].tolist() == [103.0, 1]


def test_init_from_a_patho_bench_task_takes_label_folds_and_level(tmp_path):
    cohort = neighbours.stamp(tmp_path)  # any features
    frame = pd.DataFrame({"slide": list(cohort.corners)}).assign(case=[f"P{i}" for i in range(len(cohort.corners))])
    table = Table(frame.assign(label=[i % 2 for i in range(len(frame))]), "classification", ("0", "1"))
    write_patho_bench(tmp_path / "cptac_x" / "TP53_mutation", table, 3)
    gated_srp.init(cohort.features, source=tmp_path / "cptac_x" / "TP53_mutation", out=tmp_path / "cohort.yaml")
    config = load_config(tmp_path / "cohort.yaml")
    assert (config.name, config.target, config.score, config.folds.number) == (
        "cptac_x_TP53_mutation",
        "TP53_mutation",
        "case",
        3,
    )
    tested = [open_cohort(config).slides(42, fold).query("part == 'test'")["case"] for fold in range(3)]
    assert sorted(pd.concat(tested)) == sorted(frame["case"])
    days = {"OS_event": [i % 2 for i in range(len(frame))], "OS_days": range(100, 100 + len(frame))}
    write_patho_bench(tmp_path / "tcga_x" / "OS", table, 3, task="OS", **days)
    gated_srp.init(cohort.features, source=tmp_path / "tcga_x" / "OS" / "config.yaml", out=tmp_path / "os.yaml")
    assert open_cohort(load_config(tmp_path / "os.yaml")).table.cases.loc["P3", ["time", "event"]].tolist() == [
        103.0,
        1,
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1", "no configuration that can be read"),
        ("crossval: {output_dir: x}", "no clini_table in crossval"),
        ("crossval: {clini_table: gone.csv, feature_dir: gone}", "gone.csv is not there"),
        ("task_col: x", "no k=all.tsv beside it"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused_with_its_reason(text, said, tmp_path):
    write(tmp_path / "c.yaml", [text])
    with pytest.raises(UserError, match=said):
        gated_srp.init(source=tmp_path / "c.yaml", out=tmp_path / "cohort.yaml")
    assert not (tmp_path / "cohort.yaml").exists()
