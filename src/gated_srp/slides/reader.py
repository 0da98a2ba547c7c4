"""Slide images as level-0 rectangles of pixels: OpenSlide, with tiffslide where OpenSlide does not know the format; OME-Zarr.

Only the pyramid is ever read. Label and macro photographs, which may show a patient's name, are not opened.
This module and its neighbours `tissue` and `tiles` do without torch: reading processes start fast and stay small.
"""

import math
import re
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from PIL import Image

from gated_srp.bounded import ForeignFailure, try_out
from gated_srp.errors import Note, UserError
from gated_srp.files import as_stored
from gated_srp.slides.ome_zarr import OmeZarr, is_ome_zarr

ENDINGS = (".svs", ".tif", ".tiff", ".ndpi", ".mrxs", ".scn", ".svslide", ".bif", ".vms", ".vmu", ".czi", ".dcm")
_DICOM = ".dcm"
NOMINAL = (1.25, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_NEAR = 0.15  # scanners of one nominal magnification differ by as much in microns per pixel
_PLAUSIBLE = (0.02, 20.0)  # microns per pixel; beyond, the number is a print resolution or a default
_CONVERT = "Convert it, e.g. with libvips: vips tiffsave IN.tiff OUT.tiff --compression=jpeg --tile --pyramid."
_SECONDS = 10  # of the processor to open a slide, the libraries' imports too
_PIXELS = 2**28  # at once
_AGAIN = "Copy it again, or leave it out."
_TAG_BYTES = {
    3: 2,
    4: 4,
    5: 8,
    8: 2,
    9: 4,
    10: 8,
    11: 4,
    12: 8,
    13: 4,
    16: 8,
    17: 8,
    18: 8,
}  # of a value of a TIFF's tag; else 1
_BLOCK = 2048  # pixels of a level read at once for an overview


class SlideError(UserError):
    """A slide that cannot be read or used; others may go on. Kinds: missing, unreadable, no_magnification, low_magnification."""

    def __init__(self, path: Path, what: str, *, cure: str = "", kind: str = "unreadable") -> None:
        super().__init__(what, where=path, cure=cure, kind=kind)

    @property
    def path(self) -> Path:
        return Path(self.where)


@dataclass(frozen=True)
class SlideInfo:
    """What a slide file says about itself; level 0 is the largest image."""

    path: Path
    size: tuple[int, int]  # width and height of level 0
    downsamples: tuple[float, ...]  # of each level
    mpp: float | None  # microns per pixel of level 0
    magnification: float | None  # nominal, of level 0
    vendor: str | None = None
    bounds: tuple[int, int] = (
        0,
        0,
    )  # the corner of what was scanned, where level 0 has an empty margin (MIRAX, Leica SCN)
    notes: tuple[Note, ...] = ()


class SlideImage:
    """An open slide. Use it in a ``with``; each process opens its own."""

    def __init__(self, path: str | Path) -> None:
        self.path = as_stored(path)
        if not self.path.exists():
            raise SlideError(self.path, "no such file", cure="Check the path.", kind="missing")
        if self.path.is_dir() and not is_ome_zarr(self.path):
            raise SlideError(self.path, "a folder", cure="Name a slide.")
        try:
            try_out(_look_at, self.path, seconds=_SECONDS)
        except ForeignFailure as error:
            raise SlideError(self.path, error.what, cure=error.cure, kind=error.kind) from None
        except (MemoryError, OSError) as error:
            raise SlideError(
                self.path, f"asks for too much memory, or is damaged ({_text(error)})", cure=_AGAIN
            ) from None
        _check_tags(self.path)
        self._slide = _open(self.path)
        try:
            self.info = _describe(self.path, self._slide)
            _check_claims(self.path, self.info, self._slide.properties)
        except SlideError:
            self._slide.close()
            raise
        except Exception as error:
            self._slide.close()
            raise SlideError(
                self.path, f"opens, but its levels cannot be read ({_text(error)})", cure=_AGAIN
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._slide.close()

    def read(self, x: int, y: int, *, level: int, size: tuple[int, int]) -> np.ndarray:
        """RGB pixels (height, width, 3) of a level; ``x`` and ``y`` in level-0 pixels, ``size`` in the level's own.

        Where a slide has no pixels (outside, or never scanned) it is white.
        """
        try:
            image = self._slide.read_region((int(x), int(y)), level, size)
        except Exception as error:  # a damaged file shows as anything: OpenSlide's, a decoder's, an index out of range
            what, cure = f"the pixels at ({x}, {y}) cannot be read ({_text(error)})", "Copy it again."
            if re.search("compression|codec", str(error), re.IGNORECASE):  # their words are all there is to tell by
                what, cure = f"its compression is not one that can be read here ({_text(error)})", _CONVERT
            else:
                what += ". The file is cut short or damaged"
            raise SlideError(self.path, what, cure=cure) from error
        # Hardly ever: a patch of tissue is opaque.
        if image.mode == "RGBA" and image.getchannel("A").getextrema() != (255, 255):
            white = Image.new("RGB", image.size, "white")
            white.paste(image, mask=image.getchannel("A"))
            image = white
        return np.asarray(image.convert("RGB"))

    def best_level(self, downsample: float) -> int:
        """The coarsest level that is at least as fine as ``downsample``."""
        return max((i for i, d in enumerate(self.info.downsamples) if d <= downsample * 1.02), default=0)

    def overview(self, scale: float) -> np.ndarray:
        """The whole slide, ``scale`` level-0 pixels to one, as RGB (height, width, 3); read block by block.

        Pixel (i, j) shows level-0 pixels from (j * scale, i * scale) on, exactly: nothing shifts along the slide.
        """
        width, height = (max(1, math.ceil(side / scale)) for side in self.info.size)
        level = self.best_level(scale)
        down = self.info.downsamples[level]
        step = max(1, int(_BLOCK * down / scale))  # pixels of the overview per block
        out = np.full((height, width, 3), 255, np.uint8)
        for top in range(0, height, step):
            for left in range(0, width, step):
                columns, rows = min(step, width - left), min(step, height - top)
                need = (max(1, math.ceil(columns * scale / down)), max(1, math.ceil(rows * scale / down)))
                if math.prod(need) > _PIXELS:
                    what = f"an overview needs {need[0]:,} x {need[1]:,} pixels at once: it has no smaller levels"
                    raise SlideError(self.path, what, cure=_CONVERT)
                part = Image.fromarray(self.read(round(left * scale), round(top * scale), level=level, size=need))
                box = (0.0, 0.0, min(need[0], columns * scale / down), min(need[1], rows * scale / down))
                small = part.resize((columns, rows), Image.Resampling.BOX, box=box)
                out[top : top + rows, left : left + columns] = np.asarray(small)
        return out


def find_slides(where: Path) -> list[Path]:
    """The slide files of a folder and those below it, of a DICOM series one file, or the file itself; OME-Zarr, a folder, is one too."""
    where = as_stored(where)
    if where.is_file():
        return [where]
    if not where.is_dir():
        raise UserError("no such file or folder", where=where, cure="Expected a slide or a folder of slides.")
    if is_ome_zarr(where):
        return [where]
    files = sorted(p for p in where.rglob("*") if not p.name.startswith("."))
    images = [p for p in files if is_ome_zarr(p)]
    files = [p for p in files if p.suffix.lower() in ENDINGS and p.is_file() and not set(p.parents) & set(images)]
    series: dict[tuple[Path, str], tuple[tuple[int, int], Path]] = {}
    for folder in sorted({p.parent for p in files if p.suffix.lower() == _DICOM}):
        for path, (uid, rank) in _series(folder).items():
            series[folder, uid] = max(series.get((folder, uid), ((-1, -1), path)), (rank, path), key=lambda one: one[0])
    found = sorted([p for p in files if p.suffix.lower() != _DICOM] + [p for _, p in series.values()] + images)
    if not found:
        what = f"no slides (endings {', '.join(ENDINGS)})"
        raise UserError(what, where=where, cure="Point at the folder that has them.")
    return found


def slide_name(path: Path) -> str:
    """What its feature file and its preview are called: as the file; a DICOM series as its folder, or by its UID if the folder has several."""
    if path.suffix.lower() != _DICOM or not path.is_file():
        return path.name.removesuffix(".zarr").removesuffix(".ome") if path.suffix == ".zarr" else path.stem
    series = _series(path.parent)
    uid = series[path][0]
    return path.parent.resolve().name if all(other == uid for other, _ in series.values()) else uid


def _series(folder: Path) -> dict[Path, tuple[str, tuple[int, int]]]:
    return _read_series(folder, folder.stat().st_mtime_ns)


@lru_cache(maxsize=4096)
def _read_series(folder: Path, changed: int) -> dict[Path, tuple[str, tuple[int, int]]]:
    """Of each DICOM file of a folder its series, and its rank in it: the largest image of the tissue is the one to open.

    A file that is no DICOM is a series by itself: opening it says so.
    """
    try:
        from pydicom import dcmread
    except ImportError:
        cure = "Install it: pip install pydicom"
        raise UserError(
            "files of one DICOM slide are found by their series, which needs the package pydicom",
            where=folder,
            cure=cure,
            kind="needs_package",
        ) from None
    found = {}
    tags = ["SeriesInstanceUID", "ImageType", "TotalPixelMatrixColumns", "TotalPixelMatrixRows"]
    for path in sorted(p for p in folder.iterdir() if p.suffix.lower() == _DICOM and p.is_file()):
        try:
            header = dcmread(path, stop_before_pixels=True, specific_tags=tags)
            tissue = "VOLUME" in header.get("ImageType", ())
            pixels = int(header.get("TotalPixelMatrixColumns") or 0) * int(header.get("TotalPixelMatrixRows") or 0)
            found[path] = (str(header.get("SeriesInstanceUID") or path.stem), (int(tissue), pixels))
        except Exception:  # pydicom raises whatever its parser meets
            found[path] = (path.stem, (0, 0))
    return found


def nominal_magnification(mpp: float) -> float:
    """The magnification that ``mpp`` microns per pixel are sold as; 10 / mpp where none is near.

    >>> [round(nominal_magnification(mpp), 1) for mpp in (0.499, 0.2265, 0.2738, 0.35)]
    [20.0, 40.0, 40.0, 28.6]
    """
    own = 10 / mpp
    near = min(NOMINAL, key=lambda m: abs(math.log(m / own)))
    return near if abs(near / own - 1) <= _NEAR else own


def _open(path: Path) -> Any:
    if path.is_dir():
        try:
            return OmeZarr(str(path))
        except UserError:
            raise
        except Exception as error:  # the notes of a folder may be anything
            raise SlideError(path, f"an image in OME-Zarr that cannot be used ({_text(error)})", cure=_AGAIN) from None
    failures = []
    for opener in (_openslide, _tiffslide):
        try:
            return opener()(str(path))
        except ImportError:
            failures.append(f"{opener.__name__[1:]} is not installed")
        except Exception as error:  # each library has its own, and parsers raise many kinds
            failures.append(f"{opener.__name__[1:]}: {_text(error)}")
    if all(failure.endswith("not installed") for failure in failures):
        cure = "Install one in the repository of gated-srp: pip install '.[slides]'"
        raise UserError("no library for slides is installed", cure=cure, kind="needs_package")
    what = f"not a slide that can be opened ({'; '.join(failures)})"
    raise SlideError(path, what, cure=_AGAIN)


def _openslide() -> Callable[[str], Any]:
    from openslide import OpenSlide

    return OpenSlide


def _tiffslide() -> Callable[[str], Any]:
    from tiffslide import TiffSlide

    return TiffSlide


def _look_at(path: Path) -> None:
    """What may hang, crash or fill the memory: opening it, and a piece of every level."""
    with SlideImage(path) as slide:
        for level in range(len(slide.info.downsamples)):
            try:
                slide._slide.read_region((0, 0), level, (64, 64))
            except MemoryError:
                raise
            except Exception:  # a damaged piece is named where it is needed
                continue


def _check_tags(path: Path) -> None:
    """Refuse a TIFF with a tag that claims more bytes than the file has: OpenSlide makes room for them before it looks."""
    if path.suffix.lower() not in (".tif", ".tiff", ".svs"):
        return
    size = path.stat().st_size
    with path.open("rb") as file, suppress(struct.error):
        start = file.read(16)
        order = {b"II": "<", b"MM": ">"}.get(start[:2], "")
        big = bool(order) and struct.unpack_from(f"{order}H", start, 2)[0] == 43
        count_of, entry, offset = ("Q", "HHQQ", "Q") if big else ("H", "HHII", "I")
        at = struct.unpack_from(f"{order}{offset}", start, 8 if big else 4)[0] if order else 0
        seen: set[int] = set()
        while 0 < at < size and at not in seen:
            seen.add(at)
            file.seek(at)
            (tags,) = struct.unpack(f"{order}{count_of}", file.read(struct.calcsize(f"{order}{count_of}")))
            step = struct.calcsize(f"{order}{entry}")
            listed = file.read(min(tags, size // step) * step)
            for tag, kind, count, _ in struct.iter_unpack(f"{order}{entry}", listed):
                if count * _TAG_BYTES.get(kind, 1) > size:
                    what = f"its tag {tag} claims {count * _TAG_BYTES.get(kind, 1):,} bytes in a file of {size:,}"
                    raise SlideError(path, what, cure=_AGAIN, kind="oversized")
            (at,) = struct.unpack(f"{order}{offset}", file.read(struct.calcsize(f"{order}{offset}")))


def _check_claims(path: Path, info: SlideInfo, known: Mapping[str, Any]) -> None:
    """A header may claim any size: pixels must have bytes behind them, and a tile must fit into memory."""
    pixels = math.prod(info.size)
    alone = path.suffix.lower() in (
        ".svs",
        ".tif",
        ".tiff",
        ".ndpi",
        ".scn",
        ".bif",
    )  # others keep pixels in files beside them
    if pixels > _PIXELS**1.5 or (alone and pixels > _PIXELS + path.stat().st_size * 2**16):
        what = f"claims {info.size[0]:,} x {info.size[1]:,} pixels in {path.stat().st_size:,} bytes"
        raise SlideError(path, what, cure=_AGAIN, kind="oversized")
    library = "tiffslide" if "tiffslide.vendor" in known else "openslide"
    for level in range(len(info.downsamples)):
        tile = [_number(known.get(f"{library}.level[{level}].tile-{side}")) or 1 for side in ("width", "height")]
        if math.prod(tile) > _PIXELS:
            what = f"its tiles have {tile[0]:,.0f} x {tile[1]:,.0f} pixels, which do not fit into memory"
            raise SlideError(path, what, cure=_AGAIN, kind="oversized")


def _describe(path: Path, slide: Any) -> SlideInfo:
    known = {**slide.properties}
    library = "tiffslide" if "tiffslide.vendor" in known else "openslide"
    mpp = _number(known.get(f"{library}.mpp-x"))
    mpp = mpp if mpp is not None and _PLAUSIBLE[0] <= mpp <= _PLAUSIBLE[1] else None
    power = _number(known.get(f"{library}.objective-power"))
    magnification, notes = power or (nominal_magnification(mpp) if mpp else None), []
    if (
        power and mpp and abs(power * mpp / 10 - 1) > _NEAR
    ):  # pixels are what counts: lenses between objective and camera are common
        magnification = nominal_magnification(mpp)
        said = f"says an objective of {power:g}x, but {mpp:.3g} µm per pixel, which is {magnification:.3g}x: the latter is used"
        notes.append(
            Note(
                "warning",
                "magnification",
                said,
                (str(path),),
                "If that is wrong, give the right one with `extract --mpp`.",
            )
        )
    corner = [int(_number(known.get(f"{library}.bounds-{axis}")) or 0) for axis in "xy"]
    vendor = known.get(f"{library}.vendor")
    size = tuple(int(side) for side in slide.dimensions)
    downsamples = tuple(float(d) for d in slide.level_downsamples)
    said_of = (mpp, magnification, None if vendor is None else str(vendor), (corner[0], corner[1]), tuple(notes))
    return SlideInfo(path, (size[0], size[1]), downsamples, *said_of)


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and number > 0 else None


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
