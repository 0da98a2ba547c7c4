"""A feature file as named arrays, whatever holds them; every failure of the libraries below gets a kind and a cure.

Nothing is allocated before the claimed size is found to be real. A container is open for one call; only `read` touches
array data, and it makes one contiguous read.
"""

import errno
import json
import math
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
from torch import Tensor

from gated_srp.bounded import ForeignFailure, try_out
from gated_srp.data.bag import BagError
from gated_srp.errors import UserError
from gated_srp.files import as_stored

CONTAINERS = {  # by ending: module, imported when a file asks for it, and class
    ".h5": ("containers", "Hdf5File"),
    ".hdf5": ("containers", "Hdf5File"),
    ".pt": ("arrays", "TorchFile"),
    ".pth": ("arrays", "TorchFile"),
    ".npz": ("arrays", "NumpyFile"),
    ".npy": ("arrays", "NumpyFile"),
    ".safetensors": ("arrays", "SafetensorsFile"),
    ".zarr": ("arrays", "ZarrFolder"),
}
# Attributes that are read; anything else in a file stays untouched.
ATTRIBUTES = {
    "patch_size", "patch_size_level0", "level0_magnification", "target_magnification", "overlap", "level0_width", "level0_height",
    "wsi_path", "mpp", "mpp_x", "level0_mpp", "encoder", "extractor", "unit", "tile_size_um", "tile_size", "feat_type",
    "patch_level", "downsample",
}  # fmt: skip
_INFLATION = 200  # features hardly compress: a file that claims to have shrunk by more is a decompression bomb
HARMLESS = 2**24  # bytes; positions on a lattice may shrink to anything, but are few

# What an array of this numpy type is read as: torch lacks the wider unsigned types.
_DTYPES = {
    "f2": torch.float16, "f4": torch.float32, "f8": torch.float64, "f16": torch.float64,
    "i1": torch.int64, "i2": torch.int64, "i4": torch.int64, "i8": torch.int64,
    "u1": torch.int64, "u2": torch.int64, "u4": torch.int64, "u8": torch.int64,
}  # fmt: skip

_MOST_HOPS = 8  # soft links in a row
_CHECKSUM = 4  # bytes behind a chunk, where its file keeps checksums
_ROWS = 2048  # read at once: HDF5 notes every chunk of a request, which for TRIDENT's chunks of one row takes kilobytes per row
_LARGE_CHUNK = 2**19  # bytes, compressed; smaller ones unfold to half a gigabyte at most
_GROUPS = ("features", "feats", "patch_embeddings", "embeddings")


class Spec(NamedTuple):
    """An array as it will be read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Container(ABC):
    """Named arrays of one file; a name inside a group is written ``features/uni_v2``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def close(self) -> None:  # noqa: B027 (most containers hold nothing open)
        """Let go of the file."""

    @abstractmethod
    def names(self) -> list[str]:
        """Names of the arrays, in order."""

    def has(self, name: str) -> bool:
        """Whether there is such an array, one that `names` does not reach included."""
        return name in self.names()

    @abstractmethod
    def spec(self, name: str) -> Spec:
        """Shape and type of an array; refuses one that is not numbers or whose bytes are not there."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """The whole array."""

    def attrs(self, name: str = "") -> dict[str, Any]:
        """Plain values of the known attributes of an array, or of the file."""
        return {}

    def error(self, kind: str, what: str, cure: str, *, found: Sequence[str] = ()) -> BagError:
        return BagError(what, where=self.path, cure=cure, kind=kind, found=found)

    def _dtype(self, name: str, dtype: np.dtype[Any]) -> torch.dtype:
        found = _DTYPES.get(f"{dtype.kind}{dtype.itemsize}")
        if found is None:
            what = f"'{name}' holds {dtype}, expected numbers (float16, float32 ...)"
            raise self.error("wrong_dtype", what, "Name the right key.")
        return found

    def _oversized(self, name: str, claimed: int, stored: int) -> BagError:
        cure = "The extraction was interrupted, or the file is not what it says; extract the slide again."
        return self.error("oversized", f"'{name}' claims {claimed:,} bytes, but only {stored:,} are stored", cure)


def plain(value: Any) -> Any:
    """An attribute as tools really store it (0-d array, byte string, JSON as text) as a plain value; None for whatever means nothing.

    >>> plain(np.array([512.0])), plain(b"None"), plain('{"a": 1}'), plain(np.int64(3)), plain(b"uni_v2")
    (512.0, None, {'a': 1}, 3, 'uni_v2')
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.item() if value.size == 1 else value.tolist() if value.size else None
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        value = value.strip("\0 \n")
        if value.lower() in ("", "none", "null", "nan"):
            return None
        if value[0] in '{["':
            try:
                return json.loads(value)
            except ValueError:
                return value
    return value if isinstance(value, int | float | str | list | dict) else None


