"""Gated SRP in a Hugging Face DINOv2 classifier. A tiny config with random weights, so that nothing is downloaded;
with real weights: Dinov2ForImageClassification.from_pretrained(...), the rest stays.

Run: python examples/attach/huggingface_dinov2.py
"""

import importlib.util

import torch

from gated_srp import attach, trace


def main() -> None:
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed: pip install transformers")
        return
    from transformers import Dinov2Config, Dinov2ForImageClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "image_size": 56, "patch_size": 14}
    model = Dinov2ForImageClassification(Dinov2Config(**sizes, num_labels=2))
    images, labels = torch.randn(4, 3, 56, 56), torch.tensor([0, 1, 0, 1])
    model.eval()
    before = model(pixel_values=images).logits

    handle = attach(model)  # 4 x 4 patches behind one CLS row, from the config; this head pools patches, so all layers
    print(
        f"gates in {len(handle.gates())} layers; same logits: {torch.equal(model(pixel_values=images).logits, before)}"
    )

    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)  # the gates are among the model's parameters
    for step in range(10):
        loss = model(pixel_values=images, labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step in (0, 9):
            print(f"step {step}  loss {float(loss.detach()):.4f}")

    model.eval()
    with trace(model) as seen:
        model(pixel_values=images[:1])
    print(
        f"beta of layer 0, head 0, as the image: {seen[0].beta[0].view(4, 4).shape}, mean {float(seen[0].beta.mean()):.4f}"
    )
    handle.detach()
    print(f"detached: attention is {model.config._attn_implementation!r} again")


if __name__ == "__main__":
    main()
