"""Checkpoints of the published release as models of ours: {"model": tensors by name, "args": settings, ...}; their code is not run.

Three trainers wrote them. The slide trainer names its model in `variant`, the PANDA trainer in `arch` and `mode`, the ADP trainer in
`use_srp` and other switches. What they name is a trunk with a method, and those two make the arm.
"""

from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gated_srp.bounded import try_out
from gated_srp.errors import UserError, counted
from gated_srp.files import as_stored
from gated_srp.models.arms import ARMS, build_model, find_arm
from gated_srp.models.slide import SlideModel
from gated_srp.models.store import save_model

_PLAIN, _XSA, _DIFF, _GATED = "", "xsa", "diff", "gated_srp"  # methods, as the names of arms have them
_VARIANTS = {
    "nystrom_na": _PLAIN,
    "baseline": _PLAIN,
    "xsa_all_ref": _XSA,
    "diff_transformer": _DIFF,
    "srp_patch_signed_gated": _GATED,
}
_FIXED_VARIANT = "srp_patch_fixed_beta"  # and the coefficient
_MODES = {"baseline": _PLAIN, "xsa_all_hard": _XSA, "diff_transformer": _DIFF, "srp_signed_gated": _GATED}
_ARCHS = {"transmil": "na", "vit4": "vit4", "vit12": "vit4"}  # the number of blocks is read off the weights
_FIXED = {-1.0: "fixed_beta_minus1", 0.0: _PLAIN, 1.0: "fixed_beta_1", 2.0: "fixed_beta_2"}  # by coefficient
_ABLATIONS: dict[str, dict[Any, str]] = {  # of the gate: the first value of a setting is that of the paper's method
    "gate_activation": {"tanh": "", "sigmoid01": "sigmoid"},
    "gate_factorization": {"full": "", "token_only": "token_only", "head_only": "head_only", "no_bias": "no_bias"},
    "gate_delta_mode": {"fixed": "", "direct_beta_softclip": "range_free"},
    "detach_gate_inputs": {True: "", False: "live"},
    "no_detach_gate_inputs": {False: "", True: "live"},
}
# Settings whose other values, if there are any, would change the result of a forward without a trace in the weights.
_ONE_VALUE = {"pos_mode": "none", "ln_specialization": "shared"}
_ONE_VALUE_OF_CORRECTIONS = {
    "srp_r_target": "knn8",
    "neighbor_source": "real",
    "neighbor_shell": "cumulative",
    "neighbor_weighting": "uniform",
    "gate_count_features": "legacy",
    "gate_activation_temperature": 1.0,
}
_SIZES = {"dim": "embed_dim", "num_heads": "num_heads", "num_landmarks": "num_landmarks"}
_GATE_SIZES = {"delta": "delta_scale", "hidden_dim": "gate_hidden_dim"}
_LEFTOVERS = (".attn.beta", ".attn.beta_patch", ".attn.alpha_cls", ".attn.alpha_patch")
_OUR_GATE = ".correction.coefficient."
_NAMES = (  # theirs -> ours, one after the other
    (".attn.gate.token_mlp_", f"{_OUR_GATE}token_"),
    (".attn.gate.", _OUR_GATE),
    (".attn.out_proj.", ".attn.proj."),
    ("patch_embed.proj.", "in_proj."),
)
_WRAPPERS = ("_orig_mod.", "module.", "_orig_mod.")  # of torch.compile and of several devices, either inside the other
_EXPECTED = "Expected a checkpoint of the published release, such as best.pt."
_FROM_PARTS = "Build the model from parts with SignedGate."


