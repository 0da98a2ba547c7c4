"""Which files of a folder are bags."""

import os

import h5py
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
from safetensors.numpy import save_file

from gated_srp.data import BagError, find_bags, read_bag
from gated_srp.data.files.siblings import look_into, nothing_found
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
    assert find_bags(tmp_path) == sorted([uni, giga])
    assert find_bags(tmp_path, encoder="UNI2-h") == [uni]


def test_a_folder_that_is_not_there_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        find_bags(tmp_path / "x")


def clam_of(folder, *, coords_only: bool) -> None:
    """Two slides of CLAM: pt_files, and h5_files with or without the features."""
    for name in ("a", "b"):
        path = write_clam(folder, name, make_slide(ord(name)))
        if coords_only:
            with h5py.File(path, "a") as file:
                del file["features"]


@pytest.mark.parametrize("coords_only", [True, False])
def test_clams_pt_files_named_directly_are_the_features_with_positions_from_h5_files(coords_only, tmp_path):
    clam_of(tmp_path, coords_only=coords_only)
    found = find_bags(tmp_path / "pt_files")
    assert [path.name for path in found] == ["a.pt", "b.pt"]
    bag, slide = read_bag(found[0]), make_slide(ord("a"))
    assert torch.equal(bag.features, torch.from_numpy(slide.features))
    assert torch.equal(bag.coords, torch.from_numpy(slide.cells * 512)) and bag.stride == 512


def test_of_two_files_of_a_slide_the_one_with_features_is_the_bag(tmp_path):
    clam_of(tmp_path / "coords", coords_only=True)
    assert [path.name for path in find_bags(tmp_path / "coords")] == ["a.pt", "b.pt"]
    clam_of(tmp_path / "whole", coords_only=False)
    assert [path.name for path in find_bags(tmp_path / "whole")] == ["a.h5", "b.h5"]
    for name in ("a", "b"):  # all in one folder
        (tmp_path / "coords" / "pt_files" / f"{name}.pt").rename(tmp_path / "coords" / "h5_files" / f"{name}.pt")
    found = find_bags(tmp_path / "coords" / "h5_files")
    assert [path.name for path in found] == ["a.pt", "b.pt"] and read_bag(found[1]).stride == 512


def test_slide_embeddings_beside_patch_features_are_left_out_and_counted(tmp_path):
    patches = write_trident(tmp_path, "s", make_slide())
    titan = patches.parents[1] / "slide_features_titan" / "s.h5"
    write_h5(titan, features=np.zeros(768, "f4"))
    found = look_into(tmp_path)
    assert (found.bags, found.embeddings) == ([patches], [titan])
    with pytest.raises(UserError, match="1 slide embedding, one vector per slide, but no features of patches"):
        raise nothing_found(titan.parent)


def test_a_folder_of_positions_alone_says_where_features_may_be(tmp_path):
    clam_of(tmp_path, coords_only=True)
    with pytest.raises(BagError, match=r"positions but no features \(found: coords\).*pt_files") as caught:
        read_bag(tmp_path / "h5_files" / "a.h5")
    assert caught.value.kind == "no_features"


def test_positions_may_lie_in_a_folder_of_their_own(tmp_path):
    slide = make_slide(5)
    path = write_clam_pt(tmp_path, "s", slide)
    (tmp_path / "results").mkdir()
    (tmp_path / "patches").rename(tmp_path / "results" / "patches")
    with pytest.raises(BagError, match=r"patches/s\.h5.*name their folder with `coords`"):
        read_bag(path)
    for named in ("results", "results/patches"):
        bag = read_bag(path, coords=tmp_path / named)
        assert torch.equal(bag.coords, torch.from_numpy(slide.cells * 512))
        assert bag.stride_source == "declared on coords of s.h5 (patch_size and downsample), agrees with coordinates"
    (tmp_path / "empty").mkdir()
    with pytest.raises(BagError, match=r"no positions in .*empty \(looked for s_patches\.h5, s\.h5") as caught:
        read_bag(path, coords=tmp_path / "empty")
    assert caught.value.kind == "no_coords"


def test_a_named_folder_of_positions_wins_over_those_in_the_file(tmp_path):
    slide = make_slide(5)
    path = write_clam(tmp_path, "s", slide, step=512)
    write_h5(tmp_path / "other" / "s.h5", coords=slide.cells * 1024)
    assert (read_bag(path).stride, read_bag(path, coords=tmp_path / "other").stride) == (512, 1024)


def test_torchmils_folders_of_hdf5_files_are_told_apart(tmp_path):
    slide = make_slide()
    arrays = {
        "features": slide.features,
        "coords": slide.cells * 512,
        "labels": np.zeros(1),
        "inst_labels": np.zeros(3),
    }
    for folder, array in arrays.items():
        write_h5(tmp_path / folder / "s.h5", **{folder: array})
    (found,) = find_bags(tmp_path)
    assert found == tmp_path / "features" / "s.h5" and read_bag(found).stride == 512


def test_the_models_of_runs_below_a_folder_are_no_features(tmp_path):
    path = write_npz(tmp_path, "s", make_slide())
    run = tmp_path / "runs" / "mine" / "gated_srp" / "seed42"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("name: mine")
    save_file({"head.weight": np.zeros((2, 2), "f4")}, run / "model.safetensors")
    torch.save({"format": 1}, run / "state.pt")
    assert find_bags(tmp_path) == [path]


def test_of_many_arrays_a_few_are_named(tmp_path):
    path = write_h5(tmp_path / "s.h5", **{f"array_{i:02d}": np.zeros(2) for i in range(40)})
    with pytest.raises(BagError, match=r"no features \(found: array_00, .*array_07 and 32 more; looked for"):
        read_bag(path)
