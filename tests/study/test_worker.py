"""Speed and memory, measured on a small cohort."""

from training.toy_cohorts import open_config, write_cohort

from gated_srp.study.cells import Row, plan
from gated_srp.study.worker import measure_cell


def test_speed_and_memory_are_measured_and_leave_no_run_behind(tmp_path):
    config = open_config(write_cohort(tmp_path, slides=16))
    cell = plan(config, [Row("Gated SRP", "gated_srp", {"train.epochs": 1})], [42])[0]
    found = measure_cell(cell.spec())
    assert set(found) == {"peak_reserved_gib", "train_wsi_per_second", "test_wsi_per_second"}
    assert found["train_wsi_per_second"] > 0
    assert found["test_wsi_per_second"] > 0
    assert 0.05 < found["peak_reserved_gib"] < 64  # of this whole process
    assert not cell.key.exists()
