from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
from broken_files import BROKEN
from factories import Slide, make_slide, write_atlaspatch, write_clam, write_stamp, write_trident
from scipy.special import softmax
from toy_cohorts import SMALL, WIDTH, open_config, planted, write_cohort, write_survival_cohort
from typer.testing import CliRunner

from gated_srp.cli import app
from gated_srp.data import BagLoader, Preparation, SlideDataset, prepare, read_header
from gated_srp.errors import UserError
from gated_srp.models import build_model, load_card, load_model, save_model
from gated_srp.tasks.metrics import curve_at
from gated_srp.training import results as results_module
from gated_srp.training.known import files_for, slide_names
from gated_srp.training.predict import predict
from gated_srp.training.train import train
from gated_srp.training.trained import TrainedRun, open_runs, stride_problem

CARD = {
    "task": "classification",
    "classes": ["a", "b", "c"],
    "encoder": "uni_v2",
    "stride": [{"value": 512.0, "unit": "px"}],
    "temperature": 1.0,
    "precision": "32",
    **{"order": "file", "window": 3, "lattice": "floor", "cap": None, "dtype": None},
}
SURVIVAL = CARD | {"task": "survival", "bin_edges": [10.0, 20.0, 40.0]}
del SURVIVAL["classes"]


def model_file(path: Path, seed: int = 0, *, width: int = WIDTH, **card: object) -> Path:
    """A model that was never trained, under a card of our choice."""
    card = CARD | card
    outputs = 4 if card["task"] == "survival" else len(card["classes"])
    model = build_model("gated_srp", in_dim=width, num_outputs=outputs, seed=seed, **SMALL)
    with torch.no_grad():
        model.head.weight.normal_(std=2.0, generator=torch.Generator().manual_seed(seed))
    save_model(model, path, card)
    return path


def write_slides(folder: Path, count: int = 4, **layout: object) -> list[Path]:
    return [write_trident(folder, f"s{i}", planted(i, 1.0), **layout) for i in range(count)]


def logits_of(model: Path, files: list[Path], **settings: object) -> np.ndarray:
    """The naive way: one bag after the other."""
    network = load_model(model)
    bags = [prepare(file, Preparation(**settings)) for file in files]
    with torch.no_grad():
        return np.stack([network(bag.features[None], bag.graph)[0].double().numpy() for bag in bags])


def command(*arguments: object) -> object:
    return CliRunner().invoke(app, ["predict", *(str(argument) for argument in arguments)])


def probabilities(table: pd.DataFrame) -> np.ndarray:
    return table[["prob_a", "prob_b", "prob_c"]].to_numpy()


# The same numbers ----------------------------------------------------------------------------------------------------


def test_predictions_have_the_columns_and_the_numbers_of_the_runs_own(finished, cohort):
    written = pd.read_csv(finished / "predictions_test_slide.csv")
    files = [next(cohort.parent.rglob(f"{slide}.h5")) for slide in written["slide"]]
    found = predict([finished], files, workers=0).table
    assert {"slide", "case", "predicted", "prob_benign", "prob_tumour"} == set(written) - {"label"} <= set(found)
    for name in ("prob_benign", "prob_tumour"):
        np.testing.assert_allclose(found[name], written[name], rtol=1e-9)
    assert found["slide"].tolist() == written["slide"].tolist()
    assert found["predicted"].tolist() == written["predicted"].tolist()
    assert not found["unlike_training"].any() and (found["patches"] > 15).all()


def test_survival_predictions_are_the_runs_own_bit_for_bit(tmp_path):
    config = open_config(write_survival_cohort(tmp_path), train__epochs=1)
    run = train(config, arm="na", seed=42).path
    written = pd.read_csv(run / "predictions_test_slide.csv", float_precision="round_trip")
    files = [next(tmp_path.rglob(f"{slide}.h5")) for slide in written["slide"]]
    found = predict([run], files, workers=0).table
    edges = load_card(run / "model.safetensors")["bin_edges"]
    assert (found["risk"] == written["risk"]).all()
    curve = [f"survival_at_{edge:.10g}" for edge in edges]
    assert [name for name in written if name.startswith("survival")] == curve
    assert [name for name in found if name.startswith("survival")] == curve
    assert (found[curve] == written[curve]).all(None)


