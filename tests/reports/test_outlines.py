"""What was drawn on a slide is shown on its maps; what `heatmap` writes for QuPath is read again as the same polygons."""

import base64
import json

import numpy as np
import pytest
import shapely
from PIL import Image
from reports.viewer_folders import CARD, CELLS, SIDE, SIZE, features, image, run

import gated_srp
from gated_srp.data.annotations import read_annotations
from gated_srp.errors import UserError
from gated_srp.reports import explain as explain_module


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("outlines")
    features(home)
    image(home)
    run(home, "gated_srp")
    ring = [[100, 100], [500, 120], [450, 400], [120, 380], [100, 100]]
    drawn = {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [ring]},
        "properties": {"classification": {"name": "Tumour"}},
    }
    (home / "drawn").mkdir()
    (home / "drawn" / "s1.geojson").write_text(json.dumps(drawn))
    return home


def test_a_geojson_of_heatmap_is_read_again_as_the_same_polygons(home):
    found = gated_srp.heatmap(home / "gated_srp/seed42", home / "s1.h5", export=["geojson"], out=home / "maps")
    path = next(path for path in found.written if path.suffix == ".geojson")
    written = json.loads(path.read_text())["features"]
    kinds = [one["properties"]["objectType"] for one in written]
    regions = [
        shapely.Polygon(w["geometry"]["coordinates"][0], w["geometry"]["coordinates"][1:])
        for w, k in zip(written, kinds, strict=True)
        if k == "annotation"
    ]
    again = read_annotations(path, size=SIZE)
    assert again.classes == ("top 10 % attention_layer3",) and len(again.regions) == len(regions) > 0
    assert all(one.shape.equals(other) for one, other in zip(again.regions, regions, strict=True))
    patches = [one for one, kind in zip(written, kinds, strict=True) if kind == "detection"]
    (home / "patches.geojson").write_text(json.dumps(patches))
    boxes = read_annotations(home / "patches.geojson").regions
    assert [box.shape.bounds for box in boxes] == [(x, y, x + SIDE, y + SIDE) for x, y in (CELLS * SIDE).tolist()]


def test_outlines_are_drawn_where_the_regions_are(home):
    pictures = []
    for annotations in (None, home / "drawn"):
        found = gated_srp.heatmap(
            home / "gated_srp/seed42",
            home / "s1.h5",
            wsi=home / "s1.tif",
            annotations=annotations,
            out=home / f"o{annotations is None}",
        )
        pictures.append(np.asarray(Image.open(found.slides[0].picture).convert("RGB")).astype(int))
    bare, outlined = pictures
    assert bare.shape == outlined.shape
    rows, columns = np.nonzero(np.abs(bare - outlined).sum(-1) > 60)
    assert 500 < len(rows) < 0.2 * bare[..., 0].size
    tall, wide = np.ptp(rows), np.ptp(columns)
    assert tall > 0.25 * bare.shape[0] and wide > 0.25 * bare.shape[1]
    with pytest.raises(UserError, match="has the name of a slide"):
        gated_srp.heatmap(home / "gated_srp/seed42", home / "s1.h5", annotations=home / "gated_srp", out=home / "x")


def test_explain_draws_them_and_a_model_of_regions_is_explained_on_them(home, monkeypatch):
    monkeypatch.setattr(explain_module, "MEANING", {"attention": "where it looks"})
    run(home, "na")
    how = {"wsi": home / "s1.tif", "out": home / "same"}
    bare, drawn = (
        np.asarray(Image.open(gated_srp.heatmap(home / "na/seed42", home / "s1.h5", **how, **more).slides[0].picture))
        for more in ({}, {"annotations": home / "drawn"})
    )
    page = explain_module.explain_file(
        home / "na/seed42", home / "s1.h5", home / "page", image=home / "s1.tif", annotations=home / "drawn"
    )
    picture = np.asarray(Image.open(page.pictures[0]))
    assert picture.shape == drawn.shape and np.array_equal(picture, drawn) and not np.array_equal(picture, bare)
    rule = {"only": ["tumour"], "exclude": [], "cover": 0.5}
    inside = run(home, "na", 43, card={**CARD, "regions": rule})
    page = gated_srp.explain(inside, home / "s1.h5", annotations=home / "drawn", out=home / "inside")
    assert page.prediction.answers and any("patches kept: at least 50 % inside tumour" in n.what for n in page.notes)
    with pytest.raises(UserError, match="nothing says where these are"):
        gated_srp.explain(inside, home / "s1.h5", out=home / "inside")


def test_the_viewer_has_the_rings_of_each_class_served_and_exported(home):
    viewer = gated_srp.view(home / "s1.h5", home / "gated_srp/seed42", wsi=home / "s1.tif", annotations=home / "drawn")
    exported = viewer.export(home / "viewer").page.parent / "slide" / "0" / "data.js"
    for script in (viewer.scene(0).script(finest=9, coarsest=8), exported.read_text()):
        data = json.loads(script.removeprefix("GatedSRP.show(").removesuffix(");\n"))
        (kind,) = data["drawn"]
        rings = [np.frombuffer(base64.b64decode(ring), "<f4").reshape(-1, 2) for ring in kind["rings"]]
        assert kind["name"] == "Tumour" and len(rings) == 1
        assert shapely.Polygon(rings[0]).equals(read_annotations(home / "drawn" / "s1.geojson").shape())
    viewer.close()
    plain = gated_srp.view(home / "s1.h5", home / "gated_srp/seed42")
    assert plain.scene(0).content(finest=9, coarsest=8)["drawn"] == []
