"""Small cohorts as neighbouring tools leave them on disk, with the table that their users have.

Written from the descriptions of those tools alone; nothing of the package is imported here, so that a reader's mistake is not a writer's too.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import h5py
import numpy as np
import torch

COUNT = 12
UNI2, UNI, CONCH15, CTRANSPATH = 1536, 1024, 768, 768


@dataclass(frozen=True)
class Cohort:
    """``corners``: of each slide's patches, top left, in pixels of level 0 (or microns)."""

    features: Path  # what a user calls the features
    table: Path
    corners: dict[str, np.ndarray]
    stride: float
    side: float
    unit: str = "px"
    encoder: str | None = None
    slides: Path | None = None  # a second table, of slides and their patients
    coords: Path | None = None  # a folder of positions that is not beside the features
    settings: str = ""  # lines that only the user can know
    files: int = COUNT  # that are features of patches


def tissue(seed: int) -> np.ndarray:
    """Columns and rows of a ragged piece of tissue with a hole."""
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(np.arange(7), np.arange(6)), -1).reshape(-1, 2)
    return grid[(rng.random(len(grid)) < 0.9) & ~((grid == (3, 2)).all(1))]


def values(seed: int, rows: int, width: int) -> np.ndarray:
    """Features whose mean differs between even and odd slides."""
    rng = np.random.default_rng(1000 + seed)
    return (rng.standard_normal((rows, width)) + (0.5 if seed % 2 else -0.5)).astype("float32")


def names(prefix: str = "S") -> list[str]:
    return [f"{prefix}{i:02d}" for i in range(COUNT)]


