"""Patients as bags: slides side by side without neighbours across them, from the YAML to the heatmap, against naive constructions."""

import re
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from factories import write_trident
from toy_cohorts import WIDTH, open_config, planted, train_interrupted, write_cohort, write_yaml

import gated_srp
from gated_srp.data import BagCache, BagLoader, Preparation, SlideDataset, prepare
from gated_srp.data import patients as patients_module
from gated_srp.data.patients import PatientDataset, shares
from gated_srp.errors import UserError
from gated_srp.reports.maps import view_slide
from gated_srp.reports.page.contents import FinishedRun
from gated_srp.reports.page.sides import _Files, _tested
from gated_srp.srp import PatchGraph
from gated_srp.training.train import train
from gated_srp.training.trained import TrainedRun, open_slide


def write_patients(folder, *, patients=16, first=0, **settings):
    """Every second patient has two slides, whose names sort against the table's order."""
    rows = ["slide,case,label"]
    for i in range(first, first + patients):
        label = i % 4 > 1
        for part in ("b", "a")[: 1 + i % 2]:
            slide = f"{part}{i:02d}"
            write_trident(folder / "feats", slide, planted(2 * i + (part == "a"), 4.0 * label - 2, columns=4, rows=3))
            rows.append(f"{slide},p{i:02d},{('benign', 'tumour')[label]}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    train_ = {"epochs": 2, "accumulation": 3} | settings.pop("train", {})
    return write_yaml(folder, target="label", bag="patient", train=train_, **settings)


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    return write_patients(tmp_path_factory.mktemp("patients"), cap=20, cache="cache")


@pytest.fixture(scope="module")
def finished(cohort):
    return train(open_config(cohort), arm="gated_srp", seed=42)


def members_of(folder, *names):
    files = [next(folder.rglob(f"{name}.h5")) for name in names]
    return pd.DataFrame({"slide": names, "case": [name[1:] for name in names], "file": list(map(str, files))})


def test_a_patients_bag_is_its_slides_one_after_the_other_and_nobody_has_neighbours_across(cohort):
    frame = members_of(cohort.parent, "b01", "b00", "a01")
    bags = PatientDataset(SlideDataset(frame, Preparation()), targets=torch.tensor([5, 7]))
    bag, alone = bags[0], [prepare(frame["file"][row], Preparation()) for row in (2, 0)]  # by name: a01, then b01
    assert (bag.case, bag.target.item(), len(bags)) == ("01", 5, 2)
    assert [(name, rows) for name, _, rows in bag.parts] == [("a01", 11), ("b01", 11)]
    assert torch.equal(bag.features, torch.cat([one.features for one in alone]))
    for row in range(22):  # naive: each row's list is that of its own slide, shifted by the slides before
        own, shift = (alone[0], 0) if row < 11 else (alone[1], 11)
        ends = own.graph.offsets[row - shift : row - shift + 2].tolist()
        expected = [n + shift for n in own.graph.neighbours[ends[0] : ends[1]].tolist()]
        ends = bag.graph.offsets[row : row + 2].tolist()
        found = bag.graph.neighbours[ends[0] : ends[1]].tolist()
        assert found == expected and all((n < 11) == (row < 11) for n in found)
    assert torch.equal(bag.graph.homogeneity, torch.cat([one.graph.homogeneity for one in alone]))
    assert bag.graph.lengths == (22,)


def test_slides_at_the_same_place_of_the_glass_do_not_touch():
    grid = PatchGraph.from_grid(2, 2)
    both = PatchGraph.side_by_side([grid, grid])
    assert both.neighbour_count.tolist() == [3] * 8  # joined by their coordinates each patch would have seven
    assert torch.equal(both.neighbours[12:], grid.neighbours + 4)


@pytest.mark.parametrize("sizes", [(100, 300), (1, 999), (7, 7, 7), (5, 1000, 20), (1, 1, 1)])
@pytest.mark.parametrize("cap", [3, 10, 41, 5000])
def test_a_cap_is_shared_in_proportion(sizes, cap):
    found = shares(sizes, cap)
    assert sum(found) == min(cap, sum(sizes)) and all(1 <= one <= size for one, size in zip(found, sizes, strict=True))
    if cap >= 10 * len(sizes):
        assert all(abs(one - size * min(1, cap / sum(sizes))) < 2 for one, size in zip(found, sizes, strict=True))


def test_the_cap_is_of_the_bag_and_each_slide_is_thinned_as_by_itself(cohort):
    frame = members_of(cohort.parent, "a01", "b01")
    bag = PatientDataset(SlideDataset(frame, Preparation(cap=20)))[0]
    alone = [prepare(file, Preparation(cap=10)) for file in frame["file"]]
    assert bag.num_patches == 22 and torch.equal(bag.features, torch.cat([one.features for one in alone]))
    with pytest.raises(UserError, match="a cap of 1 for the 2 slides of patient '01'"):
        _ = PatientDataset(SlideDataset(frame, Preparation(cap=1)))[0]


@pytest.mark.parametrize("cap", [20, 1000])  # two slides of 11 patches: thinned, not thinned
def test_the_share_of_a_cap_is_found_once_per_patient(cohort, monkeypatch, cap):
    seen, real = [], patients_module.open_header
    monkeypatch.setattr(patients_module, "open_header", lambda path, how: seen.append(path) or real(path, how))
    bags = PatientDataset(SlideDataset(members_of(cohort.parent, "b01", "b00", "a01"), Preparation(cap=cap)))
    first = [len(bags[i].features) for i in (0, 1)]
    assert [len(bags[i].features) for i in (0, 1)] == first and len(seen) == 2


def test_the_cache_and_workers_give_the_same_bags(cohort, tmp_path):
    frame = members_of(cohort.parent, "a01", "b01", "b00")
    plain = PatientDataset(SlideDataset(frame, Preparation(cap=20)))
    cached = PatientDataset(SlideDataset(frame, Preparation(cap=20), cache=BagCache(tmp_path)))
    for _ in range(2):
        with BagLoader(cached, workers=1) as loader:
            for bag in loader.epoch([1, 0]):
                assert torch.equal(bag.features, plain[bag.index].features)
                assert torch.equal(bag.graph.neighbours, plain[bag.index].graph.neighbours)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_a_run_on_patients_predicts_patients_and_records_the_order(cohort, finished):
    assert finished.card["bag"] == "patient" and finished.card["score"] == "case"
    table = finished.predictions("test", "case")
    truth = pd.read_csv(cohort.parent / "table.csv").groupby("case")["slide"].size()
    assert table.set_index("case")["slides"].to_dict() == truth[table["case"]].to_dict()
    assert not (finished.path / "predictions_test_slide.csv").exists() and finished.results["test"]["slide"] is None
    order = finished.features
    assert order.groupby("case", sort=False)["slide"].agg(list).map(lambda names: names == sorted(names)).all()
    assert "a bag is a patient" in (finished.path / "log.txt").read_text()


def test_prediction_is_that_of_the_model_on_the_joined_bag(cohort, finished):
    folder = cohort.parent
    found = gated_srp.predict(finished.path, folder / "feats", table=folder / "table.csv", workers=0)
    assert len(found.table) == 16
    row = found.table.set_index("case").loc["p01"]
    assert row["slide"] == "a01; b01" and row["patches"] == 22 and row["seen_in_training"]
    files = [next(folder.rglob(f"{name}.h5")) for name in ("a01", "b01")]
    parts = [prepare(file, Preparation(cap=10)) for file in files]
    model = TrainedRun.open(finished.path).load()
    with torch.no_grad():
        logits = model(torch.cat([p.features for p in parts])[None], PatchGraph.side_by_side([p.graph for p in parts]))
    assert row["prob_tumour"] == pytest.approx(float(logits.double().softmax(1)[0, 1]), abs=1e-12)
    again = gated_srp.predict(finished.path, files[::-1], table=folder / "table.csv", workers=0)  # any order of files
    assert again.table["prob_tumour"].tolist() == [row["prob_tumour"]]


def test_without_the_patients_nothing_is_predicted(cohort, finished):
    with pytest.raises(UserError, match=r"the patient of 'a01'.* is not known. Name a table .* --table"):
        gated_srp.predict(finished.path, cohort.parent / "feats", workers=0)
    file = next(cohort.parent.rglob("a01.h5"))
    with pytest.raises(UserError, match="the model sees all slides of a patient at once"):
        open_slide(finished.path, file)


def test_a_bad_slide_leaves_its_patient_out_with_the_reason(cohort, finished, tmp_path):
    shutil.copytree(cohort.parent / "feats", tmp_path / "feats")
    next((tmp_path / "feats").rglob("b01.h5")).write_bytes(b"")
    found = gated_srp.predict(finished.path, tmp_path / "feats", table=cohort.parent / "table.csv", workers=0)
    assert len(found.table) == 15 and "b01" in found.skipped["problem"][0] and found.skipped["slide"][0] == "p01"


def test_evaluation_scores_patients(finished, tmp_path):
    other = write_patients(tmp_path, patients=8, first=40)
    scored = gated_srp.evaluate(finished.path, other, repeats=5)
    assert scored.score == "case" and scored.cases["slides"].tolist() == [1, 2] * 4
    assert scored.as_json()["slides"] == 12 and scored.as_json()["patients"] == 8
    assert "predictions_slide.csv" not in {path.name for path in scored.write(tmp_path / "out")}
    with pytest.raises(UserError, match="the model's bags are patients"):
        gated_srp.evaluate(finished.path, other, repeats=5, score="slide")
    table = tmp_path / "table.csv"
    table.write_text(table.read_text().replace("b41,p41,benign", "b41,p41,tumour"))
    with pytest.raises(UserError, match="the slides of patient 'p41' differ in label"):
        gated_srp.evaluate(finished.path, other, repeats=5)


def test_heatmaps_are_of_one_slide_of_the_patients_bag(cohort, finished, tmp_path):
    folder = cohort.parent
    first, second = (next(folder.rglob(f"{name}.h5")) for name in ("a01", "b01"))
    views = [
        view_slide(finished.path, file, known={"beside": [other]}) for file, other in ((first, second), (second, first))
    ]
    assert [len(view.patches.rows) for view in views] == [10, 10]
    whole = torch.cat([view.layers[-1].cls_attention for view in views], -1)
    bag = open_slide(finished.path, first, beside=[second])
    with torch.no_grad(), gated_srp.trace(model := TrainedRun.open(finished.path).load()) as seen:
        model(bag.features[None], bag.graph)
    assert torch.equal(whole, seen[-1].cls_attention)
    assert np.array_equal(np.concatenate([view.homogeneity for view in views]), bag.graph.homogeneity.numpy())
    assert "slide 2 of 2" in views[1].prediction
    found = gated_srp.heatmap(finished.path, second, table=folder / "table.csv", out=tmp_path)
    assert found.slides[0].slide == "b01" and list(tmp_path.glob("b01*.png"))
    page = gated_srp.explain(finished.path, second, table=folder / "table.csv", out=tmp_path / "page")
    predicted = gated_srp.predict(finished.path, [first, second], table=folder / "table.csv", workers=0).table
    assert page.prediction.answers["predicted"] == predicted["predicted"][0]


def test_interrupted_a_run_on_patients_ends_with_the_same_bits(cohort, finished, tmp_path, monkeypatch):
    config = open_config(cohort, out=str(tmp_path))
    train_interrupted(config, "gated_srp", after=5, monkeypatch=monkeypatch)
    resumed = train(config, arm="gated_srp", seed=42)
    for name in ("model.safetensors", "metrics.json", "predictions_test_case.csv", "features.csv"):
        assert (resumed.path / name).read_bytes() == (finished.path / name).read_bytes()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("b01,p01,benign", "b01,p01,tumour"), r"the slides of patient 'p01' differ in label"),
        (("slide,case,label", "slide,block,label"), "nothing says which slides are of one patient"),
    ],
)
def test_tables_that_give_no_bags_are_refused_by_train_and_check(tmp_path, change, said):
    yaml = write_patients(tmp_path, patients=12)
    table = tmp_path / "table.csv"
    table.write_text(table.read_text().replace(*change))
    with pytest.raises(UserError, match=said):
        train(yaml)
    assert any(re.search(said, note.what) for note in gated_srp.check(yaml).errors)


