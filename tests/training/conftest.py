"""One finished run that many tests look at."""

from pathlib import Path

import pytest
from toy_cohorts import open_config, write_cohort

from gated_srp.training.train import train


@pytest.fixture(scope="session")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A planted cohort's YAML; tests write their runs elsewhere."""
    return write_cohort(tmp_path_factory.mktemp("cohort"))


@pytest.fixture(scope="session")
def finished(cohort: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of it."""
    config = open_config(cohort, out=str(tmp_path_factory.mktemp("runs")))
    return train(config, arm="gated_srp", seed=42).path