def write_lines(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def new_h5(path: Path) -> h5py.File:
    path.parent.mkdir(parents=True, exist_ok=True)
    return h5py.File(path, "w")


def save(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


# TRIDENT -------------------------------------------------------------------------------------------------------------


def trident_coords(file: h5py.File, corners: np.ndarray, name: str, overlap: int, level0: int) -> None:
    coords = file.create_dataset("coords", data=corners.astype("int64"))
    said = {
        "patch_size": 256,
        "patch_size_level0": 256 * level0 / 20.0,
        "level0_magnification": level0,
        "overlap": overlap,
    }
    said |= {
        "target_magnification": 20.0,
        "name": name,
        "savetodir": "None",
        "level0_width": 9000,
        "level0_height": 9000,
    }
    coords.attrs.update(said)


def trident(
    root: Path, *, overlap: int = 0, level0: int = 40, encoders: tuple[str, ...] = ("uni_v2",), titan: bool = False
) -> Cohort:
    """A job folder: patches/, features_<encoder>/, perhaps slide_features_titan/; labels as Patho-Bench's k=all.tsv."""
    step, side = (256 - overlap) * level0 // 20, 256 * level0 // 20
    home = root / "job" / f"20x_256px_{overlap}px_overlap"
    widths = {"uni_v2": UNI2, "conch_v15": CONCH15}
    corners = {}
    lines = ["case_id\tslide_id\tgrade\tfold_0\tfold_1"]
    for i, name in enumerate(names("TR-")):
        corners[name] = tissue(i) * step
        with new_h5(home / "patches" / f"{name}_patches.h5") as file:
            trident_coords(file, corners[name], name, overlap, level0)
        for encoder in encoders:
            with new_h5(home / f"features_{encoder}" / f"{name}.h5") as file:
                rows = values(i, len(corners[name]), widths[encoder])
                file.create_dataset("features", data=rows, chunks=(1, rows.shape[1]))
                file["features"].attrs.update({"name": name, "savetodir": str(home), "encoder": encoder})
                trident_coords(file, corners[name], name, overlap, level0)
        if titan:
            with new_h5(home / "slide_features_titan" / f"{name}.h5") as file:
                file["features"] = values(i, 1, 768)[0]
                file["features"].attrs["encoder"] = "titan"
        folds = [("test", "val", "train", "train", "train", "train")[(i // 2 + k) % 6] for k in range(2)]
        lines.append("\t".join([f"case{i}", name, ("low", "high")[i % 2], *folds]))
    table = write_lines(root / "k=all.tsv", lines)
    chosen = {"settings": "encoder: uni_v2", "files": COUNT * len(encoders)} if len(encoders) > 1 else {}
    return Cohort(root / "job", table, corners, step, side, encoder="uni_v2", **chosen)


def trident_pt(root: Path) -> Cohort:
    """saveas='pt' of the Python interface: a numpy array through torch.save; positions in patches/ alone."""
    cohort = trident(root)
    folder = root / "job" / "20x_256px_0px_overlap" / "features_uni_v2"
    for path in sorted(folder.glob("*.h5")):
        with h5py.File(path) as file:
            torch.save(file["features"][:], path.with_suffix(".pt"))
        path.unlink()
    return cohort


# AtlasPatch ----------------------------------------------------------------------------------------------------------


def atlaspatch(root: Path) -> Cohort:
    """One file per slide in patches/, features in a group; the attributes are on the file. PANDA's table."""
    corners, lines = {}, ["image_id,data_provider,isup_grade"]
    for i, name in enumerate(names("ab9f")):
        corners[name] = tissue(i) * 512 + (1000 + 37 * i, 311)  # each piece of tissue starts a lattice of its own
        count = len(corners[name])
        with new_h5(root / "out" / "patches" / f"{name}.h5") as file:
            read = np.concatenate([np.full((count, 2), 512), np.zeros((count, 1))], 1)
            file["coords"] = np.concatenate([corners[name], read], 1).astype("int32")
            file["passports"] = np.array([f"{name}|{k}" for k in range(count)], dtype="S160")
            file["features/uni_v2"] = values(i, count, UNI2)
            said = {"patch_size": 256, "patch_size_level0": 512, "level0_magnification": 40, "target_magnification": 20}
            said |= {"overlap": 0, "level0_width": 9000, "level0_height": 9000, "wsi_path": f"gone/{name}.tiff"}
            file.attrs.update({**said, "num_patches": count, "filename": name, "passport_version": 1, "mpp": 0.25})
        lines.append(f"{name},{('radboud', 'karolinska')[i // 2 % 2]},{i % 2}")
    return Cohort(
        root / "out", write_lines(root / "train.csv", lines), corners, 512, 512, encoder="uni_v2", settings="case: none"
    )


# CLAM ----------------------------------------------------------------------------------------------------------------


def clam_table(root: Path, slides: list[str]) -> Path:
    lines = ["case_id,slide_id,label"] + [
        f"patient_{i},{name},{('normal_tissue', 'tumor_tissue')[i % 2]}" for i, name in enumerate(slides)
    ]
    return write_lines(root / "dataset_csv" / "tumor_vs_normal.csv", lines)


def clam(root: Path, *, h5: str = "whole", pt: bool = True, patches: bool = False, beside: bool = True) -> Cohort:
    """FEATURES/h5_files and pt_files, no attributes anywhere; ``patches``: the patching step's patches/NAME.h5, with attributes.

    ``h5``: whole (features and coords), coords (coords alone), none. ``beside``: patches/ in the features' folder, else in another tree.
    """
    corners = {}
    for i, name in enumerate(names("slide_")):
        one = tissue(i) * 512 + (700 + 13 * i, 90)
        two = tissue(i + 50) * 512 + (20011, 8003)  # another contour, with a lattice of its own
        corners[name] = np.concatenate([one, two])
        rows = values(i, len(corners[name]), UNI)
        if h5 != "none":
            with new_h5(root / "FEATURES" / "h5_files" / f"{name}.h5") as file:
                if h5 == "whole":
                    file["features"] = rows
                file["coords"] = corners[name].astype("int32")
        if pt:
            save(root / "FEATURES" / "pt_files" / f"{name}.pt", torch.from_numpy(rows))
        if patches:
            home = root / ("FEATURES" if beside else "RESULTS")
            with new_h5(home / "patches" / f"{name}.h5") as file:
                coords = file.create_dataset("coords", data=corners[name].astype("int32"))
                said = {"patch_size": 256, "patch_level": 1, "downsample": np.array([2.0, 2.0]), "name": name}
                said |= {"downsampled_level_dim": np.array([20000, 20000]), "level_dim": np.array([20000, 20000])}
                coords.attrs.update(said | {"save_path": "RESULTS/patches"})
    table = clam_table(root, list(corners))
    if beside or not patches:
        return Cohort(root / "FEATURES", table, corners, 512, 512)
    elsewhere = {"coords": root / "RESULTS" / "patches", "settings": "coords: RESULTS/patches"}
    return Cohort(root / "FEATURES", table, corners, 512, 512, **elsewhere)


def named_directly(cohort: Cohort, folder: str) -> Cohort:
    """One of the tool's folders instead of the one above them."""
    return replace(cohort, features=cohort.features / folder)


def panther(root: Path) -> Cohort:
    """extracted_mag20x_patch256_fp/extracted-<encoder>/feats_h5 with a leading axis of one; survival of TCGA patients, names with .svs."""
    corners, lines = {}, ["case_id,slide_id,os_survival_days,os_censorship"]
    home = root / "tcga_kirc" / "extracted_mag20x_patch256_fp" / "extracted-uni2-h"
    for i in range(COUNT):
        case = f"TCGA-A{i % 3}-{4000 + i}"
        name = f"{case}-01Z-00-DX1.{i:08X}-0000-4000-8000-000000000000"
        corners[name] = tissue(i) * 512
        with new_h5(home / "feats_h5" / f"{name}.h5") as file:
            file["features"] = values(i, len(corners[name]), UNI2)[None]
            file["coords"] = corners[name][None]
        lines.append(f"{case},{name}.svs,{300 + 90 * (i * 5 % 12)},{int(i % 3 == 0)}")
    return Cohort(root / "tcga_kirc", write_lines(root / "kirc.csv", lines), corners, 512, 512, encoder="uni_v2")


# STAMP, slideflow, torchmil, tiatoolbox ------------------------------------------------------------------------------


def stamp(root: Path) -> Cohort:
    """<extractor>-<hash>/NAME.h5 in microns; a clinical table of patients, and a table that names each patient's file."""
    corners, lines, slides = {}, ["PATIENT,isMSIH"], ["PATIENT,FILENAME"]
    for i, name in enumerate(names("block_")):
        corners[name] = tissue(i) * 256.0
        with new_h5(root / "out" / "uni2-0f3ab21c" / f"{name}.h5") as file:
            file["feats"] = values(i, len(corners[name]), UNI2).astype("float16")
            file["coords"] = corners[name].astype("float32")
            said = {
                "stamp_version": "2.4.0",
                "extractor": "uni2",
                "unit": "um",
                "tile_size_um": 256.0,
                "tile_size_px": 224,
            }
            file.attrs.update(said | {"code_hash": "0f3ab21c", "feat_type": "tile"})
        lines.append(f"P{i},{('nonMSIH', 'MSIH')[i % 2]}")
        slides.append(f"P{i},uni2-0f3ab21c/{name}.h5")
    write_lines(root / "slide_table.csv", slides)
    table = write_lines(root / "clini.csv", lines)
    return Cohort(root / "out", table, corners, 256, 256, "um", "uni_v2", slides=root / "slide_table.csv")


def slideflow(root: Path) -> Cohort:
    """NAME.pt, NAME.index.npz with the centres of tiles, bags_config.json; annotations of patients and slides."""
    corners, lines = {}, ["patient,slide,subtype"]
    bags = root / "bags"
    for i, name in enumerate(names("sf")):
        corners[name] = tissue(i) * 604
        save(bags / f"{name}.pt", torch.from_numpy(values(i, len(corners[name]), CTRANSPATH)))
        np.savez(bags / f"{name}.index.npz", corners[name] + 302)
        lines.append(f"pat{i},{name},{('A', 'B')[i % 2]}")
    said = {"extractor": {"class": "slideflow.model.extractors.ctranspath.CTransPathFeatures", "kwargs": {}}}
    said |= {"normalizer": None, "num_features": CTRANSPATH, "tile_px": 299, "tile_um": 302}
    (bags / "bags_config.json").write_text(json.dumps(said))
    return Cohort(bags, write_lines(root / "annotations.csv", lines), corners, 604, 604, encoder="ctranspath")


def torchmil(root: Path) -> Cohort:
    """features/features_UNI, coords, labels and patch_labels, one .npy per slide and folder."""
    corners, lines = {}, ["wsi_name,wsi_label"]
    home = root / "patches_512_preset"
    for i, name in enumerate(names("camelyon_")):
        corners[name] = tissue(i) * 512
        count = len(corners[name])
        arrays = {"features/features_UNI": values(i, count, UNI), "coords": corners[name], "labels": np.array(i % 2)}
        for folder, array in (arrays | {"patch_labels": np.zeros(count)}).items():
            (home / folder).mkdir(parents=True, exist_ok=True)
            np.save(home / folder / f"{name}.npy", array)
        lines.append(f"{name},{i % 2}")
    return Cohort(
        home, write_lines(root / "labels.csv", lines), corners, 512, 512, encoder="uni_v1", settings="case: none"
    )


def tiatoolbox(root: Path) -> Cohort:
    """NAME.zarr with features and coordinates: bounds of each patch at baseline."""
    import zarr

    corners, lines = {}, ["slide_id,patient_id,label"]
    for i, name in enumerate(names("tia")):
        corners[name] = tissue(i) * 448
        group = zarr.open_group(str(root / "deep_features" / f"{name}.zarr"), mode="w")
        bounds = np.concatenate([corners[name], corners[name] + 448], 1)
        for key, array in (("features", values(i, len(bounds), UNI)), ("coordinates", bounds)):
            group.create_array(key, data=array)
        lines.append(f"{name},p{i},{('x', 'y')[i % 2]}")
    return Cohort(root / "deep_features", write_lines(root / "my labels.csv", lines), corners, 448, 448)


COHORTS: dict[str, Callable[[Path], Cohort]] = {
    "TRIDENT": trident,
    "TRIDENT with overlap": lambda root: trident(root, overlap=64),
    "TRIDENT at 20x": lambda root: trident(root, level0=20),
    "TRIDENT, .pt": trident_pt,
    "TRIDENT, two encoders and TITAN": lambda root: trident(root, encoders=("conch_v15", "uni_v2"), titan=True),
    "AtlasPatch": atlaspatch,
    "CLAM, h5_files and pt_files": clam,
    "CLAM, pt_files and coords-only h5_files": lambda root: clam(root, h5="coords"),
    "CLAM, pt_files and patches": lambda root: clam(root, h5="none", patches=True),
    "CLAM, pt_files named directly": lambda root: named_directly(clam(root, h5="coords"), "pt_files"),
    "CLAM, pt_files and patches of another tree": lambda root: clam(root, h5="none", patches=True, beside=False),
    "PANTHER": panther,
    "STAMP": stamp,
    "slideflow": slideflow,
    "torchmil": torchmil,
    "tiatoolbox": tiatoolbox,
}
