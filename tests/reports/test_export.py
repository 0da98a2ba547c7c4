"""GeoJSON as RFC 7946 and QuPath want it; merged regions cover what they should; tables and HDF5 keep the rows."""

import json
from itertools import pairwise

import h5py
import numpy as np
import pandas as pd
import pytest
from factories import LAYOUTS, Slide, make_slide, write_clam, write_trident
from hypothesis import given
from hypothesis import strategies as st

from gated_srp.data.files.formats import read_header
from gated_srp.errors import UserError
from gated_srp.reports.export import WRITERS, feature_collection, merged
from gated_srp.reports.maps import Patches, PatchMap


def area(ring):
    x, y = np.array(ring).T
    return float((x[:-1] * y[1:] - x[1:] * y[:-1]).sum() / 2)


def inside(rings, x, y):
    """Even-odd rule over all rings of a polygon."""
    crossings = 0
    for ring in rings:
        for (x0, y0), (x1, y1) in pairwise(ring):
            if (y0 > y) != (y1 > y) and x < x0 + (y - y0) / (y1 - y0) * (x1 - x0):
                crossings += 1
    return crossings % 2 == 1


def check_schema(content):
    """What RFC 7946 asks of a collection of polygons, and QuPath of its objects."""
    assert set(content) == {"type", "features"} and content["type"] == "FeatureCollection"
    ids = [feature["id"] for feature in content["features"]]
    assert len(set(ids)) == len(ids)
    for feature in content["features"]:
        assert feature["type"] == "Feature"
        assert feature["geometry"]["type"] == "Polygon"
        rings = feature["geometry"]["coordinates"]
        for number, ring in enumerate(rings):
            assert len(ring) >= 4 and ring[0] == ring[-1]
            assert all(len(point) == 2 and all(isinstance(v, float) for v in point) for point in ring)
            assert (area(ring) > 0) == (number == 0)  # outer ring one way, holes the other
        properties = feature["properties"]
        assert properties["objectType"] in ("detection", "annotation")
        if properties["objectType"] == "detection":
            assert all(isinstance(v, float) for v in properties["measurements"].values())
        else:
            assert set(properties["classification"]) == {"name", "color"}


def test_patches_are_detections_with_measurements_and_the_top_ones_annotations(tmp_path):
    slide = make_slide(1)
    patches = Patches.of(read_header(write_trident(tmp_path, "s", slide, overlap=64)))
    values = np.arange(len(slide.cells), dtype=float)
    values[3] = np.nan
    path = tmp_path / "out.geojson"
    WRITERS["geojson"](path, patches, {"attention": values}, PatchMap("attention", "attention", values))
    content = json.loads(path.read_text())
    check_schema(content)
    detections = [f for f in content["features"] if f["properties"]["objectType"] == "detection"]
    assert len(detections) == len(slide.cells)
    x, y = (slide.cells[5] * 384).tolist()
    assert detections[5]["geometry"]["coordinates"][0][:3] == [[x, y], [x + 512, y], [x + 512, y + 512]]
    assert detections[5]["properties"]["measurements"] == {"attention": 5.0}
    assert detections[3]["properties"]["measurements"] == {}
    regions = [f for f in content["features"] if f["properties"]["objectType"] == "annotation"]
    count = round(0.1 * (len(values) - 1))
    for i in range(len(values)):
        x, y = slide.cells[i] * 384 + 256.5
        covered = any(inside(f["geometry"]["coordinates"], x, y) for f in regions)
        assert covered or i < len(values) - count
    assert path.with_name("again").exists() is False
    assert json.dumps(feature_collection(patches, {"attention": values})) == json.dumps(
        feature_collection(patches, {"attention": values})
    )


