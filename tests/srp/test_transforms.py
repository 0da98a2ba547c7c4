"""The operator and its models under torch.func and torch.export."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

from gated_srp import GatedSRP, PatchGraph, attach
from gated_srp.models import build_model
from gated_srp.srp import FixedCoefficient, OwnValue

GRAPH = PatchGraph.from_grid(3, 3).with_features(torch.randn(9, 5)).with_isolated(before=1)
Y, V = (torch.randn(5, 1, 2, 10, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))


def awake(seed: int = 0) -> GatedSRP:
    srp = GatedSRP(2, hidden_dim=4, delta=1.5)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in srp.parameters():
            p.copy_(torch.randn(p.shape, generator=draw))
    return srp


def test_vmap_over_inputs_equals_one_by_one():
    srp = awake()
    torch.testing.assert_close(
        vmap(lambda y, v: srp(y, v, GRAPH))(Y, V), torch.stack([srp(y, v, GRAPH) for y, v in zip(Y, V, strict=True)])
    )
    asleep = GatedSRP(2, hidden_dim=4)
    assert torch.equal(vmap(lambda y, v: asleep(y, v, GRAPH))(Y, V), Y)


def test_vmap_over_gates_is_an_ensemble():
    gates = [awake(seed) for seed in range(3)]
    params, buffers = stack_module_state(gates)
    got = vmap(lambda p, b: functional_call(gates[0], (p, b), (Y[0], V[0], GRAPH)))(params, buffers)
    torch.testing.assert_close(got, torch.stack([gate(Y[0], V[0], GRAPH) for gate in gates]))


def test_gradients_of_torch_func_are_those_of_backward():
    srp = awake()
    y, v = Y[0].clone().requires_grad_(), V[0]
    params = {name: p.detach() for name, p in srp.named_parameters()}

    def loss(params: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        return functional_call(srp, params, (y, v, GRAPH)).square().sum()

    got, dy = grad(loss, argnums=(0, 1))(params, y.detach())
    srp(y, v, GRAPH).square().sum().backward()
    torch.testing.assert_close(dy, y.grad)
    for name, p in srp.named_parameters():
        torch.testing.assert_close(got[name], p.grad)


@pytest.mark.parametrize("arm", ["na", "gated_srp", "vit4_gated_srp"])
def test_gradients_of_slide_models_by_torch_func_are_those_of_backward(arm):
    sizes = {"in_dim": 5, "num_outputs": 3, "dim": 8, "num_heads": 2, "num_landmarks": 4, "hidden_dim": 4}
    model, draw = build_model(arm, **sizes).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=draw))
    features = torch.randn(1, 9, 5, generator=draw)
    graph = PatchGraph.from_grid(3, 3).with_features(features[0])
    params = {name: p.detach() for name, p in model.named_parameters()}
    got = grad(lambda params: functional_call(model, params, (features, graph)).square().sum())(params)
    model(features, graph).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], torch.zeros_like(p) if p.grad is None else p.grad, atol=1e-4, rtol=1e-4)


def test_a_gradient_for_each_sample():
    srp = awake()
    params = {name: p.detach() for name, p in srp.named_parameters()}

    def loss(params: dict[str, torch.Tensor], y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional_call(srp, params, (y, v, GRAPH)).square().sum()

    every = vmap(grad(loss), in_dims=(None, 0, 0))(params, Y, V)
    for number in range(len(Y)):
        alone = grad(loss)(params, Y[number], V[number])
        for name, value in alone.items():
            torch.testing.assert_close(every[name][number], value, atol=1e-4, rtol=1e-4)


def test_second_derivatives_exist():
    srp, scale = awake(), torch.tensor(1.3)
    second = grad(grad(lambda s: srp(s * Y[0], V[0], GRAPH).square().sum()))(scale)
    assert torch.isfinite(second) and second != 0


def test_an_axis_that_is_learned_maps_too():
    srp = GatedSRP(2, direction=OwnValue(), coefficient=FixedCoefficient(1.0))
    got = vmap(grad(lambda v, y: srp(y, v, GRAPH).square().sum()))(V, Y)
    v = V[2].clone().requires_grad_()
    srp(Y[2], v, GRAPH).square().sum().backward()
    torch.testing.assert_close(got[2], v.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of PyTorch's own attention under vmap
def test_an_attached_model_gives_a_gradient_for_each_sample():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    handle = attach(model, last=True, hidden_dim=4)
    handle.set_graph(PatchGraph.from_grid(3, 3), stay=True)
    x = torch.randn(4, 1, 10, 16)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, params, (x,))[:, :, 0].square().sum()

    every = vmap(grad(loss), in_dims=(None, 0))(params, x)
    loss(dict(model.named_parameters()), x[1]).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(every[name][1], p.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.skipif(torch.__version__ < "2.8", reason="whole numbers as dynamic inputs of torch.export came with 2.8")
def test_the_dense_model_exports_once_for_slides_of_every_length():
    """The number of rows came out of len(), which made a constant of it."""

    def slide(patches: int) -> tuple[torch.Tensor, PatchGraph]:
        cells = torch.cartesian_prod(torch.arange(8), torch.arange(8))[:patches]
        features = torch.randn(1, patches, 10, generator=torch.Generator().manual_seed(patches))
        return features, PatchGraph.from_coords(cells, features[0], stride=1)

    sizes = {"in_dim": 10, "num_outputs": 3, "dim": 24, "num_heads": 4, "depth": 2, "hidden_dim": 8, "delta": 1.0}
    model = build_model("vit4_gated_srp", seed=0, **sizes).eval()
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number)))
    any_size = torch.export.Dim.DYNAMIC
    graph = [
        {0: any_size},
        {0: any_size},
        {0: any_size},
        None,
        (any_size,),
        None,
        {0: any_size},
    ]  # the fields of PatchGraph in their order
    program = torch.export.export(model, slide(25), dynamic_shapes=({1: any_size}, graph), strict=False).module()
    for patches in (25, 40, 13, 64):
        torch.testing.assert_close(program(*slide(patches)), model(*slide(patches)), atol=1e-5, rtol=1e-4)
