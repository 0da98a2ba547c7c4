"""Maps against annotations: every number equals a naive one, arms are paired, what a model has seen is not scored."""

import json
import math
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import shapely
import torch
from reports.page_folders import compared
from reports.viewer_folders import CARD
from sklearn.metrics import average_precision_score, roc_auc_score
from typer.testing import CliRunner

import gated_srp
from gated_srp.cli import app
from gated_srp.errors import UserError
from gated_srp.models import build_model, save_model
from gated_srp.reports.localization import (
    RATES,
    Detections,
    Lesions,
    best_threshold,
    detect,
    find_lesions,
    froc,
    mean_over_runs,
    score,
)
from gated_srp.reports.localize import shown_values
from gated_srp.reports.maps import view_slide
from gated_srp.srp.graph import PatchGraph
from gated_srp.training.seen import seen_card

SIDE = 64


# Scores of a slide ----------------------------------------------------------------------------------------------------


def test_areas_pointing_and_dice_equal_plain_counts():
    rng = np.random.default_rng(0)
    values, truth = rng.integers(0, 30, 400) / 7.0, rng.random(400) < 0.2
    found = score(values, truth, 2.0)
    assert found["auroc"] == pytest.approx(roc_auc_score(truth, values), abs=1e-6)
    assert found["auprc"] == pytest.approx(average_precision_score(truth, values), abs=1e-6)
    top = [t for v, t in zip(values, truth, strict=True) if v == max(values)]
    assert found["pointing"] == sum(top) / len(top)
    chosen = {i for i, v in enumerate(values) if v >= 2.0}
    real = {i for i, t in enumerate(truth) if t}
    assert found["dice"] == pytest.approx(2 * len(chosen & real) / (len(chosen) + len(real)))
    assert all(math.isnan(one) for one in score(values, np.zeros(400, bool), 2.0).values())


def test_the_threshold_is_the_best_of_all_by_mean_dice():
    rng = np.random.default_rng(1)
    slides = [(rng.normal(truth, 1.0), truth) for truth in (rng.random(80) < 0.3, rng.random(60) < 0.2)]
    slides.append((rng.normal(size=50), np.zeros(50, bool)))  # without positives it says nothing
    chosen = best_threshold(slides)

    def mean(threshold):
        return np.mean([score(values, truth, threshold)["dice"] for values, truth in slides[:2]])

    tried = np.quantile(np.concatenate([values for values, _ in slides[:2]]), np.linspace(0, 1, 201))
    assert mean(chosen) == pytest.approx(max(mean(t) for t in tried))
    assert math.isnan(best_threshold(slides[2:]))


# FROC -----------------------------------------------------------------------------------------------------------------


def naive_froc(slides):
    """CAMELYON16: at each threshold false positives per slide and the share of lesions found; the mean at the six rates."""
    every = sorted({v for one in slides for v in [*one.false, *one.hits] if v > -math.inf}, reverse=True)
    lesions = sum(len(one.hits) for one in slides)
    points = [(0.0, 0.0)]
    for threshold in every:
        wrong = sum(v >= threshold for one in slides for v in one.false)
        right = sum(v >= threshold for one in slides for v in one.hits)
        points.append((wrong / len(slides), right / lesions))
    x, y = zip(*points, strict=True)
    return np.interp(RATES, x, y).mean()


def test_froc_equals_a_naive_loop_and_resampled_slides_equal_repeated_ones():
    rng = np.random.default_rng(2)
    slides = []
    for lesions in (0, 1, 3, 2, 0, 5):
        hits = np.where(rng.random(lesions) < 0.7, rng.normal(1, 1, lesions).round(1), -math.inf)
        slides.append(Detections(rng.normal(0, 1, rng.integers(0, 90)).round(1), hits))
    assert froc(slides)[0] == pytest.approx(naive_froc(slides))
    times = np.array([2, 0, 1, 3, 1, 1])
    repeated = [one for one, count in zip(slides, times, strict=True) for _ in range(count)]
    assert froc(slides, times[None].astype(float))[0] == pytest.approx(naive_froc(repeated))