@pytest.mark.parametrize(
    ("values", "unit", "expected"),
    [
        ([0.0] * 40, 0.1, []),  # gates off: nothing changes
        ([1.0] * 39 + [1.01], 1.0, []),  # next to nothing, as the picture says
        ([9.0] * 3 + [1.0] * 37, None, [0, 1, 2]),  # fewer than a tenth of 40: the fourth is one of 37
        ([1.0] * 30 + [9.0] * 10, None, []),  # ten with one value: none of them is better
    ],
)
def test_regions_are_the_highest_patches_alone_and_ties_are_not_cut_by_their_order(tmp_path, values, unit, expected):
    slide = Slide(
        np.array([(2 * (i % 8), 2 * (i // 8)) for i in range(40)]), np.zeros((40, 4), np.float32)
    )  # none touch
    patches = Patches.of(read_header(write_trident(tmp_path, "s", slide)))
    top = PatchMap("change", "change", np.array(values), unit=unit)
    content = feature_collection(patches, {}, top=top)["features"]
    corners = [f["geometry"]["coordinates"][0] for f in content if f["properties"]["objectType"] == "annotation"]
    assert sorted(map(min, corners)) == sorted(patches.corners[expected].tolist())


@given(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1), st.sampled_from([2, 3]))
def test_merged_squares_cover_exactly_what_the_squares_cover(cells, stride):
    """Side 2 at stride 2 (touching) and 3 (apart): area and every point agree with the squares themselves."""
    corners = np.array(sorted(cells), float) * stride
    polygons = merged(corners, 2.0)
    covered = {(int(x) + dx, int(y) + dy) for x, y in corners for dx in (0, 1) for dy in (0, 1)}
    assert sum(area(ring) for rings in polygons for ring in rings) == len(covered)
    for x in range(18):
        for y in range(18):
            hits = sum(inside(rings, x + 0.5, y + 0.5) for rings in polygons)
            assert hits == ((x, y) in covered)
    for rings in polygons:
        assert area(rings[0]) > 0 and all(area(hole) < 0 for hole in rings[1:])


def test_a_ring_of_patches_has_a_hole_and_neighbours_at_a_corner_stay_two():
    ring = np.array([(x, y) for x in range(3) for y in range(3) if (x, y) != (1, 1)], float)
    (rings,) = merged(ring, 1.0)
    assert [len(r) for r in rings] == [5, 5]
    assert len(merged(np.array([[0.0, 0.0], [1.0, 1.0]]), 1.0)) == 2
    pinched = np.array([(0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (0, 2), (1, 2), (3, 2), (2, 1), (3, 1)], float)
    for rings in merged(pinched, 1.0):
        for one in rings:
            assert len({tuple(p) for p in one[:-1]}) == len(one) - 1  # no ring meets itself


def test_microns_without_a_slide_are_refused_for_qupath(tmp_path):
    patches = Patches.of(read_header(LAYOUTS["stamp"](tmp_path, "s", make_slide(1))))
    with pytest.raises(UserError, match="--wsi"):
        feature_collection(patches, {})


@pytest.mark.parametrize("kind", ["csv", "parquet", "h5"])
def test_tables_and_hdf5_say_which_row_of_the_features_is_meant(tmp_path, kind):
    slide = make_slide(1)
    header = read_header(write_clam(tmp_path, "s", slide))
    rows = np.array([7, 2, 30])
    patches = Patches.of(header, rows)
    values = np.array([0.5, -1.0, 2.25], np.float32)
    path = tmp_path / f"out.{kind}"
    WRITERS[kind](path, patches, {"beta_layer1": values}, None)
    if kind == "h5":
        with h5py.File(path) as file:
            assert np.array_equal(file["coords"][:], header.coords)
            full = file["beta_layer1"][:]
        assert full[rows].tolist() == values.tolist()
        assert np.isnan(np.delete(full, rows)).all()
        return
    table = pd.read_csv(path) if kind == "csv" else pd.read_parquet(path)
    assert table["row"].tolist() == rows.tolist()
    assert table[["x", "y"]].to_numpy().tolist() == header.coords[rows].tolist()
    assert table["beta_layer1"].tolist() == values.tolist()


def test_a_file_that_cannot_be_written_is_a_users_error(tmp_path):
    patches = Patches.of(read_header(write_clam(tmp_path, "s", make_slide(1))))
    (tmp_path / "a.csv").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        WRITERS["csv"](tmp_path / "a.csv", patches, {}, None)
