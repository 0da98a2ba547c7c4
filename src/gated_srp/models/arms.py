"""The arms: a plain table of the compared models, each in its parts, and `build_model`.

Nobody outside this package takes an arm's name apart: what the rest needs to know of an arm is a fact of `Arm`.
"""

import difflib
import re
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

import torch

from gated_srp import srp
from gated_srp.errors import UserError
from gated_srp.models.attention import Attention
from gated_srp.models.nystrom import DifferentialAttention, DifferentialNystrom, NystromAttention
from gated_srp.models.parts import AdaptedArm, Arm, FeaturesArm, Gate, ImageArm, OtherArm, PeerArm, Sizes, named
from gated_srp.models.slide import SlideModel, initialise
from gated_srp.srp import Coefficient, OwnValue

_Make = Callable[[Sizes, int], Attention]  # of a model's sizes and a block's number


def _nystrom(sizes: Sizes, number: int) -> Attention:
    return NystromAttention(sizes.dim, sizes.num_heads, num_landmarks=sizes.num_landmarks)


def _differential(sizes: Sizes, number: int) -> Attention:
    return DifferentialNystrom(sizes.dim, sizes.num_heads, depth=number, num_landmarks=sizes.num_landmarks)


def _dense_differential(sizes: Sizes, number: int) -> Attention:
    return DifferentialAttention(sizes.dim, sizes.num_heads, depth=number)


def _other(name: str, *takes: str) -> _Make:
    """An attention by its name, so that a run without it does not load it. ``takes``: sizes beside width and heads."""
    return lambda sizes, number: named(name)(sizes.dim, sizes.num_heads, **{one: getattr(sizes, one) for one in takes})


def _but_last(attention: _Make, last: _Make) -> _Make:
    """The last block reads all patches for CLS alone: what an attention knows of a patch's surroundings has no use there."""
    return lambda sizes, number: (last if number == sizes.depth - 1 else attention)(sizes, number)


def _cog(sizes: Sizes, number: int) -> Attention:
    """As its authors do, the first and the last block keep the softmax."""
    if sizes.depth < 3:
        what = f"depth {sizes.depth}: Cog attention leaves the first and the last block to softmax attention"
        raise UserError(what, where="model", cure="Take depth 3 or more; otherwise this arm is vit4.")
    inner = 0 < number < sizes.depth - 1
    return (_other("variants.CogAttention") if inner else _dense)(sizes, number)


def _with_gates(arms: dict[str, Arm], about: str = "the same with Gated SRP") -> dict[str, Arm]:
    """These arms, and each with Gated SRP on top."""
    gated = {
        f"{name}_gated_srp": replace(arm, coefficient=Gate(), without=name, title="", about=about)
        for name, arm in arms.items()
    }
    return {name: arm for pair in zip(arms.items(), gated.items(), strict=True) for name, arm in pair}


def _fixed(value: float) -> Callable[[Sizes], Coefficient]:
    return lambda sizes: srp.FixedCoefficient(value)


_dense, _local = _other("attention.DenseAttention"), _other("attention.LocalAttention")
_gated = partial(Arm, _nystrom)
_vit4 = partial(Arm, position=None, trunk="vit4", base="vit4", dense=True)
_reduced = partial(OtherArm, position=None, trunk="vit4", base="vit4", dense=True)
_vit_s16 = partial(ImageArm, trunk="vit_s16", base="vit_s16", dense=True)

