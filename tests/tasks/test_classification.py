"""Classification against scikit-learn and hand-worked numbers."""

import math
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from gated_srp.errors import UserError
from gated_srp.tasks import Classification, selection_score

TASK = Classification(("a", "b", "NA"))


def predictions(task, logits, numbers):
    return pd.DataFrame({"label": [task.classes[i] for i in numbers], **task.predict(torch.as_tensor(logits))})


def test_the_loss_is_the_mean_cross_entropy_also_for_one_bag():
    logits = torch.tensor([[0.0, 0.0, 0.0], [math.log(2.0), 0.0, 0.0]])
    target = TASK.encode(pd.DataFrame({"label": ["NA", "a"]}))
    assert target.tolist() == [2, 0]
    assert TASK.loss(logits, target).item() == pytest.approx((math.log(3) + math.log(2)) / 2)
    assert TASK.loss(logits[1], target[1]).item() == pytest.approx(math.log(2))


def test_predictions_are_probabilities_under_the_class_names():
    columns = TASK.predict(torch.tensor([[0.0, math.log(2.0), 0.0], [0.0, 0.0, 5.0]]))
    assert list(columns) == ["predicted", "prob_a", "prob_b", "prob_NA"]
    assert columns["predicted"].tolist() == ["b", "NA"]
    np.testing.assert_allclose(columns["prob_b"][0], 0.5)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 25), st.integers(2, 5))
def test_metrics_agree_with_scikit_learn(seed, rows, classes):
    rng = np.random.default_rng(seed)
    task = Classification(tuple(map(str, range(classes))))
    target = rng.integers(0, classes, rows)
    logits = np.round(rng.normal(size=(rows, classes)), 1)  # rounded: ties happen
    rows_predicted = predictions(task, logits, target)
    found = task.metrics(rows_predicted)
    # Our own columns: another softmax would round near ties to the other side.
    probability = rows_predicted[[f"prob_{name}" for name in task.classes]].to_numpy()
    np.testing.assert_allclose(probability, torch.from_numpy(logits).softmax(1), rtol=1e-12)
    guess, every = probability.argmax(1), list(range(classes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert found["macro_f1"] == pytest.approx(
            sk.f1_score(target, guess, labels=every, average="macro", zero_division=0)
        )
        assert found["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(target, guess))
        kappa = sk.cohen_kappa_score(target, guess, labels=every, weights="quadratic")
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(target, guess))
    if len(set(target)) > 1:
        assert found["quadratic_kappa"] == pytest.approx(kappa)
    else:
        assert math.isnan(found["quadratic_kappa"])
    if len(set(target)) == classes:
        auc = np.mean([sk.roc_auc_score(target == c, probability[:, c]) for c in every])
        assert found["macro_auc"] == pytest.approx(auc, abs=1e-6)
    else:
        assert math.isnan(found["macro_auc"])
    assert found["brier"] == pytest.approx(np.mean(np.sum((probability - np.eye(classes)[target]) ** 2, 1)))


def test_an_absent_class_counts_zero_in_macro_f1():
    task = Classification(("a", "b", "c"))
    found = task.metrics(predictions(task, [[9.0, 0, 0], [0, 9.0, 0]], [0, 1]))
    assert found["macro_f1"] == pytest.approx(2 / 3)
    assert found["balanced_accuracy"] == 1.0


def test_the_calibration_error_of_a_hand_worked_table():
    # Four at confidence 0.8, three of them right: |0.8 - 0.75|. One at 0.6, wrong: 0.6. Weighted: (4 * 0.05 + 0.6) / 5.
    task = Classification(("a", "b"))
    logits = [[math.log(4.0), 0.0]] * 4 + [[math.log(1.5), 0.0]]
    found = task.metrics(predictions(task, logits, [0, 0, 0, 1, 1]))
    assert found["calibration_error"] == pytest.approx((4 * 0.05 + 0.6) / 5, abs=1e-6)


def test_no_row_gives_not_a_number_everywhere():
    found = TASK.metrics(predictions(TASK, torch.zeros(0, 3), []))
    assert len(found) == 7
    assert all(math.isnan(value) for value in found.values())


def test_a_case_has_the_mean_probability_of_its_slides():
    slides = predictions(TASK, [[0.0, 0, 0], [9.0, 0, 0], [0, 0, 9.0]], [0, 0, 2]).assign(case=["p", "p", "q"])
    cases = TASK.by_case(slides)
    assert cases["label"].tolist() == ["a", "NA"]
    assert cases["predicted"].tolist() == ["a", "NA"]
    assert cases["prob_a"][0] == pytest.approx(slides["prob_a"][:2].mean())
    assert TASK.metrics(cases)["accuracy"] == 1.0


def test_unlabelled_slides_are_averaged_by_case_too():
    slides = pd.DataFrame({"case": ["p", "p"], **TASK.predict(torch.tensor([[0.0, 0, 0], [9.0, 0, 0]]))})
    assert TASK.by_case(slides)["predicted"].tolist() == ["a"]


def test_a_case_with_two_labels_is_refused():
    slides = predictions(TASK, [[0.0, 0, 0], [9.0, 0, 0]], [0, 1]).assign(case="p7")
    with pytest.raises(UserError, match=r"case 'p7'.*'label'"):
        TASK.by_case(slides)


def test_a_strange_label_is_named():
    with pytest.raises(UserError, match="label 'c' is none of the classes"):
        TASK.encode(pd.DataFrame({"label": ["a", "c"]}))


def test_whole_numbers_are_class_numbers_and_answers_are_names():
    task = Classification(("1", "0"))
    table = pd.DataFrame({"label": [1, 0]})
    assert task.encode(table).tolist() == [1, 0]
    assert task.answers(table)["label"].tolist() == ["0", "1"]
    assert task.encode(pd.DataFrame(task.answers(table))).tolist() == [1, 0]
    with pytest.raises(UserError, match="label 2 is none of the classes"):
        task.encode(pd.DataFrame({"label": [0, 2]}))


def test_kappa_selects_when_named_and_the_loss_where_it_is_undefined():
    task = Classification(("0", "1"), select="quadratic_kappa")
    assert selection_score(task, {"quadratic_kappa": 0.4, "macro_f1": 0.9}, 1.5) == 0.4
    one_class = task.metrics(predictions(task, [[1.0, 0.0], [0.0, 1.0]], [1, 1]))
    assert selection_score(task, one_class, 1.5) == -1.5


def test_a_misspelt_selecting_metric_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="Did you mean 'macro_f1'"):
        Classification(("0", "1"), select="macrof1")


@pytest.mark.parametrize("classes", [(), ("one",), ("a", "a")])
def test_fewer_than_two_different_classes_are_refused(classes):
    with pytest.raises(UserError, match="at least two"):
        Classification(classes)