def test_raw_and_calibrated_probabilities_have_names_of_their_own_in_a_run_and_in_a_prediction(tmp_path):
    config = open_config(write_cohort(tmp_path, slides=70, strength=0.1), train__epochs=1)
    rows = "".join(f"s{i:03d},{'train' if i < 10 else 'val' if i < 62 else 'test'}\n" for i in range(70))
    (tmp_path / "split.csv").write_text(f"slide_id,split\n{rows}")
    run = train(config.model_copy(update={"split": tmp_path / "split.csv"}), arm="na", seed=42)
    temperature = run.card["temperature"]
    assert temperature != 1.0 and run.card["calibration_slides"] == 52
    files = [next(tmp_path.rglob(f"s{i:03d}.h5")) for i in range(62, 70)]
    raw, calibrated = (["prob_benign", "prob_tumour"], ["calibrated_benign", "calibrated_tumour"])
    expected = softmax(logits_of(run.model, files), axis=1), softmax(logits_of(run.model, files) / temperature, axis=1)
    for table in (run.predictions("test", "slide"), predict([run.path], files, workers=0).table):
        for names, values in zip((raw, calibrated), expected, strict=True):
            np.testing.assert_allclose(table[names].to_numpy(), values, rtol=1e-6)
    cases = run.predictions("test", "case")
    np.testing.assert_allclose(cases[calibrated].to_numpy(), expected[1], rtol=1e-6)
    truth = np.eye(2)[[i % 2 for i in range(62, 70)]]
    for name, values in zip(("brier", "calibrated_brier"), expected, strict=True):
        assert run.metrics("test")[name] == pytest.approx(((values - truth) ** 2).sum(1).mean(), rel=1e-5)


def test_too_few_validation_slides_fit_no_temperature_and_that_is_said(finished, cohort):
    files = [next(cohort.parent.rglob("s001.h5"))]
    found = predict([finished], files, workers=0)
    few = load_card(finished / "model.safetensors")["calibration_slides"]
    said = f"probabilities are as the model gives them: {few} validation slides, 50 are needed to fit a temperature"
    assert said in [note.what for note in found.notes]
    assert not [name for name in found.table if name.startswith("calibrated")]
    assert f"no temperature is fitted: {few} validation slides, 50 are needed" in (finished / "log.txt").read_text()


def test_order_and_cap_are_those_of_the_card(tmp_path):
    files = write_slides(tmp_path / "f")
    capped = model_file(tmp_path / "m.safetensors", cap=12, order="raster")
    found = predict([capped], files, workers=0)
    expected = softmax(logits_of(capped, files, cap=12, order="raster"), axis=1)
    np.testing.assert_allclose(probabilities(found.table), expected, rtol=1e-12)
    assert not np.allclose(expected, softmax(logits_of(capped, files), axis=1))
    assert not any("cap:" in str(note) for note in found.notes)  # as in training: nothing to warn of
    assert any(note.what.startswith("a model's card has no statistics of its training slides") for note in found.notes)


