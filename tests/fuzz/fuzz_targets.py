"""Every reader of a file that somebody else may have written, with small good files to begin from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuzz_side_files as side
import numpy as np
import torch
from factories import LAYOUTS, make_slide
from fuzz_damage import Files, Seed

from gated_srp.errors import UserError

CORPUS = Path(__file__).parent / "corpus"
FIXTURES = Path(__file__).parents[1] / "fixtures" / "v0_1"


@dataclass(frozen=True)
class Target:
    """``read`` opens the main file or folder; ``seeds`` writes good ones; ``share``: cases in relation to the others."""

    read: Callable[[Path], Any]
    seeds: Callable[[Path], Iterator[Path]]
    share: float = 1.0

    def good(self, folder: Path) -> list[Seed]:
        """Good files."""
        found = []
        for number, main in enumerate(self.seeds(folder)):
            home = folder / str(number) if (folder / str(number)).is_dir() else folder
            found.append((str(main.relative_to(home)), packed(home)))
        return found


def corpus(name: str) -> list[Seed]:
    """Bad files for this target."""
    return [(path.name, {path.name: path.read_bytes()}) for path in sorted(CORPUS.glob(f"{name}/*"))]


def packed(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def unpacked(files: Files, folder: Path) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


# Feature files -------------------------------------------------------------------------------------------------------


def _features(*layouts: str) -> Callable[[Path], Iterator[Path]]:
    def write(folder: Path) -> Iterator[Path]:
        for number, layout in enumerate(layouts):
            yield LAYOUTS[layout](folder / str(number), "s", make_slide(columns=4, rows=3, width=6))

    return write


def _legacy(folder: Path) -> Iterator[Path]:
    slide = make_slide(columns=4, rows=3, width=6)
    (folder / "0").mkdir(parents=True)
    content = {"features": torch.from_numpy(slide.features), "coords": torch.from_numpy(slide.cells * 512)}
    torch.save(content, folder / "0" / "s.pt", _use_new_zipfile_serialization=False)
    yield folder / "0" / "s.pt"


def _compressed(folder: Path) -> Iterator[Path]:
    import h5py

    slide = make_slide(columns=8, rows=6, width=6)
    (folder / "0").mkdir(parents=True)
    with h5py.File(folder / "0" / "s.h5", "w") as file:
        options = {"compression": "gzip", "shuffle": True, "fletcher32": True}
        file.create_dataset("features", data=slide.features, chunks=(4, 6), maxshape=(None, 6), **options)
        file.create_dataset("coords", data=slide.cells * 512, chunks=(8, 2), compression="lzf")
        file.attrs.update({"patch_size_level0": 512, "encoder": "uni_v2", "wsi_path": "a/b.svs"})
    yield folder / "0" / "s.h5"


def _zarr(folder: Path) -> Iterator[Path]:
    import zarr

    slide = make_slide(columns=4, rows=3, width=6)
    for number, version in enumerate((2, 3)):
        group = zarr.open_group(str(folder / str(number) / "s.zarr"), mode="w", zarr_format=version)
        shards = {"shards": (8, 6)} if version == 3 else {}
        group.create_array("features", data=slide.features, chunks=(4, 6), **shards)
        corners = slide.cells * 512
        group.create_array("coordinates", data=np.concatenate([corners, corners + 512], 1), chunks=(4, 4))
        yield folder / str(number) / "s.zarr"


def _read_features(path: Path) -> None:
    from gated_srp.data import read_bag, read_header

    read_header(path)
    read_bag(path)


def _images(folder: Path) -> Iterator[Path]:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)
    for number, ending in enumerate(("png", "jpg", "tif", "bmp")):
        (folder / str(number)).mkdir(parents=True)
        Image.fromarray(pixels).save(folder / str(number) / f"s.{ending}")
        yield folder / str(number) / f"s.{ending}"


def _read_image(path: Path) -> None:
    from gated_srp.data.files.images import ImageGrid, image_header, read_image

    image_header(path, ImageGrid(32, 16))
    read_image(path, ImageGrid(32, 16), None)


def _slides(folder: Path) -> Iterator[Path]:
    import tifffile

    image = np.random.default_rng(0).integers(0, 255, (96, 160, 3), np.uint8)
    for number, tile in enumerate(((32, 32), None)):
        (folder / str(number)).mkdir(parents=True)
        path = folder / str(number) / "s.tif"
        with tifffile.TiffWriter(path) as file:
            options = {"photometric": "rgb", "compression": "zlib", "resolution": (2e4, 2e4), "resolutionunit": 3}
            file.write(image, tile=tile, **options)
            file.write(image[::4, ::4], tile=tile, subfiletype=1, **options)
        yield path


def _ome_zarr(folder: Path) -> Iterator[Path]:
    from slides.test_ome_zarr import write_ome_zarr

    pixels = np.random.default_rng(0).integers(1, 255, (96, 160, 3), np.uint8)
    for number, version in enumerate(("0.4", "0.5")):
        (folder / str(number)).mkdir(parents=True)
        yield write_ome_zarr(folder / str(number) / "s.zarr", pixels, axes=("tczyx", "yxc")[number], version=version)


def _read_slide(path: Path) -> None:
    from gated_srp.slides.reader import SlideImage

    with SlideImage(path) as slide:
        slide.read(0, 0, level=0, size=(64, 64))
        slide.overview(max(1.0, max(slide.info.size) / 256))


# Tables, settings, splits --------------------------------------------------------------------------------------------

_TABLE = "slide_id,case_id,label,site,note,time,event\n" + "".join(
    f's{i},p{i // 2},{"AB"[i // 2 % 2]},{"xyz"[i % 3]},"a, b",{i // 2 + 0.5},{i // 2 % 2}\n' for i in range(12)
)


def _tables(folder: Path) -> Iterator[Path]:
    import io

    import pandas as pd

    frame = pd.read_csv(io.StringIO(_TABLE))
    for number, ending in enumerate(("csv", "tsv", "xlsx", "parquet")):
        path = folder / str(number) / f"t.{ending}"
        path.parent.mkdir(parents=True)
        if ending == "xlsx":
            frame.to_excel(path, index=False)
        elif ending == "parquet":
            frame.to_parquet(path)
        else:
            frame.to_csv(path, index=False, sep="," if ending == "csv" else "\t")
        yield path


def _read_table(path: Path) -> None:
    from gated_srp.data.table import read_table

    with first_refusal() as tried:
        tried(lambda: read_table(path, task="classification"))
        tried(lambda: read_table(path, task="survival"))


_YAML = """\
name: toy
features: feats
table: table.csv
task: classification
target: label
classes: [A, B]
window: 3
model: {dim: 12, depth: 1, num_heads: 3}
train:
  epochs: 2
  lr: 1e-3
