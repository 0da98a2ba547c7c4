"""Slides in OME-Zarr, written with the package zarr as OME-NGFF 0.4 and 0.5 lay them out, are read pixel for pixel."""

import json
import shutil

import numpy as np
import pytest
from images import PIXELS, picture, write_ome_zarr, write_slide

import gated_srp
from gated_srp.data.files.formats import read_bag
from gated_srp.errors import UserError
from gated_srp.slides.reader import SlideImage, find_slides, slide_name

zarr = pytest.importorskip("zarr")


@pytest.mark.parametrize("version", ["0.4", "0.5"])
@pytest.mark.parametrize("axes", ["tczyx", "cyx", "yxc"])
def test_pixels_levels_and_microns_are_those_that_were_written(tmp_path, axes, version):
    with SlideImage(write_ome_zarr(tmp_path / "a.ome.zarr", axes=axes, version=version)) as slide:
        assert slide.info.size == (260, 150) and slide.info.downsamples == (1.0, 2.0)
        assert (slide.info.mpp, slide.info.magnification) == (0.5, 20.0)
        np.testing.assert_array_equal(slide.read(37, 21, level=0, size=(90, 70)), PIXELS[21:91, 37:127])
        np.testing.assert_array_equal(slide.read(40, 20, level=1, size=(50, 30)), PIXELS[20:80:2, 40:140:2])
        beyond = slide.read(250, -10, level=0, size=(20, 20))  # no pixels: white
        np.testing.assert_array_equal(beyond[10:, :10], PIXELS[:10, 250:])
        assert (beyond[:10] == 255).all() and (beyond[:, 10:] == 255).all()


def test_sharded_arrays_and_other_units_are_read(tmp_path):
    shards = {"shards": (1, 1, 1, 128, 128), "unit": "nanometer", "mpp": 250.0, "version": "0.5"}
    with SlideImage(write_ome_zarr(tmp_path / "a.zarr", **shards)) as slide:
        assert (slide.info.mpp, slide.info.magnification) == (0.25, 40.0)
        np.testing.assert_array_equal(slide.read(0, 0, level=0, size=(260, 150)), PIXELS)


def test_of_bioformats2raw_the_first_series_is_the_slide(tmp_path):
    root = tmp_path / "in" / "b.zarr"
    write_ome_zarr(root / "0")
    (root / ".zattrs").write_text(json.dumps({"bioformats2raw.layout": 3}))
    assert find_slides(tmp_path / "in") == [root] and slide_name(root) == "b"
    with SlideImage(root) as slide:
        np.testing.assert_array_equal(slide.read(0, 0, level=0, size=(260, 150)), PIXELS)


def damaged(place, what):
    """What is wrong with it."""
    if what == "chunk":
        (place / "1" / "0" / "2" / "0" / "1" / "0").unlink()
        return "level '1' lacks 1 of its 18 chunks"
    notes = json.loads((place / ".zattrs").read_text())
    if what == "outside":
        notes["multiscales"][0]["datasets"][0]["path"] = "../other.zarr/0"
    if what == "nothing":
        del notes["multiscales"][0]["datasets"]
    (place / ".zattrs").write_text(json.dumps(notes))
    return {"outside": "lies outside of it", "nothing": "cannot be used"}[what]


@pytest.mark.parametrize("what", ["chunk", "outside", "nothing"])
def test_what_is_damaged_is_refused_by_name(tmp_path, what):
    place = write_ome_zarr(tmp_path / "a.zarr", chunk_key_encoding={"name": "v2", "separator": "/"})
    shutil.copytree(place, tmp_path / "other.zarr")
    said = damaged(place, what)
    with pytest.raises(UserError, match=said) as found:
        SlideImage(place)
    assert "a.zarr" in str(found.value)


@pytest.mark.parametrize(
    ("pixels", "said"),
    [
        (PIXELS.astype(np.uint16), "expected 8-bit RGB, found uint16"),
        (PIXELS[..., :1], r"expected 8-bit RGB.*\(1, 1, 1"),
    ],
)
def test_other_than_rgb_of_8_bits_is_refused(tmp_path, pixels, said):
    with pytest.raises(UserError, match=said):
        SlideImage(write_ome_zarr(tmp_path / "a.zarr", pixels))


def test_features_of_a_slide_are_those_of_the_same_slide_as_a_tiff(tmp_path):
    pixels = picture((400, 320), [(64, 64, 256, 192)])
    write_slide(tmp_path / "in" / "a.tif", pixels, downsamples=(2,))
    write_ome_zarr(tmp_path / "in" / "b.ome.zarr", pixels)
    outcome = gated_srp.extract(tmp_path / "in", tmp_path / "out", encoder="images:mean_colour", workers=0)
    assert not outcome.failed
    first, second = (read_bag(outcome.folder / f"{name}.h5") for name in "ab")
    assert len(first.features) > 3 and np.array_equal(first.coords, second.coords)
    np.testing.assert_array_equal(first.features, second.features)
