"""Images as bags: geometry, colours, what is drawn, and files that are no good."""

import colorsys
from pathlib import Path

import numpy as np
import pytest
import torch
from factories import peak
from PIL import Image
from torch.nn import functional as F

from gated_srp.data.bag import BagError
from gated_srp.data.files.images import (
    ImageGrid,
    augmented,
    find_images,
    image_header,
    patch_rows,
    read_image,
    read_pixels,
    turned,
    with_contrast,
    with_hue,
)
from gated_srp.data.prepared import Preparation, prepare
from gated_srp.errors import UserError
from gated_srp.reports.page.contents import small_png
from gated_srp.slides.tiles import cut_photograph
from gated_srp.srp import PatchGraph
from gated_srp.streams import stream

GRID = ImageGrid(size=32, patch=8)


def noise(seed: int = 0, size: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)


def write(path: Path, pixels: np.ndarray) -> Path:
    Image.fromarray(pixels).save(path)
    return path


def test_adp_gives_17_by_17_patches_of_768_numbers():
    assert (ImageGrid().num_patches, ImageGrid().width) == (289, 768)
    assert ImageGrid().corners[[0, 1, 17]].tolist() == [[0, 0], [16, 0], [0, 16]]


def test_the_rows_are_what_a_convolution_with_that_stride_reads():
    pixels, kernel = torch.randn(3, 32, 32), torch.randn(5, 3, 8, 8)
    expected = F.conv2d(pixels[None], kernel, stride=8).flatten(2)[0].T  # (N, 5)
    torch.testing.assert_close(patch_rows(pixels, 8) @ kernel.flatten(1).T, expected, atol=1e-4, rtol=1e-4)


def test_pixels_are_normalised_with_imagenets_mean_and_spread(tmp_path):
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[8:16, 24:] = (255, 128, 0)  # the second row's last patch
    rows = read_image(write(tmp_path / "a.png", pixels), GRID).features
    black = [-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225]
    orange = [(1 - 0.485) / 0.229, (128 / 255 - 0.456) / 0.224, -0.406 / 0.225]
    torch.testing.assert_close(rows[6].view(3, 64).mean(1), torch.tensor(black))
    torch.testing.assert_close(rows[7].view(3, 64).mean(1), torch.tensor(orange))


def test_a_prepared_image_has_the_grid_as_its_graph(tmp_path):
    bag = prepare(write(tmp_path / "a.png", noise()), Preparation(images=GRID))
    grid = PatchGraph.from_grid(4, 4)
    assert torch.equal(bag.graph.neighbours, grid.neighbours) and torch.equal(bag.graph.offsets, grid.offsets)
    assert (bag.num_patches, bag.stride, bag.unit, bag.encoder, bag.warnings) == (16, 8.0, "px", None, ())
    assert image_header(bag.path, GRID).shape == (16, 192)


def test_a_chunk_of_a_png_that_claims_gigabytes_gets_no_memory(tmp_path):
    path = tmp_path / "s.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)).save(path)
    whole, expected = bytearray(path.read_bytes()), read_image(path, GRID, None).features
    at = whole.index(b"IDAT") - 4
    whole[at : at + 4] = (0xE0000000).to_bytes(4, "big")
    path.write_bytes(whole)
    before = peak()
    assert read_image(path, GRID, None).features.equal(expected), "all of its pixels are there"
    cut_photograph(path, 8)
    small_png(path)
    assert peak() - before < 2**31


def test_grey_and_palette_and_transparent_images_are_read_as_rgb(tmp_path):
    for mode in ("L", "P", "RGBA"):
        Image.fromarray(noise()).convert(mode).save(tmp_path / "a.png")
        with Image.open(tmp_path / "a.png") as image:
            expected = np.asarray(image.convert("RGB"))
        assert np.array_equal(read_pixels(tmp_path / "a.png", GRID).permute(1, 2, 0).numpy(), expected)


def test_the_eight_symmetries_differ_and_each_is_a_permutation_of_the_pixels():
    pixels = torch.arange(3 * 4 * 4).view(3, 4, 4)
    seen = [turned(pixels, number) for number in range(8)]
    assert len({tuple(one.flatten().tolist()) for one in seen}) == 8
    flips = {one.flip(axes) for one in (pixels,) for axes in ((1,), (2,), (1, 2))}
    assert all(any(torch.equal(flip, one) for one in seen) for flip in flips)
    for one in seen:
        assert torch.equal(one.flatten(1).sort().values, pixels.flatten(1))
        square = one.sub(one[0, 0, 0] - pixels[0, 0, 0])  # colours stay together
        assert torch.equal(square[1] - square[0], pixels[1] - pixels[0])


def byte_noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_every_symmetry_is_drawn_about_equally_often(monkeypatch):
    monkeypatch.setattr("gated_srp.data.files.images._JITTER", 0.0)
    monkeypatch.setattr("gated_srp.data.files.images._HUE", 0.0)
    pixels = byte_noise(3, 4, 4)
    known = [turned(pixels, number).int() for number in range(8)]
    counts = [0] * 8
    for number in range(800):
        found = augmented(pixels, stream(0, f"{number}")).int()
        apart = [int((found - one).abs().max()) for one in known]  # HSV in bytes rounds a little
        assert sorted(apart)[0] <= 8 < sorted(apart)[1]
        counts[apart.index(min(apart))] += 1
    assert sum(counts) == 800 and min(counts) > 60 and max(counts) < 140