def load_published(path: str | Path) -> SlideModel:
    """The model of a checkpoint of any trainer of the release, in evaluation mode."""
    return _Checkpoint.open(Path(path)).model()


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
    opened = _Checkpoint.open(Path(checkpoint))
    model = opened.model()
    card: dict[str, Any] = {}
    if classes:
        outputs, named = model.settings["num_outputs"], len(set(classes))
        if not named == len(classes) == outputs:
            what = f"{counted(named, 'class')} named, but the model has {counted(outputs, 'output')}"
            raise opened.error(what, cure="Name each output once, in the order of training.")
        card |= {"task": "multilabel" if model.images else "classification", "classes": list(classes)}
    if model.images:
        patch, across = isqrt(model.settings["in_dim"] // 3), isqrt(model.settings["num_patches"])
        card["images"] = {"size": across * patch, "patch": patch}
    if "neighbor_window" in opened.args:
        card["window"] = int(opened.args["neighbor_window"])
    save_model(model, Path(output), card)
    return model


def _number(dtype: Any, raw: Any = b"\0") -> float:
    import numpy as np

    return float(np.frombuffer(raw.encode("latin1") if isinstance(raw, str) else raw, dtype)[0])


def _path(*parts: str) -> str:
    return "/".join(map(str, parts))


def _unpickle(path: Path) -> Any:
    """Tensors and plain values; numpy's numbers, paths and argparse's namespace, as trainers keep scores and settings, become plain too."""
    import numpy as np

    kinds = [type(np.dtype(kind)) for kind in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")]
    numbers = [(_number, f"numpy.{core}.multiarray.scalar") for core in ("_core", "core")]
    paths = [(_path, f"pathlib.{module}{name}") for module in ("", "_local.") for name in ("PosixPath", "WindowsPath")]
    with torch.serialization.safe_globals([np.dtype, *kinds, *numbers, *paths, Namespace]):
        return torch.load(path, map_location="cpu", weights_only=True)


@dataclass(frozen=True)
class _Checkpoint:
    path: Path
    args: Mapping[str, Any]
    weights: Mapping[str, Tensor]

    @classmethod
    def open(cls, path: Path) -> "_Checkpoint":
        try:
            path = as_stored(path)
            try_out(_unpickle, path)
            found = _unpickle(path)
        except FileNotFoundError:
            raise UserError("no such file", where=str(path), cure=_EXPECTED) from None
        except Exception as error:  # torch raises many kinds for broken or unsafe files
            what = f"cannot be read as tensors and plain settings ({type(error).__name__})"
            cure = f"{_EXPECTED} Files that hold other Python objects are not opened, since that would run their code."
            raise UserError(what, where=str(path), cure=cure) from error
        keys = found if isinstance(found, dict) else {}
        if isinstance(keys.get("args"), Namespace):
            keys["args"] = vars(keys["args"])
        if not isinstance(keys.get("model"), dict) or not isinstance(keys.get("args"), dict):
            said = ", ".join(map(str, keys)) or type(found).__name__
            what = f"expected a dictionary with 'model' and 'args', dictionaries both, found: {said}"
            raise UserError(what, where=str(path), cure=_EXPECTED)
        weights = {str(name): tensor for name, tensor in found["model"].items() if torch.is_tensor(tensor)}
        for wrapper in _WRAPPERS:  # of a model that was saved inside one
            if weights and all(name.startswith(wrapper) for name in weights):
                weights = {name.removeprefix(wrapper): tensor for name, tensor in weights.items()}
        return cls(path, found["args"], weights)

    def error(self, what: str, cure: str = "") -> UserError:
        return UserError(what, where=str(self.path), cure=cure)

    def value(self, setting: str, known: Mapping[Any, str], *others: str) -> str:
        """What a setting's value stands for among the known ones; an absent setting has the first."""
        given = self.args.get(setting, next(iter(known)))
        if not any(given == one for one in known):
            raise self.error(
                f"args[{setting!r}] is {given!r}, expected one of {', '.join([*map(str, known), *others])}"
            )
        return known[given]

    def shape(self, name: str, ndim: int = 2) -> torch.Size:
        tensor = self.weights.get(name)
        if tensor is None or tensor.ndim != ndim:
            raise self.error(f"{name!r} is missing or does not have {ndim} dimensions", cure=_EXPECTED)
        return tensor.shape

    def model(self) -> SlideModel:
        arm = _arm(self)
        facts = find_arm(arm)
        names = _SIZES | (_GATE_SIZES if facts.gated else {})
        sizes = {ours: self.args[theirs] for ours, theirs in names.items() if self.args.get(theirs) is not None}
        hidden = (
            t.shape[0] for name, t in self.weights.items() if name.endswith(".token_mlp_hidden.weight") and t.ndim
        )
        if facts.gated and (width := next(hidden, 0)):
            sizes.setdefault("hidden_dim", width)
        if facts.gated and "delta" not in sizes:
            raise self.error(
                "args has no 'delta_scale', the range of the gates, which no tensor tells", cure=_FROM_PARTS
            )
        sizes["depth"] = len({name.split(".")[1] for name in self.weights if name.startswith("blocks.")})
        if facts.images:
            sizes["num_patches"] = self.shape("pos_embed", 3)[1] - 1  # one position is that of CLS
            sizes["in_dim"] = self.shape("patch_embed.proj.weight", 4)[1:].numel()
        else:
            sizes["in_dim"] = self.shape("in_proj.weight")[1]
        model = build_model(arm, num_outputs=self.shape("head.weight")[0], **sizes)
        model.load_state_dict(_renamed(self, model.state_dict()))
        return model.eval()


# Trunk and method -----------------------------------------------------------------------------------------------------


def _arm(opened: _Checkpoint) -> str:
    if "variant" in opened.args:
        trunk, method = "na", _variant(opened)
    elif "mode" in opened.args:
        trunk, method = opened.value("arch", _ARCHS), _mode(opened)
    elif "use_srp" in opened.args:
        trunk, method = "vit_s16", _switches(opened)
    else:
        found = ", ".join(map(str, opened.args))
        what = "args has none of 'variant' (slide trainer), 'mode' (PANDA trainer), 'use_srp' (ADP trainer)"
        raise opened.error(f"{what}; found: {found}", cure=_EXPECTED)
    corrected = method not in (_PLAIN, _XSA, _DIFF)
    for setting, only in (_ONE_VALUE | (_ONE_VALUE_OF_CORRECTIONS if corrected else {})).items():
        if (given := opened.args.get(setting, only)) != only:
            raise opened.error(f"args[{setting!r}] is {given!r}, expected {only!r}: no arm has another")
    if method == _GATED:
        method = _ablated(opened)
    _refuse_contradictions(opened, method)
    if (trunk, method) == ("vit4", _DIFF):
        what = "vit4 with Diff: its tensors fit dense and Nystrom attention alike, and there is no published number to tell which it was"
        raise opened.error(what, cure="If you know, build it with build_model and load the tensors into it.")
    if (trunk, method) == ("vit4", _GATED) and opened.shape("blocks.0.attn.gate.token_mlp_hidden.weight")[1] == 4:
        method = f"{_GATED}_published"
    arm = method or trunk if trunk == "na" else "_".join(filter(None, (trunk, method)))
    if arm not in ARMS:
        raise opened.error(f"no arm is {trunk!r} with {method!r}", cure=_FROM_PARTS)
    return arm


def _refuse_contradictions(opened: _Checkpoint, method: str) -> None:
    """Coefficients that the file keeps: 1 in alpha_* of XSA and 0 elsewhere; none in beta_patch but of a fixed coefficient."""
    expected = {".attn.alpha_cls": float(method == _XSA), ".attn.alpha_patch": float(method == _XSA)}
    if method in (_PLAIN, _XSA, _DIFF) or method.startswith(_GATED):
        expected[".attn.beta_patch"] = 0.0
    for name, tensor in opened.weights.items():
        only = next((value for end, value in expected.items() if name.endswith(end)), None)
        if only is not None and not bool((tensor == only).all()):
            held = ", ".join(f"{value:g}" for value in sorted(set(tensor.double().flatten().tolist()))[:4])
            what = f"{name!r} holds {held}, but {only:g} in what args name ({method or 'no correction'})"
            raise opened.error(what, cure="The tensors and args are of two models; nothing was loaded.")


def _variant(opened: _Checkpoint) -> str:
    if str(opened.args["variant"]).startswith(_FIXED_VARIANT):
        return _fixed(opened, _coefficients(opened))
    return opened.value("variant", _VARIANTS, f"{_FIXED_VARIANT}<b>")


def _mode(opened: _Checkpoint) -> str:
    return _fixed_if_unnamed(opened, "mode", _MODES)


def _switches(opened: _Checkpoint) -> str:
    on = {"zero": "", "one": _XSA}
    own = [opened.value(setting, on) for setting in ("alpha_cls_mode", "alpha_patch_mode")]
    if own[0] != own[1]:
        raise opened.error("alpha_cls_mode and alpha_patch_mode differ: XSA on one kind of row alone; no arm does that")
    beta, along = {"signed_gated": _GATED, "zero": _PLAIN}, _PLAIN
    alone = own[0] and opened.args.get("beta_patch_mode") not in beta and not any(_coefficients(opened))
    if (
        opened.args["use_srp"] and not alone
    ):  # XSA whose file holds no other coefficient is XSA, whatever the mode is called
        along = _fixed_if_unnamed(opened, "beta_patch_mode", beta)
    named = {along: "use_srp", own[0]: "XSA", _DIFF if opened.args.get("diff_transformer") else "": "diff_transformer"}
    chosen = {method: name for method, name in named.items() if method}
    if len(chosen) > 1:
        raise opened.error(f"combines {' with '.join(chosen.values())}; no arm does")
    return next(iter(chosen), _PLAIN)


def _ablated(opened: _Checkpoint) -> str:
    """The gate's arm: the settings may name one ablation."""
    found = sorted({opened.value(setting, known) for setting, known in _ABLATIONS.items()} - {""})
    if len(found) > 1:
        raise opened.error(f"combines the ablations {' and '.join(found)}; no arm does", cure=_FROM_PARTS)
    return "_".join([_GATED, *found])


def _fixed_if_unnamed(opened: _Checkpoint, setting: str, known: Mapping[str, str]) -> str:
    """These trainers have names of their own for fixed coefficients, which the tensors tell better: zeros in all other models."""
    held = _coefficients(opened)
    if not any(opened.args.get(setting) == one for one in known) and any(held):
        return _fixed(opened, held)
    return opened.value(setting, known, "a fixed coefficient in attn.beta_patch")


def _coefficients(opened: _Checkpoint) -> set[float]:
    tensors = [tensor for name, tensor in opened.weights.items() if name.endswith(".attn.beta_patch")]
    return {value for tensor in tensors for value in tensor.double().flatten().tolist()}


def _fixed(opened: _Checkpoint, held: set[float]) -> str:
    values = {value for value in held if value} or held  # the last block may hold zeros: its patches are not read again
    if len(values) != 1 or not values <= set(_FIXED):
        what = f"blocks.*.attn.beta_patch holds {sorted(values)}, expected one coefficient of -1, 0, 1, 2 for all heads"
        raise opened.error(what)
    return _FIXED[values.pop()]


# Tensors --------------------------------------------------------------------------------------------------------------


def _renamed(opened: _Checkpoint, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names, all that are expected and no others."""
    renamed = {}
    for theirs, tensor in opened.weights.items():
        name = theirs
        for old, new in _NAMES:
            name = name.replace(old, new)
        if name not in expected:
            if theirs.endswith(_LEFTOVERS) or _unused_part_of_a_gate(name, expected):
                continue
            raise opened.error(
                f"{theirs!r} does not fit a published layout of this variant", cure="Nothing was loaded."
            )
        if theirs == "patch_embed.proj.weight":
            tensor = tensor.flatten(1)  # its stride is its size: a linear layer on a patch's pixels
        if tensor.shape != expected[name].shape:
            what = f"{theirs!r} has shape {tuple(tensor.shape)}, expected {tuple(expected[name].shape)} from args"
            raise opened.error(what)
        renamed[name] = tensor
    if missing := [name for name in expected if name not in renamed]:
        cure = "The checkpoint is incomplete or of another variant than its args say."
        raise opened.error(f"{missing[0]!r} is missing", cure=cure)
    return renamed


def _unused_part_of_a_gate(name: str, expected: Collection[str]) -> bool:
    """An ablated gate's file keeps the tensors that the ablation does not use."""
    block, gate, _ = name.partition(_OUR_GATE)
    return bool(gate) and any(other.startswith(block + gate) for other in expected)
