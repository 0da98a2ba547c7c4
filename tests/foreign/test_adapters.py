"""An attention of one's own, reached by a function or by taps: everything that holds for the families that are found."""

import pytest
import torch
from foreign_models import (
    CHECKS,
    HEADS,
    WIDTH,
    Case,
    Weights,
    check_autocast,
    check_compile,
    check_equals_our_own_blocks,
    check_gate_files,
    check_trace,
)
from test_handle import Attention, adapter
from torch import nn
from torch.nn import functional as F

from gated_srp import PatchGraph
from gated_srp.foreign import Taps

FEATURES = torch.randn(1, 14, WIDTH, generator=torch.Generator().manual_seed(5))
COORDS = torch.cartesian_prod(torch.arange(4), torch.arange(4))[:14]
GRAPH = PatchGraph.from_coords(COORDS, FEATURES[0], stride=1)


class OwnBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention(WIDTH, HEADS)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls, self.head = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(OwnBlock() for _ in range(3))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.cls.expand(len(features), -1, -1), features], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


def case(name: str, way: object) -> Case:
    return Case(
        name,
        OwnModel,
        {"features": FEATURES},
        lambda out: out,
        [True, True, False],
        1,
        graph=GRAPH,
        settings={"last": False, "adapters": {Attention: way}},
    )


CASES = [case("function", adapter), case("taps", Taps("qkv", "proj"))]
MAPLESS = [check for check in CHECKS if check is not check_trace]  # an adapter shows no attention map; see test_handle


@pytest.mark.parametrize("check", [*MAPLESS, check_autocast, check_compile], ids=lambda f: f.__name__[len("check_") :])
@pytest.mark.parametrize("one", CASES, ids=lambda c: c.name)
def test_what_holds_for_every_foreign_model(one, check):
    check(one)


@pytest.mark.parametrize("one", CASES, ids=lambda c: c.name)
def test_gates_go_through_a_file(one, tmp_path):
    check_gate_files(one, tmp_path)


@pytest.mark.parametrize("one", CASES, ids=lambda c: c.name)
def test_attached_blocks_of_ones_own_equal_ours(one):
    model, _ = one.attached()

    def parts(block: OwnBlock) -> Weights:
        qkv = list(zip(block.attn.qkv.weight.chunk(3), block.attn.qkv.bias.chunk(3), strict=True))
        return Weights(block.norm1, qkv, block.attn.proj, block.norm2, block.fc1, block.fc2)

    check_equals_our_own_blocks(one, model, list(model.blocks), parts)
