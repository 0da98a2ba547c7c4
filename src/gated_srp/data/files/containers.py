"""A feature file as named arrays, whatever holds them; every failure of the libraries below gets a kind and a cure.

Nothing is allocated before the claimed size is found to be real. A container is open for one call; only `read` touches
array data, and it makes one contiguous read.
"""

import errno
import json
import math
import os
import stat
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gated_srp.data.bag import BagError
from gated_srp.errors import UserError

CONTAINERS = {  # by ending: module, imported when a file asks for it, and class
    ".h5": ("hdf5", "Hdf5File"),
    ".hdf5": ("hdf5", "Hdf5File"),
    ".pt": ("torchfile", "TorchFile"),
    ".pth": ("torchfile", "TorchFile"),
    ".npz": ("containers", "NumpyFile"),
    ".npy": ("containers", "NumpyFile"),
    ".safetensors": ("containers", "SafetensorsFile"),
    ".zarr": ("containers", "ZarrFolder"),
}
# Attributes that are read; anything else in a file stays untouched.
_ATTRIBUTES = {
    "patch_size", "patch_size_level0", "level0_magnification", "target_magnification", "overlap", "level0_width", "level0_height",
    "wsi_path", "mpp", "mpp_x", "level0_mpp", "encoder", "extractor", "unit", "tile_size_um", "tile_size", "feat_type",
    "patch_level", "downsample",
}  # fmt: skip
_INFLATION = 200  # features hardly compress: a file that claims to have shrunk by more is a decompression bomb
_HARMLESS = 2**24  # bytes; positions on a lattice may shrink to anything, but are few

# What an array of this numpy type is read as: torch lacks the wider unsigned types.
_DTYPES = {
    "f2": torch.float16, "f4": torch.float32, "f8": torch.float64, "f16": torch.float64,
    "i1": torch.int64, "i2": torch.int64, "i4": torch.int64, "i8": torch.int64,
    "u1": torch.int64, "u2": torch.int64, "u4": torch.int64, "u8": torch.int64,
}  # fmt: skip


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
    return {name: plain(attrs[name]) for name in attrs if name in _ATTRIBUTES}


def unfolded(stored: int) -> int:
    """The most bytes that so many compressed ones may plausibly hold."""
    return max(stored * _INFLATION, _HARMLESS)


class NumpyFile(Container):
    """``.npz`` (named arrays; 0-d entries are attributes) and ``.npy`` (one array named features)."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._zip = zipfile.ZipFile(path) if path.suffix.lower() == ".npz" else None

    def close(self) -> None:
        if self._zip:
            self._zip.close()

    def names(self) -> list[str]:
        return [n.removesuffix(".npy") for n in self._zip.namelist()] if self._zip else ["features"]

    @contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        with self._zip.open(f"{name}.npy") if self._zip else self.path.open("rb") as stream:
            yield stream

    def _header(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        with self._open(name) as stream:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(stream)
        return shape, dtype

    def spec(self, name: str) -> Spec:
        shape, dtype = self._header(name)
        found = self._dtype(name, dtype)
        claimed = math.prod(shape) * dtype.itemsize
        if self._zip:
            entry = self._zip.getinfo(f"{name}.npy")
            stored = min(entry.file_size, unfolded(min(entry.compress_size, os.path.getsize(self.path))))
        else:
            stored = os.path.getsize(self.path)
        if claimed > stored:
            raise self._oversized(name, claimed, stored)
        return Spec(shape, found)

    def read(self, name: str) -> Tensor:
        spec = self.spec(name)
        with self._open(name) as stream:
            return from_numpy(np.lib.format.read_array(stream, allow_pickle=False), spec.dtype)

    def attrs(self, name: str = "") -> dict[str, Any]:
        if name or not self._zip:
            return {}
        found = {}
        for entry in _ATTRIBUTES.intersection(self.names()):
            shape, dtype = self._header(entry)
            if math.prod(shape) <= 2 and dtype.itemsize < 4096:
                with self._open(entry) as stream:
                    found[entry] = np.lib.format.read_array(stream, allow_pickle=False)
        return known(found)


class SafetensorsFile(Container):
    """``.safetensors``; its metadata are the attributes. The library checks claimed sizes against the file's length."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = import_module("safetensors").safe_open(path, framework="pt")
        self._tensors = self._file.__enter__()

    def close(self) -> None:
        self._file.__exit__(None, None, None)

    def names(self) -> list[str]:
        return list(self._tensors.keys())

    def spec(self, name: str) -> Spec:
        part = self._tensors.get_slice(name)
        dtype = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}.get(
            part.get_dtype()
        )
        if dtype is None and part.get_dtype()[0] not in "IU":
            what = f"'{name}' holds {part.get_dtype()}, expected numbers (F16, BF16, F32, F64)"
            raise self.error("wrong_dtype", what, "Name the right key.")
        return Spec(tuple(part.get_shape()), dtype or torch.int64)

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._tensors.get_tensor(name)
        return tensor.to(self.spec(name).dtype, copy=True)  # the mapping must not outlive this call

    def attrs(self, name: str = "") -> dict[str, Any]:
        return {} if name else known(self._tensors.metadata() or {})


