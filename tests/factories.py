"""Writers of small feature files in every tool's layout and its awkward forms, and of broken ones.

A `Slide` is cells of one lattice and a feature row each; each writer lays the same slide out as its tool does.
"""

import json
import os
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch
from safetensors.numpy import save_file


@dataclass(frozen=True)
class Slide:
    cells: np.ndarray  # (N, 2) int64, column and row of each patch
    features: np.ndarray  # (N, C) float32


def make_slide(seed: int = 0, *, columns: int = 8, rows: int = 7, width: int = 12, kept: float = 0.8) -> Slide:
    """A ragged piece of tissue: patches of a lattice, some missing, in the order a slide is scanned."""
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(np.arange(columns), np.arange(rows), indexing="xy"), -1).reshape(-1, 2)
    grid = grid[rng.random(len(grid)) < kept]
    return Slide(grid, rng.standard_normal((len(grid), width)).astype(np.float32))


def _h5(path: Path) -> h5py.File:
    path.parent.mkdir(parents=True, exist_ok=True)
    return h5py.File(path, "w")


def trident_attrs(name: str, *, level0: float = 40, overlap: int = 0, size: int = 256) -> dict[str, object]:
    """Attributes of TRIDENT's coords; --mag is a float by default, so patch_size_level0 is one too."""
    return {
        "patch_size": size,
        "patch_size_level0": size * level0 // 20.0,
        "level0_magnification": level0,
        "target_magnification": 20.0,
        "overlap": overlap,
        "name": name,
        "savetodir": "None",
        "level0_width": 80000,
        "level0_height": 60000,
    }


def write_trident(
    job: Path,
    name: str,
    slide: Slide,
    *,
    level0: int = 40,
    overlap: int = 0,
    encoder: str = "uni_v2",
    dtype: str = "f4",
) -> Path:
    """<job>/20x_256px_0px_overlap/features_uni_v2/<name>.h5, chunks of one row."""
    step = (256 - overlap) * level0 // 20
    path = job / f"20x_256px_{overlap}px_overlap" / f"features_{encoder}" / f"{name}.h5"
    with _h5(path) as file:
        features = file.create_dataset(
            "features", data=slide.features.astype(dtype), chunks=(1, slide.features.shape[1])
        )
        features.attrs.update({"name": name, "savetodir": str(path.parent), "encoder": encoder})
        coords = file.create_dataset("coords", data=slide.cells * step)
        coords.attrs.update(trident_attrs(name, level0=level0, overlap=overlap))
    return path