arms: [na, gated_srp]
seeds: [42, 43]
folds: {number: 3, by: patient}
cache: {folder: cache, dtype: float16}
split: null
"""


def _configs(folder: Path) -> Iterator[Path]:
    home = folder / "0"
    (home / "feats").mkdir(parents=True)
    for i in range(12):
        np.savez(home / "feats" / f"s{i}.npz", features=np.ones((2, 3), "f4"), coords=np.array([[0, 0], [512, 0]]))
    (home / "table.csv").write_text(_TABLE)
    (home / "cohort.yaml").write_text(_YAML)
    yield home / "cohort.yaml"


def _read_config(path: Path) -> None:
    from gated_srp.config import load_config
    from gated_srp.config.cohort import open_cohort

    data = open_cohort(load_config(path))
    data.slides(seed=42)


def _splits(folder: Path) -> Iterator[Path]:
    units = [f"s{i}" for i in range(12)]
    clam = "train,val,test\n" + "".join(f"s{i},s{i + 4},s{i + 8}\n" for i in range(4))
    bools = "slide_id,train,val,test\n" + "".join(f"s{i},{i < 4},{4 <= i < 8},{i >= 8}\n" for i in range(12))
    own = "slide_id,split\n" + "".join(f"{u},{('train', 'val', 'test')[i // 4]}\n" for i, u in enumerate(units))
    stamp = {"splits": [{"train_patients": ["p0", "p1", "p2", "p3"], "test_patients": ["p4", "p5"]}]}
    texts = {"a.csv": clam, "b.csv": bools, "c.csv": own, "d.json": json.dumps(stamp)}
    for number, (name, text) in enumerate(texts.items()):
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / name).write_text(text)
        yield folder / str(number) / name


def _read_split(path: Path) -> None:
    import pandas as pd

    from gated_srp.data.imported_splits import import_split
    from gated_srp.data.table import Table

    rows = [(f"s{i}", f"p{i // 2}", i // 2 % 2) for i in range(12)]
    import_split(path, Table(pd.DataFrame(rows, columns=["slide", "case", "label"]), "classification", ("A", "B")))


def _results(folder: Path) -> Iterator[Path]:
    rows = [f"toy,{arm},{seed},macro_f1,0.{seed}{len(arm)}\n" for arm in ("na", "gated_srp") for seed in (42, 43, 44)]
    (folder / "0").mkdir(parents=True)
    (folder / "0" / "results.csv").write_text("cohort,arm,seed,metric,value\n" + "".join(rows))
    yield folder / "0" / "results.csv"


def _read_results(path: Path) -> None:
    from gated_srp.study.results import compare_results, read_results

    frame, notes = read_results(path)
    str(compare_results(frame, frame["arm"].iloc[0], notes=notes))  # the reference is an option, not in the file


# What runs and studies write -----------------------------------------------------------------------------------------


def _runs(*kinds: str) -> Callable[[Path], Iterator[Path]]:
    def copy(folder: Path) -> Iterator[Path]:
        for number, kind in enumerate(kinds):
            shutil.copytree(FIXTURES / kind, folder / str(number) / "runs")
            for config in (folder / str(number)).rglob("config.yaml"):
                config.write_text(config.read_text().replace("@HERE@@@@@@@@", "here"))
            yield folder / str(number) / "runs"

    return copy


_FINISHED = ("classification/runs/toy/gated_srp", "multilabel/runs/toy/na", "survival/runs/toy/gated_srp")


def _read_run(path: Path) -> None:
    from gated_srp.training.folder import RunFolder
    from gated_srp.training.state import load_checkpoint
    from gated_srp.training.trained import TrainedRun

    home = path / "seed42"
    run = RunFolder(home)
    readers: list[Callable[[], Any]] = [
        *(lambda: run.settings, lambda: run.environment, lambda: run.results, lambda: run.history, lambda: run.gates),
        *(lambda: run.split, lambda: run.metrics("test"), lambda: run.metrics("val", "slide"), run._repr_html_),
        *(
            (lambda part=p, level=v: run.finished and run.predictions(part, level))
            for p in ("val", "test")
            for v in ("slide", "case")
        ),
        lambda: run.begun and load_checkpoint(run.state),
        lambda: run.finished and _use(TrainedRun.open(home)),
    ]
    with first_refusal() as tried:
        for reader in readers:
            tried(reader)


def _use(run: Any) -> None:
    str(run), run.task, run.encoder, run.images, run.temperature, run.features, run.width, run.covariates, run.patients
    if not run.card.get("regions"):  # whose annotations are not here
        run.preparation()
    run.load()


@contextmanager
def first_refusal() -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Goes on after a refusal, so that one damaged file does not hide what another does; raises the first at the end."""
    refused: list[UserError] = []

    def tried(reader: Callable[[], Any]) -> None:
        try:
            reader()
        except UserError as error:
            refused.append(error)

    yield tried
    if refused:
        raise refused[0]


