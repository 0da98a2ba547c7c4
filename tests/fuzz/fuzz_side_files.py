"""Readers of the smaller files that somebody else may have written: weights, gates, scores, row numbers, answers, tuned settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch


def _home(folder: Path, number: int = 0) -> Path:
    (home := folder / str(number)).mkdir(parents=True)
    return home


def _text(name: str, text: str) -> Callable[[Path], Iterator[Path]]:
    def write(folder: Path) -> Iterator[Path]:
        path = _home(folder) / name
        path.write_text(text)
        yield path

    return write


# What `extract` finds ------------------------------------------------------------------------------------------------


_KNOWN = {"path": "/a/s.svs", "bytes": 10, "blocks": "ab", "levels": [[9, 9]], "size": [9, 9]}


def _cells() -> np.ndarray:
    return np.stack([np.arange(12) % 4, np.arange(12) // 4], 1) * 512


def extracted(folder: Path) -> Iterator[Path]:
    """The features of a slide that are there already, in both layouts."""
    import h5py

    for number, (name, array) in enumerate({"trident": "features", "shared": "features/mean"}.items()):
        path = _home(folder, number) / f"{name}.h5"
        with h5py.File(path, "w") as file:
            file[array], file["coords"] = np.ones((12, 6), "f4"), _cells()
            file[array].attrs["gated_srp"] = json.dumps({"patch_size": 256, "slide": _KNOWN})
            file.attrs.update({"wsi_path": "/a/s.svs", "level0_width": 9, "level0_height": 9})
        yield path


def read_extracted(path: Path) -> None:
    import h5py

    from gated_srp.slides.store import LAYOUTS, AtlasPatch, Job, _copy_others
    from gated_srp.slides.tiles import Tiling

    layout = AtlasPatch if path.name == "shared.h5" else LAYOUTS["trident"]
    job = Job(Path("s.svs"), Tiling(size=64), "other", 6)
    here = type("Here", (layout,), {"path": lambda self, job: path})(path.parent)
    here.made_with(job)
    if layout is AtlasPatch:
        with h5py.File("new.h5", "w", driver="core", backing_store=False) as new:
            _copy_others(path, new, _cells(), job, _KNOWN)


def weights(folder: Path) -> Iterator[Path]:
    from safetensors.torch import save_file

    state = torch.nn.Linear(3, 2).state_dict()
    torch.save(state, _home(folder, 0) / "w.pt")
    yield folder / "0" / "w.pt"
    save_file(state, _home(folder, 1) / "w.safetensors")
    yield folder / "1" / "w.safetensors"


def read_weights(path: Path) -> None:
    from gated_srp.slides.pretrained import load_weights

    load_weights(torch.nn.Linear(3, 2), path)


def photographs(folder: Path) -> Iterator[Path]:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    for number, ending in enumerate(("png", "jpg")):
        path = _home(folder, number) / f"p.{ending}"
        Image.fromarray(pixels).save(path)
        yield path


def read_photograph(path: Path) -> None:
    from gated_srp.slides.tiles import cut_photograph

    cut_photograph(path, 16)


resolutions = _text("mpp.csv", "wsi,mpp\na.svs,0.25\nb.svs,0.5\n")


def read_resolutions(path: Path) -> None:
    from gated_srp.slides.extract import read_mpp

    read_mpp(path)


# Beside a model or a study -------------------------------------------------------------------------------------------


@cache
def _attached() -> Any:
    from torch.nn import TransformerEncoder, TransformerEncoderLayer

    from gated_srp import attach

    layer = TransformerEncoderLayer(12, 3, 12, batch_first=True)
    return attach(TransformerEncoder(layer, 2, enable_nested_tensor=False), hidden_dim=4, last=False)


def gates(folder: Path) -> Iterator[Path]:
    """A file of gates, and a folder as save_pretrained writes it."""
    from safetensors.torch import save_file

    handle = _attached()
    handle.save(_home(folder, 0) / "gates.safetensors")
    yield folder / "0" / "gates.safetensors"
    home = _home(folder, 1) / "model"
    home.mkdir()
    (home / "config.json").write_text(json.dumps({"gated_srp": handle.card()}))
    save_file({name: tensor.clone() for name, tensor in handle.model.state_dict().items()}, home / "model.safetensors")
    yield home


def read_gates(path: Path) -> None:
    _attached().load(path)


def rows(folder: Path) -> Iterator[Path]:
    home = _home(folder) / "rows"
    home.mkdir()
    for name, numbers in {"train": [0, 1, 2], "valid": [3, 4], "test": [5, 6]}.items():
        np.save(home / f"{name}.npy", np.array(numbers, object if name == "valid" else int), allow_pickle=True)
    yield home


def read_row_files(path: Path) -> None:
    import pandas as pd

    from gated_srp.data.published import from_row_files
    from gated_srp.data.table import Table

    frame = pd.DataFrame({"slide": [f"s{i}" for i in range(8)], "case": "p", "label": 0})
    from_row_files(Table(frame, "classification", ("A",)), path)


scores = _text("s.csv", "x,y,score\n" + "".join(f"{x * 512},0,0.{x}\n" for x in range(4)))


def read_scores_file(path: Path) -> None:
    from gated_srp.data import read_header
    from gated_srp.reports.maps import Patches, read_scores

    other = path.parents[1] / "patches.npz"
    if not other.exists():
        np.savez(other, features=np.ones((4, 2), "f4"), coords=np.array([[x * 512, 0] for x in range(4)]))
    read_scores(path, Patches.of(read_header(other)))


def annotations(folder: Path) -> Iterator[Path]:
    """Outlines of QuPath, ASAP and ImageScope, a mask, a table of patches."""
    from PIL import Image

    ring = [[0, 0], [90, 0], [90, 60], [0, 60], [0, 0]]
    feature = {"type": "Feature", "properties": {"objectType": "annotation", "classification": {"name": "Tumor"}}}
    feature["geometry"] = {"type": "Polygon", "coordinates": [ring, [[9, 9], [20, 9], [20, 20], [9, 9]]]}
    corners = "".join(f'<Coordinate Order="{i}" X="{x}" Y="{y}"/>' for i, (x, y) in enumerate(ring))
    vertices = "".join(f'<Vertex X="{x}" Y="{y}"/>' for x, y in ring)
    texts = {
        "a.geojson": json.dumps({"type": "FeatureCollection", "features": [feature]}),
        "b.xml": '<ASAP_Annotations><Annotations><Annotation Name="a" Type="Polygon" PartOfGroup="Tumor"><Coordinates>'
        f"{corners}</Coordinates></Annotation></Annotations></ASAP_Annotations>",
        "c.xml": '<Annotations MicronsPerPixel="0.5"><Annotation Id="1" Name="Tumor"><Regions><Region Type="0"><Vertices>'
        f"{vertices}</Vertices></Region></Regions></Annotation></Annotations>",
        "d.csv": "x,y,tumour\n0,0,1\n10,0,0\n",
    }
    for number, (name, text) in enumerate(texts.items()):
        path = _home(folder, number) / name
        path.write_text(text)
        yield path
    Image.fromarray(np.eye(10, dtype=np.uint8)).save(path := _home(folder, 4) / "e.png")
    yield path


def read_annotation_file(path: Path) -> None:
    from gated_srp.data.annotations import read_annotations

    drawn = read_annotations(path, size=(100, 100), side=10.0)
    drawn.coverage(np.array([[0, 0], [50, 50]]), 10, drawn.classes)


def predictions(folder: Path) -> Iterator[Path]:
    """Tables of predictions as CLAM, STAMP and survival tools write them."""
    clam = "slide_id,Y,Y_hat,p_0,p_1\n" + "".join(f"s{i},{i % 2},{i % 2},0.{9 - i},0.{i + 1}\n" for i in range(6))
    stamp = "PATIENT,KRAS,pred,KRAS_mut,KRAS_wt\n" + "".join(
        f"p{i},{('mut', 'wt')[i % 2]},mut,0.7,0.3\n" for i in range(6)
    )
    risk = "PATIENT,pred_score,time,event\n" + "".join(f"p{i},0.{i},{i + 1},{i % 2}\n" for i in range(6))
    for number, text in enumerate((clam, stamp, risk)):
        path = _home(folder, number) / "p.csv"
        path.write_text(text)
        yield path


def read_predictions_file(path: Path) -> None:
    from gated_srp.data.prediction_tables import read_any_predictions

    read_any_predictions(path)


def answers(folder: Path) -> Iterator[Path]:
    home = _home(folder)
    pairs = [{"slide": f"s{i}", "left": i % 2} for i in range(3)]
    key = {"sheet": "x", "runs": ["a", "b"], "value": "beta", "pairs": pairs}
    (home / "key.json").write_text(json.dumps(key))
    chosen = [{"pair": i, "choice": "left"} for i in range(3)]
    (home / "r.json").write_text(json.dumps({"sheet": "x", "reader": "R", "answers": chosen}))
    yield home / "r.json"


def read_answers(path: Path) -> None:
    from gated_srp.reports.readers import score_readers

    score_readers([path], key=path.with_name("key.json"))


tuned = _text(
    "tuned.yaml", "arm: gated_srp\nchosen:\n  42: {delta: 0.5, hidden_dim: 64}\n  43: {delta: 1.0, hidden_dim: 32}\n"
)


def read_tuned(path: Path) -> None:
    from types import SimpleNamespace

    from gated_srp.study.tuning import read_frozen

    read_frozen(SimpleNamespace(out=path.parent.parent, name=path.parent.name))  # type: ignore[arg-type]


_PLAN = """\
seeds: [1, 2]
reference: na
patients: [4, 2, 6]
recipe: {columns: 4, rows: 3, width: 8, foci: [1, 2]}
settings: {train: {epochs: 1}}
diagrams:
  one:
    task: {task: classification, target: label}
    metric: macro_auc
    arms: [na, gated_srp]
    x: {dial: slides, values: [1, 2]}
    y: {dial: train.lr, values: [0.1, 0.2]}
"""
plans = _text("plan.yaml", _PLAN)


def read_plan_file(path: Path) -> None:
    from gated_srp.simulation import points_of, read_plan

    list(points_of(read_plan(path)))
