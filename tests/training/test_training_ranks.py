import pandas as pd
import pytest
from image_cohorts import write_images
from toy_cohorts import open_config, write_cohort

from gated_srp.errors import UserError
from gated_srp.training.train import train


def test_two_ranks_compute_what_one_computes_also_in_windows_smaller_than_they_are(tmp_path):
    yaml = write_cohort(tmp_path, slides=22, train={"epochs": 2, "accumulation": 5})
    runs = by_one_and_by_two(yaml, "gated_srp")
    parts = pd.read_csv(runs[0] / "split.csv")["split"].value_counts()
    assert parts["train"] % 5 == 1  # the last window has one bag for two ranks
    compare(runs)


def test_two_ranks_share_batches_of_images(tmp_path):
    yaml = write_images(tmp_path, count=30, train={"epochs": 2, "batch_size": 3, "accumulation": 2})
    runs = by_one_and_by_two(yaml, "vit_s16_gated_srp")
    parts = pd.read_csv(runs[0] / "split.csv")["split"].value_counts()
    assert parts["train"] % 6 not in (0, 3)  # batches of the last window differ in size
    compare(runs)


def by_one_and_by_two(yaml, arm):
    configs = [open_config(yaml, out=str(yaml.parent / name)) for name in ("one", "two")]
    return [train(config, arm=arm, seed=42, devices=n).path for n, config in enumerate(configs, 1)]


def compare(runs):
    for name in ("history.csv", "gates.csv", "predictions_test_slide.csv"):
        pd.testing.assert_frame_equal(*(pd.read_csv(run / name) for run in runs), rtol=0, atol=1e-5)


def test_an_error_in_a_rank_comes_back_as_one_message(tmp_path):
    yaml = write_cohort(tmp_path, slides=12, train={"epochs": 1, "accumulation": 1})
    (next((tmp_path / "feats").rglob("s001.h5"))).write_bytes(b"")
    with pytest.raises(UserError, match="s001"):
        train(open_config(yaml), arm="na", seed=42, devices=2)
