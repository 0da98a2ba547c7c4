"""Tokens after attention are those that enter the residual sum; the figure is written and says what it shows."""

import pytest
import torch
import typer
from factories import make_slide, write_clam
from typer.testing import CliRunner

from gated_srp.cli import data as commands
from gated_srp.data.redundancy import measure
from gated_srp.errors import UserError
from gated_srp.models import build_model, save_model
from gated_srp.reports.redundancy import attention_tokens, draw_redundancy
from gated_srp.srp.graph import PatchGraph

SMALL = {"in_dim": 12, "num_outputs": 2, "dim": 24, "num_heads": 4, "num_landmarks": 4}


def _bag(seed=0):
    slide = make_slide(seed)
    features = torch.from_numpy(slide.features)
    return features, PatchGraph.from_coords(torch.from_numpy(slide.cells), features, stride=1)


def _model(arm):
    model = build_model(arm, **SMALL).eval()
    draw = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "correction" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, generator=draw)
    return model


@pytest.mark.parametrize("arm", ["na", "gated_srp", "xsa", "diff", "vit4_gated_srp"])
def test_the_tokens_are_what_the_layer_adds_to_the_residual_stream(arm):
    model, (features, graph) = _model(arm), _bag()
    block, seen = model.blocks[1], {}
    # With an MLP that gives zero, what the block adds to its input is the attention's contribution alone.
    torch.nn.init.zeros_(block.mlp.fc2.weight)
    torch.nn.init.zeros_(block.mlp.fc2.bias)
    before = block.register_forward_pre_hook(lambda m, args: seen.update(before=args[0].clone()))
    after = block.register_forward_hook(lambda m, args, out: seen.update(after=out.clone()))
    tokens = attention_tokens(model, features, graph, 2)
    before.remove()
    after.remove()
    added = (seen["after"] - seen["before"])[0, 1 : 1 + len(features)]
    corrected = arm not in ("na", "diff")
    assert list(tokens) == (["layer 2, before correction", "layer 2, corrected"] if corrected else ["layer 2"])
    assert torch.allclose(list(tokens.values())[-1], added, atol=1e-5)
    if corrected:
        assert not torch.allclose(tokens["layer 2, before correction"], added, atol=1e-3)


def test_no_hook_stays_behind():
    model = _model("na")
    attention_tokens(model, *_bag(), 1)
    assert not model.blocks[0].attn._forward_hooks


@pytest.mark.parametrize("layer", [0, 4, 9])
def test_a_layer_without_tokens_is_refused(layer):
    with pytest.raises(UserError, match="1 to 3"):
        attention_tokens(_model("na"), *_bag(), layer)


def test_the_figure_is_written_whole_and_names_what_it_shows(tmp_path):
    slides = []
    for i in range(3):
        features, graph = _bag(i)
        slides.append(measure(f"s{i}", features, graph))
    paths = draw_redundancy(slides, tmp_path / "new" / "r.1", title="my cohort")
    assert [path.name for path in paths] == ["r.1.svg", "r.1.png"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["r.1.png", "r.1.svg"]
    drawn = paths[0].read_text()
    count = sum(len(one.neighbours) for one in slides)
    for text in ("my cohort", f"{count} patches, 3 slides", "random patches (median", "cosine of a patch to the mean"):
        assert text in drawn
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    again = draw_redundancy(slides, tmp_path / "again", title="my cohort")
    assert again[0].read_bytes() == paths[0].read_bytes()


def _run(*arguments):
    app = typer.Typer()
    app.command("redundancy")(commands.redundancy)
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_the_command_measures_a_folder_and_leaves_broken_files_out(tmp_path, caplog):
    for i in range(4):
        write_clam(tmp_path / "feats", f"s{i}", make_slide(i))
    (tmp_path / "feats" / "h5_files" / "s3.h5").write_bytes(b"")
    said = _run(tmp_path / "feats" / "h5_files", "-o", tmp_path / "out")
    assert said.exit_code == 0, said.output
    assert "left out" in caplog.text
    rows = (tmp_path / "out" / "redundancy.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows[1::2]] == ["all slides", "s0", "s1", "s2"]


def test_the_command_measures_tokens_of_a_run_on_a_cohort(tmp_path):
    for i in range(3):
        write_clam(tmp_path / "feats", f"s{i}", make_slide(i))
    (tmp_path / "t.csv").write_text("slide_id,label\ns0,a\ns1,b\ns2,a\n")
    (tmp_path / "c.yaml").write_text("name: mine\nfeatures: feats\ntable: t.csv\ntarget: label\ncap: 30\n")
    save_model(_model("gated_srp"), tmp_path / "model.safetensors")
    said = _run(tmp_path / "c.yaml", "--run", tmp_path, "--layer", "2", "--slides", "2", "-o", tmp_path / "out")
    assert said.exit_code == 0, said.output
    rows = [row.split(",") for row in (tmp_path / "out" / "redundancy.csv").read_text().splitlines()]
    assert {row[0] for row in rows[1:]} == {"all slides", "s0", "s1"}
    assert '"layer 2' in rows[1][1]
    assert int(rows[1][4]) <= 60


def test_a_folder_where_nothing_can_be_measured_is_a_users_error(tmp_path):
    (tmp_path / "s.h5").write_bytes(b"")
    said = _run(tmp_path, "-o", tmp_path / "out")
    assert isinstance(said.exception, UserError)
    assert "0 bytes" in str(said.exception)
    assert not (tmp_path / "out").exists()
