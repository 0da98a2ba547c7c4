"""Maps of test slides on the page: the reference beside the arm with gates beside their difference."""

import base64
import io
import re
import shutil

import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image
from reports.page_folders import with_maps
from reports.viewer_folders import CELLS, SIDE, image

from gated_srp.reports.maps import maps_of, view_slide
from gated_srp.reports.page import build_page
from gated_srp.reports.page.contents import read_contents
from gated_srp.reports.page.sides import FIRST, _pairs, side_by_side


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return with_maps(tmp_path_factory.mktemp("sides"))


@pytest.fixture(scope="module")
def sides(home):
    return side_by_side(read_contents(home))


def picture(panel):
    return Image.open(io.BytesIO(base64.b64decode(panel.uri.partition(",")[2]))).convert("RGB")


def attention(home, arm, slide):
    view = view_slide(home / "runs" / "toy" / arm / "seed42", home / "features" / f"{slide}.h5")
    return maps_of(view, "attention")[0].values.astype(float)


def test_each_test_slide_has_both_arms_and_their_difference_and_truth_where_it_is_known(sides):
    assert [one.slide for one in sides.slides] == [f"s{i:02d}" for i in range(8)]
    three = ["NA", "Gated SRP", "Gated SRP minus NA"]
    assert [panel.heading for panel in sides.slides[0].panels] == ["what is true", *three]
    assert [panel.heading for panel in sides.slides[1].panels] == three
    assert sides.slides[0].words.startswith("label a; NA: predicted ") and sides.slides[0].words.endswith("seed 42")
    assert sides.notes == ("Maps of 8 of 13 test slides; 5 of them without a feature file where the settings say.",)


def test_the_difference_has_the_colour_of_its_number_at_each_patch(home, sides):
    na, gated = (attention(home, arm, "s03") for arm in ("na", "gated_srp"))
    apart = gated / gated.mean() - na / na.mean()  # shares of the mean, shown from -1 to 1
    assert np.abs(apart).max() > 0.2
    drawn, middle = np.asarray(picture(sides.slides[3].panels[-1]), float), SIDE // 2
    scale = drawn.shape[1] / ((CELLS[:, 0].max() - CELLS[:, 0].min() + 1) * SIDE)
    corner = CELLS.min(0) * SIDE
    for (x, y), value in zip(CELLS * SIDE - corner, apart, strict=True):
        wanted = colormaps["PuOr_r"](float(np.clip(value / 2 + 0.5, 0, 1)), bytes=True)[:3]
        at = drawn[int((y + middle) * scale), int((x + middle) * scale)]
        assert np.abs(at - np.array(wanted, float)).max() <= 12, (x, y)  # of 128 colours


def test_scores_are_the_share_of_pairs_in_which_the_true_patch_comes_first(home, sides):
    values, true = attention(home, "na", "s00"), np.arange(len(CELLS)) % 5 == 0
    pairs = [(a > b) + 0.5 * (a == b) for a in values[true] for b in values[~true]]
    assert sides.slides[0].scores["attention of NA"] == pytest.approx(np.mean(pairs))
    listed = {name: (middle, low, high, count) for _, name, middle, low, high, count in sides.truth}
    assert listed["attention of NA"] == (sides.slides[0].scores["attention of NA"],) * 3 + (1,)
    assert {"attention of Gated SRP", "beta of Gated SRP, layer 1", "low homogeneity"} <= set(listed)
    assert sides.slides[1].scores == {}


def test_rows_of_the_slide_table_lead_to_their_maps(home):
    page = build_page(home)
    for number in range(8):
        assert f'<a href="#map{number}">s{number:02d}</a>' in page
        assert f'id="map{number}"' in page
    assert not re.search(r'href="#map\d+">s09<', page) and "2 more slides" in page and FIRST == 6
    assert "Maps where truth is known" in page and "Finds what is true: attention of NA" in page


def test_few_maps_none_and_maps_on_tissue_can_be_asked_for(home, tmp_path):
    contents = read_contents(home)
    assert [one.slide for one in side_by_side(contents, most=2).slides] == ["s00", "s01"]
    assert (
        side_by_side(contents, most=2)
        .notes[0]
        .endswith("6 left out to keep the page small and quick (`--maps 8` draws more).")
    )
    none = side_by_side(contents, most=0)
    assert none.slides == () and none.notes == ()
    image(tmp_path).rename(tmp_path / "s01.tif")
    bare, tissue = side_by_side(contents, most=2, wsi=tmp_path).slides
    assert bare.panels[-1].uri.startswith("data:image/png") and tissue.panels[-1].uri.startswith("data:image/jpeg")
    wide, high = picture(tissue.panels[0]).size
    assert wide / high == pytest.approx(700 / 500, abs=0.02)


def test_a_run_with_settings_of_its_own_is_not_shown_under_the_plain_arms_name(home, tmp_path):
    shutil.copytree(home, tmp_path / "all")
    shutil.copytree(home / "runs" / "toy" / "gated_srp", tmp_path / "all/runs/variants/train.gate_lr=10/toy/gated_srp")
    contents = read_contents(tmp_path / "all")
    assert len(contents.runs) == 12
    (pairs,) = _pairs(contents)
    assert [str(run.path.relative_to(tmp_path / "all")) for run in pairs[0].runs] == [
        f"runs/toy/{arm}/seed42" for arm in ("na", "gated_srp")
    ]


def test_a_report_without_its_feature_files_says_so_and_draws_the_rest(home):
    (home / "features").rename(home / "elsewhere")
    try:
        page = build_page(home)
    finally:
        (home / "elsewhere").rename(home / "features")
    assert 'id="sides"' not in page and "Maps that could not be drawn" in page and "Gated SRP against NA" in page
