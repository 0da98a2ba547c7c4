"""Files that are whole or not there, and the fingerprints and checksums by which a file is known again."""

import errno
import hashlib
import json
import os
import re
import time
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from gated_srp.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
if TYPE_CHECKING:
    import h5py
    from PIL.Image import Image
    from torch import Tensor

_ABANDONED = 3600.0  # seconds without a write after which a draft's writer is gone, where it cannot be asked
_NAME = 40  # characters of a file's name in that of its draft, which must not be too long for the file system
_FORMULA = re.compile(r"'*[=+\-@\t\r]")  # what a spreadsheet would compute, and what was quoted before
_SAMPLES, _BLOCK = 16, 4096  # a fingerprint reads so many blocks of so many bytes


def as_stored(path: str | Path) -> Path:
    """A path that somebody typed, as the disk spells it: macOS writes an umlaut into a name as two characters, a keyboard as one.

    As it is where it exists, where nothing or more than one thing has such a name, and where it has no such characters.
    """
    path = Path(path)
    if str(path).isascii() or path.exists():
        return path
    found = Path(path.anchor)
    for part in path.parts[bool(path.anchor) :]:
        if not os.path.lexists(found / part):
            try:
                alike = [name for name in os.listdir(found) if _composed(name) == _composed(part)]
            except OSError:  # no folder, or one that may not be read
                return path
            if len(alike) != 1:
                return path
            part = alike[0]
        found /= part
    return found


def _composed(name: str) -> str:
    return unicodedata.normalize("NFC", name)


@contextmanager
def whole(path: Path, *, older: Path | None = None, sync: bool = True) -> Iterator[Path]:
    """A name beside the target to write to. It replaces the target when the block ends well; otherwise nothing is left of it.

    ``older``: where to keep the copy that is replaced. Bytes and name are on the disk when this returns. A folder that cannot be
    written and a full disk are the user's to mend: what was there before is untouched. Without ``sync`` neither the disk is waited
    for nor drafts are looked for: for many files that can be made again.
    """
    draft, lock = path, None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if sync:
            remove_drafts(path.parent, path.name)
        draft, lock = _new_draft(path)
        yield draft
        if sync:
            _sync(draft)
        if older is not None and path.exists():
            os.replace(path, older)
        os.replace(draft, path)
        if sync:
            _sync(path.parent)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror or error}). What was there before is untouched; free some space, mend the "
            "folder or choose another, then start the same command again."
        ) from error
    finally:
        if draft != path:
            with suppress(OSError):  # it was renamed
                draft.unlink()
        if lock is not None:
            os.close(lock)


def remove_drafts(folder: Path, name: str | None = None) -> None:
    """Remove what writers that were killed left of this file, or of all files of the folder; a living writer holds a lock."""
    for draft in folder.glob(f".{'*' if name is None else escape(name[:_NAME])}.*.part"):
        with suppress(OSError):  # held, or removed by someone else
            _remove_abandoned(draft)


def _new_draft(path: Path) -> tuple[Path, int | None]:
    """A new draft and its descriptor, which is locked; the lock ends with the process, however it ends."""
    while True:
        draft = path.with_name(f".{path.name[:_NAME]}.{uuid4().hex}.part")  # nobody else's, on whatever machine
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        if fcntl is None:
            os.close(descriptor)
            return draft, None
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return draft, descriptor
        os.close(descriptor)  # taken for an abandoned one before it was locked


def _remove_abandoned(draft: Path) -> None:
    old = time.time() - draft.stat().st_mtime > _ABANDONED
    if fcntl is None:
        if old:
            draft.unlink()
        return
    descriptor = os.open(draft, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.unlink()  # while it is locked: a writer that waits for it then sees that it is gone
    except BlockingIOError:
        pass
    except OSError:  # a file system without locks
        if old:
            draft.unlink()
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    """Force a file's bytes, or a folder's names, to the disk."""
    folder = path.is_dir()
    if folder and os.name == "nt":
        return  # Windows has no such thing
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not folder or error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems
            raise
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes | memoryview | str, *, older: Path | None = None) -> None:
    """Write the content; it replaces the target, which is kept as ``older`` where that is named, when it is on the disk."""
    data = content.encode(errors="surrogateescape") if isinstance(content, str) else content
    with whole(path, older=older) as draft, draft.open("wb") as file:
        file.write(data)


@contextmanager
def whole_hdf5(path: Path) -> Iterator["h5py.File"]:
    """A new HDF5 file, built in memory and written in one piece: where a disk fills up, the HDF5 library ends the process."""
    import h5py

    buffer = BytesIO()
    with h5py.File(buffer, "w") as file:
        yield file
    write_whole(path, buffer.getbuffer())


