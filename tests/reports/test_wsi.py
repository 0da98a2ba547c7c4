"""`--wsi` of heatmap, view and readers: one rule where images are found, and nothing that was asked for is left out in silence."""

import shutil

import pytest
from PIL import Image
from reports.viewer_folders import SIZE, features, image, run
from slides.images import picture, write_ome_zarr

from gated_srp import heatmap, readers, view
from gated_srp.errors import UserError
from gated_srp.files import write_image
from gated_srp.reports import heatmap as maps


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Two feature files; their images in folders below ``slides``."""
    home = tmp_path_factory.mktemp("wsi")
    (home / "feats").mkdir()
    for number, name in enumerate(("s1", "s2")):
        features(home / "feats", name, draw=number)
        (home / "slides" / f"uuid{number}").mkdir(parents=True)
        image(home / "slides" / f"uuid{number}").rename(home / "slides" / f"uuid{number}" / f"{name}.tif")
    for arm in ("na", "gated_srp"):
        run(home, arm)
    return home


@pytest.fixture
def sketch(monkeypatch):
    """Pictures of one pixel: drawing takes seconds and is tested elsewhere."""
    pixel = Image.new("RGB", (1, 1))
    monkeypatch.setattr(maps, "draw_maps", lambda panels, to, **_: write_image(pixel, to))
    monkeypatch.setattr(maps, "contact_sheet", lambda *_: pixel)


def test_a_folder_of_features_and_one_of_images_give_a_picture_and_a_contact_sheet_of_each_slide(
    home, tmp_path, sketch
):
    shutil.copytree(home / "feats", tmp_path / "feats")
    features(tmp_path / "feats", "s3")
    found = heatmap(home / "na" / "seed42", tmp_path / "feats", wsi=home / "slides", out=tmp_path / "out")
    names = [f"{slide}_attention_layer3{end}.png" for slide in ("s1", "s2") for end in ("", "_patches")]
    assert [path.name for path in found.written] == [*names, "s3_attention_layer3.png"] and not found.left_out
    assert [(note.kind, note.where) for note in found.warnings] == [("no_image", ("s3",))]


def test_the_viewer_finds_images_in_folders_below_and_says_which_slide_has_none(home, tmp_path):
    viewer = view([home / "feats", features(tmp_path, "s3")], home / "na" / "seed42", wsi=home / "slides")
    assert [viewer.scene(number).image for number in range(3)] == [
        (home / "slides" / f"uuid{number}" / f"s{number + 1}.tif").resolve() if number < 2 else None
        for number in range(3)
    ]
    assert [note.kind for note in viewer.scene(2).notes] == ["no_image"] and not viewer.scene(0).notes


@pytest.mark.parametrize("command", ["heatmap", "view", "readers"])
def test_a_missing_path_and_one_image_for_two_slides_are_refused_by_every_command(home, tmp_path, command):
    runs = [home / arm / "seed42" for arm in ("na", "gated_srp")]

    def ask(wsi):
        if command == "view":
            return view(home / "feats", runs, wsi=wsi)
        return (heatmap if command == "heatmap" else readers)(runs, home / "feats", wsi=wsi, out=tmp_path / "out")

    with pytest.raises(UserError, match="no such file or folder"):
        ask(home / "slidse")
    with pytest.raises(UserError, match="one image for the 2 slides"):
        ask(home / "slides" / "uuid0" / "s1.tif")
    assert not (tmp_path / "out").exists()


def test_readers_get_tissue_under_all_pairs_or_no_sheet(home, tmp_path):
    runs = [home / arm / "seed42" for arm in ("na", "gated_srp")]
    with pytest.raises(UserError, match="no slide image of it below"):
        readers(runs, home / "feats" / "s2.h5", wsi=home / "slides" / "uuid0", out=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_slide_in_ome_zarr_is_an_image_by_its_path_and_in_a_folder(home, tmp_path, sketch):
    pytest.importorskip("zarr")
    pixels = picture(SIZE, [(64, 64, 580, 390)])
    place = write_ome_zarr(tmp_path / "slides" / "deep" / "z1.ome.zarr", pixels, axes="cyx")
    file = shutil.copy(home / "feats" / "s1.h5", tmp_path / "z1.h5")
    found = heatmap(home / "na" / "seed42", file, wsi=tmp_path / "slides", out=tmp_path)
    assert [path.name for path in found.written] == [f"z1_attention_layer3{end}.png" for end in ("", "_patches")]
    assert view(file, home / "na" / "seed42", wsi=place).scene(0).image == place
    with pytest.raises(UserError, match="one image for the 2 slides"):
        view([file, home / "feats" / "s1.h5"], home / "na" / "seed42", wsi=place)