def test_what_is_drawn_depends_on_the_stream_alone():
    pixels = byte_noise(3, 16, 16)
    torch.manual_seed(5)
    before = torch.rand(2)
    torch.manual_seed(5)
    first = augmented(pixels, stream(42, "augment/0/a"))
    assert torch.equal(torch.rand(2), before)  # the global stream was not touched
    assert torch.equal(augmented(pixels, stream(42, "augment/0/a")), first)
    for seed, name in ((43, "augment/0/a"), (42, "augment/1/a"), (42, "augment/0/b")):
        assert not torch.equal(augmented(pixels, stream(seed, name)), first)


def test_the_number_of_threads_changes_no_bit():
    pixels = byte_noise(3, 272, 272)
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append([augmented(pixels, stream(1, str(number))) for number in range(4)])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_jitter_acts_on_bytes_as_in_the_release_and_is_mild(tmp_path):
    pixels = torch.full((3, 4, 4), 128, dtype=torch.uint8)
    values = torch.stack([augmented(pixels, stream(0, str(number))) for number in range(200)])
    assert values.dtype == torch.uint8
    assert 114 <= int(values.min()) <= 117 and 139 <= int(values.max()) <= 141  # of a grey only brightness moves
    path = write(tmp_path / "a.png", noise())
    rows = read_image(path, GRID, stream(0, "1")).features.view(4, 4, 3, 8, 8).permute(2, 0, 3, 1, 4).reshape(3, 32, 32)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    levels = (rows * std + mean) * 255
    torch.testing.assert_close(levels, levels.round(), atol=1e-3, rtol=0)  # whole numbers, though jittered
    assert torch.equal(levels.round().byte(), augmented(read_pixels(path, GRID), stream(0, "1")))


def naive_blend(pixels: np.ndarray, factor: float, kind: int) -> np.ndarray:
    """Brightness, contrast, saturation of (S, S, 3) bytes: away from black, the mean grey or each pixel's grey, cut to bytes."""
    red, green, blue = (pixels[..., colour].astype(np.int64) for colour in range(3))
    grey = (19595 * red + 38470 * green + 7471 * blue + 32768) // 65536
    other = (0, int(grey.mean() + 0.5), grey[..., None])[kind]
    return np.clip(other + factor * (pixels.astype(np.float64) - other), 0, 255).astype(np.uint8)


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("factor", [0.9, 0.97, 1.0, 1.1])
def test_brightness_contrast_and_saturation_are_blends_of_bytes(kind, factor):
    pixels = noise()
    found = np.asarray(with_contrast(Image.fromarray(pixels), ("black", "mean", "grey")[kind], factor))
    assert np.abs(found.astype(int) - naive_blend(pixels, factor, kind)).max() <= 1


@pytest.mark.parametrize("shift", [-0.05, 0.0, 0.03, 0.4])
def test_hue_agrees_with_the_standard_librarys_hsv(shift):
    pixels = byte_noise(6, 5, 3, seed=3).numpy()
    pixels[0, 0] = 180  # grey
    pixels[1, 1] = (128, 128, 25)  # two largest
    found = np.asarray(with_hue(Image.fromarray(pixels), shift)) / 255
    for y in range(6):
        for x in range(5):
            hue, saturation, value = colorsys.rgb_to_hsv(*(pixels[y, x] / 255).tolist())
            expected = colorsys.hsv_to_rgb((hue + shift) % 1.0, saturation, value)
            np.testing.assert_allclose(found[y, x], expected, atol=0.04)  # hue and saturation are bytes, too


@pytest.mark.parametrize("shift", [0.05, -0.05, 0.031, 0.0])
def test_hue_moves_by_whole_bytes_and_wraps(shift):
    """As on 8-bit images: the shift is cut to a byte of 255 to the circle, and bytes wrap."""
    image = Image.fromarray(byte_noise(9, 8, 3, seed=5).numpy())
    hsv = np.array(image.convert("HSV"))
    hsv[..., 0] += np.array(int(shift * 255)).astype(np.uint8)
    expected = Image.fromarray(hsv, "HSV").convert("RGB")
    assert np.array_equal(np.asarray(with_hue(image, shift)), np.asarray(expected))


@pytest.mark.parametrize(
    ("content", "kind", "said"),
    [
        (b"", "truncated", "cut short, damaged or no image"),
        (b"no image at all", "truncated", "cut short, damaged or no image"),
        ("cut", "truncated", "cut short, damaged or no image"),
        ("flipped", "truncated", "cut short, damaged or no image"),
        ("small", "wrong_size", "16 x 16 pixels, expected 32 x 32. .*images.size"),
        ("deep", "wrong_dtype", "expected 8 bits per colour"),
        (None, "missing", "no such image"),
    ],
)
def test_a_bad_image_is_refused_with_its_name_and_a_cure(tmp_path, content, kind, said):
    path = tmp_path / "bad.png"
    whole = write(tmp_path / "good.png", noise()).read_bytes()
    if content == "small":
        write(path, noise(size=16))
    elif content == "deep":
        Image.fromarray(np.zeros((32, 32), np.uint16)).save(path)
    elif content is not None:
        broken = bytearray(whole)
        broken[len(whole) // 2] ^= 255
        path.write_bytes({"cut": whole[: len(whole) // 2], "flipped": bytes(broken)}.get(content, content))
    with pytest.raises(BagError, match=rf"bad\.png: .*{said}") as caught:
        read_image(path, GRID)
    assert caught.value.kind == kind


def test_a_folder_without_images_is_refused(tmp_path):
    with pytest.raises(UserError, match="no image"):
        find_images(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        find_images(tmp_path / "nowhere")
    (tmp_path / "below").mkdir()
    kept = write(tmp_path / "below" / "a.PNG", noise())
    (tmp_path / ".hidden.png").write_bytes(b"")
    (tmp_path / "b.txt").write_text("")
    assert find_images(tmp_path) == [kept]
