"""The temperature recovers a known one and is 1 where the data cannot tell."""

import math

import pytest
import torch

from gated_srp.tasks import Classification, Multilabel, Survival, fit_temperature

TASK = Classification(("a", "b"))


def test_the_temperature_of_a_hand_worked_table():
    # Always logit 2 for the first class, right three times in four: calibrated when sigmoid(2 / T) = 3/4.
    logits, target = torch.tensor([[2.0, 0.0]]).repeat(8, 1), torch.tensor([0, 0, 0, 1] * 2)
    assert fit_temperature(TASK, logits, target) == pytest.approx(2 / math.log(3), rel=1e-4)


def test_scaled_logits_ask_for_a_temperature_scaled_alike():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 2, generator=generator)
    target = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    once, thrice = fit_temperature(TASK, logits, target), fit_temperature(TASK, 3 * logits, target)
    assert thrice == pytest.approx(3 * once, rel=1e-4)
    assert TASK.loss(3 * logits / thrice, target) <= TASK.loss(logits, target)


def test_multilabel_logits_have_a_temperature_too():
    logits = torch.tensor([[2.0]]).repeat(4, 1)
    assert fit_temperature(Multilabel(("x",)), logits, torch.tensor([[1.0], [1], [1], [0]])) == pytest.approx(
        2 / math.log(3), rel=1e-4
    )


@pytest.mark.parametrize(
    ("logits", "target"),
    [
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.long)),
        (torch.tensor([[3.0, 0.0]]), torch.tensor([0])),
        (torch.tensor([[3.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 0])),  # one class
        (torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])),  # all right: colder is always better
        (torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.tensor([1, 0])),  # all wrong: hotter is always better
        (torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])),  # flat
        (torch.tensor([[math.nan, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])),
    ],
)
def test_data_that_cannot_tell_leave_the_logits_alone(logits, target):
    assert fit_temperature(TASK, logits, target) == 1.0


def test_survival_is_never_scaled_since_that_would_reorder_risks():
    task = Survival((1.0, 2.0, 3.0))
    assert fit_temperature(task, torch.randn(6, 4), torch.tensor([[0, 1], [1, 1]] * 3)) == 1.0