def test_an_ensemble_is_the_mean_of_calibrated_members_with_their_spread(tmp_path):
    files = write_slides(tmp_path / "f")
    temperatures = (0.5, 1.0, 3.0)
    models = [model_file(tmp_path / f"m{t}.safetensors", i, temperature=t) for i, t in enumerate(temperatures)]
    each = np.stack([softmax(logits_of(m, files) / t, axis=1) for m, t in zip(models, temperatures, strict=True)])
    table = predict(models, files, workers=0).table
    names = ["calibrated_a", "calibrated_b", "calibrated_c"]
    np.testing.assert_allclose(table[names].to_numpy(), each.mean(0), rtol=1e-12)
    spread = np.sqrt(((each - each.mean(0)) ** 2).sum(0) / 2)  # n - 1
    np.testing.assert_allclose(table[[f"{name}_std" for name in names]].to_numpy(), spread, rtol=1e-9)
    raw = np.mean([softmax(logits_of(m, files), axis=1) for m in models], axis=0)
    np.testing.assert_allclose(probabilities(table), raw, rtol=1e-12)
    assert table["predicted"].tolist() == ["abc"[i] for i in each.mean(0).argmax(1)]


def test_members_that_see_other_bags_each_get_their_own(tmp_path):
    files = write_slides(tmp_path / "f")
    models = [model_file(tmp_path / f"{window}.safetensors", 0, window=window) for window in (3, 5)]
    each = np.stack([softmax(logits_of(m, files, window=w), axis=1) for m, w in zip(models, (3, 5), strict=True)])
    table = predict(models, files, workers=0).table
    np.testing.assert_allclose(probabilities(table), each.mean(0), rtol=1e-12)


def test_survival_curves_of_other_edges_are_read_at_the_first_runs(tmp_path):
    files = write_slides(tmp_path / "f")
    first = model_file(tmp_path / "m1.safetensors", 1, **SURVIVAL)
    other = model_file(tmp_path / "m2.safetensors", 2, **SURVIVAL | {"bin_edges": [5.0, 20.0, 80.0]})
    alone = [predict([model], files, workers=0).table for model in (first, other)]
    table = predict([first, other], files, workers=0).table
    np.testing.assert_allclose(table["risk"], (alone[0]["risk"] + alone[1]["risk"]) / 2, rtol=1e-12)
    # From 5 to 20 the second run's hazard is constant: at 10 a third of the way, on the log scale.
    at_10 = alone[1]["survival_at_5"] ** (2 / 3) * alone[1]["survival_at_20"] ** (1 / 3)
    np.testing.assert_allclose(table["survival_at_10"], (alone[0]["survival_at_10"] + at_10) / 2, rtol=1e-12)
    np.testing.assert_allclose(
        table["survival_at_20_std"], np.abs(alone[0]["survival_at_20"] - alone[1]["survival_at_20"]) / np.sqrt(2)
    )


def test_a_curve_read_at_its_own_edges_is_itself():
    edges, curve = np.array([1.0, 3.0, 7.0]), np.array([[0.9, 0.5, 0.1], [1.0, 1.0, 1.0]])
    np.testing.assert_allclose(curve_at(edges, edges, curve), curve, rtol=1e-12)


# Refusals ------------------------------------------------------------------------------------------------------------


def test_features_of_another_encoder_are_refused_by_both_names(tmp_path):
    files = write_slides(tmp_path / "f", encoder="gigapath")
    model = model_file(tmp_path / "m.safetensors")
    for force in (False, True):
        with pytest.raises(UserError, match=r"4 x, e\.g\. .*'gigapath', but the model was trained on 'uni_v2'"):
            predict([model], files, workers=0, force=force)


def test_a_folder_that_names_another_encoder_counts_where_the_file_says_nothing(tmp_path):
    file = write_clam(tmp_path / "features_virchow2", "s", planted(0, 1.0))
    with pytest.raises(UserError, match=r"'virchow2', but the model was trained on 'uni_v2'"):
        predict([model_file(tmp_path / "m.safetensors")], [file], workers=0)


def test_an_unknown_name_of_an_encoder_can_be_forced(tmp_path):
    files = write_slides(tmp_path / "f", encoder="our_uni")
    model = model_file(tmp_path / "m.safetensors")
    with pytest.raises(UserError, match=r"one encoder under two names: --force"):
        predict([model], files, workers=0)
    found = predict([model], files, workers=0, force=True)
    assert len(found.table) == 4 and "'our_uni'" in str(found.notes[0])


