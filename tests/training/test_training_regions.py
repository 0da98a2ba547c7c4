"""A run on drawn regions: its card has the rule, and whatever uses its model applies the rule or refuses."""

import pandas as pd
import pytest
import shapely
import torch
from factories import draw as draw_shapes
from factories import make_slide, write_trident
from toy_cohorts import open_config, planted, train_interrupted, write_cohort, write_yaml

import gated_srp
from gated_srp.config import load_config
from gated_srp.config.cohort import preparation
from gated_srp.data import Preparation, prepare
from gated_srp.data.loader import SlideDataset
from gated_srp.data.patients import PatientDataset
from gated_srp.data.regions import Regions
from gated_srp.errors import UserError
from gated_srp.models import load_card, load_model
from gated_srp.reports.maps import view_slide
from gated_srp.training.train import train

STEP = 512


def draw(path, **boxes):
    """Boxes (x0, y0, x1, y1) in patches, by class."""
    draw_shapes(path, **{name: shapely.box(*(STEP * side for side in box)) for name, box in boxes.items()})


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """24 slides of 6 x 5 patches; three columns are tumour, a pen crosses its first row on half of the slides."""
    home = tmp_path_factory.mktemp("regions")
    write_cohort(home, regions={"annotations": "drawn", "only": "tumour", "exclude": ["pen"]}, train={"epochs": 1})
    for number in range(24):
        pen = {"pen": (0, 0, 6, 1)} if number % 2 else {}
        draw(home / "drawn" / f"s{number:03d}.geojson", Tumor=(0, 0, 3, 5), **pen)
    return home


@pytest.fixture(scope="module")
def run(home):
    return gated_srp.train(home / "cohort.yaml", arm="gated_srp", seed=42).path


def feats(home, name):
    return next((home / "feats").rglob(f"{name}.h5"))


def inside(home, name):
    """Rows that are kept, naively."""
    coords = prepare(feats(home, name), Preparation()).coords.numpy() // STEP
    pen = int(name[1:]) % 2 == 1
    return [i for i, (x, y) in enumerate(coords) if x < 3 and not (pen and y < 1)]


def answer(run, home, name, rows):
    """The model on these rows alone, by hand."""
    from gated_srp.srp.graph import PatchGraph

    bag = prepare(feats(home, name), Preparation())
    coords, features = bag.coords[rows], bag.features[rows]
    graph = PatchGraph.from_coords(coords, stride=STEP).with_features(features)
    with torch.no_grad():
        return load_model(run / "model.safetensors")(features[None], graph).softmax(-1)[0, 1].item()


def test_the_card_has_the_rule_and_settings_say_it(home, run):
    card = load_card(run / "model.safetensors")
    assert card["regions"] == {"only": ["tumour"], "exclude": ["pen"], "cover": 0.5, "unannotated": "refuse"}
    predicted = pd.read_csv(run / "predictions_test_slide.csv")
    for name, probability in zip(predicted["slide"], predicted["prob_tumour"], strict=True):
        assert probability == pytest.approx(answer(run, home, name, inside(home, name)), abs=1e-5)


def test_predictions_maps_and_vectors_need_annotations_and_see_the_kept_patches_alone(home, run, tmp_path):
    file = feats(home, "s001")
    rows = inside(home, "s001")
    found = gated_srp.predict(run, [file], annotations=home / "drawn", workers=0)
    assert found.table["prob_tumour"][0] == pytest.approx(answer(run, home, "s001", rows), abs=1e-5)
    assert found.table["patches"][0] == len(rows) and any(note.kind == "regions" for note in found.notes)
    assert abs(found.table["prob_tumour"][0] - answer(run, home, "s001", slice(None))) > 1e-5
    drawn = gated_srp.heatmap(run, file, annotations=home / "drawn", out=tmp_path)
    assert len(drawn.slides[0].maps[0].values) == len(rows) and "regions" in {w.kind for w in drawn.warnings}
    embedded = gated_srp.embed(run, [file], annotations=home / "drawn", workers=0)
    assert embedded.slides["patches"][0] == len(rows)
    view = view_slide(run, file, reading=Preparation(regions=Regions(annotations=home / "drawn")))
    assert view.patches.rows.tolist() == rows
    for refused in (
        lambda: gated_srp.predict(run, [file], workers=0),
        lambda: gated_srp.heatmap(run, file, out=tmp_path),
        lambda: gated_srp.embed(run, [file], workers=0),
        lambda: gated_srp.explain(run, file, out=tmp_path),
        lambda: gated_srp.view(file, run, export=tmp_path / "v"),
        lambda: gated_srp.readers([run, run], file, out=tmp_path / "r"),
    ):
        with pytest.raises(UserError, match="at least 50 % inside tumour, less than 50 % inside pen, and nothing says"):
            refused()


