"""Slides and patients that a model has seen are told from others, by salted hashes in its card."""

import hashlib
import json
import shutil
import unicodedata
from pathlib import Path

import pandas as pd
import pytest
import torch
from factories import write_trident
from test_evaluate import command, three_classes
from test_predict import model_file
from toy_cohorts import open_config, planted, write_yaml

from gated_srp.errors import UserError
from gated_srp.models import load_card
from gated_srp.reports.heatmap import heatmap
from gated_srp.training.evaluate import evaluate
from gated_srp.training.predict import predict
from gated_srp.training.seen import external_validation, refuse_seen
from gated_srp.training.train import train
from gated_srp.training.trained import TrainedRun

PARTS = ("train", "train", "val", "val", "test", "test")


def cohort(folder: Path, name: str = "s{}", *, slides: int = 12, first: int = 0, patient: str = "p{}") -> Path:
    """Two slides per patient, classes in turn."""
    rows = ["slide,case,label"]
    for i in range(first, first + slides):
        write_trident(folder / "feats", name.format(i), planted(i, 1.0 if i // 2 % 2 else -1.0))
        rows.append(f"{name.format(i)}.svs,{patient.format(i // 2)},{'ab'[i // 2 % 2]}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    return write_yaml(folder, target="label", train={"epochs": 1})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Of slides s0 to s11 of patients p0 to p5: two patients each train, validate and test."""
    home = tmp_path_factory.mktemp("seen")
    config = open_config(cohort(home))
    (home / "split.csv").write_text("case_id,split\n" + "".join(f"p{i},{part}\n" for i, part in enumerate(PARTS)))
    return train(config.model_copy(update={"split": home / "split.csv"}), arm="na", seed=42)


def other(folder: Path, patient: str) -> Path:
    """Slides that nobody has seen, of p2 (validation), p5 (test) and strangers; ``patient`` names the strangers."""
    cohort(folder, "new{}", slides=8, first=4, patient=patient)
    table = pd.read_csv(folder / "table.csv")
    table.loc[table["slide"].isin(["new4.svs", "new5.svs"]), "case"] = "p2"
    table.loc[table["slide"].isin(["new10.svs", "new11.svs"]), "case"] = "p5"
    table.to_csv(folder / "table.csv", index=False)
    return folder / "cohort.yaml"


def test_the_card_has_salted_hashes_and_no_id(run):
    seen = run.card["seen"]
    salt = seen["salt"]
    assert len(salt) >= 32 and salt != train_again(run, seed=43).card["seen"]["salt"]
    assert train_again(run).model.read_bytes() == run.model.read_bytes()  # a run that is repeated gives the same file
    digest = hashlib.sha256((salt + "p0").encode()).hexdigest()
    length = len(seen["train"]["patients"][0])
    assert length >= 16 and digest[:length] in seen["train"]["patients"]
    assert {part: len(seen[part]["patients"]) for part in ("train", "val")} == {"train": 2, "val": 2}
    assert hashlib.sha256((salt + "s4").encode()).hexdigest()[:length] in seen["val"]["slides"]
    assert "test" not in seen
    written = run.model.read_bytes()
    assert b"s0.svs" not in written and b'"p0"' not in written


def train_again(run, seed=42):
    """The same run elsewhere, or one of another seed."""
    config = open_config(run.path.parents[3] / "cohort.yaml", out=str(run.path.parents[3] / "again"))
    return train(config.model_copy(update={"split": run.path.parents[3] / "split.csv"}), arm="na", seed=seed)


def test_predictions_say_which_slides_the_model_has_seen(run, tmp_path):
    table = predict(run.path, run.path.parents[3] / "feats", workers=0)
    found = table.table.set_index("slide")["seen_in_training"]
    assert found.loc[["s0", "s3", "s4", "s7", "s8", "s11"]].tolist() == [
        *("training slide", "training slide", "validation slide", "validation slide", "", "")
    ]
    note = next(note for note in table.notes if note.kind == "seen_in_training")
    assert note.what == "8 of 12 slides are known to the model: 4 training slides, 4 validation slides"
    assert any("the patients of 4 slides are not known, so only slides were compared" in n.what for n in table.notes)


def test_other_slides_of_its_patients_are_found_by_a_table_or_a_barcode(run, tmp_path):
    other(tmp_path, "q{}")
    blind = predict(run.path, tmp_path / "feats", workers=0)
    assert blind.table["seen_in_training"].eq("").all() and blind.table["case"].eq("").all()
    for table in (tmp_path / "table.csv", tmp_path / "cohort.yaml"):
        found = predict(run.path, tmp_path / "feats", table=table, workers=0)
        rows = found.table.set_index("slide")
        assert rows.loc["new4.svs", ["case", "seen_in_training"]].tolist() == ["p2", "validation patient"]
        assert rows.loc["new10.svs", ["case", "seen_in_training"]].tolist() == ["p5", ""]
        assert rows.loc["new6.svs", ["case", "seen_in_training"]].tolist() == ["q3", ""]
        note = next(note for note in found.notes if note.kind == "seen_in_training")
        assert note.what == "2 of 8 slides are known to the model: 2 slides of validation patients"


def test_a_barcode_names_the_patient_where_no_table_does(tmp_path):
    config = open_config(cohort(tmp_path / "in", "TCGA-AA-000{}-01Z-00-DX1.F00", slides=8, patient="case {}"))
    split = "".join(f"case {i},{part}\n" for i, part in enumerate(("train", "train", "val", "test")))
    (tmp_path / "split.csv").write_text("case_id,split\n" + split)
    trained = train(config.model_copy(update={"split": tmp_path / "split.csv"}), arm="na", seed=42)
    file = write_trident(tmp_path / "out", "TCGA-AA-0001-01Z-00-DX2.BA5", planted(1, 1.0))
    table = predict(trained.path, [file], workers=0).table
    assert table[["case", "seen_in_training"]].iloc[0].tolist() == ["TCGA-AA-0001", "training patient"]


def test_evaluation_on_slides_or_patients_of_the_training_is_refused_unless_allowed(run, tmp_path):
    with pytest.raises(UserError, match=r"8 of 12 slides are known to the model: .* so this is no external validation"):
        evaluate(run.path, run.path.parents[3] / "cohort.yaml", repeats=2)
    cohort = other(tmp_path, "q{}")
    words = r"2 of 8 slides are known to the model: 2 slides of validation patients, so this is no external validation"
    with pytest.raises(UserError, match=rf"{words}.*--allow-overlap"):
        evaluate(run.path, cohort, repeats=2)
    found = evaluate(run.path, cohort, repeats=2, allow_overlap=True)
    assert found.as_json()["overlap"] == {"validation patient": 2} and len(found.slides) == 8
    assert found.slides.set_index("slide").loc["new5.svs", "seen_in_training"] == "validation patient"
    result = command(run.path, cohort, "-o", tmp_path / "e", "--repeats", 2, "--allow-overlap")
    assert result.exit_code == 0 and "NOT AN EXTERNAL VALIDATION: 2 of 8 slides" in result.output.replace("\n", " ")
    written = json.loads((tmp_path / "e/evaluation.json").read_text())
    assert "no external validation" in " ".join(written["notes"])
    assert written["external_validation"] is False
    assert written["validation"] == found.external[1] and found.external[1] in found._repr_html_()
    assert found.external[1].startswith("NOT AN EXTERNAL VALIDATION: 2 of 8 slides are known to the model")


def test_strangers_and_its_own_test_patients_are_external(run, tmp_path):
    other(tmp_path, "q{}")
    table = pd.read_csv(tmp_path / "table.csv")
    table[table["case"] != "p2"].to_csv(tmp_path / "table.csv", index=False)
    found = evaluate(run.path, tmp_path / "cohort.yaml", repeats=2)
    assert found.as_json()["overlap"] == {} and found.slides["seen_in_training"].eq("").all()
    assert found.as_json()["external_validation"] is True and "no slide or patient" in found._repr_html_()


def test_one_function_refuses_or_says_it_for_whoever_scores_slides(run, tmp_path):
    seen = TrainedRun.open(run.path).seen
    rows = pd.DataFrame({"slide": ["s0", "x"], "case": ["p0", "y"], "file": ["s0.h5", "x.h5"]})
    with pytest.raises(
        UserError, match="1 of 2 slides is known to the model: 1 training slide, so this is no external"
    ):
        refuse_seen(seen, rows, where="cohort")
    assert [note.kind for note in refuse_seen(seen, rows, where="cohort", allowed=True)] == ["seen_in_training"]
    assert refuse_seen(seen, rows.tail(1), where="cohort") == ()
    assert external_validation(None, [""])[0] is None


def test_a_card_without_hashes_is_read_and_what_cannot_be_told_is_said_once(tmp_path):
    config, model = three_classes(tmp_path), model_file(tmp_path / "m.safetensors")
    for found in (evaluate(model, config, repeats=2), predict(model, sorted(tmp_path.rglob("e*.h5")), workers=0)):
        said = [note.what for note in found.notes if "does not say which slides it was trained on" in note.what]
        assert len(said) == 1


def test_an_old_run_folder_is_asked_for_its_split(run, tmp_path):
    shutil.copy(run.path / "split.csv", tmp_path / "split.csv")
    model_file(tmp_path / "model.safetensors", classes=["a", "b"], encoder="uni_v2")
    assert "seen" not in load_card(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="8 of 12 slides are known to the model: 4 slides of training patients"):
        evaluate(tmp_path, run.path.parents[3] / "cohort.yaml", repeats=2)


def test_names_are_compared_however_their_umlauts_are_composed(tmp_path):
    from gated_srp.training.seen import read_seen, seen_card

    rows = pd.DataFrame({"slide": ["Mühle"], "case": ["Müller"], "file": ["x/Mühle.h5"], "part": ["train"]})
    seen = read_seen({"seen": seen_card(rows, {"w": torch.ones(3)})}, tmp_path)
    apart = unicodedata.normalize("NFD", "Mühle"), unicodedata.normalize("NFD", "Müller")
    assert seen.of(apart[0], "q") == "training slide" and seen.of("other", apart[1]) == "training patient"
    assert seen.of("other", "Muller") == ""


@pytest.mark.parametrize("damaged", [[], {"salt": "x"}, {"salt": "x", "train": 3, "val": {}}, "text"])
def test_a_damaged_list_is_named(tmp_path, damaged):
    model = model_file(tmp_path / "m.safetensors", seen=damaged)
    file = write_trident(tmp_path, "s1", planted(1, 1.0))
    with pytest.raises(UserError, match=r"seen"):
        predict(model, [file], workers=0)


def test_a_heatmap_says_that_the_model_has_seen_the_slide(run, tmp_path):
    file = next(run.path.parents[3].rglob("s0.h5"))
    found = heatmap(run.path, file, out=tmp_path)
    assert any(note.what == "the model has seen it: training slide" for note in found.warnings)
