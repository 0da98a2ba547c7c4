"""`gated-srp init`: what can be seen is set, doubt is a choice in a comment, and nothing is written over."""

import json

import numpy as np
import pandas as pd
import pytest
import yaml
from factories import make_slide, write_atlaspatch, write_clam_pt, write_h5, write_trident
from typer.testing import CliRunner

import gated_srp
from gated_srp.cli.cohorts import init
from gated_srp.cohort_draft import draft_cohort
from gated_srp.config import load_config, open_cohort
from gated_srp.errors import UserError


@pytest.fixture
def home(tmp_path, monkeypatch):
    for i in range(6):
        write_trident(tmp_path / "job", f"s{i}", make_slide(i))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table(home, name="mine.csv", **columns):
    base = {"slide_id": [f"s{i}.svs" for i in range(6)], "patient": [f"p{i // 2}" for i in range(6)]}
    frame = pd.DataFrame({**base, **columns})
    path = home / name
    frame.to_excel(path, index=False) if name.endswith("xlsx") else frame.to_csv(path, index=False)
    return path


def test_a_folder_and_a_spreadsheet_in_the_usual_form_need_no_choice(home):
    path = table(home, "mine.xlsx", label=["10", "9", "10", "9", "10", "9"])
    draft = gated_srp.init(home / "job", path, out=home / "cohort.yaml")
    assert draft.choices == []
    config = load_config(home / "cohort.yaml")
    assert (config.name, config.task, config.target, config.encoder) == ("mine", "classification", "label", "uni_v2")
    assert (config.slide, config.case) == ("slide_id", "patient")
    assert "# classes:" in draft.text and draft.text.index("'9'") < draft.text.index("'10'")  # as numbers are sorted
    assert len(open_cohort(config).matches.found) == 6
    assert yaml.safe_load(draft.text)["features"] == "job"  # below the YAML's folder: the two can move together


def test_the_first_line_names_the_schema_that_lies_beside_the_yaml(home):
    (home / "deep").mkdir()
    draft = gated_srp.init(home / "job", table(home, label=list("ababab")), out=home / "deep" / "mine.yaml")
    first, named = draft.text.splitlines()[0].split("=")
    assert first == "# yaml-language-server: $schema" and (home / "deep" / named).is_file()
    keys = json.loads((home / "deep" / named).read_text())["properties"]
    assert set(yaml.safe_load(draft.text)) <= set(keys) and keys["target"]["description"]


def test_a_column_that_names_the_files_is_the_slide_whatever_it_is_called(home):
    path = home / "odd.csv"
    rows = {"Scan no": [f"s{i}" for i in range(6)], "comment": ["fine"] * 6, "label": list("ababab")}
    pd.DataFrame(rows).to_csv(path, index=False)
    assert yaml.safe_load(draft_cohort(home / "job", path, home / "cohort.yaml").text)["slide"] == "Scan no"


def test_survival_says_what_one_means(home):
    path = table(home, os_days=[3, 3, 5, 5, 8, 8], censorship=[1, 1, 0, 0, 0, 0])
    draft = draft_cohort(home / "job", path, home / "cohort.yaml")
    settings = yaml.safe_load(draft.text)
    assert (settings["task"], settings["time"], settings["censorship"]) == ("survival", "os_days", "censorship")
    assert "1 = censored; 0 (4), 1 (2)" in draft.text and draft.choices == []


def test_two_tasks_are_a_choice_and_each_choice_works(home):
    path = table(home, label=list("ababab"), time=[3, 3, 5, 5, 8, 8], event=[1, 1, 0, 0, 1, 1], grade=list("112211"))
    draft = gated_srp.init(home / "job", path, out=home / "cohort.yaml")
    assert len(draft.choices) == 1 and not {"target", "time"} & set(yaml.safe_load(draft.text))
    for chosen, task in (
        (("target: label",), "classification"),
        (("target: grade",), "classification"),
        (("time: time", "event: event"), "survival"),
    ):
        text = draft.text
        for line in chosen:
            text = text.replace(f"# {line}", line)
        (home / "cohort.yaml").write_text(text)
        assert load_config(home / "cohort.yaml").task == task


def test_the_only_column_that_can_be_classes_is_not_asked_for(home):
    path = table(home, Diagnosis=list("ababab"), age=[41, 42, 43, 44, 45, 46])
    draft = draft_cohort(home / "job", path, home / "cohort.yaml")
    assert yaml.safe_load(draft.text)["target"] == "Diagnosis" and draft.choices == []
    assert "# the only column that can be classes" in draft.text and "Diagnosis: a (3), b (3)" in [
        note.what for note in draft.notes
    ]
    two = draft_cohort(home / "job", table(home, Diagnosis=list("ababab"), sex=list("fmmffm")), home)
    assert "target" not in yaml.safe_load(two.text) and len(two.choices) == 1


