"""Files made to harm: claims beyond what is stored, bombs, damage anywhere. None gets what it claims, none crashes."""

import pickle
import struct
import sys
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from factories import LAYOUTS, make_slide, peak, write_clam, write_h5

from gated_srp.data import BagError, read_bag, read_header


def _kind(path) -> str:
    with pytest.raises(BagError) as caught:
        read_bag(path)
    return caught.value.kind


def _outcome(path) -> str:
    """Kind of the refusal, or the bag's shape."""
    try:
        return str(tuple(read_bag(path).features.shape))
    except BagError as error:
        return error.kind


def test_half_written_compressed_chunks_are_refused(tmp_path):
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file.create_dataset("features", (100, 12), "f4", chunks=(10, 12), compression="gzip")[:60] = 1.0
        file["coords"] = np.stack([np.arange(100) * 512, np.zeros(100)], 1)
    assert _kind(tmp_path / "s.h5") == "oversized"


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_chunk_that_claims_more_bytes_than_the_file_has_gets_no_memory(tmp_path):
    path, slide = tmp_path / "s.h5", make_slide(columns=4, rows=3, width=6)
    with h5py.File(path, "w") as file:
        file.create_dataset("features", data=slide.features, chunks=(4, 6), compression="gzip")
        file["coords"] = slide.cells * 512
    with h5py.File(path) as file:
        chunk = file["features"].id.get_chunk_info(1)
    whole, rest = path.read_bytes(), struct.pack("<IQ", 0, chunk.chunk_offset[0])
    key = struct.pack("<I", chunk.size) + rest
    assert whole.count(key) == 1
    path.write_bytes(whole.replace(key, struct.pack("<I", 0xF0000000) + rest))
    before = peak()
    assert _kind(path) == "oversized" and peak() - before < 2**31


@pytest.mark.parametrize("size", [0, 3])
def test_a_chunk_shorter_than_its_checksum_is_refused_and_crashes_nothing(tmp_path, size):
    path, slide = tmp_path / "s.h5", make_slide(columns=4, rows=3, width=6)
    with h5py.File(path, "w") as file:
        shape = {"chunks": (4, 6), "compression": "gzip", "fletcher32": True}
        file.create_dataset("features", data=slide.features, **shape)
        file["coords"] = slide.cells * 512
    assert read_bag(path).features.shape == slide.features.shape
    with h5py.File(path) as file:
        chunk = file["features"].id.get_chunk_info(1)
    whole, rest = path.read_bytes(), struct.pack("<IQ", 0, chunk.chunk_offset[0])
    key = struct.pack("<I", chunk.size) + rest
    assert whole.count(key) == 1
    path.write_bytes(whole.replace(key, struct.pack("<I", size) + rest))
    with pytest.raises(BagError, match="a chunk of 'features' is shorter than its own checksum"):
        read_bag(path)


def test_positions_that_compress_to_almost_nothing_open(tmp_path):
    cells = make_slide(columns=200, rows=200, width=1, kept=1.1).cells
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file["features"] = np.ones((len(cells), 2), "f4")
        shape = {"chunks": cells.shape, "compression": "gzip", "compression_opts": 9, "shuffle": True}
        file.create_dataset("coords", data=cells * 512, **shape)
    assert read_bag(tmp_path / "s.h5").coords.tolist() == (cells * 512).tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_cut_anywhere_is_refused_or_whole(layout, tmp_path):
    slide = make_slide(columns=5, rows=4)
    path = LAYOUTS[layout](tmp_path, "s", slide)
    whole = path.read_bytes()
    # torch and HDF5 fill the end of a file: without the filling nothing is lost.
    allowed = {"zero_bytes", "truncated", "not_hdf5", "not_torch", "not_zip", "oversized", str(slide.features.shape)}
    for length in np.linspace(0, len(whole) - 1, 40).astype(int):
        path.write_bytes(whole[:length])
        assert _outcome(path) in allowed, length


@pytest.mark.parametrize("layout", ["clam_pt", "trident_pt", "npz", "safetensors", "torchmil", "clam", "stamp"])
def test_damaged_bytes_give_a_bag_or_an_error_of_ours(layout, tmp_path):
    path = LAYOUTS[layout](tmp_path, "s", make_slide(columns=5, rows=4))
    whole = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    for _ in range(60):
        damaged = whole.copy()
        for at in rng.integers(0, len(whole), 8):
            damaged[at] = rng.integers(0, 256)
        path.write_bytes(damaged)
        assert _outcome(path)


def test_half_written_chunks_are_refused(tmp_path):
    with h5py.File(tmp_path / "s.h5", "w") as file:
        features = file.create_dataset("features", (100, 12), "f4", chunks=(1, 12))
        features[:60] = 1.0
        file["coords"] = np.stack([np.arange(100) * 512, np.zeros(100)], 1)
    assert _kind(tmp_path / "s.h5") == "oversized"