def write_trident_pt(job: Path, name: str, slide: Slide, *, level0: int = 40, encoder: str = "uni_v2") -> Path:
    """TRIDENT's saveas='pt': a numpy array through torch.save, positions in patches/<name>_patches.h5."""
    home = job / "20x_256px_0px_overlap"
    with _h5(home / "patches" / f"{name}_patches.h5") as file:
        coords = file.create_dataset("coords", data=slide.cells * (256 * level0 // 20))
        coords.attrs.update(trident_attrs(name, level0=level0))
    path = home / f"features_{encoder}" / f"{name}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(slide.features, path)
    return path


def write_atlaspatch(out: Path, name: str, slide: Slide, *, encoders: dict[str, int], level0: int = 40) -> Path:
    """<out>/patches/<name>.h5 with a group of encoders; the first holds the slide's features, others noise."""
    step, path = 256 * level0 // 20, out / "patches" / f"{name}.h5"
    count = len(slide.cells)
    read = np.full((count, 2), 256), np.zeros((count, 1))
    with _h5(path) as file:
        file["coords"] = np.concatenate([slide.cells * step, *read], 1).astype(np.int32)
        file["passports"] = np.array([b"p%d" % i for i in range(count)], dtype="S160")
        for place, (encoder, width) in enumerate(encoders.items()):
            noise = np.random.default_rng(place).standard_normal((count, width)).astype(np.float32)
            file[f"features/{encoder}"] = noise if place else slide.features
        file.attrs.update(
            {
                "patch_size": 256,
                "patch_size_level0": step,
                "level0_magnification": level0,
                "target_magnification": 20,
                "overlap": 0,
                "level0_width": 80000,
                "level0_height": 60000,
                "wsi_path": f"slides/{name}.svs",
                "num_patches": count,
                "mpp": 0.25,
                "stain": json.dumps({"name": "H&E"}),
            }
        )
    return path


def write_clam(feats: Path, name: str, slide: Slide, *, step: int = 512) -> Path:
    """<feats>/h5_files/<name>.h5 and pt_files/<name>.pt, no attributes at all."""
    path = feats / "h5_files" / f"{name}.h5"
    with _h5(path) as file:
        file["features"] = slide.features
        file["coords"] = (slide.cells * step).astype(np.int32)
    tensor = feats / "pt_files" / f"{name}.pt"
    tensor.parent.mkdir(parents=True, exist_ok=True)
    torch.save(torch.from_numpy(slide.features), tensor)
    return path


def write_clam_pt(results: Path, name: str, slide: Slide, *, size: int = 256, downsample: float = 2.0) -> Path:
    """<results>/feats/pt_files/<name>.pt with positions in <results>/patches/<name>.h5, whose attributes are CLAM's."""
    with _h5(results / "patches" / f"{name}.h5") as file:
        coords = file.create_dataset("coords", data=(slide.cells * int(size * downsample)).astype(np.int32))
        coords.attrs.update(
            {
                "patch_size": size,
                "patch_level": 1,
                "downsample": np.array([downsample, downsample]),
                "downsampled_level_dim": np.array([40000, 30000]),
                "level_dim": np.array([80000, 60000]),
                "name": name,
                "save_path": "patches",
            }
        )
    path = results / "feats" / "pt_files" / f"{name}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(torch.from_numpy(slide.features), path)
    return path


def write_stamp(
    out: Path, name: str, slide: Slide, *, tile: float = 256.0, attrs: dict[str, object] | None = None
) -> Path:
    """<out>/uni2-0a1b2c3d/<name>.h5 in microns, half precision. ``attrs`` replaces those of v2 (older variants)."""
    path = out / "uni2-0a1b2c3d" / f"{name}.h5"
    current: dict[str, object] = {
        "stamp_version": "2.3.0",
        "extractor": "uni2",
        "unit": "um",
        "tile_size_um": tile,
        "tile_size_px": 224,
        "code_hash": "0a1b2c3d",
        "feat_type": "tile",
    }
    with _h5(path) as file:
        file["feats"] = slide.features.astype(np.float16)
        file["coords"] = (slide.cells * tile).astype(np.float32)
        file.attrs.update(current if attrs is None else attrs)
    return path


def write_slideflow(
    bags: Path, name: str, slide: Slide, *, step: int = 604, extractor: str = "slideflow.model.extractors.UNIFeatures"
) -> Path:
    """<bags>/<name>.pt with the tiles' centres in <name>.index.npz."""
    bags.mkdir(parents=True, exist_ok=True)
    torch.save(torch.from_numpy(slide.features), bags / f"{name}.pt")
    np.savez(bags / f"{name}.index.npz", slide.cells * step + step // 2)
    config = {
        "extractor": {"class": extractor, "kwargs": {}},
        "num_features": slide.features.shape[1],
        "tile_px": 299,
        "tile_um": 302,
    }
    (bags / "bags_config.json").write_text(json.dumps(config))
    return bags / f"{name}.pt"


def write_npz(folder: Path, name: str, slide: Slide, *, step: int = 512) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(
        folder / f"{name}.npz",
        features=slide.features,
        coords=slide.cells * step,
        patch_size_level0=step,
        encoder="uni",
    )
    return folder / f"{name}.npz"


def write_safetensors(folder: Path, name: str, slide: Slide, *, step: int = 512) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"patch_size_level0": str(float(step)), "encoder": "UNI2-h", "mpp": "None"}
    save_file(
        {"features": slide.features, "coords": slide.cells * step}, folder / f"{name}.safetensors", metadata=metadata
    )
    return folder / f"{name}.safetensors"


def write_torchmil(root: Path, name: str, slide: Slide, *, step: int = 512) -> Path:
    """One .npy a slide in separate folders."""
    for folder, array in (("features", slide.features), ("coords", slide.cells * step), ("labels", np.zeros(1))):
        (root / folder).mkdir(parents=True, exist_ok=True)
        np.save(root / folder / f"{name}.npy", array)
    return root / "features" / f"{name}.npy"


def write_h5(path: Path, *, attrs: dict[str, object] | None = None, **arrays: np.ndarray) -> Path:
    """An HDF5 file of just these arrays, attributes at its root."""
    with _h5(path) as file:
        for name, array in arrays.items():
            file[name] = array
        file.attrs.update(attrs or {})
    return path


LAYOUTS: dict[str, Callable[[Path, str, Slide], Path]] = {
    "trident": write_trident,
    "trident_pt": write_trident_pt,
    "atlaspatch": lambda folder, name, slide: write_atlaspatch(
        folder, name, slide, encoders={"uni_v2": slide.features.shape[1]}
    ),
    "clam": write_clam,
    "clam_pt": write_clam_pt,
    "stamp": write_stamp,
    "slideflow": write_slideflow,
    "npz": write_npz,
    "safetensors": write_safetensors,
    "torchmil": write_torchmil,
}


# Broken files: each writer takes the path of an .h5 file (or changes its ending) and returns what it wrote.


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
    with _h5(path) as file:
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
    with _h5(path) as file:
        file.create_dataset("features", data=slide.features, compression="lzf")
        file["coords"] = slide.cells * 512
    written = path.read_bytes()
    lzf = struct.pack("<H", h5py.h5z.FILTER_LZF)
    at = written.rindex(lzf, 0, written.index(b"lzf"))
    path.write_bytes(written[:at] + struct.pack("<H", 65000) + written[at + 2 :])
    return path


def _external(path: Path) -> Path:
    other = _good(path.with_name("elsewhere.hdf5_"))
    with _h5(path) as file:
        file["features"] = h5py.ExternalLink(str(other), "/features")
        file["coords"] = h5py.ExternalLink(str(other), "/coords")
    return path


def _soft_to_external(path: Path) -> Path:
    other = _good(path.with_name("elsewhere.hdf5_"))
    with _h5(path) as file:
        file["way"] = h5py.ExternalLink(str(other), "/")
        file["features"], file["coords"] = h5py.SoftLink("/way/features"), h5py.SoftLink("/way/coords")
    return path


def _virtual(path: Path) -> Path:
    other, slide = _good(path.with_name("elsewhere.hdf5_")), make_slide()
    layout = h5py.VirtualLayout(slide.features.shape, "f4")
    layout[...] = h5py.VirtualSource(other, "features", slide.features.shape)
    with _h5(path) as file:
        file.create_virtual_dataset("features", layout)
        file["coords"] = slide.cells * 512
    return path


def _raw_storage(path: Path) -> Path:
    slide, raw = make_slide(), path.with_name("raw.bin")
    raw.write_bytes(slide.features.tobytes())
    with _h5(path) as file:
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
