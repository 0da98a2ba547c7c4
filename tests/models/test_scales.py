"""Windows 3, 5 and 7 mixed by a gate: against loops over patches, from its start on, and where it refuses."""

import pytest
import torch
from training.toy_cohorts import open_config, write_cohort

from gated_srp import GatedSRP, PatchGraph
from gated_srp.config.load import for_arm
from gated_srp.errors import UserError
from gated_srp.models import build_model
from gated_srp.models.scales import MixedWindows
from gated_srp.training.folder import settings_of
from gated_srp.training.optim import gate_parameters

HEADS, WIDTH, CELLS = 2, 5, torch.cartesian_prod(torch.arange(6), torch.arange(7))


@pytest.fixture
def patches(generator):
    """Cells of a lattice with holes, and one far away; y and v behind CLS and before a row of padding."""
    cells = CELLS[torch.randperm(42, generator=generator)[:30]].clone()
    cells[-1] += 50
    graph = PatchGraph.from_coords(cells * 256, stride=256, window=7).with_isolated(before=1, after=1)
    y, v = torch.randn(2, 1, HEADS, 32, WIDTH, generator=generator, dtype=torch.double)
    return cells.tolist(), graph, y, v


def mixed(generator) -> MixedWindows:
    direction = MixedWindows(HEADS)
    for parameter in direction.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return direction.double()


def axis_by_hand(cells, v, direction, head, row):
    """The mixture of one patch, neighbour by neighbour."""
    x, y = cells[row]
    logits, axes = [], []
    for place, window in enumerate((3, 5, 7)):
        r = window // 2
        near = [j for j, (a, b) in enumerate(cells) if j != row and abs(a - x) <= r and abs(b - y) <= r]
        values = [v[0, head, 1 + j] for j in near]
        mean = sum(values) / len(near) if near else torch.zeros(WIDTH).double()
        agree = sum(values).norm() / sum(one.norm() for one in values) if near else torch.tensor(0.0)
        facts = torch.stack([torch.tensor(len(near) / (window**2 - 1)), agree]).double()
        logits.append(direction.weight[head] @ facts + direction.bias[head, place])
        axes.append(mean / mean.norm() if near else mean)
    shares = torch.stack(logits).softmax(0)
    return sum(share * axis for share, axis in zip(shares, axes, strict=True))


def test_the_axis_is_the_mixture_of_the_windows_means(patches, generator):
    cells, graph, _, v = patches
    direction = mixed(generator)
    rows = v.transpose(1, 2).flatten(0, 1)
    found = direction(rows, graph)
    assert not found[0].any() and not found[-1].any() and not found[30].any()  # CLS, padding, the patch apart
    for row in range(30):
        for head in range(HEADS):
            torch.testing.assert_close(found[1 + row, head], axis_by_hand(cells, v, direction, head, row))


def test_a_token_loses_its_part_along_the_mixture_and_both_paths_agree(patches, generator):
    cells, graph, y, v = patches
    srp = GatedSRP(HEADS, direction=mixed(generator)).double()
    assert torch.equal(srp(y, v, graph), y)  # shut at the start, whatever the mixture
    for parameter in srp.coefficient.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    z, betas = srp(y, v, graph), []
    handle = srp.coefficient.register_forward_hook(lambda module, args, beta: betas.append(beta))
    with torch.no_grad():
        rows = srp.by_rows(v, graph)(y, slice(0, 32))
    handle.remove()
    torch.testing.assert_close(rows, z[0].transpose(0, 1))
    for row in (0, 7, 19):
        axis = axis_by_hand(cells, v, srp.direction, 1, row)
        axis = axis / axis.norm()
        token = y[0, 1, 1 + row]
        torch.testing.assert_close(z[0, 1, 1 + row], token - betas[0][1 + row, 1] * (token @ axis) * axis)
    z.square().sum().backward()
    assert all(p.grad.any() for p in srp.direction.parameters())


def test_bags_of_a_batch_are_mixed_each_for_itself(generator):
    graphs = [PatchGraph.from_grid(3, 5, window=7), PatchGraph.from_grid(4, 3, window=7)]
    direction, v = mixed(generator), torch.randn(30, HEADS, WIDTH, generator=generator).double()
    together = direction(v, PatchGraph.batch(graphs))
    torch.testing.assert_close(together[:15], direction(v[:15], graphs[0]))
    torch.testing.assert_close(together[15:27], direction(v[15:27], graphs[1]))


def test_another_window_is_refused_and_the_mixture_counts_as_part_of_the_gate():
    model = build_model("gated_srp_scales", in_dim=4, num_outputs=2, dim=12, num_heads=2, depth=2, num_landmarks=4)
    with pytest.raises(UserError, match="window 3, but this arm mixes the windows 3, 5, 7"):
        model(torch.randn(1, 9, 4), PatchGraph.from_grid(3, 3))
    assert "blocks.0.correction.direction.bias" in dict(gate_parameters(model))


def test_a_cohort_gives_the_arm_its_window_and_every_other_arm_its_own(tmp_path):
    config = open_config(write_cohort(tmp_path, slides=2))
    assert for_arm(config, "gated_srp_scales").window == 7 and for_arm(config, "gated_srp") is config
    windows = {arm: settings_of(config, arm=arm, seed=1)["window"] for arm in ("gated_srp_scales", "gated_srp")}
    assert windows == {"gated_srp_scales": 7, "gated_srp": 3}