def test_a_run_on_one_vit_refuses_the_others_and_an_old_run_says_that_its_card_cannot_tell(tmp_path):
    files = [write_atlaspatch(tmp_path, f"s{i}", planted(i, 1.0), encoders={"vit_b_16": WIDTH}) for i in range(2)]
    google = model_file(tmp_path / "g.safetensors", encoder="vit_b16_google")
    for force in (False, True):
        with pytest.raises(UserError, match=r"'vit_b16_torchvision', but the model was trained on 'vit_b16_google'"):
            predict([google], files, workers=0, force=force)
    old = predict([model_file(tmp_path / "o.safetensors", encoder="vit_b16")], files, workers=0)
    said = [str(note) for note in old.notes if "old name" in str(note)]
    assert len(old.table) == 2 and len(said) == 1
    assert "'vit_b16' is an old name of vit_b16_torchvision, vit_b16_google and vit_b16_timm" in said[0]
    exact = predict([model_file(tmp_path / "t.safetensors", encoder="vit_b16_torchvision")], files, workers=0)
    assert not [note for note in exact.notes if "old name" in str(note)]


def test_a_file_that_names_no_encoder_is_predicted_with_a_warning(tmp_path):
    files = [write_clam(tmp_path / "f", f"s{i}", planted(i, 1.0)) for i in range(3)]
    found = predict([model_file(tmp_path / "m.safetensors")], files, workers=0)
    said = "s0: encoder: the file names none; taken for uni_v2, since the width fits (and 2 more like it)"
    assert len(found.table) == 3 and any(said in str(note) for note in found.notes)


def test_another_width_is_refused(tmp_path):
    files = [write_trident(tmp_path / "f", "s", make_slide(width=5))]
    with pytest.raises(UserError, match=r"5 channels, but the model was trained on 8 of uni_v2"):
        predict([model_file(tmp_path / "m.safetensors")], files, workers=0, force=True)


def test_another_stride_is_refused_unless_forced(tmp_path):
    files = write_slides(tmp_path / "f", overlap=128)
    model = model_file(tmp_path / "m.safetensors")
    with pytest.raises(UserError, match=r"patches lie 256 px apart, but 512 px in training"):
        predict([model], files, workers=0)
    assert len(predict([model], files, workers=0, force=True).table) == 4


def test_strides_are_compared_in_microns_where_both_sides_know_them(tmp_path):
    trained = [{"value": 512.0, "unit": "px", "um": 128.0}]
    same_tissue = read_header(write_trident(tmp_path, "scan20x", planted(0, 1.0), level0=20))
    assert same_tissue.stride == 256 and same_tissue.stride_um == 128
    assert stride_problem(same_tissue, trained) is None
    assert "256 px apart, but 512 px" in stride_problem(same_tissue, [{"value": 512.0, "unit": "px"}]).what
    half = read_header(write_trident(tmp_path, "overlap", planted(0, 1.0), overlap=128))
    assert "64 um apart, but 128 um in training" in stride_problem(half, trained).what
    stamp = read_header(write_stamp(tmp_path, "stamp", planted(0, 1.0), tile=128.0))
    assert stride_problem(stamp, trained) is None
    assert stride_problem(stamp, [{"value": 512.0, "unit": "px"}]) is None  # nothing to compare
    bare = read_header(write_clam(tmp_path, "bare", planted(0, 1.0)))
    assert bare.stride_um is None and stride_problem(bare, trained) is None
    by_pixel = replace(half, magnification=None, mpp=0.5)
    assert by_pixel.stride_um == 128 and stride_problem(by_pixel, trained) is None


