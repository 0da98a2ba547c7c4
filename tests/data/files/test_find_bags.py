"""Which files of a folder are bags."""

import os

import numpy as np
import pytest
import torch
from broken_files import BROKEN
from factories import (
    LAYOUTS,
    make_slide,
    write_atlaspatch,
    write_clam,
    write_clam_pt,
    write_h5,
    write_npz,
    write_trident,
    write_trident_pt,
)

from gated_srp.data import find_bags, read_bag
from gated_srp.errors import UserError


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_slide_of_a_layout_is_found_once_and_opens(layout, tmp_path):
    written = [LAYOUTS[layout](tmp_path, name, make_slide()) for name in ("b", "a")]
    assert find_bags(tmp_path) == sorted(written)
    assert [len(read_bag(path).coords) for path in find_bags(tmp_path)] == [len(make_slide().cells)] * 2


def test_positions_alone_are_left_out_and_atlaspatch_is_not(tmp_path):
    slide = make_slide()
    clam = write_clam_pt(tmp_path / "clam", "s", slide)
    atlas = write_atlaspatch(tmp_path / "atlas", "s", slide, encoders={"uni_v2": 12})
    trident = write_trident_pt(tmp_path / "trident", "s", slide)
    odd = write_h5(tmp_path / "odd_patches.h5", features=slide.features, coords=slide.cells)
    assert find_bags(tmp_path) == sorted([clam, atlas, trident, odd])


def test_other_files_are_left_out(tmp_path):
    path = write_npz(tmp_path, "s", make_slide())
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "._s.npz").write_text("macOS")
    (tmp_path / ".hidden").mkdir()
    np.savez(tmp_path / ".hidden" / "x.npz", features=np.zeros((2, 2)))
    assert find_bags(tmp_path) == [path]


def test_links_to_folders_are_followed_once(tmp_path):
    path = write_clam(tmp_path / "real" / "deep", "s", make_slide())
    os.symlink(tmp_path, tmp_path / "real" / "deep" / "back")  # a loop
    assert find_bags(tmp_path) == [path]
    (tmp_path / "linked").mkdir()
    os.symlink(tmp_path / "real" / "deep" / "h5_files", tmp_path / "linked" / "there")
    assert [p.name for p in find_bags(tmp_path / "linked")] == ["s.h5"]


def test_broken_files_are_found_so_that_they_can_be_named(tmp_path):
    for name in ("cut short", "zero bytes", "a symlink loop"):
        BROKEN[name][1](tmp_path / f"{name}.h5")
    (tmp_path / "patches").mkdir()
    BROKEN["text renamed .h5"][1](tmp_path / "patches" / "t.h5")
    os.symlink("gone", tmp_path / "dangling.h5")
    assert [p.name for p in find_bags(tmp_path)] == ["a symlink loop.h5", "cut short.h5", "t.h5", "zero bytes.h5"]


def test_folders_of_another_encoder_are_left_out_where_one_is_named(tmp_path):
    slide = make_slide()
    uni, giga = (write_trident(tmp_path, "s", slide, encoder=name) for name in ("uni_v2", "gigapath"))
    titan = tmp_path / "20x_256px_0px_overlap" / "slide_features_titan" / "s.pt"
    titan.parent.mkdir()
    torch.save(torch.zeros(768), titan)
    assert find_bags(tmp_path) == sorted([uni, giga, titan])
    assert find_bags(tmp_path, encoder="UNI2-h") == [uni]


def test_a_folder_that_is_not_there_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        find_bags(tmp_path / "x")
