"""The peers against naive loops of the equations in their docstrings, and as the training loop uses them."""

import math

import pytest
import torch
from reference import gated, homogeneity, neighbour_lists
from torch.nn import functional as F

from gated_srp import PatchGraph, UserError, trace
from gated_srp.models import ARMS, build_model
from gated_srp.models.attention import LocalAttention
from gated_srp.models.patch_gcn import PatchGCN
from gated_srp.models.peers import (
    ABMIL,
    CLAM,
    DSMIL,
    LinearProbe,
    MeanPool,
    PublishedDSMIL,
    TransMIL,
    counter_draws,
    smooth_svm,
    srp_abmil,
)
from gated_srp.models.slide import initialise

PEERS = ["local_attention", *(name for name, arm in ARMS.items() if arm.trunk == "peer")]
SMALL = {"in_dim": 10, "num_outputs": 3, "dim": 24, "num_heads": 4, "num_landmarks": 8, "hidden_dim": 8}


def bag(count: int = 19) -> tuple[torch.Tensor, PatchGraph, torch.Tensor]:
    draw = torch.Generator().manual_seed(count)
    cells = torch.cartesian_prod(torch.arange(7), torch.arange(7))[torch.randperm(49, generator=draw)[:count]]
    features = torch.randn(1, count, 10, generator=draw, dtype=torch.float64)
    return features, PatchGraph.from_coords(cells * 256, features[0], stride=256), cells * 256


