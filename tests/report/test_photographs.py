"""Photographs are cut on one lattice and measured as slides are."""

import numpy as np
import pytest
import torch
from PIL import Image

from gated_srp.errors import UserError
from gated_srp.report.photographs import cut, find_photographs, measure_photographs
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
    tiles, corners = cut(tmp_path / "a.png", 32)
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
    (tmp_path / "a.png").write_text("no")
    with pytest.raises(UserError, match="no photograph can be measured"):
        measure_photographs(find_photographs(tmp_path), ENCODER.load(), size=16)
