"""An image as a bag: equal patches on a full lattice, and the pixels of each patch as its features.

Shapes: S side of the image, P side of a patch, N = (S / P)^2 patches, C = 3 * P * P numbers per patch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gated_srp.data.bag import Bag, BagError, BagHeader
from gated_srp.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS = (".png", ".jpg", ".jpeg")
SYMMETRIES = 8  # of a square
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, by colour
_GREY = (0.299, 0.587, 0.114)  # brightness of red, green and blue
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
    folder = Path(folder)
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
    pixels = read_pixels(Path(path), grid).float() / 255
    if draws is not None:
        pixels = augmented(pixels, draws)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (_MEAN, _STD))
    return Bag(**_facts(Path(path), grid), features=patch_rows((pixels - mean) / std, grid.patch))


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
    """(3, S, S) in 0 to 1: one of the eight symmetries, and mild colour jitter in random order.

    Flips left to right and top to bottom and turns by 90 degrees, each drawn evenly, make the eight symmetries equally likely.
    """
    symmetry = int(torch.randint(SYMMETRIES, (), generator=draws))
    factors = (1 + _JITTER * (2 * torch.rand(3, generator=draws) - 1)).tolist()
    hue = _HUE * (2 * float(torch.rand((), generator=draws)) - 1)
    pixels = turned(pixels, symmetry)
    for step in torch.randperm(4, generator=draws).tolist():
        pixels = with_hue(pixels, hue) if step == 3 else _blended(pixels, _COLOURLESS[step](pixels), factors[step])
    return pixels


def turned(pixels: Tensor, symmetry: int) -> Tensor:
    """Number 0 to 7 of the symmetries: quarter turns, from 4 on with a flip."""
    quarter = torch.rot90(pixels, symmetry % 4, (-2, -1))
    return quarter.flip(-1) if symmetry >= 4 else quarter


def with_hue(pixels: Tensor, shift: float) -> Tensor:
    """Colours turned by a share of the colour circle, their saturation and value kept (HSV)."""
    red, green, blue = pixels
    value, low = pixels.amax(0), pixels.amin(0)
    chroma = value - low
    unit = torch.where(chroma > 0, chroma, 1.0)
    after_green = torch.where(value == green, (blue - red) / unit + 2, (red - green) / unit + 4)
    sixths = torch.where(value == red, (green - blue) / unit, after_green) + 6 * shift  # of the circle; grey stays grey
    away = (torch.tensor([5.0, 3.0, 1.0]).view(3, 1, 1) + sixths) % 6  # from red, green and blue
    return value - chroma * torch.minimum(away, 4 - away).clamp(0, 1)


def _grey(pixels: Tensor) -> Tensor:
    red, green, blue = pixels
    grey: Tensor = _GREY[0] * red + _GREY[1] * green + _GREY[2] * blue  # (S, S)
    return grey


def _mean_grey(pixels: Tensor) -> Tensor:
    # numpy adds in one order, whatever the number of threads: workers and the main process must agree to the bit.
    return torch.tensor(_grey(pixels).numpy().mean(dtype=np.float64), dtype=torch.float32)


# What brightness, contrast and saturation move an image away from, or towards.
_COLOURLESS: tuple[Callable[[Tensor], Tensor], ...] = (torch.zeros_like, _mean_grey, _grey)


def _blended(pixels: Tensor, other: Tensor, factor: float) -> Tensor:
    return (factor * pixels + (1 - factor) * other).clamp(0, 1)


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
        with Image.open(path) as image:
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
