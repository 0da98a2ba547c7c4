"""Prepared bags: the cap, the order of rows, the graph of what is kept, and the loader that goes through them."""

import time

import numpy as np
import pandas as pd
import pytest
import torch
from factories import Slide, make_slide, write_clam, write_h5, write_trident
from hypothesis import given
from hypothesis import strategies as st

from gated_srp.config import load_config
from gated_srp.data import BagCache, BagError, BagLoader, Preparation, SlideDataset, prepare, read_bag
from gated_srp.data.prepared import capped_rows, kept_rows
from gated_srp.errors import UserError
from gated_srp.srp.graph import PatchGraph
from gated_srp.training.inputs import slide_dataset

POSITIONS = st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=1, max_size=40)


def naive_cap(coords, cap):
    """The paper's rule for capping a bag, word by word."""
    order = sorted(range(len(coords)), key=lambda row: (coords[row][0], coords[row][1]))
    return [order[int(place)] for place in np.linspace(0, len(coords) - 1, cap)]


def lists(graph):
    return [graph.neighbours[a:b].tolist() for a, b in zip(graph.offsets[:-1], graph.offsets[1:], strict=True)]


def slides_of(files):
    names = [file.stem for file in files]
    return pd.DataFrame({"slide": names, "case": [f"p_{name}" for name in names], "file": files})


@pytest.fixture
def files(tmp_path):
    return [write_trident(tmp_path / "job", f"s{i}", make_slide(i, columns=6 + i)) for i in range(4)]


@given(POSITIONS, st.integers(1, 45))
def test_the_cap_keeps_the_protocols_rows(positions, cap):
    coords = torch.tensor(positions)
    rows = capped_rows(coords, cap)
    if len(positions) <= cap:
        assert rows is None
    else:
        assert rows.tolist() == naive_cap(positions, cap)


def test_the_cap_worked_by_hand():
    coords = torch.tensor([[2, 0], [0, 1], [1, 5], [0, 0], [1, 4]])  # by x, then y: rows 3, 1, 4, 2, 0
    assert capped_rows(coords, 3).tolist() == [3, 4, 0]
    assert capped_rows(coords, 4).tolist() == [3, 1, 4, 0]  # places 0, 1.33, 2.67, 4
    assert capped_rows(coords, 5) is None


@given(POSITIONS, st.integers(1, 45))
def test_raster_order_is_row_by_row_and_keeps_the_same_patches(positions, cap):
    coords = torch.tensor(positions)
    rows = kept_rows(coords, Preparation(order="raster", cap=cap))
    expected = range(len(positions)) if len(positions) <= cap else naive_cap(positions, cap)
    assert rows.tolist() == sorted(expected, key=lambda row: (positions[row][1], positions[row][0], row))


@pytest.mark.parametrize("lattice", ["floor", "exact"])
@pytest.mark.parametrize("order", ["file", "raster"])
@given(st.integers(0, 10**6), st.integers(2, 60))
def test_the_graph_of_a_capped_bag_is_the_graph_built_on_what_is_kept(tmp_path_factory, lattice, order, seed, cap):
    rng = np.random.default_rng(seed)
    slide = make_slide(seed, columns=8, rows=9)
    again = rng.integers(0, len(slide.cells), 5)  # some cells are shared
    cells = np.concatenate([slide.cells, slide.cells[again]])
    features = rng.standard_normal((len(cells), 5)).astype(np.float32)
    path = tmp_path_factory.mktemp("bag") / "s.h5"
    write_h5(path, features=features, coords=cells * 512)
    found = prepare(path, Preparation(stride=512, cap=cap, lattice=lattice, order=order))
    rows = kept_rows(torch.from_numpy(cells * 512), Preparation(cap=cap, order=order))
    rows = torch.arange(len(cells)) if rows is None else rows
    assert torch.equal(found.coords, torch.from_numpy(cells * 512)[rows])
    assert torch.equal(found.features, torch.from_numpy(features)[rows])
    try:
        expected = PatchGraph.from_coords(found.coords, found.features, stride=512, lattice=lattice)
    except UserError:  # too thin for one who does not know of the cap
        assert found.graph.neighbour_count.double().mean() < 0.1
        return
    assert lists(found.graph) == lists(expected)
    assert torch.equal(found.graph.homogeneity, expected.homogeneity)
    assert found.graph.lengths == (len(rows),)


def test_a_cap_that_leaves_no_neighbours_is_a_note_not_an_error(tmp_path):
    cells = np.stack([np.zeros(64, int), np.arange(64)], 1)  # one column: every fourth is left
    path = write_trident(tmp_path, "s", Slide(cells, np.ones((64, 3), np.float32)))
    bag = prepare(path, Preparation(cap=16))
    assert (bag.num_patches, len(bag.features), len(bag.graph.neighbours)) == (64, 16, 0)
    assert any(
        "16 of 64 patches kept; neighbours per patch 1.97 before, 0.00 after" in note.what for note in bag.warnings
    )


def test_without_settings_a_bag_is_as_its_file(files):
    bag, file = prepare(files[0], Preparation()), read_bag(files[0])
    assert torch.equal(bag.features, file.features)
    assert torch.equal(bag.coords, file.coords)
    assert (bag.stride, bag.encoder, bag.unit, bag.num_patches) == (512.0, "uni_v2", "px", len(file.coords))
    expected = PatchGraph.from_coords(file.coords, file.features, stride=512)
    assert lists(bag.graph) == lists(expected)
    assert torch.equal(bag.graph.homogeneity, expected.homogeneity)


