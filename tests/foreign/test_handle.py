"""`attach` and its handle: adapters of the user's own, files, optimisers, and errors that say what to do."""

import copy
import json

import pytest
import torch
from foreign_models import wake
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from gated_srp import GatedSRP, PatchGraph, UserError, attach, trace
from gated_srp.foreign import Taps, handle_of

GRAPH = PatchGraph.from_grid(3, 4)


class Attention(nn.Module):
    """Somebody's own attention."""

    def __init__(self, dim: int = 16, num_heads: int = 2) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v), v

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y, _ = self.heads(x)
        return scale * self.proj(y.transpose(1, 2).flatten(2))


def adapter(module: Attention, x: torch.Tensor, scale: float = 1.0):
    y, v = module.heads(x)
    return y, v, lambda z: scale * module.proj(z.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, scale=0.5)
        return x


X = torch.randn(1, 13, 16, generator=torch.Generator().manual_seed(0))


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("named", [{Attention: adapter}, {Attention: Taps("qkv", "proj")}], ids=["function", "taps"])
def test_an_attention_of_ones_own_is_reached_by_an_adapter(named):
    model = Model()
    plain, twin = model(X), copy.deepcopy(model)
    handle = attach(model, adapters=named, last=True)
    handle.set_graph(GRAPH, stay=True)
    assert torch.equal(model(X), plain)
    wake(handle)
    x = X
    for layer, gate in zip(twin.layers, handle.gates().values(), strict=True):
        y, v = layer.heads(x)
        z = gate(y, v, GRAPH.with_isolated(before=1))
        x = x + 0.5 * layer.proj(z.transpose(1, 2).flatten(2))
    torch.testing.assert_close(model(X), x)
    with trace(model) as seen:
        model(X)
    assert seen[0].beta.shape == (2, 12) and seen[0].cls_attention is None
    handle.detach()
    assert torch.equal(model(X), plain) and not hasattr(model.layers[0], "correction")


def test_one_layer_can_be_named():
    model = Model()
    handle = attach(model, adapters={"layers.1": adapter}, last=True)
    assert list(handle.gates()) == ["layers.1"]


def test_gates_are_parameters_of_the_model_and_have_groups_of_their_own():
    model = encoder()
    trunk = {id(p) for p in model.parameters()}
    handle = attach(model, last=True, hidden_dim=4)
    mine = list(handle.parameters())
    assert {id(p) for p in model.parameters()} - trunk == {id(p) for p in mine}
    decayed, free = handle.param_groups(0.05)
    assert decayed["weight_decay"] == 0.05 and free["weight_decay"] == 0.0
    names = {id(p): name for name, p in handle.named_parameters()}
    ends = [sorted(names[id(p)].split("coefficient.")[1] for p in group["params"]) for group in (decayed, free)]
    assert ends[0] == sorted(2 * ["token_hidden.weight", "token_out.weight", "head_weight"])
    assert ends[1] == sorted(2 * ["token_hidden.bias", "token_out.bias", "head_bias", "layer_head_bias"])
    torch.optim.AdamW(handle.param_groups(0.05))
    fast = handle.param_groups(0.05, lr=2e-3)
    assert [group["lr"] for group in torch.optim.AdamW(fast, lr=2e-4).param_groups] == [2e-3, 2e-3]