def test_an_evaluation_has_the_models_rule_or_is_refused(home, run, tmp_path):
    other = tmp_path / "other"
    rows = ["slide,case,label"]
    for i in range(8):
        write_trident(other / "feats", f"e{i}", planted(100 + i, 2.0 * (2 * (i % 2) - 1)))
        rows.append(f"e{i},q{i},{('benign', 'tumour')[i % 2]}")
        draw(other / "drawn" / f"e{i}.geojson", tumour=(0, 0, 2, 5))
    (other / "table.csv").write_text("\n".join(rows) + "\n")
    rule = {"annotations": "drawn", "only": ["Tumor"], "exclude": ["pen"]}
    found = gated_srp.evaluate(run, write_yaml(other, target="label", regions=rule), repeats=5)
    first = found.slides.iloc[0]
    coords = prepare(feats(other, "e0"), Preparation()).coords.numpy() // STEP
    kept = [i for i, (x, _) in enumerate(coords) if x < 2]
    assert first["prob_tumour"] == pytest.approx(answer(run, other, "e0", kept), abs=1e-5)
    with pytest.raises(UserError, match="nothing says where these are"):
        gated_srp.evaluate(run, write_yaml(other, target="label"), repeats=5)
    with pytest.raises(UserError, match="but those are asked for that are at least 50 % inside Tumor"):
        gated_srp.evaluate(run, write_yaml(other, target="label", regions={**rule, "exclude": []}), repeats=5)


def test_a_model_of_whole_slides_refuses_regions(home, cohort, finished):
    with pytest.raises(UserError, match="no run was trained on regions"):
        gated_srp.predict(finished, feats(home, "s001"), annotations=home / "drawn")
    with pytest.raises(UserError, match="trained on all patches of its slides"):
        gated_srp.evaluate(finished, home / "cohort.yaml", allow_overlap=True)


def test_an_interrupted_run_goes_on_with_the_annotations_it_began_with(home, tmp_path, monkeypatch):
    config = open_config(home / "cohort.yaml", out=str(tmp_path))
    train_interrupted(config, "gated_srp", after=3, monkeypatch=monkeypatch)
    file = home / "drawn" / "s003.geojson"
    before = file.read_bytes()
    try:
        draw(file, Tumor=(0, 0, 2, 5), pen=(0, 0, 6, 1))
        with pytest.raises(UserError, match=r"slide 's003' .*, or what was drawn on it, has changed since the run was"):
            train(config, arm="gated_srp", seed=42)
    finally:
        file.write_bytes(before)
    with pytest.raises(UserError, match=r"holds a run with other settings: regions\.cover 0\.5, asked 0\.6"):
        train(open_config(home / "cohort.yaml", out=str(tmp_path), regions__cover=0.6), arm="gated_srp", seed=42)
    train(config, arm="gated_srp", seed=42)


def test_what_is_wrong_with_regions_is_refused_before_the_first_bag(home, tmp_path):
    def begin(**changes):
        train(open_config(home / "cohort.yaml", out=str(tmp_path), **changes), arm="na", seed=42)

    with pytest.raises(UserError, match=r"no region of the class 'pne' \(classes: Tumor, pen\)"):
        begin(regions__exclude=["pne"])
    with pytest.raises(UserError, match=r"no patch is left.*; 11 more files of 24 cannot be used"):
        begin(regions__only=["pen"], regions__exclude=[])
    empty = tmp_path / "drawn"
    draw(empty / "s001.geojson", tumour=(0, 0, 3, 5), pen=(0, 0, 6, 1))
    with pytest.raises(UserError, match=r"no file of annotations in .* has the name of slide 's000'; 22 more files"):
        begin(regions__annotations=str(empty))
    with pytest.raises(UserError, match="nothing to choose by"):
        begin(regions__only=[], regions__exclude=[])
    assert not list(tmp_path.rglob("*.safetensors"))


def test_check_counts_the_patches_that_are_kept(home):
    found = gated_srp.check(home / "cohort.yaml")
    names = [f"s{i:03d}" for i in range(24)]
    kept = sum(len(inside(home, name)) for name in names)
    every = sum(len(prepare(feats(home, name), Preparation()).coords) for name in names)
    assert found.ok and found.facts["regions"] == {"kept": kept, "outside": every - kept}
    assert found.facts["patches"]["total"] == kept
    (note,) = (note for note in found.notes if note.kind == "regions")
    assert f"regions keep {kept:,} of {every:,} patches on 24 slides" in note.what
    wrong = gated_srp.check(load_config(home / "cohort.yaml", {"regions.exclude": ["pne"]}))
    assert any("no region of the class 'pne'" in note.what for note in wrong.errors)


def test_a_patients_slides_share_a_cap_by_what_the_regions_leave(tmp_path):
    frame = {"slide": ["a", "b"], "case": ["p", "p"], "file": []}
    for number, (name, columns) in enumerate((("a", 8), ("b", 2))):
        frame["file"].append(str(write_trident(tmp_path / "feats", name, make_slide(number, kept=1.0))))
        draw(tmp_path / "drawn" / f"{name}.geojson", tumour=(0, 0, columns, 7))
    settings = Preparation(regions=Regions(annotations=tmp_path / "drawn", only=("tumour",)), cap=35)
    bag = PatientDataset(SlideDataset(pd.DataFrame(frame), settings))[0]
    assert [rows for _, _, rows in bag.parts] == [28, 7]  # of 56 and 14


def test_paths_of_regions_are_relative_to_the_yaml(home):
    config = load_config(home / "cohort.yaml")
    assert config.regions.annotations == home / "drawn" and config.regions.only == ("tumour",)
    assert preparation(config).regions.exclude == ("pen",)
