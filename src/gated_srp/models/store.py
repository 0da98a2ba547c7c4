"""Models as files: ours (safetensors with a JSON card, no pickle), and checkpoints of the published release, whose code is not run.

Three trainers wrote the release's, told apart by their settings: the slide trainer (`variant`), the PANDA trainer (`arch` and `mode`)
and the ADP trainer (`use_srp`). Names differ from ours in four places only: their gate sits inside the attention, Diff's output layer
is `out_proj`, images enter through a convolution, and every attention carries coefficients of other variants as leftovers.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gated_srp.errors import UserError
from gated_srp.files import read_tensors, write_tensors
from gated_srp.models.arms import ARMS, build_model, find_arm
from gated_srp.models.slide import SlideModel

FORMAT = 1
_EXPECTED = "Expected model.safetensors of a run, or of gated-srp convert."


def save_model(model: SlideModel, path: Path, card: dict[str, Any] | None = None) -> None:
    """Weights, settings and what else the ``card`` says about the model."""
    write_tensors(Path(path), model.state_dict(), {"format": FORMAT, "settings": model.settings, **(card or {})})


def model_file(run: Path) -> Path:
    """The model.safetensors of a run's folder; anything but a folder is returned as it is."""
    if not run.is_dir():
        return run
    file = run / "model.safetensors"
    if file.is_file():
        return file
    below = sorted(path.parent for path in run.glob("**/model.safetensors"))
    if below:
        some = " ".join(map(str, below[:3])) + (" ..." if len(below) > 3 else "")
        raise UserError(f"a folder of {len(below)} runs, not a run", where=run, cure=f"Name those you mean: {some}")
    cure = "It is unfinished: start `gated-srp train` again." if (run / "config.yaml").is_file() else "Is it a run?"
    raise UserError("no model.safetensors in this folder", where=run, cure=cure)


def load_card(path: Path) -> dict[str, Any]:
    """What a model file says about itself."""
    return _read(path, None)[0]


def _read(path: Path, only: str | None = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
    card, tensors = read_tensors(path, called="model file", cure=_EXPECTED, only=only)
    if not card:
        raise UserError("holds tensors but no card of gated-srp", where=path, cure=_EXPECTED)
    if card.get("format", 0) > FORMAT:
        what = f"written in format {card['format']}, this version reads up to {FORMAT}"
        raise UserError(what, where=path, cure="Update gated-srp.")
    return card, tensors


def load_model(path: str | Path) -> SlideModel:
    """The trained model of a run, on the processor and in evaluation mode.

    Args:
        path: a run's folder, or its ``model.safetensors``, or a file that ``gated-srp convert`` wrote.

    Returns:
        A module that maps features ``(B, N, in_dim)`` and the `PatchGraph` of their patches to logits ``(B, outputs)``;
        ``model.settings`` says how it was built, `load_card` what the file says beside that.

    >>> import tempfile, gated_srp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(build_model("gated_srp", in_dim=8, num_outputs=2, dim=12), Path(folder) / "model.safetensors")
    ...     model = gated_srp.load_model(folder)
    >>> import torch
    >>> features, graph = torch.randn(6, 8), gated_srp.PatchGraph.from_grid(2, 3)
    >>> model(features[None], graph.with_features(features)).shape
    torch.Size([1, 2])
    """
    card, weights = _read(model_file(Path(path)))
    model = build_model(**card["settings"])
    model.load_state_dict(weights)
    return model.eval()


# Checkpoints of the release ------------------------------------------------------------------------------------------

_FIXED = {-1.0: "fixed_beta_minus1", 0.0: "", 1.0: "fixed_beta_1", 2.0: "fixed_beta_2"}  # value -> method
_VARIANTS = {"nystrom_na": "", "baseline": "", "xsa_all_ref": "xsa", "diff_transformer": "diff"}  # of the slide trainer
_MODES = {"baseline": "", "xsa_all_hard": "xsa", "diff_transformer": "diff"}  # of the PANDA trainer
_TRUNKS = {"transmil": "na", "vit4": "vit4", "vit12": "vit4"}  # args["arch"] -> our base; vit12 has more blocks
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
    "no_detach_gate_inputs": {False: None, True: "gated_srp_live"},
}
# Settings that leave no trace in the weights, yet change what a model computes: no arm has another value.
_ALWAYS = {"pos_mode": "none", "ln_specialization": "shared"}
_ALWAYS_CORRECTED = {
    "gate_activation_temperature": 1.0,
    "gate_count_features": "legacy",
    "neighbor_shell": "cumulative",
    "neighbor_source": "real",
    "neighbor_weighting": "uniform",
    "srp_r_target": "knn8",
}
_LEFTOVER = re.compile(r"blocks\.\d+\.attn\.(beta|beta_patch|alpha_cls|alpha_patch)$")
_RENAMES = (
    (re.compile(r"(blocks\.\d+)\.attn\.gate\.token_mlp_(hidden|out)\."), r"\1.correction.coefficient.token_\2."),
    (re.compile(r"(blocks\.\d+)\.attn\.gate\."), r"\1.correction.coefficient."),
    (re.compile(r"(blocks\.\d+)\.attn\.out_proj\."), r"\1.attn.proj."),
    (re.compile(r"^patch_embed\.proj\."), "in_proj."),
)


