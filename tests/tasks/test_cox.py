"""Cox's partial likelihood: against a naive loop, torchsurv and lifelines; windows against all bags at once; from the YAML to the report."""

import math
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from training.toy_cohorts import open_config, train_interrupted, write_survival_cohort

import gated_srp
from gated_srp.data import BagLoader
from gated_srp.errors import UserError
from gated_srp.models import build_model
from gated_srp.tasks import Survival, find_task, named_task
from gated_srp.tasks.cox import Cox
from gated_srp.training.inputs import load_inputs
from gated_srp.training.joint import accumulate_jointly
from gated_srp.training.loop import Training, together
from gated_srp.training.ranks import Ranks
from gated_srp.training.train import train


@pytest.fixture(autouse=True, scope="module")
def _torchsurv():
    """On import torchsurv compiles a helper in a way that newer torch calls deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import torchsurv.loss.cox  # noqa: F401


def follow_up(seed, number=14, distinct=6):
    rng = np.random.default_rng(seed)
    return pd.DataFrame({"time": rng.integers(1, distinct, number).astype(float), "event": rng.integers(0, 2, number)})


def naive(risk, table):
    """Efron's formula, written out."""
    total = events = 0.0
    for time in sorted(set(table["time"])):
        tied = [i for i in range(len(table)) if table["time"][i] == time and table["event"][i]]
        everyone = sum(math.exp(risk[i]) for i in range(len(table)) if table["time"][i] >= time)
        own = sum(math.exp(risk[i]) for i in tied)
        for place, i in enumerate(tied):
            total -= risk[i] - math.log(everyone - place / len(tied) * own)
            events += 1
    return total / events if events else 0.0


