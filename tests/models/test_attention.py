"""Each attention against its definition with every matrix written out."""

import pytest
import torch
from gated_srp_bench import textbook

from gated_srp import PatchGraph, UserError
from gated_srp.models.attention import DenseAttention
from gated_srp.models.nystrom import (
    DifferentialAttention,
    DifferentialNystrom,
    NystromAttention,
    landmarks,
    pinv,
    segment_means,
)

GRAPH = PatchGraph.from_grid(1, 1)


def rows(count: int, dim: int = 24, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, count, dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [1, 3, 5, 16, 17, 33, 100])
def test_nystrom_equals_the_textbook_with_fewer_and_more_rows_than_landmarks(count):
    ours, plain = NystromAttention(24, 4, num_landmarks=8), textbook.Nystrom(24, 4, 8)
    plain.load_state_dict(ours.state_dict())
    x = rows(count)
    y, v = ours(x, GRAPH)
    expected_y, expected_v = plain(x[0])
    torch.testing.assert_close(y[0], expected_y, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(v[0], expected_v)


def test_nystrom_without_gradients_works_through_chunks_of_rows_and_gives_the_same():
    attention = NystromAttention(24, 4, num_landmarks=8)
    x = torch.cat([rows(2500), rows(2500, seed=1)])
    graph = PatchGraph.batch([PatchGraph.from_grid(50, 50)] * 2)
    expected = attention(x, graph)
    with torch.no_grad():
        for ours, plain in zip(attention(x, graph), expected, strict=True):
            torch.testing.assert_close(ours, plain.detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("build", [DenseAttention, NystromAttention, DifferentialAttention, DifferentialNystrom])
def test_the_first_row_alone_equals_the_first_of_all_rows(build):
    attention = build(24, 4)
    x = rows(70)
    for alone, full in zip(attention.first_row(x, GRAPH), attention(x, GRAPH), strict=True):
        torch.testing.assert_close(alone, full[:, :, :1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("build", [DenseAttention, NystromAttention])
def test_the_map_of_cls_applied_to_the_values_is_its_output(build):
    attention = build(24, 4)
    x = rows(70)
    y, v = attention(x, GRAPH)
    torch.testing.assert_close((attention.cls_map(x, GRAPH)[:, :, None] @ v), y[:, :, :1], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("build", [DifferentialAttention, DifferentialNystrom])
def test_the_signed_map_of_diff_applied_to_the_values_is_its_output_before_the_norm(build):
    attention = build(24, 4, depth=2)
    x = rows(70)
    y, v = attention(x, GRAPH)
    mixed = attention.cls_map(x, GRAPH)[:, :, None] @ v
    expected = attention.subln(mixed) * (1 - attention.lambda_init)
    torch.testing.assert_close(y[:, :, :1], expected, atol=1e-5, rtol=1e-4)


def test_dense_differential_attention_is_two_softmaxes_with_one_value():
    attention = DifferentialAttention(24, 4, depth=1)
    torch.nn.init.normal_(attention.lambda_q1)
    x = rows(9)[0]
    lam = (
        (attention.lambda_q1 @ attention.lambda_k1).exp()
        - (attention.lambda_q2 @ attention.lambda_k2).exp()
        + attention.lambda_init
    )
    q, k = (layer(x).view(9, 4, 6) for layer in (attention.q_proj, attention.k_proj))
    v = attention.v_proj(x).view(9, 2, 12)
    y, _ = attention(x[None], GRAPH)
    for h in range(2):
        a1, a2 = (torch.softmax(q[:, 2 * h + i] @ k[:, 2 * h + i].t() / 6**0.5, -1) for i in (0, 1))
        mixed = (a1 - lam * a2) @ v[:, h]
        normed = mixed / (mixed.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 - attention.lambda_init)
        torch.testing.assert_close(y[0, h], normed, atol=1e-5, rtol=1e-4)


def test_segments_are_counted_from_the_start_and_the_last_is_shorter():
    x = torch.arange(7.0).view(1, 7, 1)
    assert segment_means(x, 3).flatten().tolist() == [1.0, 4.0, 6.0]
    assert segment_means(x, 10).flatten().tolist() == list(range(7))


def test_a_landmark_without_rows_is_zero_and_not_the_bias():
    marks = landmarks(torch.ones(1, 2, 3), torch.ones(4, 3), torch.full((4,), 5.0), 3)
    assert marks[0].tolist() == [[8.0] * 4, [8.0] * 4, [0.0] * 4]


def test_pinv_inverts_well_conditioned_matrices_and_scales_each_bag_by_itself():
    a = torch.softmax(4 * torch.eye(5) + torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0)), -1)
    torch.testing.assert_close(pinv(a) @ a, torch.eye(5).expand(2, 3, 5, 5), atol=1e-3, rtol=0)
    torch.testing.assert_close(pinv(a)[:1], pinv(a[:1]))
    assert pinv(a.double()).dtype == torch.float32


def test_pinv_stays_float32_under_autocast():
    attention = NystromAttention(24, 4, num_landmarks=8)
    x = rows(50)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = attention(x, GRAPH)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), attention(x, GRAPH)[0], atol=0.05, rtol=0.05)


def test_unequal_lengths_are_refused_by_nystrom():
    graph = PatchGraph.batch([PatchGraph.from_grid(1, 2), PatchGraph.from_grid(2, 2)])
    with pytest.raises(UserError, match=r"one bag per batch.*\(2, 4\)"):
        NystromAttention(24, 4)(rows(4).expand(2, 4, 24), graph)


def test_heads_must_divide_the_width():
    with pytest.raises(UserError, match="dim 25 is not a multiple of num_heads 4"):
        DenseAttention(25, 4)