@dataclass(frozen=True)
class _Checkpoint:
    path: Path
    args: Mapping[str, Any]
    weights: Mapping[str, Tensor]

    def error(self, what: str, cure: str = "") -> UserError:
        return UserError(what, where=str(self.path), cure=cure)

    def choice(self, setting: str, known: Mapping[Any, Any], *more: str) -> Any:
        """What a setting's value stands for; its first known value where the setting is absent."""
        value = self.args.get(setting, next(iter(known)))
        if value in known:
            return known[value]
        raise self.error(f"args[{setting!r}] is {value!r}, expected one of {', '.join(map(str, [*known, *more]))}")

    @property
    def coefficients(self) -> set[float]:
        """The values of ``attn.beta_patch``: the coefficient of models with a fixed one, zeros in all others."""
        held = [tensor for name, tensor in self.weights.items() if name.endswith(".attn.beta_patch")]
        return {float(value) for tensor in held for value in tensor.flatten().tolist()}

    @property
    def holds_coefficients(self) -> bool:
        """Whether the model has a fixed coefficient, whatever its settings call that."""
        return bool(self.coefficients - {0.0})

    def check(self, settings: Mapping[str, Any]) -> None:
        for setting, expected in settings.items():
            if (value := self.args.get(setting, expected)) != expected:
                what = f"args[{setting!r}] is {value!r}, expected {expected!r}: no arm computes what this model does"
                raise self.error(what)

    def shape(self, name: str, ndim: int = 2) -> torch.Size:
        if name not in self.weights or self.weights[name].ndim != ndim:
            what = f"{name!r} is missing or {'not a matrix' if ndim == 2 else 'of another shape'}"
            raise self.error(what, cure="Expected a checkpoint of the published release.")
        return self.weights[name].shape


def load_published(path: str | Path) -> SlideModel:
    """The model of a checkpoint {"model": state dict, "args": settings, ...} of any trainer of the release, in evaluation mode."""
    return _load(_open(Path(path)))


