import math

import pytest
import torch
from toy_cohorts import open_config

from gated_srp.data.loader import BagLoader
from gated_srp.errors import UserError
from gated_srp.models import build_model
from gated_srp.models.slide import stream
from gated_srp.training.inputs import load_inputs
from gated_srp.training.loop import (
    Training,
    bag_order,
    error_context,
    finish_epoch,
    fit,
    predict_logits,
    tied_epochs,
    train_epoch,
)
from gated_srp.training.optim import learning_rate, make_optimiser
from gated_srp.training.ranks import Ranks


class Nobody:
    """A watch that does nothing."""

    def bag(self, bag): ...

    def window(self, training): ...

    def epoch(self, training): ...


@pytest.fixture
def make(cohort):
    """Builds a training on the toy cohort, and its training rows."""

    def build(arm="gated_srp", **overrides):
        config = open_config(cohort, **{"train__workers": 0, **overrides})
        material = load_inputs(config, 42)
        model = build_model(arm, in_dim=8, num_outputs=2, seed=42, **config.sizes(arm))
        ranks = Ranks(torch.device("cpu"))
        loader = BagLoader(material.bags, workers=0)
        return Training(ranks, model, material.task, loader, config.train, 42), material

    return build


def by_hand(training, material, epochs):
    """The same training as a plain loop: one summed loss a window, PyTorch's own clipping, no shared buffers."""
    settings = training.settings
    sizes = {k: v for k, v in training.model.settings.items() if k != "arm"}
    model = build_model(training.model.settings["arm"], seed=42, **sizes).train()
    optimiser = make_optimiser(model, lr=settings.lr, weight_decay=settings.weight_decay)
    rows, step, gradients_seen = material.rows("train"), 0, []
    total = settings.epochs * math.ceil(len(rows) / settings.accumulation)
    for epoch in range(epochs):
        order = [rows[i] for i in bag_order(42, epoch, len(rows))]
        for start in range(0, len(order), settings.accumulation):
            losses = []
            for row in order[start : start + settings.accumulation]:
                bag = material.bags[row]
                keep = model.draw_keep(1, generator=stream(42, f"drop path/{epoch}/{bag.slide}"))
                losses.append(material.task.loss(model(bag.features[None], bag.graph, keep), bag.target[None]))
            # All of the window in one backward: nothing accumulates in .grad.
            gradients = torch.autograd.grad(torch.stack(losses).mean(), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            gradients_seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(step, total, lr=settings.lr)
            optimiser.step()
            step += 1
    return model, gradients_seen


@pytest.mark.parametrize("clip", [1.0, 1e6])
def test_accumulated_windows_are_batches_also_the_short_last_one(make, clip):
    training, material = make(train__accumulation=5, train__epochs=4, train__clip=clip)
    rows, gradients = material.rows("train"), []
    assert len(rows) % 5 == 3
    training.optimiser.register_step_pre_hook(lambda *_: gradients.append(training.gradient.clone()))
    train_epoch(training, rows, Nobody())
    model, expected = by_hand(training, material, 1)
    assert len(gradients) == len(expected) == training.progress.step == 4
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-5)
    for name, value in training.model.state_dict().items():  # Adam makes steps of the noise of a gradient that is zero
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=2e-5)


def test_a_gradient_is_clipped_to_the_norm_asked_for(make):
    training, material = make(train__clip=1e-3, train__accumulation=18)
    seen = []
    training.optimiser.register_step_pre_hook(lambda *_: seen.append(float(training.gradient.norm())))
    train_epoch(training, material.rows("train"), Nobody())
    assert seen == pytest.approx([1e-3])


def test_the_order_of_bags_is_of_seed_and_epoch_alone():
    assert bag_order(42, 0, 50) == bag_order(42, 0, 50)
    assert sorted(bag_order(42, 1, 50)) == list(range(50))
    assert len({tuple(bag_order(seed, epoch, 50)) for seed in (42, 43) for epoch in (0, 1)}) == 4


def test_training_neither_reads_nor_moves_the_global_random_stream(make):
    before = torch.random.get_rng_state()
    training, material = make(train__epochs=1)
    train_epoch(training, material.rows("train"), Nobody())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_checkpointing_gives_the_same_numbers(make):
    weights = []
    for checkpointing in (False, True):
        training, material = make(train__epochs=1)
        training.model.checkpointing = checkpointing
        train_epoch(training, material.rows("train"), Nobody())
        weights.append((training.model.state_dict(), training.progress.gates))
    assert all(torch.equal(weights[0][0][name], weights[1][0][name]) for name in weights[0][0])
    assert torch.equal(weights[0][1], weights[1][1]) and weights[0][1].any()


