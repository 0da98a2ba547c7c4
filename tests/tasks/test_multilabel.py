"""Multilabel against scikit-learn and hand-worked numbers."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from gated_srp.data.table import Columns, read_table
from gated_srp.errors import UserError
from gated_srp.tasks import Multilabel, selection_score

TASK = Multilabel(("E", "H", "M"))


def predictions(task, logits, truth):
    truth = pd.DataFrame(np.asarray(truth).reshape(-1, task.num_outputs), columns=list(task.classes))
    return truth.assign(**task.predict(torch.as_tensor(logits)))


def test_the_loss_is_the_mean_over_bags_and_labels_also_for_one_bag():
    logits = torch.tensor([[0.0, math.log(3.0), 0.0], [0.0, 0.0, 0.0]])
    target = TASK.encode(pd.DataFrame([[1, 1, 0], [0, 0, 1]], columns=["E", "H", "M"]))
    one = (math.log(2) + math.log(4 / 3) + math.log(2)) / 3
    assert TASK.loss(logits[0], target[0]).item() == pytest.approx(one)
    assert TASK.loss(logits, target).item() == pytest.approx((one + math.log(2)) / 2)


def test_answers_are_the_labels_of_the_table():
    answers = TASK.answers(pd.DataFrame([[1, 0, 1], [0, 0, 1]], columns=["E", "H", "M"]))
    assert {name: column.tolist() for name, column in answers.items()} == {"E": [1, 0], "H": [0, 0], "M": [1, 1]}


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 20))
def test_metrics_agree_with_scikit_learn(seed, rows):
    rng = np.random.default_rng(seed)
    logits, truth = np.round(rng.normal(size=(rows, 3)), 1), rng.integers(0, 2, (rows, 3))
    found = TASK.metrics(predictions(TASK, logits, truth))
    positive = logits >= 0
    assert found["accuracy"] == pytest.approx((positive == truth).mean())
    f1 = [sk.f1_score(truth[:, k], positive[:, k], labels=[1], average="macro", zero_division=0) for k in range(3)]
    assert found["macro_f1"] == pytest.approx(np.mean(f1))
    with_positive = [k for k in range(3) if truth[:, k].any()]
    with_both = [k for k in with_positive if not truth[:, k].all()]
    precision = [sk.average_precision_score(truth[:, k], logits[:, k]) for k in with_positive]
    auc = [sk.roc_auc_score(truth[:, k], logits[:, k]) for k in with_both]
    assert found["macro_map"] == pytest.approx(np.mean(precision) if precision else math.nan, abs=1e-6, nan_ok=True)
    assert found["macro_auc"] == pytest.approx(np.mean(auc) if auc else math.nan, abs=1e-6, nan_ok=True)


def test_a_label_is_predicted_from_logit_zero_on():
    task = Multilabel(("x",))
    found = task.metrics(predictions(task, torch.tensor([[1e-8], [0.0], [-1e-8]]), [1, 1, 0]))
    assert found["accuracy"] == 1.0


@pytest.mark.parametrize("truth", [[], [[0, 0, 0]]])
def test_labels_without_a_positive_have_no_precision_and_select_by_loss(truth):
    found = TASK.metrics(predictions(TASK, torch.zeros(len(truth), 3), truth))
    assert math.isnan(found["macro_map"])
    assert math.isnan(found["macro_auc"])
    assert selection_score(TASK, found, 0.5) == -0.5


def test_a_case_has_the_mean_probability_of_its_slides():
    slides = predictions(TASK, torch.tensor([[0.0, 1, 2], [2.0, 1, 0]]), [[1, 0, 0]] * 2).assign(case="p")
    cases = TASK.by_case(slides)
    assert len(cases) == 1
    assert cases["prob_E"][0] == pytest.approx(slides["prob_E"].mean())
    assert cases["E"][0] == 1


def test_a_label_other_than_zero_and_one_is_refused():
    with pytest.raises(UserError, match="label 'H', row 2"):
        TASK.encode(pd.DataFrame([[1, 1, 0], [0, 2, 1]], columns=["E", "H", "M"]))


@pytest.mark.parametrize("labels", [(), ("a", "a")])
def test_no_label_or_a_doubled_one_is_refused(labels):
    with pytest.raises(UserError, match="at least one label"):
        Multilabel(labels)


@pytest.mark.parametrize("name", ["slide", "case", "site", "row", "file", "part", "slides"])
def test_a_label_that_is_called_like_a_column_of_ours_is_refused(tmp_path, name):
    (tmp_path / "t.csv").write_text(f"slide_id,case_id,{name},other\na,1,0,1\nb,2,1,0\n")
    with pytest.raises(UserError, match=f"a label may not be called '{name}'"):
        read_table(tmp_path / "t.csv", Columns(slide="slide_id", case="case_id", target=(name, "other")))