def test_patient_columns_that_disagree_are_a_choice(home):
    path = table(home, case_id=["c0", "c0", "c0", "c1", "c1", "c1"], label=list("ababab"))
    draft = draft_cohort(home / "job", path, home / "cohort.yaml")
    assert "case" not in yaml.safe_load(draft.text) and "# case: case_id      # 2 patients" in draft.text
    assert yaml.safe_load(draft.text)["target"] == "label"  # the other question is answered all the same


def test_two_encoders_are_a_choice_be_it_in_folders_or_in_files(home):
    write_trident(home / "job", "s0", make_slide(0), encoder="gigapath")
    text = draft_cohort(home / "job", table(home, label=list("ababab")), home).text
    assert "# encoder: gigapath      # 1 file\n" in text and "# encoder: uni_v2      # 6 files" in text
    for i in range(3):
        write_atlaspatch(home / "atlas", f"s{i}", make_slide(i), encoders={"uni_v2": 12, "conch_v15": 8})
    text = draft_cohort(home / "atlas", table(home, label=list("ababab")), home).text
    assert [text.count(f"# encoder: {name}") for name in ("conch_v15", "uni_v2")] == [1, 1]  # once, not once per file
    assert "encoder" not in yaml.safe_load(text)


@pytest.mark.parametrize("ending", ["", ".svs"])
def test_a_table_without_a_header_is_refused(home, ending):
    """Its first slide would be lost, and a class would become the name of the target."""
    text = "".join(f"s{i}{ending},p{i // 2},{'ab'[i % 2]}\n" for i in range(6))
    (home / "bare.csv").write_text(text)
    with pytest.raises(
        UserError, match=rf"no header: its first row names the slide 's0{ending}'.*names of the columns"
    ):
        draft_cohort(home / "job", home / "bare.csv", home)


def test_a_table_that_names_no_file_is_said(home):
    path = table(home, slide_id=[f"x{i}" for i in range(6)], patient=[f"y{i}" for i in range(6)], label=list("ababab"))
    assert "none of its values names a feature file" in draft_cohort(home / "job", path, home / "cohort.yaml").text


def test_what_is_there_stays_unless_forced(home):
    path, output = table(home, label=list("ababab")), home / "cohort.yaml"
    output.write_text("mine")
    with pytest.raises(UserError, match="stays as it is"):
        gated_srp.init(home / "job", path, out=output)
    assert output.read_text() == "mine"
    gated_srp.init(home / "job", path, out=output, force=True)
    assert "# Written by `gated-srp init" in output.read_text()
    assert not list(home.glob(".cohort.yaml*"))


def test_an_empty_folder_is_refused(home):
    (home / "empty").mkdir()
    with pytest.raises(UserError, match="no feature file in it"):
        draft_cohort(home / "empty", table(home, label=list("ababab")), home)


def test_a_folder_of_slide_images_is_told_how_to_get_features(home):
    (home / "scans").mkdir()
    for name in ("a.svs", "b.SVS", "notes.txt"):
        (home / "scans" / name).touch()
    with pytest.raises(
        UserError, match=r"2 slide images, but no feature file in it.*gated-srp extract .*scans -o feats/"
    ):
        draft_cohort(home / "scans", table(home, label=list("ababab")), home)


def test_names_that_yaml_could_misread_come_back_as_they_are(home):
    odd = "No: # yes\nand {more}"
    frame = pd.DataFrame({odd: [f"s{i}" for i in range(6)], "label": ["no", "yes"] * 3})
    frame.to_csv(home / "odd.csv", index=False)
    gated_srp.init(home / "job", home / "odd.csv", out=home / "cohort.yaml")
    assert load_config(home / "cohort.yaml").slide == odd


def test_the_command_ends_with_the_next_one(home, app_of):
    path = table(home, label=list("ababab"))
    said = CliRunner().invoke(app_of(init), ["job", path.name])
    assert said.exit_code == 0 and said.output.splitlines()[-1] == "next: gated-srp check cohort.yaml"


@pytest.fixture
def app_of():
    import typer

    def make(command):
        app = typer.Typer(pretty_exceptions_enable=False)
        app.command()(command)
        return app

    return make


def test_a_draft_shows_its_path_text_and_notes(home):
    draft = gated_srp.init(str(home / "job"), str(table(home, label=list("ababab"))), out=str(home / "c.yaml"))
    assert draft.path == home / "c.yaml" and draft.path.read_text() == draft.text
    assert "encoder uni_v2" in [note.what for note in draft.notes]
    assert "c.yaml" in draft._repr_html_() and "target: label" in draft._repr_html_()


