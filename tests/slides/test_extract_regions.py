"""`extract` on drawn regions: which patches are kept, and what is there already."""

import json
from dataclasses import replace

import h5py
import pytest
import shapely
from factories import draw
from images import mean_colour, picture, write_slide
from typer.testing import CliRunner

import gated_srp
from gated_srp.cli import app
from gated_srp.data import read_bag
from gated_srp.data.regions import Regions
from gated_srp.errors import UserError
from gated_srp.slides.extract import Extraction, extract_slides
from gated_srp.slides.store import AtlasPatch, Trident
from gated_srp.slides.tiles import Tiling

PIECE = [(64, 64, 256, 192)]  # 12 patches of 64


@pytest.fixture
def home(tmp_path):
    for name in "ab":
        write_slide(tmp_path / "in" / f"{name}.tif", picture((400, 320), PIECE))
    draw(tmp_path / "drawn" / "a.geojson", tumour=shapely.box(64, 64, 200, 256), pen=shapely.box(0, 0, 400, 140))
    return tmp_path


def settings(home, layout=Trident, **rule):
    regions = Regions(annotations=home / "drawn", **rule) if rule else None
    encoder = replace(mean_colour(), resize=64)
    how = {"workers": 0, "batch": 5, "regions": regions}
    return Extraction(encoder=encoder, tiling=Tiling(size=64), layout=layout(home / "out"), **how)


def coords(how, slide):
    return {tuple(corner) for corner in read_bag(how.layout.path(how.job(slide))).coords.tolist()}


@pytest.mark.parametrize("layout", [Trident, AtlasPatch])
def test_patches_inside_and_outside_of_drawn_regions(home, layout):
    slide = home / "in" / "a.tif"
    how = settings(home, layout, only=("Tumor",), exclude=("pen",))
    assert extract_slides([slide], how).done == [slide]
    every = {(x, y) for x in (64, 128, 192, 256) for y in (64, 128, 192)}
    # tumour ends 8 pixels into the third column, the pen 12 pixels into the second row
    assert coords(how, slide) == {(x, y) for x, y in every if x < 192 and y >= 128}
    with h5py.File(how.layout.path(how.job(slide))) as file:
        made = json.loads(file[how.layout.features(how.job(slide))].attrs["gated_srp"])
    assert made["regions"]["only"] == ["Tumor"] and len(made["regions"]["sha256"]) > 30


def test_there_already_are_files_of_the_same_regions_alone(home):
    slide = home / "in" / "a.tif"
    how = settings(home, only=("tumour",))
    extract_slides([slide], how)
    assert extract_slides([slide], how).there == [slide]
    for other in (settings(home), settings(home, only=("pen",)), settings(home, only=("tumour",), cover=0.1)):
        with pytest.raises(UserError, match=r"was extracted with other settings \(regions"):
            extract_slides([slide], other)
    draw(home / "drawn" / "a.geojson", tumour=shapely.box(64, 64, 130, 256))
    with pytest.raises(UserError, match=r"was extracted with other settings \(regions"):
        extract_slides([slide], how)
    how.layout.path(how.job(slide)).unlink()
    plain = settings(home)
    extract_slides([slide], plain)
    with h5py.File(plain.layout.path(plain.job(slide))) as file:
        assert "regions" not in json.loads(file["features"].attrs["gated_srp"])
    with pytest.raises(UserError, match=r"was extracted with other settings \(regions None"):
        extract_slides([slide], how)


def test_slides_without_a_file_are_left_out_by_name_or_used_whole_with_a_word(home):
    slides = [home / "in" / "a.tif", home / "in" / "b.tif"]
    found = extract_slides(slides, settings(home, exclude=("pen",)))
    assert found.done == slides[:1] and [error.kind for error in found.failed] == ["unannotated"]
    assert "has the name of slide 'b'" in found.failed[0].what and found.failed[0].path == slides[1]
    how = settings(home, exclude=("pen",), unannotated="whole")
    how.layout.path(how.job(slides[0])).unlink()
    found = extract_slides(slides, how)
    assert found.done == slides and len(coords(how, slides[1])) == 12
    (note,) = found.notes
    assert note.where == (str(slides[1]),) and "the whole slide is used" in note.what
    draw(home / "drawn" / "b.geojson", tumour=shapely.box(0, 0, 20, 20))
    none = replace(settings(home, only=("tumour",)), layout=Trident(home / "other"))
    (error,) = extract_slides(slides[1:], none).failed
    assert error.kind == "regions" and "no patch is left: none of 12 is at least 50 % inside tumour" in error.what


def test_the_command_takes_classes_and_refuses_one_that_nobody_drew(home, monkeypatch):
    seen = {}
    monkeypatch.setattr(gated_srp, "extract", lambda *args, **how: seen.update(how))
    base = ["extract", str(home / "in"), "-o", str(home / "out"), "--annotations", str(home / "drawn")]
    CliRunner().invoke(app, [*base, "--only", "tumour", "--exclude", "pen", "--exclude", "fold", "--cover", "0.3"])
    assert seen["regions"]["only"] == ["tumour"] and seen["regions"]["exclude"] == ["pen", "fold"]
    assert seen["regions"]["cover"] == 0.3 and seen["regions"]["annotations"] == home / "drawn"
    monkeypatch.undo()
    rule = {"annotations": home / "drawn", "exclude": "pne"}
    with pytest.raises(UserError, match=r"no region of the class 'pne' \(classes: pen, tumour\)"):
        gated_srp.extract(home / "in", home / "out", encoder=mean_colour(), regions=rule, workers=0)
    with pytest.raises(UserError, match="nothing to choose by"):
        gated_srp.extract(home / "in", home / "out", encoder=mean_colour(), regions={"annotations": "x"}, workers=0)
    assert not list(home.rglob("*.h5"))


def test_features_without_ink_are_others_than_those_with_it(home):
    slide, how = home / "in" / "a.tif", settings(home)
    extract_slides([slide], how)
    with pytest.raises(UserError, match="exclude_pen None, asked True"):
        extract_slides([slide], replace(how, tiling=Tiling(size=64, exclude_pen=True)))