def test_a_slide_of_one_patch_has_no_stride_to_compare(tmp_path):
    one = Slide(np.array([[3, 4]]), np.ones((1, WIDTH), np.float32))
    files = [write_clam(tmp_path / "f", "lone", one)]
    header = read_header(files[0])
    assert header.stride == 1.0 and not header.stride_known and header.stride_um is None
    assert stride_problem(header, CARD["stride"]) is None
    assert len(predict([model_file(tmp_path / "m.safetensors")], files, workers=0).table) == 1
    said = read_header(write_trident(tmp_path / "g", "said", one, overlap=128))  # by its attributes: 256
    assert said.stride_known and "256 px apart, but 512 px" in stride_problem(said, CARD["stride"]).what
    usual = write_clam(tmp_path / "f", "usual", planted(0, 1.0))
    frame = pd.DataFrame({"slide": ["lone", "usual"], "case": ["1", "2"], "file": [str(files[0]), str(usual)]})
    with BagLoader(SlideDataset(frame, Preparation()), workers=0) as loader:
        assert results_module._look_at_features(loader, [0, 1])["stride"] == [
            {"value": 512.0, "unit": "px", "um": None}
        ]


def test_runs_that_do_not_belong_together_are_refused(tmp_path):
    first = model_file(tmp_path / "m.safetensors")
    others = {
        r"classes a, b, but a, b, c in": model_file(tmp_path / "1.safetensors", classes=["a", "b"]),
        r"encoder gigapath, but uni_v2": model_file(tmp_path / "2.safetensors", encoder="gigapath"),
        r"task survival, but classification": model_file(tmp_path / "3.safetensors", **SURVIVAL),
        r"width of features 5, but 8": model_file(tmp_path / "4.safetensors", width=5),
        r"named twice": tmp_path / "." / "m.safetensors",
    }
    for message, other in others.items():
        with pytest.raises(UserError, match=message):
            open_runs([first, other])


def test_a_run_that_cannot_predict_says_why(tmp_path):
    with pytest.raises(UserError, match=r"format 99, this version reads up to 1\. Update gated-srp"):
        open_runs([model_file(tmp_path / "new.safetensors", format=99)])
    with pytest.raises(UserError, match=r"bare\.safetensors: this model's card names no task.*--classes A,B,C`\.$"):
        open_runs([model_file(tmp_path / "bare.safetensors") and _without_task(tmp_path / "bare.safetensors")])
    (tmp_path / "runs/seed42").mkdir(parents=True)
    (tmp_path / "runs/seed42/config.yaml").touch()
    with pytest.raises(UserError, match=r"unfinished: start `gated-srp train` again"):
        open_runs([tmp_path / "runs/seed42"])
    model_file(tmp_path / "runs/seed42/model.safetensors")
    with pytest.raises(UserError, match=r"a folder of 1 run, not a run\. Name those you mean: .*seed42"):
        open_runs([tmp_path / "runs"])
    assert open_runs([tmp_path / "runs/seed42"])[0].width == WIDTH
    with pytest.raises(UserError, match="no run is named"):
        open_runs([])


def _without_task(path: Path) -> Path:
    save_model(load_model(path), path, {key: value for key, value in CARD.items() if key != "task"})
    return path


# Bad and strange files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_files_are_listed_and_the_others_predicted(tmp_path, workers):
    good = write_slides(tmp_path / "f")
    (tmp_path / "bad").mkdir()
    cut = tmp_path / "bad" / "cut.h5"
    cut.write_bytes(good[0].read_bytes()[:1500])
    nan = planted(9, 1.0)
    nan.features[3, 2] = np.nan
    holed = write_trident(tmp_path / "f", "holed", nan)
    wide = write_trident(tmp_path / "f", "wide", make_slide(width=20))
    files = [cut, good[0], holed, wide, *good[1:], tmp_path / "bad" / "gone.h5"]
    model = model_file(tmp_path / "m.safetensors")
    found = predict([model], files, workers=workers)
    assert found.table["slide"].tolist() == ["s0", "s1", "s2", "s3"]
    np.testing.assert_allclose(probabilities(found.table), softmax(logits_of(model, good), axis=1), rtol=1e-12)
    problems = dict(zip(found.skipped["slide"], found.skipped["problem"], strict=True))
    assert list(problems) == ["cut", "holed", "wide", "gone"]
    assert problems["holed"].startswith("1 of") and "not finite" in problems["holed"]
    assert problems["wide"].startswith("width: 20 channels")
    assert not any("(slide" in problem for problem in problems.values())


