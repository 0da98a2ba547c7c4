"""Gated SRP in a slide model made of nn.TransformerEncoder: attach, hand over each slide's graph, train.

Run: python examples/attach/transformer_encoder.py
"""

import torch
from torch import nn

from gated_srp import PatchGraph, attach, trace


class SlideModel(nn.Module):
    """Patch features in, logits out: CLS, an encoder of PyTorch, a head on CLS."""

    def __init__(self, in_dim: int, dim: int = 48, num_outputs: int = 2) -> None:
        super().__init__()
        self.embed, self.cls = nn.Linear(in_dim, dim), nn.Parameter(torch.zeros(1, 1, dim))
        layer = nn.TransformerEncoderLayer(dim, 6, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.cls.expand(len(features), -1, -1), self.embed(features)], dim=1)
        return self.head(self.encoder(x)[:, 0])


def slide(seed: int) -> tuple[torch.Tensor, PatchGraph, torch.Tensor]:
    """A generated slide: tissue that varies slowly, and in every second slide a small focus."""
    draw = torch.Generator().manual_seed(seed)
    cells = torch.cartesian_prod(torch.arange(12), torch.arange(12))
    cells = cells[torch.rand(len(cells), generator=draw) < 0.8]
    features = torch.randn(4, 32, generator=draw)[cells[:, 0] // 6 * 2 + cells[:, 1] // 6]
    features = features + 0.3 * torch.randn(len(cells), 32, generator=draw)
    if seed % 2:
        features[:4, :4] += 3
    return features, PatchGraph.from_coords(cells * 512, features, stride=512), torch.tensor([seed % 2])


def main() -> None:
    torch.manual_seed(0)
    model = SlideModel(32)
    features, graph, _ = slide(0)
    before = model(features[None]).detach()

    handle = attach(model, last=False)  # the head reads CLS alone: the last layer needs no gate
    handle.set_graph(graph)
    print(f"gates in {', '.join(handle.gates())}: {sum(p.numel() for p in handle.parameters())} parameters")
    print(f"largest difference before training: {float((model(features[None]).detach() - before).abs().max()):.1e}")

    gates = {id(p) for p in handle.parameters()}
    trunk = [p for p in model.parameters() if id(p) not in gates]
    groups = [{"params": trunk, "weight_decay": 0.05}, *handle.param_groups(weight_decay=0.05)]
    optimiser = torch.optim.AdamW(groups, lr=1e-3)
    for epoch in range(5):
        total = 0.0
        for seed in range(8):
            features, graph, label = slide(seed)
            handle.set_graph(graph)  # before each forward
            loss = nn.functional.cross_entropy(model(features[None]), label)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += float(loss.detach())
        print(f"epoch {epoch}  loss {total / 8:.4f}")

    handle.set_graph(graph)
    with trace(model) as seen:
        model(features[None])
    print("mean beta of each gate:", [round(layer.beta.mean().item(), 4) for layer in seen if layer.beta is not None])
    handle.detach()


if __name__ == "__main__":
    main()
