import pandas as pd
import pytest
from toy_cohorts import open_config, write_cohort

from gated_srp.errors import UserError
from gated_srp.training import train_run


def test_two_ranks_compute_what_one_computes_also_in_windows_smaller_than_they_are(tmp_path):
    yaml = write_cohort(tmp_path, slides=22, train={"epochs": 2, "accumulation": 5})
    one, two = (open_config(yaml, out=str(tmp_path / name)) for name in ("one", "two"))
    runs = [
        train_run(config, arm="gated_srp", seed=42, devices=devices, quiet=True)
        for devices, config in ((1, one), (2, two))
    ]
    parts = pd.read_csv(runs[0] / "split.csv")["split"].value_counts()
    assert parts["train"] % 5 == 1  # the last window has one bag for two ranks
    for name in ("history.csv", "gates.csv", "predictions_test_slide.csv"):
        pd.testing.assert_frame_equal(*(pd.read_csv(run / name) for run in runs), rtol=0, atol=1e-5)


def test_an_error_in_a_rank_comes_back_as_one_message(tmp_path):
    yaml = write_cohort(tmp_path, slides=12, train={"epochs": 1, "accumulation": 1})
    (next((tmp_path / "feats").rglob("s001.h5"))).write_bytes(b"")
    with pytest.raises(UserError, match="s001"):
        train_run(open_config(yaml), arm="na", seed=42, devices=2, quiet=True)
