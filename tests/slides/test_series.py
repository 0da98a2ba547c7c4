"""Which slides are extracted and how: DICOM series, OME-Zarr, lists, several devices, patches as images, options of other tools."""

import json
import shutil
import sys

import h5py
import numpy as np
import pytest
from images import mean_colour, picture, write_dicom, write_slide
from PIL import Image
from typer.testing import CliRunner

import gated_srp
from gated_srp.cli import app
from gated_srp.data import read_bag
from gated_srp.errors import UserError
from gated_srp.slides.reader import SlideImage, find_slides, slide_name

PIECE = [(64, 64, 256, 192)]
FEATURES = "20x_64px_0px_overlap/features_mean_colour"


def _slide(folder, name="a", *, seed=0, **settings):
    return write_slide(folder / f"{name}.tif", picture((400, 320), PIECE, seed=seed), **settings)


def _run(*arguments, **options):
    return CliRunner().invoke(
        app, ["extract", *map(str, arguments), "-e", "images:mean_colour", "--workers", "0"], **options
    )


def test_the_files_of_a_dicom_series_are_one_slide_and_give_the_features_of_the_same_slide_as_tiff(tmp_path):
    image = picture((400, 320), PIECE)
    write_dicom(tmp_path / "in/biopsy", image)
    _slide(tmp_path / "in", "plain")
    found = find_slides(tmp_path / "in")
    assert [(path.name, slide_name(path)) for path in found] == [("2.dcm", "biopsy"), ("plain.tif", "plain")]
    with SlideImage(found[0]) as slide:
        assert slide.info.size == (400, 320) and slide.info.mpp == 0.5 and len(slide.info.downsamples) == 2
    outcome = gated_srp.extract(tmp_path / "in", tmp_path / "out", encoder="images:mean_colour", workers=0)
    assert not outcome.failed and sorted(p.name for p in outcome.folder.iterdir()) == ["biopsy.h5", "plain.h5"]
    series, plain = (read_bag(outcome.folder / f"{name}.h5") for name in ("biopsy", "plain"))
    assert np.array_equal(series.coords, plain.coords) and np.allclose(series.features, plain.features)
    again = gated_srp.extract(tmp_path / "in", tmp_path / "out", encoder="images:mean_colour", workers=0)
    assert len(again.there) == 2


def test_two_series_in_one_folder_are_two_slides_named_by_their_uids_and_a_file_that_is_no_dicom_is_left_out(tmp_path):
    write_dicom(tmp_path / "in", picture((400, 320), PIECE), series="1.2.3.1")
    write_dicom(tmp_path / "in", picture((400, 320), PIECE, seed=1), series="1.2.3.2", start=10)
    assert [(p.name, slide_name(p)) for p in find_slides(tmp_path / "in")] == [
        ("12.dcm", "1.2.3.2"),
        ("2.dcm", "1.2.3.1"),
    ]
    (tmp_path / "in/broken.dcm").write_bytes(b"no")
    outcome = gated_srp.extract(tmp_path / "in", tmp_path / "out", encoder="images:mean_colour", workers=0)
    assert sorted(p.stem for p in outcome.folder.iterdir()) == ["1.2.3.1", "1.2.3.2"]
    assert [error.path.name for error in outcome.failed] == ["broken.dcm"]


