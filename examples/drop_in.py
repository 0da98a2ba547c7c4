"""Gated SRP in somebody's own attention: build it, call it between attention and output projection.

Run: python examples/drop_in.py
"""

import torch
from torch import nn
from torch.nn import functional as F

from gated_srp import GatedSRP, PatchGraph


class MyAttention(nn.Module):
    """An ordinary multi-head attention over CLS + patches; the two marked lines are new."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.srp = GatedSRP(num_heads)  # new

    def forward(self, x: torch.Tensor, graph: PatchGraph) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v)
        y = self.srp(y, v, graph)  # new
        return self.proj(y.transpose(1, 2).flatten(2))


def main() -> None:
    torch.manual_seed(0)
    # A generated slide: 900 patches of 256 px at 40x (512 level-0 pixels apart), features that vary slowly, and one focus.
    cells = torch.cartesian_prod(torch.arange(30), torch.arange(30))
    features = torch.randn(4, 64)[(cells[:, 0] // 15) * 2 + cells[:, 1] // 15] + 0.3 * torch.randn(900, 64)
    focus = (cells - torch.tensor([7, 22])).abs().amax(1) <= 1
    features[focus] += torch.randn(64)
    graph = PatchGraph.from_coords(cells * 512, features, stride=512)
    print(
        f"{len(features)} patches, {graph.neighbour_count.float().mean():.1f} neighbours each, homogeneity {graph.homogeneity.mean():.2f}"
    )

    attention = MyAttention(64, 4)
    x = torch.cat([torch.zeros(1, 1, 64), features[None]], dim=1)  # CLS in front
    rows = graph.with_isolated(before=1)
    before = attention(x, rows)

    # Until it is trained the correction is the identity. Then it learns which part of the shared tissue signal to keep.
    optimiser = torch.optim.AdamW(attention.parameters(), lr=3e-3)
    for step in range(60):
        score = attention(x, rows)[0, 1:].square().mean(-1)
        loss = F.binary_cross_entropy_with_logits(score - 1, focus.float())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 20 == 0 or step == 59:
            print(f"step {step:2d}  loss {loss.detach():.4f}")
    moved = (attention(x, rows) - before).abs().mean().detach()
    gate = sum(p.numel() for p in attention.srp.parameters())
    print(
        f"The gate has {gate} parameters; the output moved by {moved:.3f} on average. CLS and lone patches are never corrected."
    )


if __name__ == "__main__":
    main()
