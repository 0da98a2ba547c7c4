"""The temperature recovers a known one and is 1 where the data cannot tell."""

import math

import pytest
import torch

from gated_srp.tasks import Classification, Multilabel, Survival, fit_temperature
from gated_srp.tasks.metrics import FEWEST

TASK = Classification(("a", "b"))


def test_the_temperature_of_a_hand_worked_table():
    # Always logit 2 for the first class, right three times in four: calibrated when sigmoid(2 / T) = 3/4.
    logits, target = torch.tensor([[2.0, 0.0]]).repeat(60, 1), torch.tensor([0, 0, 0, 1] * 15)
    assert fit_temperature(TASK, logits, target) == pytest.approx(2 / math.log(3), rel=1e-4)


def test_scaled_logits_ask_for_a_temperature_scaled_alike():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 2, generator=generator)
    target = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    once, thrice = fit_temperature(TASK, logits, target), fit_temperature(TASK, 3 * logits, target)
    assert thrice == pytest.approx(3 * once, rel=1e-4)
    assert TASK.loss(3 * logits / thrice, target) <= TASK.loss(logits, target)


def test_multilabel_logits_have_a_temperature_too():
    logits, target = torch.tensor([[2.0]]).repeat(60, 1), torch.tensor([[1.0], [1], [1], [0]] * 15)
    assert fit_temperature(Multilabel(("x",)), logits, target) == pytest.approx(2 / math.log(3), rel=1e-4)


def test_few_slides_fit_no_temperature():
    # Two slides, one right and one just wrong, ask for 0.06: probabilities of almost 0 and 1.
    logits, target = torch.tensor([[2.0, 0.0], [0.0, 0.1]]), torch.tensor([0, 0])
    assert fit_temperature(TASK, logits, target) == 1.0
    logits, target = torch.tensor([[2.0, 0.0]]).repeat(FEWEST, 1), torch.tensor([0, 0, 0, 1] * FEWEST)[:FEWEST]
    assert fit_temperature(TASK, logits, target) != 1.0
    assert fit_temperature(TASK, logits[1:], target[1:]) == 1.0


def test_a_temperature_of_the_fewest_slides_is_known_to_about_a_third():
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(60):
        logits = 2 * torch.randn(FEWEST, 2, generator=generator)
        target = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
        found.append(fit_temperature(TASK, 2 * logits, target) / 2)
    logs = torch.tensor(found).log()
    assert abs(float(logs.mean())) < 0.15 and float(logs.std()) < 0.4 and float(logs.abs().max()) < 1.2


@pytest.mark.parametrize(
    ("logits", "target"),
    [
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.long)),
        (torch.tensor([[3.0, 0.0]]), torch.tensor([0])),
        (torch.tensor([[3.0, 0.0], [1.0, 0.0]] * 30), torch.tensor([0, 0] * 30)),  # one class
        (torch.tensor([[3.0, 0.0], [0.0, 1.0]] * 30), torch.tensor([0, 1] * 30)),  # all right: colder is always better
        (torch.tensor([[3.0, 0.0], [0.0, 1.0]] * 30), torch.tensor([1, 0] * 30)),  # all wrong: hotter is always better
        (torch.zeros(60, 2), torch.tensor([0, 1] * 30)),  # flat
        (torch.tensor([[math.nan, 0.0], [0.0, 1.0]] * 30), torch.tensor([0, 1] * 30)),
    ],
)
def test_data_that_cannot_tell_leave_the_logits_alone(logits, target):
    assert fit_temperature(TASK, logits, target) == 1.0


def test_survival_is_never_scaled_since_that_would_reorder_risks():
    task = Survival((1.0, 2.0, 3.0))
    assert fit_temperature(task, torch.randn(60, 4), torch.tensor([[0, 1], [1, 1]] * 30)) == 1.0
