"""train.pack: small slides of a window together, equal to one by one but for rounding; recorded, so that a run goes on as it began."""

import pandas as pd
import pytest
import torch
from factories import write_trident
from toy_cohorts import open_config, planted, train_interrupted, write_survival_cohort, write_yaml

from gated_srp.data.loader import BagLoader
from gated_srp.errors import UserError
from gated_srp.models import build_model
from gated_srp.training.folder import differences
from gated_srp.training.inputs import load_inputs
from gated_srp.training.joint import accumulate_jointly
from gated_srp.training.loop import Training, accumulate, batches, predict_logits
from gated_srp.training.ranks import Ranks
from gated_srp.training.train import train


class Nobody:
    def bag(self, bag): ...


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A cohort of slides of 12, 20 and 30 patches."""
    folder, rows = tmp_path_factory.mktemp("mixed"), ["slide,case,label"]
    for i in range(24):
        write_trident(
            folder / "feats", f"s{i:03d}", planted(i, 4 * (i % 2) - 2, columns=(3, 5, 6)[i % 3], rows=(4, 4, 5)[i % 3])
        )
        rows.append(f"s{i:03d},p{i:03d},{('benign', 'tumour')[i % 2]}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    return write_yaml(folder, target="label")


def make(cohort, arm="gated_srp", **settings):
    """A training whose gates are open and whose drop path drops."""
    config = open_config(cohort, model__drop_path=0.5, **settings)
    inputs = load_inputs(config, 42)
    model = build_model(arm, in_dim=8, num_outputs=inputs.task.num_outputs, seed=42, **config.sizes(arm))
    with torch.no_grad():
        for number, (_, p) in enumerate(sorted(model.named_parameters())):
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number)))
    loader = BagLoader(inputs.bags, workers=0)
    return Training(Ranks(torch.device("cpu")), model.train(), inputs.task, loader, config.train, 42), inputs


def window(training, inputs, add_up, times=1):
    rows = inputs.rows("train")[:7]
    losses = add_up(training, rows, training.loader.epoch(rows * times), Nobody())
    return losses, training.gradient.clone(), training.gates.take()


@pytest.mark.parametrize("arm", ["gated_srp", "axis_shuffled", "features_gated_srp", "features_gated_srp_from_1"])
@pytest.mark.parametrize("pack", [64, 10_000])
def test_a_packed_window_has_the_losses_gradient_and_gates_of_its_bags_one_by_one(mixed, arm, pack):
    expected = window(*make(mixed, arm), accumulate)
    found = window(*make(mixed, arm, train__pack=pack), accumulate)
    assert len(set(found[0].tolist())) == 7  # each bag's own
    assert found[2][:, 1].min() > 1e-3  # the gates are open, and differ from patch to patch
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_a_packed_window_of_a_joint_loss_has_the_gradient_of_its_bags_one_by_one(tmp_path):
    cohort = write_survival_cohort(tmp_path, slides=16, task="cox", train={"accumulation": 8})
    expected = window(*make(cohort), accumulate_jointly, 2)
    found = window(*make(cohort, train__pack=200), accumulate_jointly, 2)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_packed_predictions_are_those_of_each_slide_in_the_order_asked_for(mixed):
    training, inputs = make(mixed)
    rows = inputs.rows("train")[::-1]
    alone = predict_logits(training.ranks, training.model, training.loader, rows)
    seen = []
    packed = predict_logits(
        training.ranks, training.model, training.loader, rows, lambda bag: seen.append(bag.index), pack=90
    )
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-4)
    assert seen == rows


def test_bags_in_a_row_share_a_pack_until_their_patches_exceed_it(mixed):
    training, inputs = make(mixed)
    sizes = [len(inputs.bags[row].features) for row in range(5)]
    first_three = sum(sizes[:3])
    for pack, expected in ((first_three, [0, 1, 2]), (first_three - 1, [0, 1]), (5, [0])):
        places, batch = next(batches(training.ranks, training.loader.epoch(range(5)), 5, pack=pack))
        assert [bag.index for bag in batch] == places == expected
    assert [places for places, _ in batches(training.ranks, training.loader.epoch(range(5)), 5, pack=5)] == [
        [0], [1], [2], [3], [4]
    ]  # fmt: skip
    second = Ranks(torch.device("cpu"), rank=1, count=2)
    assert [places for places, _ in batches(second, training.loader.epoch([1, 3]), 5, pack=90)] == [[1, 3]]


def test_a_packed_run_is_recorded_and_goes_on_bit_for_bit(mixed, tmp_path, monkeypatch):
    whole = open_config(mixed, train__pack=8192, train__epochs=2, out=str(tmp_path / "whole"))
    run = train(whole, arm="gated_srp", seed=42)
    assert run.card["pack"] == run.settings["train"]["pack"] == 8192
    cut = open_config(mixed, train__pack=8192, train__epochs=2, out=str(tmp_path / "cut"))
    train_interrupted(cut, "gated_srp", after=9, monkeypatch=monkeypatch)
    again = train(cut, arm="gated_srp", seed=42)
    assert again.model.read_bytes()[-1000:] == run.model.read_bytes()[-1000:]
    pd.testing.assert_frame_equal(again.history, run.history)
    other = open_config(mixed, train__epochs=2, out=str(tmp_path / "whole"))
    with pytest.raises(UserError, match=r"train\.pack"):
        train(other, arm="gated_srp", seed=42)


def test_a_switch_is_no_number_of_patches(mixed):
    with pytest.raises(UserError, match=r"train\.pack"):
        open_config(mixed, train__pack=True)


def test_an_arm_that_takes_one_bag_at_a_time_says_so(mixed, tmp_path):
    assert make(mixed, "abmil", train__pack=8192)[0].pack is None
    config, said = open_config(mixed, train__pack=8192, train__epochs=1, out=str(tmp_path)), []
    train(config, arm="abmil", seed=42, progress=lambda event: said.append(event.text))
    assert sum("train.pack: abmil takes one bag at a time" in line for line in said) == 1


def test_a_run_of_a_version_without_pack_went_one_by_one():
    assert differences({"train": {"lr": 1.0}}, {"train": {"lr": 1.0, "pack": None}}) == []
    assert differences({"train": {"lr": 1.0}}, {"train": {"lr": 1.0, "pack": 512}}) == ["train.pack None, asked 512"]
