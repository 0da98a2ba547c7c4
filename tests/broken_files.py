"""Broken feature files by name: BROKEN[name] is the kind that `BagError` must carry, and a writer.

A writer takes the path of an .h5 file (it may change the ending) and returns the path of what it wrote.
"""

import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import torch
from factories import make_slide, open_h5, write_atlaspatch, write_h5


def _good(path: Path) -> Path:
    slide = make_slide()
    return write_h5(path, features=slide.features, coords=slide.cells * 512)


def _truncated(path: Path) -> Path:
    whole = _good(path).read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    return path


def _text(path: Path) -> Path:
    path.write_text("slide_id,label\ns1,0\n")
    return path


def _zero(path: Path) -> Path:
    path.write_bytes(b"")
    return path


def _claim(path: Path) -> Path:
    """10 GB of features in 10 kB: chunks that were never written."""
    with open_h5(path) as file:
        file.create_dataset("features", (10**6, 2500), "f4", chunks=(1, 2500))
        file.create_dataset("coords", (10**6, 2), "i8", chunks=(1000, 2))
    return path


def _claim_npz(path: Path) -> Path:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 2500), }"
    padded = header + b" " * (117 - len(header)) + b"\n"
    with zipfile.ZipFile(path.with_suffix(".npz"), "w") as archive:
        archive.writestr("features.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded)
        archive.writestr("coords.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded)
    return path.with_suffix(".npz")


def _claim_pt(path: Path) -> Path:
    torch.save({"features": torch.zeros(1).expand(10**6, 2500), "coords": torch.zeros(4, 2)}, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def _filter(path: Path) -> Path:
    """h5py's own filter under the number of one that is not there."""
    slide = make_slide()
    with open_h5(path) as file:
        file.create_dataset("features", data=slide.features, compression="lzf")
        file["coords"] = slide.cells * 512
    written = path.read_bytes()
    lzf = struct.pack("<H", h5py.h5z.FILTER_LZF)
    at = written.rindex(lzf, 0, written.index(b"lzf"))
    path.write_bytes(written[:at] + struct.pack("<H", 65000) + written[at + 2 :])
    return path


def _external(path: Path) -> Path:
    other = _good(path.with_name("elsewhere.hdf5_"))
    with open_h5(path) as file:
        file["features"] = h5py.ExternalLink(str(other), "/features")
        file["coords"] = h5py.ExternalLink(str(other), "/coords")
    return path


def _soft_to_external(path: Path) -> Path:
    other = _good(path.with_name("elsewhere.hdf5_"))
    with open_h5(path) as file:
        file["way"] = h5py.ExternalLink(str(other), "/")
        file["features"], file["coords"] = h5py.SoftLink("/way/features"), h5py.SoftLink("/way/coords")
    return path


def _virtual(path: Path) -> Path:
    other, slide = _good(path.with_name("elsewhere.hdf5_")), make_slide()
    layout = h5py.VirtualLayout(slide.features.shape, "f4")
    layout[...] = h5py.VirtualSource(other, "features", slide.features.shape)
    with open_h5(path) as file:
        file.create_virtual_dataset("features", layout)
        file["coords"] = slide.cells * 512
    return path


def _raw_storage(path: Path) -> Path:
    slide, raw = make_slide(), path.with_name("raw.bin")
    raw.write_bytes(slide.features.tobytes())
    with open_h5(path) as file:
        file.create_dataset("features", slide.features.shape, "f4", external=[(str(raw), 0, slide.features.nbytes)])
        file["coords"] = slide.cells * 512
    return path


def _link_loop(path: Path) -> Path:
    os.symlink(path.name, path)
    return path


class _Harm:
    """Unpickling it would create a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.target),)


def _unsafe(path: Path) -> Path:
    torch.save({"features": torch.zeros(4, 3), "more": _Harm(path.with_name("harm"))}, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def _cut_pt(path: Path) -> Path:
    torch.save(torch.ones(500, 12), path.with_suffix(".pt"))
    whole = path.with_suffix(".pt").read_bytes()
    path.with_suffix(".pt").write_bytes(b"PK" + whole[2 : len(whole) // 2])
    return path.with_suffix(".pt")


def _encoders(path: Path) -> Path:
    return write_atlaspatch(path.parent, path.stem, make_slide(), encoders={"uni_v2": 12, "gigapath": 12})


_F = np.zeros

BROKEN: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "cut short": ("truncated", _truncated),
    "zero bytes": ("zero_bytes", _zero),
    "text renamed .h5": ("not_hdf5", _text),
    "a slide embedding": ("slide_embedding", lambda p: write_h5(p, features=_F(768), coords=_F((5, 2)))),
    "a slide embedding of one row": (
        "slide_embedding",
        lambda p: write_h5(p, features=_F((1, 768)), coords=_F((5, 2))),
    ),
    "a slide embedding of STAMP": (
        "slide_embedding",
        lambda p: write_h5(p, attrs={"feat_type": "patient"}, feats=_F((1, 768)), coords=_F((1, 2))),
    ),
    "wrong rank": ("wrong_rank", lambda p: write_h5(p, features=_F((5, 7, 7, 3)), coords=_F((5, 2)))),
    "a batch of two": ("wrong_rank", lambda p: write_h5(p, features=_F((2, 5, 3)), coords=_F((5, 2)))),
    "words for features": (
        "wrong_dtype",
        lambda p: write_h5(p, features=np.array([[b"a"], [b"b"]]), coords=_F((2, 2))),
    ),
    "integers for features": ("wrong_dtype", lambda p: write_h5(p, features=_F((2, 3), int), coords=_F((2, 2)))),
    "row mismatch": ("row_mismatch", lambda p: write_h5(p, features=_F((5, 3)), coords=_F((4, 2)))),
    "no patches": ("empty", lambda p: write_h5(p, features=_F((0, 768)), coords=_F((0, 2)))),
    "no patches and no width": ("empty", lambda p: write_h5(p, features=_F(0), coords=_F((0, 2)))),
    "no positions": ("no_coords", lambda p: write_h5(p, patch_embeddings=_F((5, 3)))),
    "no features": ("no_features", lambda p: write_h5(p, coords=_F((5, 2)))),
    "nothing at all": ("no_features", write_h5),
    "positions of rank 1": ("bad_coords", lambda p: write_h5(p, features=_F((5, 3)), coords=_F(5))),
    "a position that is no number": (
        "bad_coords",
        lambda p: write_h5(p, features=_F((5, 3)), coords=np.full((5, 2), np.nan)),
    ),
    "a position beyond any slide": (
        "bad_coords",
        lambda p: write_h5(p, features=_F((5, 3)), coords=np.full((5, 2), 2**62)),
    ),
    "scattered patches": (
        "no_stride",
        lambda p: write_h5(p, features=_F((3, 3)), coords=np.array([[0, 1], [7, 90], [33, 5]])),
    ),
    "two encoders": ("several_encoders", _encoders),
    "an external link": ("external_link", _external),
    "a soft link to an external one": ("external_link", _soft_to_external),
    "a virtual dataset": ("external_link", _virtual),
    "raw storage elsewhere": ("external_link", _raw_storage),
    "a 10 GB claim": ("oversized", _claim),
    "a 10 GB claim in npz": ("oversized", _claim_npz),
    "a 10 GB claim in pt": ("oversized", _claim_pt),
    "a filter that is missing": ("missing_filter", _filter),
    "a symlink loop": ("symlink_loop", _link_loop),
    "pickled code": ("unsafe_pickle", _unsafe),
    "a .pt cut short": ("truncated", _cut_pt),
    "text renamed .pt": ("not_torch", lambda p: _text(p.with_suffix(".pt"))),
    "text renamed .npz": ("not_zip", lambda p: _text(p.with_suffix(".npz"))),
    "text renamed .safetensors": ("truncated", lambda p: _text(p.with_suffix(".safetensors"))),
    "text renamed .npy": ("truncated", lambda p: _text(p.with_suffix(".npy"))),
    "an unknown ending": ("unknown_format", lambda p: _text(p.with_suffix(".csv"))),
    "no file": ("missing", lambda p: p),
}
