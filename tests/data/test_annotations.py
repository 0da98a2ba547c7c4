"""Annotations of every tool become the same polygons in level-0 pixels; what cannot be read is refused in words."""

import json
import time

import numpy as np
import pytest
import shapely
from PIL import Image

from gated_srp.data.annotations import (
    Annotations,
    Region,
    covered_share,
    find_annotations,
    plain,
    read_annotations,
    refuse_unknown,
)
from gated_srp.errors import UserError

SQUARE = [[100, 100], [300, 100], [300, 200], [100, 200], [100, 100]]
HOLE = [[150, 120], [200, 120], [200, 150], [150, 150], [150, 120]]


def feature(rings, **properties):
    return {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": rings}, "properties": properties}


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def areas(drawn):
    return {name: drawn.shape([name]).area for name in drawn.classes}


# GeoJSON --------------------------------------------------------------------------------------------------------------

CLASSED = {"objectType": "annotation", "classification": {"name": "Tumor", "color": [200, 0, 0]}}


@pytest.mark.parametrize(
    "content",
    [
        {"type": "FeatureCollection", "features": [feature([SQUARE, HOLE], **CLASSED)]},
        [feature([SQUARE, HOLE], **CLASSED)],
        feature([SQUARE, HOLE], **CLASSED),
        {
            **feature([SQUARE, HOLE], classification={"name": "Tumor", "colorRGB": -3670016}),
            "id": "PathAnnotationObject",
        },
        feature([SQUARE, HOLE], object_type="annotation", classification="Tumor", isLocked=True),
        feature([SQUARE, HOLE], objectType="annotation", classification={"names": ["Tumor"]}, measurements=[]),
        {
            "type": "Feature",
            "properties": CLASSED,
            "geometry": {
                "type": "GeometryCollection",
                "geometries": [
                    {"type": "MultiPolygon", "coordinates": [[SQUARE, HOLE]]},
                    {"type": "Point", "coordinates": [1, 2]},
                ],
            },
        },
    ],
    ids=["collection", "list", "feature", "0.2", "text", "names", "geometries"],
)
def test_every_version_of_qupaths_geojson_gives_the_same_region(tmp_path, content):
    drawn = read_annotations(write(tmp_path / "s.geojson", content))
    assert areas(drawn) == {"Tumor": 200 * 100 - 50 * 30}
    assert drawn.shape(["tumour"]).equals(shapely.Polygon(SQUARE, [HOLE]))


def test_without_a_class_and_with_cells_points_and_nothing(tmp_path):
    features = [
        feature([SQUARE]),
        feature([HOLE], objectType="detection", classification={"name": "Tumor"}),
        {"type": "Feature", "geometry": {"type": "LineString", "coordinates": [[0, 0], [1, 1]]}},
        {"type": "Feature", "geometry": None, "properties": None},
    ]
    drawn = read_annotations(write(tmp_path / "s.geojson", features))
    assert areas(drawn) == {"unclassified": 20000.0}
    said = " ".join(note.what for note in drawn.notes)
    assert "1 objects of the type detection" in said and "1 points and lines" in said and "without a geometry" in said
    alone = read_annotations(write(tmp_path / "d.geojson", [features[1]]))
    assert areas(alone) == {"Tumor": 1500.0} and "no annotations in it" in alone.notes[0].what


def test_an_outline_that_crosses_itself_is_mended_with_a_note(tmp_path):
    eight = [[0, 0], [100, 100], [100, 0], [0, 100], [0, 0]]
    drawn = read_annotations(write(tmp_path / "s.geojson", feature([eight])))
    assert drawn.shape().area == pytest.approx(2 * 2500) and "cross themselves" in drawn.notes[0].what


def test_outlines_that_cross_without_end_are_refused_in_bounded_time(tmp_path):
    ring = np.random.default_rng(0).uniform(0, 1000, (6000, 2)).round(3).tolist()
    path, start = write(tmp_path / "s.geojson", feature([[*ring, ring[0]]])), time.process_time()
    with pytest.raises(UserError, match="cross themselves too often"):
        read_annotations(path)
    assert time.process_time() - start < 20


# XML ------------------------------------------------------------------------------------------------------------------


def asap(*rows):
    listed = "".join(
        f'<Annotation Name="a{i}" Type="{kind}" PartOfGroup="{group}" Color="#F4FA58"><Coordinates>'
        + "".join(f'<Coordinate Order="{k}" X="{x}" Y="{y}"/>' for k, (x, y) in reversed(list(enumerate(ring[:-1]))))
        + "</Coordinates></Annotation>"
        for i, (group, kind, ring) in enumerate(rows)
    )
    groups = '<AnnotationGroups><Group Name="Tumor" PartOfGroup="None" Color="#00ff00"><Attributes/></Group></AnnotationGroups>'
    return f'<?xml version="1.0"?><ASAP_Annotations><Annotations>{listed}</Annotations>{groups}</ASAP_Annotations>'


def test_camelyons_groups_are_tumour_and_what_is_cut_out_of_it(tmp_path):
    rows = [("_0", "Polygon", SQUARE), ("_2", "Polygon", HOLE), ("None", "Dot", [[1, 1], [1, 1]])]
    drawn = read_annotations(write(tmp_path / "s.xml", asap(*rows)))
    assert areas(drawn) == {"tumour": 20000.0 - 1500.0}
    assert any("1 region of the groups _2" in note.what for note in drawn.notes)
    assert any("1 dots" in note.what for note in drawn.notes)
    rows = [
        ("Tumor", "Rectangle", SQUARE),
        ("Exclusion", "Spline", HOLE),
        ("None", "Polygon", [[0, 0], [9, 0], [9, 9], [0, 0]]),
    ]
    curved = read_annotations(write(tmp_path / "t.xml", asap(*rows)))
    assert areas(curved) == {"Tumor": 18500.0, "unclassified": 40.5}
    assert curved.notes[0].what == "1 spline: the points are joined by straight lines"
    assert not any("left out" in note.what for note in curved.notes)
    rows = [("metastases", "Polygon", SQUARE), ("normal", "Polygon", HOLE)]
    assert areas(read_annotations(write(tmp_path / "u.xml", asap(*rows)))) == {"metastases": 18500.0, "normal": 1500.0}


def test_aperios_layers_negative_regions_and_ellipses(tmp_path):
    def region(ring, kind=0, negative=0, text=""):
        vertices = "".join(f'<Vertex X="{x}" Y="{y}" Z="0"/>' for x, y in ring)
        return f'<Region Id="1" Type="{kind}" Text="{text}" NegativeROA="{negative}"><Vertices>{vertices}</Vertices></Region>'

    ellipse, ruler = region([[0, 0], [20, 10]], 2, text="gland"), region([[0, 0], [9, 9]], 4)
    layers = [
        ("Tumor", region(SQUARE[:-1]) + region(HOLE[:-1], negative=1)),
        ("", ellipse + ruler + region([[0, 0], [40, 30]], 1, text="box")),
    ]
    listed = "".join(
        f'<Annotation Id="{i}" Name="{n}"><Regions>{r}</Regions></Annotation>' for i, (n, r) in enumerate(layers)
    )
    drawn = read_annotations(write(tmp_path / "s.xml", f'<Annotations MicronsPerPixel="0.5">{listed}</Annotations>'))
    found = areas(drawn)
    assert found["Tumor"] == 18500.0 and found["box"] == 1200.0
    assert found["gland"] == pytest.approx(np.pi * 10 * 5, rel=0.01)
    assert any("1 arrows and rulers" in note.what for note in drawn.notes)


# Masks and tables -----------------------------------------------------------------------------------------------------


def test_a_label_mask_at_an_eighth_of_the_slide_is_read_by_the_slides_size(tmp_path):
    labels = np.zeros((50, 100), np.uint8)
    labels[10:20, 30:60] = 1
    labels[30:40, 0:10] = 2
    labels[15, 40] = 0
    Image.fromarray(labels).save(tmp_path / "s.png")
    drawn = read_annotations(tmp_path / "s.png", size=(803, 398))  # which is no whole multiple of it
    across, down = 803 / 100, 398 / 50
    assert areas(drawn) == pytest.approx({"1": 299 * across * down, "2": 100 * across * down})
    assert drawn.shape(["2"]).bounds == pytest.approx((0, 30 * down, 10 * across, 40 * down))
    with pytest.raises(
        UserError, match=r"100 x 50 pixels cannot be of a slide of 800 x 800: 8 times across, 16 times down"
    ):
        read_annotations(tmp_path / "s.png", size=(800, 800))
    with pytest.raises(UserError, match="its scale is not"):
        read_annotations(tmp_path / "s.png")


def test_a_binary_mask_gets_its_scale_from_microns_where_the_slides_size_is_unknown(tmp_path):
    mask = Image.fromarray(np.array([[0, 255], [0, 0]], np.uint8))
    mask.save(tmp_path / "s.tif", dpi=(25400 / 8, 25400 / 8))  # 8 microns a pixel
    drawn = read_annotations(tmp_path / "s.tif", mpp=0.5)
    assert areas(drawn) == pytest.approx({"mask": 256.0}) and drawn.shape().bounds == pytest.approx((16, 0, 32, 16))


@pytest.mark.parametrize(
    ("values", "classes", "names"),
    [
        ([1, 2], ("1", "2"), ("1", "2")),
        ([2], ("2",), ("2", "mask")),
        ([1], ("mask",), ("mask", "1")),
        ([255], ("mask",), ("mask", "255")),
        ([(255, 0, 0), (255, 0, 1), (7, 7, 7)], ("#ff0000", "#ff0001", "7"), ("#ff0000", "#ff0001", "7")),
        ([(255, 0, 0)], ("#ff0000",), ("#ff0000", "mask")),
        ([(1, 1, 1)], ("mask",), ("mask", "1")),
    ],
)
def test_a_label_has_the_same_class_whatever_else_is_on_the_slide(tmp_path, values, classes, names):
    cells = np.array([np.zeros_like(values[0]), *values], np.uint8)[None]  # (1, w) or (1, w, 3)
    Image.fromarray(cells).save(tmp_path / "s.png")
    drawn = read_annotations(tmp_path / "s.png", size=(cells.shape[1], 1))
    assert drawn.classes == classes and drawn.names == names
    assert [drawn.shape([name]).area for name in names] == [1.0] * len(names)
    assert drawn.shape(["3"]).area == 0.0


def test_a_pyramid_of_masks_and_colours(tmp_path):
    tifffile = pytest.importorskip("tifffile", reason="comes with the extra `slides`")

    labels = np.zeros((64, 96, 3), np.uint8)
    labels[8:16, 8:40] = (255, 0, 0)
    with tifffile.TiffWriter(tmp_path / "s.tif") as file:
        file.write(labels, photometric="rgb", tile=(16, 16), compression="zlib")
        file.write(labels[::4, ::4], subfiletype=1, photometric="rgb", tile=(16, 16))
    assert areas(read_annotations(tmp_path / "s.tif", size=(192, 128))) == pytest.approx({"#ff0000": 4 * 8 * 32})
    noise = np.random.default_rng(0).integers(0, 255, (20, 30)).astype(np.uint8)
    Image.fromarray(noise).save(tmp_path / "n.png")
    with pytest.raises(UserError, match="a mask has at most 64 values"):
        read_annotations(tmp_path / "n.png", size=(30, 20))
    Image.fromarray(np.array([[0, 0.5, 1]], np.float32)).save(tmp_path / "p.tif")
    with pytest.raises(UserError, match=r"not whole numbers, such as 0\.5"):
        read_annotations(tmp_path / "p.tif", size=(3, 1))


def test_the_demos_table_is_squares_of_patches(tmp_path):
    write(tmp_path / "s.csv", "x,y,true_focus\n0,0,0\n512,0,1\n512,512,1\n")
    drawn = read_annotations(tmp_path / "s.csv", side=512)
    assert drawn.shape(["true_focus"]).bounds == (512, 0, 1024, 1024) and areas(drawn) == {"true_focus": 2 * 512**2}
    write(tmp_path / "e.csv", "x,y,true_focus\n0,0,0\n")
    assert read_annotations(tmp_path / "e.csv", side=512).classes == ("true_focus",)


# Scale, classes, files ------------------------------------------------------------------------------------------------


def test_regions_beyond_the_slide_say_by_what_they_would_fit(tmp_path):
    path = write(tmp_path / "s.geojson", feature([(4 * np.array(SQUARE)).tolist()]))
    assert read_annotations(path, size=(1200, 800)).shape().area == 16 * 20000
    with pytest.raises(
        UserError, match=r"to \(1200, 800\), but the slide has 310 x 210 pixels; divided by 4 they would fit"
    ):
        read_annotations(path, size=(310, 210))


def test_an_unknown_class_is_named_with_those_that_exist():
    refuse_unknown(["TUMOR"], ["tumour", "stroma"], "folder")
    with pytest.raises(UserError, match=r"no region of the class 'gland' \(classes: stroma, tumour\)"):
        refuse_unknown(["gland"], ["tumour", "stroma"], "folder")
    assert plain(" Tumor") == "tumour"


def test_files_are_found_by_the_slides_names(tmp_path):
    for name in ("s1.svs.geojson", "sub/s2_mask.png", "s10.xml", "notes.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = find_annotations(tmp_path, ["s1", "s2", "s3"])
    assert {slide: path.name for slide, path in found.items()} == {"s1": "s1.svs.geojson", "s2": "s2_mask.png"}
    (tmp_path / "s3-2.xml").touch()  # of another slide
    assert "s3" not in find_annotations(tmp_path, ["s1", "s2", "s3"])
    assert find_annotations(tmp_path, ["s2_mask", "s1"])["s2_mask"].name == "s2_mask.png"
    (tmp_path / "s1.svs.xml").touch()
    with pytest.raises(UserError, match="slide s1 has 2 files of annotations"):
        find_annotations(tmp_path, ["s1"])
    with pytest.raises(UserError, match="has the name of a slide"):
        find_annotations(tmp_path, ["other"])


def test_the_share_of_a_patch_equals_a_count_of_points(tmp_path):
    turn = np.linspace(0, 2 * np.pi, 700, endpoint=False)
    radius = 300 + 60 * np.sin(9 * turn)
    blob = shapely.Polygon(
        np.c_[400 + radius * np.cos(turn), 350 + radius * np.sin(turn)], [[[350, 300], [450, 300], [400, 400]]]
    )
    drawn = Annotations(
        None, (Region("a", blob), Region("a", shapely.box(900, 0, 1000, 1000)), Region("b", shapely.box(0, 0, 50, 50)))
    )
    corners = np.stack(np.meshgrid(np.arange(0, 1000, 50), np.arange(0, 750, 50)), -1).reshape(-1, 2)
    found = drawn.coverage(corners, 50, ["A"])
    inside = np.stack(np.meshgrid(np.arange(1000) + 0.5, np.arange(750) + 0.5), -1).reshape(-1, 2)
    hit = shapely.contains_xy(blob, *inside.T) | (inside[:, 0] > 900)
    counted = hit.reshape(15, 50, 20, 50).mean((1, 3)).ravel()
    assert np.abs(found - counted).max() < 0.02 and found.sum() == pytest.approx(counted.sum(), rel=1e-3)
    whole = shapely.area(shapely.intersection(shapely.box(*corners.T, *(corners + 50).T), drawn.shape(["a"]))) / 2500
    assert np.allclose(found, whole, atol=1e-12)
    assert covered_share(shapely.Polygon(), corners, 50).sum() == 0


# What is broken -------------------------------------------------------------------------------------------------------


def malformed():
    """200 files that no reader can use, each with its ending."""
    good = json.dumps({"type": "FeatureCollection", "features": [feature([SQUARE, HOLE], **CLASSED)]})
    xml = asap(("_0", "Polygon", SQUARE))
    for cut in np.linspace(1, len(good) - 2, 60).astype(int):
        yield ".geojson", good[:cut]
    for cut in np.linspace(1, len(xml) - 2, 60).astype(int):
        yield ".xml", xml[:cut]
    for bad in ("NaN", "1e999", '"12"x', "-Infinity", "null", '"a"', "[]", "{}", "1" * 5000, "true, true, [1]"):
        yield ".geojson", good.replace("100, 100]", f"{bad}, 100]", 1)
        yield ".xml", xml.replace('X="100"', f'X="{bad.replace(chr(34), "")}"', 1)
    for bad in (
        "[" * 100_000,
        "{" * 1000,
        '{"type": "FeatureCollection"}',
        "[1, 2]",
        '"text"',
        "3",
        "null",
        "",
        " \n",
        "\x00\x01",
    ):
        yield ".geojson", bad
        yield ".json", "[" + bad
    for kind in ("Circle", None, "polygon", 3):
        yield ".geojson", {"type": "Feature", "geometry": {"type": kind, "coordinates": [SQUARE]}}
    for coordinates in (SQUARE, 3, "x", [[["a", "b"]] * 4], [[[1]] * 4], {"x": 1}, [None], [[SQUARE]]):
        yield ".geojson", {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": coordinates}}
    nested = {"type": "Polygon", "coordinates": [SQUARE]}
    for _ in range(200):
        nested = {"type": "GeometryCollection", "geometries": [nested]}
    yield ".geojson", {"type": "Feature", "geometry": nested}
    yield ".xml", '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]><ASAP_Annotations>&b;</ASAP_Annotations>'
    yield ".xml", '<!DOCTYPE x SYSTEM "file:///etc/passwd"><Annotations/>'
    yield ".xml", '<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><Annotations>&e;</Annotations>'
    yield ".xml", "<svg/>"
    yield (
        ".xml",
        "<Annotations><Annotation><Regions><Region><Vertices><Vertex/></Vertices></Region></Regions></Annotation></Annotations>",
    )
    yield ".xml", "<html><body>404</body></html>"
    yield ".xml", "<a>" * 50_000
    yield ".xml", '<?xml version="1.0" encoding="klingon"?><Annotations/>'
    for text in (
        "x,y\n1,2\n",
        "a,b,c\n1,2,3\n",
        "x,y,f\n1,nan,1\n",
        "x,y,f\n1,two,1\n",
        "",
        "\x00",
        "x,y,f\n1,inf,1\n",
        "x,y,f\n1,1e300,1\n",
    ):
        yield ".csv", text
    for raw in ("", "\x89PNG", "II*\x00", "not a picture", "\x89PNG\r\n\x1a\n" + "\x00" * 50, "II*\x00" + "\xff" * 100):
        yield ".png", raw
        yield ".tif", raw


def test_200_malformed_files_give_clear_errors_in_bounded_time(tmp_path):
    cases, start = list(malformed()), time.process_time()
    assert len(cases) >= 200
    for number, (ending, content) in enumerate(cases):
        path = tmp_path / f"case{number}{ending}"
        raw = content if isinstance(content, str) else json.dumps(content)
        path.write_bytes(raw.encode("latin-1"))
        with pytest.raises(UserError) as caught:
            read_annotations(path, size=(1000, 1000), side=10)
        said = str(caught.value)
        assert str(path) in said and len(said) < 600 and "Traceback" not in said, said
    assert time.process_time() - start < 60
