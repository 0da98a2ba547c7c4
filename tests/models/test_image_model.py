"""The image transformer: against a plain ViT, paired, and in batches."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gated_srp import PatchGraph, UserError, trace
from gated_srp.models import build_model, load_model, save_model
from gated_srp.models.images import ImageTransformer

SIZES = {"num_outputs": 3, "dim": 24, "depth": 3, "num_heads": 4, "hidden_dim": 8, "num_patches": 16}
SIDE, PATCH = 4, 8
IMAGE_ARMS = ("vit_s16", "vit_s16_xsa", "vit_s16_diff", "vit_s16_gated_srp")


class PlainViT(nn.Module):
    """The textbook: a convolution cuts the image, every block computes every row."""

    def __init__(self, depth: int, dim: int, heads: int, outputs: int, patches: int) -> None:
        super().__init__()
        self.heads = heads
        self.patch_embed = nn.Conv2d(3, dim, PATCH, stride=PATCH)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + patches, dim))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(dim),
                    "attn": nn.ModuleDict({"qkv": nn.Linear(dim, 3 * dim), "proj": nn.Linear(dim, dim)}),
                    "norm2": nn.LayerNorm(dim),
                    "mlp": nn.ModuleDict({"fc1": nn.Linear(dim, 4 * dim), "fc2": nn.Linear(4 * dim, dim)}),
                }
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, outputs)

    def forward(self, images: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for number, block in enumerate(self.blocks):
            first, second = (1.0, 1.0) if keep is None else keep[number].view(2, -1, 1, 1)
            x = x + first * self.attention(block["attn"], block["norm1"](x))
            mlp = block["mlp"]
            x = x + second * mlp["fc2"](F.gelu(mlp["fc1"](block["norm2"](x))))
        return self.head(self.norm(x)[:, 0])

    def attention(self, layers: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        q, k, v = layers["qkv"](x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        return layers["proj"]((weights @ v).transpose(1, 2).flatten(2))


def images(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, SIDE * PATCH, SIDE * PATCH, generator=torch.Generator().manual_seed(seed))


def rows(pictures: torch.Tensor) -> torch.Tensor:
    """(B, 3, S, S) -> (B, N, 3 P P)."""
    return F.unfold(pictures, PATCH, stride=PATCH).transpose(1, 2)


def grids(count: int) -> PatchGraph:
    return PatchGraph.batch([PatchGraph.from_grid(SIDE, SIDE)] * count)


def awake(model: nn.Module, seed: int = 0) -> nn.Module:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=draw))
    return model.eval()


def build(arm: str, seed: int = 3) -> ImageTransformer:
    return build_model(arm, in_dim=3 * PATCH**2, seed=seed, **SIZES)


def plain_twin(model: ImageTransformer) -> PlainViT:
    plain = PlainViT(3, 24, 4, 3, SIDE**2).to(model.in_proj.weight.dtype)
    own = model.state_dict()
    own["patch_embed.weight"] = own.pop("in_proj.weight").unflatten(1, (3, PATCH, PATCH))
    own["patch_embed.bias"] = own.pop("in_proj.bias")
    plain.load_state_dict(own)
    return plain


@pytest.mark.parametrize("dropping", [False, True])
def test_the_base_equals_a_plain_vit_in_logits_and_gradients(dropping):
    model = awake(build("vit_s16")).double()
    plain, pictures = plain_twin(model), images(3).double()
    model.drop_path = 0.5
    keep = model.draw_keep(3, generator=torch.Generator().manual_seed(1)).double() if dropping else None
    a, b = (pictures.clone().requires_grad_() for _ in range(2))
    ours, theirs = model(rows(a), grids(3), keep), plain(b, keep)
    torch.testing.assert_close(ours, theirs)
    target = torch.tensor([0, 2, 1])
    F.cross_entropy(ours, target).backward()
    F.cross_entropy(theirs, target).backward()
    torch.testing.assert_close(a.grad, b.grad)
    grads = dict(plain.named_parameters())
    torch.testing.assert_close(model.pos_embed.grad, grads["pos_embed"].grad)
    torch.testing.assert_close(model.in_proj.weight.grad, grads["patch_embed.weight"].grad.flatten(1))
    torch.testing.assert_close(model.blocks[0].attn.qkv.weight.grad, grads["blocks.0.attn.qkv.weight"].grad)


def test_an_untrained_gate_leaves_the_base_bit_equal():
    base, gated = build("vit_s16").eval(), build("vit_s16_gated_srp").eval()
    features = rows(images(2))
    assert torch.equal(base(features, grids(2)), gated(features, grids(2)))
    with torch.no_grad():
        assert torch.equal(base(features, grids(2)), gated(features, grids(2)))
    common = set(base.state_dict()) & set(gated.state_dict())
    assert {"pos_embed", "in_proj.weight", "head.weight"} <= common
    assert all(torch.equal(base.state_dict()[name], gated.state_dict()[name]) for name in common)


def test_gradients_reach_every_gate_and_the_last_block_has_none():
    model = build("vit_s16_gated_srp").train()
    assert [block.correction is not None for block in model.blocks] == [True, True, False]
    keep = torch.ones(3, 2, 2)  # drop path that drops nothing: a dropped branch would take the gates' gradient with it
    model(rows(images(2)), grids(2), keep).square().sum().backward()
    for block in model.blocks[:-1]:
        biases = [p for p in block.correction.coefficient.parameters() if p.ndim and p.grad is not None]
        assert biases and any(float(p.grad.abs().sum()) > 0 for p in biases)


@pytest.mark.parametrize("arm", IMAGE_ARMS)
def test_images_in_a_batch_do_not_know_each_other(arm):
    model, features = awake(build(arm)), rows(images(3))
    together = model(features, grids(3))
    one_by_one = torch.cat([model(one[None], PatchGraph.from_grid(SIDE, SIDE)) for one in features])
    torch.testing.assert_close(together, one_by_one, atol=1e-5, rtol=1e-5)
    assert float((together[0] - together[1]).detach().abs().max()) > 1e-3


def test_homogeneity_is_that_of_tokens_with_positions_image_by_image():
    model, features = awake(build("vit_s16_gated_srp")), rows(images(2))
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[:2]))
    model(features, grids(2))
    tokens, graph = seen[0]
    torch.testing.assert_close(
        tokens, torch.cat([model.cls_token.expand(2, -1, -1), model.in_proj(features)], 1) + model.pos_embed
    )
    unit = F.normalize(tokens.detach()[:, 1:], dim=-1).unflatten(1, (SIDE, SIDE))  # (B, 4, 4, C)
    found = graph.homogeneity.view(2, 17)
    assert float(found[:, 0].abs().max()) == 0  # CLS
    for b in range(2):
        for y in range(SIDE):
            for x in range(SIDE):
                around = [
                    float(unit[b, y, x] @ unit[b, j, i])
                    for j in range(max(0, y - 1), min(SIDE, y + 2))
                    for i in range(max(0, x - 1), min(SIDE, x + 2))
                    if (j, i) != (y, x)
                ]
                assert float(found[b, 1 + y * SIDE + x]) == pytest.approx(sum(around) / len(around), abs=1e-5)


def test_the_graphs_own_homogeneity_does_not_matter():
    model, features = awake(build("vit_s16_gated_srp")), rows(images(1))
    plain = PatchGraph.from_grid(SIDE, SIDE)
    assert torch.equal(model(features, plain), model(features, plain.with_features(features[0])))


def test_the_papers_sizes_are_the_default():
    model = build_model("vit_s16", in_dim=768, num_outputs=38)
    block = 2 * 768 + (384 * 1152 + 1152) + (384 * 384 + 384) + (384 * 1536 + 1536) + (1536 * 384 + 384)
    expected = (768 * 384 + 384) + 384 + 290 * 384 + 12 * block + 768 + (384 * 38 + 38)
    assert sum(p.numel() for p in model.parameters()) == expected == 21_716_006
    assert len(model.blocks) == 12 and model.blocks[0].attn.num_heads == 6 and model.drop_path == 0.1
    with_gates = build_model("vit_s16_gated_srp", in_dim=768, num_outputs=38, hidden_dim=128)
    assert sum(p.numel() for p in with_gates.parameters()) == expected + 11 * 671
    with torch.no_grad():
        logits = model.eval()(torch.zeros(1, 289, 768), PatchGraph.from_grid(17, 17))
    assert logits.shape == (1, 38)


def test_the_patch_embedding_starts_as_pytorchs_convolution_and_all_arms_share_it():
    layer = build_model("vit_s16", in_dim=768, num_outputs=38, depth=1, seed=5).in_proj
    limit = 768**-0.5  # of nn.Conv2d(3, 384, 16): fan-in 3 * 16 * 16
    for values in (layer.weight, layer.bias):
        assert float(values.detach().abs().max()) <= limit
        assert float(values.detach().std()) == pytest.approx(limit / 3**0.5, rel=0.1)  # uniform
    assert float(layer.weight.detach().abs().max()) > 0.999 * limit
    starts = [build(arm, seed=5).in_proj.state_dict() for arm in IMAGE_ARMS]
    assert all(torch.equal(start[name], starts[0][name]) for start in starts for name in ("weight", "bias"))
    assert not torch.equal(build("vit_s16", seed=6).in_proj.weight, starts[0]["weight"])
    slides = build_model("vit4", in_dim=8, num_outputs=3, dim=24, num_heads=4, seed=5)
    assert not slides.in_proj.bias.any()  # of slides: truncated normal and zero, as before


def test_xsa_and_diff_are_built_as_on_slides():
    xsa, diff = build("vit_s16_xsa"), build("vit_s16_diff")
    assert all(type(block.correction.direction).__name__ == "OwnValue" for block in xsa.blocks)
    assert [round(block.attn.lambda_init, 4) for block in diff.blocks] == [0.2, 0.3555, 0.4707]


def test_trace_sees_the_gates_of_an_image():
    model = awake(build("vit_s16_gated_srp"))
    with trace(model) as seen, torch.no_grad():
        model(rows(images(1)), PatchGraph.from_grid(SIDE, SIDE))
    assert [layer.beta is not None for layer in seen] == [True, True, False]
    assert seen[0].beta.shape == (4, 16) and float(seen[0].beta.abs().max()) > 0
    torch.testing.assert_close(seen[0].cls_attention.sum(-1) < 1, torch.ones(4, dtype=torch.bool))


def test_a_model_file_brings_the_positions_back(tmp_path):
    model, features = awake(build("vit_s16_gated_srp")), rows(images(2))
    save_model(model, tmp_path / "model.safetensors")
    assert torch.equal(load_model(tmp_path / "model.safetensors")(features, grids(2)), model(features, grids(2)))


def test_checkpointing_gives_the_same_gradients():
    found = []
    for checkpointing in (False, True):
        model = awake(build("vit_s16_gated_srp")).train()
        model.checkpointing = checkpointing
        keep = model.draw_keep(2, generator=torch.Generator().manual_seed(1))
        model(rows(images(2)), grids(2), keep).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_another_number_of_patches_is_refused_with_the_reason():
    with pytest.raises(UserError, match="9 patches, but the model has learned positions for 16"):
        build("vit_s16")(torch.zeros(1, 9, 192), PatchGraph.from_grid(3, 3))
    with pytest.raises(UserError, match="expected \\(B, N, 192\\)"):
        build("vit_s16")(torch.zeros(1, 16, 10), PatchGraph.from_grid(4, 4))
