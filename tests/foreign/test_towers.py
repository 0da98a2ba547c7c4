"""Models of images and text (CLIP, CoCa, CONCH) and image models with something in front of their patches.

open_clip and timm are not here, so small classes stand in for theirs: the same submodules under the same names.
"""

import pytest
import torch
from foreign_models import wake
from torch import nn

from gated_srp import PatchGraph, UserError, attach
from gated_srp.foreign import handle_of

WIDTH, HEADS = 16, 2


class ResidualAttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q = self.ln_1(x)
        x = x + self.attn(q, q, q, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(ResidualAttentionBlock() for _ in range(layers))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.resblocks:
            x = block(x, mask)
        return x


class AttentionalPooler(nn.Module):
    def __init__(self, context: int = WIDTH, queries: int = 3) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(queries, WIDTH))
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, kdim=context, vdim=context, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(self.query.expand(len(x), -1, -1), x, x, need_weights=False)[0]


class VisionTransformer(nn.Module):
    """open_clip's image tower: patches, CLS, blocks, perhaps attention pooling (CoCa)."""

    def __init__(self, pooled: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, 8, 8, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(WIDTH))
        self.transformer = Transformer()
        self.attn_pool = AttentionalPooler() if pooled else None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.conv1(images).flatten(2).transpose(1, 2)
        x = self.transformer(torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1))
        return self.attn_pool(x).mean(1) if self.attn_pool is not None else x[:, 0]


class TextTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token_embedding, self.transformer = nn.Embedding(20, WIDTH), Transformer(1)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.transformer(self.token_embedding(text))[:, -1]


class CLIP(nn.Module):
    """open_clip's CLIP: the text half lies in the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = VisionTransformer()
        self.transformer, self.token_embedding = Transformer(1), nn.Embedding(20, WIDTH)

    def encode_image(self, images: torch.Tensor) -> torch.Tensor:
        return self.visual(images)

    def forward(self, images: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.encode_image(images) @ self.transformer(self.token_embedding(text))[:, -1].T


class CoCa(nn.Module):
    """The text half in submodules of its own, attention pooling in the image half, a decoder; CONCH is built like it."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text, self.text_decoder = VisionTransformer(pooled=True), TextTransformer(), Transformer(1)

    def forward(self, images: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.visual(images) @ self.text(text).T


IMAGES, TEXT = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(14).view(2, 7)


@pytest.mark.parametrize("make", [CLIP, CoCa])
def test_a_whole_model_of_images_and_text_is_sent_to_its_image_tower(make):
    model = make()
    before = list(model.state_dict())
    with pytest.raises(UserError, match=r"images and text.*attach\(model\.visual, grid=\(height, width\)"):
        attach(model, last=True)
    assert list(model.state_dict()) == before


def test_a_wrapped_model_of_images_and_text_is_told_the_whole_path():
    wrapped = nn.ModuleDict({"backbone": CLIP()})
    with pytest.raises(UserError, match=r"attach\(model\.backbone\.visual, "):
        attach(wrapped, last=True)


def test_the_image_tower_of_clip_is_corrected_and_text_stays():
    model = CLIP().eval()
    plain = model(IMAGES, TEXT)
    handle = attach(model.visual, grid=(4, 4), last=False)
    assert list(handle.gates()) == ["transformer.resblocks.0.attn"]
    assert torch.equal(model(IMAGES, TEXT), plain)
    wake(handle)
    assert not torch.allclose(model(IMAGES, TEXT), plain, atol=1e-3)
    assert handle_of(model.visual)._neighbourhood.front == 1


def test_attention_pooling_is_refused_and_the_blocks_are_named():
    model = CoCa()
    with pytest.raises(UserError, match=r"attn_pool\.attn.*queries of its own.*attach\(model\.transformer, "):
        attach(model.visual, grid=(4, 4), last=True)
    plain = model.eval()(IMAGES, TEXT)
    handle = attach(model.visual.transformer, grid=(4, 4), last=True)
    assert len(handle.gates()) == 2 and torch.equal(model(IMAGES, TEXT), plain)
    wake(handle)
    assert not torch.allclose(model(IMAGES, TEXT), plain, atol=1e-3)


def test_a_pooling_of_other_key_widths_is_named_as_pooling_too():
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer, self.attn_pool = Transformer(), AttentionalPooler(context=8)

    with pytest.raises(UserError, match=r"queries of its own.*attach\(model\.transformer, "):
        attach(Tower(), last=True)


def test_decoders_are_refused_when_attaching_and_the_encoder_is_named():
    model = nn.Transformer(WIDTH, HEADS, 2, 2, 16, batch_first=True)
    with pytest.raises(UserError, match=r"decoder.*attach\(model\.encoder, "):
        attach(model, last=True)
    assert len(attach(model.encoder, last=True).gates()) == 2


def test_layers_beside_each_other_without_a_list_are_still_found():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer1, self.layer2 = ResidualAttentionBlock(), ResidualAttentionBlock()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer2(self.layer1(x))

    model = Pair()
    handle = attach(model, last=True)
    handle.set_graph(PatchGraph.from_grid(3, 4))
    model(torch.randn(1, 13, WIDTH))
    assert list(handle.gates()) == ["layer1.attn", "layer2.attn"]


class TimmAttention(nn.Module):
    fused_attn = True

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.attn_drop, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Dropout(0.0), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))


class TimmBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = TimmAttention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attn(x)


class HybridEmbed(nn.Module):
    """ViTamin's: convolutions make the map, and there is nothing left to project."""

    img_size, patch_size, feature_ratio, grid_size = (32, 48), (1, 1), (8, 8), (4, 6)

    def __init__(self, stem: nn.Module) -> None:
        super().__init__()
        self.backbone, self.proj = stem, nn.Identity()

    def feat_ratio(self, as_scalar: bool = True) -> object:
        return 8 if as_scalar else self.feature_ratio

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[-2:] == self.img_size, "Input image size does not match the model"
        return self.proj(self.backbone(x)).flatten(2).transpose(1, 2)


def vitamin(stem: nn.Module | None = None) -> nn.Module:
    class VisionTransformer(nn.Module):
        num_prefix_tokens = 0

        def __init__(self) -> None:
            super().__init__()
            default = nn.Sequential(nn.Conv2d(3, 5, 2, 2), nn.GELU(), nn.Conv2d(5, WIDTH, 4, 4))
            self.patch_embed = HybridEmbed(default if stem is None else stem)
            self.blocks = nn.Sequential(TimmBlock(), TimmBlock())
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks(self.patch_embed(x)).mean(1))

    VisionTransformer.__module__ = "timm.models.vision_transformer"
    return VisionTransformer()


def test_a_vitamin_is_corrected():
    model, images = vitamin(), torch.randn(2, 3, 32, 48)
    plain = model(images)
    handle = attach(model)
    assert len(handle.gates()) == 2 and torch.equal(model(images), plain)
    wake(handle)
    assert not torch.allclose(model(images), plain, atol=1e-3)


def test_a_patch_embedding_without_convolutions_says_what_is_missing():
    with pytest.raises(UserError, match=r"patch_embed.*HybridEmbed.*channels"):
        attach(vitamin(nn.Identity()))


def test_a_model_that_cannot_be_called_on_a_blank_image_says_why():
    with pytest.raises(UserError, match=r"blank image \(AssertionError: Input image size.*grid="):
        attach(vitamin(), grid=(5, 5))


def test_the_refusal_of_a_swin_of_timm_names_no_taps():
    class SwinTransformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch_embed, self.layers = HybridEmbed(nn.Identity()), nn.Sequential(TimmBlock())

    SwinTransformer.__module__ = "timm.models.swin_transformer"
    with pytest.raises(UserError, match="windows") as caught:
        attach(SwinTransformer())
    assert "Taps" not in str(caught.value)
