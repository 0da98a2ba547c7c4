"""Which precision a run takes."""

import pytest

from gated_srp.training import ranks


@pytest.mark.parametrize(
    ("wanted", "instructions", "taken"),
    [("auto", True, "32"), ("32", True, "32"), ("bf16", True, "bf16"), ("bf16", False, "32")],
)
def test_a_processor_takes_bf16_only_if_asked_and_if_it_need_not_emulate_it(wanted, instructions, taken, monkeypatch):
    monkeypatch.setattr("gated_srp.machine.has_bf16", lambda: instructions)
    assert ranks.choose_precision(wanted, "cpu") == taken
