"""What `attach` costs: a ViT-S/16 with Gated SRP against the same one untouched, taking turns in one process.

Shapes: B images, C channels, N patches.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from gated_srp.foreign import attach
from gated_srp_bench.measure import turns_of

BOUND = 1.08  # attached / untouched, at most
CLASSES = 4


@dataclass(frozen=True)
class Size:
    """An image transformer and its batch; as it stands, ViT-S/16 of the paper's image study: 17 x 17 patches."""

    image: int = 272
    patch: int = 16
    dim: int = 384
    depth: int = 12
    num_heads: int = 6
    batch: int = 16


@dataclass(frozen=True)
class Cost:
    """Seconds of one phase of one family's model, without and with Gated SRP."""

    family: str
    phase: str
    untouched: float
    attached: float

    @property
    def ratio(self) -> float:
        return self.attached / self.untouched


class EncoderViT(nn.Module):
    """The same transformer on nn.TransformerEncoder: patches, CLS, learned positions, pre-norm blocks, a head on CLS."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, size.dim, size.patch, size.patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, size.dim))
        self.position = nn.Parameter(0.02 * torch.randn(1, 1 + (size.image // size.patch) ** 2, size.dim))
        layer = nn.TransformerEncoderLayer(
            size.dim, size.num_heads, 4 * size.dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, size.depth, nn.LayerNorm(size.dim), enable_nested_tensor=False)
        self.head = nn.Linear(size.dim, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.embed(images).flatten(2).transpose(1, 2)  # (B, N, C)
        rows = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], dim=1) + self.position
        logits: Tensor = self.head(self.encoder(rows)[:, 0])
        return logits


class HuggingFaceViT(nn.Module):
    """transformers' ViT with random weights, called like the other."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        settings: dict[str, Any] = {"hidden_size": size.dim, "intermediate_size": 4 * size.dim, "num_labels": CLASSES}
        settings |= {"num_hidden_layers": size.depth, "num_attention_heads": size.num_heads}
        settings |= {"image_size": size.image, "patch_size": size.patch}
        self.model = ViTForImageClassification(ViTConfig(**settings))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=images).logits
        return logits


FAMILIES: Mapping[str, Callable[[Size], nn.Module]] = {"huggingface": HuggingFaceViT, "torch": EncoderViT}


def pair(make: Callable[[Size], nn.Module], size: Size) -> dict[str, nn.Module]:
    """Two models with the same weights, one of them attached; the head reads CLS, so the last layer has no gate."""
    models = {arm: make(size) for arm in ("untouched", "attached")}
    models["attached"].load_state_dict(models["untouched"].state_dict())
    side = size.image // size.patch
    attach(models["attached"], grid=(side, side), last=False)
    return models


def measure_attach(
    families: Iterable[str] = tuple(FAMILIES), *, size: Size | None = None, repeats: int = 7
) -> list[Cost]:
    """Median of ``repeats`` forwards (predict) and forwards with backwards (train) of each family, float32 on the processor."""
    size = size or Size()
    images = torch.randn(size.batch, 3, size.image, size.image, generator=torch.Generator().manual_seed(0))
    costs = []
    for family in families:
        models = pair(FAMILIES[family], size)
        for phase, job in (("predict", _predict), ("train", _train)):
            jobs = {arm: partial(job, model, images) for arm, model in models.items()}
            costs.append(Cost(family, phase, **{arm: median(turns) for arm, turns in turns_of(jobs, repeats).items()}))
    return costs


def _predict(model: nn.Module, images: Tensor) -> None:
    with torch.no_grad():
        model.eval()(images)


def _train(model: nn.Module, images: Tensor) -> None:
    """One step without the optimiser, whose share would only hide what attach adds."""
    model.zero_grad()
    target = torch.arange(len(images)) % CLASSES
    nn.functional.cross_entropy(model.train()(images), target).backward()
