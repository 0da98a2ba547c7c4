import sys
from types import SimpleNamespace

import pytest
from toy_cohorts import open_config

from gated_srp.errors import UserError
from gated_srp.training.callbacks import LOGGERS, open_loggers
from gated_srp.training.train import train


class Recorder:
    """Stands for a module or an object of a logging package: remembers every call."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return call

    def named(self, name):
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


def test_a_logger_that_is_not_installed_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"'wandb' is not installed\. Install it: pip install wandb"):
        open_loggers(["wandb"], tmp_path, {})


def test_every_logger_gets_the_numbers_of_every_epoch(cohort, tmp_path, monkeypatch):
    wandb, mlflow, writer = Recorder(), Recorder(), Recorder()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=lambda folder: writer))
    config = open_config(cohort, out=str(tmp_path), train__log=list(LOGGERS), train__epochs=2)
    train(config, arm="gated_srp", seed=42)
    assert [kwargs["step"] for _, kwargs in wandb.named("log")] == [1, 2]
    values = wandb.named("log")[0][0][0]
    assert {"train/loss", "val/loss", "val/macro_f1", "gate/beta_layer0"} <= set(values)
    assert mlflow.named("log_metrics")[1][0][0]["train/loss"] < values["train/loss"]
    assert ("val/macro_f1", values["val/macro_f1"], 1) in [args for args, _ in writer.named("add_scalar")]
    assert wandb.named("init")[0][1]["name"] == "toy/gated_srp/seed42"
    assert wandb.named("finish") and mlflow.named("end_run") and writer.named("close")
