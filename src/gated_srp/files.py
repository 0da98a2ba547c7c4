"""Files that are whole or not there."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gated_srp.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A name beside the target to write to. It replaces the target when the block ends well; otherwise nothing is left of it.

    A folder that cannot be written and a full disk are the user's to mend: what was there before is untouched.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield draft
        os.replace(draft, path)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror or error}). What was there before is untouched; free some space, mend the "
            "folder or choose another, then start the same command again."
        ) from error
    finally:
        with suppress(OSError):  # it was renamed, or there never was a place for it
            draft.unlink()


def write_whole(path: Path, content: bytes | memoryview | str) -> None:
    """Write the content and force it to the disk before it replaces the target."""
    data = content.encode(errors="surrogateescape") if isinstance(content, str) else content
    with whole(path) as draft, draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, content: object) -> None:
    """In lines, for readers too; a number that is none is refused."""
    write_whole(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_image(image: "Image", path: Path) -> None:
    """Write a picture whole, in the format of its ending."""
    buffer = BytesIO()
    image.save(buffer, "JPEG" if path.suffix.lower() in (".jpg", ".jpeg") else "PNG", quality=85)
    write_whole(path, buffer.getbuffer())


def write_tensors(path: Path, tensors: Mapping[str, "Tensor"], card: dict[str, Any]) -> None:
    """Tensors and a JSON card that describes them, as one safetensors file. No pickle."""
    from safetensors.torch import save

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_whole(path, save(plain, metadata={"card": json.dumps(card, sort_keys=True)}))


def read_tensors(
    path: Path, *, called: str, cure: str, only: str | None = ""
) -> tuple[dict[str, Any], dict[str, "Tensor"]]:
    """The card, empty where there is none, and the tensors whose names contain ``only``; None reads the card alone."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            card = json.loads((file.metadata() or {}).get("card", "{}"))
            names = [] if only is None else [name for name in file.keys() if only in name]  # noqa: SIM118 (no mapping)
            return card, {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise UserError(f"not a readable {called} ({error})", where=path, cure=cure) from error
