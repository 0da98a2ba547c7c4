"""Patch encoders by name: tile size, preprocessing, licence; `pretrained` makes their models.

Shapes: B batch, S side of a tile, D width of the features.
"""

import difflib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gated_srp.errors import UserError
from gated_srp.slides.pretrained import BUILD

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALVES = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
LITE = ((127 / 255,) * 3, (128 / 255,) * 3)
_SAMPLED = 65536  # values of a tensor at most
PLUGINS = "gated_srp.encoders"  # entry points of installed packages


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """What must be known of an encoder. ``build`` takes a file or folder of weights, or None to fetch them from their usual place.

    The model maps normalised images (B, 3, input, input) to features (B, D). A tile of another size than ``resize`` is
    resampled to it as Pillow does; ``crop`` then cuts out the middle.
    """

    name: str
    tile: int  # side of the tile it is used with, at 20x
    width: int
    build: Callable[[Path | None], nn.Module]
    licence: str
    resize: int
    crop: int | None = None
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    normalisation: tuple[tuple[float, ...], tuple[float, ...]] = IMAGENET

    def load(self, weights: Path | None = None) -> "PatchEncoder":
        """The model in evaluation mode, with its preprocessing in front."""
        return PatchEncoder(self, self.build(weights)).eval()

    def resampling(self, side: int, interpolation: str | None = None) -> str | None:
        """What happens to tiles of this side, in words; None where they are taken as they are."""
        return None if side == self.resize else f"{interpolation or self.interpolation} to {self.resize}"

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

    @cached_property
    def hash(self) -> str:
        """By which its weights are known again: SHA-256 over names, shapes and values, of large tensors a sample."""
        from gated_srp.files import tensors_hash

        values = self.state_dict()
        return tensors_hash(
            {f"{name} {tuple(v.shape)}": v.flatten()[:: 1 + v.numel() // _SAMPLED] for name, v in values.items()}
        )

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
        images = tiles.permute(0, 3, 1, 2)  # channels last in memory, as the tiles are
        side = self.spec.resize
        if images.shape[-1] != side:
            images = resized(images, side, self.spec.interpolation, bytewise=images.device.type == "cpu")
        if self.spec.crop is not None and self.spec.crop != side:
            start = (side - self.spec.crop) // 2
            images = images[..., start : start + self.spec.crop, start : start + self.spec.crop]
        return (images.float().div(255) - self.mean) / self.std


def resized(images: Tensor, side: int, mode: str, *, bytewise: bool = True) -> Tensor:
    """(B, 3, S, S) bytes -> (B, 3, side, side) bytes, with antialiasing: Pillow's to two grey levels at ties, as the encoders' authors use it.

    Accelerators have no resizing of bytes: there the columns are resized, then the rows, each rounded to bytes as Pillow does.
    """
    if bytewise:
        return F.interpolate(images, size=(side, side), mode=mode, antialias=True)
    for size in ((images.shape[-2], side), (side, side)):
        images = F.interpolate(images.float(), size=size, mode=mode, antialias=True).add(0.5).floor().clamp(0, 255)
    return images.byte()


# By name --------------------------------------------------------------------------------------------------------------

_NC_ND = "CC BY-NC-ND 4.0: non-commercial research only, no derivatives; access is granted by its authors"
_GIGAPATH = "Prov-GigaPath licence: research only; access is granted by its authors"
_HAI_DEF = "Health AI Developer Foundations terms of use; access is granted after agreeing to them"
_OWKIN = "Owkin non-commercial licence: research only"
_LITE = "Apache 2.0; trained on photographs, for trying things out"
_BILINEAR = {"interpolation": "bilinear"}
_KNOWN: dict[str, dict[str, Any]] = {
    "uni_v2": {"tile": 256, "width": 1536, "resize": 224, "licence": _NC_ND, **_BILINEAR},
    "uni_v1": {"tile": 256, "width": 1024, "resize": 224, "licence": _NC_ND, **_BILINEAR},
    "conch_v1": {"tile": 512, "width": 512, "resize": 448, "licence": _NC_ND, "normalisation": CLIP},
    "gigapath": {"tile": 256, "width": 1536, "resize": 256, "licence": _GIGAPATH, "crop": 224},
    "virchow2": {"tile": 224, "width": 2560, "resize": 224, "licence": _NC_ND},
    "medsiglip_448": {
        "tile": 448,
        "width": 1152,
        "resize": 448,
        "licence": _HAI_DEF,
        "normalisation": HALVES,
        **_BILINEAR,
    },
    "vit_b16_torchvision": {
        "tile": 224,
        "width": 768,
        "resize": 256,
        "crop": 224,
        "licence": "BSD 3-clause",
        **_BILINEAR,
    },
    "vit_b16_google": {
        "tile": 224,
        "width": 768,
        "resize": 224,
        "licence": "Apache 2.0",
        "normalisation": HALVES,
        **_BILINEAR,
    },
    "phikon_v2": {"tile": 224, "width": 1024, "resize": 224, "licence": _OWKIN},
    "efficientnet_lite0": {
        "tile": 224,
        "width": 1280,
        "resize": 224,
        "licence": _LITE,
        "normalisation": LITE,
        **_BILINEAR,
    },
}
ENCODERS = {name: Encoder(name=name, build=BUILD[name], **facts) for name, facts in _KNOWN.items()}


def find_encoder(name: str) -> Encoder:
    """By any tool's spelling of its name; ``package.module:function`` and entry points call your own function, which returns an `Encoder`."""
    from gated_srp.data.files.siblings import about_old_name, canonical, models_of

    if old := about_old_name(name).removeprefix("; "):
        cure = f"Choose one: {', '.join(model for model in models_of(name) if model in ENCODERS)}."
        raise UserError(old, cure=cure, kind="unknown_encoder")
    known = name if name in ENCODERS else canonical(name)
    if known in ENCODERS:
        return ENCODERS[known]
    if ":" in name:
        module, _, function = name.partition(":")
        return _from_plugin(name, lambda: getattr(import_module(module), function))
    plugins = {point.name: point for point in importlib.metadata.entry_points(group=PLUGINS)}
    if name in plugins:
        return _from_plugin(name, plugins[name].load)
    near = difflib.get_close_matches(name, [*ENCODERS, *plugins], n=1)
    raise UserError(
        f"encoder {name!r} is not known{f'; did you mean {near[0]!r}?' if near else ''}",
        cure=f"Encoders: {', '.join([*ENCODERS, *plugins])}; your own: package.module:function that returns an Encoder.",
        kind="unknown_encoder",
    )


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
