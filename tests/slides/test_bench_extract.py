"""The benchmark's slide is one that extraction takes; its figures are patches a second. Nothing here asserts a time."""

import numpy as np
import pytest
from gated_srp_bench.extract import Speed, measure_extraction, write_slide

from gated_srp.errors import UserError
from gated_srp.slides.reader import SlideImage


def test_the_generated_slide_is_tissue_at_20x_with_two_levels_that_agree(tmp_path):
    with SlideImage(write_slide(tmp_path / "s.tif", 700)) as slide:
        assert (slide.info.size, slide.info.downsamples, slide.info.magnification) == ((700, 700), (1.0, 4.0), 20.0)
        large = slide.read(256, 256, level=0, size=(256, 256)).astype(int)
        small = slide.read(256, 256, level=1, size=(64, 64)).astype(int)
    assert np.abs(large[::4, ::4] - small).mean() < 12  # the same places, JPEG apart
    assert (large.max(-1) - large.min(-1)).mean() > 40


def test_every_patch_is_extracted_and_the_share_is_the_median_of_the_turns():
    found = measure_extraction("images:mean_colour", side=28, workers=0)
    assert found.patches == 784
    assert len(found.turns) == 1 and min(found.extraction, found.alone, found.share) > 0
    speed = Speed("x", 600, ((9.0, 10.0), (1.0, 2.0), (4.0, 5.0)))  # the machine was slow twice
    assert (speed.extraction, speed.alone, speed.share) == (4.0, 5.0, 0.8)
    with pytest.raises(UserError, match="too few"):
        measure_extraction("images:mean_colour", side=20)
