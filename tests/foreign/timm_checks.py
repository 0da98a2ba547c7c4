"""Run by test_timm.py in a process of its own: timm with a stub in place of torchvision, which must not enter the tests' process.

Usage: python timm_checks.py FOLDER_WITH_TIMM
"""

import importlib.abc
import importlib.machinery
import sys
import tempfile
import types
from pathlib import Path
from unittest.mock import MagicMock


class Stub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every torchvision module is an object that has everything and does nothing."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__ = [], spec
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, Stub())
sys.path[:0] = [sys.argv[1], str(Path(__file__).parent)]

import pytest  # noqa: E402
import timm  # noqa: E402
import torch  # noqa: E402
from foreign_models import (  # noqa: E402  # noqa: E402
    CHECKS,
    HEADS,
    WIDTH,
    Case,
    Weights,
    check_autocast,
    check_compile,
    check_equals_our_own_blocks,
    check_gate_files,
)
from timm.layers import DiffAttention, SwiGLUPacked  # noqa: E402
from timm.models.eva import Eva  # noqa: E402
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer  # noqa: E402

from gated_srp import UserError, attach  # noqa: E402

SIZES = {"img_size": (32, 48), "patch_size": 8, "embed_dim": WIDTH, "depth": 3, "num_heads": HEADS, "num_classes": 3}
IMAGES = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))
ALL, NOT_LAST = [True] * 3, [True, True, False]


def case(name: str, kind: type, gates: list[bool], front: int, **changes: object) -> Case:
    return Case(name, lambda: kind(**{**SIZES, **changes}), {"x": IMAGES}, lambda out: out, gates, front, grid=(4, 6))


CASES = [
    case("vit", VisionTransformer, NOT_LAST, 1),
    case("vit_avg_qk_norm", VisionTransformer, ALL, 1, global_pool="avg", qk_norm=True),
    case("vit_map_without_cls", VisionTransformer, ALL, 0, global_pool="map", class_token=False),
    case(
        "uni2_h",
        VisionTransformer,
        NOT_LAST,
        9,
        reg_tokens=8,
        no_embed_class=True,
        init_values=1e-1,
        mlp_layer=SwiGLUPacked,
        act_layer=torch.nn.SiLU,
    ),
    case("eva_fused_bias", Eva, ALL, 1, use_rot_pos_emb=True, ref_feat_shape=(4, 6)),
    case("eva_apart_scale_norm", Eva, ALL, 1, qkv_fused=False, scale_attn_inner=True),
    case("eva_rope_registers", Eva, ALL, 5, attn_type="rope", use_rot_pos_emb=True, num_reg_tokens=4),
]


def parts(block: torch.nn.Module) -> Weights:
    qkv = list(zip(block.attn.qkv.weight.chunk(3), block.attn.qkv.bias.chunk(3), strict=True))
    return Weights(block.norm1, qkv, block.attn.proj, block.norm2, block.mlp.fc1, block.mlp.fc2)


def refused(make: object, words: str, **settings: object) -> None:
    with pytest.raises(UserError, match=words):
        attach(make(), **settings)


def main() -> None:
    for one in CASES:
        for check in CHECKS:
            check(one)
            print(one.name, check.__name__)
    for one in (CASES[0], CASES[4]):
        check_autocast(one)
        check_gate_files(one, Path(tempfile.mkdtemp(dir=".")))
    check_compile(CASES[0])
    model, handle = CASES[0].attached()
    check_equals_our_own_blocks(CASES[0], model, list(model.blocks), parts)
    model.train()
    CASES[0](model).square().sum().backward()
    grads = [p.grad.clone() for p in handle.parameters()]
    model.zero_grad()
    model.set_grad_checkpointing()
    CASES[0](model).square().sum().backward()
    for p, grad in zip(handle.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad)

    fused = CASES[0].model()
    for block in fused.blocks:
        block.attn.fused_attn = False
    plain = CASES[0](fused)
    attach(fused)
    assert torch.equal(CASES[0](fused), plain)

    refused(lambda: timm.create_model("swin_tiny_patch4_window7_224", img_size=32, window_size=4), "windows")
    refused(lambda: VisionTransformer(**SIZES, block_fn=ParallelScalingBlock), "values cannot be reached")
    refused(lambda: VisionTransformer(**SIZES, attn_layer=DiffAttention), "another width")
    refused(lambda: VisionTransformer(**{**SIZES, "num_classes": 0}, global_pool=""), "last=False")

    model = VisionTransformer(**SIZES, dynamic_img_size=True).eval()
    handle = attach(model)
    with pytest.raises(UserError, match="set_grid"):
        model(torch.randn(1, 3, 40, 24))
    handle.set_grid(5, 3)
    assert torch.isfinite(model(torch.randn(1, 3, 40, 24))).all()
    print("timm", timm.__version__, "all checks passed")


if __name__ == "__main__":
    main()
