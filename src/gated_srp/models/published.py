"""Checkpoints of the published release -> our models, without running pickled code.

Names differ in three places only: their gate sits inside the attention, Diff's output layer is `out_proj`, and every attention
carries coefficients of other variants as leftovers.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gated_srp.errors import UserError
from gated_srp.models.arms import build_model, find_arm
from gated_srp.models.slide import SlideModel

_VARIANTS = {"nystrom_na": "na", "baseline": "na", "xsa_all_ref": "xsa", "diff_transformer": "diff"}
_FIXED = {-1.0: "fixed_beta_minus1", 0.0: "na", 1.0: "fixed_beta_1", 2.0: "fixed_beta_2"}
_GATE_ABLATIONS: dict[str, dict[Any, str | None]] = {  # setting -> value -> arm
    "gate_activation": {"tanh": None, "sigmoid01": "gated_srp_sigmoid"},
    "gate_factorization": {
        "full": None,
        "token_only": "gated_srp_token_only",
        "head_only": "gated_srp_head_only",
        "no_bias": "gated_srp_no_bias",
    },
    "gate_delta_mode": {"fixed": None, "direct_beta_softclip": "gated_srp_range_free"},
    "detach_gate_inputs": {True: None, False: "gated_srp_live"},
}
_LEFTOVER = re.compile(r"blocks\.\d+\.attn\.(beta_patch|alpha_cls|alpha_patch)$")
_RENAMES = (
    (re.compile(r"(blocks\.\d+)\.attn\.gate\.token_mlp_(hidden|out)\."), r"\1.correction.coefficient.token_\2."),
    (re.compile(r"(blocks\.\d+)\.attn\.gate\."), r"\1.correction.coefficient."),
    (re.compile(r"(blocks\.\d+)\.attn\.out_proj\."), r"\1.attn.proj."),
)


def load_published(path: str | Path) -> SlideModel:
    """The model of a checkpoint {"model": state dict, "args": settings, ...}, in evaluation mode."""
    checkpoint = _open(Path(path))
    args, weights = checkpoint["args"], checkpoint["model"]
    arm = _arm(args, weights, path)
    sizes = {"dim": "embed_dim", "depth": "depth", "num_heads": "num_heads", "num_landmarks": "num_landmarks"}
    if find_arm(arm).gated:
        sizes |= {"delta": "delta_scale", "hidden_dim": "gate_hidden_dim"}
    model = build_model(
        arm,
        in_dim=_shape(weights, "in_proj.weight", path)[1],
        num_outputs=_shape(weights, "head.weight", path)[0],
        **{ours: args[theirs] for ours, theirs in sizes.items() if theirs in args},
    )
    model.load_state_dict(_renamed(weights, model.state_dict(), path))
    return model.eval()


def _open(path: Path) -> dict[str, Any]:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file. Expected a checkpoint of the published release, such as best.pt."
        ) from None
    except Exception as error:  # torch raises many kinds for broken or unsafe files
        raise UserError(
            f"{path}: cannot be read as tensors and plain settings ({type(error).__name__}). Expected a checkpoint of the published "
            "release; files that hold other Python objects are not opened, since that would run their code."
        ) from error
    if not isinstance(checkpoint, dict) or not {"model", "args"} <= set(checkpoint):
        found = ", ".join(map(str, checkpoint)) if isinstance(checkpoint, dict) else type(checkpoint).__name__
        raise UserError(f"{path}: expected a dictionary with 'model' and 'args', found: {found}.")
    return checkpoint


def _arm(args: dict[str, Any], weights: dict[str, Tensor], path: str | Path) -> str:
    variant = str(args.get("variant"))
    if variant in _VARIANTS:
        return _VARIANTS[variant]
    if variant.startswith("srp_patch_fixed_beta"):
        return _fixed_arm(weights, path)
    if variant != "srp_patch_signed_gated":
        raise UserError(
            f"{path}: args['variant'] is {variant!r}, expected one of {', '.join(_VARIANTS)}, srp_patch_fixed_beta<b>, srp_patch_signed_gated."
        )
    chosen = []
    for setting, values in _GATE_ABLATIONS.items():
        value = args.get(setting, next(iter(values)))
        if value not in values:
            raise UserError(f"{path}: args[{setting!r}] is {value!r}, expected one of {', '.join(map(str, values))}.")
        chosen += [name for name in (values[value],) if name]
    if len(chosen) > 1:
        raise UserError(
            f"{path}: combines the ablations {' and '.join(chosen)}; no arm does. Build the model from parts with SignedGate."
        )
    return chosen[0] if chosen else "gated_srp"


def _fixed_arm(weights: dict[str, Tensor], path: str | Path) -> str:
    values = {float(v) for k, w in weights.items() if k.endswith(".attn.beta_patch") for v in w.tolist()}
    values -= {0.0} if len(values) > 1 else set()  # the last block, which reads CLS alone, may hold zeros
    if len(values) != 1 or not values <= set(_FIXED):
        raise UserError(
            f"{path}: blocks.*.attn.beta_patch holds {sorted(values)}, expected one coefficient of -1, 0, 1, 2 for all heads."
        )
    return _FIXED[values.pop()]


def _renamed(weights: dict[str, Tensor], expected: dict[str, Tensor], path: str | Path) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in weights.items():
        ours = name
        for pattern, replacement in _RENAMES:
            ours = pattern.sub(replacement, ours)
        if _LEFTOVER.match(name) or (ours not in expected and _dead_gate_part(ours, expected)):
            continue
        if ours not in expected:
            raise UserError(f"{path}: {name!r} does not fit a published layout of this variant. Nothing was loaded.")
        if tensor.shape != expected[ours].shape:
            raise UserError(
                f"{path}: {name!r} has shape {tuple(tensor.shape)}, expected {tuple(expected[ours].shape)} from args."
            )
        renamed[ours] = tensor
    if missing := next((name for name in expected if name not in renamed), None):
        raise UserError(
            f"{path}: {missing!r} is missing. The checkpoint is incomplete or of another variant than its args say."
        )
    return renamed


def _dead_gate_part(name: str, expected: dict[str, Tensor]) -> bool:
    """A gate that was ablated keeps the parts that it does not use."""
    gate, found, _ = name.partition(".correction.coefficient.")
    return bool(found) and any(other.startswith(f"{gate}.correction.coefficient.") for other in expected)


def _shape(weights: dict[str, Tensor], name: str, path: str | Path) -> torch.Size:
    if name not in weights or weights[name].ndim != 2:
        raise UserError(f"{path}: {name!r} is missing or not a matrix. Expected a checkpoint of the published release.")
    return weights[name].shape
