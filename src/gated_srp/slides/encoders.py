"""Patch encoders by name: tile size, normalisation, licence, and how the model is made.

Shapes: B batch, S side of a tile, D width of the features.
"""

import difflib
import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gated_srp.errors import UserError
from gated_srp.slides import hub

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALVES = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
LITE = ((127 / 255,) * 3, (128 / 255,) * 3)
PLUGINS = "gated_srp.encoders"  # entry points of installed packages


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """What must be known of an encoder. ``build`` takes a file or folder of weights, or None to fetch them from their usual place.

    The model maps normalised images (B, 3, input, input) to features (B, D). A tile of another size than ``resize`` is
    resampled to it; ``crop`` then cuts out the middle.
    """

    name: str
    tile: int  # side of the tile it is used with, at 20x
    width: int
    build: Callable[[Path | None], nn.Module]
    licence: str
    resize: int
    crop: int | None = None
    normalisation: tuple[tuple[float, ...], tuple[float, ...]] = IMAGENET

    def load(self, weights: Path | None = None) -> "PatchEncoder":
        """The model in evaluation mode, with its preprocessing in front."""
        return PatchEncoder(self, self.build(weights)).eval()

    def __str__(self) -> str:
        return f"{self.name}: {self.width} features per patch. Licence: {self.licence}."


class PatchEncoder(nn.Module):
    """Bytes (B, S, S, 3) to features (B, D) in float32."""

    mean: Tensor
    std: Tensor

    def __init__(self, spec: Encoder, model: nn.Module) -> None:
        super().__init__()
        self.spec = spec
        self.model: nn.Module = model.requires_grad_(False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for name, values in zip(("mean", "std"), spec.normalisation, strict=True):
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1), persistent=False)

    def forward(self, tiles: Tensor) -> Tensor:
        features: Tensor = self.model(self.preprocess(tiles))
        if features.ndim != 2 or features.shape[1] != self.spec.width:
            raise UserError(
                f"gave features of shape {tuple(features.shape)}, expected ({len(tiles)}, {self.spec.width})",
                where=f"encoder {self.spec.name}",
                cure="Check its `width` and what its model returns.",
                kind="wrong_encoder",
            )
        return features.float()

    def preprocess(self, tiles: Tensor) -> Tensor:
        """Resize, crop, scale to 0 to 1, normalise: (B, S, S, 3) bytes -> (B, 3, input, input)."""
        images = tiles.permute(0, 3, 1, 2).float().div(255)  # channels last in memory, as the tiles are
        side = self.spec.resize
        if images.shape[-1] != side:
            images = F.interpolate(images, size=(side, side), mode="bicubic", antialias=True).clamp(0, 1)
        if self.spec.crop is not None and self.spec.crop != side:
            start = (side - self.spec.crop) // 2
            images = images[..., start : start + self.spec.crop, start : start + self.spec.crop]
        return (images - self.mean) / self.std


_NC_ND = "CC BY-NC-ND 4.0: non-commercial research only, no derivatives; access is granted by its authors"
_GIGAPATH = "Prov-GigaPath licence: research only; access is granted by its authors"
_HAI_DEF = "Health AI Developer Foundations terms of use; access is granted after agreeing to them"
_OWKIN = "Owkin non-commercial licence: research only"
_LITE = "Apache 2.0; trained on photographs, for trying things out"


_KNOWN: dict[str, dict[str, Any]] = {
    "uni_v2": {"tile": 256, "width": 1536, "resize": 224, "licence": _NC_ND},
    "uni_v1": {"tile": 256, "width": 1024, "resize": 224, "licence": _NC_ND},
    "conch_v1": {"tile": 512, "width": 512, "resize": 448, "licence": _NC_ND, "normalisation": CLIP},
    "gigapath": {"tile": 256, "width": 1536, "resize": 256, "licence": _GIGAPATH, "crop": 224},
    "virchow2": {"tile": 224, "width": 2560, "resize": 224, "licence": _NC_ND},
    "medsiglip_448": {"tile": 448, "width": 1152, "resize": 448, "licence": _HAI_DEF, "normalisation": HALVES},
    "vit_b16": {"tile": 224, "width": 768, "resize": 224, "licence": "Apache 2.0", "normalisation": HALVES},
    "phikon_v2": {"tile": 224, "width": 1024, "resize": 224, "licence": _OWKIN},
    "efficientnet_lite0": {"tile": 224, "width": 1280, "resize": 224, "licence": _LITE, "normalisation": LITE},
}
# Each is made by the function of `hub` that has its name.
ENCODERS = {name: Encoder(name=name, build=getattr(hub, name), **facts) for name, facts in _KNOWN.items()}


def find_encoder(name: str) -> Encoder:
    """By any tool's spelling of its name; ``package.module:function`` and entry points call your own function, which returns an `Encoder`."""
    from gated_srp.data.files.siblings import canonical

    known = name if name in ENCODERS else canonical(name)
    if known in ENCODERS:
        return ENCODERS[known]
    if ":" in name:
        return _from_plugin(name, partial(_import, name))
    plugins = {point.name: point for point in importlib.metadata.entry_points(group=PLUGINS)}
    if name in plugins:
        return _from_plugin(name, plugins[name].load)
    near = difflib.get_close_matches(name, [*ENCODERS, *plugins], n=1)
    raise UserError(
        f"encoder {name!r} is not known{f'; did you mean {near[0]!r}?' if near else ''}",
        cure=f"Encoders: {', '.join([*ENCODERS, *plugins])}; your own: package.module:function that returns an Encoder.",
        kind="unknown_encoder",
    )


def _import(name: str) -> Callable[[], Encoder]:
    module, _, function = name.partition(":")
    made: Callable[[], Encoder] = getattr(importlib.import_module(module), function)
    return made


def _from_plugin(name: str, get: Callable[[], Callable[[], Encoder]]) -> Encoder:
    where = f"encoder {name}"
    try:
        made = get()()
    except (ImportError, AttributeError, TypeError) as error:
        cure = (
            "Expected a function without arguments that returns an Encoder, in a module that Python finds (PYTHONPATH)."
        )
        raise UserError(f"cannot be made ({error})", where=where, cure=cure, kind="bad_plugin") from error
    if not isinstance(made, Encoder):
        what = f"the function gave {type(made).__name__}, expected gated_srp.slides.encoders.Encoder."
        raise UserError(what, where=where, kind="bad_plugin")
    return made
