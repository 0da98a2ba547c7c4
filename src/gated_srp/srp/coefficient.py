"""How much of the common component is removed: the paper's signed gate, or a fixed number.

A coefficient maps what was measured (`Measured`) and the graph to beta (R, H), R = B * L rows, H heads.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gated_srp.srp import projection
from gated_srp.srp.graph import PatchGraph
from gated_srp.srp.projection import composed, wide

Bound = Callable[[Tensor, float], Tensor]
Initialiser = Callable[[Tensor, torch.Generator | None], object]


def regimes(beta: Tensor) -> dict[str, Tensor]:
    """What beta does to the common component, as a mask per regime: amplify, leave, project out, reflect.

    >>> {name: mask.tolist().index(True) for name, mask in regimes(torch.tensor([-0.5, 0.0, 0.5, 2.0])).items()}
    {'anti': 0, 'identity': 1, 'projection': 2, 'reflection': 3}
    """
    return {
        "anti": beta <= -0.5,
        "identity": (beta > -0.5) & (beta < 0.5),
        "projection": (beta >= 0.5) & (beta <= 1.5),
        "reflection": beta > 1.5,
    }


def signed(logit: Tensor, delta: float) -> Tensor:
    """Eq. 7: beta = delta tanh(logit), in (-delta, delta)."""
    return delta * torch.tanh(logit)


def nonnegative(logit: Tensor, delta: float) -> Tensor:
    """Gate-range ablation: delta sigmoid(logit), in (0, delta). Starts at delta / 2, not at the identity."""
    return delta * torch.sigmoid(logit)


def rectified(logit: Tensor, delta: float) -> Tensor:
    """Control: delta max(0, tanh(logit)), never negative and yet the identity at the start; the slope at zero is kept."""
    return signed(logit, delta).clamp(min=0)


def from_removal(logit: Tensor, delta: float) -> Tensor:
    """Beyond the paper: 1 + delta tanh(logit), which starts by removing and has to learn where to leave alone."""
    return 1 + signed(logit, delta)


def range_free(logit: Tensor, delta: float) -> Tensor:
    """Beyond the paper: 2 tanh(logit / 2), which needs no range; delta is not used."""
    return 2 * torch.tanh(logit / 2)


def zeros(weight: Tensor, generator: torch.Generator | None) -> None:
    nn.init.zeros_(weight)


def xavier(weight: Tensor, generator: torch.Generator | None) -> None:
    nn.init.xavier_uniform_(weight, generator=generator)


def kaiming(weight: Tensor, generator: torch.Generator | None) -> None:
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)


class Coefficient(nn.Module):
    """Base of all coefficients. ``live`` asks that what was measured carries gradients."""

    live = False

    @property
    def largest(self) -> float:
        """The size that beta does not exceed; colours of maps span it."""
        return 2.0

    def forward(self, component: Tensor, norm: Tensor, graph: PatchGraph) -> Tensor:
        raise NotImplementedError


class FixedCoefficient(Coefficient):
    """The same beta everywhere: 0 identity, 1 projection, 2 reflection, -1 amplification."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    @property
    def largest(self) -> float:
        return abs(self.value)

    def forward(self, component: Tensor, norm: Tensor, graph: PatchGraph) -> Tensor:
        return torch.full_like(component, self.value)

    def extra_repr(self) -> str:
        return f"{self.value}"


