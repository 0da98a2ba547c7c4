"""Every tool's layout gives the bag it was written from."""

import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from factories import (
    LAYOUTS,
    make_slide,
    trident_attrs,
    write_atlaspatch,
    write_clam,
    write_clam_pt,
    write_h5,
    write_slideflow,
    write_stamp,
    write_torchmil,
    write_trident,
    write_trident_pt,
)

from gated_srp.data import BagError, bag, read_bag, read_header
from gated_srp.data.files import containers
from gated_srp.data.files.siblings import position_files
from gated_srp.srp.graph import PatchGraph

_BLOCK = np.array([[0, 0], [1, 0], [0, 1], [1, 1]])

# Of each layout: stride, unit, encoder, and the largest difference that its precision allows.
EXPECTED = {
    "trident": (512, "px", "uni_v2", 0),
    "trident_pt": (512, "px", "uni_v2", 0),
    "atlaspatch": (512, "px", "uni_v2", 0),
    "clam": (512, "px", None, 0),
    "clam_pt": (512, "px", None, 0),
    "stamp": (256, "um", "uni_v2", 2e-3),
    "slideflow": (604, "px", "uni_v1", 0),
    "npz": (512, "px", "uni_v1", 0),
    "safetensors": (512, "px", "uni_v2", 0),
    "torchmil": (512, "px", None, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bag_holds_the_features_corners_stride_and_encoder_it_was_written_from(layout, tmp_path):
    slide = make_slide(3)
    bag = read_bag(LAYOUTS[layout](tmp_path, "s1", slide))
    stride, unit, encoder, error = EXPECTED[layout]
    assert (bag.stride, bag.unit, bag.encoder) == (stride, unit, encoder)
    assert bag.features.dtype == (torch.float16 if layout == "stamp" else torch.float32)
    torch.testing.assert_close(bag.features.float(), torch.from_numpy(slide.features), rtol=error, atol=0)
    assert bag.coords.dtype == (torch.float64 if unit == "um" else torch.int64)
    assert torch.equal(bag.coords.double(), torch.from_numpy(slide.cells).double() * stride)
    assert bag.features.is_contiguous()
    widths = [w for w in bag.warnings if w.kind != "encoder"]  # twelve channels are no encoder's
    assert widths == []


def _lists(bag):
    graph = PatchGraph.from_coords(bag.coords, bag.features, stride=bag.stride)
    parts = graph.neighbours.split(graph.neighbour_count.tolist())
    return [sorted(part.tolist()) for part in parts]


def test_one_lattice_gives_the_same_graph_from_every_tool(tmp_path):
    slide = make_slide(11, columns=13, rows=9)
    cells = torch.from_numpy(slide.cells)
    near = (cells[:, None] - cells[None]).abs().amax(-1) == 1  # the naive definition: a window of 3 around each cell
    expected = [row.nonzero().flatten().tolist() for row in near]
    written = {
        "40x TRIDENT": write_trident(tmp_path / "t", "s", slide, level0=40),
        "20x TRIDENT with overlap": write_trident(tmp_path / "o", "s", slide, level0=20, overlap=64),
        "TRIDENT pt": write_trident_pt(tmp_path / "p", "s", slide),
        "CLAM without attributes": write_clam(tmp_path / "c", "s", slide),
        "CLAM pt": write_clam_pt(tmp_path / "d", "s", slide),
        "STAMP": write_stamp(tmp_path / "m", "s", slide),
        "STAMP of a tile size that float32 cannot hold": write_stamp(tmp_path / "n", "s", slide, tile=224.37),
        "slideflow": write_slideflow(tmp_path / "f", "s", slide),
        "slideflow of odd tiles": write_slideflow(tmp_path / "g", "s", slide, step=301),
        "torchmil": write_torchmil(tmp_path / "h", "s", slide),
    }
    for name, path in written.items():
        assert _lists(read_bag(path)) == expected, name
    two = write_atlaspatch(tmp_path / "a", "s", slide, encoders={"uni_v2": 12, "prov_gigapath": 20})
    assert _lists(read_bag(two, encoder="uni2")) == _lists(read_bag(two, encoder="gigapath")) == expected


def test_an_encoder_of_several_is_chosen_by_any_of_its_names(tmp_path):
    slide = make_slide()
    path = write_atlaspatch(tmp_path, "s", slide, encoders={"uni_v2": 12, "h_optimus_1": 20})
    assert torch.equal(read_bag(path, encoder="UNI2-h").features, torch.from_numpy(slide.features))
    other = read_bag(path, encoder="hoptimus1")
    assert (other.encoder, other.features.shape[1]) == ("hoptimus1", 20)
    with pytest.raises(BagError, match=r"no features of 'virchow' \(found: h_optimus_1, uni_v2\)") as caught:
        read_bag(path, encoder="virchow")
    assert caught.value.kind == "wrong_encoder"
    with pytest.raises(BagError, match=r"h_optimus_1, uni_v2.*encoder='hoptimus1'"):
        read_bag(path)


def test_features_of_another_encoder_than_asked_for_are_refused(tmp_path):
    path = write_trident(tmp_path, "s", make_slide(), encoder="gigapath")
    with pytest.raises(BagError, match="features of 'gigapath', but 'uni_v2' was asked for") as caught:
        read_bag(path, encoder="uni_v2")
    assert caught.value.kind == "wrong_encoder"
    assert read_bag(path, encoder="prov-gigapath").encoder == "gigapath"


def test_atlaspatchs_vit_b_16_is_not_taken_for_googles_and_an_old_config_still_finds_it(tmp_path):
    path = write_atlaspatch(tmp_path, "s", make_slide(), encoders={"vit_b_16": 12})
    with pytest.raises(BagError, match="no features of 'vit_b16_google'") as caught:
        read_bag(path, encoder="vit_b16_google")
    assert caught.value.kind == "wrong_encoder"
    bag = read_bag(path, encoder="vit_b16")  # what a config of an older version says
    assert bag.encoder == "vit_b16_torchvision"
    said = [note.what for note in bag.warnings if note.kind == "encoder"]
    assert "'vit_b16' is an old name of vit_b16_torchvision, vit_b16_google and vit_b16_timm" in said[0]
    google = write_trident(tmp_path, "g", make_slide(), encoder="vit_b16_google")
    with pytest.raises(BagError, match="features of 'vit_b16_google', but 'vit_b16_torchvision' was asked for"):
        read_bag(google, encoder="vit_b_16")


def test_a_folders_word_about_the_encoder_gives_way_to_the_callers_with_a_warning(tmp_path):
    path = write_h5(tmp_path / "conch" / "s.h5", features=np.ones((4, 1536), "f4"), coords=_BLOCK * 512)
    assert read_bag(path).encoder == "conch_v1"
    bag = read_bag(path, encoder="uni_v2")
    assert (bag.encoder, len(bag.warnings)) == ("uni_v2", 1)
    assert "features of 'conch_v1', but 'uni_v2' was asked for" in bag.warnings[0].what


def test_the_callers_word_names_the_encoder_where_the_file_is_silent(tmp_path):
    path = write_clam(tmp_path, "s", make_slide(width=1536))
    assert read_bag(path).encoder is None  # 1536 channels are UNI-v2, GigaPath or H-optimus: never guessed
    bag = read_bag(path, encoder="uni2")
    assert (bag.encoder, bag.warnings) == ("uni_v2", ())


def test_a_width_that_the_named_encoder_does_not_give_is_a_warning(tmp_path):
    bag = read_bag(write_trident(tmp_path, "s", make_slide(width=1024), encoder="uni_v2"))
    assert [str(w) for w in bag.warnings] == ["uni_v2 gives 1536 channels, these have 1024. Check what wrote them."]


@pytest.mark.parametrize(
    ("stored", "read"), [("f2", "float16"), ("f4", "float32"), ("f8", "float32"), (">f4", "float32")]
)
def test_features_keep_their_precision_and_double_becomes_single(stored, read, tmp_path):
    slide = make_slide()
    bag = read_bag(write_h5(tmp_path / "s.h5", features=slide.features.astype(stored), coords=slide.cells * 512))
    assert bag.features.dtype == bag.dtype == getattr(torch, read)
    assert torch.equal(bag.features, torch.from_numpy(slide.features.astype(read)))


def test_bfloat16_tensors_of_a_dict_are_kept(tmp_path):
    slide = make_slide()
    features = torch.from_numpy(slide.features).bfloat16()
    torch.save({"embeddings": features, "coordinates": torch.from_numpy(slide.cells * 256.0)}, tmp_path / "s.pt")
    bag = read_bag(tmp_path / "s.pt")
    assert torch.equal(bag.features, features)
    assert bag.coords.tolist() == (slide.cells * 256).tolist()


def test_a_pt_file_from_before_torch_1_6_opens(tmp_path):
    slide = make_slide()
    content = {"features": torch.from_numpy(slide.features), "coords": torch.from_numpy(slide.cells * 512)}
    torch.save(content, tmp_path / "s.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(read_bag(tmp_path / "s.pt").features, content["features"])


def test_a_batch_axis_goes(tmp_path):
    slide = make_slide()
    flat = read_bag(write_h5(tmp_path / "a.h5", features=slide.features, coords=slide.cells * 512))
    deep = read_bag(write_h5(tmp_path / "b.h5", features=slide.features[None], coords=slide.cells[None] * 512))
    assert torch.equal(flat.features, deep.features)
    assert torch.equal(flat.coords, deep.coords)


def test_bounds_give_corners_and_the_side_of_a_patch(tmp_path):
    slide = make_slide()
    corner = slide.cells * 384
    path = write_h5(tmp_path / "s.h5", features=slide.features, coordinates=np.concatenate([corner, corner + 512], 1))
    bag = read_bag(path)
    assert (bag.stride, bag.patch_size_level0, bag.coords.tolist()) == (384, 512, corner.tolist())


@pytest.mark.parametrize("name", ["features", "feats", "patch_embeddings", "embeddings"])
def test_the_usual_names_of_features_are_known(name, tmp_path):
    slide = make_slide()
    bag = read_bag(write_h5(tmp_path / "s.h5", coords=slide.cells * 512, **{name: slide.features}))
    assert torch.equal(bag.features, torch.from_numpy(slide.features))


def test_unusual_names_are_given_by_the_caller(tmp_path):
    slide = make_slide()
    path = write_h5(
        tmp_path / "s.h5", **{"deep/down/x": slide.features, "xy": slide.cells * 512, "features": slide.features * 0}
    )
    bag = read_bag(path, features_key="deep/down/x", coords_key="xy")
    assert torch.equal(bag.features, torch.from_numpy(slide.features))
    for keys, kind in (
        ({"features_key": "y"}, "no_features"),
        ({"coords_key": "y"}, "no_coords"),
        ({"features_key": "deep"}, "no_features"),
    ):
        with pytest.raises(BagError) as caught:
            read_bag(path, **keys)
        assert caught.value.kind == kind


def test_what_the_file_says_of_the_slide_stays_on_the_bag(tmp_path):
    bag = read_bag(write_atlaspatch(tmp_path, "s", make_slide(), encoders={"uni_v2": 12}))
    assert (str(bag.wsi_path), bag.level0_size, bag.mpp, bag.magnification, bag.patch_size_level0) == (
        "slides/s.svs",
        (80000, 60000),
        0.25,
        40,
        512,
    )


def test_attributes_spelt_none_count_as_absent(tmp_path):
    slide = make_slide()
    path = write_h5(tmp_path / "s.h5", features=slide.features, coords=slide.cells * 512)
    with h5py.File(path, "a") as file:
        file["coords"].attrs.update({**trident_attrs("s"), "patch_size_level0": "None", "overlap": b"None"})
        file["coords"].attrs.update(
            {"level0_width": "None", "patch_size": np.array([256]), "level0_magnification": "40"}
        )
        file.attrs.update({"mpp": h5py.Empty("f4"), "wsi_path": "None", "encoder": b"None"})
    bag = read_bag(path)
    assert (bag.stride, bag.level0_size, bag.mpp, bag.wsi_path, bag.encoder) == (512, None, None, None, None)
    assert bag.stride_source == "declared on coords (patch_size and magnifications), agrees with coordinates"


def test_older_stamp_files_are_in_microns_too(tmp_path):
    slide = make_slide()
    older = read_bag(
        write_stamp(
            tmp_path, "a", slide, tile=112.0, attrs={"tile_size": 112.0, "unit": "um", "extractor": "ctranspath"}
        )
    )
    assert (older.unit, older.stride, older.encoder) == ("um", 112, "ctranspath")
    historic = read_bag(write_stamp(tmp_path, "b", slide, tile=224.0, attrs={}))
    assert (historic.unit, historic.stride) == ("um", 256)
    assert historic.coords.tolist() == (slide.cells * 256.0).tolist()


def test_an_index_of_tfrecords_is_not_taken_for_positions(tmp_path):
    slide = make_slide()
    path = write_slideflow(tmp_path, "s", slide)
    np.savez(tmp_path / "s.index.npz", arr_0=slide.cells * 100, locations=slide.cells * 604)
    with pytest.raises(BagError) as caught:
        read_bag(path)
    assert caught.value.kind == "no_coords"


def test_positions_are_looked_for_in_all_folders_around_a_file_in_their_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = ["f/s.index.npz", "f/s_patches.h5", "f/s.h5", "f/patches/s.h5", "patches/s.h5", "coords/s.npy"]
    for name in (*found, "f/s.pt", "f/patches/other.h5", "named/coords/s.npz"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    up = [Path("patches/s.h5"), Path("coords/s.npy")]  # the parent of `f` is its own parent, where paths are relative
    assert list(position_files(Path("f/s.pt"))) == [*map(Path, found), *up]
    assert list(position_files(tmp_path / "f" / "s.pt")) == [tmp_path / name for name in found]
    assert list(position_files(Path("patches/s.h5"))) == [Path("coords/s.npy")] * 2  # never its own folder
    assert list(position_files(Path("f/s.pt"), Path("named"))) == [Path("named/coords/s.npz")]


def test_a_name_too_long_for_its_neighbours_is_read_as_any_other(tmp_path):
    slide = make_slide()
    path = write_h5(tmp_path / f"{'s' * 250}.h5", features=slide.features, coords=slide.cells * 512)
    assert read_bag(path).stride == 512
    with h5py.File(path, "a") as file:
        del file["coords"]
    with pytest.raises(BagError) as caught:
        read_bag(path)
    assert caught.value.kind == "no_coords"


def test_a_clam_pt_whose_h5_has_other_rows_is_refused(tmp_path):
    slide = make_slide()
    write_clam(tmp_path, "s", slide)
    torch.save(torch.zeros(5, 12), tmp_path / "pt_files" / "s.pt")
    with pytest.raises(BagError, match=f"5 rows of features, but {len(slide.cells)} positions") as caught:
        read_bag(tmp_path / "pt_files" / "s.pt")
    assert caught.value.kind == "row_mismatch"


def test_a_broken_file_of_positions_is_charged_to_the_bag(tmp_path):
    path = write_trident_pt(tmp_path, "s", make_slide())
    (tmp_path / "20x_256px_0px_overlap" / "patches" / "s_patches.h5").write_bytes(b"")
    with pytest.raises(BagError, match="its positions cannot be read") as caught:
        read_bag(path)
    assert (caught.value.kind, caught.value.path) == ("zero_bytes", path)


def test_zarr_says_which_package_it_needs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    (tmp_path / "s.zarr").mkdir()
    with pytest.raises(BagError, match="pip install zarr") as caught:
        read_bag(tmp_path / "s.zarr")
    assert caught.value.kind == "needs_package"


def test_tiatoolbox_zarr_opens_where_the_package_is_installed(tmp_path):
    zarr = pytest.importorskip("zarr")
    slide = make_slide()
    group = zarr.open_group(str(tmp_path / "s.zarr"), mode="w")
    corner = slide.cells * 512
    for name, array in (("features", slide.features), ("coordinates", np.concatenate([corner, corner + 512], 1))):
        group.create_array(name, shape=array.shape, dtype=array.dtype)[...] = array
    bag = read_bag(tmp_path / "s.zarr")
    assert torch.equal(bag.features, torch.from_numpy(slide.features))
    assert (bag.coords.tolist(), bag.stride, bag.patch_size_level0) == (corner.tolist(), 512, 512)


def test_duplicate_positions_are_a_warning(tmp_path):
    slide = make_slide()
    coords = slide.cells * 512
    coords[3] = coords[7]
    bag = read_bag(write_h5(tmp_path / "s.h5", features=slide.features, coords=coords))
    assert bag.warnings[0].kind == "duplicates"
    assert bag.warnings[0].what.startswith(f"1 of {len(coords)} patches")


def test_rows_that_are_not_finite_are_counted(tmp_path):
    slide = make_slide()
    slide.features[[2, 5], [0, 3]] = np.nan, np.inf
    assert read_bag(write_clam(tmp_path, "s", slide)).nonfinite_rows().tolist() == [2, 5]


@pytest.mark.parametrize("chunks", [(1, 12), (3, 5), (40, 12), None])
def test_arrays_are_read_in_parts_as_they_are_whatever_their_chunks(tmp_path, monkeypatch, chunks):
    monkeypatch.setattr(containers, "_ROWS", 4)
    monkeypatch.setattr(bag, "_ROWS", 4)
    values = np.random.default_rng(0).standard_normal((23, 12)).astype(np.float32)
    values[[3, 4, 22], 5] = np.nan, np.inf, -np.inf
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file.create_dataset("features", data=values, chunks=chunks and tuple(map(min, chunks, values.shape)))
        file["coords"] = np.stack([np.arange(23), np.zeros(23, int)], 1) * 256
    found = read_bag(tmp_path / "s.h5")
    assert np.array_equal(found.features.numpy(), values, equal_nan=True)
    assert found.nonfinite_rows().tolist() == [3, 4, 22]


def test_compressed_features_open(tmp_path):
    slide = make_slide()
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file.create_dataset("features", data=slide.features, compression="gzip", shuffle=True)
        file["coords"] = slide.cells * 512
    assert torch.equal(read_bag(tmp_path / "s.h5").features, torch.from_numpy(slide.features))


def test_a_header_is_the_bag_without_its_features(tmp_path):
    path = write_trident(tmp_path, "s", make_slide())
    header, bag = read_header(path), read_bag(path)
    assert header.shape == tuple(bag.features.shape)
    assert (header.dtype, header.stride, header.encoder) == (bag.features.dtype, bag.stride, bag.encoder)
    assert torch.equal(header.coords, bag.coords)
    assert not hasattr(header, "features")


def test_a_header_does_not_read_the_features(tmp_path, monkeypatch):
    path = write_trident(tmp_path, "s", make_slide())
    read = []
    whole = h5py.Dataset.read_direct
    monkeypatch.setattr(h5py.Dataset, "read_direct", lambda self, *a: (read.append(self.name), whole(self, *a))[1])
    read_header(path)
    assert read == ["/coords"]
    read_bag(path)
    assert read == ["/coords", "/coords", "/features"]


def test_headers_of_a_hundred_files_take_a_tenth_of_the_promised_time(tmp_path):
    slide = make_slide(columns=60, rows=60)
    paths = [write_trident(tmp_path, f"s{i}", slide) for i in range(3)]
    start = time.process_time()
    for _ in range(34):
        for path in paths:
            read_header(path)
    assert time.process_time() - start < 2.0