@pytest.mark.parametrize("seed", range(4))
def test_the_loss_is_that_of_a_naive_loop_and_of_torchsurv(seed):
    from torchsurv.loss.cox import neg_partial_log_likelihood

    table = follow_up(seed)
    risk = torch.from_numpy(np.random.default_rng(seed + 9).normal(size=len(table))).requires_grad_()
    task = Cox.fit(table)
    loss = task.loss(risk[:, None], task.encode(table))
    assert loss.item() == pytest.approx(naive(risk.tolist(), table), abs=1e-12)
    event, time = torch.tensor(table["event"].to_numpy()).bool(), torch.tensor(table["time"].to_numpy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says that there are ties
        theirs = neg_partial_log_likelihood(risk, event, time, ties_method="efron", reduction="sum")
    theirs = theirs / event.sum()  # its own mean is over distinct times
    assert loss.item() == pytest.approx(theirs.item(), abs=1e-6)
    (ours,), (other,) = (torch.autograd.grad(one, risk, retain_graph=True) for one in (loss, theirs))
    assert torch.allclose(ours, other, atol=1e-6)


def test_the_loss_is_minimal_where_lifelines_finds_the_coefficient():
    from lifelines import CoxPHFitter

    table = follow_up(3, 40, 12).assign(x=np.random.default_rng(1).normal(size=40))
    fitted = CoxPHFitter().fit(table, "time", "event")  # Efron
    task, x = Cox.fit(table), torch.from_numpy(table["x"].to_numpy())

    def value(slope):
        return task.loss((slope * x)[:, None], task.encode(table))

    slope = torch.tensor(float(fitted.params_["x"]), dtype=torch.float64, requires_grad=True)
    assert value(slope).item() * table["event"].sum() == pytest.approx(-fitted.log_likelihood_, abs=1e-8)
    assert torch.autograd.grad(value(slope), slope)[0].abs() < 1e-6


def test_large_risks_do_not_overflow_and_a_window_without_events_has_no_gradient():
    table = pd.DataFrame({"time": [1.0, 1.0, 2.0], "event": [1, 1, 0]})
    task = Cox.fit(table)
    loss = task.loss(torch.tensor([[900.0], [-900.0], [0.0]]), task.encode(table))
    assert loss.item() == pytest.approx((0 + (900 - math.log(2) + 900)) / 2, rel=1e-6)
    nobody, risk = table.assign(event=0), torch.zeros(3, 1, requires_grad=True)
    task.loss(risk, task.encode(nobody)).backward()
    assert risk.grad.tolist() == [[0.0]] * 3
    assert task.loss(torch.tensor([1.0]), task.encode(table[:1])[0]).item() == 0  # one slide


def test_times_are_ordered_exactly():
    times = [0.0, 1e-300, 1.0, np.nextafter(1.0, 2.0), 1e6]
    codes = Cox.fit(t := pd.DataFrame({"time": times, "event": 1})).encode(t)[:, 0]
    assert torch.equal(codes, codes.sort().values) and len(codes.unique()) == 5


def test_columns_of_time_and_event_still_mean_survival():
    assert find_task("cox") is Cox and named_task({"time": "t", "event": "e"}) is Survival
    task = Cox.fit(follow_up(0))
    again = Cox.from_card(task.card())
    assert again.training.time.tolist() == task.training.time.tolist() and again.edges == ()


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    train_ = {"epochs": 2, "accumulation": 5}
    return write_survival_cohort(tmp_path_factory.mktemp("cox"), slides=16, task="cox", train=train_)


@pytest.fixture(scope="module")
def finished(cohort):
    return train(cohort, arm="gated_srp", seed=42)


def test_a_window_has_the_gradient_of_all_its_bags_at_once(cohort):
    config = open_config(cohort)
    inputs = load_inputs(config, 42)
    sizes = config.sizes("gated_srp") | {"drop_path": 0.3}
    model = build_model("gated_srp", in_dim=8, num_outputs=1, seed=1, **sizes).train()
    window = inputs.rows("train")[:5]
    with BagLoader(inputs.bags, workers=0) as loader:
        training = Training(Ranks.one("32"), model, inputs.task, loader, config.train, 42)

        class Quiet:
            def bag(self, bag):
                pass

        losses = accumulate_jointly(training, window, loader.epoch([*window, *window]), Quiet())
    found = training.gradient.clone()
    training.gradient.zero_()
    from gated_srp.streams import stream

    logits = []
    for row in window:
        bag = inputs.bags[row]
        keep = model.draw_keep(1, generator=stream(42, f"drop path/0/{bag.slide}"))
        logits.append(model(*together([bag]), keep))
    loss = inputs.task.loss(torch.cat(logits), inputs.targets(window))
    loss.backward()
    assert losses.tolist() == pytest.approx([loss.item()] * 5, rel=1e-5)
    assert torch.allclose(found, training.gradient, atol=1e-6) and found.abs().max() > 1e-3
    training.gates.close()


def test_one_slide_per_update_is_refused_with_the_reason(cohort, tmp_path):
    with pytest.raises(
        UserError, match=r"train.accumulation: 1 slide per update, of which the partial likelihood is always 1"
    ):
        train(cohort, out=tmp_path, settings={"train.accumulation": 1})
    for arm in ("clam_sb", "dsmil"):
        with pytest.raises(UserError, match="is not made for this task"):
            train(cohort, arm=arm, out=tmp_path)


def test_a_run_by_cox_from_the_yaml_to_the_report(cohort, finished, tmp_path):
    assert finished.card["task"] == "cox" and set(finished.metrics("test")) == {"c_index", "uno_c"}
    assert finished.metrics("val")["c_index"] > 0.5
    assert len(finished.card["follow_up"]["time"]) and isinstance(finished.card["median_risk"], float)
    table = gated_srp.predict(finished.path, cohort.parent / "feats", workers=0).table
    assert table["risk"].nunique() > 5 and not [name for name in table if name.startswith("survival_at")]
    scored = gated_srp.evaluate(finished.path, cohort, repeats=5, allow_overlap=True)
    assert scored.findings.facts["risk_groups"]["threshold"] == finished.card["median_risk"]
    page = gated_srp.report(finished.path.parent, out=tmp_path / "r.html").path.read_text()
    assert "Survival of test patients by predicted risk" in page


def test_interrupted_inside_a_window_it_ends_with_the_same_bits(cohort, finished, tmp_path, monkeypatch):
    config = open_config(cohort, out=str(tmp_path))
    train_interrupted(config, "gated_srp", after=8, monkeypatch=monkeypatch)  # the third of the second window
    resumed = train(config, arm="gated_srp", seed=42)
    for name in ("model.safetensors", "metrics.json", "history.csv", "gates.csv", "predictions_test_case.csv"):
        assert (resumed.path / name).read_bytes() == (finished.path / name).read_bytes()
