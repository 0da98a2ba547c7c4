"""Gated SRP in torchmil's TransMIL: a class that `attach` does not know, reached by naming two of its submodules.

Run: python examples/attach/torchmil_transmil.py
"""

import importlib.util
import math

import torch

from gated_srp import PatchGraph, attach
from gated_srp.foreign import Taps


def main() -> None:
    if importlib.util.find_spec("torchmil") is None:
        print("torchmil is not installed: pip install torchmil")
        return
    from torchmil.models import TransMIL
    from torchmil.nn.attention import NystromAttention

    torch.manual_seed(0)
    cells = torch.cartesian_prod(torch.arange(9), torch.arange(9))[:70]
    features = torch.randn(1, 70, 32)
    graph = PatchGraph.from_coords(cells * 512, features[0], stride=512)

    model = TransMIL(in_shape=(32,), att_dim=64, n_heads=4, n_landmarks=16).eval()
    before = model(features)

    # qkv_nn gives queries, keys and values side by side; out_proj reads the merged heads. The head reads CLS: last=False.
    handle = attach(model, adapters={NystromAttention: Taps("qkv_nn", "out_proj")}, last=False)
    # TransMIL fills the patches up to a square behind them (rows without neighbours); CLS and the zeros that its attention puts
    # in front are rows that the graph does not cover, so they have no neighbours either. How many zeros there are depends on
    # the slide: for several slides cover all rows, graph.with_isolated(before=zeros + 1, after=...).
    square = math.ceil(math.sqrt(70)) ** 2
    handle.set_graph(graph.with_isolated(after=square - 70), stay=True)  # all forwards below are of one slide
    print(f"gates in {', '.join(handle.gates())}; same logits: {torch.equal(model(features), before)}")

    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(5):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(features), torch.ones(1))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        print(f"step {step}  loss {float(loss.detach()):.4f}")
    handle.detach()


if __name__ == "__main__":
    main()
