"""timm, in a process of its own with a stub torchvision: its wheel would pull torchvision in, which must not be here.

Install it apart and say where: pip install --no-deps --target FOLDER timm; GATED_SRP_TIMM=FOLDER pytest tests/foreign/test_timm.py
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def folder() -> str:
    named = os.environ.get("GATED_SRP_TIMM")
    if named:
        return named
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None:
        pytest.skip("timm is not installed; see the head of this file for how it is tested")
    return str(Path(spec.origin).parents[1])


def test_timms_vision_transformers_and_eva(tmp_path):
    command = [sys.executable, "-W", "error", str(HERE / "timm_checks.py"), folder()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "all checks passed" in done.stdout