def known(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values of the attributes that this package reads."""
    return {name: plain(attrs[name]) for name in attrs if name in ATTRIBUTES}


def unfolded(stored: int) -> int:
    """The most bytes that so many compressed ones may plausibly hold."""
    return max(stored * _INFLATION, HARMLESS)


# Opening -------------------------------------------------------------------------------------------------------------


@contextmanager
def opened(path: Path) -> Iterator[Container]:
    """The file as named arrays, for the length of a ``with``; whatever goes wrong inside leaves as a `BagError`."""
    path = as_stored(path)
    _check_path(path)
    try:
        module, name = CONTAINERS[path.suffix.lower()]
        with closing(getattr(import_module(f"{__package__}.{module}"), name)(path)) as file:
            yield file
    except ForeignFailure as error:
        raise BagError(error.what, where=path, cure=error.cure, kind=error.kind) from None
    except (UserError, ImportError):
        raise  # said already
    except MemoryError:
        cure = "Check the file, or use a larger machine."
        raise BagError("does not fit into memory", where=path, cure=cure, kind="oversized") from None
    except Exception as error:  # damage shows as anything: a parser's, an unpickler's, a C library's error
        if isinstance(error, AttributeError | NameError | AssertionError) and _raised_here(error):
            raise  # a bug of ours
        raise _classified(path, error) from error


def _raised_here(error: Exception) -> bool:
    """Whether it comes from this package rather than from a library that it calls."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("gated_srp")


def _check_path(path: Path) -> None:
    try:
        info = os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            cure = "Remove it or point it at the file."
            raise BagError("a symbolic link that leads to itself", where=path, cure=cure, kind="symlink_loop") from None
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            cure = "Check the path, or extract the slide."
            raise BagError("no such file", where=path, cure=cure, kind="missing") from None
        what = f"cannot be opened ({error.strerror})"
        raise BagError(what, where=path, cure="Check its permissions.", kind="unreadable") from None
    ending = path.suffix.lower()
    if ending not in CONTAINERS:
        what = f"ending {ending!r}, expected one of {', '.join(CONTAINERS)}"
        raise BagError(what, where=path, cure="Convert or rename the file.", kind="unknown_format")
    if ending == ".zarr":
        return
    if not stat.S_ISREG(info.st_mode):
        cure = "Expected a feature file; to read a folder, find its files with find_bags."
        raise BagError("not a regular file", where=path, cure=cure, kind="unreadable")
    if info.st_size == 0:
        cure = "Delete it and extract the slide again."
        raise BagError("the file has 0 bytes: its writing was interrupted", where=path, cure=cure, kind="zero_bytes")


def _classified(path: Path, error: Exception) -> BagError:
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if isinstance(error, PermissionError):
        return BagError("permission denied", where=path, cure="Check the file's permissions.", kind="unreadable")
    if "unable to lock" in said:  # HDF5 has no exception of its own for this
        cure = "Wait until its writer has ended; on a network drive set HDF5_USE_FILE_LOCKING=FALSE."
        return BagError(f"locked ({said})", where=path, cure=cure, kind="locked")
    cure = "Copy or download it again, or extract the slide again."
    return BagError(f"cut short or damaged ({said})", where=path, cure=cure, kind="truncated")


# HDF5 of TRIDENT, AtlasPatch, CLAM and STAMP: opened inside the call, never leading to another file ------------------

with suppress(ImportError):  # third-party compression filters register themselves
    import_module("hdf5plugin")


class Hdf5File(Container):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with path.open("rb") as stream:
            head = stream.read(2048)
        # The signature is at byte 0, or behind a user block of 512, 1024 ... bytes.
        if not any(head[at : at + 8] == b"\x89HDF\r\n\x1a\n" for at in (0, 512, 1024)):
            cure = "Download or extract it again, or correct its ending."
            if head.startswith(b"version https://git-lfs"):
                cure = "It is a Git LFS pointer: run git lfs pull."
            raise self.error("not_hdf5", f"not an HDF5 file, it begins with {head[:12]!r}", cure)
        try_out(_look_through, path)
        self._file = h5py.File(path, "r", locking="best-effort")

    def close(self) -> None:
        self._file.close()

    def names(self) -> list[str]:
        found = []
        for name in self._file:
            inside = self._resolve(name) if name in _GROUPS else None
            found += [f"{name}/{child}" for child in inside] if isinstance(inside, h5py.Group) else [name]
        return found

    def has(self, name: str) -> bool:
        try:
            return isinstance(self._resolve(name), h5py.Dataset)
        except BagError as error:
            if error.kind == "external_link":
                raise
            return False

    def spec(self, name: str) -> Spec:
        data = self._dataset(name)
        dtype = self._dtype(name, data.dtype)
        plan = data.id.get_create_plist()
        filters = [plan.get_filter(i) for i in range(plan.get_nfilters())]
        for code, _, _, label in filters:
            if not h5py.h5z.filter_avail(code):
                filter_name = f"{label.decode('utf-8', 'replace')}, number {code}"
                what = f"'{name}' is compressed with a filter that is missing here ({filter_name})"
                raise self.error("missing_filter", what, "Install it with: pip install hdf5plugin")
        stored = data.id.get_storage_size()
        if plan.get_nfilters() and data.chunks:
            chunks = math.prod(-(-size // step) for size, step in zip(data.shape, data.chunks, strict=True))
            real = data.id.get_num_chunks() >= chunks and data.nbytes <= unfolded(stored)
        else:
            real = data.nbytes <= stored
        if stored > (
            there := self._file.id.get_filesize()
        ):  # HDF5 makes room for a chunk before it looks for its bytes
            raise self._oversized(name, stored, there)
        if not real:
            raise self._oversized(name, data.nbytes, stored)
        if data.chunks and any(code == h5py.h5z.FILTER_FLETCHER32 for code, *_ in filters):
            sizes: list[int] = []
            data.id.chunk_iter(lambda chunk: sizes.append(chunk.size))
            if min(sizes, default=_CHECKSUM) < _CHECKSUM:  # HDF5 would sum up memory that is not the chunk's, and crash
                what = f"a chunk of '{name}' is shorter than its own checksum"
                raise self.error("unreadable", what, "It is damaged: copy, download or extract it again.")
        return Spec(data.shape, dtype)

    def read(self, name: str) -> Tensor:
        spec = self.spec(name)
        out = torch.empty(spec.shape, dtype=spec.dtype)
        if out.numel():
            data, values = self._dataset(name), out.numpy()  # HDF5 converts byte order and integer width on the way
            step = (
                -(-_ROWS // data.chunks[0]) * data.chunks[0] if data.chunks else len(data)
            )  # whole chunks, each read once
            for start in range(0, len(data), step):
                part = np.s_[start : start + step]
                data.read_direct(values, part, part)
        return out

    def attrs(self, name: str = "") -> dict[str, Any]:
        return known((self._resolve(name) if name else self._file).attrs)

    def _dataset(self, name: str) -> h5py.Dataset:
        data = self._resolve(name)
        if not isinstance(data, h5py.Dataset):
            cure = "Name the array with features_key or coords_key."
            raise self.error("no_features", f"'{name}' is a group, expected an array", cure)
        if data.is_virtual or data.external:
            raise self._leads_away(name)
        if data.shape is None:
            raise self.error("wrong_rank", f"'{name}' has no data at all", "Extract the slide again.")
        return data

    def _resolve(self, name: str, start: h5py.Group | None = None, hops: int = 0) -> h5py.Group | h5py.Dataset:
        """The object at this path, step by step: h5py's own lookup would open another file without asking."""
        node = self._file if start is None or name.startswith("/") else start
        for step in name.split("/"):
            if step in ("", "."):
                continue
            if not isinstance(node, h5py.Group) or not node.id.links.exists(step.encode()):
                what = f"'{name}' leads nowhere (found: {', '.join(self._file) or 'nothing'})"
                raise self.error("unreadable", what, "Name a key that exists.")
            link = node.id.links.get_info(step.encode()).type
            if link == h5py.h5l.TYPE_HARD:
                node = node[step]
            elif link == h5py.h5l.TYPE_SOFT and hops < _MOST_HOPS:
                node = self._resolve(node.id.links.get_val(step.encode()).decode(), node, hops + 1)
            else:
                raise self._leads_away(name)
        return node

    def look_through(self) -> None:
        """Touch everything that a reading may touch, but the arrays' content: a damaged file shows here what it does."""
        self.attrs()
        for name in self.names():
            with suppress(BagError):
                self.attrs(name)
                self.spec(name)
                self._unfold(self._dataset(name))

    def _unfold(self, data: h5py.Dataset) -> None:
        """Touch large compressed chunks: HDF5 gives a chunk whatever memory its content asks for, up to a thousand times its size."""
        if data.chunks and data.id.get_create_plist().get_nfilters() and data.id.get_storage_size() > _LARGE_CHUNK:
            large: list[tuple[int, ...]] = []
            data.id.chunk_iter(lambda chunk: large.append(chunk.chunk_offset) if chunk.size > _LARGE_CHUNK else None)
            for corner in large:
                data[corner]

    def _leads_away(self, name: str) -> Exception:
        return self.error(
            "external_link",
            f"'{name}' is a link, a virtual dataset or raw storage that leads out of this file; it is not followed",
            "Copy the data into one file (h5repack, or extract the slide again).",
        )


def _look_through(path: Path) -> None:
    with closing(Hdf5File(path)) as file:
        file.look_through()
