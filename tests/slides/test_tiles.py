"""Tissue is found where it was put; the lattice is one for the slide and in level-0 pixels."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from images import picture, write_slide

from gated_srp.errors import UserError
from gated_srp.slides import reader
from gated_srp.slides.reader import SlideError, SlideImage, find_slides, nominal_magnification
from gated_srp.slides.tiles import (
    Tiling,
    TissueMask,
    find_pen,
    find_tissue,
    footprint,
    lattice,
    otsu,
    plan_slide,
    read_tiles,
)


def test_otsu_splits_as_the_largest_variance_between_classes_says():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(40, 8, 3000), rng.normal(160, 20, 1000)]).clip(0, 255).astype(np.uint8)

    def between(t):
        low, high = values[values <= t].astype(float), values[values > t].astype(float)
        return len(low) * len(high) * (low.mean() - high.mean()) ** 2 if len(low) and len(high) else -1.0

    assert between(otsu(values)) == pytest.approx(max(between(t) for t in range(256)))


def test_the_mask_covers_the_tissue_fills_small_holes_keeps_large_ones_and_drops_crumbs():
    image = picture((300, 200), [(40, 40, 160, 120), (250, 20, 4, 4)])
    image[80:85, 80:85] = 245  # a small hole
    image[100:140, 120:160] = 245  # a lumen
    mask = find_tissue(image, smallest=100, largest_hole=200)
    wanted = np.zeros((200, 300), bool)
    wanted[40:160, 40:200] = True
    wanted[100:140, 120:160] = False
    assert (mask != wanted).mean() < 0.005
    assert mask[82, 82]
    assert not mask[120, 140]
    assert not mask[:, 240:].any()


def test_blank_glass_and_black_frames_are_not_tissue():
    image = picture((200, 200), [])
    image[:, :30] = 3
    assert not find_tissue(image, smallest=20, largest_hole=20).any()


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 60)), min_size=1, max_size=8), st.integers(4, 40))
def test_the_share_of_tissue_under_a_patch_is_the_mean_of_the_mask_there(corners, side):
    mask = np.random.default_rng(0).random((60, 80)) < 0.5
    coords = np.array(corners)
    found = TissueMask(mask, 2.0).fraction(coords, side)
    for (x, y), share in zip(corners, found, strict=True):
        x0, y0 = min(int(x // 2), 79), min(int(y // 2), 59)
        part = mask[y0 : -(-(y + side) // 2), x0 : -(-(x + side) // 2)]
        assert share == pytest.approx(part.mean())


@given(st.integers(1, 900), st.integers(1, 900), st.integers(1, 120), st.integers(1, 120))
def test_the_lattice_holds_every_patch_that_fits_and_no_other(width, height, side, stride):
    wanted = [(x, y) for y in range(0, height, stride) for x in range(0, width, stride)]
    wanted = [(x, y) for x, y in wanted if x + side <= width and y + side <= height]
    assert [tuple(corner) for corner in lattice((width, height), side, stride).tolist()] == wanted


@pytest.mark.parametrize(("mpp", "expected"), [(0.5, 20), (0.2528, 40), (0.2265, 40), (1.0, 10), (0.35, 10 / 0.35)])
def test_the_nominal_magnification_is_the_one_scanners_are_sold_with(mpp, expected):
    assert nominal_magnification(mpp) == pytest.approx(expected)


def _info(tmp_path, **settings):
    path = write_slide(tmp_path / "s.tif", picture((1024, 768), [(100, 100, 600, 500)]), **settings)
    with SlideImage(path) as slide:
        return path, slide.info


def test_a_slide_at_40x_is_read_from_the_level_of_20x_as_it_is(tmp_path):
    path, info = _info(tmp_path, mpp=0.25, downsamples=(2, 4))
    where = footprint(info, Tiling(size=64), info.magnification)
    assert (where.side, where.stride, where.level, where.read) == (128, 128, 1, 64)
    image = picture((1024, 768), [(100, 100, 600, 500)])
    tiles = read_tiles(path, where, 64, np.array([[128, 256]]))
    assert np.array_equal(tiles[0], image[::2, ::2][128:192, 64:128])


@pytest.mark.parametrize("magnification", [19.7, 20.3])
def test_within_two_percent_nothing_is_resampled(tmp_path, magnification):
    _, info = _info(tmp_path)
    where = footprint(info, Tiling(size=64), magnification)
    assert (where.side, where.read) == (64, 64)


def test_without_a_level_of_the_wanted_magnification_a_finer_one_is_resampled(tmp_path):
    path, info = _info(tmp_path, downsamples=(4,))
    where = footprint(info, Tiling(size=64, magnification=10), 20)
    assert (where.side, where.stride, where.level, where.read) == (128, 128, 0, 128)
    tile = read_tiles(path, where, 64, np.array([[128, 128]]))[0].astype(float)
    own = picture((1024, 768), [(100, 100, 600, 500)])[128:256, 128:256].astype(float)
    assert np.abs(tile.mean((0, 1)) - own.mean((0, 1))).max() < 1


def test_overlap_shortens_the_stride_and_not_the_patch(tmp_path):
    path, _ = _info(tmp_path, mpp=0.25, downsamples=(2,))
    plan = plan_slide(path, Tiling(size=64, overlap=16))
    assert (plan.footprint.side, plan.footprint.stride) == (128, 96)
    assert (plan.coords % 96 == 0).all()


def test_more_detail_than_was_scanned_is_refused(tmp_path):
    path, _ = _info(tmp_path, mpp=1.0)
    with pytest.raises(SlideError, match="scanned at 10x, asked for 20x"):
        plan_slide(path, Tiling(size=64))


@pytest.mark.parametrize("settings", [{"mpp": None}, {"mpp": 352.8, "unit": 3}, {"mpp": 0.5, "unit": 1}])
def test_a_slide_without_a_believable_mpp_asks_for_one_and_takes_it(tmp_path, settings):
    path, info = _info(tmp_path, **settings)
    assert info.mpp is None
    with pytest.raises(SlideError, match=r"--mpp 0\.25"):
        plan_slide(path, Tiling(size=64))
    assert plan_slide(path, Tiling(size=64), mpp=0.25).footprint.side == 128


def test_the_mpp_that_was_given_overrules_the_slide(tmp_path):
    path, info = _info(tmp_path, mpp=0.5)
    assert info.magnification == 20
    assert plan_slide(path, Tiling(size=64), mpp=0.25).magnification == 40


def test_patches_lie_on_the_tissue_and_cover_it(tmp_path):
    path, _ = _info(tmp_path)
    plan = plan_slide(path, Tiling(size=64, tissue=0.28), picture=tmp_path / "p.jpg")
    wanted = [(x, y) for y in range(0, 768, 64) for x in range(0, 1024, 64) if _share(x, y) >= 0.28]
    assert [tuple(c) for c in plan.coords.tolist()] == wanted
    assert (tmp_path / "p.jpg").read_bytes()[:2] == b"\xff\xd8"


def _share(x, y):
    """Of the patch at (x, y) in the piece (100, 100, 600, 500)."""
    wide, high = min(x + 64, 700) - max(x, 100), min(y + 64, 600) - max(y, 100)
    return max(0, wide) * max(0, high) / 64**2


def test_odd_sizes_and_a_slide_smaller_than_a_patch_are_no_trouble(tmp_path):
    odd = write_slide(tmp_path / "odd.tif", picture((131, 197), [(5, 5, 120, 180)]), downsamples=())
    plan = plan_slide(odd, Tiling(size=64))
    assert plan.coords.max(0).tolist() == [64, 128]
    small = write_slide(tmp_path / "small.tif", picture((40, 50), [(5, 5, 30, 30)]), downsamples=())
    assert plan_slide(small, Tiling(size=64)).coords.shape == (0, 2)


def test_the_overview_shows_each_place_where_it_is(tmp_path):
    """A mark far from the corner is where its level-0 position says, at a scale that divides nothing evenly."""
    image = picture((3001, 2003), [])
    image[1780:1800, 2900:2920] = (200, 30, 90)
    path = write_slide(tmp_path / "s.tif", image, downsamples=())
    with SlideImage(path) as slide:
        seen = slide.overview(7.3)
    coloured = np.argwhere(seen[..., 0].astype(int) - seen[..., 1] > 40)
    assert np.abs(coloured.mean(0) * 7.3 + 3.65 - (1790, 2910)).max() < 4


def test_without_openslide_tiffslide_reads_the_same_pixels(tmp_path, monkeypatch):
    pytest.importorskip("tiffslide", reason="tiffslide is not installed")
    path, info = _info(tmp_path, downsamples=(2,))
    with SlideImage(path) as slide:
        wanted = slide.read(128, 96, level=1, size=(50, 40))

    def missing():
        raise ImportError("openslide")

    monkeypatch.setattr(reader, "_openslide", missing)
    with SlideImage(path) as slide:
        assert (slide.info.size, slide.info.downsamples) == (info.size, info.downsamples)
        assert slide.info.mpp == pytest.approx(info.mpp)
        assert np.array_equal(slide.read(128, 96, level=1, size=(50, 40)), wanted)


@pytest.mark.parametrize(
    ("name", "content"), [("text.svs", b"hello\n" * 99), ("none.svs", b""), ("t.tif", b"II*\0\x08")]
)
def test_what_is_no_slide_is_refused_with_its_name(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SlideError, match=rf"{name}: not a slide"):
        SlideImage(tmp_path / name)


def test_a_truncated_slide_is_refused_when_its_pixels_are_missed(tmp_path):
    path, _ = _info(tmp_path, downsamples=())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SlideError, match=r"s\.tif"):
        plan_slide(path, Tiling(size=64))


def test_slides_are_found_below_a_folder_and_hidden_files_are_not(tmp_path):
    for name in ("b/x.svs", "a.NDPI", "notes.txt", "._a.svs"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert [p.name for p in find_slides(tmp_path)] == ["a.NDPI", "x.svs"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no slides"):
        find_slides(tmp_path / "empty")


def test_the_real_slide_is_cut_where_its_tissue_is(real_slide):
    plan = plan_slide(real_slide, Tiling(size=256))
    assert (plan.magnification, plan.footprint.side, plan.footprint.stride) == (20.0, 256, 256)
    assert 35 <= len(plan.coords) <= 50
    with SlideImage(real_slide) as slide:
        tiles = read_tiles(real_slide, plan.footprint, 256, plan.coords)
        for corner, tile in zip(plan.coords.tolist(), tiles, strict=True):
            assert np.array_equal(tile, slide.read(*corner, level=0, size=(256, 256)))
            assert (tile.max(-1).astype(int) - tile.min(-1) > 20).mean() > 0.1  # coloured: on tissue
        outside = {tuple(c) for c in lattice(slide.info.size, 256, 256).tolist()} - {
            tuple(c) for c in plan.coords.tolist()
        }
        glass = [slide.read(*corner, level=0, size=(256, 256)) for corner in sorted(outside)]
    assert max((g.max(-1).astype(int) - g.min(-1) > 20).mean() for g in glass) < 0.35


# Ink -------------------------------------------------------------------------------------------------------------------

INKS = {
    "blue": (35, 60, 165),
    "green": (30, 120, 60),
    "black": (25, 25, 28),
    "red": (200, 30, 40),
    "violet": (110, 40, 150),
}


def stained(size, seed=0):
    """Stroma, epithelium and nuclei as H&E colours them, and glass."""
    rng = np.random.default_rng(seed)
    kinds = np.array([(225, 150, 190), (190, 110, 165), (95, 60, 130), (242, 241, 243)])
    return (
        (kinds[rng.integers(0, 4, size[::-1])] + rng.integers(-12, 13, (*size[::-1], 3))).clip(0, 255).astype(np.uint8)
    )


@pytest.mark.parametrize("ink", INKS)
def test_blue_green_and_black_ink_is_found_red_and_violet_is_not_and_stain_never(ink):
    image = stained((300, 240))
    stroke = np.zeros((240, 300), bool)
    stroke[100:125, 20:280] = True
    image[stroke] = np.array(INKS[ink]) + np.random.default_rng(1).integers(-8, 9, (stroke.sum(), 3))
    found = find_pen(image, microns=4.0)
    assert found[stroke].mean() == pytest.approx(float(ink in ("blue", "green", "black")), abs=0.02)
    assert not found[:90].any() and not found[135:].any()
    image[40:44, 40:44] = INKS["blue"]  # a speck, smaller than any stroke
    assert not find_pen(image, microns=4.0)[30:60, 30:60].any()


def test_patches_with_ink_are_left_out_with_a_word_and_only_if_asked(tmp_path):
    image = picture((1600, 1280), [(0, 0, 1600, 1280)])
    image[290:360] = INKS["blue"]
    path = write_slide(tmp_path / "a.tif", image, mpp=0.5)
    whole, clean = (plan_slide(path, Tiling(size=128, exclude_pen=asked)) for asked in (False, True))
    assert sorted({y for _, y in whole.coords.tolist()}) == [128 * i for i in range(10)] and not whole.notes
    assert sorted({y for _, y in clean.coords.tolist()}) == [128 * i for i in range(10) if i != 2]
    (note,) = clean.notes
    assert f"12 of {10 * 12} patches left out for ink" in note.what


def test_no_ink_is_found_on_the_real_slide(real_slide):
    whole, clean = (plan_slide(real_slide, Tiling(size=256, exclude_pen=asked)) for asked in (False, True))
    assert clean.coords.tolist() == whole.coords.tolist() and not clean.notes
