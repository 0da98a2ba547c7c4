"""A graph belongs to one slide: it serves one forward unless it is told to stay, behind a fixed number of rows of CLS and registers."""

import copy

import pytest
import torch
from foreign_models import wake
from test_handle import Attention, Model, adapter
from torch import nn
from torch.utils.checkpoint import checkpoint

from gated_srp import PatchGraph, UserError, attach, trace
from gated_srp.foreign import Taps, handle_of

SMALL, LARGE = PatchGraph.from_grid(4, 4), PatchGraph.from_grid(8, 8)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, count, 16, generator=torch.Generator().manual_seed(seed))


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def ready(model: nn.Module | None = None, **settings: object):
    model = encoder() if model is None else model
    handle = attach(model, last=True, hidden_dim=4, **settings)
    wake(handle)
    return model, handle


def test_a_graph_left_over_from_the_slide_before_is_refused():
    model, handle = ready()
    handle.set_graph(SMALL)
    model(rows(17))
    with pytest.raises(UserError, match=r"used by the forward before.*set_graph.*stay=True"):
        model(rows(65))
    with pytest.raises(UserError, match="used by the forward before"):
        model(rows(17, seed=1))  # of the same length, which no count of rows can tell


def test_rows_in_front_are_fixed_by_the_first_forward():
    model, handle = ready()
    handle.set_graph(SMALL)
    model(rows(17))
    handle.set_graph(SMALL)
    with pytest.raises(UserError, match=r"1 x 65 rows.*1 x 16 patches behind 1 row of CLS"):
        model(rows(65))
    handle.set_graph(SMALL)
    with pytest.raises(UserError, match="behind 1 row "):
        model(rows(16))
    handle.set_graph(LARGE)
    assert torch.isfinite(model(rows(65))).all()


def test_a_first_forward_with_the_graph_of_another_slide_is_refused():
    model, handle = ready()
    handle.set_graph(SMALL, stay=True)
    with pytest.raises(UserError, match=r"another slide\? 49 rows.*front=49"):
        model(rows(65))
    model(rows(17))  # nothing was fixed by the refused one
    assert handle_of(model) is handle


@pytest.mark.parametrize("front", [0, 1, 49])
def test_rows_in_front_can_be_said_when_attaching(front):
    model, handle = ready(front=front)
    handle.set_graph(SMALL, stay=True)
    assert torch.isfinite(model(rows(16 + front))).all()
    with pytest.raises(UserError, match=f"behind {front} rows? of"):
        model(rows(17 + front))


def test_a_graph_that_covers_every_row_needs_no_fixed_front():
    model, handle = ready()
    for before in (1, 3, 40):  # zeros in front that depend on the slide, as TransMIL's attention puts them
        handle.set_graph(SMALL.with_isolated(before=before, after=2))
        assert torch.isfinite(model(rows(18 + before))).all()


def test_a_graph_that_stays_serves_every_forward():
    model, handle = ready()
    handle.set_graph(SMALL, stay=True)
    first = model(rows(17))
    assert torch.equal(model(rows(17)), first)
    handle.set_graph(SMALL)
    assert torch.equal(model(rows(17)), first)
    with pytest.raises(UserError, match="stay=True"):
        model(rows(17))


def test_a_refused_forward_does_not_use_the_graph_up():
    model, handle = ready(front=1)
    handle.set_graph(SMALL)
    with pytest.raises(UserError, match="1 x 18 rows"):
        model(rows(18))
    assert torch.isfinite(model(rows(17))).all()


def test_parts_called_past_the_models_own_forward_use_the_graph_up_too():
    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = encoder()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.features(x).mean(1)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.trunk(x)

    model, handle = ready(Sliced())
    handle.set_graph(SMALL)
    model.features(rows(17))
    with pytest.raises(UserError, match="used by the forward before"):
        model.features(rows(17))
    with pytest.raises(UserError, match="used by the forward before"):
        model(rows(17))


def test_a_block_that_the_model_calls_several_times_is_one_forward():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Attention()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = x + self.block(x)
            return x

    model, handle = ready(Tied(), adapters={Attention: adapter})
    for _ in range(2):
        handle.set_graph(SMALL)
        assert torch.isfinite(model(rows(17))).all()


