"""Which row of a foreign model is which patch: the graph that all corrected layers of a model share.

Shapes: B batch, N patches, L rows (patches and whatever stands in front of them), C channels.
"""

import torch
from torch import Tensor

from gated_srp.errors import UserError, counted
from gated_srp.srp import PatchGraph

MOST_IN_FRONT = 16  # CLS, distillation and register tokens of known encoders; more than these have to be named


class Neighbourhood:
    """The graph of the forward under way. It lives here and not in a context variable, which a recomputing backward would lose.

    Either the user's graph as it is (`set_graph`), for one forward unless it stays, or a fixed grid of image tokens whose
    homogeneity is measured anew for every image on the tokens that enter the first block (`observe`). Rows in front that
    neither covers (CLS, registers) are rows without neighbours; their number is a fact of the model, so that the graph of
    another slide cannot pass for the right one behind an invented number of them.
    """

    def __init__(self, window: int, grid: tuple[int, int] | None = None, front: int | None = None) -> None:
        self.window, self.front = window, front
        self.measured = grid is not None
        self.graph = None if grid is None else PatchGraph.from_grid(*grid, window=window)
        self._stays, self._used = True, False
        self._inside = False  # the attached model's own forward is running
        self._spent_inside = False  # it was that forward, not one of a part of the model, that used the graph
        self._graded = False  # the forward under way began with gradients
        self._unfinished = 0  # checkpointed forwards, each of another graph, whose blocks no backward has run again yet
        self._last_unfinished: PatchGraph | None = None
        self._recomputed = False
        self._rows: PatchGraph | None = None  # the graph of all rows of the last batch
        self._bags = 0  # of that batch
        self._device = torch.device("cpu")

    def set_graph(self, graph: PatchGraph, *, stay: bool) -> None:
        if not isinstance(graph, PatchGraph):
            cure = "PatchGraph.from_coords makes one, PatchGraph.batch joins those of several bags."
            raise UserError(f"got {type(graph).__name__}, expected a PatchGraph", where="set_graph", cure=cure)
        if graph.window != self.window:
            what = f"the graph has window {graph.window}, the model was attached with window {self.window}"
            cure = f"Build the graph with window={self.window}, or attach(model, window={graph.window})."
            raise UserError(what, where="set_graph", cure=cure)
        self.graph, self._rows, self.measured = graph, None, False
        self._stays, self._used = stay, False
        if self.front is not None and self.front >= graph.before:
            # Made here, once the model is known, and not in the forward: a compiler would take a slide's length for a constant.
            self._bags = graph.num_bags
            self._rows = graph.with_isolated(before=self.front - graph.before).to(self._device)

    def set_grid(self, height: int, width: int) -> None:
        self.graph, self._rows, self.measured = PatchGraph.from_grid(height, width, window=self.window), None, True
        self._stays, self._used = True, False

    def enter_model(self) -> None:
        """The attached model is called."""
        self._begin()
        self._inside = True

    def leave_model(self) -> None:
        self._inside = False

    def enter_first_block(self) -> None:
        """The first block is called: by the model, or past its forward (``model.encoder(x)``, ``model.forward_features(x)``)."""
        if not self._inside and not (self._spent_inside and torch.compiler.is_compiling()):
            self._begin()

    def _begin(self) -> None:
        if _backward_runs():
            return  # activation checkpointing calls a part of the model again: no new forward
        if self._recomputed:
            self._unfinished, self._last_unfinished, self._recomputed = 0, None, False
        self._graded = torch.is_grad_enabled()
        if self._used and not self._stays:
            what = "the graph was used by the forward before this one; another slide has another graph"
            cure = "Call handle.set_graph(graph) before each forward, or handle.set_graph(graph, stay=True) where several forwards are of the same patches."
            raise UserError(what, where="attach", cure=cure)

    def observe(self, tokens: Tensor) -> None:
        """The features of which homogeneity is measured: the tokens (B, L, C) that enter the first block, positions added, detached, per image."""
        if self.measured:
            batch, length = tokens.shape[:2]
            rows = self._fit(batch, length, tokens.device)
            # A model that has gone wrong stays its own judge: NaN comes out of it, not an error of ours.
            self._rows = rows.with_tokens(tokens.detach().nan_to_num(0.0, 0.0, 0.0).flatten(0, 1))

    def rows(self, y: Tensor) -> PatchGraph:
        """The graph of all B * L rows of heads y (B, H, L, D)."""
        batch, _, length, _ = y.shape
        known = self._known(batch, length, y.device)
        if known is None and self.measured:
            what = f"attention over {batch} x {length} rows, but the first block saw {self._rows and self._rows.num_rows} in all"
            why = "The model changes its rows between blocks, or the blocks were called one by one. "
            raise UserError(
                what, cure=f"{why}Call the whole model; models that merge or drop tokens cannot be corrected."
            )
        self._rows = self._fit(batch, length, y.device) if known is None else known
        self._used, self._spent_inside = True, self._inside
        if not torch.compiler.is_compiling():
            self._follow_checkpointing(self._rows if self.measured else self.graph)
        return self._rows

    def _follow_checkpointing(self, graph: PatchGraph | None) -> None:
        """A block that is run again in backward must not get the graph of a later forward."""
        if _backward_runs():
            self._recomputed = True
            if self._unfinished > 1:
                what = f"activation checkpointing runs blocks of {self._unfinished} forwards again, and the graph of the last one alone is still known"
                cure = "Call backward after each forward (gradients add up), put forwards without backward under torch.no_grad(), or switch checkpointing off."
                raise UserError(what, where="attach", cure=cure)
        elif self._graded and _drops_activations() and graph is not self._last_unfinished:
            self._unfinished, self._last_unfinished = self._unfinished + 1, graph

    def _known(self, batch: int, length: int, device: torch.device) -> PatchGraph | None:
        rows = self._rows
        fits = rows is not None and self._bags == batch and rows.num_rows == batch * length
        return rows if fits and rows is not None and rows.offsets.device == device else None

    def _fit(self, batch: int, length: int, device: torch.device) -> PatchGraph:
        if self.graph is None:
            cure = "Call handle.set_graph(graph) before each bag, or attach(model, grid=(height, width)) where the rows are always one grid."
            raise UserError("the model has no graph yet", where="attach", cure=cure)
        known = self._known(batch, length, device)
        if known is not None:
            return known
        graph = self.graph
        if graph.num_bags == 1 and batch > 1 and graph.num_rows == graph.lengths[0]:
            graph = PatchGraph.batch([graph] * batch)
        covered = graph.num_rows // graph.num_bags
        self._check_front(graph, batch, length, covered)
        self._bags, self._device = batch, device
        return graph.with_isolated(before=length - covered).to(device)

    def _check_front(self, graph: PatchGraph, batch: int, length: int, covered: int) -> None:
        """The first forward says how many rows stand in front of the patches, where the model does not; then it is fixed.

        No message is made before it is needed: printing a length would compile a model anew for every slide.
        """
        front = length - covered + graph.before
        whole = length == covered and graph.before > 0  # the graph speaks for every row: nothing is left to guess
        other = not whole and self.front is not None and self.front != front
        if other or graph.num_bags != batch or length < covered:
            stand = "" if self.front is None else f" behind {counted(self.front, 'row')} of CLS and registers"
            what = (
                f"attention over {batch} x {length} rows, but the graph has {graph.num_bags} x {covered} patches{stand}"
            )
            cure = (
                "Slides: handle.set_graph(graph) for each bag, PatchGraph.batch for several, and graph.with_isolated(before=..., after=...) "
                "where there are other rows. Images of another size: handle.set_grid(height, width)."
            )
            raise UserError(what, where="attach", cure=cure)
        if self.front is None and not whole:
            if front > MOST_IN_FRONT:
                what = f"attention over {batch} x {length} rows, but the graph has {graph.num_bags} x {covered} patches: is it the graph of another slide?"
                here = f"{counted(front, 'row')} would stand in front of the patches."
                cure = f"{here} Set the graph of this slide; or say it, if it is so: attach(model, front={front})."
                raise UserError(what, where="attach", cure=cure)
            self.front = front


def _backward_runs() -> bool:
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _drops_activations() -> bool:
    """Inside torch.utils.checkpoint (of either kind), in a forward that began with gradients."""
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
    return not torch.is_grad_enabled() or hooks(False) is not None
