"""Freeze a trained trunk and train the gates alone, then keep them as a small file of their own.

Run: python examples/attach/frozen_trunk.py
"""

import copy
import tempfile
from pathlib import Path

import torch
from torch import nn

from gated_srp import PatchGraph, attach
from gated_srp.foreign import handle_of


def main() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(48, 6, 96, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)  # stands for a model that was trained before
    encoder.requires_grad_(False)  # before attach: the gates that come now stay trainable

    handle = attach(encoder, last=True, hidden_dim=16)  # all rows are used below: every layer gets a gate
    tokens = torch.randn(1, 64, 48)
    handle.set_graph(PatchGraph.from_grid(8, 8).with_features(tokens[0]), stay=True)  # all forwards are of one slide
    # What the gates shall learn: the same trunk behind gates that remove half of the common component.
    teacher = copy.deepcopy(encoder)
    with torch.no_grad():
        for name, parameter in handle_of(teacher).named_parameters():
            parameter.fill_(0.55 if name.endswith("layer_head_bias") else 0.0)
        target = teacher(tokens)

    optimiser = torch.optim.AdamW(handle.param_groups(weight_decay=0.05), lr=3e-2)
    for step in range(20):
        loss = (encoder(tokens) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 5 == 0 or step == 19:
            print(f"step {step:2d}  loss {float(loss.detach()):.6f}")

    trainable = sum(p.numel() for p in encoder.parameters() if p.requires_grad)
    print(f"trained {trainable} of {sum(p.numel() for p in encoder.parameters())} parameters")
    trained = encoder(tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gates.safetensors"
        handle.save(path)
        handle.detach()
        again = attach(encoder, last=True, hidden_dim=16)
        again.set_graph(PatchGraph.from_grid(8, 8).with_features(tokens[0]), stay=True)
        again.load(path)
        same = torch.equal(encoder(tokens), trained)
        print(
            f"gates in a file of {path.stat().st_size} bytes, loaded again: {'the same' if same else 'another'} output"
        )


if __name__ == "__main__":
    main()
