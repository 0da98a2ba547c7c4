"""torch.compile through `attach`: one graph from the first row to the last, without a break, with gradients."""

import pytest
import torch
from foreign_models import wake
from test_handle import Attention, Model, adapter
from torch import nn

from gated_srp import PatchGraph, UserError, attach
from gated_srp.foreign import Taps


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def slide(patches: int) -> tuple[torch.Tensor, PatchGraph]:
    cells = torch.cartesian_prod(torch.arange(8), torch.arange(8))[:patches]
    rows = torch.randn(1, patches + 1, 16, generator=torch.Generator().manual_seed(patches))
    return rows, PatchGraph.from_coords(cells, rows[0, 1:], stride=1)


# dynamo's own look at tensors between two graphs
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")

FAMILIES = {
    "encoder": (encoder, {}),
    "taps": (Model, {"adapters": {Attention: Taps("qkv", "proj")}}),
    "function": (Model, {"adapters": {Attention: adapter}}),
}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def same(model: nn.Module, compiled: nn.Module, call, before=lambda: None) -> None:
    """Output and gradients of the two."""
    grads = []
    for one in (model, compiled):
        before()
        model.zero_grad()
        out = call(one)
        out.square().sum().backward()
        grads.append([out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(grads[0]) == len(grads[1])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_slides_compile_without_a_graph_break(family):
    make, settings = FAMILIES[family]
    model = make()
    handle = attach(model, last=True, hidden_dim=4, **settings)
    wake(handle)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for patches in (12, 20, 33):
        rows, graph = slide(patches)
        same(model, compiled, lambda one, rows=rows: one(rows), lambda graph=graph: handle.set_graph(graph))


def test_slides_of_many_lengths_share_a_compiled_graph():
    model = Model()
    handle = attach(model, adapters={Attention: adapter}, last=True, hidden_dim=4, front=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for patches in (12, 20, 33, 40, 61, 50):
        rows, graph = slide(patches)
        handle.set_graph(graph)
        compiled(rows)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


def test_images_of_more_rows_than_a_chunk_compile_without_a_graph_break():
    model = encoder()
    wake(attach(model, last=True, hidden_dim=4, grid=(17, 17)))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    images = torch.randn(2, 290, 16)
    same(model, compiled, lambda one: one(images))


def test_a_hugging_face_model_compiles_without_a_graph_break():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: encoders)")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    config = transformers.ViTConfig(**sizes, image_size=128, patch_size=8, num_labels=3)
    model = transformers.ViTForImageClassification(config)
    wake(attach(model, hidden_dim=4))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    images = torch.randn(2, 3, 128, 128)
    same(model, compiled, lambda one: one(pixel_values=images).logits)


def test_a_compiled_model_refuses_a_graph_that_was_used():
    model = Model()
    handle = attach(model, adapters={Attention: adapter}, last=True, hidden_dim=4)
    compiled = torch.compile(model, backend="aot_eager")
    rows, graph = slide(12)
    handle.set_graph(graph)
    compiled(rows)
    with pytest.raises(UserError, match="used by the forward before"):
        compiled(rows)
    handle.set_graph(graph, stay=True)
    assert torch.equal(compiled(rows), compiled(rows))