def test_settings_that_make_no_sense_with_patients_are_refused(tmp_path):
    yaml = write_patients(tmp_path, patients=2)
    with pytest.raises(UserError, match="it has no use with score: slide"):
        train(yaml, settings={"score": "slide"})
    found = gated_srp.check(write_patients(tmp_path / "more", patients=12))
    assert found.facts["bags"] == {"patients": 12, "fewest": 1, "most": 2}


def test_patients_with_one_slide_each_train_as_slides_do(tmp_path):
    """The default stays the mean of slide scores; of single slides both are one."""
    yaml = write_cohort(tmp_path, slides=12, train={"epochs": 1})
    slides = train(yaml, arm="na", seed=42, out=tmp_path / "slides", settings={"score": "case"})
    patients = train(yaml, arm="na", seed=42, out=tmp_path / "patients", settings={"bag": "patient"})
    assert slides.card["settings"]["in_dim"] == WIDTH
    columns = ["case", "label", "slides"]
    ours, theirs = (run.predictions("test", "case") for run in (slides, patients))
    assert ours[columns].equals(theirs[columns])


def test_a_report_draws_maps_of_patients_slide_by_slide(cohort, finished):
    """Each test slide with its patient's prediction, and the other slides that its bag needs."""
    run = FinishedRun(finished.path)
    table, cases = _tested(run), finished.predictions("test", "case").set_index("case")
    slides = pd.read_csv(cohort.parent / "table.csv").set_index("slide")["case"]
    assert sorted(table["slide"]) == sorted(slides.index[slides.isin(cases.index)])
    for row in table.itertuples():
        assert row.case == slides[row.slide] and row.prob_tumour == cases.loc[row.case, "prob_tumour"]
    files = _Files.of(run)
    for slide, file in files.of_slide.items():
        others = {other for other in slides.index[slides == slides[slide]] if other != slide}
        assert {path.stem for path in files.known[file]["beside"]} == others
    with_both = next(slide for slide in table["slide"] if files.known[files.of_slide[slide]]["beside"])
    view = view_slide(run.path, files.of_slide[with_both], known=files.known[files.of_slide[with_both]])
    assert "patient; slide" in view.prediction
