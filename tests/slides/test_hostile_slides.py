"""Slides whose headers lie, and paths that a feature file names: nothing is allocated or opened on their word."""

import struct
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from factories import make_slide, peak, write_clam
from images import mean_colour, picture, write_slide
from test_bounded import endless

from gated_srp import bounded
from gated_srp.data import read_header
from gated_srp.errors import UserError
from gated_srp.reports.draw import find_image
from gated_srp.reports.maps import Patches
from gated_srp.slides import reader
from gated_srp.slides.extract import Extraction, extract_slides
from gated_srp.slides.pretrained import load_weights
from gated_srp.slides.reader import SlideError, SlideImage
from gated_srp.slides.store import Trident
from gated_srp.slides.tiles import Tiling

_TAGS = {"width": 256, "height": 257, "tile_width": 322, "tile_height": 323}


def claiming(path: Path, **sizes: int) -> Path:
    """A small slide whose first level claims other sizes."""
    write_slide(path, picture((256, 256), [(40, 40, 150, 150)]))
    content = bytearray(path.read_bytes())
    (at,) = struct.unpack_from("<I", content, 4)
    (count,) = struct.unpack_from("<H", content, at)
    for entry in range(at + 2, at + 2 + 12 * count, 12):
        tag = struct.unpack_from("<H", content, entry)[0]
        for name, value in sizes.items():
            if tag == _TAGS[name]:
                struct.pack_into("<HII", content, entry + 2, 4, 1, value)
    path.write_bytes(content)
    return path


def _used(path: Path) -> None:
    with SlideImage(path) as slide:
        slide.overview(max(slide.info.size) / 64)
        slide.read(0, 0, level=0, size=(64, 64))


@pytest.mark.parametrize(
    "sizes",
    [
        {"width": 400_000, "height": 330_000},  # 123 GiB of pixels
        {"width": 2**31 - 1, "height": 2**31 - 1},
        {"tile_width": 2**20 * 16, "tile_height": 2**20 * 16},
        {"width": 2**20, "tile_width": 2**17, "tile_height": 2**17},
        {"width": 0},
    ],
)
def test_a_slide_whose_header_claims_what_is_not_there_is_refused_by_name(tmp_path, sizes):
    path, good = claiming(tmp_path / "s.tif", **sizes), write_slide(tmp_path / "good.tif", picture((256, 256), []))
    started = time.process_time()
    with pytest.raises(SlideError) as caught:
        _used(path)
    assert caught.value.path == path and caught.value.cure
    assert time.process_time() - started < 5
    with SlideImage(good) as slide:
        assert slide.info.size == (256, 256)


@pytest.mark.parametrize("options", [{}, {"bigtiff": True}, {"byteorder": ">"}])
def test_a_tag_that_claims_more_than_the_file_has_is_refused_before_any_library_sees_it(tmp_path, monkeypatch, options):
    path = tmp_path / "s.tif"
    with tifffile.TiffWriter(path, **options) as file:
        for level in (np.full((64, 64, 3), 9, np.uint8), np.full((32, 32, 3), 9, np.uint8)):
            file.write(level, tile=(16, 16), photometric="rgb", software="a scanner of the tests")
    with SlideImage(path) as slide:
        assert slide.info.size == (64, 64)
    with tifffile.TiffFile(path) as file:
        tag, big = file.pages[1].tags["Software"], file.is_bigtiff
    content = bytearray(path.read_bytes())
    struct.pack_into(options.get("byteorder", "<") + ("Q" if big else "I"), content, tag.offset + 4, 3_000_000_000)
    path.write_bytes(content)
    monkeypatch.setattr(reader, "_open", lambda path: pytest.fail("opened all the same"))
    monkeypatch.setattr(reader, "try_out", lambda *args, **kwargs: None)
    with pytest.raises(SlideError, match=r"its tag 305 claims 3,000,000,000 bytes in a file of") as caught:
        SlideImage(path)
    assert (caught.value.path, caught.value.kind) == (path, "oversized")


def test_a_slide_is_tried_out_before_it_is_opened(tmp_path, monkeypatch):
    def endless_there(look, path, *, seconds):
        raise bounded.ForeignFailure(f"not within {seconds} s", where=path, cure="Copy it.", kind="endless")

    monkeypatch.setattr(reader, "try_out", endless_there)
    monkeypatch.setattr(reader, "_open", lambda path: pytest.fail("opened all the same"))
    path = write_slide(tmp_path / "s.tif", np.zeros((64, 64, 3), np.uint8))
    with pytest.raises(SlideError, match="not within 10 s") as caught:
        SlideImage(path)
    assert (caught.value.path, caught.value.kind, caught.value.cure) == (path, "endless", "Copy it.")


def test_an_image_that_a_feature_file_names_is_opened_only_in_the_folder_of_slides(tmp_path):
    slides, elsewhere = tmp_path / "slides", tmp_path / "elsewhere"
    ours = write_slide(slides / "deep" / "mine.tif", np.zeros((64, 64, 3), np.uint8))
    theirs = write_slide(elsewhere / "secret.tif", np.zeros((64, 64, 3), np.uint8))
    header = read_header(write_clam(tmp_path, "s1", make_slide()))

    def chosen(noted: Path | str | None, given: Path | None) -> Path | None:
        return find_image(Patches.of(replace(header, wsi_path=None if noted is None else Path(noted))), given)

    assert chosen(theirs, None) is None and chosen(theirs, slides) is None
    assert chosen("../elsewhere/secret.tif", slides) is None
    assert chosen(ours, slides) == ours and chosen("deep/mine.tif", slides) == ours
    assert chosen("/scanner/mine.tif", slides) == ours, "the same name in the folder"
    assert chosen(None, theirs) == theirs, "the user named it"
    own = write_slide(slides / "s1.tif", np.zeros((64, 64, 3), np.uint8))
    assert chosen(None, slides) == own


# What `extract` finds and is given -------------------------------------------------------------------------------------


def test_features_that_hold_hdf5_in_a_loop_are_named_where_a_slide_is_extracted_again(tmp_path, monkeypatch):
    monkeypatch.setattr(bounded, "CPU_SECONDS", 0)
    slide = write_slide(tmp_path / "s.tif", picture((256, 256), [(40, 40, 150, 150)]))
    settings = Extraction(encoder=mean_colour(), tiling=Tiling(size=64), layout=Trident(tmp_path / "out"), workers=0)
    there = settings.layout.path(settings.job(slide))
    there.parent.mkdir(parents=True)
    endless(tmp_path, "features").rename(there)
    with pytest.raises(UserError, match="did not come to an end") as caught:
        extract_slides([slide], settings)
    assert caught.value.where == str(there)


def test_weights_of_400_bytes_cannot_ask_torch_for_gigabytes(tmp_path):
    model, path = torch.nn.Linear(3, 2), tmp_path / "w.pt"
    torch.save(model.state_dict(), path)
    load_weights(torch.nn.Linear(3, 2), path)
    with zipfile.ZipFile(path) as old:
        content = {name: old.read(name) for name in old.namelist()}
    call = b"ctorch\nFloatTensor\n(\x8a\x05" + struct.pack("<Q", 2**30)[:5] + b"tR"
    with zipfile.ZipFile(path, "w") as new:
        for name, data in content.items():
            new.writestr(name, b"\x80\x02" + call + b"." if name.endswith("data.pkl") else data)
    before = peak()
    with pytest.raises(UserError, match="not a readable weight file") as caught:
        load_weights(model, path)
    assert caught.value.where == str(path) and peak() - before < 2**31