def _token_mlp(
    d_tok: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """g_tok: linear, exact GELU, linear: (R, 3) -> (R, 1), with the hidden rows before and after the activation."""
    hidden = F.linear(d_tok, w1, b1)
    active = F.gelu(hidden)
    return F.linear(active, w2, b2), hidden, active


class _TokenMlp(torch.autograd.Function):
    """`_token_mlp` with its hidden rows (R x hidden) computed twice instead of kept; the diagnostics get no gradient."""

    @staticmethod
    def forward(ctx: Any, d_tok: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
        ctx.save_for_backward(d_tok, w1, b1, w2, b2)
        return _token_mlp(d_tok, w1, b1, w2, b2)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_tok, w1, b1, w2, b2 = ctx.saved_tensors
        (dout,) = grads  # (R, 1)
        _, hidden, active = _token_mlp(d_tok, w1, b1, w2, b2)
        dhidden = torch.ops.aten.gelu_backward(dout * w2, hidden)
        db1 = None if b1 is None else dhidden.sum(0)
        db2 = None if b2 is None else dout.sum(0)
        return None, dhidden.t() @ d_tok, db1, dout.t() @ active, db2


class SignedGate(Coefficient):
    """The paper's gate (Eq. 7-10): beta = delta tanh(g_tok(d_tok) + <w_h, d_head> + b_h + b_lh).

    d_tok = [h_local, m / K, log(1 + m)] is shared by the heads; d_head = [cos(y, r_hat), |cos(y, r_hat)|, log(1 + |y|)].
    ``hidden_dim=None`` leaves out the token part ("head only"), ``head=False`` the head weights and b_h ("token only"),
    ``bias=False`` all four biases; ``live=True`` lets gradients through the diagnostics.
    """

    num_token_inputs = 3

    def __init__(
        self,
        num_heads: int,
        *,
        delta: float = 1.0,
        hidden_dim: int | None = 64,
        bound: Bound = signed,
        head: bool = True,
        bias: bool = True,
        init: Initialiser = zeros,
        live: bool = False,
    ) -> None:
        super().__init__()
        self.delta, self.bound, self.init, self.live = delta, bound, init, live
        self.token_hidden = None if hidden_dim is None else nn.Linear(self.num_token_inputs, hidden_dim, bias=bias)
        self.token_out = None if hidden_dim is None else nn.Linear(hidden_dim, 1, bias=bias)
        self.head_weight = nn.Parameter(torch.empty(num_heads, 3)) if head else None
        self.head_bias = nn.Parameter(torch.empty(num_heads)) if head and bias else None
        self.layer_head_bias = nn.Parameter(torch.empty(num_heads)) if bias else None
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """The hidden layer as PyTorch's Linear, the output layer and the head weights by ``init``, every bias zero."""
        if self.token_hidden is not None and self.token_out is not None:
            nn.init.kaiming_uniform_(self.token_hidden.weight, a=math.sqrt(5), generator=generator)
            if self.token_hidden.bias is not None:
                limit = 1 / math.sqrt(self.token_hidden.in_features)
                nn.init.uniform_(self.token_hidden.bias, -limit, limit, generator=generator)
            self.init(self.token_out.weight, generator)
            if self.token_out.bias is not None:
                nn.init.zeros_(self.token_out.bias)
        if self.head_weight is not None:
            self.init(self.head_weight, generator)
        for bias in (self.head_bias, self.layer_head_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, component: Tensor, norm: Tensor, graph: PatchGraph) -> Tensor:
        if not self.live:
            component, norm = component.detach(), norm.detach()
        with torch.autocast(component.device.type, enabled=False):
            if self.bound is signed and not self.live and projection.by_kernels(component):
                return self._by_kernel(component, norm, graph)
            logit = torch.zeros_like(component)  # (R, H)
            if self.token_hidden is not None:
                logit = logit + self._token_logit(norm, graph)  # (R, 1)
            if self.head_weight is not None:
                logit = logit + self._head_logit(component, norm)
            for bias in (self.head_bias, self.layer_head_bias):
                if bias is not None:
                    logit = logit + wide(bias)
            return self.bound(logit, self.delta)

    def _by_kernel(self, component: Tensor, norm: Tensor, graph: PatchGraph) -> Tensor:
        from gated_srp.srp import fused  # needs triton

        heads = component.shape[1]
        token = norm.new_zeros(len(norm), 1) if self.token_hidden is None else self._token_logit(norm, graph)
        weight = norm.new_zeros(heads, 3) if self.head_weight is None else wide(self.head_weight)
        found = [wide(one) for one in (self.head_bias, self.layer_head_bias) if one is not None]
        bias = sum(found[1:], found[0]) if found else norm.new_zeros(heads)
        return fused.gate(component, norm, token, weight, bias, self.delta)

    @property
    def largest(self) -> float:
        return float(self.bound(torch.tensor(1e4), self.delta))

    def _token_inputs(self, norm: Tensor, graph: PatchGraph) -> list[Tensor]:
        """d_tok = [h_local, m / K, log(1 + m)], Eq. 9: (R,) each."""
        m = graph.neighbour_count.to(norm.dtype)
        return [graph.homogeneity.to(norm.dtype), m / graph.most_neighbours, m.log1p()]

    def _token_logit(self, norm: Tensor, graph: PatchGraph) -> Tensor:
        """g_tok(d_tok), Eq. 8: (R, 1)."""
        dtype = norm.dtype
        d_tok = torch.stack(self._token_inputs(norm, graph), -1)  # (R, 3)
        layers = (self.token_hidden, self.token_out)
        weights = [None if p is None else p.to(dtype) for layer in layers if layer for p in (layer.weight, layer.bias)]
        if composed():
            return _token_mlp(d_tok, *weights)[0]
        token: Tensor = _TokenMlp.apply(d_tok, *weights)  # type: ignore[no-untyped-call]
        return token

    def _head_logit(self, component: Tensor, norm: Tensor) -> Tensor:
        """<w_h, d_head>, Eq. 8 and 10, with a true cosine: (R, H)."""
        alive = norm > 0
        cosine = torch.where(alive, component / torch.where(alive, norm, 1.0), 0.0)
        assert self.head_weight is not None
        signed_weight, absolute_weight, size_weight = wide(self.head_weight).unbind(-1)  # (H,) each
        return cosine * signed_weight + cosine.abs() * absolute_weight + norm.log1p() * size_weight

    def extra_repr(self) -> str:
        return f"delta={self.delta}, bound={self.bound.__name__}, live={self.live}"


class FourInputGate(SignedGate):
    """The gate of the release's `vit4` on PANDA, whose token part also sees how long the token is.

    d_tok = [h_local, m / K, log(1 + m), mean over heads of log(1 + |y|)], all detached; everything else as in `SignedGate`.
    """

    num_token_inputs = 4

    def _token_inputs(self, norm: Tensor, graph: PatchGraph) -> list[Tensor]:
        return [*super()._token_inputs(norm, graph), norm.detach().log1p().mean(-1)]