def test_froc_of_resamples_does_not_depend_on_a_few_slides_with_most_of_the_detections():
    rng = np.random.default_rng(0)
    slides = [
        Detections(np.exp(rng.normal(0, 1, 400 if number < 2 else 20)), np.exp(rng.normal(1, 1, 2)))
        for number in range(8)
    ]
    times = np.array([[0, 0, 2, 1, 1, 2, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])
    repeated = [[one for one, count in zip(slides, row, strict=True) for _ in range(count)] for row in times]
    assert froc(slides, times.astype(float)) == pytest.approx([naive_froc(own) for own in repeated], abs=1e-12)


def test_a_resample_without_a_class_in_any_run_is_no_number_and_no_warning():
    found = mean_over_runs([np.array([1.0, math.nan, math.nan]), np.array([3.0, 5.0, math.nan])])
    np.testing.assert_array_equal(found, [2.0, 5.0, math.nan])


def test_froc_by_hand():
    assert RATES == (1 / 4, 1 / 2, 1, 2, 4, 8)  # CAMELYON16
    # Two slides, two lesions. Above 0.8: one lesion, nothing wrong. Above 0.6: half a false positive per slide. 0.5: both lesions.
    one = Detections(np.array([0.7]), np.array([0.9, 0.5]))
    two = Detections(np.empty(0), np.empty(0))
    assert froc([one, two])[0] == pytest.approx((0.5 + 5 * 1.0) / 6)  # 1/4: half of the lesions, then all
    perfect = Detections(np.empty(0), np.array([0.9]))
    assert froc([perfect])[0] == 1.0
    missed = Detections(np.linspace(0, 1, 50), np.array([-math.inf]))
    assert froc([missed])[0] == 0.0
    assert math.isnan(froc([two])[0])


def test_detections_are_local_maxima_and_a_lesion_has_its_highest():
    cells = np.array([(x, y) for y in range(9) for x in range(9)])
    values = np.random.default_rng(3).integers(0, 12, len(cells)).astype(float)
    graph = PatchGraph.from_coords(torch.from_numpy(cells * SIDE), stride=SIDE, window=3)
    patch, lesion = np.array([0, 1, 9, 40, 41]), np.array([0, 0, 0, 1, 1])
    found = detect(values, graph, Lesions(2, patch, lesion))
    peaks = set()
    for i, (x, y) in enumerate(cells):
        near = [j for j, (a, b) in enumerate(cells) if j != i and abs(a - x) <= 1 and abs(b - y) <= 1]
        if all((values[i], -i) > (values[j], -j) for j in near):
            peaks.add(i)
    assert sorted(found.false) == sorted(values[list(peaks - set(patch.tolist()))])
    for number in (0, 1):
        own = [values[p] for p, which in zip(patch, lesion, strict=True) if which == number and p in peaks]
        assert found.hits[number] == max(own, default=-math.inf)


def test_pieces_nearer_than_75_microns_are_one_lesion_and_touching_is_no_hit():
    shape = shapely.union_all([shapely.box(0, 0, 64, 64), shapely.box(164, 0, 228, 64), shapely.box(640, 0, 704, 64)])
    corners = np.array([(x * SIDE, 0) for x in range(12)], float)
    found = find_lesions(shape, corners, SIDE, 0.5)  # 100 pixels apart are 50 microns
    assert found.count == 2 and found.patch.tolist() == [0, 2, 3, 10]
    assert found.lesion[0] == found.lesion[1] == found.lesion[2] != found.lesion[3]
    assert find_lesions(shape, corners, SIDE, None).count == 3  # the size of a pixel is not known
    assert find_lesions(shapely.Polygon(), corners, SIDE, 0.5).count == 0


# The flow -------------------------------------------------------------------------------------------------------------

CELLS = np.array([(x, y) for y in range(12) for x in range(14)])
SLIDES = [f"s{i:02d}" for i in range(16)]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """16 slides of 12 patients; s00 to s03 trained the models, s04 to s06 validated them; drawn is where NA's layer 2 looks."""
    home = tmp_path_factory.mktemp("localized")
    rng = np.random.default_rng(5)
    (home / "feats").mkdir()
    for slide in SLIDES:
        with h5py.File(home / "feats" / f"{slide}.h5", "w") as file:
            file["features"] = rng.standard_normal((len(CELLS), 12)).astype(np.float32)
            file["coords"] = CELLS * SIDE
            file["coords"].attrs.update({"patch_size": SIDE, "patch_size_level0": SIDE, "overlap": 0})
            file["coords"].attrs.update(
                {
                    "level0_width": 14 * SIDE,
                    "level0_height": 12 * SIDE,
                    "level0_magnification": 20,
                    "target_magnification": 20,
                }
            )
    cases = [f"p{i % 12:02d}" if i < 12 else f"p{i - 4:02d}" for i in range(16)]  # p08 to p11 have two slides
    pd.DataFrame({"slide": SLIDES, "patient": cases}).to_csv(home / "patients.csv", index=False)
    parts = ["train"] * 4 + ["val"] * 3 + ["test"] * 9
    frame = pd.DataFrame({"slide": SLIDES, "case": cases, "file": SLIDES, "part": parts})
    for seed, arm in enumerate(("na", "gated_srp")):
        model = build_model(arm, in_dim=12, num_outputs=2, dim=24, depth=2, num_heads=4, num_landmarks=4).eval()
        draw = torch.Generator().manual_seed(seed + 1)
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, std=1.0 if "correction" in name else 0.4, generator=draw)
        place = home / "runs" / arm / "seed42"
        place.mkdir(parents=True)
        card = {**CARD, "arm": arm, "seed": 42, "seen": seen_card(frame, dict(model.named_parameters()))}
        save_model(model, place / "model.safetensors", card)
    for folder in ("truth", "shuffled"):
        (home / folder).mkdir()
    for slide in SLIDES:
        values = shown_values(view_slide(home / "runs/na/seed42", home / f"feats/{slide}.h5", every=True))[
            "attention_layer2"
        ]
        focus = values > np.quantile(values, 0.85)
        for folder, marks in (("truth", focus), ("shuffled", rng.permutation(focus))):
            table = pd.DataFrame({"x": CELLS[:, 0] * SIDE, "y": CELLS[:, 1] * SIDE, "focus": marks.astype(int)})
            table.to_csv(home / folder / f"{slide}.csv", index=False)
    return home


