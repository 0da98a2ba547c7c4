"""Peers in the same loop: their own losses are used, and what they are not made for is refused."""

import json

import pytest
import torch
from toy_cohorts import open_config, write_cohort, write_survival_cohort

from gated_srp import UserError
from gated_srp.models.peers import DSMIL
from gated_srp.training.train import train


def test_a_peer_trains_with_its_own_loss(tmp_path, monkeypatch):
    config = open_config(write_cohort(tmp_path), train__epochs=1)
    seen = []
    plain = DSMIL.training_loss

    def watched(self, *args, **kwargs):
        value = plain(self, *args, **kwargs)
        seen.append(float(value.detach()))
        return value

    monkeypatch.setattr(DSMIL, "training_loss", watched)
    folder = train(config, arm="dsmil", seed=42).path
    assert (folder / "metrics.json").is_file()
    history = (folder / "history.csv").read_text().splitlines()
    row = next(line for line in history if line.startswith("1,train,loss,"))
    assert float(row.rsplit(",", 1)[1]) == pytest.approx(torch.tensor(seen).double().mean().item(), rel=1e-5)


def test_a_task_that_a_peer_is_not_made_for_is_refused_with_its_reason(tmp_path):
    config = open_config(write_survival_cohort(tmp_path), train__epochs=1)
    with pytest.raises(UserError, match="arm 'clam_sb' is not made for this task: CLAM's instance clustering"):
        train(config, arm="clam_sb", seed=42)


def test_dsmil_trains_on_survival_with_hazards_in_place_of_classes(tmp_path):
    config = open_config(write_survival_cohort(tmp_path), train__epochs=1)
    folder = train(config, arm="dsmil", seed=42).path
    assert 0 <= json.loads((folder / "metrics.json").read_text())["test"]["case"]["c_index"] <= 1
