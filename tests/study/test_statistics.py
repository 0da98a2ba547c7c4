"""Paired statistics against scipy, hand-worked cases and simulation."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from gated_srp.study.statistics import (
    RATIO,
    Bootstrap,
    holm,
    paired,
    paired_bootstrap,
    seeds_needed,
    t_test,
    wilcoxon_p,
)

SURVIVAL = [0.0147, 0.0401, 0.0319, 0.0261, 0.0217]  # printed means, Gated SRP minus NA


def test_the_printed_survival_means_give_the_known_interval():
    found = t_test(SURVIVAL)
    assert round(found.mean, 4) == 0.0269
    assert (round(found.low, 4), round(found.high, 4)) == (0.0149, 0.0389)
    assert (round(found.t, 2), found.df, round(found.p, 4)) == (6.21, 4, 0.0034)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-400, 400), min_size=2, max_size=12).filter(lambda x: len(set(x)) > 1))
def test_the_plain_test_agrees_with_scipy(whole):
    values = np.array(whole) / 1000
    found, theirs = t_test(values), stats.ttest_1samp(values, 0.0)
    interval = theirs.confidence_interval(0.95)
    assert (found.t, found.p) == pytest.approx((theirs.statistic, theirs.pvalue), rel=1e-9)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=1e-12)
    assert found.excludes_zero == (found.p < 0.05)


def test_the_corrected_test_of_a_hand_worked_case():
    # Mean 0.03, variance 0.0001; five seeds and test/train 2/7: error^2 = 0.0001 (1/5 + 2/7) = 0.0001 * 17/35.
    values = 0.03 + 0.01 * np.array([-1.0, -1.0, 0.0, 1.0, 1.0])
    found = paired(values, 2 / 7)
    assert found.corrected.t == pytest.approx(0.03 / math.sqrt(0.0001 * 17 / 35))
    assert found.plain.t == pytest.approx(0.03 / math.sqrt(0.0001 / 5))
    assert found.corrected.p == pytest.approx(2 * stats.t.sf(found.corrected.t, 4))
    reach = stats.t.ppf(0.975, 4) * math.sqrt(0.0001 * 17 / 35)
    assert found.corrected.high == pytest.approx(0.03 + reach)


@pytest.mark.parametrize("values", [[0.1, 0.2, 0.3, 0.4, 0.5], [0.1, -0.2, 0.3, 0.45, -0.05], [0.3, -0.1]])
def test_wilcoxon_agrees_with_scipy_where_nothing_ties(values):
    assert wilcoxon_p(values) == pytest.approx(stats.wilcoxon(values, method="exact").pvalue)


def test_wilcoxon_of_a_hand_worked_case_with_ties_and_a_zero():
    # Signed ranks after dropping the zero: +1.5, +1.5, -3. Of eight sign patterns all sums of positive ranks are
    # 0 1.5 1.5 3 3 4.5 4.5 6, and the observed 3 is the centre: p = 1.
    assert wilcoxon_p([0.1, 0.1, -0.2, 0.0]) == 1.0
    assert wilcoxon_p([0.1, 0.1, 0.2, 0.0]) == pytest.approx(2 / 8)


def test_five_seeds_cannot_push_wilcoxon_below_one_in_sixteen():
    assert wilcoxon_p([0.1, 0.2, 0.3, 0.4, 0.5]) == 0.0625


def test_many_differences_use_the_normal_approximation():
    values = np.linspace(-0.2, 0.5, 20)
    expected = stats.wilcoxon(values, method="approx", correction=True).pvalue
    assert wilcoxon_p(values) == pytest.approx(expected)


def test_identical_arms_are_ties_with_p_one():
    found = paired([0.0, 0.0, 0.0])
    assert (found.wins, found.losses, found.ties) == (0, 0, 3)
    assert (found.plain.p, found.corrected.p, found.wilcoxon_p) == (1.0, 1.0, 1.0)
    assert (found.plain.low, found.plain.high) == (0.0, 0.0)
    assert not found.plain.excludes_zero
    assert found.seeds_needed is None


def test_differences_that_are_equal_but_for_rounding_have_no_spread_and_no_test():
    differences = np.array([0.8, 0.6, 0.4]) - np.array([0.7, 0.5, 0.3])
    assert len(set(differences)) > 1
    found = t_test(differences)
    assert found.mean == pytest.approx(0.1)
    assert math.isnan(found.p)
    assert not found.excludes_zero


def test_one_seed_and_none_have_no_interval():
    one, none = paired([0.2]), paired([])
    assert (one.n, one.plain.mean, one.wins) == (1, 0.2, 1)
    assert math.isnan(one.plain.p)
    assert not one.plain.excludes_zero
    assert (none.n, none.seeds_needed) == (0, None)
    assert math.isnan(none.wilcoxon_p)


def test_a_win_is_less_where_less_is_better():
    assert (paired([-0.1, 0.2, -0.3], lower_is_better=True).wins, paired([-0.1, 0.2, -0.3]).wins) == (2, 1)


def test_holm_of_a_hand_worked_family():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]).tolist() == []
    assert holm([0.9, 0.8]).tolist() == [1.0, 1.0]


def test_power_agrees_with_simulation():
    n = seeds_needed(0.02, 0.02)
    rng = np.random.default_rng(0)
    draws = rng.normal(0.02, 0.02, (4000, n))
    found = stats.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.05
    assert 0.78 <= found.mean() <= 0.86
    fewer = stats.ttest_1samp(draws[:, :-1], 0.0, axis=1).pvalue < 0.05
    assert fewer.mean() < 0.81


def test_no_number_of_seeds_on_the_same_data_shows_a_small_difference():
    assert seeds_needed(0.01, 0.02, RATIO) is None
    assert seeds_needed(0.01, 0.02) == 34


def test_a_huge_effect_needs_two_seeds_and_a_tiny_one_more_than_anyone_has():
    assert seeds_needed(1.0, 1e-9) == 2
    assert seeds_needed(1e-9, 1.0) is None


def test_the_corrected_test_keeps_its_five_percent_when_seeds_share_data_and_the_plain_one_does_not():
    # Equal arms whose differences share a part, by the most that the correction allows: rho = ratio / (1 + ratio).
    # Three tests a family, as of three cohorts. At this limit the rates are 5 %, so the bounds leave room for chance:
    # three standard errors of 12,000 tests (0.6 %) and of 4,000 families (1 %).
    rng, rho = np.random.default_rng(1), RATIO / (1 + RATIO)
    values = math.sqrt(rho) * rng.normal(size=(4000, 3, 1)) + math.sqrt(1 - rho) * rng.normal(size=(4000, 3, 5))
    corrected = np.array([[t_test(cohort, RATIO).p for cohort in family] for family in values])
    plain = np.array([[t_test(cohort).p for cohort in family] for family in values])
    assert np.mean(corrected < 0.05) == pytest.approx(0.05, abs=0.006)
    assert np.mean([holm(family).min() < 0.05 for family in corrected]) == pytest.approx(0.05, abs=0.01)
    assert np.mean(plain < 0.05) > 0.12


def _predictions(cases, values):
    return pd.DataFrame({"case": cases, "slide": [f"s{i}" for i in range(len(cases))], "right": values})


def test_the_bootstrap_resamples_patients_not_slides():
    # Two patients of 50 slides each: one all better, one all worse. Means over patients drawn: -1, 0 or 1.
    cases = ["a"] * 50 + ["b"] * 50
    arm, base = _predictions(cases, [1.0] * 50 + [0.0] * 50), _predictions(cases, [0.0] * 50 + [1.0] * 50)
    found = paired_bootstrap([(arm, base)], lambda frame: {"accuracy": frame["right"].mean()}, repeats=200)["accuracy"]
    assert (found.difference, found.low, found.high) == (0.0, -1.0, 1.0)
    assert found.repeats == 200


def test_the_bootstrap_of_many_patients_has_the_width_of_theory():
    rng = np.random.default_rng(0)
    cases = [f"p{i:03}" for i in range(400)]
    arm = _predictions(cases, rng.normal(0.1, 1.0, 400))
    base = _predictions(cases, np.zeros(400))[::-1]  # another order of rows
    found = paired_bootstrap([(arm, base)], lambda frame: {"m": frame["right"].mean()}, repeats=500)["m"]
    error = arm["right"].std(ddof=0) / 20
    assert found.difference == pytest.approx(arm["right"].mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_a_patient_in_several_test_sets_is_drawn_once_for_all():
    # The same table for two seeds is no more information than once.
    rng = np.random.default_rng(0)
    cases = [f"p{i}" for i in range(40)]
    pair = (_predictions(cases, rng.normal(size=40)), _predictions(cases, np.zeros(40)))
    once = paired_bootstrap([pair], lambda frame: {"m": frame["right"].mean()}, repeats=100)["m"]
    twice = paired_bootstrap([pair, pair], lambda frame: {"m": frame["right"].mean()}, repeats=100)["m"]
    assert (twice.low, twice.high) == pytest.approx((once.low, once.high))


def test_a_bootstrap_whose_metric_was_undefined_in_some_draws_says_in_how_many():
    base = pd.DataFrame({"case": ["a", "b"], "right": [0.0, 1.0]})
    metric = lambda frame: {"m": frame["right"].mean() if frame["case"].nunique() > 1 else math.nan}  # noqa: E731
    found = paired_bootstrap([(base.assign(right=1.0), base)], metric, repeats=50)["m"]
    assert (
        0 < found.repeats < 50
        and str(found) == f"+0.5000 (+0.5000 to +0.5000, {found.repeats} of 50 draws: undefined in the others)"
    )
    assert str(Bootstrap(0.1, 0.0, 0.2, 50, 50)) == "+0.1000 (+0.0000 to +0.2000)"


def test_the_bootstrap_without_predictions_says_nothing():
    assert paired_bootstrap([], lambda frame: {"m": 0.0}) == {}