def test_a_compressed_bomb_is_refused_before_it_unfolds(tmp_path):
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file.create_dataset("features", data=np.zeros((20000, 300), "f4"), chunks=(20000, 300), compression="gzip")
        file["coords"] = np.zeros((20000, 2))
    assert _kind(tmp_path / "s.h5") == "oversized"
    np.savez_compressed(tmp_path / "t.npz", features=np.zeros((20000, 300), "f4"), coords=np.zeros((20000, 2)))
    assert _kind(tmp_path / "t.npz") == "oversized"


class _ClaimsArray:
    """Pickles as numpy.ndarray((10**10,), 'f8'): 80 GB if numpy were asked."""

    def __reduce__(self):
        return np.ndarray, ((10**10,), "f8")


def test_a_pickled_array_cannot_ask_for_memory(tmp_path):
    torch.save({"features": _ClaimsArray(), "coords": torch.zeros(4, 2)}, tmp_path / "s.pt")
    assert _kind(tmp_path / "s.pt") == "empty"


def test_an_old_pt_file_cannot_claim_a_storage_that_it_does_not_hold(tmp_path):
    path = tmp_path / "s.pt"
    torch.save(torch.ones(3, 4), path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    twelve = b"K\x0c"  # the number of elements as a pickled byte
    assert whole.count(twelve) == 1
    path.write_bytes(whole.replace(twelve, b"\x8a\x05" + struct.pack("<Q", 10**10)[:5]))
    assert _kind(path) == "oversized"


def test_an_archive_entry_larger_than_the_file_is_refused(tmp_path):
    torch.save(torch.ones(3, 4), tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as old,
        zipfile.ZipFile(tmp_path / "s.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, bytes(10**6) if "/data/" in name else old.read(name))
    assert _kind(tmp_path / "s.pt") == "oversized"


def test_objects_that_are_no_dense_tensors_are_refused(tmp_path):
    coords = torch.zeros(4, 2)
    for name, value in {
        "sparse": torch.eye(4).to_sparse(),
        "meta": torch.zeros(4, 2, device="meta"),
        "list": [1],
    }.items():
        torch.save({"features": value, "coords": coords}, tmp_path / f"{name}.pt")
        assert _kind(tmp_path / f"{name}.pt") in {"wrong_dtype", "no_features"}, name


def test_an_object_array_is_refused(tmp_path):
    np.savez(tmp_path / "s.npz", features=np.array([[None, 1]], dtype=object), coords=np.zeros((1, 2)))
    assert _kind(tmp_path / "s.npz") == "wrong_dtype"


def test_soft_links_within_the_file_are_followed_and_circles_are_not(tmp_path):
    slide = make_slide()
    path = write_h5(tmp_path / "s.h5", x=slide.features, coords=slide.cells * 512)
    with h5py.File(path, "a") as file:
        file["features"] = h5py.SoftLink("x")
    assert torch.equal(read_bag(path).features, torch.from_numpy(slide.features))
    with h5py.File(path, "a") as file:
        del file["features"]
        file["features"], file["b"] = h5py.SoftLink("/b"), h5py.SoftLink("/features")
    assert _kind(path) == "external_link"


def test_an_external_link_under_any_name_that_is_asked_for_is_refused(tmp_path):
    slide = make_slide()
    other = write_clam(tmp_path / "other", "o", slide)
    path = write_h5(tmp_path / "s.h5", coords=slide.cells * 512)
    with h5py.File(path, "a") as file:
        file["features/uni"] = h5py.ExternalLink(str(other), "/features")
        file["away"] = h5py.ExternalLink(str(other), "/")
    for keys in ({}, {"features_key": "away/features"}, {"features_key": "features/uni"}):
        with pytest.raises(BagError, match="not followed") as caught:
            read_header(path, **keys)
        assert caught.value.kind == "external_link"


def test_an_external_link_that_nobody_asks_for_does_no_harm(tmp_path):
    path = write_clam(tmp_path, "s", make_slide())
    with h5py.File(path, "a") as file:
        file["imgs"] = h5py.ExternalLink("nowhere.h5", "/imgs")
    assert read_bag(path).stride == 512


def test_an_error_comes_back_from_a_worker_process_whole():
    error = pickle.loads(
        pickle.dumps(BagError("no patches", where="a/s.h5", cure="Leave it out.", kind="empty", found=["x"]))
    )
    assert (error.kind, error.path, error.found) == ("empty", Path("a/s.h5"), ("x",))
    assert str(error) == "a/s.h5: no patches. Leave it out."
