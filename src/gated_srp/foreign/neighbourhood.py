"""Which row of a foreign model is which patch: the graph that all corrected layers of a model share.

Shapes: B batch, N patches, L rows (patches and whatever stands in front of them), C channels.
"""

import torch
from torch import Tensor

from gated_srp.errors import UserError
from gated_srp.srp import PatchGraph


class Neighbourhood:
    """The graph of the forward under way. It lives here and not in a context variable, which a recomputing backward would lose.

    Either the user's graph as it is (`set_graph`), or a fixed grid of image tokens whose homogeneity is measured anew for
    every image on the tokens that enter the first block (`observe`). Rows in front that neither covers (CLS, registers,
    padding) are rows without neighbours.
    """

    def __init__(self, window: int, grid: tuple[int, int] | None = None, front: int | None = None) -> None:
        self.window, self.front = window, front
        self.measured = grid is not None
        self._patches = None if grid is None else PatchGraph.from_grid(*grid, window=window)
        self._rows: PatchGraph | None = None  # the graph of all rows of the last batch
        self._shape: tuple[int, int] | None = None

    def set_graph(self, graph: PatchGraph) -> None:
        if not isinstance(graph, PatchGraph):
            raise UserError(
                f"set_graph: got {type(graph).__name__}, expected a PatchGraph (PatchGraph.from_coords, PatchGraph.batch for several bags)."
            )
        if graph.window != self.window:
            raise UserError(
                f"set_graph: the graph has window {graph.window}, the model was attached with window {self.window}. "
                f"Build the graph with window={self.window}, or attach(model, window={graph.window})."
            )
        self._patches, self._rows, self.measured = graph, None, False

    def set_grid(self, height: int, width: int) -> None:
        self._patches, self._rows, self.measured = PatchGraph.from_grid(height, width, window=self.window), None, True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def observe(self, tokens: Tensor) -> None:
        """phi of PROTOCOL 1: the tokens (B, L, C) that enter the first block, positions added, detached, per image."""
        if self.measured:
            rows = self._fit(*tokens.shape[:2], tokens.device)
            # A model that has gone wrong stays its own judge: NaN comes out of it, not an error of ours.
            self._rows = rows.with_tokens(tokens.detach().nan_to_num(0.0, 0.0, 0.0).flatten(0, 1))

    def rows(self, y: Tensor) -> PatchGraph:
        """The graph of all B * L rows of heads y (B, H, L, D)."""
        batch, _, length, _ = y.shape
        if self._rows is not None and self._shape == (batch, length) and self._rows.offsets.device == y.device:
            return self._rows
        if self.measured:
            raise UserError(
                f"attention over {batch} x {length} rows, but the first block saw {self._shape}: the model changes its rows between blocks, "
                "or the blocks were called one by one. Call the whole model; models that merge or drop tokens cannot be corrected."
            )
        self._rows = self._fit(batch, length, y.device)
        return self._rows

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _fit(self, batch: int, length: int, device: torch.device) -> PatchGraph:
        if self._patches is None:
            raise UserError(
                "the model has no graph yet. Call handle.set_graph(graph) with the graph of the patches before each bag, "
                "or attach(model, grid=(height, width)) where the rows are always one grid."
            )
        if self._rows is not None and self._shape == (batch, length) and self._rows.offsets.device == device:
            return self._rows
        graph = self._patches
        if graph.num_bags == 1 and batch > 1:
            graph = PatchGraph.batch([graph] * batch) if graph.num_rows == graph.lengths[0] else graph
        covered = graph.num_rows // graph.num_bags
        front = length - covered
        if graph.num_bags != batch or front < 0 or (self.measured and self.front not in (None, front)):
            stand = "" if self.front is None else f" behind {self.front} rows of CLS and registers"
            raise UserError(
                f"attention over {batch} x {length} rows, but the graph has {graph.num_bags} x {covered} patches{stand}. "
                "Slides: handle.set_graph(graph) for each bag, PatchGraph.batch for several. Images of another size: handle.set_grid(height, width)."
            )
        self._shape = (batch, length)
        return graph.with_isolated(before=front).to(device)
