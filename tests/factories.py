"""Writers of small feature files in every tool's layout and its awkward forms; broken ones are in broken_files.py.

A `Slide` is cells of one lattice and a feature row each; each writer lays the same slide out as its tool does.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def open_h5(path: Path) -> h5py.File:
    """A new file, its folders too."""
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
    with open_h5(path) as file:
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
    with open_h5(home / "patches" / f"{name}_patches.h5") as file:
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
    with open_h5(path) as file:
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
    with open_h5(path) as file:
        file["features"] = slide.features
        file["coords"] = (slide.cells * step).astype(np.int32)
    tensor = feats / "pt_files" / f"{name}.pt"
    tensor.parent.mkdir(parents=True, exist_ok=True)
    torch.save(torch.from_numpy(slide.features), tensor)
    return path


def write_clam_pt(results: Path, name: str, slide: Slide, *, size: int = 256, downsample: float = 2.0) -> Path:
    """<results>/feats/pt_files/<name>.pt with positions in <results>/patches/<name>.h5, whose attributes are CLAM's."""
    with open_h5(results / "patches" / f"{name}.h5") as file:
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
    with open_h5(path) as file:
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
    with open_h5(path) as file:
        for name, array in arrays.items():
            file[name] = array
        file.attrs.update(attrs or {})
    return path


def peak() -> int:
    """The most bytes of address space that this process ever had (Linux)."""
    return int(Path("/proc/self/status").read_text().split("VmPeak:")[1].split()[0]) * 1024


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


def draw(path: Path, **shapes: Any) -> Path:
    """A GeoJSON with one outline (of shapely) per class, as QuPath writes it."""
    import shapely

    features = [
        {
            "type": "Feature",
            "geometry": json.loads(shapely.to_geojson(shape)),
            "properties": {"classification": {"name": name}},
        }
        for name, shape in shapes.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    return path