def _compared(folder: Path) -> Iterator[Path]:
    from reports.page_folders import compared

    yield compared(folder / "0")


def _read_report(path: Path) -> None:
    from gated_srp.reports.page import build_page

    build_page(path)


def _models(folder: Path) -> Iterator[Path]:
    from gated_srp.models import build_model
    from gated_srp.models.store import save_model

    for number, arm in enumerate(("gated_srp", "na", "abmil")):
        path = folder / str(number) / "model.safetensors"
        card = {"task": "classification", "classes": ["a", "b"], "temperature": 1.5, "encoder": "uni_v2", "window": 3}
        card |= {"stride": [{"value": 512.0, "unit": "px", "um": 128.0}]}
        save_model(build_model(arm, in_dim=4, num_outputs=2, dim=12, num_heads=3, depth=1), path, card)
        yield path
    card["covariates"] = [
        {"name": "age", "mean": 50.0, "std": 9.5, "gaps": True},
        {"name": "sex", "categories": ["f", "m"], "gaps": False},
    ]
    card["regions"] = {"only": ["tumour"], "exclude": ["pen"], "cover": 0.5, "unannotated": "refuse"}
    model = build_model("na", in_dim=4, num_outputs=2, dim=12, num_heads=3, depth=1, covariates=4)
    save_model(model, folder / "3" / "model.safetensors", card)
    yield folder / "3" / "model.safetensors"
    model.save_pretrained(folder / "4" / "hub", card=card)
    yield folder / "4" / "hub"