@pytest.fixture(scope="module")
def found(home):
    return gated_srp.localize(
        home / "runs", home / "feats", annotations=home / "truth", table=home / "patients.csv", repeats=200
    )


def mean(found, arm, value, metric="auroc"):
    table = found.table
    return table[(table["arm"] == arm) & (table["value"] == value) & (table["metric"] == metric)].iloc[0]


def test_what_was_planted_is_found_with_an_interval_and_slides_seen_before_are_not_scored(found):
    assert set(found.slides["slide"]) == set(SLIDES[7:]) and set(found.slides["case"]) == {
        f"p{i:02d}" for i in range(7, 12)
    }
    row = mean(found, "na", "attention_layer2")
    assert (
        row[["mean", "low", "high"]].tolist() == pytest.approx([1.0] * 3, abs=1e-6)
        and row["slides"] == 9
        and row["patients"] == 5
    )
    assert mean(found, "na", "attention_layer2", "pointing")["mean"] == 1.0
    assert mean(found, "na", "attention_layer2", "dice")["mean"] > 0.85
    other = mean(found, "gated_srp", "attention_layer2")
    assert other["low"] < other["mean"] < other["high"] and abs(other["mean"] - 0.5) < 0.2
    assert "4 training slides, 3 validation slides; training slides are left out" in found.verdict
    assert {"attention_layer1", "beta_layer1", "correction_layer1", "change_layer2", "homogeneity"} <= set(
        found.slides.loc[found.slides["arm"] == "gated_srp", "value"]
    )