def test_the_first_of_equally_good_epochs_is_kept(make):
    training, _ = make()
    for score, expected in ((0.5, 1), (0.5, 1), (0.7, 3), (0.6, 3), (0.7, 3)):
        with torch.no_grad():
            training.model.head.bias.fill_(float(training.progress.epoch + 1))
        finish_epoch(training, 18, {"loss": 1.0}, score)
        assert training.progress.best_epoch == expected
    assert training.best["head.bias"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("patience", "scores", "trained"),
    [
        (None, (0.5, 0.4, 0.3, 0.2, 0.1), 5),
        (1, (0.5, 0.6, 0.6, 0.9, 0.9), 3),  # a tie is no better
        (2, (0.5, 0.4, 0.6, 0.5, 0.4), 5),
        (2, (0.5, 0.4, 0.5, 0.9, 0.9), 3),
        (3, (float("nan"),) * 5, 3),  # never a best one
    ],
)
def test_a_training_stops_when_patience_ends_and_only_then(make, monkeypatch, patience, scores, trained):
    training, material = make(train__epochs=5, train__patience=patience)
    monkeypatch.setattr("gated_srp.training.loop.train_epoch", lambda *_: None)
    left = iter(scores)
    fit(training, material.rows("train"), lambda: ({"loss": 1.0}, next(left)), Nobody())
    assert training.progress.epoch == trained


def test_ties_may_go_to_the_lowest_validation_loss(make):
    training, _ = make()
    training.ties = "loss"
    epochs = ((0.5, 1.0, 1), (0.5, 0.9, 2), (0.5, 0.9, 2), (0.7, 2.0, 4), (0.6, 0.1, 4), (0.7, 1.9, 6), (0.7, 2.1, 6))
    for score, loss, expected in epochs:
        finish_epoch(training, 18, {"loss": loss, training.task.select: score}, score)
        assert training.progress.best_epoch == expected
    assert tied_epochs(training) == 3


def test_a_tiny_set_is_learnt_by_heart(make):
    training, material = make(train__epochs=30, train__lr=3e-3, train__accumulation=2)
    training.model.drop_path = 0.0
    rows = material.rows("train")[:6]
    fit(training, rows, lambda: ({}, 0.0), Nobody())
    logits = predict_logits(training.ranks, training.model, training.loader, rows)
    assert logits.argmax(1).tolist() == material.targets(rows).tolist()
    assert float(material.task.loss(logits, material.targets(rows))) < 0.05


def test_a_loss_that_is_not_a_number_names_the_slide_and_leaves_the_weights(make):
    training, material = make(train__accumulation=6)
    rows = material.rows("train")
    culprit = rows[bag_order(42, 0, len(rows))[2]]
    task, name = training.task, material.slides["slide"][culprit]

    class Broken:
        def __getattr__(self, name):
            return getattr(task, name)

        def training_loss(self, logits, target):
            return task.training_loss(logits, target) * (float("nan") if current[-1] == name else 1.0)

    current = []
    training.task = Broken()
    epoch = training.loader.epoch
    training.loader.epoch = lambda *asked: (current.append(bag.slide) or bag for bag in epoch(*asked))
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    with pytest.raises(UserError, match=f"the loss is not a finite number in epoch 1, slide '{name}'"):
        train_epoch(training, rows, Nobody())
    assert all(torch.equal(value, before[name]) for name, value in training.model.state_dict().items())
    assert training.progress.bags == 0 and not training.stepping


def test_running_out_of_memory_names_slide_patches_and_cures(make):
    training, material = make()
    bag = material.bags[0]
    with pytest.raises(UserError) as caught, error_context([bag], training.settings):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
    message = str(caught.value)
    assert f"{bag.slide!r} with {len(bag.features)} patches" in message
    for cure in ("train.checkpointing: true", "a cap of"):
        assert cure in message
    with pytest.raises(RuntimeError, match="some bug"), error_context([bag], training.settings):
        raise RuntimeError("some bug")


@pytest.mark.parametrize("there", [True, False])
def test_bf16_is_a_cure_for_memory_where_the_machine_has_it_and_nowhere_else(make, monkeypatch, there):
    monkeypatch.setattr("gated_srp.machine.has_bf16", lambda: there)
    monkeypatch.setattr("gated_srp.machine.bf16_environment", dict)
    training, material = make()
    for settings, offered in (
        (training.settings, there),
        (training.settings.model_copy(update={"precision": "bf16"}), False),
    ):
        with pytest.raises(UserError) as caught, error_context([material.bags[0]], settings):
            raise MemoryError
        assert ("train.precision: bf16" in str(caught.value)) == offered


def test_bf16_trains_on_a_cpu(make):
    training, material = make(train__epochs=1)
    training.ranks = Ranks(torch.device("cpu"), "bf16")
    train_epoch(training, material.rows("train"), Nobody())
    single, _ = make(train__epochs=1)
    train_epoch(single, material.rows("train"), Nobody())
    assert training.progress.loss == pytest.approx(single.progress.loss, rel=0.02)
    assert training.progress.loss != single.progress.loss


def test_gate_lr_multiplies_the_learning_rate_of_gates_alone_at_every_step(make):
    training, material = make(train__gate_lr=10, train__epochs=2)
    seen = []
    training.optimiser.register_step_pre_hook(
        lambda *_: seen.append([group["lr"] for group in training.optimiser.param_groups])
    )
    train_epoch(training, material.rows("train"), Nobody())
    rates = [learning_rate(step, 2 * len(seen), lr=training.settings.lr) for step in range(len(seen))]
    assert seen == [[rate, 10 * rate, 10 * rate] for rate in rates]
    again, _ = make(train__gate_lr=10, train__epochs=2)
    again.restore(training.checkpoint())
    assert [group.get("lr_factor") for group in again.optimiser.param_groups] == [None, 10.0, 10.0]
