"""Patches inside or outside drawn regions: which rows are kept, what the graph is then, and what is refused."""

import hashlib
import json
import os

import numpy as np
import pytest
import shapely
import torch
from factories import draw, make_slide, write_trident
from PIL import Image

from gated_srp.data import BagCache, Preparation, prepare, read_header
from gated_srp.data.regions import Regions, as_trained, folder_of
from gated_srp.errors import UserError
from gated_srp.srp.graph import PatchGraph

STEP = 512  # level-0 pixels of a patch of `write_trident`


@pytest.fixture
def home(tmp_path):
    """A slide of 8 x 7 patches, some missing; the tumour's edge cuts patches, the pen lies in a corner of it."""
    write_trident(tmp_path / "feats", "s1", make_slide(0, kept=0.9))
    tumour = shapely.Polygon([(0, 0), (5.3 * STEP, 0), (3.1 * STEP, 7 * STEP), (0, 6.5 * STEP)])
    draw(tmp_path / "drawn" / "s1.geojson", Tumor=tumour, pen=shapely.box(0, 0, 1.6 * STEP, 1.4 * STEP))
    return tmp_path


def feature_file(home, name="s1"):
    return next(home.joinpath("feats").rglob(f"{name}.h5"))


def covered(coords, shape, share, fine=64):
    """Naively: points of a fine grid in each patch that lie in the shape."""
    steps = (np.arange(fine) + 0.5) / fine * STEP
    found = []
    for x, y in coords:
        xs, ys = np.meshgrid(x + steps, y + steps)
        found.append(shapely.contains_xy(shape, xs.ravel(), ys.ravel()).mean() >= share)
    return np.array(found)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_kept_are_patches_by_the_share_of_their_area_as_points_count_it(home, share):
    header = read_header(feature_file(home))
    coords = header.coords.numpy()
    tumour = shapely.Polygon([(0, 0), (5.3 * STEP, 0), (3.1 * STEP, 7 * STEP), (0, 6.5 * STEP)])
    inside = covered(coords, tumour, share)
    pen = covered(coords, shapely.box(0, 0, 1.6 * STEP, 1.4 * STEP), share)
    drawn = {"annotations": home / "drawn", "cover": share}
    for rule, wanted in (
        ({"only": ("tumour",)}, inside),
        ({"exclude": ("pen",)}, ~pen),
        ({"only": ("TUMOR",), "exclude": ("Pen",)}, inside & ~pen),
    ):
        kept = Regions(**drawn, **rule).look(header)
        assert kept.rows.tolist() == np.flatnonzero(wanted).tolist()
        assert 0 < len(kept.rows) < len(coords) and f"{len(kept.rows)} of {len(coords)} patches kept" in kept.note.what
    assert kept.classes == ("Tumor", "pen")