def test_means_over_slides_and_differences_are_plain_ones(found):
    part = found.slides[found.slides["value"] == "attention_layer2"].pivot(index="slide", columns="arm", values="auroc")
    one = next(d for d in found.differences if d.metric == "attention_layer2 auroc")
    assert one.means == pytest.approx((part["gated_srp"].mean(), part["na"].mean()))
    assert one.test.mean == pytest.approx((part["gated_srp"] - part["na"]).mean())
    assert one.statistics.n == 5 and one.statistics.losses == 5 and one.verdict.startswith("worse (")
    assert "Holm's correction over" in one.verdict and one.test.high < 0
    assert not any("homogeneity" in d.metric for d in found.differences)


def test_shuffled_coordinates_give_one_half(home):
    shuffled = gated_srp.localize(
        home / "runs", home / "feats", annotations=home / "shuffled", table=home / "patients.csv", repeats=20
    )
    for arm in ("na", "gated_srp"):
        for value in ("attention_layer1", "attention_layer2", "homogeneity"):
            assert mean(shuffled, arm, value)["mean"] == pytest.approx(0.5, abs=0.05)


def test_gates_by_class_are_medians_of_slides(home, found):
    medians, gaps = [], []
    for slide in SLIDES[7:]:
        beta = shown_values(view_slide(home / "runs/gated_srp/seed42", home / f"feats/{slide}.h5", every=True))[
            "beta_layer1"
        ]
        focus = pd.read_csv(home / "truth" / f"{slide}.csv")["focus"].to_numpy(bool)
        medians.append(np.median(beta[focus]))
        gaps.append(np.median(beta[focus]) - np.median(beta[~focus]))
    row = found.gates[(found.gates["value"] == "beta_layer1") & (found.gates["class"] == "focus")].iloc[0]
    assert row["median"] == pytest.approx(np.mean(medians)) and row["minus_elsewhere"] == pytest.approx(np.mean(gaps))
    assert row["low"] <= row["median"] <= row["high"] and "beta of layer 1 in focus" in found.verdict


def test_what_is_not_there_is_said(home, tmp_path):
    few = tmp_path / "few"
    few.mkdir()
    for slide in SLIDES[7:10]:
        (few / f"{slide}.csv").write_bytes((home / "truth" / f"{slide}.csv").read_bytes())
    settings = {"table": home / "patients.csv", "repeats": 5}
    found = gated_srp.localize(home / "runs/na/seed42", home / "feats", annotations=few, **settings)
    said = found.verdict
    assert (
        "no annotated slide is in a run's validation part" in said
        and "13 slides without a file of annotations: left out" in said
    )
    assert found.table[found.table["metric"] == "dice"]["mean"].isna().all() and not found.differences
    normal = gated_srp.localize(home / "runs/na/seed42", home / "feats", annotations=few, normal=True, **settings)
    assert set(normal.slides["slide"]) == set(SLIDES[7:])
    assert (
        mean(normal, "na", "attention_layer2", "froc")["mean"] < mean(found, "na", "attention_layer2", "froc")["mean"]
    )
    with pytest.raises(UserError, match=r"no region of the class 'tumour' \(classes: focus\)"):
        gated_srp.localize(home / "runs/na/seed42", home / "feats", annotations=few, classes="tumour")
    with pytest.raises(UserError, match="is not among the arms: na"):
        gated_srp.localize(home / "runs/na/seed42", home / "feats", annotations=few, reference="xsa")
    with pytest.raises(UserError, match="the models have seen all of them"):
        gated_srp.localize(
            home / "runs/na/seed42", home / "feats/s01.h5", annotations=home / "truth/s01.csv", **settings
        )
    seen = gated_srp.localize(
        home / "runs/na/seed42",
        home / "feats/s01.h5",
        annotations=home / "truth/s01.csv",
        allow_overlap=True,
        repeats=5,
    )
    assert any(note.level == "warning" and "no test" in note.what for note in seen.notes)
    assert any("1 training slide, so this is no external validation" in note.what for note in seen.notes)
    named = (
        gated_srp.localize(  # without a table nobody knows the patients: only slides could be compared, which is said
            home / "runs/na/seed42", home / "feats/s08.h5", annotations=home / "truth/s08.csv", repeats=5
        )
    )
    assert any("so only slides were compared with those of the training" in note.what for note in named.notes)


