"""What a slide says about its scale and its margin: pixels decide over the objective, and QuPath's crop is told."""

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile
from factories import Slide, draw, make_slide, write_clam, write_trident
from images import mean_colour, picture, write_slide
from shapely import box

import gated_srp
from gated_srp.data.annotations import annotations_of
from gated_srp.data.files.formats import read_header
from gated_srp.errors import UserError
from gated_srp.reports.draw import in_image_pixels
from gated_srp.reports.heatmap import draw_slide
from gated_srp.reports.maps import Patches
from gated_srp.slides import reader
from gated_srp.slides.reader import SlideInfo, _describe

HOW = {"encoder": replace(mean_colour(), resize=32), "size": 32, "workers": 0}


class Stub:
    dimensions, level_downsamples = (4000, 3000), (1.0,)

    def __init__(self, power, mpp, **more):
        given = {"objective-power": power, "mpp-x": mpp, **more}
        self.properties = {f"openslide.{key}": value for key, value in given.items() if value is not None}


@pytest.mark.parametrize(
    ("power", "mpp", "expected", "notes"),
    [
        ("20", "0.23387573964497", 40.0, 1),  # MIRAX with a lens of 1.6 times
        ("40", "0.5", 20.0, 1),
        ("20", "0.499", 20.0, 0),
        ("40", "0.2265", 40.0, 0),
        ("60", "0.16", 60.0, 0),  # they agree: the number that was written stays
        ("20", None, 20.0, 0),
        (None, "0.25", 40.0, 0),
    ],
)
def test_where_objective_and_pixel_size_disagree_the_pixels_decide_with_a_word(power, mpp, expected, notes):
    info = _describe(Path("s.mrxs"), Stub(power, mpp))
    assert info.magnification == expected and len(info.notes) == notes and info.bounds == (0, 0)
    assert _describe(Path("s.mrxs"), Stub("20", "0.5", **{"bounds-x": "95", "bounds-y": "11"})).bounds == (95, 11)


def aperio(path, power, mpp):
    """A slide whose objective and pixel size are written in Aperio's words."""
    about = f"Aperio Image Library v1\n400x320 |AppMag = {power}|MPP = {mpp}"
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = picture((400, 320), [(64, 64, 256, 192)])
    tifffile.imwrite(
        path, pixels, tile=(128, 128), photometric="rgb", compression="jpeg", description=about, metadata=None
    )
    return path


def test_patches_have_the_size_on_the_glass_that_was_asked_for_and_do_not_mix_with_older_ones(tmp_path):
    slide = aperio(tmp_path / "in" / "a.svs", 20, 0.25)
    found = gated_srp.extract(slide, tmp_path / "out", **HOW)
    (note,) = found.notes
    assert "objective of 20x" in note.what and "40x" in note.what and found.done == [slide]
    assert gated_srp.extract(slide, tmp_path / "out", **HOW).there == [slide]
    with h5py.File(found.folder / "a.h5", "r+") as file:
        assert file["coords"].attrs["patch_size_level0"] == 64  # 32 at 20x: 16 um of 0.25 um per pixel
        file["coords"].attrs["level0_magnification"] = 20.0  # as earlier versions read it
    with pytest.raises(UserError, match=r"was extracted as of 20x.*which is 40x"):
        gated_srp.extract(slide, tmp_path / "out", **HOW)
    known = gated_srp.extract(slide, tmp_path / "known", mpp=0.5, **HOW)  # whoever names the size is believed
    assert not known.notes and read_header(known.folder / "a.h5").patch_size_level0 == 32


# QuPath counts from the corner of what was scanned ---------------------------------------------------------------------


@pytest.fixture
def margin(monkeypatch):
    """Every slide has an empty margin, as MIRAX has."""
    describe = _describe
    monkeypatch.setattr(reader, "_describe", lambda *slide: replace(describe(*slide), bounds=(40, 30)))


def test_extracting_by_geojson_of_a_slide_with_a_margin_names_the_shift(tmp_path, margin):
    slide = write_slide(tmp_path / "in" / "a.tif", picture((400, 320), [(64, 64, 256, 192)]))
    draw(tmp_path / "drawn" / "a.geojson", tumour=box(64, 64, 200, 256))
    rule = {"annotations": tmp_path / "drawn", "only": "tumour"}
    (note,) = gated_srp.extract(slide, tmp_path / "out", regions=rule, **HOW).notes
    assert note.kind == "qupath" and "(40, 30)" in note.what and note.where == ("a.tif",)


def test_maps_and_exports_of_a_slide_with_a_margin_name_the_shift(tmp_path, margin, monkeypatch):
    slide = write_slide(tmp_path / "a.tif", np.full((320, 400, 3), 255, np.uint8))
    file = write_clam(tmp_path, "a", Slide(np.array([(0, 0), (1, 1), (2, 0)]), np.zeros((3, 4), np.float32)), step=64)
    (tmp_path / "mine.csv").write_text("score\n" + "\n".join(map(str, range(len(read_header(file).coords)))))
    monkeypatch.setattr("gated_srp.reports.heatmap.draw_maps", lambda *_, **how: None)
    monkeypatch.setattr("gated_srp.reports.heatmap.contact_sheet", lambda *_: None)
    monkeypatch.setattr("gated_srp.reports.heatmap.write_image", lambda *_: None)
    drawn = draw_slide([], file, tmp_path, value=str(tmp_path / "mine.csv"), image=slide, export=["geojson"])
    assert [note.kind for note in drawn.warnings] == ["qupath"] and "(40, 30)" in drawn.warnings[0].what
    assert not draw_slide([], file, tmp_path, value=str(tmp_path / "mine.csv"), image=slide, export=["csv"]).warnings


@pytest.mark.parametrize(
    ("slide", "ending", "bounds", "told"),
    [
        ("a.mrxs", ".geojson", None, "openslide.bounds-x"),
        ("a.mrxs", ".geojson", (9, 7), "(9, 7)"),
        ("a.mrxs", ".geojson", (0, 0), None),
        ("a.svs", ".geojson", None, None),
        ("a.mrxs", ".csv", None, None),
    ],
)
def test_annotations_beside_features_are_told_by_the_image_or_by_its_ending(tmp_path, slide, ending, bounds, told):
    header = replace(read_header(write_trident(tmp_path, "a", make_slide(1))), wsi_path=Path("/scans") / slide)
    path = tmp_path / f"a{ending}"
    if ending == ".csv":
        path.write_text("x,y,tumour\n0,0,1\n")
    else:
        draw(path, tumour=box(0, 0, 9, 9))
    notes = [note for note in annotations_of(path, header, bounds).notes if note.kind == "qupath"]
    assert [told in note.what for note in notes] == ([True] if told else [])
    info = SlideInfo(Path("b.mrxs"), (99999, 99999), (1.0,), 0.5, 20.0, bounds=(3, 4))
    patches = in_image_pixels(Patches.of(replace(header, wsi_path=None, level0_size=None)), info)
    assert (patches.bounds, patches.header.wsi_path) == ((3, 4), Path("b.mrxs"))