def awake(model: torch.nn.Module) -> torch.nn.Module:
    """Random weights everywhere, in double precision."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=draw))
    return model.double().eval().requires_grad_(False)


def softmax(values: list[float]) -> list[float]:
    exps = [math.exp(v - max(values)) for v in values]
    return [e / sum(exps) for e in exps]


def gated_pooling(model: ABMIL, rows: torch.Tensor) -> tuple[torch.Tensor, list[float], list[torch.Tensor]]:
    h = [F.relu(model.in_proj.weight @ x + model.in_proj.bias) for x in rows]
    scores = []
    for hidden in h:
        content = torch.tanh(model.pool.content.weight @ hidden + model.pool.content.bias)
        gate = torch.sigmoid(model.pool.gate.weight @ hidden + model.pool.gate.bias)
        scores.append(float(model.pool.score.weight[0] @ (content * gate) + model.pool.score.bias[0]))
    a = softmax(scores)
    z = sum(weight * hidden for weight, hidden in zip(a, h, strict=True))
    return model.head.weight @ z + model.head.bias, a, h


def test_mean_pooling_and_the_linear_probe_are_the_mean_and_a_line():
    features, graph, _ = bag()
    probe, pool = awake(LinearProbe(10, 3)), awake(MeanPool(10, 3, dim=6))
    mean = sum(features[0]) / 19
    torch.testing.assert_close(probe(features, graph)[0], probe.head.weight @ mean + probe.head.bias)
    hidden = sum(F.relu(pool.in_proj.weight @ x + pool.in_proj.bias) for x in features[0]) / 19
    torch.testing.assert_close(pool(features, graph)[0], pool.head.weight @ hidden + pool.head.bias)


def test_a_slide_embedding_is_a_bag_of_one_row():
    embedding = torch.randn(1, 1, 10, dtype=torch.float64)
    probe = awake(LinearProbe(10, 3))
    graph = PatchGraph.from_coords(torch.zeros(1, 2, dtype=torch.long), stride=1)
    torch.testing.assert_close(probe(embedding, graph)[0], probe.head(embedding[0, 0]))


def test_abmil_is_the_gated_attention_of_its_paper():
    features, graph, _ = bag()
    model = awake(ABMIL(10, 3, dim=8))
    logits, a, _ = gated_pooling(model, features[0])
    with trace(model) as seen:
        torch.testing.assert_close(model(features, graph)[0], logits)
    torch.testing.assert_close(seen[0].cls_attention[0], torch.tensor(a, dtype=torch.float64))
    assert seen[0].beta is None


def test_srp_in_front_of_abmil_corrects_the_features_along_their_neighbours_mean():
    features, graph, coords = bag()
    model = awake(srp_abmil(10, 3, dim=8, delta=1.5, hidden_dim=4))
    lists = neighbour_lists(coords, 256)
    gate = dict(model.correction.coefficient.named_parameters())
    rows = gated(features, features, lists, homogeneity(features[0], lists), gate, 1.5, 8)[0]
    torch.testing.assert_close(model(features, graph)[0], gated_pooling(model, rows)[0], atol=1e-6, rtol=1e-6)


def test_removal_in_front_of_abmil_or_na_leaves_nothing_along_the_neighbours_mean():
    features, graph, coords = bag()
    rows = features[0].clone()
    for number, near in enumerate(neighbour_lists(coords, 256)):
        if near:
            mean = sum(features[0, j] for j in near) / len(near)
            axis = mean / mean.norm()
            rows[number] = features[0, number] - float(features[0, number] @ axis) * axis
    model = awake(build_model("abmil_beta_1", **SMALL))
    torch.testing.assert_close(model(features, graph)[0], gated_pooling(model, rows)[0])
    model, plain = (awake(build_model(arm, **SMALL)) for arm in ("features_beta_1", "na"))
    torch.testing.assert_close(model(features, graph), plain(rows[None], graph), atol=1e-7, rtol=1e-6)
    assert not torch.allclose(model(features, graph), plain(features, graph), atol=1e-3)


def test_a_gate_on_the_features_starts_at_their_removal_where_it_says_so_and_learns_as_one_head_in_front_of_na():
    features, graph, coords = bag()
    for gate, fixed in (("features_gated_srp_from_1", "features_beta_1"), ("srp_abmil_from_1", "abmil_beta_1")):
        start, removed = (build_model(arm, **SMALL).eval() for arm in (gate, fixed))
        assert torch.equal(start(features.float(), graph), removed(features.float(), graph))
    model, plain = (build_model(arm, **{**SMALL, "delta": 1.5}) for arm in ("features_gated_srp", "na"))
    awake(model), plain.load_state_dict(model.state_dict(), strict=False), plain.double().eval()
    lists = neighbour_lists(coords, 256)
    weights = dict(model.correction.coefficient.named_parameters())
    rows = gated(features, features, lists, homogeneity(features[0], lists), weights, 1.5, 8)[0]
    torch.testing.assert_close(model(features, graph), plain(rows[None], graph), atol=1e-7, rtol=1e-6)


def test_srp_in_front_of_abmil_costs_a_gate_of_one_head():
    plain, corrected = (build_model(arm, **SMALL) for arm in ("abmil", "srp_abmil"))
    assert sum(p.numel() for p in corrected.parameters()) - sum(p.numel() for p in plain.parameters()) == 4 * 8 + 9 + 5


def test_dsmil_averages_the_critical_instance_and_the_attention_to_it():
    features, graph, _ = bag()
    model = awake(DSMIL(10, 3, dim=5, query_dim=4))
    queries = [model.query.weight @ x + model.query.bias for x in features[0]]
    values = [model.value.weight @ x + model.value.bias for x in features[0]]
    check_streams(model, features, graph, features[0], queries, values)


def test_dsmil_at_the_authors_sizes_asks_with_two_layers_about_hidden_features():
    features, graph, _ = bag()
    model = awake(PublishedDSMIL(10, 3, dim=5, query_dim=4))
    hidden = [F.relu(model.in_proj.weight @ x + model.in_proj.bias) for x in features[0]]
    first, _, second, _ = model.query
    queries = [torch.tanh(second.weight @ F.relu(first.weight @ h + first.bias) + second.bias) for h in hidden]
    check_streams(model, features, graph, hidden, queries, hidden)
    kernel = model.head.weight.view(3, 3, 5)  # of a convolution that is as wide as the features: it has one place
    maps = torch.randn(1, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(F.conv1d(maps, kernel, model.head.bias)[..., 0], model.head(maps.flatten(1)))


def test_peers_of_the_papers_table_have_the_authors_sizes():
    abmil, dsmil = (build_model(f"{arm}_published", in_dim=1536, num_outputs=4) for arm in ("abmil", "dsmil"))
    hidden = 1536 * 512 + 512
    assert sum(p.numel() for p in abmil.parameters()) == hidden + 2 * (512 * 128 + 128) + 129 + 4 * 512 + 4
    queries = 512 * 128 + 128 + 128 * 128 + 128
    assert sum(p.numel() for p in dsmil.parameters()) == hidden + 4 * 513 + queries + 4 * 4 * 512 + 4


def check_streams(model, features, graph, rows, queries, values):
    scores = [model.instance_head.weight @ x + model.instance_head.bias for x in rows]
    instance, embeddings = [], []
    for k in range(3):
        critical = max(range(19), key=lambda i: float(scores[i][k]))
        instance.append(scores[critical][k])
        weights = softmax([float(q @ queries[critical]) / math.sqrt(4) for q in queries])
        embeddings.append(sum(w * v for w, v in zip(weights, values, strict=True)))
    instance = torch.stack(instance)
    bag_logits = model.head.weight @ torch.cat(embeddings) + model.head.bias
    torch.testing.assert_close(model(features, graph)[0], (instance + bag_logits) / 2)
    target = torch.tensor([2])
    both = F.cross_entropy(instance[None], target) + F.cross_entropy(bag_logits[None], target)
    torch.testing.assert_close(model.training_loss(features, graph, target, loss=F.cross_entropy), both / 2)


def test_peers_with_a_loss_of_their_own_say_which_tasks_they_are_not_for():
    refused = {arm: set(build_model(arm, **SMALL).refuses) for arm in PEERS}
    dsmil = {arm: {"cox"} for arm in PEERS if arm.startswith("dsmil")}  # its critical patch has a loss per bag
    clam = {"clam_sb": {"survival", "multilabel", "cox", "regression"}}  # clusters are of classes
    assert {arm: tasks for arm, tasks in refused.items() if tasks} == clam | dsmil


def test_the_smooth_svm_loss_is_a_smooth_margin():
    scores, target = torch.tensor([[2.0, -1.0], [0.3, 0.9]]), torch.tensor([0, 0])
    by_hand = [math.log(1 + math.exp(1 - 1 - 2)), math.log(1 + math.exp(1 + 0.9 - 0.3))]
    assert float(smooth_svm(scores, target)) == pytest.approx(sum(by_hand) / 2, rel=1e-6)


@pytest.mark.parametrize("label", [0, 2])
def test_clam_adds_the_clustering_of_the_most_and_least_attended_patches(label):
    features, graph, _ = bag()
    model = awake(CLAM(10, 3, dim=8, sampled=4))
    logits, a, h = gated_pooling(model, features[0])
    order = sorted(range(19), key=lambda i: -a[i])

    def svm(head: torch.nn.Linear, row: torch.Tensor, truth: int) -> float:
        s = (head.weight @ row + head.bias).tolist()
        return math.log(sum(math.exp((j != truth) + s[j] - s[truth]) for j in range(2)))

    parts = []
    for number, head in enumerate(model.instance_heads):
        high = [svm(head, h[i], int(number == label)) for i in order[:4]]
        low = [svm(head, h[i], 0) for i in order[-4:]] if number == label else []
        parts.append(sum(high + low) / len(high + low))
    expected = 0.7 * float(F.cross_entropy(logits[None], torch.tensor([label]))) + 0.3 * sum(parts) / 3
    target = torch.tensor([label])
    assert float(model.training_loss(features, graph, target, loss=F.cross_entropy)) == pytest.approx(
        expected, rel=1e-9
    )
    torch.testing.assert_close(model(features, graph)[0], logits)


def test_a_bag_of_one_patch_has_no_clusters():
    model = awake(CLAM(10, 3, dim=8))
    assert float(model.instance_loss(torch.randn(1, 8).double(), torch.zeros(1).double(), torch.tensor(1))) == 0


def naive_layer(layer: torch.nn.Module, x: torch.Tensor, heads: int, marks: int) -> torch.Tensor:
    """The branch of a TransMIL layer for rows x (L, C), head by head, with whole matrices."""
    rows = F.layer_norm(x, x.shape[1:], layer.norm.weight, layer.norm.bias)
    front = -len(x) % marks
    rows = torch.cat([torch.zeros(front, x.shape[1], dtype=x.dtype), rows])
    q, k, v = (rows @ layer.qkv.weight.T).chunk(3, -1)
    width = x.shape[1] // heads
    size = len(rows) // marks
    maps, values = [], []
    for h in range(heads):
        qh, kh, vh = (t[:, h * width : (h + 1) * width] for t in (q, k, v))
        q_m, k_m = (torch.stack([t[i * size : (i + 1) * size].mean(0) for i in range(marks)]) for t in (qh, kh))
        scale = width**-0.5
        maps.append([(a @ b.T * scale).softmax(-1) for a, b in ((qh, k_m), (q_m, k_m), (q_m, kh))])
        values.append(vh)
    largest = max(float(m[1].sum(1).max()) for m in maps) * max(float(m[1].sum(0).max()) for m in maps)
    out = []
    for h, (f, a, b) in enumerate(maps):
        z, eye = a.T / largest, torch.eye(marks, dtype=x.dtype)
        for _ in range(6):
            z = 0.25 * z @ (13 * eye - a @ z @ (15 * eye - a @ z @ (7 * eye - a @ z)))
        y = f @ z @ b @ values[h]
        kernel = layer.residual.weight[h, 0, :, 0]
        for i in range(len(rows)):
            for j in range(33):
                if 0 <= i + j - 16 < len(rows):
                    y[i] = y[i] + kernel[j] * values[h][i + j - 16]
        out.append(y)
    return (torch.cat(out, -1) @ layer.proj.weight.T + layer.proj.bias)[front:]


@pytest.mark.parametrize("count", [19, 25])
def test_transmil_is_the_published_model(count):
    features, graph, _ = bag(count)
    model = awake(TransMIL(10, 3, dim=8, num_heads=2, num_landmarks=4))
    with torch.no_grad():
        x = F.relu(features[0] @ model.in_proj.weight.T + model.in_proj.bias)
        x = torch.cat([model.cls_token[0], x, x[: 25 - count]])
        x = x + naive_layer(model.layers[0], x, 2, 4)
        square = x[1:].T.view(1, 8, 5, 5)
        total = square + model.ppeg.conv7(square) + model.ppeg.conv5(square) + model.ppeg.conv3(square)
        x = torch.cat([x[:1], total[0].flatten(1).T])
        x = x + naive_layer(model.layers[1], x, 2, 4)
        expected = model.head(F.layer_norm(x[0], (8,), model.norm.weight, model.norm.bias))
        torch.testing.assert_close(model(features, graph)[0], expected, atol=2e-5, rtol=2e-5)  # pinv is float32 in ours


def test_transmil_has_the_published_sizes():
    model = build_model("transmil", in_dim=1024, num_outputs=2)
    assert model.in_proj.out_features == 512 and len(model.layers) == 2
    assert [(m.num_heads, m.num_landmarks, tuple(m.residual.kernel_size)) for m in model.layers] == [
        (8, 256, (33, 1))
    ] * 2
    attention = 512 * 1536 + 512 * 512 + 512 + 8 * 33 + 2 * 512
    around = 1024 * 512 + 512 + 512 + (49 + 25 + 9 + 3) * 512 + 2 * 512 + 512 * 2 + 2
    assert sum(p.numel() for p in model.parameters()) == 2 * attention + around  # 2,672,146


def test_local_attention_sees_itself_and_its_neighbours_alone():
    _, graph, coords = bag()
    layer = awake(LocalAttention(8, 2))
    x = torch.randn(1, 22, 8, dtype=torch.float64)  # CLS, 19 patches, 2 rows of padding
    y, v = layer(x, graph.with_isolated(before=1, after=2))
    q, k, _ = (t[0] for t in layer.heads(x, 0, 3))
    lists = [list(range(22)), *([j + 1 for j in found] for found in neighbour_lists(coords, 256)), [], []]
    for i, found in enumerate(lists):
        listed = found if i == 0 else [i, *found]
        for h in range(2):
            weights = softmax([float(q[h, i] @ k[h, j]) / 2 for j in listed])
            expected = sum(w * v[0, h, j] for w, j in zip(weights, listed, strict=True))
            torch.testing.assert_close(y[0, h, i], expected)


def test_local_attention_has_the_same_gradient_with_and_without_recomputation():
    features, graph, _ = bag()
    model = awake(build_model("local_attention", **SMALL))
    leaf = features.clone().requires_grad_()
    with torch.no_grad():
        still = model(features, graph)
    logits = model(leaf, graph)
    torch.testing.assert_close(logits, still)
    logits.square().sum().backward()
    bump = torch.zeros_like(features)
    bump[0, 3, 4] = 1e-6
    with torch.no_grad():
        slope = (model(features + bump, graph).square().sum() - model(features - bump, graph).square().sum()) / 2e-6
    assert float(leaf.grad[0, 3, 4]) == pytest.approx(float(slope), rel=1e-3)


def test_patch_gcn_gathers_messages_of_its_neighbours_channel_by_channel():
    features, graph, coords = bag()
    model = awake(PatchGCN(10, 3, dim=4))
    lists = neighbour_lists(coords, 256)

    def convolved(layer, h):
        mixed = h.clone()
        for i, found in enumerate(lists):
            for c in range(4 if found else 0):
                m = [max(0.0, float(h[j, c])) + 1e-7 for j in found]
                weights = softmax([float(layer.temperature.value) * one for one in m])
                mixed[i, c] += sum(w * one for w, one in zip(weights, m, strict=True))
        hidden = mixed @ layer.first.weight.T + layer.first.bias
        hidden = F.relu(F.layer_norm(hidden, (8,), layer.norm.weight, layer.norm.bias))
        return hidden @ layer.second.weight.T + layer.second.bias

    h = [F.relu(features[0] @ model.in_proj.weight.T + model.in_proj.bias)]
    h.append(convolved(model.layers[0], h[0]))
    for layer, norm in zip(model.layers[1:], model.norms, strict=True):
        h.append(h[-1] + F.relu(F.layer_norm(convolved(layer, h[-1]), (4,), norm.weight, norm.bias)))
    p = F.relu(model.joint(torch.cat(h, -1)))
    a = softmax(model.pool(p[None])[0].tolist())
    z = sum(weight * row for weight, row in zip(a, p, strict=True))
    torch.testing.assert_close(model(features, graph)[0], model.head(F.relu(model.last(z))))
    assert build_model("patch_gcn", **SMALL).layers[0].temperature.value == 1


@pytest.mark.parametrize("arm", PEERS)
def test_a_peer_refuses_features_of_another_encoder_and_a_graph_of_other_rows(arm):
    _, graph, _ = bag()
    model = build_model(arm, **SMALL)
    with pytest.raises(UserError, match="another encoder"):
        model(torch.randn(1, 19, 11), graph)
    with pytest.raises(UserError, match="graph"):
        model(torch.randn(1, 18, 10), graph)


def test_dropout_of_a_peer_changes_with_its_seed_and_is_off_in_evaluation():
    features, graph, _ = bag()
    model = awake(build_model("transmil", **SMALL))
    model.train()
    one, two = (model(features, graph, torch.tensor([seed])) for seed in (1, 2))
    assert not torch.equal(one, two)
    model.eval()
    assert torch.equal(model(features, graph, torch.tensor([1])), model(features, graph))


def test_dropout_of_a_peer_drops_its_rate_and_keeps_the_mean():
    model = ABMIL(10, 3, dropout=0.25).train()
    kept = model.drop(torch.ones(300, 400), torch.tensor([2**61 + 7]))
    assert kept.unique().tolist() == pytest.approx([0, 4 / 3])
    share = (kept == 0).double()
    assert float(share.mean()) == pytest.approx(0.25, abs=4 * 0.433 / math.sqrt(120_000))
    assert share.mean(0).sub(0.25).abs().max() < 5 * 0.433 / math.sqrt(300)  # no column, no row is favoured
    assert share.mean(1).sub(0.25).abs().max() < 5 * 0.433 / math.sqrt(400)
    again = model.drop(torch.ones(300, 400), torch.tensor([2**61 + 7]))
    assert torch.equal(again, kept)


def test_draws_of_other_seeds_and_places_have_nothing_in_common():
    pairs = [(1, 0), (1, 1), (2, 0), (2**61, 0), (2**61, 1)]
    draws = [counter_draws(40_000, torch.tensor([seed]), place).double() for seed, place in pairs]
    common = torch.corrcoef(torch.stack([*draws, draws[0].roll(1), draws[0].roll(400)]))
    assert (common - torch.eye(7)).abs().max() < 5 / math.sqrt(40_000)
    assert all(float(d.min()) >= 0 and float(d.max()) < 2**31 and len(d.unique()) > 39_990 for d in draws)


def test_dropout_of_a_peer_never_asks_the_device_for_a_number():
    """A meta tensor has no numbers: whatever waits for one fails on it."""
    model = ABMIL(10, 3, dropout=0.25).train()
    x, keep = torch.empty(2, 3, device="meta"), model.draw_keep(1, device="meta")
    assert model.drop(x, keep, 1).device.type == "meta"
    with pytest.raises(RuntimeError):
        int(keep)


def test_peers_take_bags_of_one_length_alone():
    _, graph, _ = bag()
    longer = PatchGraph.from_grid(4, 5)
    batch = PatchGraph.batch([graph, longer])
    with pytest.raises(UserError, match="lengths"):
        build_model("abmil", **SMALL)(torch.randn(2, 20, 10), batch)


def test_initialise_touches_every_parameter():
    for arm in PEERS:
        model = build_model(arm, **SMALL)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(7.0)
        initialise(model, 0)
        assert all(not (p == 7.0).all() for p in model.parameters()), arm


def test_the_peers_are_in_the_one_table():
    assert set(PEERS) <= set(ARMS)
