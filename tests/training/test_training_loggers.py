import re
import shutil
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


class Tracking:
    """Stands for the module mlflow and its server, as far as its documentation describes what is used of it."""

    def __init__(self):
        self.runs, self.active = [], None

    def set_experiment(self, name):
        assert name == "gated-srp"

    def search_runs(self, *, experiment_names, filter_string, max_results, output_format):
        assert (experiment_names, max_results, output_format) == (["gated-srp"], 1, "list")
        key, value = re.fullmatch(r"tags\.(\w+) = '(\w+)'", filter_string).groups()
        return [run for run in self.runs if run.tags.get(key) == value][:1]

    def start_run(self, run_id=None, *, run_name=None, tags=None):
        if run_id is None:
            info = SimpleNamespace(run_id=f"id{len(self.runs)}")
            self.runs.append(SimpleNamespace(info=info, name=run_name, tags=tags, metrics=[], params={}, status=[]))
        self.active = self.runs[-1] if run_id is None else next(one for one in self.runs if one.info.run_id == run_id)

    def log_params(self, params):
        self.active.params.update(params)

    def log_metrics(self, values, *, step):
        self.active.metrics.append((step, values))

    def end_run(self, status):
        self.active.status.append(status)


class Lightning:
    """As `lightning.pytorch.loggers.Logger` is called by its trainer."""

    def __init__(self):
        self.params, self.metrics, self.ends = None, [], []

    def log_hyperparams(self, params, *args, **kwargs):
        self.params = params

    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, metrics))

    def save(self):
        self.ends.append("save")

    def finalize(self, status):
        self.ends.append(status)


def test_every_logger_gets_the_numbers_of_every_epoch(cohort, tmp_path, monkeypatch):
    wandb, mlflow, writer, own = Recorder(), Tracking(), Recorder(), Lightning()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=lambda folder: writer))
    config = open_config(cohort, out=str(tmp_path), train__log=list(LOGGERS), train__epochs=2)
    train(config, arm="gated_srp", seed=42, loggers=[own])
    assert [kwargs["step"] for _, kwargs in wandb.named("log")] == [1, 2]
    values = wandb.named("log")[0][0][0]
    assert {"train/loss", "val/loss", "val/macro_f1", "gate/beta_layer0"} <= set(values)
    (run,) = mlflow.runs
    assert run.metrics[1][1]["train/loss"] < values["train/loss"] and run.params["name"] == "toy"
    assert (run.name, run.status) == ("toy/gated_srp/seed42", ["FINISHED"])
    assert ("val/macro_f1", values["val/macro_f1"], 1) in [args for args, _ in writer.named("add_scalar")]
    assert wandb.named("init")[0][1]["name"] == "toy/gated_srp/seed42"
    assert wandb.named("finish") and writer.named("close")
    assert own.metrics[0] == (1, values) and own.params["name"] == "toy" and own.ends == ["save", "success"]


def test_a_training_that_stopped_early_is_finished_for_its_loggers(cohort, tmp_path):
    own = Lightning()
    run = train(open_config(cohort, out=str(tmp_path), train__epochs=6, train__patience=1), arm="na", loggers=[own])
    assert run.history["epoch"].max() < 6 and own.ends == ["save", "success"]


def test_a_training_that_goes_on_goes_on_in_the_same_run_of_mlflow(cohort, tmp_path, monkeypatch):
    mlflow, own = Tracking(), Lightning()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    config = open_config(cohort, out=str(tmp_path), train__log=["mlflow"], train__epochs=2)

    def stop(event):
        if "epoch 1/2" in event.text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, arm="na", seed=42, loggers=[own], progress=stop)
    assert own.ends == ["save", "failed"]
    run = train(config, arm="na", seed=42)
    assert [[step for step, _ in one.metrics] for one in mlflow.runs] == [[1, 2]]
    assert mlflow.runs[0].status == ["KILLED", "FINISHED"]
    shutil.rmtree(run.path)
    monkeypatch.setattr("gated_srp.training.callbacks.RunFolder.environment", {"started": "another day"})
    open_loggers(["mlflow"], run.path, {})  # a training of the same name that is begun anew
    assert len(mlflow.runs) == 2


def test_an_object_that_cannot_log_is_refused_before_anything_is_read(cohort, tmp_path):
    with pytest.raises(UserError, match="dict has no log_metrics"):
        train(open_config(cohort, out=str(tmp_path)), loggers=[{}])
    with pytest.raises(UserError, match="loggers: an object of this process cannot log for several"):
        train(open_config(cohort, out=str(tmp_path)), loggers=[Lightning()], devices=2)
    assert not any(tmp_path.iterdir())