def test_a_frozen_trunk_trains_its_gates_alone():
    model = encoder().requires_grad_(False)
    handle = attach(model, last=True, hidden_dim=4)
    handle.set_graph(GRAPH, stay=True)
    before = {n: p.clone() for n, p in model.named_parameters()}
    optimiser = torch.optim.AdamW(handle.param_groups(0.0), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = (model(X)[0, 3, :5] - 1).square().mean()
        losses.append(float(loss.detach()))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < losses[0]
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed and all(".correction." in n for n in changed)


def test_gates_that_were_frozen_with_the_trunk_are_spoken_of_once():
    """peft freezes all that is not its own; so does model.requires_grad_(False) after attach."""
    model = encoder()
    handle = attach(model, last=True, hidden_dim=4)
    model.requires_grad_(False)
    handle.set_graph(GRAPH, stay=True)
    with pytest.warns(UserWarning, match=r"every gate is frozen.*handle\.requires_grad_\(True\)"):
        model(X)
    model(X)  # warnings are errors here: said once
    handle.requires_grad_(True)
    assert all(p.requires_grad for p in handle.parameters()) and not model.layers[0].linear1.weight.requires_grad
    model.requires_grad_(False)
    with pytest.warns(UserWarning, match="every gate is frozen"):
        model(X)


def test_gates_frozen_on_purpose_or_for_inference_are_not_spoken_of():
    model = encoder()
    handle = attach(model, last=True, hidden_dim=4).requires_grad_(False)
    handle.set_graph(GRAPH, stay=True)
    model(X)
    handle.requires_grad_(True)
    model.requires_grad_(False).eval()(X)
    with torch.no_grad():
        model.train()(X)


class LowRank(nn.Module):
    """A linear layer with an adapter around it, as peft puts it in place of the layer."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("late", [["qkv"], ["proj"], ["qkv", "proj"]])
def test_adapters_put_around_tapped_layers_after_attach_are_followed(late):
    def adapted(before: bool) -> nn.Module:
        torch.manual_seed(1)
        model = Model()
        pairs = [(layer, name, LowRank(getattr(layer, name))) for layer in model.layers for name in late]
        if not before:
            model(X)
            handle = attach(model, adapters={Attention: Taps("qkv", "proj")}, last=True, hidden_dim=4)
        for layer, name, low_rank in pairs:
            setattr(layer, name, low_rank)
        if before:
            handle = attach(model, adapters={Attention: Taps("qkv", "proj")}, last=True, hidden_dim=4)
        wake(handle)
        handle.set_graph(GRAPH, stay=True)
        model(X)
        handle.set_graph(GRAPH)
        return model

    torch.testing.assert_close(adapted(before=False)(X), adapted(before=True)(X))


def test_attaching_leaves_everybodys_random_stream_alone():
    model = encoder()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    attach(model, last=True)
    assert torch.equal(torch.rand(3), expected)


def test_a_file_of_gates_has_a_card_and_fits_its_own_kind_alone(tmp_path):
    model = encoder()
    handle = attach(model, last=True, hidden_dim=4, delta=0.5)
    wake(handle)
    path = tmp_path / "gates.safetensors"
    handle.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["gates.safetensors"]
    with safe_open(path, "pt") as file:
        card = json.loads(file.metadata()["card"])
        assert len(file.keys()) == 14
    assert card["delta"] == 0.5 and card["layers"] == ["layers.0.self_attn", "layers.1.self_attn"]
    handle.detach()
    wrong = [
        ({"delta": 1.0, "hidden_dim": 4, "last": True}, "delta 0.5"),
        ({"delta": 0.5, "hidden_dim": 8, "last": True}, "hidden_dim 4"),
        ({"delta": 0.5, "hidden_dim": 4, "last": False}, "layers"),
        ({"delta": 0.5, "hidden_dim": 4, "last": True, "window": 5}, "window 3"),
    ]
    for settings, words in wrong:
        other = attach(model, **settings)
        values = [p.clone() for p in other.parameters()]
        with pytest.raises(UserError, match=words):
            other.load(path)
        assert all(torch.equal(a, b) for a, b in zip(values, other.parameters(), strict=True))
        other.detach()


@pytest.mark.parametrize("content", [b"", b"not a file of tensors", None])
def test_broken_files_of_gates_are_the_users_errors(tmp_path, content):
    path = tmp_path / "gates.safetensors"
    if content is not None:
        path.write_bytes(content)
    handle = attach(encoder(), last=True)
    with pytest.raises(UserError, match=r"handle\.save"):
        handle.load(path)


def test_other_peoples_tensors_are_no_gates(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="no card"):
        attach(encoder(), last=True).load(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="cannot be written"):
        handle_of(attach(encoder(), last=True).model).save(tmp_path / "model.safetensors" / "gates")


def test_a_nan_in_the_tokens_comes_out_as_a_nan_and_not_as_our_error():
    model = encoder()
    attach(model, last=True, grid=(3, 4))
    x = X.clone()
    x[0, 5, 3] = float("nan")
    assert model(x).isnan().any()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "last=False"),
        ({"last": True, "delta": 0.0}, "positive range"),
        ({"last": True, "hidden_dim": 0}, "hidden"),
        ({"last": True, "grid": (0, 3)}, "height, width"),
        ({"last": True, "grid": (3, 3), "window": 4}, "odd"),
        ({"last": True, "adapters": {"layers.9": adapter}}, "layers.9"),
        ({"last": True, "adapters": {"layers.0.linear1": adapter}}, "number of heads"),
        ({"last": True, "adapters": {}}, "names no module"),
        ({"last": True, "adapters": {"layers.0.self_attn": Taps("qkv", "out_proj")}}, r"no submodule 'qkv'.*out_proj"),
        ({"last": True, "adapters": {nn.MultiheadAttention: Taps("out_proj", "heads")}}, "no submodule 'heads'"),
        ({"last": True, "adapters": {"layers.0.self_attn": ("qkv", "proj")}}, "Taps"),
        ({"last": True, "adapters": {"layers.0.self_attn": Taps}}, "Taps"),
        ({"last": True, "window": 4}, "odd"),
    ],
)
def test_wrong_settings_say_what_to_do_and_change_nothing(settings, words):
    model = encoder()
    before = list(model.state_dict())
    with pytest.raises(UserError, match=words):
        attach(model, **settings)
    assert list(model.state_dict()) == before and not hasattr(model, "_gated_srp")


def test_what_is_no_module_is_refused():
    with pytest.raises(UserError, match="expected a torch"):
        attach("vit_base_patch16_224", last=True)


def test_attaching_twice_is_refused():
    model = encoder()
    attach(model, last=True)
    with pytest.raises(UserError, match="already"):
        attach(model, last=True)
    with pytest.raises(UserError, match="already"):
        attach(model.layers[0], last=True)
    with pytest.raises(UserError, match="nothing is attached"):
        handle_of(encoder())


def test_a_model_without_attention_is_told_of_adapters():
    with pytest.raises(UserError, match="adapters"):
        attach(nn.Sequential(nn.Linear(3, 3)), last=True)


def test_a_model_without_graph_asks_for_one():
    model = encoder()
    handle = attach(model, last=True)
    with pytest.raises(UserError, match="set_graph"):
        model(X)
    handle.set_graph(PatchGraph.from_grid(5, 5))
    with pytest.raises(UserError, match="1 x 25 patches"):
        model(X)
    with pytest.raises(UserError, match="window"):
        handle.set_graph(PatchGraph.from_grid(3, 4, window=5))
    with pytest.raises(UserError, match="PatchGraph"):
        handle.set_graph(X)


def test_taps_that_miss_the_values_say_so():
    model = Model()
    handle = attach(model, adapters={Attention: Taps("proj", "qkv")}, last=True)
    handle.set_graph(GRAPH)
    with pytest.raises(UserError, match="gave no values"):
        model(X)


def test_the_gates_are_our_operator():
    handle = attach(encoder(), last=True, hidden_dim=64)
    assert all(isinstance(gate, GatedSRP) for gate in handle.gates().values())
    assert sum(p.numel() for p in handle.parameters()) == 2 * (
        351 - 5 * 4
    )  # five numbers a head; the paper's gate has six heads