def convert(checkpoint: str | Path, output: str | Path, *, classes: Sequence[str] = ()) -> SlideModel:
    """Turn a checkpoint of the published release into a model file of ours.

    Args:
        checkpoint: `best.pt` of the release. It is read as tensors and plain settings; pickled code in it is not run.
        output: where to write the model, such as `model.safetensors`.
        classes: names of the model's outputs, in their order. Only a model whose outputs have names can be used by `predict`.

    Returns:
        The model, in evaluation mode.

    Example:
        ``convert("best.pt", "model.safetensors", classes=["normal", "tumour"])``
    """
    opened = _open(Path(checkpoint))
    model = _load(opened)
    outputs = model.settings["num_outputs"]
    card: dict[str, Any] = {}
    if classes:
        if len(set(classes)) != outputs or len(classes) != outputs:
            what = f"{len(set(classes))} classes are named, but the model has {outputs} outputs"
            raise opened.error(what, cure="Name each output once, in the order of training.")
        card = {"task": "multilabel" if model.images else "classification", "classes": list(classes)}
    if model.images:
        patch = isqrt(model.settings["in_dim"] // 3)
        card["images"] = {"size": patch * isqrt(model.settings["num_patches"]), "patch": patch}
    if "neighbor_window" in opened.args:
        card["window"] = int(opened.args["neighbor_window"])
    save_model(model, Path(output), card)
    return model


def _load(checkpoint: _Checkpoint) -> SlideModel:
    args, weights = checkpoint.args, checkpoint.weights
    arm = _arm(checkpoint)
    sizes = {"dim": "embed_dim", "num_heads": "num_heads", "num_landmarks": "num_landmarks"}
    if find_arm(arm).gated:
        sizes |= {"delta": "delta_scale", "hidden_dim": "gate_hidden_dim"}
    full = {ours: args[theirs] for ours, theirs in sizes.items() if theirs in args}
    full["depth"] = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    if find_arm(arm).images:
        full["num_patches"] = checkpoint.shape("pos_embed", 3)[1] - 1
        full["in_dim"] = checkpoint.shape("patch_embed.proj.weight", 4)[1:].numel()
    else:
        full["in_dim"] = checkpoint.shape("in_proj.weight")[1]
    model = build_model(arm, num_outputs=checkpoint.shape("head.weight")[0], **full)
    model.load_state_dict(_renamed(checkpoint, model.state_dict()))
    return model.eval()


def _open(path: Path) -> _Checkpoint:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        cure = "Expected a checkpoint of the published release, such as best.pt."
        raise UserError("no such file", where=str(path), cure=cure) from None
    except Exception as error:  # torch raises many kinds for broken or unsafe files
        what = f"cannot be read as tensors and plain settings ({type(error).__name__})"
        cure = "Expected a checkpoint of the published release; files that hold other Python objects are not opened, since that would run their code."
        raise UserError(what, where=str(path), cure=cure) from error
    if not isinstance(checkpoint, dict) or not {"model", "args"} <= set(checkpoint):
        found = ", ".join(map(str, checkpoint)) if isinstance(checkpoint, dict) else type(checkpoint).__name__
        raise UserError(f"expected a dictionary with 'model' and 'args', found: {found}", where=str(path))
    return _Checkpoint(path, checkpoint["args"], checkpoint["model"])


# Which arm -----------------------------------------------------------------------------------------------------------


def _arm(checkpoint: _Checkpoint) -> str:
    """The arm: that of a trunk and a method, where there is one."""
    args = checkpoint.args
    if "variant" in args:
        trunk, method = "na", _slide_method(checkpoint)
    elif "mode" in args:
        trunk, method = checkpoint.choice("arch", _TRUNKS), _panda_method(checkpoint)
    elif "use_srp" in args:
        trunk, method = "vit_s16", _adp_method(checkpoint)
    else:
        what = f"args has none of 'variant' (slide trainer), 'mode' (PANDA trainer), 'use_srp' (ADP trainer); found: {', '.join(map(str, args))}"
        raise checkpoint.error(what, cure="Expected a checkpoint of the published release.")
    checkpoint.check(_ALWAYS)
    if method not in ("", "xsa", "diff"):
        checkpoint.check(_ALWAYS_CORRECTED)
    if trunk == "vit4" and method == "diff":
        what = "vit4 with Diff: whether its attention is dense or Nystrom leaves no trace in the weights, and no number to check against is known"
        raise checkpoint.error(what, cure="Build the model that it was with build_model, and load the weights into it.")
    if trunk == "vit4" and method == "gated_srp":
        inputs = checkpoint.shape("blocks.0.attn.gate.token_mlp_hidden.weight")[1]
        return "vit4_gated_srp_published" if inputs == 4 else "vit4_gated_srp"
    arm = (method or trunk) if trunk == "na" else f"{trunk}_{method}" if method else trunk
    if arm not in ARMS:
        what = f"no arm is {trunk!r} with {method!r}"
        raise checkpoint.error(what, cure="Build the model from parts with SignedGate.")
    return arm


def _slide_method(checkpoint: _Checkpoint) -> str:
    variant = str(checkpoint.args["variant"])
    if variant.startswith("srp_patch_fixed_beta"):
        return _fixed_method(checkpoint)
    if variant == "srp_patch_signed_gated":
        return _gated_method(checkpoint)
    method: str = checkpoint.choice("variant", _VARIANTS, "srp_patch_fixed_beta<b>", "srp_patch_signed_gated")
    return method


def _panda_method(checkpoint: _Checkpoint) -> str:
    mode = checkpoint.args["mode"]
    if mode == "srp_signed_gated":
        return _gated_method(checkpoint)
    if mode not in _MODES and checkpoint.holds_coefficients:
        return _fixed_method(checkpoint)
    method: str = checkpoint.choice("mode", _MODES, "srp_signed_gated", "a fixed coefficient in attn.beta_patch")
    return method


def _adp_method(checkpoint: _Checkpoint) -> str:
    xsa = {
        checkpoint.choice(setting, {"zero": False, "one": True}) for setting in ("alpha_cls_mode", "alpha_patch_mode")
    }
    if len(xsa) > 1:
        what = "alpha_cls_mode and alpha_patch_mode differ: XSA on one kind of row alone; no arm does that"
        raise checkpoint.error(what)
    corrected, diff = bool(checkpoint.args["use_srp"]), bool(checkpoint.args.get("diff_transformer"))
    chosen = [name for name, on in (("use_srp", corrected), ("XSA", True in xsa), ("diff_transformer", diff)) if on]
    if len(chosen) > 1:
        raise checkpoint.error(f"combines {' with '.join(chosen)}; no arm does")
    if not corrected:
        return "xsa" if True in xsa else "diff" if diff else ""
    if checkpoint.args.get("beta_patch_mode") != "signed_gated" and checkpoint.holds_coefficients:
        return _fixed_method(checkpoint)
    checkpoint.choice("beta_patch_mode", {"signed_gated": None}, "a fixed coefficient in attn.beta_patch")
    return _gated_method(checkpoint)


def _gated_method(checkpoint: _Checkpoint) -> str:
    chosen = sorted({arm for s, values in _GATE_ABLATIONS.items() if (arm := checkpoint.choice(s, values))})
    if len(chosen) > 1:
        what = f"combines the ablations {' and '.join(chosen)}; no arm does"
        raise checkpoint.error(what, cure="Build the model from parts with SignedGate.")
    return chosen[0] if chosen else "gated_srp"


def _fixed_method(checkpoint: _Checkpoint) -> str:
    values = checkpoint.coefficients
    values -= {0.0} if len(values) > 1 else set()  # the last block, which reads CLS alone, may hold zeros
    if len(values) != 1 or not values <= set(_FIXED):
        what = f"blocks.*.attn.beta_patch holds {sorted(values)}, expected one coefficient of -1, 0, 1, 2 for all heads"
        raise checkpoint.error(what)
    return _FIXED[values.pop()]


# Weights -------------------------------------------------------------------------------------------------------------


def _renamed(checkpoint: _Checkpoint, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in checkpoint.weights.items():
        ours = name
        for pattern, replacement in _RENAMES:
            ours = pattern.sub(replacement, ours)
        if _LEFTOVER.match(name) or (ours not in expected and _dead_gate_part(ours, expected)):
            continue
        if ours not in expected:
            what = f"{name!r} does not fit a published layout of this variant"
            raise checkpoint.error(what, cure="Nothing was loaded.")
        if name == "patch_embed.proj.weight":
            tensor = tensor.flatten(1)  # a kernel of P x P with stride P is a linear layer on a patch's pixels
        if tensor.shape != expected[ours].shape:
            what = f"{name!r} has shape {tuple(tensor.shape)}, expected {tuple(expected[ours].shape)} from args"
            raise checkpoint.error(what)
        renamed[ours] = tensor
    if missing := next((name for name in expected if name not in renamed), None):
        what = f"{missing!r} is missing"
        raise checkpoint.error(what, cure="The checkpoint is incomplete or of another variant than its args say.")
    return renamed


def _dead_gate_part(name: str, expected: Mapping[str, Tensor]) -> bool:
    """A gate that was ablated keeps the parts that it does not use."""
    gate, found, _ = name.partition(".correction.coefficient.")
    return bool(found) and any(other.startswith(f"{gate}.correction.coefficient.") for other in expected)