def write_json(path: Path, content: object) -> None:
    """In lines, for readers too; a number that is none is refused."""
    write_whole(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_image(image: "Image", path: Path) -> None:
    """Write a picture whole, in the format of its ending."""
    buffer = BytesIO()
    image.save(buffer, "JPEG" if path.suffix.lower() in (".jpg", ".jpeg") else "PNG", quality=85)
    write_whole(path, buffer.getbuffer())


def spreadsheet_safe(cell: Any) -> Any:
    """
    >>> spreadsheet_safe("=1+1"), spreadsheet_safe("-1.5"), spreadsheet_safe("s-1"), spreadsheet_safe(-1)
    ("'=1+1", '-1.5', 's-1', -1)
    """
    if not isinstance(cell, str) or not _FORMULA.match(cell):
        return cell
    try:
        float(cell)  # a number does no harm
    except ValueError:
        return f"'{cell}"
    return cell


def spreadsheet_plain(cell: Any) -> Any:
    """What `spreadsheet_safe` was given."""
    return cell[1:] if isinstance(cell, str) and cell[:1] == "'" and _FORMULA.match(cell[1:]) else cell


# Tensors with a card --------------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: Mapping[str, "Tensor"], card: dict[str, Any]) -> None:
    """Tensors and a JSON card that describes them and carries both checksums, as one safetensors file. No pickle."""
    from safetensors.torch import save

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    card = with_checksum({**card, "tensors_sha256": tensors_hash(plain)})
    write_whole(path, save(plain, metadata={"card": json.dumps(card, sort_keys=True)}))


def read_tensors(
    path: Path, *, called: str, cure: str, only: str | None = ""
) -> tuple[dict[str, Any], dict[str, "Tensor"]]:
    """The card, empty where there is none, and the tensors whose names contain ``only``; None reads the card alone."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            card = json.loads((file.metadata() or {}).get("card", "{}"))
            tensors = {} if only is None else {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise UserError(f"not a readable {called} ({error})", where=path, cure=cure) from error
    if not has_its_checksum(card) or (
        only is not None and card.get("tensors_sha256") not in (None, tensors_hash(tensors))
    ):
        what = f"this {called} is damaged: its content does not fit its checksum"
        raise UserError(what, where=path, cure="Copy it again from where it is whole, or make it again.")
    return card, {name: tensor for name, tensor in tensors.items() if (only or "") in name}


def tensors_hash(tensors: Mapping[str, "Tensor"]) -> str:
    """SHA-256 over names, types, shapes and values."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# Checksums and fingerprints -------------------------------------------------------------------------------------------


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Content of a JSON file with a checksum of all else as its last entry, ``sha256``."""
    plain = {key: value for key, value in content.items() if key != "sha256"}
    return {**plain, "sha256": _json_hash(json.loads(json.dumps(plain)))}


def has_its_checksum(content: Any) -> bool:
    """Whether what was read is what was written; older versions wrote no checksum."""
    if not isinstance(content, dict):
        return False
    plain = {key: value for key, value in content.items() if key != "sha256"}
    return "sha256" not in content or content["sha256"] == _json_hash(plain)


def _json_hash(plain: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def sampled_hash(path: Path) -> str:
    """A fingerprint that costs little however large the file: its size and blocks all over it, the first and the last among them.

    A folder (zarr, DICOM): names and sizes of all its files, and such blocks of some.
    """
    digest, files = hashlib.sha256(), _files(path)
    looked_at = {round(i * (len(files) - 1) / (_SAMPLES - 1)) for i in range(_SAMPLES)}
    for number, file in enumerate(files):
        with file.open("rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            digest.update(f"{file.relative_to(path).as_posix()} {size}\n".encode(errors="surrogateescape"))
            last = max(0, size - _BLOCK)
            starts = range(0, size, _BLOCK) if size <= _SAMPLES * _BLOCK else _spread(last)
            for start in starts if number in looked_at else ():
                stream.seek(start)
                digest.update(stream.read(_BLOCK))
    return digest.hexdigest()[:32]


def full_hash(path: Path) -> str:
    """SHA-256 of a file; of a folder, over the names and contents of all its files."""
    if path.is_dir():
        names = [f"{file.relative_to(path).as_posix()} {full_hash(file)}\n" for file in _files(path)]
        return hashlib.sha256("".join(names).encode(errors="surrogateescape")).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _spread(last: int) -> list[int]:
    return [round(i * last / (_SAMPLES - 1)) for i in range(_SAMPLES)]


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
