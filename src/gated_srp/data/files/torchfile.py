"""``.pt`` files: tensors, TRIDENT's numpy arrays, or a dict of either. No pickled code runs."""

import os
import pickle
import pickletools
import zipfile
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gated_srp.data.files.containers import Container, Spec, from_numpy, known

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


class TorchFile(Container):
    """A bare array is named features."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        content = self._load()
        named = content if isinstance(content, dict) else {"features": content}
        self._values: dict[str, Any] = {str(name): value for name, value in named.items()}

    def close(self) -> None:
        self._values = {}  # and with it the mapping

    def _load(self) -> Any:
        zipped = zipfile.is_zipfile(self.path)
        size = os.path.getsize(self.path)
        if zipped:
            self._check_entries(size)
        else:
            self._check_legacy(size)
        try:
            with _LOADING, torch.serialization.safe_globals(_ALLOWED):
                # Mapped, not read: a storage cannot claim more than the file holds, and a header costs no reading.
                return torch.load(self.path, map_location="cpu", weights_only=True, mmap=zipped)
        except pickle.UnpicklingError as error:
            refused = str(error).split("WeightsUnpickler error:")[-1].split("Please use")[0].strip().splitlines()
            raise self.error(
                "unsafe_pickle",
                f"holds more than tensors and arrays ({refused[0] if refused else 'unknown'}); it was not loaded, "
                "since that would run its code",
                "Save the features alone: torch.save(tensor, path), or write HDF5.",
            ) from None
        except Exception as error:  # a damaged pickle fails in any way
            what = f"cut short or damaged ({type(error).__name__})"
            raise self.error("truncated", what, "Copy it again, or extract the slide again.") from error

    def _check_entries(self, size: int) -> None:
        with zipfile.ZipFile(self.path) as entries:
            claimed = max((entry.file_size for entry in entries.infolist()), default=0)
        if claimed > size:
            raise self._oversized("data", claimed, size)

    def _check_legacy(self, size: int) -> None:
        """The old format allocates what its pickle claims, so no number in it may exceed the file's size."""
        with self.path.open("rb") as stream:
            head = stream.read(len(_LEGACY))
            if head.startswith(b"PK"):
                raise self.error(
                    "truncated", "cut short: the end of the archive is missing", "Copy or extract it again."
                )
            if head != _LEGACY:
                cure = "Download or extract it again, or correct its ending."
                raise self.error("not_torch", "not a file written by torch.save", cure)
            for _ in range(3):  # protocol version, system information, the object
                largest = max((arg for _, arg, _ in pickletools.genops(stream) if isinstance(arg, int)), default=0)
        if largest > size:
            raise self._oversized("data", largest, size)

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
