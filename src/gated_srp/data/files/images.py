"""An image as a bag: equal patches on a full lattice, and the pixels of each patch as its features.

Shapes: S side of the image, P side of a patch, N = (S / P)^2 patches, C = 3 * P * P numbers per patch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gated_srp.data.bag import Bag, BagError, BagHeader
from gated_srp.errors import UserError
from gated_srp.files import as_stored

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS = (".png", ".jpg", ".jpeg")
SYMMETRIES = 8  # of a square
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, by colour
_COLOURLESS = ("black", "mean", "grey")  # what brightness, contrast and saturation move an image away from
_JITTER, _HUE = 0.1, 0.05  # brightness, contrast and saturation times 1 +- this; hue +- this share of the circle


@dataclass(frozen=True)
class ImageGrid:
    """Sides of the images and of their patches, in pixels; the defaults are ADP's, a grid of 17 x 17."""

    size: int = 272
    patch: int = 16

    @property
    def num_patches(self) -> int:
        """N, the number of positions that a model learns."""
        return (self.size // self.patch) ** 2

    @property
    def width(self) -> int:
        """C, red, green and blue of every pixel of a patch."""
        return 3 * self.patch**2

    @property
    def corners(self) -> Tensor:
        """(N, 2) x and y of each patch, row by row."""
        steps = torch.arange(0, self.size, self.patch)
        return torch.cartesian_prod(steps, steps).flip(1)


def find_images(folder: str | Path) -> list[Path]:
    """Image files of a folder and those below it, sorted."""
    folder = as_stored(folder)
    if not folder.is_dir():
        cure = f"Expected a folder of images ({', '.join(ENDINGS)})."
        raise UserError("no such folder", where=folder, cure=cure, kind="missing")
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in ENDINGS and not p.name.startswith("."))
    if not found:
        what = f"no image (endings {', '.join(ENDINGS)}) in it"
        raise UserError(what, where=folder, cure="Point at the folder that has them.", kind="missing")
    return found


def image_header(path: str | Path, grid: ImageGrid) -> BagHeader:
    """What is known of an image without decoding it; another size than the grid's is refused."""
    with _opened(Path(path), grid):
        return BagHeader(**_facts(Path(path), grid))


def read_image(path: str | Path, grid: ImageGrid, draws: torch.Generator | None = None) -> Bag:
    """The image's patches, normalised as for ImageNet; with ``draws`` turned and coloured at random first."""
    pixels = read_pixels(Path(path), grid)
    if draws is not None:
        pixels = augmented(pixels, draws)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (_MEAN, _STD))
    return Bag(**_facts(Path(path), grid), features=patch_rows((pixels.float() / 255 - mean) / std, grid.patch))


def read_pixels(path: Path, grid: ImageGrid) -> Tensor:
    """(3, S, S) bytes."""
    with _opened(path, grid) as image:
        pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def patch_rows(pixels: Tensor, patch: int) -> Tensor:
    """(3, S, S) -> (N, C): patches row by row, each in the order of a convolution's kernel (colour, y, x).

    >>> patch_rows(torch.arange(16.0).view(1, 4, 4), 2)[:2].tolist()
    [[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0]]
    """
    cut = pixels.unfold(1, patch, patch).unfold(2, patch, patch)  # (3, S / P, S / P, P, P)
    return cut.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1).contiguous()


# At random -----------------------------------------------------------------------------------------------------------


def augmented(pixels: Tensor, draws: torch.Generator) -> Tensor:
    """(3, S, S) bytes: one of the eight symmetries, and mild colour jitter in random order, on bytes as in the release.

    Flips left to right and top to bottom and turns by 90 degrees, each drawn evenly, make the eight symmetries equally likely.
    """
    from PIL.Image import fromarray

    symmetry = int(torch.randint(SYMMETRIES, (), generator=draws))
    factors = (1 + _JITTER * (2 * torch.rand(3, generator=draws) - 1)).tolist()
    hue = _HUE * (2 * float(torch.rand((), generator=draws)) - 1)
    image = fromarray(turned(pixels, symmetry).permute(1, 2, 0).contiguous().numpy())
    for step in torch.randperm(4, generator=draws).tolist():
        image = with_hue(image, hue) if step == 3 else with_contrast(image, _COLOURLESS[step], factors[step])
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def turned(pixels: Tensor, symmetry: int) -> Tensor:
    """Number 0 to 7 of the symmetries: quarter turns, from 4 on with a flip."""
    quarter = torch.rot90(pixels, symmetry % 4, (-2, -1))
    return quarter.flip(-1) if symmetry >= 4 else quarter


def with_contrast(image: "Image", colourless: str, factor: float) -> "Image":
    """Moved away from (or, with a factor below 1, towards) black, its mean grey or each pixel's grey."""
    from PIL import ImageEnhance

    kinds = {"black": ImageEnhance.Brightness, "mean": ImageEnhance.Contrast, "grey": ImageEnhance.Color}
    return kinds[colourless](image).enhance(factor)


def with_hue(image: "Image", shift: float) -> "Image":
    """Colours turned by a share of the colour circle, their saturation and value kept (HSV)."""
    from PIL.Image import merge

    hue, saturation, value = image.convert("HSV").split()
    turned_hue = hue.point([(level + int(255 * shift)) % 256 for level in range(256)])
    return merge("HSV", (turned_hue, saturation, value)).convert("RGB")


# Files ---------------------------------------------------------------------------------------------------------------


def _facts(path: Path, grid: ImageGrid) -> dict[str, Any]:
    return {
        "path": path,
        "shape": (grid.num_patches, grid.width),
        "dtype": torch.float32,
        "coords": grid.corners,
        "stride": float(grid.patch),
        "stride_source": "patches of the image",
        "unit": "px",
        "encoder": None,
        "patch_size_level0": float(grid.patch),
        "level0_size": (grid.size, grid.size),
    }


@contextmanager
def _opened(path: Path, grid: ImageGrid) -> Iterator["Image"]:
    """An image of the right size and kind, not yet decoded; whatever goes wrong inside leaves as a `BagError`."""
    from PIL import Image

    try:
        # in memory: PIL asks a file for as many bytes as a chunk claims to have
        with Image.open(BytesIO(path.read_bytes())) as image:
            if image.size != (grid.size, grid.size):
                found = f"{image.width} x {image.height} pixels, expected {grid.size} x {grid.size}"
                cure = "Resize or crop it, or set images.size to the size of all images."
                raise BagError(found, where=path, cure=cure, kind="wrong_size")
            if image.mode.startswith(("I", "F")):
                found = f"mode {image.mode}, expected 8 bits per colour"
                raise BagError(found, where=path, cure="Save it as 8-bit RGB.", kind="wrong_dtype")
            yield image
    except (BagError, MemoryError):
        raise
    except FileNotFoundError:
        cure = "Check the path, or leave it out of the table."
        raise BagError("no such image", where=path, cure=cure, kind="missing") from None
    except (PermissionError, IsADirectoryError) as error:
        found = f"cannot be opened ({error.strerror})"
        raise BagError(found, where=path, cure="Check its permissions.", kind="unreadable") from None
    except Exception as error:  # damage shows as anything: OSError, SyntaxError, zlib's and struct's errors
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        found = f"cut short, damaged or no image ({said})"
        raise BagError(found, where=path, cure="Copy or download it again.", kind="truncated") from error