class ZarrFolder(Container):
    """tiatoolbox's ``.zarr``: ``features`` and ``coordinates`` (bounds of each patch)."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            zarr = import_module("zarr")
        except ModuleNotFoundError:
            raise self.error(
                "needs_package", "reading zarr needs the package zarr", "Install it with: pip install zarr"
            ) from None
        self._group = zarr.open_group(str(path), mode="r")

    def names(self) -> list[str]:
        return sorted(self._group.array_keys())

    def spec(self, name: str) -> Spec:
        array = self._group[name]
        # zarr leaves out chunks of zeros, so a small array may lack some.
        if array.nbytes > _HARMLESS and array.nchunks_initialized < array.nchunks:
            raise self._oversized(name, array.nbytes, array.nbytes * array.nchunks_initialized // max(array.nchunks, 1))
        return Spec(tuple(array.shape), self._dtype(name, np.dtype(array.dtype)))

    def read(self, name: str) -> Tensor:
        return from_numpy(np.asarray(self._group[name][...]), self.spec(name).dtype)

    def attrs(self, name: str = "") -> dict[str, Any]:
        return known(dict((self._group[name] if name else self._group).attrs))


def from_numpy(array: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    """A tensor of native byte order; shares memory where nothing had to change."""
    native = array.astype(str(dtype).removeprefix("torch."), order="C", copy=False)
    return torch.from_numpy(native if native.flags.writeable else native.copy())


# Opening -------------------------------------------------------------------------------------------------------------


@contextmanager
def opened(path: Path) -> Iterator[Container]:
    """The file as named arrays, for the length of a ``with``; whatever goes wrong inside leaves as a `BagError`."""
    _check_path(path)
    try:
        with closing(_container(path)) as file:
            yield file
    except (UserError, ImportError, AttributeError, NameError, AssertionError):
        raise  # said already, or a bug of ours
    except MemoryError:
        cure = "Check the file, or use a larger machine."
        raise BagError("does not fit into memory", where=path, cure=cure, kind="oversized") from None
    except Exception as error:  # damage shows as anything: a parser's, an unpickler's, a C library's error
        raise _classified(path, error) from error


def _container(path: Path) -> Container:
    module, name = CONTAINERS[path.suffix.lower()]
    file: Container = getattr(import_module(f"{__package__}.{module}"), name)(path)
    return file


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
    if path.suffix.lower() == ".npz" and not _starts_with(path, b"PK"):
        cure = "Download or extract it again, or correct its ending."
        return BagError("not an npz file", where=path, cure=cure, kind="not_zip")
    cure = "Copy or download it again, or extract the slide again."
    return BagError(f"cut short or damaged ({said})", where=path, cure=cure, kind="truncated")


def _starts_with(path: Path, magic: bytes) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(len(magic)) == magic
    except OSError:
        return False
