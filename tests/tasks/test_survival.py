"""Survival: likelihood, bins and metrics against hand-worked numbers, naive loops and scikit-survival."""

import math
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import trapezoid

from gated_srp.errors import UserError
from gated_srp.tasks import Survival, Task, selection_score
from gated_srp.tasks.metrics import (
    FollowUp,
    censoring_weight,
    concordance_index,
    risk_groups,
    survival_at_times,
    uno_concordance,
)

TASK = Survival((10.0, 20.0, 30.0))


def table(time, event, **more):
    return pd.DataFrame({"time": time, "event": event, **more})


@pytest.fixture(autouse=True, scope="module")
def _torchsurv():
    """On import torchsurv compiles a helper in a way that newer torch calls deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import torchsurv  # noqa: F401


def untied_cases(n, step, shift):
    """Cases made by arithmetic, so that another package sees the very same ones."""
    i = np.arange(n)
    return FollowUp.of((step * i + shift) % 211 + i / 100, (i * 7 + shift) % 5 < 3)


def wavy_logits(n):
    i = np.arange(n)
    return torch.from_numpy(np.stack([np.sin(i * (k + 1) * 0.7) + 0.3 * k - 1.0 for k in range(4)], 1))


def naive_c_index(risk, time, event):
    agreed = pairs = 0.0
    for i in range(len(risk)):
        for j in range(len(risk)):
            if event[i] and time[i] < time[j]:
                pairs += 1
                agreed += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    return agreed / pairs if pairs else math.nan


def clamped_likelihood(logits, place, event):
    """The definition, in double precision, one bag at a time."""
    hazard = logits.double().sigmoid().clamp(1e-7, 1 - 1e-7)
    total = 0.0
    for h, y, e in zip(hazard, place, event, strict=True):
        likelihood = (1 - h[:y]).log().sum() + (h[y].log() if e else (1 - h[y]).log())
        total -= float(likelihood)
    return total / len(place)


def test_an_event_pays_for_survival_before_its_bin_and_for_the_hazard_in_it():
    # Hazards 1/2, 1/4, 1/2, 1/2; event in bin 1: -log(1/2 * 1/4) = log 8.
    logits = torch.tensor([[0.0, -math.log(3.0), 0.0, 0.0]])
    assert TASK.loss(logits, TASK.encode(table([15.0], [1]))).item() == pytest.approx(math.log(8))


def test_a_censored_case_pays_for_survival_through_its_bin():
    # Censored in bin 1: -log(1/2 * 3/4) = log(8/3).
    logits = torch.tensor([[0.0, -math.log(3.0), 0.0, 0.0]])
    assert TASK.loss(logits, TASK.encode(table([15.0], [0]))).item() == pytest.approx(math.log(8 / 3))


def test_one_bag_may_come_without_its_batch_dimension():
    logits, target = torch.randn(3, 4), TASK.encode(table([1.0, 15.0, 99.0], [1, 0, 1]))
    alone = torch.stack([TASK.loss(x, t) for x, t in zip(logits, target, strict=True)]).mean()
    torch.testing.assert_close(alone, TASK.loss(logits, target))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.lists(st.floats(-40, 40, width=32), min_size=4, max_size=4), st.integers(0, 3), st.booleans()),
        min_size=1,
        max_size=6,
    )
)
def test_the_stable_loss_equals_the_clamped_definition_and_has_finite_gradients(bags):
    logits = torch.tensor([bag[0] for bag in bags], dtype=torch.float32, requires_grad=True)
    place, event = [bag[1] for bag in bags], [bag[2] for bag in bags]
    loss = TASK.loss(logits, torch.tensor(list(zip(place, map(int, event), strict=True))))
    assert loss.item() == pytest.approx(clamped_likelihood(logits.detach(), place, event), rel=1e-6, abs=1e-6)
    loss.backward()
    assert logits.grad.isfinite().all()


def test_the_loss_passes_the_numerical_gradient_check():
    logits = torch.randn(5, 4, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([[0, 1], [1, 0], [2, 1], [3, 0], [3, 1]])
    assert torch.autograd.gradcheck(lambda x: TASK.loss(x, target), logits)


def test_half_precision_logits_are_scored_in_single_precision():
    logits, target = torch.tensor([[0.5, -1.0, 2.0, 0.25]]), torch.tensor([[2, 1]])
    torch.testing.assert_close(TASK.loss(logits.bfloat16(), target), TASK.loss(logits, target))


def test_edges_are_linear_quartiles_of_the_event_times():
    # Events 1, 2, 3, 5: quartiles by hand 1.75, 2.5, 3.5. The censored times do not count.
    task = Survival.fit(table([1, 2, 3, 5, 100, 200], [1, 1, 1, 1, 0, 0]))
    assert task.edges == (1.75, 2.5, 3.5)


def test_edges_are_quartiles_of_all_times_with_fewer_than_four_events():
    assert Survival.fit(table([0, 4, 8, 12, 16], [1, 1, 0, 1, 0])).edges == (4.0, 8.0, 12.0)


def test_a_case_with_many_slides_counts_once_for_the_edges():
    slides = table([1, 1, 1, 2, 3, 5], [1] * 6, case=["a", "a", "a", "b", "c", "d"])
    assert Survival.fit(slides).edges == (1.75, 2.5, 3.5)


def test_a_time_on_an_edge_belongs_to_the_later_bin():
    assert TASK.encode(table([9.9, 10.0, 20.0, 30.0, 1e9], [1, 0, 1, 0, 1])).tolist() == [
        [0, 1],
        [1, 0],
        [2, 1],
        [3, 0],
        [3, 1],
    ]


def test_an_edge_that_single_precision_cannot_hold_still_bins_exactly():
    times = [0.1, 0.7, 1.3, 2.9, 4.1]
    task = Survival.fit(table(times, [1] * 5))
    assert task.edges == (0.7, 1.3, 2.9)
    assert task.encode(table(times, [1] * 5))[:, 0].tolist() == [0, 1, 2, 3, 3]


def test_tied_times_give_fewer_bins_and_unused_outputs_do_not_touch_the_risk():
    task = Survival.fit(table([5, 5, 5, 5, 9], [1] * 5))
    assert task.edges == (5.0,)
    assert task.num_outputs == 4
    a, b = torch.tensor([[0.1, 0.2, 9.0, 9.0]]), torch.tensor([[0.1, 0.2, -9.0, 0.0]])
    assert task.predict(a)["risk"] == task.predict(b)["risk"]


def test_risk_is_minus_the_sum_of_the_survival_curve():
    columns = TASK.predict(torch.tensor([[0.0, 0.0, 0.0, 0.0], [-50.0, 50.0, 0.0, 0.0]]))
    np.testing.assert_allclose(columns["risk"], [-(0.5 + 0.25 + 0.125 + 0.0625), -1.0], atol=1e-6)
    np.testing.assert_allclose(columns[f"survival_at_{TASK.edges[1]:.10g}"], [0.25, 1e-7], rtol=1e-6)


def test_slides_with_equal_logits_have_exactly_equal_risks():
    logits = torch.tensor([[0.3, -1.7, 0.9, 2.1]]).repeat(37, 1)
    assert len(set(TASK.predict(logits)["risk"])) == 1


def test_a_case_has_the_mean_risk_and_curve_of_its_slides():
    slides = table([7.0, 7.0, 9.0], [1, 1, 0], case=["b", "b", "a"], slide=["s1", "s2", "s3"])
    slides = slides.assign(**TASK.predict(wavy_logits(3)))
    cases = TASK.by_case(slides)
    assert cases["case"].tolist() == ["b", "a"]
    assert cases["slides"].tolist() == [2, 1]
    assert cases["time"].tolist() == [7.0, 9.0]
    assert cases["risk"][0] == pytest.approx(slides["risk"][:2].mean())
    curve = [f"survival_at_{edge:.10g}" for edge in TASK.edges]
    assert cases[curve].iloc[0].to_numpy() == pytest.approx(slides[curve][:2].mean().to_numpy())


def test_slides_of_a_case_that_disagree_about_its_time_are_refused():
    slides = table([7.0, 8.0], [1, 1], case=["p9", "p9"]).assign(**TASK.predict(wavy_logits(2)))
    with pytest.raises(UserError, match=r"case 'p9'.*'time'.*score: slide"):
        TASK.by_case(slides)


@pytest.mark.parametrize(("time", "event"), [(math.nan, 1), (-1.0, 1), (1.0, 2), (1.0, math.nan), (math.inf, 0)])
def test_a_time_or_event_that_cannot_be_read_names_its_row(time, event):
    with pytest.raises(UserError, match="row 2"):
        TASK.encode(table([1.0, time], [1, event]))


def test_answers_are_the_times_and_events_of_the_table():
    answers = TASK.answers(table([1.5, 2.5], [True, False]))
    assert answers["time"].tolist() == [1.5, 2.5]
    assert answers["event"].tolist() == [1, 0]


def test_an_empty_training_split_is_refused():
    with pytest.raises(UserError, match="no case"):
        Survival.fit(table([], []))


def test_the_c_index_of_a_hand_worked_table():
    # Case 1 before 2 (right), 3 (tied), 4 (wrong), 5 (right); case 3 before 4 (wrong), 5 (right); 4 and 5 tie in time.
    cases = FollowUp.of([1, 2, 3, 4, 4], [1, 0, 1, 1, 0])
    risk = np.array([0.5, 0.2, 0.5, 0.9, 0.1])
    assert concordance_index(risk, cases) == pytest.approx((1 + 0.5 + 0 + 1 + 0 + 1) / 6)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.integers(0, 4)), min_size=0, max_size=14))
def test_the_c_index_equals_the_naive_loop_with_ties_everywhere(rows):
    time, event, risk = (np.array([row[k] for row in rows], dtype=float) for k in range(3))
    found = concordance_index(risk, FollowUp.of(time, event))
    expected = naive_c_index(risk, time, event.astype(bool))
    assert found == pytest.approx(expected, nan_ok=True)


def test_the_c_index_counts_blocks_of_rows_like_one_block(monkeypatch):
    cases, risk = untied_cases(40, 53, 5), TASK.predict(wavy_logits(40))["risk"]
    whole = concordance_index(risk, cases)
    monkeypatch.setattr("gated_srp.tasks.metrics._ROWS", 3)
    assert concordance_index(risk, cases) == whole


def test_metrics_agree_with_scikit_survival():
    """Numbers of scikit-survival 0.28.0: concordance_index_censored, concordance_index_ipcw, integrated_brier_score and
    cumulative_dynamic_auc (mean of its three values) at the edges, with the same 60 training and 40 test cases."""
    training, cases = untied_cases(60, 37, 11), untied_cases(40, 53, 5)
    task = Survival.fit(table(training.time, training.event))
    assert task.edges == pytest.approx((46.73, 94.165, 148.5075))
    found = task.metrics(table(cases.time, cases.event).assign(**task.predict(wavy_logits(40))))
    assert found == pytest.approx(
        {
            "c_index": 0.4872881355932203,
            "uno_c": 0.4984830582330172,
            "integrated_brier": 0.24793926965744786,
            "time_auc": (0.46111111 + 0.45937032 + 0.49601973) / 3,
        },
        abs=1e-6,
    )


def test_unos_c_agrees_with_torchsurv_on_untied_times():
    from torchsurv.metrics.cindex import ConcordanceIndex

    training, cases = untied_cases(60, 37, 11), untied_cases(40, 53, 5)
    risk = TASK.predict(wavy_logits(40))["risk"]
    weight = torch.from_numpy(censoring_weight(cases.time, training))
    theirs = ConcordanceIndex()(
        torch.from_numpy(risk), torch.from_numpy(cases.event), torch.from_numpy(cases.time), weight=weight
    )
    assert uno_concordance(risk, cases, training) == pytest.approx(float(theirs), abs=1e-6)


def naive_brier_and_auc(survival, times, cases, training):
    """Graf's Brier score and Uno's AUC, one time and one pair after the other."""

    def uncensored(t):
        left = 1.0
        for u in sorted(set(training.time)):
            if u <= t:
                leaving = np.sum((training.time == u) & ~training.event)
                at_risk = np.sum(training.time >= u) - np.sum((training.time == u) & training.event)
                left *= 1 - leaving / at_risk if leaving else 1.0
        return left

    briers, aucs = [], []
    for k, t in enumerate(times):
        brier = right = pairs = 0.0
        for i in range(len(cases.time)):
            s = survival[i, k]
            if cases.time[i] > t:
                brier += (1 - s) ** 2 / uncensored(t)
            elif cases.event[i]:
                w = 1 / uncensored(cases.time[i])
                brier += w * s**2
                for j in range(len(cases.time)):
                    if cases.time[j] > t:
                        pairs += w
                        right += w * (1.0 if s < survival[j, k] else 0.5 if s == survival[j, k] else 0.0)
        briers.append(brier / len(cases.time))
        aucs.append(right / pairs)
    return trapezoid(briers, times) / (times[-1] - times[0]), np.mean(aucs)


def test_brier_and_auc_equal_naive_loops_with_tied_times_and_tied_predictions():
    i = np.arange(30)
    training = FollowUp.of(i % 12 + 1.0, i % 3 > 0)
    cases = FollowUp.of((5 * i) % 11 + 1.0, i % 4 > 0)
    survival = np.round(np.stack([0.9 - (i % 5) * 0.1, 0.7 - (i % 4) * 0.1, 0.5 - (i % 3) * 0.1], 1), 3)
    times = np.array([3.0, 6.0, 9.0])
    brier, auc = naive_brier_and_auc(survival, times, cases, training)
    found = survival_at_times(survival, times, cases, training)
    assert found == pytest.approx({"integrated_brier": brier, "time_auc": auc}, abs=1e-6)


@pytest.mark.parametrize("seed", range(30))
def test_weights_brier_and_auc_are_those_of_torchsurv_to_the_last_bit(seed):
    from torchsurv.metrics.auc import Auc
    from torchsurv.metrics.brier_score import BrierScore
    from torchsurv.stats.ipcw import get_ipcw

    rng = np.random.default_rng(seed)
    whole = seed % 2  # ties everywhere, or nowhere
    training, cases = (
        FollowUp.of(rng.integers(1, 12, n) if whole else rng.random(n) * 90, rng.random(n) < 0.6) for n in (40, 30)
    )
    times = np.quantile(cases.time, [0.25, 0.5, 0.7])
    survival = np.round(rng.random((30, 3)), 1 if whole else 9)
    event, time, points = (torch.from_numpy(a) for a in (cases.event, np.float32(cases.time), np.float32(times)))
    known = torch.from_numpy(training.event), torch.from_numpy(np.float32(training.time))
    weight, later = (get_ipcw(*known, at).double() for at in (time, points))
    np.testing.assert_array_equal(censoring_weight(cases.time, training), weight.numpy())
    given = {"new_time": points, "weight": weight, "weight_new_time": later}
    brier, estimate = BrierScore(), torch.from_numpy(survival[:, [True] * 3])  # laid out as ours: sums round alike
    brier(estimate, event, time, **given)
    auc = Auc()(1 - estimate, event, time, **given).mean()
    expected = {"integrated_brier": float(brier.integral()), "time_auc": float(auc)}
    assert survival_at_times(survival, times, cases, training) == expected


@pytest.mark.parametrize(
    ("time", "event"),
    [([], []), ([5.0], [1]), ([5.0], [0]), ([5.0, 15.0, 25.0], [0, 0, 0]), ([5.0, 5.0], [1, 1])],
)
def test_splits_without_a_comparable_pair_give_not_a_number_and_select_by_loss(time, event):
    for training in (None, FollowUp.of([1.0, 2.0], [0, 0]), untied_cases(60, 37, 11)):
        task = Survival(TASK.edges, training)
        predictions = table(time, event).assign(**task.predict(wavy_logits(len(time))))
        found = task.metrics(predictions)
        assert set(found) == {"c_index", "uno_c", "integrated_brier", "time_auc"}
        assert all(math.isnan(value) for value in found.values())
        assert selection_score(task, found, 0.25) == -0.25


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.floats(0, 50, width=32), st.booleans()), min_size=1, max_size=10),
    st.lists(st.tuples(st.floats(0, 50, width=32), st.booleans()), min_size=0, max_size=10),
)
def test_any_survival_table_gives_metrics_between_zero_and_one_or_not_a_number(training, rows):
    task = Survival.fit(table(*zip(*training, strict=True)))
    frame = table([row[0] for row in rows], [row[1] for row in rows])
    assert (task.encode(frame)[:, 0] <= len(task.edges)).all()
    found = task.metrics(frame.assign(**task.predict(wavy_logits(len(rows)))))
    for name in ("c_index", "uno_c", "time_auc"):
        assert math.isnan(found[name]) or 0 <= found[name] <= 1 + 1e-6
    assert math.isnan(found["integrated_brier"]) or found["integrated_brier"] >= 0


def test_events_after_the_training_follow_up_ends_in_censoring_weigh_nothing():
    training = FollowUp.of([1.0, 2.0, 3.0], [1, 1, 0])
    assert censoring_weight(np.array([0.5, 2.0, 3.0, 9.0]), training).tolist() == [1.0, 1.0, 0.0, 0.0]


def test_kaplan_meier_curves_and_the_log_rank_test_of_a_hand_worked_table():
    # High risk: events at 1, 2. Low risk: event at 3, censored at 4. O-E by hand: expected in high 1/2 + 1/3 = 5/6,
    # variance 1/4 + 2/9 = 17/36, statistic (2 - 5/6)^2 / (17/36) = 49/17.
    cases = FollowUp.of([1, 2, 3, 4], [1, 1, 1, 0])
    groups = risk_groups(np.array([0.9, 0.8, 0.2, 0.1]), cases, threshold=0.5)
    assert groups.statistic == pytest.approx(49 / 17)
    assert groups.p_value == pytest.approx(math.erfc(math.sqrt(49 / 17 / 2)))
    high = groups.curves[groups.curves["group"] == "high"]
    low = groups.curves[groups.curves["group"] == "low"]
    assert high["survival"].tolist() == [1.0, 0.5, 0.0]
    assert low["time"].tolist() == [0.0, 3.0, 4.0]
    assert low["survival"].tolist() == [1.0, 0.5, 0.5]
    assert low["at_risk"].tolist() == [2, 2, 1]


def test_the_log_rank_test_is_undefined_for_one_group_or_no_event():
    cases = FollowUp.of([1, 2], [1, 1])
    assert math.isnan(risk_groups(np.array([0.9, 0.8]), cases, threshold=0.5).p_value)
    assert math.isnan(risk_groups(np.array([0.9, 0.1]), FollowUp.of([1, 2], [0, 0]), threshold=0.5).p_value)
    assert risk_groups(np.array([]), FollowUp.of([], []), threshold=0.5).curves.empty


def test_survival_is_a_task_selected_by_the_c_index():
    task: Task = TASK
    assert (task.select, task.calibrates, task.truth, task.num_outputs) == ("c_index", False, ("time", "event"), 4)
    assert selection_score(task, {"c_index": 0.7}, 3.0) == 0.7