def test_homogeneity_is_of_the_rounded_features(files):
    bag = prepare(files[0], Preparation(dtype="bfloat16"))
    assert bag.features.dtype == torch.bfloat16
    assert torch.equal(bag.features, read_bag(files[0]).features.bfloat16())
    expected = PatchGraph.from_coords(bag.coords, bag.features, stride=512)
    assert torch.equal(bag.graph.homogeneity, expected.homogeneity)


def test_the_number_of_threads_does_not_change_a_bag(tmp_path):
    path = write_trident(tmp_path, "s", make_slide(0, columns=60, rows=60, width=64))
    one = prepare(path, Preparation())
    torch.set_num_threads(2)
    try:
        two = prepare(path, Preparation())
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one.graph.homogeneity, two.graph.homogeneity)


def test_an_item_knows_its_slide_patient_and_target(files):
    data = SlideDataset(slides_of(files), Preparation(), targets=torch.tensor([3, 1, 0, 2]))
    bag = data[2]
    assert (len(data), bag.index, bag.slide, bag.case, bag.target.item()) == (4, 2, "s2", "p_s2", 0)
    assert bag.path == files[2]
    assert SlideDataset(slides_of(files), Preparation())[0].target is None


def test_a_dataset_follows_the_config(files, tmp_path):
    (tmp_path / "c.yaml").write_text(
        "features: job\nstride: 512\nwindow: 5\nlattice: exact\norder: raster\ncap: 9\ncache: {folder: warm, dtype: float16}\n"
    )
    data = slide_dataset(load_config(tmp_path / "c.yaml"), slides_of(files))
    assert data.settings == Preparation(stride=512, window=5, lattice="exact", order="raster", cap=9, dtype="float16")
    assert data[0].graph.window == 5
    assert len(list((tmp_path / "warm").glob("s0-*.safetensors"))) == 1


def test_features_that_are_not_finite_are_refused_with_a_cure(tmp_path):
    slide = make_slide(0)
    slide.features[5, 3] = np.nan
    data = SlideDataset(slides_of([write_clam(tmp_path, "s7", slide)]), Preparation())
    with pytest.raises(UserError, match=r"s7\.h5 \(slide 's7'\): 1 of \d+ rows .* not finite .* row 5\. Extract"):
        data[0]


def test_features_too_large_for_half_precision_are_refused(tmp_path):
    slide = make_slide(0)
    slide.features[0, 0] = 1e5
    path = write_clam(tmp_path, "s", slide)
    with pytest.raises(UserError, match="beyond 65504"):
        prepare(path, Preparation(dtype="float16"))
    assert prepare(path, Preparation(dtype="bfloat16")).features[0, 0] == torch.tensor(1e5).bfloat16()


def test_a_wrong_stride_is_refused_by_file_even_when_capped(files):
    with pytest.raises(UserError, match=r"s3\.h5: stride 7 leaves 0\.000 neighbours"):
        prepare(files[3], Preparation(stride=7, cap=20))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("cached", [False, True])
def test_the_loader_follows_the_order_it_is_given(files, tmp_path, workers, cached):
    cache = BagCache(tmp_path / "warm") if cached else None
    data = SlideDataset(slides_of(files), Preparation(cap=20), targets=torch.arange(4), cache=cache)
    with BagLoader(data, workers=workers) as loader:
        for order in ([2, 0, 3, 1], [1, 1], [], [3]):
            bags = list(loader.epoch(order))
            assert [bag.index for bag in bags] == order
            for bag in bags:
                plain = prepare(files[bag.index], Preparation(cap=20))
                assert bag.target.item() == bag.index
                assert torch.equal(bag.features, plain.features)
                assert torch.equal(bag.graph.homogeneity, plain.graph.homogeneity)
                assert lists(bag.graph) == lists(plain.graph)


def test_an_epoch_left_early_does_not_disturb_the_next(files):
    with BagLoader(SlideDataset(slides_of(files), Preparation()), workers=1) as loader:
        for bag in loader.epoch([0, 1, 2, 3]):
            assert bag.index == 0
            break
        assert [bag.index for bag in loader.epoch([3, 2])] == [3, 2]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("cached", [False, True])
def test_a_bad_file_is_named_after_the_good_ones_came(files, tmp_path, workers, cached):
    files[2].write_bytes(b"")
    cache = BagCache(tmp_path / "warm") if cached else None
    with BagLoader(SlideDataset(slides_of(files), Preparation(), cache=cache), workers=workers) as loader:
        assert [bag.index for bag in loader.epoch([0, 3])] == [0, 3]
        epoch = loader.epoch([1, 2])
        assert next(epoch).index == 1
        with pytest.raises(BagError, match=r"s2\.h5 \(slide 's2'\): the file has 0 bytes") as error:
            next(epoch)
        assert error.value.kind == "zero_bytes"


@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_draws_nothing_from_the_global_random_stream(files, workers):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with BagLoader(SlideDataset(slides_of(files), Preparation()), workers=workers) as loader:
        list(loader.epoch([0, 1]))
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_prepare_the_next_bag_meanwhile_and_open_files_themselves(files, tmp_path):
    data = SlideDataset(slides_of(files), Preparation(), cache=BagCache(tmp_path / "warm"))
    with BagLoader(data, workers=1) as loader:
        epoch = loader.epoch([0, 1, 2])
        next(epoch)
        deadline = time.monotonic() + 20
        while len(list((tmp_path / "warm").glob("*.safetensors"))) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(list((tmp_path / "warm").glob("*.safetensors"))) == 3


def test_little_shared_memory_means_reading_here(files, monkeypatch):
    monkeypatch.setattr("gated_srp.data.loader._ROOM", 2**80)
    with BagLoader(SlideDataset(slides_of(files), Preparation()), workers=1) as loader:
        assert "--shm-size" in loader.notes[0]
        assert [bag.index for bag in loader.epoch([1])] == [1]