def _read_model(path: Path) -> None:
    from gated_srp.training.trained import TrainedRun

    _use(TrainedRun.open(path))


def _checkpoints(folder: Path) -> Iterator[Path]:
    from models.test_published import write

    (folder / "0").mkdir(parents=True)
    write(folder / "0" / "best.pt", "gated_srp", {"variant": "srp_patch_signed_gated"})
    yield folder / "0" / "best.pt"


def _read_checkpoint(path: Path) -> None:
    from gated_srp.models.published import load_published

    load_published(path)


def _caches(folder: Path) -> Iterator[Path]:
    from gated_srp.data.cache import BagCache
    from gated_srp.data.prepared import Preparation

    home = folder / "0"
    home.mkdir(parents=True)
    np.savez(home / "s.npz", features=np.eye(4, dtype="f4"), coords=np.array([[0, 0], [512, 0], [0, 512], [512, 512]]))
    BagCache(home / "cache").read(home / "s.npz", Preparation())
    yield home / "s.npz"


def _read_cache(path: Path) -> None:
    from gated_srp.data.cache import BagCache
    from gated_srp.data.prepared import Preparation

    BagCache(path.parent / "cache").read(path, Preparation())


def _drawings(folder: Path) -> Iterator[Path]:
    from reports.page_folders import draw

    svg = '<svg xmlns="http://www.w3.org/2000/svg" width="10pt" height="5pt"><defs><clipPath id="c"><rect width="3"/></clipPath>'
    svg += '</defs><g clip-path="url(#c)" onclick="x()"><text x="1">a &amp; b</text><use href="#c"/></g><script>1</script></svg>'
    home = folder / "0"
    home.mkdir(parents=True)
    (home / "a.svg").write_text(svg)
    draw(home / "b.png")
    yield home / "a.svg"


def _read_drawing(path: Path) -> None:
    from gated_srp.reports.page.contents import inline_svg, small_png

    inline_svg(path, "p-")
    small_png(path.with_name("b.png"))


TARGETS: dict[str, Target] = {
    "hdf5": Target(_read_features, _features("trident", "atlaspatch", "clam", "stamp"), 2.0),
    "hdf5_compressed": Target(_read_features, _compressed, 2.0),
    "torch": Target(_read_features, _features("trident_pt", "clam_pt", "slideflow")),
    "torch_legacy": Target(_read_features, _legacy),
    "numpy": Target(_read_features, _features("npz", "torchmil")),
    "safetensors": Target(_read_features, _features("safetensors")),
    "zarr": Target(_read_features, _zarr),
    "images": Target(_read_image, _images),
    "slides": Target(_read_slide, _slides),
    "ome_zarr": Target(_read_slide, _ome_zarr),
    "tables": Target(_read_table, _tables, 2.0),
    "settings": Target(_read_config, _configs, 2.0),
    "splits": Target(_read_split, _splits),
    "results": Target(_read_results, _results),
    "runs": Target(_read_run, _runs(*_FINISHED), 2.0),
    "states": Target(_read_run, _runs("classification/begun/toy/gated_srp")),
    "models": Target(_read_model, _models),
    "checkpoints": Target(_read_checkpoint, _checkpoints),
    "caches": Target(_read_cache, _caches),
    "drawings": Target(_read_drawing, _drawings),
    "extracted": Target(side.read_extracted, side.extracted),
    "weights": Target(side.read_weights, side.weights),
    "photographs": Target(side.read_photograph, side.photographs, 0.5),
    "resolutions": Target(side.read_resolutions, side.resolutions, 0.2),
    "gates": Target(side.read_gates, side.gates, 0.5),
    "rows": Target(side.read_row_files, side.rows, 0.5),
    "scores": Target(side.read_scores_file, side.scores, 0.3),
    "annotations": Target(side.read_annotation_file, side.annotations),
    "predictions": Target(side.read_predictions_file, side.predictions),
    "answers": Target(side.read_answers, side.answers, 0.3),
    "tuned": Target(side.read_tuned, side.tuned, 0.3),
    "plans": Target(side.read_plan_file, side.plans, 0.3),
    "report": Target(_read_report, _runs("classification/runs", "survival/runs"), 0.05),
    "report_compared": Target(_read_report, _compared, 0.1),
}
