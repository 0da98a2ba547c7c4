import pytest
import torch

from gated_srp import PatchGraph, trace
from gated_srp.models import build_model
from gated_srp.training.loop import COLUMNS, STATISTICS, GateRecorder, summary

SIZES = {"in_dim": 8, "num_outputs": 2, "dim": 24, "depth": 3, "num_heads": 2, "num_landmarks": 4, "hidden_dim": 4}


def bag(patches: int, seed: int) -> tuple[torch.Tensor, PatchGraph]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(patches, 8, generator=generator)
    coords = torch.stack([torch.arange(patches) % 5, torch.arange(patches) // 5], 1)
    return features[None], PatchGraph.from_coords(coords, features, stride=1)


def opened(arm: str = "gated_srp", **sizes: object) -> torch.nn.Module:
    """A model whose gates are open in many ways."""
    model = build_model(arm, **SIZES | sizes)
    for name, parameter in model.named_parameters():
        if "coefficient" in name:
            torch.nn.init.normal_(parameter, std=1.0, generator=torch.Generator().manual_seed(len(name)))
    return model.train()


def test_regimes_are_counted_at_their_borders():
    beta = torch.tensor([[-1.0, -0.5, -0.4, 0.0], [0.4, 0.5, 1.5, 1.6]])
    found = dict(zip(STATISTICS, summary(beta).tolist(), strict=True))
    assert found["mean"] == pytest.approx(0.2625)
    assert found["std"] == pytest.approx(float(beta.std(correction=0)))
    shares = [found[f"share_{name}"] for name in ("anti", "identity", "projection", "reflection", "negative")]
    assert shares == [2 / 8, 3 / 8, 2 / 8, 1 / 8, 3 / 8]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_epochs_rows_are_means_over_bags_of_what_trace_sees(checkpointing):
    model = opened(delta=2.0)
    model.checkpointing = checkpointing
    recorder = GateRecorder(model)
    expected = []
    for number, patches in enumerate((11, 23)):  # neither is a square: padding rows must not count
        features, graph = bag(patches, number)
        keep = model.draw_keep(1, generator=torch.Generator().manual_seed(number))
        recorder.next_bag()
        with trace(model, attention=False) as seen:
            model(features, graph, keep).sum().backward()  # recomputes under checkpointing
        expected.append(torch.stack([summary(layer.beta) for layer in seen if layer.beta is not None]))
    rows = recorder.rows(3, recorder.take(), 2)
    means = torch.stack(expected).mean(0)
    assert [row[:2] for row in rows] == [[3, 0], [3, 1]]
    torch.testing.assert_close(torch.tensor([row[2:-1] for row in rows]), means)
    assert [row[-1] for row in rows] == pytest.approx((means[:, 0] / 2).tolist())
    assert len(rows[0]) == len(COLUMNS)


def test_forwards_that_are_not_training_are_not_counted():
    model = opened()
    recorder = GateRecorder(model)
    model(*bag(9, 0))
    assert not recorder.take().any()


@pytest.mark.parametrize("arm", ["features_gated_srp", "features_gated_srp_from_1", "srp_abmil"])
def test_a_gate_on_the_features_is_recorded_as_layer_1_with_what_trace_sees(arm):
    model = opened(arm)
    recorder, (features, graph) = GateRecorder(model), bag(11, 0)
    recorder.next_bag()
    with trace(model, attention=False) as seen:
        model(features, graph, model.draw_keep(1, generator=torch.Generator().manual_seed(0)))
    assert seen[0].beta.shape == (1, 11) and all(layer.beta is None for layer in seen[1:])
    (row,) = recorder.rows(3, recorder.take(), 1)
    assert row[:2] == [3, 0] and row[2:-1] == pytest.approx(summary(seen[0].beta).tolist())


@pytest.mark.parametrize("arm", ["na", "fixed_beta_1", "xsa", "features_beta_1", "abmil_beta_1"])
def test_an_arm_without_gates_has_no_rows(arm):
    recorder = GateRecorder(build_model(arm, **SIZES))
    assert recorder.rows(1, recorder.take(), 4) == []


def test_a_range_free_gate_is_measured_against_two():
    assert GateRecorder(opened("gated_srp_range_free", delta=0.5)).deltas == [2.0, 2.0]