ARMS: dict[str, Arm | PeerArm] = {
    # The paper's comparison
    "na": Arm(_nystrom, title="NA", about="Nystrom attention, nothing corrected: the base of all that follow"),
    "xsa": _gated(
        _fixed(1.0),
        direction=lambda sizes: OwnValue(),
        last=True,
        title="XSA",
        about="removes what lies along each token's own value",
    ),
    "diff": Arm(_differential, title="Diff", about="differential attention: one map minus lambda times a second"),
    "gated_srp": _gated(
        Gate(),
        title="Gated SRP",
        method=True,
        about="the paper's method: a learned signed gate along the neighbours' mean",
    ),
    # Fixed projection strength
    "fixed_beta_minus1": _gated(_fixed(-1.0), about="doubles the part along the neighbours' mean"),
    "fixed_beta_1": _gated(_fixed(1.0), about="removes that part"),
    "fixed_beta_2": _gated(_fixed(2.0), about="flips that part"),
    # Ablations of the gate: range, gradients, factorisation, initialisation
    "gated_srp_sigmoid": _gated(
        Gate(bound=srp.nonnegative), about="beta between 0 and delta (a sigmoid); does not start as an identity"
    ),
    "gated_srp_range_free": _gated(Gate(bound=srp.range_free), about="2 tanh(logit / 2) in place of delta tanh(logit)"),
    "gated_srp_live": _gated(Gate(live=True), about="gradients flow through what the gate measures"),
    "gated_srp_token_only": _gated(Gate(head=False), about="one coefficient per token for all heads, but for biases"),
    "gated_srp_head_only": _gated(Gate(hidden_dim=None), about="no token MLP"),
    "gated_srp_no_bias": _gated(Gate(bias=False), about="no biases in the gate"),
    "gated_srp_xavier": _gated(Gate(init=srp.xavier), about="starts from Xavier's values, not as an identity"),
    "gated_srp_kaiming": _gated(Gate(init=srp.kaiming), about="starts from Kaiming's values, not as an identity"),
    "gated_srp_scales": _gated(
        Gate(),
        direction=lambda sizes: named("scales.MixedWindows")(sizes.num_heads),
        window=7,
        about="the gate along the neighbours' means of windows 3, 5 and 7, mixed per token and head by learned weights",
    ),
    # Controls: the same gate on another axis, a gate that only removes, weights without a direction
    "axis_own_value": _gated(
        Gate(),
        direction=lambda sizes: OwnValue(),
        about="the gate along the token's own value; unlike Gated SRP it corrects CLS and padding too, and its axis gets a gradient",
    ),
    "axis_slide_mean": _gated(
        Gate(), direction=lambda sizes: srp.SlideMean(), about="the gate along the mean of the whole slide"
    ),
    "axis_random": _gated(
        Gate(),
        direction=lambda sizes: srp.RandomDirection(sizes.num_heads, sizes.dim // sizes.num_heads),
        about="the gate along a random direction per head, the same in every layer and for every seed",
    ),
    "gated_srp_nonnegative": _gated(Gate(bound=srp.rectified), about="starts as an identity, but can only remove"),
    "axis_shuffled": _gated(
        Gate(),
        direction=lambda sizes: srp.ShuffledNeighbours(),
        about="the gate along the mean of as many patches from elsewhere on the slide, in a fixed order",
    ),
    "adapter": AdaptedArm(_nystrom, about="a small bottleneck in place of the gate, with at least as many weights"),
    # The correction on the features, before the first layer, where no residual stream carries the token past it
    "features_beta_1": FeaturesArm(
        _nystrom, _fixed(1.0), about="NA on features from which the part along their neighbours' mean was removed"
    ),
    "features_gated_srp": FeaturesArm(_nystrom, Gate(), about="the gate on the features, one head, in front of NA"),
    "features_gated_srp_from_1": FeaturesArm(
        _nystrom,
        Gate(bound=srp.from_removal),
        about="the same gate, which starts by removing: beta = 1 + delta tanh(logit)",
    ),
    # Dense attention over slides
    "vit4": _vit4(_dense, about="dense attention without positions, nothing corrected"),
    "vit4_xsa": _vit4(_dense, _fixed(1.0), direction=lambda sizes: OwnValue(), last=True, about="the same with XSA"),
    "vit4_diff": _vit4(_dense_differential, about="the same with differential attention"),
    "vit4_gated_srp": _vit4(_dense, Gate(), method=True, about="the same with Gated SRP"),
    "vit4_gated_srp_published": _vit4(
        _dense,
        Gate(srp.FourInputGate),
        about="its gate has a fourth input, as released: the PANDA row of the architecture table",
    ),
    # Attention corrected by others, alone and with Gated SRP on top
    "diff_gated_srp": Arm(_differential, Gate(), without="diff", about="Diff with Gated SRP"),
    "vit4_diff_gated_srp": _vit4(_dense_differential, Gate(), without="vit4_diff", about="the same on dense attention"),
    **_with_gates(
        {
            "dgsa": Arm(
                _other("variants.GatedDifferentialNystrom", "num_landmarks"),
                about="differential gated self-attention: a gate per token and head weighs two maps (Lygizou et al. 2025)",
            ),
            "vit4_dgsa": _vit4(_other("variants.GatedDifferentialAttention"), about="the same on dense attention"),
            "integral": Arm(
                _other("variants.IntegralNystrom", "num_landmarks"),
                about="Integral Transformer: the mean of eight signals' logits before the softmax (Kobyzev et al. 2025)",
            ),
            "vit4_integral": _vit4(_other("variants.IntegralAttention"), about="the same on dense attention"),
            "vit4_cog": _vit4(_cog, about="Cog attention: weights with the signs of their logits (Lv et al. 2024)"),
        }
    ),
    # Locality, redundancy, the class token: what else could do the gate's work
    **_with_gates(
        {
            "local_attention": Arm(
                _local, about="each patch attends to itself and its neighbours alone; CLS reads all"
            ),
            "neighbourhood": Arm(
                _but_last(_other("locality.NeighbourhoodAttention"), _local),
                without="local_attention",
                about="local attention with a learned bias per relative position (Hassani et al. 2023)",
            ),
            "convit": Arm(
                _but_last(_other("locality.PositionalNystrom", "num_landmarks"), _nystrom),
                about="gated positional attention on the lattice beside Nystrom attention (ConViT, d'Ascoli et al. 2021)",
            ),
            "vit4_tome": _reduced(
                _other("reduced.SizedAttention"),
                model="reduced.MergingTransformer",
                about="token merging: before each block but the first, a quarter of the patches joins its most similar one (Bolya et al. 2023)",
            ),
            "vit4_evit": _reduced(
                _other("reduced.SharedMap"),
                model="reduced.PruningTransformer",
                about="pruning: before each block but the first, 70 % of the patches stay, the others become one (EViT, Liang et al. 2022)",
            ),
            "cait": OtherArm(
                _nystrom,
                position=lambda dim: named("class_token.PatchPPEG")(dim),
                model="class_token.ClassAttentionTransformer",
                about="class attention: CLS enters for the last two blocks, which change it alone (CaiT, Touvron et al. 2021)",
            ),
            "split_norm": OtherArm(
                _nystrom,
                model="class_token.SplitNormTransformer",
                without="na",
                about="norms of their own for CLS and for patches (the norms of Marouani et al. 2026)",
            ),
        }
    ),
    # Two magnifications in one bag (`features_low`)
    **_with_gates(
        {
            "two_scales": OtherArm(
                _nystrom,
                direction=lambda sizes: named("two_scales.NeighboursAndParent")(sizes.num_heads),
                model="two_scales.TwoScaleTransformer",
                scales=2,
                about="patches of two magnifications in one bag: NA over all of them, PPEG on each scale's own square",
            )
        },
        about="the same with the gate along the neighbours' mean in a patch's own scale and its parent's value, mixed per token and head by learned weights",
    ),
    # Images: dense attention over a fixed grid
    "vit_s16": _vit_s16(_dense, about="ViT-S/16 on images, nothing corrected"),
    "vit_s16_xsa": _vit_s16(
        _dense, _fixed(1.0), direction=lambda sizes: OwnValue(), last=True, about="the same with XSA"
    ),
    "vit_s16_diff": _vit_s16(_dense_differential, about="the same with differential attention"),
    "vit_s16_gated_srp": _vit_s16(_dense, Gate(), method=True, about="the same with Gated SRP"),
    "vit_s16_fixed_beta_minus1": _vit_s16(_dense, _fixed(-1.0), about="doubles the part along the neighbours' mean"),
    "vit_s16_fixed_beta_1": _vit_s16(_dense, _fixed(1.0), about="removes that part"),
    "vit_s16_fixed_beta_2": _vit_s16(_dense, _fixed(2.0), about="flips that part"),
    # Other methods, at the width of the others; TransMIL and CLAM as published
    "mean_pool": PeerArm("MeanPool", ("dim",), about="a linear layer with ReLU, the mean over patches, a linear layer"),
    "abmil": PeerArm("ABMIL", ("dim",), about="attention-based MIL with gated attention (Ilse et al. 2018)"),
    "srp_abmil": PeerArm(
        "srp_abmil",
        ("dim", "delta", "hidden_dim"),
        gated=True,
        starts_as="abmil",
        about="ABMIL whose patches Gated SRP corrects first",
    ),
    "srp_abmil_from_1": PeerArm(
        "srp_abmil_from_1",
        ("dim", "delta", "hidden_dim"),
        gated=True,
        about="the same, whose gate starts by removing: beta = 1 + delta tanh(logit)",
    ),
    "abmil_beta_1": PeerArm(
        "abmil_beta_1", ("dim",), about="ABMIL on features from which the part along their neighbours' mean was removed"
    ),
    "dsmil": PeerArm("DSMIL", ("dim",), about="dual-stream MIL: a critical patch and attention to it (Li et al. 2021)"),
    "abmil_published": PeerArm(
        "published_abmil", about="ABMIL at the sizes of the paper's table of MIL models: 512, 128"
    ),
    "dsmil_published": PeerArm(
        "PublishedDSMIL", about="DSMIL at the sizes of that table: 512 channels, queries of two layers and width 128"
    ),
    "clam_sb": PeerArm("CLAM", about="CLAM, one attention branch, with its loss on patches (Lu et al. 2021)"),
    "transmil": PeerArm("TransMIL", about="TransMIL as published: two blocks of width 512 (Shao et al. 2021)"),
    "patch_gcn": PeerArm(
        "patch_gcn.PatchGCN",
        about="Patch-GCN as published: three graph convolutions, gated attention over all their outputs (Chen et al. 2021)",
    ),
    "linear_probe": PeerArm("LinearProbe", about="a linear layer on the mean of the features"),
    "clinical": PeerArm(
        "Clinical", about="the covariates alone, without patches: what a slide must add to", needs_covariates=True
    ),
}


METHOD = "gated_srp"  # the paper's
TUNED = "_tuned"  # ends the name of the row that `gated-srp tune` adds to a comparison


def find_arm(name: str) -> Arm | PeerArm:
    """The arm of this name; where there is none, the error says which name is near, and lists all.

    >>> find_arm("vit4_gated_srp").base
    'vit4'
    """
    if name in ARMS:
        return ARMS[name]
    hint = "".join(f"Did you mean {near!r}? " for near in difflib.get_close_matches(name, ARMS, n=1))
    raise UserError(f"arm {name!r} is not known", cure=f"{hint}Arms: {', '.join(ARMS)}.", kind="unknown_arm")


def fitting_arms(task: str, *, images: bool = False, covariates: bool = False, scales: int = 1) -> tuple[str, ...]:
    """Every arm that is made for this kind of task, on slides or on images, with covariates or without, of up to so many magnifications.

    >>> left = set(ARMS) - set(fitting_arms("classification", covariates=True, scales=2))
    >>> left == {name for name, arm in ARMS.items() if arm.images}
    True
    """
    fitting = [(name, arm) for name, arm in ARMS.items() if arm.images == images and task not in arm.refuses]
    return tuple(name for name, arm in fitting if (covariates or not arm.needs_covariates) and arm.scales <= scales)


def arm_settings(name: str) -> tuple[str, dict[str, str]]:
    """An arm, and the settings of the cohort that a study changes for it: ``ARM@SETTING=VALUE``, repeated for several.

    >>> arm_settings("gated_srp@train.gate_lr=10")
    ('gated_srp', {'train.gate_lr': '10'})
    """
    arm, *changes = name.split("@")
    if wrong := [change for change in changes if not re.fullmatch(r"[\w.]+=[\w.+-]+", change)]:
        cure = "expected ARM@SETTING=VALUE, e.g. gated_srp@train.gate_lr=10."
        raise UserError(f"{wrong[0]!r} is no setting", where=f"arm {name}", cure=cure, kind="unknown_arm")
    return arm, dict(change.split("=", 1) for change in changes)


def arm_title(name: str) -> str:
    """How tables and figures print an arm, or a row of a table that is named after its arm.

    >>> arm_title("gated_srp"), arm_title("gated_srp_tuned"), arm_title("vit4"), arm_title("my own row")
    ('Gated SRP', 'Gated SRP, tuned', 'vit4', 'my own row')
    """
    tuned = name.removesuffix(TUNED)
    if tuned != name and tuned in ARMS and ARMS[tuned].title:
        return f"{ARMS[tuned].title}, tuned"
    if "@" in name:
        arm, changes = arm_settings(name)
        return ", ".join([arm_title(arm), *(f"{key.rpartition('.')[2]} {value}" for key, value in changes.items())])
    return (ARMS[name].title if name in ARMS else "") or name


def build_model(
    arm: str, *, in_dim: int, num_outputs: int, seed: int = 0, covariates: int = 0, masked: bool = False, **sizes: Any
) -> SlideModel:
    """The model of an arm, its start values from ``seed``; ``sizes`` are the fields of `Sizes`, ``covariates`` numbers for its head;
    ``masked``: the one that pretrains it (`masked.MaskedTransformer`).

    >>> model = build_model("gated_srp", in_dim=1536, num_outputs=4)
    >>> sum(p.numel() for p in model.parameters()) - 3 * 351
    7723780
    """
    parts = find_arm(arm)
    known = {size.name for size in fields(Sizes)}
    if unknown := sorted(set(sizes) - known):
        expected = ", ".join(sorted(known))
        raise UserError(f"unknown size {unknown[0]!r}, expected some of {expected}.", where="build_model")
    full = Sizes(**{**parts.defaults, **sizes})
    # Constructors draw values that `initialise` replaces; nobody else's stream may notice.
    with torch.random.fork_rng(devices=[]):
        make = named("masked.build_masked") if masked else None
        model: SlideModel = make(arm, in_dim, full) if make else parts.build(in_dim, num_outputs, full)
        if covariates:
            model.covariates = torch.nn.Linear(covariates, num_outputs, bias=False)
    initialise(model, seed)
    model.settings = {"arm": arm, "in_dim": in_dim, "num_outputs": num_outputs, **asdict(full)}
    model.settings |= ({"covariates": covariates} if covariates else {}) | ({"masked": True} if masked else {})
    return model


def is_gated(name: str) -> bool:
    """Whether an arm, or a row of a table that is named after its arm, has the paper's gates.

    >>> is_gated("gated_srp"), is_gated("gated_srp@train.gate_lr=10"), is_gated("na"), is_gated("my own row")
    (True, True, False, False)
    """
    arm = arm_settings(name)[0].removesuffix(TUNED) if "@" in name else name.removesuffix(TUNED)
    return arm in ARMS and ARMS[arm].gated
