"""Feature files other than HDF5: torch's ``.pt``, numpy's ``.npz`` and ``.npy``, ``.safetensors``, tiatoolbox's ``.zarr``. No pickled code runs."""

import math
import os
import pickle
import pickletools
import zipfile
from importlib import import_module
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from gated_srp.bounded import try_out
from gated_srp.data.files.containers import ATTRIBUTES, Container, Spec, known, unfolded

_HEADER = 2**16  # bytes of a header of numpy; those of arrays of numbers have a hundred
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # first bytes of torch.save before 1.6


class _Array(np.ndarray):
    """Stands in for numpy.ndarray while unpickling: a pickle cannot ask for memory, only bring its own bytes."""

    def __new__(cls, *_: Any) -> "_Array":
        return super().__new__(cls, (0,), "b")


def _reconstruct(*_: Any) -> _Array:
    return _Array()


_ALLOWED: list[Any] = [
    np.dtype,
    *(type(np.dtype(t)) for t in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")),
    (_Array, "numpy.ndarray"),
    (_reconstruct, "numpy._core.multiarray._reconstruct"),
    (_reconstruct, "numpy.core.multiarray._reconstruct"),  # written with numpy 1
]


_LOADING = Lock()  # the allow-list is one per process


def _unlock() -> None:
    """In a forked child: the thread that may have held the lock is not there."""
    global _LOADING
    _LOADING = Lock()


if hasattr(os, "register_at_fork"):  # Unix
    os.register_at_fork(after_in_child=_unlock)


class TorchFile(Container):
    """A bare array is named features."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try_out(_load_torch, path)  # a pickle of a few bytes may ask torch for storages of any size
        content = self._load()
        named = content if isinstance(content, dict) else {"features": content}
        self._values: dict[str, Any] = {str(name): value for name, value in named.items()}

    def close(self) -> None:
        self._values = {}  # and with it the mapping

    def _load(self) -> Any:
        zipped = zipfile.is_zipfile(self.path)
        size = os.path.getsize(self.path)
        if zipped:
            with zipfile.ZipFile(self.path) as entries:
                claimed = max((entry.file_size for entry in entries.infolist()), default=0)
        else:
            claimed = self._legacy_claim()
        if claimed > size:
            raise self._oversized("data", claimed, size)
        try:
            with _LOADING, torch.serialization.safe_globals(_ALLOWED):
                # Mapped, not read: a storage cannot claim more than the file holds, and a header costs no reading.
                return torch.load(self.path, map_location="cpu", weights_only=True, mmap=zipped)
        except pickle.UnpicklingError as error:
            refused = str(error).split("WeightsUnpickler error:")[-1].split("Please use")[0].strip().splitlines()
            said = refused[0] if refused else "unknown"
            what = f"holds more than tensors and arrays ({said}); it was not loaded, since that would run its code"
            cure = "Save the features alone: torch.save(tensor, path), or write HDF5."
            raise self.error("unsafe_pickle", what, cure) from None
        except Exception as error:  # a damaged pickle fails in any way
            what = f"cut short or damaged ({type(error).__name__})"
            raise self.error("truncated", what, "Copy it again, or extract the slide again.") from error

    def _legacy_claim(self) -> int:
        """The largest number in it: the old format allocates what its pickle claims."""
        with self.path.open("rb") as stream:
            head = stream.read(len(_LEGACY))
            if head.startswith(b"PK"):
                what = "cut short: the end of the archive is missing"
                raise self.error("truncated", what, "Copy or extract it again.")
            if head != _LEGACY:
                cure = "Download or extract it again, or correct its ending."
                raise self.error("not_torch", "not a file written by torch.save", cure)
            for _ in range(3):  # protocol version, system information, the object
                largest = max((arg for _, arg, _ in pickletools.genops(stream) if isinstance(arg, int)), default=0)
        return largest

    def names(self) -> list[str]:
        return [name for name, value in self._values.items() if isinstance(value, Tensor | np.ndarray) and value.ndim]

    def spec(self, name: str) -> Spec:
        value = self._values[name]
        if isinstance(value, np.ndarray):
            return Spec(value.shape, self._dtype(name, value.dtype))
        dense = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized
        if not dense or value.device.type != "cpu":
            what = f"'{name}' is {type(value).__name__}, expected a dense tensor or array"
            raise self.error("wrong_dtype", what, "Save the features alone.")
        if not value.is_floating_point() and (value.is_complex() or value.dtype == torch.bool):
            what = f"'{name}' holds {value.dtype}, expected numbers (float16, float32 ...)"
            raise self.error("wrong_dtype", what, "Name the right key.")
        claimed, stored = value.numel() * value.element_size(), value.untyped_storage().nbytes()
        if claimed > stored:  # an expanded view of a few bytes
            raise self._oversized(name, claimed, stored)
        return Spec(tuple(value.shape), value.dtype if value.is_floating_point() else torch.int64)

    def read(self, name: str) -> Tensor:
        value, spec = self._values[name], self.spec(name)
        if isinstance(value, np.ndarray):
            return from_numpy(value.view(np.ndarray), spec.dtype)
        # A copy: the mapping must not outlive this call.
        copied: Tensor = value.detach().to(spec.dtype, copy=True, memory_format=torch.contiguous_format)
        return copied

    def attrs(self, name: str = "") -> dict[str, Any]:
        if name:
            return {}
        lone = {k: v.item() for k, v in self._values.items() if isinstance(v, Tensor) and v.numel() == 1}
        return known(self._values | lone)


def _load_torch(path: Path) -> None:
    TorchFile(path).close()


class NumpyFile(Container):
    """``.npz`` (named arrays; 0-d entries are attributes) and ``.npy`` (one array named features)."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self._zip = zipfile.ZipFile(path) if path.suffix.lower() == ".npz" else None
        except zipfile.BadZipFile:
            with path.open("rb") as stream:
                if stream.read(2) == b"PK":
                    raise
            cure = "Download or extract it again, or correct its ending."
            raise self.error("not_zip", "not an npz file", cure) from None

    def close(self) -> None:
        if self._zip:
            self._zip.close()

    def names(self) -> list[str]:
        return [n.removesuffix(".npy") for n in self._zip.namelist()] if self._zip else ["features"]

    def _open(self, name: str) -> IO[bytes]:
        return self._zip.open(f"{name}.npy") if self._zip else self.path.open("rb")

    def _header(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        with self._open(name) as stream:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(BytesIO(stream.read(_HEADER)))  # which claims its own length
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
        for entry in ATTRIBUTES.intersection(self.names()):
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
        floats = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
        dtype = floats.get(part.get_dtype())
        if dtype is None and part.get_dtype()[0] not in "IU":
            what = f"'{name}' holds {part.get_dtype()}, expected numbers (F16, BF16, F32, F64)"
            raise self.error("wrong_dtype", what, "Name the right key.")
        return Spec(tuple(part.get_shape()), dtype or torch.int64)

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._tensors.get_tensor(name)
        return tensor.to(self.spec(name).dtype, copy=True)  # the mapping must not outlive this call

    def attrs(self, name: str = "") -> dict[str, Any]:
        return {} if name else known(self._tensors.metadata() or {})


_ZARR_NOTES = {".zarray", ".zattrs", ".zgroup", ".zmetadata", "zarr.json"}


class ZarrFolder(Container):
    """tiatoolbox's ``.zarr``: ``features`` and ``coordinates`` (bounds of each patch)."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            zarr = import_module("zarr")
        except ModuleNotFoundError:
            what = "reading zarr needs the package zarr"
            raise self.error("needs_package", what, "Install it with: pip install zarr") from None
        self._group = zarr.open_group(str(path), mode="r")

    def names(self) -> list[str]:
        return sorted(self._group.array_keys())

    def spec(self, name: str) -> Spec:
        array = self._group[name]
        spec = Spec(tuple(array.shape), self._dtype(name, np.dtype(array.dtype)))
        files = [f for f in (self.path / name).rglob("*") if f.name not in _ZARR_NOTES and f.is_file()]
        stored = sum(file.stat().st_size for file in files)
        if array.nbytes > unfolded(stored):
            raise self._oversized(name, array.nbytes, stored)
        # zarr reads a missing chunk as zeros. Counted first: asking it for 10^12 chunks one by one takes for ever.
        expected = math.prod(-(-size // max(step, 1)) for size, step in zip(array.shape, array.chunks, strict=True))
        if array.shards:
            found = sum(self._in_shard(array, file) for file in files)
        else:
            found = len(files) if len(files) < expected else array.nchunks_initialized
        if found < expected:
            what = f"'{name}' lacks {expected - found:,} of its {expected:,} chunks, which would be read as zeros"
            cure = "Copy or extract it again; chunks of zeros alone are kept with write_empty_chunks=True."
            raise self.error("truncated", what, cure)
        return spec

    def _in_shard(self, array: Any, file: Path) -> int:
        """How many chunks a shard holds, by its index: place and length of each, ones in all bits where there is none."""
        sharding = array.metadata.codecs[0]
        length = 16 * math.prod(shard // chunk for shard, chunk in zip(array.shards, array.chunks, strict=True))
        checksum = 4 * sum(codec.to_dict()["name"] == "crc32c" for codec in sharding.index_codecs)
        if length + checksum > (size := file.stat().st_size):
            raise self.error("truncated", f"the shard {file.name} is cut short", "Copy or extract it again.")
        with file.open("rb") as stream:
            stream.seek(size - length - checksum if sharding.index_location.value == "end" else 0)
            index = np.frombuffer(stream.read(length), np.uint64).reshape(-1, 2)
        return int((index[:, 0] != 2**64 - 1).sum())

    def read(self, name: str) -> Tensor:
        return from_numpy(np.asarray(self._group[name][...]), self.spec(name).dtype)

    def attrs(self, name: str = "") -> dict[str, Any]:
        return known(dict((self._group[name] if name else self._group).attrs))


def from_numpy(array: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    """A tensor of native byte order; shares memory where nothing had to change."""
    native = array.astype(str(dtype).removeprefix("torch."), order="C", copy=False)
    return torch.from_numpy(native if native.flags.writeable else native.copy())