@pytest.mark.parametrize("value", [1, 2])
def test_a_mask_of_one_label_alone_is_of_that_label(home, value):
    path = feature_file(home)
    header = read_header(path)
    (home / "drawn" / "s1.geojson").unlink()
    width, height = (-(-side // STEP) for side in header.level0_size)
    mask = np.zeros((height, width), np.uint8)
    mask[:, :2] = value
    Image.fromarray(mask).resize((width * 8, height * 8), 0).save(home / "drawn" / "s1_mask.png")
    regions = Regions(annotations=home / "drawn", exclude=(str(value),))
    kept = regions.look(header)
    wanted = header.coords[:, 0] >= 2 * header.level0_size[0] / width
    assert kept.rows.tolist() == wanted.nonzero().flatten().tolist() and 0 < len(kept.rows) < len(header.coords)
    assert "is drawn on it" not in kept.note.what
    regions.refuse_unknown_classes(kept.classes)


@pytest.mark.parametrize("more", [{}, {"order": "raster"}, {"cap": 9}, {"cap": 9, "order": "raster", "window": 5}])
def test_the_bag_is_that_of_the_kept_rows_alone_and_so_is_its_graph(home, more):
    regions = Regions(annotations=home / "drawn", only=("tumour",), exclude=("pen",))
    settings, path = Preparation(regions=regions, **more), feature_file(home)
    bag, whole = prepare(path, settings), prepare(path, Preparation())
    rows = regions.look(read_header(path)).rows
    coords = whole.coords[rows]
    if cap := more.get("cap"):  # of what the regions leave, sorted by x and y, at even spacing
        order = sorted(range(len(coords)), key=lambda i: tuple(coords[i].tolist()))
        rows = rows[[order[int(i)] for i in np.linspace(0, len(order) - 1, cap)]]
    if more.get("order") == "raster":
        rows = torch.tensor(sorted(rows.tolist(), key=lambda row: tuple(whole.coords[row].flip(0).tolist())))
    assert torch.equal(bag.coords, whole.coords[rows]) and torch.equal(bag.features, whole.features[rows])
    graph = PatchGraph.from_coords(bag.coords, stride=STEP, window=more.get("window", 3)).with_features(bag.features)
    for part in ("neighbours", "offsets", "homogeneity"):
        assert torch.equal(getattr(bag.graph, part), getattr(graph, part)), part
    assert bag.num_patches == len(coords)
    assert [note.kind for note in bag.warnings if note.kind != "encoder"] == ["regions", *(["cap"] if cap else [])]


def test_a_file_is_found_by_the_slides_own_name_never_by_a_similar_one(home, tmp_path):
    regions = Regions(annotations=home / "drawn", only=("tumour",))
    for name in ("s1_2.geojson", "s10.xml", "deep/s3_mask.png", "S4.svs.geojson", ".s5.geojson"):
        (home / "drawn" / name).parent.mkdir(exist_ok=True)
        (home / "drawn" / name).touch()
    found = {name: regions.file_of(name) for name in ("s1", "s1_2", "feats/s3.h5", "s4.svs", "s5", "s", "s2_patches")}
    names = {name: file and file.name for name, file in found.items()}
    assert names == {
        "s1": "s1.geojson",
        "s1_2": "s1_2.geojson",
        "feats/s3.h5": "s3_mask.png",
        "s4.svs": "S4.svs.geojson",
        "s5": None,
        "s": None,
        "s2_patches": None,
    }
    old = 1_600_000_000
    for folder in (home / "drawn", home / "drawn" / "deep"):
        os.utime(folder, (old, old))  # long ago: the listing is remembered
    assert regions.file_of("s9") is None
    (home / "drawn" / "deep" / "s9.geojson").touch()
    assert regions.file_of("s9").name == "s9.geojson"
    (home / "drawn" / "deep" / "s1.xml").touch()
    with pytest.raises(UserError, match=r"slide s1 has 2 files of annotations: deep/s1.xml, s1.geojson"):
        regions.file_of("s1")


def test_a_slide_without_a_file_and_a_slide_without_a_patch_left_are_named(home):
    write_trident(home / "feats", "s2", make_slide(1))
    path, rule = feature_file(home, "s2"), {"annotations": home / "drawn", "only": ("tumour",)}
    with pytest.raises(UserError, match=r"s2.h5: no file of annotations in .* has the name of slide 's2'") as caught:
        prepare(path, Preparation(regions=Regions(**rule)))
    assert caught.value.kind == "unannotated" and "unannotated: whole" in caught.value.cure
    whole = prepare(path, Preparation(regions=Regions(**rule, unannotated="whole")))
    assert torch.equal(whole.features, prepare(path, Preparation()).features)
    (note,) = (note for note in whole.warnings if note.kind == "regions")
    assert note.level == "warning" and "the whole slide is used" in note.what
    draw(home / "drawn" / "s2.geojson", stroma=shapely.box(0, 0, 99, 99))
    with pytest.raises(UserError, match=r"s2.h5: no patch is left: none of \d+ is .* tumour \(drawn on it: stroma\)"):
        prepare(path, Preparation(regions=Regions(**rule)))
    with pytest.raises(UserError, match="no such folder of annotations"):
        prepare(path, Preparation(regions=Regions(annotations=home / "none", only=("tumour",))))


def test_a_cached_bag_follows_its_rule_and_its_annotations(home):
    cache, path = BagCache(home / "cache"), feature_file(home)
    rules = [{"only": ("tumour",)}, {"exclude": ("pen",)}, {"only": ("tumour",), "cover": 0.2}]
    settings = [Preparation(regions=Regions(annotations=home / "drawn", **rule)) for rule in rules]
    assert len({cache.entry(path, one) for one in (Preparation(), *settings)}) == 4
    sizes = [cache.read(path, one).num_patches for one in settings]
    draw(home / "drawn" / "s1.geojson", Tumor=shapely.box(0, 0, 2 * STEP, 2 * STEP))
    again = cache.read(path, settings[0])
    assert again.num_patches < sizes[0] and torch.equal(again.coords, prepare(path, settings[0]).coords)


def test_an_entry_without_regions_keeps_the_name_that_it_had_before_there_were_any(home):
    path = feature_file(home)
    facts = {"format": 1, "path": str(path.resolve()), "encoder": None, "features_key": None, "coords_key": None}
    facts |= {
        "stride": None,
        "window": 3,
        "lattice": "floor",
        "order": "file",
        "cap": None,
        "dtype": None,
        "images": None,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]
    assert BagCache(home / "cache").entry(path, Preparation()).name == f"s1-{digest}.safetensors"


def test_a_models_rule_is_applied_where_a_folder_is_named_and_nothing_else_passes():
    rule = {"only": ["tumour"], "exclude": [], "cover": 0.5, "unannotated": "whole"}
    found = as_trained(rule, folder_of("drawn"), "run")
    assert (found.only, found.cover, found.unannotated, str(found.annotations)) == (("tumour",), 0.5, "whole", "drawn")
    same = Regions(annotations="drawn", only=("Tumor",))
    assert as_trained(rule, same, "run") is same and as_trained(None, folder_of("drawn"), "run") is None
    with pytest.raises(UserError, match=r"run: trained on patches at least 50 % inside tumour, and nothing says where"):
        as_trained(rule, None, "run")
    for other in ({"only": ("stroma",)}, {"only": ("tumour",), "cover": 0.6}, {"exclude": ("tumour",)}):
        with pytest.raises(UserError, match="trained on patches at least 50 % inside tumour, but those are asked for"):
            as_trained(rule, Regions(annotations="drawn", **other), "run")
    with pytest.raises(UserError, match="trained on all patches of its slides, but only those are asked for"):
        as_trained(None, same, "run")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"annotations": "d"}, "nothing to choose by"),
        ({"only": "tumour"}, "nothing to choose by"),
        ({"annotations": "d", "only": "a", "excluded": "b"}, "no such setting: excluded"),
        ({"annotations": "d", "only": "Tumor", "exclude": "tumour"}, "is in only and in exclude"),
        ({"annotations": "d", "only": "a", "cover": 0}, "expected above 0, up to 1"),
    ],
)
def test_rules_that_mean_nothing_are_refused(settings, said):
    with pytest.raises(UserError, match=said):
        Regions.of(settings)
