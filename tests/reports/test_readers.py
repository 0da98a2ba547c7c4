"""Blinded pairs of maps: nothing on the page says whose they are, and answers are counted as by hand."""

import json

import numpy as np
import pytest
from PIL import Image
from reports.viewer_folders import CARD, features, run
from scipy.stats import beta

from gated_srp import readers, score_readers
from gated_srp.errors import UserError
from gated_srp.reports import readers as module
from gated_srp.reports.maps import PatchMap


@pytest.fixture(scope="module")
def sheet(tmp_path_factory):
    home = tmp_path_factory.mktemp("readers")
    runs = [run(home, arm) for arm in ("na", "gated_srp")]
    (home / "feats").mkdir()
    for number in range(6):
        features(home / "feats", f"tumour_{number}")
    return readers(runs, home / "feats", seed=3, out=home / "out"), runs


def answers(folder, sheet, reader, choices):
    """``choices``: by pair, the run preferred (0, 1), or None for neither."""
    key = json.loads(sheet.key.read_text())
    sides = [
        ("left" if choice == pair["left"] else "right") if choice is not None else "none"
        for choice, pair in zip(choices, key["pairs"], strict=True)
    ]
    path = folder / f"{reader}.json"
    listed = [{"pair": i, "choice": side, "remark": ""} for i, side in enumerate(sides)]
    path.write_text(json.dumps({"sheet": key["sheet"], "reader": reader, "answers": listed}))
    return path


def test_the_page_names_neither_runs_nor_slides_and_the_sides_are_mixed(sheet):
    found, runs = sheet
    text = found.page.read_text()
    for hidden in ("na/seed42", "gated_srp", "tumour_", str(runs[0]), "seed42"):
        assert hidden not in text
    assert text.count("data:image/jpeg;base64,") == 12 and "http://" not in text and "https://" not in text
    key = json.loads(found.key.read_text())
    assert sorted(pair["slide"] for pair in key["pairs"]) == [f"tumour_{i}" for i in range(6)]
    assert {pair["left"] for pair in key["pairs"]} == {0, 1}
    assert [pair["slide"] for pair in key["pairs"]] != sorted(pair["slide"] for pair in key["pairs"])


def test_a_pair_has_one_scale_or_is_refused(tmp_path, monkeypatch):
    runs = [run(tmp_path, arm) for arm in ("na", "diff")]
    shown = []
    pixel = Image.new("RGB", (1, 1))
    monkeypatch.setattr(module, "draw_maps", lambda maps, to, **_: shown.append(maps[0][2]) or pixel.save(to))
    readers(runs, features(tmp_path), out=tmp_path / "out")
    assert [one.signed for one in shown] == [False, False]  # of differential attention its positive part
    scales = iter([2.0, 1.0])
    flat = lambda *args, **how: [PatchMap("beta", "beta", np.ones(3), regimes=True, limit=next(scales))]  # noqa: E731
    monkeypatch.setattr(module, "maps_of", flat)
    with pytest.raises(UserError, match="which tells them apart"):
        readers(runs, tmp_path / "s1.h5", value="beta", out=tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_a_model_that_sees_more_than_a_slide_is_refused_in_words(tmp_path):
    runs = [run(tmp_path, arm, card=CARD | {"bag": "patient"}) for arm in ("na", "gated_srp")]
    with pytest.raises(UserError, match="all slides of a patient") as caught:
        readers(runs, features(tmp_path), out=tmp_path / "out")
    assert "heatmap --table" in caught.value.cure


def test_preferences_have_exact_intervals_and_the_majority_counts_per_slide(sheet, tmp_path):
    found, _ = sheet
    paths = [
        answers(tmp_path, found, "ana", [1, 1, 1, 1, 0, None]),
        answers(tmp_path, found, "ben", [1, 1, 0, 1, 0, 1]),
        answers(tmp_path, found, "cleo", [1, 0, 1, 1, 0, None]),
    ]
    score = score_readers(paths, key=found.key)
    ana = score.table.loc["ana"]
    assert (ana["first"], ana["second"], ana["no_preference"]) == (1, 4, 1)
    # Clopper and Pearson by the quantiles of the beta distribution
    assert (ana["low"], ana["high"]) == pytest.approx((beta.ppf(0.025, 4, 2), beta.ppf(0.975, 5, 1)))
    together = score.table.loc["all, by majority"]
    assert (together["first"], together["second"], together["no_preference"]) == (1, 5, 0)
    assert together["p"] == pytest.approx(2 * (1 + 6) / 64)
    assert "No preference can be told from chance" in score.verdict and "83 % of 6 slides" in score.verdict


def test_kappa_is_cohens_over_the_pairs_both_answered(sheet, tmp_path):
    from sklearn.metrics import cohen_kappa_score

    found, _ = sheet
    mine, other = [1, 0, 1, None, 0, 1], [1, 1, 1, None, 0, 0]
    paths = [answers(tmp_path, found, "a", mine), answers(tmp_path, found, "b", other)]
    codes = [[-1 if choice is None else choice for choice in one] for one in (mine, other)]
    assert score_readers(paths, key=found.key).kappa == pytest.approx(cohen_kappa_score(*codes))
    assert np.isnan(score_readers(paths[:1], key=found.key).kappa)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sheet": "other"}, "another sheet"),
        ({"answers": [{"pair": 99, "choice": "left"}]}, "unknown or answered twice"),
        ({"answers": [{"pair": 0, "choice": "left"}, {"pair": 0, "choice": "right"}]}, "unknown or answered twice"),
        ({"answers": [{"pair": 0, "choice": "up"}]}, "not a file of this kind"),
        ({"answers": []}, "no pair is answered"),
        ({"reader": 3}, "not a file of this kind"),
    ],
)
def test_a_file_that_is_not_an_answer_is_refused(sheet, tmp_path, change, said):
    found, _ = sheet
    path = answers(tmp_path, found, "ana", [1] * 6)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=said):
        score_readers([path], key=found.key)


def test_a_reader_counts_once(sheet, tmp_path):
    found, _ = sheet
    path = answers(tmp_path, found, "ana", [1] * 6)
    with pytest.raises(UserError, match="second file of the reader"):
        score_readers([path, path], key=found.key)
