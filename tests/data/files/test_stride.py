"""Declared and observed strides: which one is used, and what is said about it."""

import numpy as np
import pytest
import torch
from factories import make_slide, trident_attrs, write_clam, write_clam_pt, write_h5, write_stamp, write_trident
from hypothesis import given, settings
from hypothesis import strategies as st

from gated_srp.data import BagError, read_bag
from gated_srp.data.files.stride import on_lattice
from gated_srp.errors import UserError
from gated_srp.srp.graph import PatchGraph


def _write(path, cells, step, **attrs):
    return write_h5(path, attrs=attrs, features=np.ones((len(cells), 4), "f4"), coords=np.asarray(cells) * step)


def _without_encoder(bag):
    return [w for w in bag.warnings if w.kind != "encoder"]


@pytest.mark.parametrize(
    ("level0", "overlap", "stride"), [(20, 0, 256), (40, 0, 512), (40, 64, 384), (80, 128, 512), (20, 32, 224)]
)
def test_the_stride_of_trident_is_patch_size_less_overlap_at_level_0(level0, overlap, stride, tmp_path):
    bag = read_bag(write_trident(tmp_path, "s", make_slide(), level0=level0, overlap=overlap))
    assert (bag.stride, bag.patch_size_level0) == (stride, 256 * level0 // 20)
    less = ", less overlap" if overlap else ""
    assert bag.stride_source == f"declared on coords (patch_size_level0{less}), agrees with coordinates"
    assert _without_encoder(bag) == []


def test_clams_stride_is_patch_size_times_downsample(tmp_path):
    bag = read_bag(write_clam_pt(tmp_path, "s", make_slide(), size=256, downsample=4.0))
    assert bag.stride == bag.patch_size_level0 == 1024
    assert bag.stride_source == "declared on coords of s.h5 (patch_size and downsample), agrees with coordinates"


def test_without_a_declaration_the_stride_is_observed(tmp_path):
    bag = read_bag(write_clam(tmp_path, "s", make_slide(), step=448))
    assert (bag.stride, bag.stride_source) == (448, "observed from coordinates, nothing declared")


def test_attributes_count_on_coords_then_features_then_root(tmp_path):
    import h5py

    cells = make_slide().cells
    path = _write(tmp_path / "s.h5", cells, 512, patch_size_level0=512)
    assert "file root" in read_bag(path).stride_source
    with h5py.File(path, "a") as file:
        file["features"].attrs["patch_size_level0"] = 512
    assert "on features (" in read_bag(path).stride_source
    with h5py.File(path, "a") as file:
        file["coords"].attrs["patch_size_level0"] = 512
    assert "on coords (" in read_bag(path).stride_source


def test_the_folders_name_declares_where_attributes_lack_the_size(tmp_path):
    path = _write(tmp_path / "20x_256px_64px_overlap" / "s.h5", make_slide().cells, 384, level0_magnification=40)
    bag = read_bag(path)
    assert (bag.stride, bag.patch_size_level0) == (384, 512)
    assert "folder name 20x_256px_64px_overlap" in bag.stride_source


def test_a_declared_stride_that_leaves_no_neighbours_gives_way_to_the_observed_one(tmp_path):
    """The published loaders' fall-back: 256 on a 40x slide, and the correction is silently off."""
    bag = read_bag(_write(tmp_path / "s.h5", make_slide().cells, 512, patch_size_level0=256))
    assert bag.stride == 512
    assert (
        bag.stride_source == "observed from coordinates, disagrees with declared on file root (patch_size_level0): 256"
    )
    assert len(bag.warnings) == 1
    assert "declares a stride of 256" in bag.warnings[0].what
    assert "mostly 512 apart; 512 is used" in bag.warnings[0].what


def test_a_declared_stride_that_heaps_patches_into_one_cell_gives_way(tmp_path):
    """CLAM with a step smaller than the patch: the overlap is nowhere written."""
    bag = read_bag(_write(tmp_path / "s.h5", make_slide().cells, 128, patch_size_level0=256))
    assert bag.stride == 128
    assert len(bag.warnings) == 1


def test_a_declared_stride_that_keeps_the_lattice_stays_with_a_warning(tmp_path):
    """Patches of 512 that begin 64 after their cell and stand 496 apart: both strides give a full 4 x 4 block."""
    cells = np.array([[x, y] for x in range(4) for y in range(4)])
    coords = cells * 496 + 64
    attrs = {"patch_size_level0": 512}
    bag = read_bag(write_h5(tmp_path / "s.h5", attrs=attrs, features=np.ones((16, 4), "f4"), coords=coords))
    assert float(PatchGraph.from_coords(bag.coords, stride=512).neighbour_count.double().mean()) == 84 / 16
    assert (bag.stride, bag.stride_source) == (
        512,
        "declared on file root (patch_size_level0), but coordinates show 496",
    )
    assert len(bag.warnings) == 1
    assert "512 is used" in bag.warnings[0].what


def test_a_few_scattered_patches_do_not_overrule_the_file(tmp_path):
    bag = read_bag(_write(tmp_path / "s.h5", [[0, 0], [2, 0], [5, 7]], 512, patch_size_level0=512))
    assert (bag.stride, bag.warnings) == (512, ())
    assert bag.stride_source.endswith("too few patches to confirm")


def test_patches_that_share_no_row_keep_the_declared_stride(tmp_path):
    bag = read_bag(_write(tmp_path / "s.h5", [[0, 0], [1, 1], [2, 3]], 512, patch_size_level0=512))
    assert bag.stride == 512
    assert "not confirmed" in bag.stride_source


def test_a_single_patch_needs_no_stride(tmp_path):
    bag = read_bag(_write(tmp_path / "s.h5", [[3, 4]], 512))
    assert PatchGraph.from_coords(bag.coords, bag.features, stride=bag.stride).neighbour_count.tolist() == [0]


def test_a_given_stride_counts_and_disagreement_is_said(tmp_path):
    path = _write(tmp_path / "s.h5", make_slide().cells, 512, patch_size_level0=512)
    assert read_bag(path, stride=512).warnings == ()
    bag = read_bag(path, stride=1024)
    assert (bag.stride, bag.stride_source) == (1024, "given by the caller, coordinates show 512")
    assert bag.warnings[0].what.startswith("a stride of 1024 was given and is used")
    for bad in (0, -5, float("inf"), float("nan")):
        with pytest.raises(UserError, match="expected a positive number"):
            read_bag(path, stride=bad)


def test_a_given_stride_cures_scattered_patches(tmp_path):
    path = _write(tmp_path / "s.h5", [[0, 0], [1, 1], [2, 3]], 512)
    with pytest.raises(BagError, match="Pass stride="):
        read_bag(path)
    assert read_bag(path, stride=512).stride == 512


def test_a_small_error_of_the_declared_stride_does_not_drift(tmp_path):
    """1 % of a cell is a whole cell after a hundred columns."""
    cells = np.array([[x, y] for x in range(150) for y in range(3)])
    bag = read_bag(_write(tmp_path / "s.h5", cells, 509, patch_size_level0=512))
    assert bag.stride == 509
    assert bag.stride_source.startswith("observed, refines declared")


@pytest.mark.parametrize("value", ["None", "many", -512, 0, float("nan"), float("inf"), np.array([1, 2, 3]) * np.nan])
def test_a_senseless_declaration_counts_as_none(value, tmp_path):
    bag = read_bag(_write(tmp_path / "s.h5", make_slide().cells, 512, patch_size_level0=value))
    assert (bag.stride, bag.stride_source) == (512, "observed from coordinates, nothing declared")


def test_an_overlap_as_large_as_the_patch_is_not_believed(tmp_path):
    attrs = {k: v for k, v in trident_attrs("s").items() if k not in ("name", "savetodir")}
    bag = read_bag(_write(tmp_path / "s.h5", make_slide().cells, 512, **{**attrs, "overlap": 256}))
    assert bag.stride == 512


@settings(max_examples=40, deadline=None)
@given(st.floats(20, 900), st.integers(0, 2**31), st.floats(0, 1e-5))
def test_noise_on_microns_does_not_change_the_neighbours(tile, seed, noise):
    rng = np.random.default_rng(seed)
    cells = make_slide(seed, columns=30, rows=4).cells
    coords = torch.from_numpy(cells * tile + rng.uniform(-noise, noise, cells.shape) * tile)
    snapped, step = on_lattice(coords, tile)
    clean = PatchGraph.from_coords(torch.from_numpy(cells), stride=1)
    assert torch.equal(PatchGraph.from_coords(snapped, stride=step).neighbours, clean.neighbours)
    assert float((snapped - coords).abs().max()) < tile / 8


def test_positions_off_the_lattice_are_left_alone():
    coords = torch.tensor([[0.0, 0.0], [130.5, 0.0]], dtype=torch.float64)
    assert on_lattice(coords, 256.0)[0] is coords


def test_a_lattice_that_starts_anew_in_each_contour_keeps_its_positions(tmp_path):
    one, two = make_slide(1).cells * 512, make_slide(2).cells * 512 + np.array([9001, 77])
    coords = np.concatenate([one, two])
    bag = read_bag(write_h5(tmp_path / "s.h5", features=np.ones((len(coords), 4), "f4"), coords=coords))
    assert (bag.stride, bag.coords.tolist()) == (512, coords.tolist())


def test_microns_keep_the_declared_tile_size(tmp_path):
    bag = read_bag(write_stamp(tmp_path, "s", make_slide(), tile=256.0))
    assert bag.stride_source == "declared on file root (tile size in microns), agrees with coordinates"