def test_every_kind_of_broken_file_is_skipped(tmp_path):
    (tmp_path / "bad").mkdir()
    bad = [write(tmp_path / "bad" / f"{name}.h5") for name, (_, write) in BROKEN.items()]
    good = write_slides(tmp_path / "f", 1)
    found = predict([model_file(tmp_path / "m.safetensors")], [*bad, *good], workers=0)
    assert found.table["slide"].tolist() == ["s0"] and len(found.skipped) == len(bad)


def test_slides_unlike_the_training_set_are_flagged(finished, cohort, tmp_path):
    like = next(cohort.parent.rglob("s001.h5"))
    unlike = write_trident(tmp_path, "strange", planted(5, 60.0))
    table = predict([finished], [like, unlike], workers=0).table.set_index("slide")
    assert table["unlike_training"].to_dict() == {"s001": False, "strange": True}
    assert table.loc["s001", "training_distance"] <= 1 < 3 < table.loc["strange", "training_distance"]


def test_one_encoder_of_several_is_chosen_by_the_card(tmp_path):
    slide = planted(0, 1.0)
    several = write_atlaspatch(tmp_path / "a", "s", slide, encoders={"uni_v2": WIDTH, "gigapath": WIDTH})
    model = model_file(tmp_path / "m.safetensors")
    alone = write_trident(tmp_path / "t", "s", slide)
    tables = [probabilities(predict([model], [file], workers=0).table) for file in (several, alone)]
    np.testing.assert_array_equal(*tables)


def test_a_folder_of_several_encoders_gives_the_wanted_ones_files(tmp_path):
    wanted = write_slides(tmp_path, 2)
    write_slides(tmp_path, 2, encoder="gigapath")
    run = TrainedRun(tmp_path, {"encoder": "uni_v2"})
    assert files_for(run, tmp_path) == sorted(wanted)
    assert files_for(run, wanted[0]) == [wanted[0]]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no feature file in it"):
        files_for(run, tmp_path / "empty")


def test_slides_of_one_name_are_told_apart_by_their_folders():
    assert slide_names(["x/a/s.h5", "x/b/s.h5"]) == ["a/s", "b/s"]
    assert slide_names(["s.svs.h5"]) == ["s"]


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command_averages_runs_and_writes_both_tables(tmp_path):
    write_slides(tmp_path / "f")
    write_trident(tmp_path / "f", "wide", make_slide(width=20))
    runs = [model_file(tmp_path / f"{i}.safetensors", i) for i in range(2)]
    result = command(*runs, tmp_path / "f", "-o", tmp_path / "out" / "p.csv", "--workers", 0)
    assert result.exit_code == 0, result.output
    assert "4 slides predicted by the mean of 2 runs, 1 skipped" in result.output
    assert "wide.h5: width: 20 channels" in result.output
    table = pd.read_csv(tmp_path / "out" / "p.csv")
    assert list(table.columns) == [
        *("slide", "case", "file", "patches", "predicted", "prob_a", "prob_b", "prob_c"),
        *("prob_a_std", "prob_b_std", "prob_c_std", "training_distance", "unlike_training", "seen_in_training"),
    ]
    assert pd.read_csv(tmp_path / "out" / "p_skipped.csv")["slide"].tolist() == ["wide"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"p.csv", "p_skipped.csv"}


def test_one_is_said_as_one(tmp_path):
    write_slides(tmp_path / "f", 1)
    result = command(model_file(tmp_path / "m.safetensors"), tmp_path / "f", "-o", tmp_path / "p.csv", "--workers", 0)
    assert "1 file in " in result.output and "1 slide predicted by 1 run, 0 skipped" in result.output