def test_without_pydicom_a_folder_of_dicom_is_refused_and_others_are_not(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydicom", None)
    assert find_slides(_slide(tmp_path / "in").parent)
    (tmp_path / "in/0.dcm").write_bytes(b"")
    with pytest.raises(UserError, match="needs the package pydicom"):
        find_slides(tmp_path / "in")


@pytest.mark.parametrize("text", ["b.tif\n\nsub/c.tif\n", "wsi,mpp\nb.tif,0.5\nsub/c.tif,0.25\n"])
def test_a_list_names_the_slides_to_take(tmp_path, text):
    for name in ("a", "b", "sub/c"):
        _slide(tmp_path / "in", name, mpp=None if "mpp" in text else 0.5)
    (tmp_path / "list.csv").write_text(text)
    said = _run(tmp_path / "in", "-o", tmp_path / "out", "--list", tmp_path / "list.csv")
    assert said.exit_code == 0, said.output
    files = sorted((tmp_path / "out" / FEATURES).iterdir())
    assert [path.stem for path in files] == ["b", "c"]
    assert [read_bag(path).stride for path in files] == ([64, 128] if "mpp" in text else [64, 64])


@pytest.mark.parametrize(
    ("text", "said"),
    [("b.tif\nno.tif\n", "1 slide of 2 not found"), ("", "lists no slide"), ("a.tif\na.tif\n", "names a.tif twice")],
)
def test_a_list_that_cannot_be_followed_is_refused(tmp_path, text, said):
    for name in ("a", "b"):
        _slide(tmp_path / "in", name)
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(UserError, match=said):
        gated_srp.extract(tmp_path / "in", tmp_path / "out", only=tmp_path / "list.txt")


def test_the_options_of_trident_mean_what_they_mean_there(tmp_path):
    _slide(tmp_path / "in", mpp=0.25, downsamples=(2,))
    arguments = [
        "--wsi_dir",
        tmp_path / "in",
        "--job_dir",
        tmp_path / "out",
        "--mag",
        20,
        "--patch_size",
        32,
        "--task",
        "all",
    ]
    arguments += [
        "--patch_encoder",
        "images:mean_colour",
        "--batch_size",
        4,
        "--max_workers",
        0,
        "--min_tissue_proportion",
        0.5,
    ]
    said = CliRunner().invoke(app, ["extract", *map(str, arguments)])
    assert said.exit_code == 0, said.output
    with h5py.File(tmp_path / "out/20x_32px_0px_overlap/features_mean_colour/a.h5") as file:
        made = json.loads(file["features"].attrs["gated_srp"])
    assert (made["patch_size"], made["target_magnification"], made["tissue"]) == (32, 20.0, 0.5)
    refused = CliRunner().invoke(app, ["extract", *map(str, arguments[:4]), "--task", "seg"])
    assert isinstance(refused.exception, UserError) and "TRIDENT's tasks are not separate" in str(refused.exception)


def test_slides_that_were_left_out_make_the_exit_status_1_unless_errors_are_skipped(tmp_path):
    _slide(tmp_path / "in")
    (tmp_path / "in/text.svs").write_text("no")
    assert _run(tmp_path / "in", "-o", tmp_path / "out").exit_code == 1
    assert _run(tmp_path / "in", "-o", tmp_path / "out", "--skip-errors").exit_code == 0
    (tmp_path / "in/a.tif").unlink()
    assert _run(tmp_path / "in", "-o", tmp_path / "out", "--skip-errors").exit_code == 1  # nothing at all was done


def test_microns_per_pixel_that_were_given_are_those_of_the_file(tmp_path):
    _slide(tmp_path / "in", mpp=0.5)
    assert _run(tmp_path / "in", "-o", tmp_path / "out", "--mpp", 0.25).exit_code == 0
    bag = read_bag(tmp_path / "out" / FEATURES / "a.h5")
    assert (bag.mpp, bag.stride) == (0.25, 128)


def test_patches_are_written_as_images_also_of_slides_whose_features_are_there(tmp_path):
    slide = _slide(tmp_path / "in")
    options = {"encoder": "images:mean_colour", "workers": 0, "batch": 5}
    folder = gated_srp.extract(tmp_path / "in", tmp_path / "out", **options).folder
    before = (folder / "a.h5").read_bytes()
    outcome = gated_srp.extract(tmp_path / "in", tmp_path / "out", save_patches=True, **options)
    assert outcome.there == [slide] and (folder / "a.h5").read_bytes() == before
    images = sorted(folder.parent.glob("patch_images/a/*.png"))
    bag, pixels = read_bag(folder / "a.h5"), picture((400, 320), PIECE)
    assert sorted(path.stem for path in images) == sorted(f"{x}_{y}" for x, y in bag.coords.tolist())
    x, y = map(int, images[3].stem.split("_"))
    assert np.array_equal(np.asarray(Image.open(images[3])), pixels[y : y + 64, x : x + 64])
    shutil.rmtree(tmp_path / "out")
    again = gated_srp.extract(tmp_path / "in", tmp_path / "out", save_patches=True, **options)
    assert again.done == [slide] and len(list(folder.parent.glob("patch_images/a/*.png"))) == len(images)


def test_two_processes_share_the_slides_and_write_the_files_that_one_writes(tmp_path):
    for number in range(3):
        _slide(tmp_path / "in", f"s{number}", seed=number)
    (tmp_path / "in/text.svs").write_text("no")
    options, events = {"encoder": "images:mean_colour", "workers": 0}, []
    one = gated_srp.extract(tmp_path / "in", tmp_path / "one", **options)
    two = gated_srp.extract(tmp_path / "in", tmp_path / "two", devices=2, progress=events.append, **options)
    assert sorted(two.done) == sorted(one.done) and [error.path.name for error in two.failed] == ["text.svs"]
    for path in one.folder.iterdir():
        assert (two.folder / path.name).read_bytes() == path.read_bytes()
    assert [(event.done, event.total) for event in events] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    with pytest.raises(UserError, match="an encoder made here cannot be given to other processes"):
        gated_srp.extract(tmp_path / "in", tmp_path / "two", devices=2, encoder=mean_colour())
