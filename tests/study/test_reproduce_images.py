"""The architecture study on ADP's own files, made small: planned, trained, collected, beside the published numbers."""

from pathlib import Path

import numpy as np
import pytest
from image_cohorts import write_image

from gated_srp.config import COHORTS
from gated_srp.study.cells import Cell
from gated_srp.study.comparison import collect
from gated_srp.study.paper import read_studies
from gated_srp.study.reproduction import Sources, beside_published, plan_study
from gated_srp.study.worker import run_cell

FOLDER = Path(__file__).resolve().parents[2] / "studies"
SMALL = {
    **{"images.size": 32, "images.patch": 8, "model.dim": 12, "model.num_heads": 2, "model.depth": 2},
    **{"train.epochs": 1, "train.batch_size": 8, "train.workers": 0},
}


def write_adp(folder: Path, count: int = 24) -> None:
    """Its table, its three row files and its images, as they are released."""
    names = [f"{i:03d}.png_crop_{i}.png" for i in range(count)]
    labels = np.random.default_rng(0).integers(0, 2, (count, 38))
    rows = [",".join([name, *map(str, one)]) for name, one in zip(names, labels, strict=True)]
    header = ",".join(["Patch Names", *COHORTS["ADP"].classes])
    (folder / "ADP_EncodedLabels_Release1_Flat.csv").write_text("\n".join([header, *rows]) + "\n")
    parts = np.split(np.arange(count), [count // 2, 3 * count // 4])
    for part, numbers in zip(("train", "valid", "test"), parts, strict=True):
        np.save(folder / f"{part}.npy", numbers)
    for i, name in enumerate(names):
        write_image(folder / "img" / name, i, (int(labels[i, 0]), int(labels[i, 1])))


def test_adps_cells_run_and_stand_beside_the_papers_numbers(tmp_path):
    write_adp(tmp_path)
    sources = Sources({"ADP": tmp_path / "img"}, {"ADP": tmp_path}, tmp_path / "runs", SMALL)
    study = read_studies("architecture", FOLDER)[0]
    cells, notes = plan_study(study, sources, cohorts=["ADP"], seeds=[42])
    assert [(cell.row, cell.arm) for cell in cells] == [
        ("MHSA", "vit_s16"),
        ("Gated SRP", "vit_s16_gated_srp"),
        ("Gated SRP, untuned (δ 1, h 64)", "vit_s16_gated_srp"),
    ]
    assert [note.split(":")[0] for note in notes] == ["set by hand"] and len({cell.key for cell in cells}) == 3
    for cell in cells:
        assert Cell.from_spec(cell.spec()).settings == cell.settings
        assert run_cell(cell.spec()) == cell.key
    found = beside_published(study, collect(cells))
    adp = found[(found["cohort"] == "ADP") & found["published"].notna()]
    assert adp["mean"].notna().all() and adp["seeds"].eq(1).all() and len(adp) == 8
    assert adp["difference"].tolist() == pytest.approx((adp["mean"] - adp["published"]).tolist())
    assert set(found.loc[found["cohort"] == "PANDA", "verdict"]) == {"not run", "not published"}