def test_other_slides_of_training_patients_are_not_scored(home, tmp_path):
    cases = [f"p{i:02d}" for i in range(16)]
    cases[8] = "p01"  # of a patient whose slide s01 trained the models
    pd.DataFrame({"slide": SLIDES, "patient": cases}).to_csv(tmp_path / "patients.csv", index=False)
    few = tmp_path / "few"
    few.mkdir()
    for slide in SLIDES[7:10]:
        (few / f"{slide}.csv").write_bytes((home / "truth" / f"{slide}.csv").read_bytes())
    how = {"annotations": few, "table": tmp_path / "patients.csv", "repeats": 5}
    found = gated_srp.localize(home / "runs/na/seed42", home / "feats", **how)
    assert set(found.slides["slide"]) == {"s07", "s09"}
    assert any("1 slide of training patients; training slides are left out" in note.what for note in found.notes)
    kept = gated_srp.localize(home / "runs/na/seed42", home / "feats", allow_overlap=True, **how)
    assert set(kept.slides["slide"]) == {"s07", "s08", "s09"}
    assert any("of training patients, so this is no external validation" in note.what for note in kept.notes)


def test_a_last_layer_that_computes_cls_alone_has_no_map_and_the_others_have(home, tmp_path):
    model = build_model("xsa", in_dim=12, num_outputs=2, dim=24, depth=2, num_heads=4, num_landmarks=4).eval()
    save_model(model, tmp_path / "model.safetensors", {**CARD, "arm": "xsa"})
    view = view_slide(tmp_path / "model.safetensors", home / "feats/s08.h5", every=True)
    values = shown_values(view)
    assert {"beta_layer1", "correction_layer1"} <= set(values) and "beta_layer2" not in values
    assert {len(one) for one in values.values()} == {len(CELLS)}


def test_the_command_writes_tables_figures_and_a_page(home, tmp_path):
    out, few = tmp_path / "out", tmp_path / "few"
    few.mkdir()
    for slide in SLIDES[6:10]:
        (few / f"{slide}.csv").write_bytes((home / "truth" / f"{slide}.csv").read_bytes())
    arguments = ["localize", str(home / "runs"), "--slides", str(home / "feats"), "--annotations", str(few)]
    done = CliRunner().invoke(
        app, [*arguments, "--table", str(home / "patients.csv"), "--bootstrap", "50", "-o", str(out)]
    )
    assert done.exit_code == 0, done.output
    assert "NA, attention of layer 2: 1.000 (1.000 to 1.000)" in done.output
    names = {path.name for path in out.iterdir()}
    assert {"summary.csv", "slides.csv", "differences.csv", "gates.csv", "localization.json", "README.md"} <= names
    assert {"localization.svg", "froc.svg", "gates_by_class.svg"} <= names
    content = json.loads((out / "localization.json").read_text())
    assert content["classes"] == ["focus"] and content["differences"][0]["verdict"]
    assert Path(out / "README.md").read_text().count("FROC") >= 2


def test_the_report_has_a_section_on_annotations(found, tmp_path):
    compared(tmp_path)
    found.write(tmp_path / "localized")
    page = Path(gated_srp.report(tmp_path, out=tmp_path / "report.html")).read_text()
    assert "Maps against annotations" in page and "Maps against focus" in page
    assert "How well maps find what was drawn" in page and "attention, layer 2" in page