def test_nothing_is_written_when_nothing_can_be_predicted(tmp_path):
    write_trident(tmp_path / "f", "wide", make_slide(width=20))
    model = model_file(tmp_path / "m.safetensors")
    result = command(model, tmp_path / "f", "-o", tmp_path / "p.csv", "--workers", 0)
    assert isinstance(result.exception, UserError) and not (tmp_path / "p.csv").exists()
    assert "no slide of 1 can be predicted; nothing was written" in str(result.exception)


def test_a_reason_that_all_files_share_is_said_once(tmp_path):
    """It names each slide's own files of positions."""
    for file in write_slides(tmp_path / "f", 7):
        with h5py.File(file, "a") as content:
            del content["coords"]
    for patches in (tmp_path / "f").rglob("*_patches.h5"):
        patches.unlink()
    said = str(command(model_file(tmp_path / "m.safetensors"), tmp_path / "f", "--workers", 0).exception)
    assert said.count("e.g.") == 1 and "  7 x, e.g. " in said and "--coords" in said


def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    result = command(tmp_path / "no_run", tmp_path, "-o", tmp_path)
    assert "is a folder, expected a file" in str(result.exception)
    (tmp_path / "file").touch()
    result = command(tmp_path / "no_run", tmp_path, "-o", tmp_path / "file" / "p.csv")
    assert "cannot be made" in str(result.exception)


def test_a_stale_list_of_skipped_slides_does_not_stay(tmp_path):
    files = write_slides(tmp_path / "f", 1)
    (tmp_path / "p_skipped.csv").write_text("slide,file,problem\nold,old.h5,old\n")
    found = predict([model_file(tmp_path / "m.safetensors")], files, workers=0)
    found.write(tmp_path / "p.csv")
    assert (tmp_path / "p_skipped.csv").read_text() == "slide,file,problem\n"


def test_equal_slides_have_equal_predictions_whatever_stands_around_them(tmp_path):
    slide = planted(3, 1.0)
    files = [write_trident(tmp_path, name, slide) for name in ("a", "b")]
    other = write_trident(tmp_path, "c", Slide(slide.cells, slide.features + 1))
    table = predict([model_file(tmp_path / "m.safetensors")], [files[0], other, files[1]], workers=0).table
    assert table.loc[0, "prob_a"] == table.loc[2, "prob_a"] != table.loc[1, "prob_a"]


@pytest.mark.parametrize("channels", [5, 64, 200])
def test_the_mean_of_a_long_slide_is_taken_some_channels_at_a_time_without_a_difference(channels, monkeypatch):
    from gated_srp.training import inputs

    features = torch.randn(300, channels, generator=torch.Generator().manual_seed(0)).half()
    whole = inputs.slide_mean(features)
    assert torch.equal(whole, features.mean(0, dtype=torch.float32))
    monkeypatch.setattr(inputs, "LONG", 100)
    widths = []
    monkeypatch.setattr(
        inputs.torch, "cat", lambda parts, real=torch.cat: widths.extend(map(len, parts)) or real(parts)
    )
    assert torch.equal(inputs.slide_mean(features), whole) and max(widths) <= 64


def test_one_slide_is_read_without_a_process_of_its_own(monkeypatch, tmp_path):
    from gated_srp.training import predict as module

    asked = []

    class Stop(Exception):
        pass

    def loader(dataset, *, workers):
        asked.append(workers)
        raise Stop

    class Run:
        patients, covariates = False, None

        def preparation(self, reading):
            return reading

    monkeypatch.setattr(module, "BagLoader", loader)
    monkeypatch.setattr(module, "fitting_bags", lambda *_, **__: None)
    for slides in (1, 2, 9):
        frame = pd.DataFrame({"slide": range(slides), "case": "", "file": "x"})
        with pytest.raises(Stop):
            module.run_models([Run()], frame, workers=4, model=lambda run: None)
    assert asked == [0, 1, 4]