def test_a_trace_is_part_of_its_forward():
    model, handle = ready()
    handle.set_graph(SMALL)
    with trace(model) as seen:
        model(rows(17))
    assert seen[0].beta.shape == (2, 16) and seen[0].cls_attention.shape == (2, 16)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = encoder(3).layers, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_in_backward_is_no_new_forward(reentrant):
    model, handle = ready(Checkpointed(reentrant))
    for step in range(3):
        x = rows(17, seed=step).requires_grad_()
        handle.set_graph(SMALL)
        model(x).square().sum().backward()
        plain, own = encoder(3), x.detach().clone().requires_grad_()
        other = attach(plain, last=True, hidden_dim=4)
        plain.load_state_dict(model.state_dict())
        other.set_graph(SMALL)
        plain(own).square().sum().backward()
        torch.testing.assert_close(x.grad, own.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_never_gets_the_graph_of_a_later_forward(reentrant):
    """Two slides of one size: no count of rows could tell that the first one's blocks would run under the second one's graph."""
    model, handle = ready(Checkpointed(reentrant))
    losses = []
    for graph in (PatchGraph.from_grid(2, 8), PatchGraph.from_grid(4, 4)):
        handle.set_graph(graph)
        losses.append(model(rows(17).requires_grad_()).sum())
    with pytest.raises(UserError, match="checkpointing"):
        sum(losses).backward()


def test_forwards_without_backward_do_not_disturb_checkpointing():
    model, handle = ready(Checkpointed(False))
    for graph in (PatchGraph.from_grid(2, 8), SMALL):
        with torch.no_grad():
            handle.set_graph(graph)
            model(rows(17))
        handle.set_graph(graph)
        model(rows(17).requires_grad_()).sum().backward()
    handle.set_graph(SMALL, stay=True)
    (
        model(rows(17).requires_grad_()).sum() + model(rows(17, 1).requires_grad_()).sum()
    ).backward()  # one graph for both


def test_images_of_a_fixed_grid_need_no_graph_and_their_recomputation_is_watched_too():
    model, _ = ready(Checkpointed(False), grid=(4, 4))
    for seed in range(2):
        model(rows(17, seed).requires_grad_()).sum().backward()
    with pytest.raises(UserError, match="checkpointing"):
        sum(model(rows(17, seed).requires_grad_()).sum() for seed in range(2)).backward()


def test_a_batch_keeps_its_front():
    model, handle = ready()
    handle.set_graph(PatchGraph.batch([SMALL, PatchGraph.from_grid(3, 4)]))
    model(rows(17).repeat(2, 1, 1))
    handle.set_graph(SMALL)
    model(rows(17).repeat(5, 1, 1))
    handle.set_graph(PatchGraph.batch([LARGE, SMALL]))
    with pytest.raises(UserError, match="behind 1 row "):
        model(rows(66).repeat(2, 1, 1))


def test_copies_carry_their_own_count():
    model, handle = ready()
    handle.set_graph(SMALL)
    twin = copy.deepcopy(model)
    model(rows(17))
    assert torch.isfinite(twin(rows(17))).all()
    with pytest.raises(UserError, match="used by the forward before"):
        twin(rows(17))


def test_data_parallel_replicas_are_refused():
    model, handle = ready()
    handle.set_graph(SMALL)
    with pytest.raises(UserError, match=r"DataParallel.*DistributedDataParallel"):
        model._replicate_for_data_parallel()(rows(17))


def test_an_error_inside_the_model_leaves_the_next_forward_alone():
    model, handle = ready(Model(), adapters={Attention: Taps("qkv", "proj")})
    handle.set_graph(SMALL)
    with pytest.raises(RuntimeError):
        model(torch.randn(1, 17, 5))
    handle.set_graph(SMALL)
    model(rows(17))
    with pytest.raises(UserError, match="used by the forward before"):
        model.layers[0](rows(17))


@pytest.mark.parametrize("front", [-1, 2])
def test_a_front_that_cannot_be_is_refused(front):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: encoders)")
    config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32)
    with pytest.raises(UserError, match=f"front is {front}"):
        attach(transformers.ViTModel(config), last=True, front=front)
