"""HDF5 files of TRIDENT, AtlasPatch, CLAM and STAMP: opened inside the call, never leading to another file."""

import math
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from gated_srp.data.bag import BagError
from gated_srp.data.files.containers import Container, Spec, known, unfolded

_MOST_HOPS = 8  # soft links in a row
_ROWS = 2048  # read at once: HDF5 notes every chunk of a request, which for TRIDENT's chunks of one row takes kilobytes per row
_GROUPS = ("features", "feats", "patch_embeddings", "embeddings")

with suppress(ImportError):  # third-party compression filters register themselves
    import_module("hdf5plugin")


class Hdf5File(Container):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with path.open("rb") as stream:
            head = stream.read(2048)
        # The signature is at byte 0, or behind a user block of 512, 1024 ... bytes.
        if not any(head[at : at + 8] == b"\x89HDF\r\n\x1a\n" for at in (0, 512, 1024)):
            pointer = head.startswith(b"version https://git-lfs")
            again = "Download or extract it again, or correct its ending."
            cure = "It is a Git LFS pointer: run git lfs pull." if pointer else again
            raise self.error("not_hdf5", f"not an HDF5 file, it begins with {head[:12]!r}", cure)
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
        for code, _, _, label in (plan.get_filter(i) for i in range(plan.get_nfilters())):
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
        if not real:
            raise self._oversized(name, data.nbytes, stored)
        return Spec(data.shape, dtype)

    def read(self, name: str) -> Tensor:
        spec = self.spec(name)
        out = torch.empty(spec.shape, dtype=spec.dtype)
        if out.numel():
            data, values = self._dataset(name), out.numpy()  # HDF5 converts byte order and integer width on the way
            for part in _parts(data):
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

    def _leads_away(self, name: str) -> Exception:
        return self.error(
            "external_link",
            f"'{name}' is a link, a virtual dataset or raw storage that leads out of this file; it is not followed",
            "Copy the data into one file (h5repack, or extract the slide again).",
        )


def _parts(data: h5py.Dataset) -> list[Any]:
    """Selections that make up an array, of whole chunks: each chunk is read once."""
    if not data.chunks:
        return [np.s_[...]]
    step = -(-_ROWS // data.chunks[0]) * data.chunks[0]
    return [np.s_[start : start + step] for start in range(0, len(data), step)]
