"""A whole foreign model with gates is our own model, given the same weights: logits and the gradient of every weight."""

import pytest
import torch
from foreign_models import wake
from torch import nn

from gated_srp import PatchGraph, attach
from gated_srp.models import build_model

SIZES = {"in_dim": 10, "num_outputs": 3, "dim": 24, "num_heads": 4, "depth": 3, "hidden_dim": 8, "delta": 1.5}
CELLS = torch.cartesian_prod(torch.arange(5), torch.arange(5))[torch.arange(25) % 6 != 4]
FEATURES = torch.randn(1, len(CELLS), 10, generator=torch.Generator().manual_seed(2))
GRAPH = PatchGraph.from_coords(CELLS * 256, FEATURES[0], stride=256)


class EncoderModel(nn.Module):
    """Our vit4 as others would write it, on nn.TransformerEncoder."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.head = nn.Linear(10, 24), nn.Linear(24, 3)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 24))
        layer = nn.TransformerEncoderLayer(24, 4, 96, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, nn.LayerNorm(24), enable_nested_tensor=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.cls_token.expand(len(features), -1, -1), self.in_proj(features)], dim=1)
        return self.head(self.encoder(x)[:, 0])


NAMES = {  # of ours -> of nn.TransformerEncoder
    "blocks.": "encoder.layers.",
    "attn.qkv.weight": "self_attn.in_proj_weight",
    "attn.qkv.bias": "self_attn.in_proj_bias",
    "attn.proj": "self_attn.out_proj",
    "mlp.fc1": "linear1",
    "mlp.fc2": "linear2",
    "correction": "self_attn.correction",
}


def theirs(name: str) -> str:
    for ours, other in NAMES.items():
        name = name.replace(ours, other)
    return f"encoder.{name}" if name.startswith("norm.") else name


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module]:
    ours = build_model("vit4_gated_srp", seed=1, drop_path=0.0, **SIZES)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        for p in ours.parameters():
            p.add_(0.2 * torch.randn_like(p))
    foreign = EncoderModel()
    handle = attach(foreign, last=False, hidden_dim=8, delta=1.5)
    wake(handle)
    foreign.load_state_dict({theirs(name): value for name, value in ours.state_dict().items()}, strict=True)
    handle.set_graph(GRAPH)
    return ours, foreign


def test_an_attached_encoder_model_equals_vit4(pair):
    ours, foreign = pair
    logits = ours(FEATURES, GRAPH), foreign(FEATURES)
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    for one in logits:
        one.square().sum().backward()
    grads = dict(foreign.named_parameters())
    for name, p in ours.named_parameters():
        torch.testing.assert_close(
            grads[theirs(name)].grad, p.grad, atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_without_its_gates_it_is_another_model(pair):
    ours, foreign = pair
    foreign._gated_srp.detach()
    assert not torch.allclose(foreign(FEATURES), ours(FEATURES, GRAPH), atol=1e-3)
