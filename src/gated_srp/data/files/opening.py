"""Opens any feature file, and gives every failure of the libraries below a kind and a cure."""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gated_srp.data.bag import BagError
from gated_srp.data.files.containers import Container, NumpyFile, SafetensorsFile, ZarrFolder
from gated_srp.data.files.hdf5 import Hdf5File
from gated_srp.data.files.torchfile import TorchFile
from gated_srp.errors import UserError

CONTAINERS: dict[str, Callable[[Path], Container]] = {
    ".h5": Hdf5File,
    ".hdf5": Hdf5File,
    ".pt": TorchFile,
    ".pth": TorchFile,
    ".npz": NumpyFile,
    ".npy": NumpyFile,
    ".safetensors": SafetensorsFile,
    ".zarr": ZarrFolder,
}


@contextmanager
def opened(path: Path) -> Iterator[Container]:
    """The file as named arrays, for the length of a ``with``; whatever goes wrong inside leaves as a `BagError`."""
    _check_path(path)
    try:
        with CONTAINERS[path.suffix.lower()](path) as file:
            yield file
    except (UserError, ImportError, AttributeError, NameError, AssertionError):
        raise  # said already, or a bug of ours
    except MemoryError:
        raise BagError(
            "oversized", path, "does not fit into memory. Check the file, or use a larger machine."
        ) from None
    except Exception as error:  # damage shows as anything: a parser's, an unpickler's, a C library's error
        raise _classified(path, error) from error


def _check_path(path: Path) -> None:
    try:
        info = os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BagError(
                "symlink_loop", path, "a symbolic link that leads to itself. Remove it or point it at the file."
            ) from None
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise BagError("missing", path, "no such file. Check the path, or extract the slide.") from None
        raise BagError("unreadable", path, f"cannot be opened ({error.strerror}). Check its permissions.") from None
    ending = path.suffix.lower()
    if ending not in CONTAINERS:
        raise BagError(
            "unknown_format",
            path,
            f"ending {ending!r}, expected one of {', '.join(CONTAINERS)}. Convert or rename the file.",
        )
    if ending == ".zarr":
        return
    if not stat.S_ISREG(info.st_mode):
        raise BagError(
            "unreadable",
            path,
            "not a regular file. Expected a feature file; to read a folder, find its files with find_bags.",
        )
    if info.st_size == 0:
        raise BagError(
            "zero_bytes",
            path,
            "the file has 0 bytes: its writing was interrupted. Delete it and extract the slide again.",
        )


def _classified(path: Path, error: Exception) -> BagError:
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if isinstance(error, PermissionError):
        return BagError("unreadable", path, "permission denied. Check the file's permissions.")
    if "unable to lock" in said:
        return BagError(
            "locked",
            path,
            f"locked ({said}). Wait until its writer has ended; on a network drive set HDF5_USE_FILE_LOCKING=FALSE.",
        )
    if path.suffix.lower() == ".npz" and not _starts_with(path, b"PK"):
        return BagError("not_zip", path, "not an npz file. Download or extract it again, or correct its ending.")
    return BagError(
        "truncated", path, f"cut short or damaged ({said}). Copy or download it again, or extract the slide again."
    )


def _starts_with(path: Path, magic: bytes) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(len(magic)) == magic
    except OSError:
        return False
