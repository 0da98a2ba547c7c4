"""timm, in a process of its own with a stub torchvision: its wheel would pull torchvision in, which must not be here.

`make` puts it into .venv/timm (pip install --no-deps --target). Elsewhere: GATED_SRP_TIMM=FOLDER pytest tests/foreign/test_timm.py
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
MADE = HERE.parents[1] / ".venv" / "timm"


@pytest.fixture(scope="module")
def folder() -> str:
    named = os.environ.get("GATED_SRP_TIMM")
    if named or (MADE / "timm").is_dir():
        return named or str(MADE)
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None:
        pytest.skip("timm is not installed; see the head of this file for how it is tested")
    return str(Path(spec.origin).parents[1])


def test_timms_vision_transformers_eva_and_beit(folder, tmp_path):
    command = [sys.executable, "-W", "error", str(HERE / "timm_checks.py"), folder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-4000:]
    assert "all checks passed" in done.stdout


def test_torchvision_and_timm_stay_out_of_this_process():
    assert not {"torchvision", "timm"} & set(sys.modules)