def test_several_encoders_and_slide_embeddings_leave_the_slides_recognisable(home):
    for i in range(6):
        write_trident(home / "job", f"s{i}", make_slide(i), encoder="conch_v15")
        write_h5(home / "job/20x_256px_0px_overlap/slide_features_titan" / f"s{i}.h5", features=np.zeros(768, "f4"))
    draft = draft_cohort(home / "job", table(home, label=list("ababab")), home / "cohort.yaml")
    assert "slide: slide_id      # 6 of 6 name a file" in draft.text and "titan" not in draft.text
    assert [line for line in draft.lines if "encoder" in line and "files" in line] == [
        "# encoder: conch_v15      # 6 files",
        "# encoder: uni_v2      # 6 files",
    ]
    said = "6 slide embeddings, one vector per slide, left out (slide_features_titan)"
    assert said in [note.what for note in draft.notes]


@pytest.mark.parametrize("name", ["ID", "PatientID", "slide_id", "Block"])
def test_one_row_per_patient_and_several_files_each_gives_case_and_no_slide(home, name):
    for i in range(6):
        write_trident(home / "many", f"P{i // 2}_{i % 2}", make_slide(i))
    write_trident(home / "many", "P3_only", make_slide(7))
    pd.DataFrame({name: ["P0", "P1", "P2", "P3"], "label": list("abab")}).to_csv(home / "p.csv", index=False)
    draft = gated_srp.init(home / "many", home / "p.csv", out=home / "cohort.yaml")
    settings = yaml.safe_load(draft.text)
    assert settings["case"] == name and "slide" not in settings and draft.choices == []
    assert "whose ids begin the names of 7 files: their slides" in draft.text
    data = open_cohort(load_config(home / "cohort.yaml"))
    assert len(data.matches.found) == 7 and data.table.frame["case"].nunique() == 4


def test_of_two_names_of_a_patient_the_one_that_the_files_have_is_taken(home):
    for i in range(4):
        write_trident(home / "tcga", f"TCGA-AA-100{i // 2}-01Z-00-DX{i % 2}", make_slide(i))
    rows = {"case_id": ["3f1e-a", "77b2-c"], "case_submitter_id": ["TCGA-AA-1000", "TCGA-AA-1001"], "label": ["a", "b"]}
    pd.DataFrame(rows).to_csv(home / "clinical.tsv", index=False, sep="\t")
    text = draft_cohort(home / "tcga", home / "clinical.tsv", home / "cohort.yaml").text
    assert yaml.safe_load(text)["case"] == "case_submitter_id"


def test_without_a_patient_column_ids_that_repeat_and_none_are_offered(home):
    rows = {
        "scan": [f"s{i}" for i in range(6)],
        "Accession": [f"H{i // 2}-21" for i in range(6)],
        "label": list("ababab"),
    }
    pd.DataFrame(rows).to_csv(home / "t.csv", index=False)
    draft = gated_srp.init(home / "job", home / "t.csv", out=home / "cohort.yaml")
    assert "# case: Accession      # 3 values in 6 rows\n# case: none      # if no patient has two slides" in draft.text
    assert [note.what.split(":")[0] for note in draft.choices] == ["case"]
    chosen = gated_srp.init(home / "job", home / "t.csv", out=home / "cohort.yaml", case="none", force=True)
    assert chosen.choices == [] and load_config(home / "cohort.yaml").case == "none"


def test_barcodes_of_tcga_are_said_to_be_the_patients(home):
    for i in range(4):
        write_trident(home / "tcga", f"TCGA-AA-100{i // 2}-01Z-00-DX{i % 2}", make_slide(i))
    slides = [f"TCGA-AA-100{i // 2}-01Z-00-DX{i % 2}.svs" for i in range(4)]
    pd.DataFrame({"slide": slides, "label": list("abab")}).to_csv(home / "t.csv", index=False)
    draft = draft_cohort(home / "tcga", home / "t.csv", home / "cohort.yaml")
    assert draft.choices == [] and "2 patients by the TCGA barcodes" in draft.text


def test_labels_that_may_be_missing_are_a_choice(home):
    draft = gated_srp.init(home / "job", table(home, label=["a", "b", "a", "b", "a", "n/a"]), out=home / "cohort.yaml")
    assert "# missing: [n/a]      # missing: leave these rows out\n# missing: []" in draft.text
    assert [note.what.split(":")[0] for note in draft.choices] == ["missing"]
    (home / "cohort.yaml").write_text(draft.text.replace("# missing: [n/a]", "missing: [n/a]"))
    assert open_cohort(load_config(home / "cohort.yaml")).table.classes == ("a", "b")


