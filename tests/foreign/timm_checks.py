"""Run by test_timm.py in a process of its own: timm with a stub in place of torchvision, which must not enter the tests' process.

Usage: python timm_checks.py FOLDER_WITH_TIMM
"""

import sys
import tempfile
from pathlib import Path

sys.path[:0] = [sys.argv[1], str(Path(__file__).parent), str(Path(__file__).parents[1])]
from torchvision_stub import install  # noqa: E402

install()

import pytest  # noqa: E402
import support_table  # noqa: E402
import timm  # noqa: E402
import torch  # noqa: E402
from foreign_models import (  # noqa: E402
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
from timm.models.beit import Beit  # noqa: E402
from timm.models.deit import VisionTransformerDistilled  # noqa: E402
from timm.models.eva import Eva  # noqa: E402
from timm.models.swin_transformer import SwinTransformer  # noqa: E402
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer  # noqa: E402
from timm.models.vision_transformer_sam import VisionTransformerSAM  # noqa: E402

from gated_srp import UserError, attach  # noqa: E402

SIZES = {"img_size": (32, 48), "patch_size": 8, "embed_dim": WIDTH, "depth": 3, "num_heads": HEADS, "num_classes": 3}
IMAGES = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))
ALL, NOT_LAST = [True] * 3, [True, True, False]


def case(name: str, kind: type, gates: list[bool], front: int, **changes: object) -> Case:
    return Case(name, lambda: kind(**{**SIZES, **changes}), {"x": IMAGES}, lambda out: out, gates, front, grid=(4, 6))


UNI2_H = {"reg_tokens": 8, "no_embed_class": True, "init_values": 1e-1, "mlp_layer": SwiGLUPacked}
CASES = {
    one.name: one
    for one in [
        case("vit", VisionTransformer, NOT_LAST, 1),
        case("vit_avg_qk_norm", VisionTransformer, ALL, 1, global_pool="avg", qk_norm=True),
        case("vit_map_without_cls", VisionTransformer, ALL, 0, global_pool="map", class_token=False),
        case("uni2_h", VisionTransformer, NOT_LAST, 9, act_layer=torch.nn.SiLU, **UNI2_H),
        case("deit_distilled", VisionTransformerDistilled, NOT_LAST, 2),
        case("eva", Eva, ALL, 1),
        case("eva_rope_fused_bias", Eva, ALL, 1, use_rot_pos_emb=True, ref_feat_shape=(4, 6)),
        case("eva_apart_scale_norm", Eva, ALL, 1, qkv_fused=False, scale_attn_inner=True),
        case("eva_rope_registers", Eva, ALL, 5, attn_type="rope", use_rot_pos_emb=True, num_reg_tokens=4),
        case("beit", Beit, ALL, 1, head_init_scale=1.0),
        case("beit_relative", Beit, NOT_LAST, 1, global_pool="token", use_rel_pos_bias=True, head_init_scale=1.0),
    ]
}
COMPILED = ["vit", "eva_rope_fused_bias"]
REFUSED = {
    "SwinTransformer": (lambda: SwinTransformer(**SWIN), "windows"),
    "VisionTransformerSAM": (lambda: VisionTransformerSAM(**{**SIZES, "img_size": 32}, window_size=2), "windows"),
    "DiffAttention": (lambda: VisionTransformer(**SIZES, attn_layer=DiffAttention), "another width"),
    "ParallelScalingBlock": (
        lambda: VisionTransformer(**SIZES, block_fn=ParallelScalingBlock),
        "values cannot be reached",
    ),
}
SWIN = {"img_size": 32, "patch_size": 4, "embed_dim": 12, "depths": (1,), "num_heads": (2,), "window_size": 4}


def parts(block: torch.nn.Module) -> Weights:
    attn = block.attn
    if getattr(attn, "q_bias", None) is None:
        biases = attn.qkv.bias.chunk(3)
    else:
        biases = attn.q_bias, torch.zeros_like(attn.q_bias), attn.v_bias  # Eva and BEiT: keys have none
    qkv = list(zip(attn.qkv.weight.chunk(3), biases, strict=True))
    return Weights(block.norm1, qkv, attn.proj, block.norm2, block.mlp.fc1, block.mlp.fc2)


def check_the_models_own_checkpointing(one: Case) -> None:
    model, handle = one.attached()
    model.train()
    one(model).square().sum().backward()
    grads = [p.grad.clone() for p in handle.parameters()]
    model.zero_grad()
    model.set_grad_checkpointing()
    one(model).square().sum().backward()
    for p, grad in zip(handle.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad)


def check_the_slow_attention(one: Case) -> None:
    model = one.model()
    for block in model.blocks:
        block.attn.fused_attn = False
    plain = one(model)
    attach(model)
    assert torch.equal(one(model), plain)


def check_rectangular_grids(one: Case) -> None:
    """4 x 6 patches, row by row, behind the rows in front: corners have 3 neighbours, edges 5, the others 8."""
    model = one.model()
    graph = one.attach(model)._neighbourhood.graph
    assert graph.neighbour_count.view(4, 6)[:2].tolist() == [[3, 5, 5, 5, 5, 3], [5, 8, 8, 8, 8, 5]]
    assert sorted(graph.neighbours[:3].tolist()) == [1, 6, 7]


def check_images_of_another_size() -> None:
    model = VisionTransformer(**SIZES, dynamic_img_size=True).eval()
    handle = attach(model)
    with pytest.raises(UserError, match="set_grid"):
        model(torch.randn(1, 3, 40, 24))
    handle.set_grid(5, 3)
    assert torch.isfinite(model(torch.randn(1, 3, 40, 24))).all()


def check_refusals() -> None:
    assert set(REFUSED) == support_table.refused("timm")
    for make, words in REFUSED.values():
        with pytest.raises(UserError, match=words):
            attach(make())
    with pytest.raises(UserError, match="last=False"):
        attach(VisionTransformer(**{**SIZES, "num_classes": 0}, global_pool=""))


def main() -> None:
    assert {type(one.model()).__name__ for one in CASES.values()} == support_table.handled("timm")
    for one in CASES.values():
        for check in (*CHECKS, check_autocast, check_rectangular_grids):
            check(one)
            print(one.name, check.__name__)
        check_gate_files(one, Path(tempfile.mkdtemp(dir=".")))
    for name in COMPILED:
        check_compile(CASES[name])
    for name in ("vit", "eva", "beit"):
        model, _ = CASES[name].attached()
        check_equals_our_own_blocks(CASES[name], model, list(model.blocks), parts)
        check_the_models_own_checkpointing(CASES[name])
        check_the_slow_attention(CASES[name])
    check_refusals()
    check_images_of_another_size()
    exec(support_table.code("timm"), {"torch": torch, "attach": attach})
    print("timm", timm.__version__, "all checks passed")


if __name__ == "__main__":
    main()
