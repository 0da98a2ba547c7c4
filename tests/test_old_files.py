"""Run folders, states, model files, cache entries and gate files of older versions are read, and give what they gave."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from scipy.special import expit, logit
from training.toy_cohorts import open_config, write_cohort, write_survival_cohort, write_yaml

from gated_srp import attach
from gated_srp.data.cache import BagCache
from gated_srp.data.prepared import Preparation, prepare
from gated_srp.training.predict import predict
from gated_srp.training.train import train

OLD = Path(__file__).with_name("fixtures") / "v0_1"
PLACE = b"@HERE@@@@@@@@"
RUNS = (
    "classification/runs/toy/gated_srp/seed42",
    "survival/runs/toy/gated_srp/seed42",
    "multilabel/runs/toy/na/seed42",
)


def write_multilabel(folder: Path) -> Path:
    write_cohort(folder, slides=12)
    rows = ["slide,case,inflamed,necrotic", *(f"s{i:03d},p{i:03d},{i % 2},{int(i % 4 > 1)}" for i in range(12))]
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    return write_yaml(folder, target=["inflamed", "necrotic"], train={"epochs": 2})


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """The old folders beside the cohorts that they were made of."""
    here = tmp_path_factory.mktemp("old") / "v0_1"
    shutil.copytree(OLD, here)
    for path in here.rglob("*"):
        if path.suffix in (".yaml", ".json", ".txt"):
            path.write_bytes(path.read_bytes().replace(PLACE, str(here).encode()))
    settings = {"cache": "cache", "train": {"epochs": 3, "accumulation": 3}}
    write_cohort(here / "classification", slides=14, strength=0.5, **settings)
    write_survival_cohort(here / "survival", slides=15, train={"epochs": 2})
    write_multilabel(here / "multilabel")
    return here


def numbers(run: Path) -> dict[str, np.ndarray]:
    """What a run computed, by file and name."""
    found = {name: tensor.numpy() for name, tensor in load_file(run / "model.safetensors").items()}
    for name in ("history.csv", "gates.csv", "predictions_test_slide.csv", "predictions_val_slide.csv"):
        table = pd.read_csv(run / name, float_precision="round_trip")
        found |= {f"{name} {column}": table[column].to_numpy() for column in table.select_dtypes("number")}
    return found


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> bool:
    assert found.keys() == expected.keys()
    return all(np.allclose(found[n], expected[n], rtol=tolerance, atol=tolerance, equal_nan=True) for n in expected)


def test_a_run_begun_by_the_old_code_ends_with_the_bits_of_the_old_code(old, tmp_path):
    config = open_config(old / "classification/cohort.yaml", out=str(tmp_path))
    torch.set_num_threads(1)
    expected = numbers(OLD / RUNS[0])
    fresh = numbers(train(config, arm="gated_srp", seed=42).path)
    assert same(fresh, expected, 1e-4)
    begun = open_config(old / "classification/cohort.yaml", out=str(old / "classification/begun"))
    resumed = train(begun, arm="gated_srp", seed=42).path
    assert "goes on at epoch 2, bag" in (resumed / "log.txt").read_text()
    # Another processor rounds otherwise; one that computes the old bits from the start must also end with them.
    assert same(numbers(resumed), expected, 0.0 if same(fresh, expected, 0.0) else 1e-4)


@pytest.mark.parametrize("run", RUNS)
def test_an_old_finished_run_predicts_what_it_predicted(old, run):
    truth = pd.read_csv(OLD / run / "predictions_test_slide.csv")
    feats = old / run.split("/")[0] / "feats/20x_256px_0px_overlap/features_uni_v2"
    found = predict([old / run], [feats / f"{slide}.h5" for slide in truth["slide"]]).table
    column = "risk" if "risk" in truth else next(name for name in truth if name.startswith("prob"))
    assert np.allclose(found[column], truth[column], atol=1e-5)
    temperature = json.loads((OLD / run / "metrics.json").read_text())["temperature"]
    if column != "risk" and temperature != 1.0:  # fitted by a version that asked for no number of slides
        calibrated = found[column.replace("prob_", "calibrated_")]
        assert np.allclose(expit(logit(calibrated) * temperature), truth[column], atol=1e-5)


def test_an_old_finished_run_is_left_alone(old):
    config = open_config(old / "survival/cohort.yaml", out=str(old / "survival/runs"))
    before = (old / RUNS[1] / "metrics.json").stat().st_mtime_ns
    assert (train(config, arm="gated_srp", seed=42).path / "metrics.json").stat().st_mtime_ns == before


def test_an_old_cache_entry_has_the_name_and_the_content_of_a_new_one(old, tmp_path):
    file = old / "classification/feats/20x_256px_0px_overlap/features_uni_v2/s000.h5"
    kept = load_file(next((OLD / "classification/cache").glob("s000-*")))
    BagCache(tmp_path).read(file, Preparation())
    new = load_file(next(tmp_path.glob("s000-*")))
    assert kept.keys() == new.keys()
    assert all(torch.equal(kept[n], new[n]) or torch.allclose(kept[n], new[n], atol=1e-6) for n in kept)
    assert prepare(file, Preparation()).features.shape == kept["features"].shape


def test_old_gates_load_into_the_same_architecture():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    handle = attach(
        torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), delta=1.0, hidden_dim=4, last=True
    )
    handle.load(OLD / "gates.safetensors")
    values = torch.cat([p.flatten() for group in handle.param_groups(weight_decay=0.0) for p in group["params"]])
    kept = torch.cat([value.flatten() for value in load_file(OLD / "gates.safetensors").values()])
    assert torch.equal(values.sort().values, kept.sort().values) and values.abs().sum() > 1