def test_target_patients_and_a_slide_table_can_be_named(home, app_of):
    clinical = {"Pseudonym": ["p0", "p1", "p2"], "KRAS": ["mut", "wt", "mut"], "sex": list("fmf"), "ER": [1, 0, 1]}
    pd.DataFrame(clinical).to_csv(home / "clinical.csv", index=False)
    slides = {"Pseudonym": [f"p{i // 2}" for i in range(6)], "Scan": [f"s{i}.svs" for i in range(6)]}
    pd.DataFrame(slides).to_csv(home / "scans.csv", index=False)
    asked = ["job", "clinical.csv", "--target", "kras", "--case", "Pseudonym", "--slides", "scans.csv"]
    said = CliRunner().invoke(app_of(init), asked)
    assert said.exit_code == 0, said.output
    config = load_config(home / "cohort.yaml")
    assert (config.target, config.case, config.slide, config.slides) == (
        "KRAS",
        "Pseudonym",
        "Scan",
        home / "scans.csv",
    )
    typed = "gated-srp init job clinical.csv --target=kras --case=Pseudonym --slides=scans.csv"
    assert typed in " ".join((home / "cohort.yaml").read_text().replace("\n#", "").split())
    data = open_cohort(config)
    assert list(data.table.frame["case"]) == ["p0", "p0", "p1", "p1", "p2", "p2"] and len(data.matches.found) == 6
    with pytest.raises(UserError, match=r"no column 'KRASS'\. Did you mean 'KRAS'\?"):
        draft_cohort(home / "job", home / "clinical.csv", home, target="KRASS")
    two = draft_cohort(home / "job", table(home, A=list("010101"), B=list("110011")), home, target=["A", "B"])
    assert yaml.safe_load(two.text)["target"] == ["A", "B"] and yaml.safe_load(two.text)["task"] == "multilabel"


def test_empty_cells_of_the_patient_column_are_said(home):
    path = table(home, patient=["p0", None, "p1", None, "p2", None], label=list("ababab"))
    draft = draft_cohort(home / "job", path, home / "cohort.yaml")
    assert [note.what.split(";")[0] for note in draft.choices] == ["case: 3 rows of 'patient' without a patient"]


def test_a_table_with_its_own_split_brings_it_along(home):
    folds = {f"fold_{k}": [("test", "val", "train")[(i // 2 + k) % 3] for i in range(6)] for k in range(2)}
    path = table(home, "k=all.tsv", grade=list("ababab"), **folds)
    path.write_text(path.read_text().replace(",", "\t"))
    draft = gated_srp.init(home / "job", path, out=home / "cohort.yaml")
    assert draft.choices == [] and "target: fold_0" not in draft.text
    assert "split: k=all.tsv      # of the table itself: fold_0, fold_1" in draft.lines
    assert "# folds: 2      # all of them; fold 0 alone if not set" in draft.lines
    config = load_config(home / "cohort.yaml")
    assert config.target == "grade" and open_cohort(config).split(42).counts == {"train": 2, "val": 2, "test": 2}


def test_equal_strides_are_said_once_whatever_file_declares_them(home):
    for i in range(6):
        write_clam_pt(home / "clam", f"s{i}", make_slide(i))
    text = draft_cohort(home / "clam", table(home, label=list("ababab")), home / "cohort.yaml").text
    lines = [line for line in text.splitlines() if "stride 512" in line]
    assert lines == ["# stride 512 px: declared on coords of *.h5 (patch_size and downsample), agrees with coordinates"]


def test_two_folders_that_name_no_encoder_are_a_choice(home):
    for i in range(6):
        for folder in ("old", "new"):
            slide = make_slide(i)
            write_h5(home / "both" / folder / f"s{i}.h5", features=slide.features, coords=slide.cells * 512)
    draft = draft_cohort(home / "both", table(home, label=list("ababab")), home / "cohort.yaml")
    assert [note.what for note in draft.choices] == [
        "features: two feature files per slide were found; a model is trained on one."
    ]
    assert "# features: both/new      # 6 feature files" in draft.lines
    assert "slide: slide_id      # 6 of 6 name a file" in draft.text


def test_features_without_positions_are_a_question_for_their_folder(home):
    for i in range(6):
        write_clam_pt(home / "clam", f"s{i}", make_slide(i))
    (home / "clam" / "patches").rename(home / "positions")
    draft = draft_cohort(home / "clam" / "feats", table(home, label=list("ababab")), home / "cohort.yaml")
    (choice,) = draft.choices
    assert choice.what.startswith("coords: the features have no positions beside them")
    assert "# coords: patches      # CLAM's folder of them, for example" in draft.lines


def test_defaults_of_a_drawn_split_are_not_offered_where_the_table_has_its_own(home):
    path = table(home, grade=list("ababab"), split=["train", "train", "val", "val", "test", "test"])
    text = draft_cohort(home / "job", path, home / "cohort.yaml").text
    assert "split: mine.csv      # of the table itself: split" in text
    assert "draws its own split" not in text and "# folds:" not in text
