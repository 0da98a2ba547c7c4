"""Imports point down the layers of docs/design.md, and the light parts stay light."""

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import gated_srp

SOURCE = Path(__file__).resolve().parents[1] / "src" / "gated_srp"
LAYERS = {
    "bounded": 0,
    "errors": 0,
    "files": 0,
    "machine": 0,
    "progress": 0,
    "records": 0,
    "streams": 0,
    "srp": 1,
    "models": 2,
    "foreign": 2,
    "tasks": 2,
    "data": 3,
    "slides": 4,
    "config": 4,
    "checks": 5,
    "training": 6,
    "study": 7,
    "reports": 8,
    "study/__init__": 9,  # its names are resolved on first use
    "study/comparison": 9,  # the flows: they run a study and write its report
    "study/cross_validation": 9,
    "study/prediction_comparison": 9,
    "study/targets": 9,
    "study/tuning": 9,
    "study/reproduction": 9,
    "demo": 10,
    "simulation": 10,
    "cohort_draft": 10,
    "cli": 11,
}
BESIDE = {
    ("foreign", "models"),
    ("files", "errors"),
    ("bounded", "errors"),
    ("simulation", "demo"),  # whose generator it turns the dials of
    ("records", "errors"),
    ("records", "files"),
}  # same layer, one may see the other


def room(path: Path) -> str:
    """A package or module below `gated_srp`; a module of a package where the table names it."""
    return _room(path.relative_to(SOURCE).with_suffix("").parts)


def _room(parts: Sequence[str]) -> str:
    return "/".join(parts[:2]) if "/".join(parts[:2]) in LAYERS else parts[0]


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        found |= {_room(name.split(".")[1:]) for name in names if name.startswith("gated_srp.")}
    return found


FILES = [p for p in sorted(SOURCE.rglob("*.py")) if p.parent != SOURCE or p.stem != "__init__"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path):
    here = room(path)
    assert here in LAYERS, f"{here} has no room in the design"
    for other in imported_rooms(path) - {here}:
        below = LAYERS[other] < LAYERS[here] or (
            LAYERS[other] == LAYERS[here] and other.split("/")[0] == here.split("/")[0]
        )
        assert below or (here, other) in BESIDE, f"{here} must not import {other}"


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_help_does_not_import_torch():
    code = "import sys\nfrom gated_srp.cli import app\nprint([m for m in ('torch', 'pandas', 'numpy', 'h5py', 'yaml', 'pydantic') if m in sys.modules])"
    assert run(code) == "[]"


def test_the_help_of_a_command_does_not_import_torch():
    code = (
        "import sys, typer\nfrom typer.testing import CliRunner\nfrom gated_srp.cli import app\n"
        "names = list(typer.main.get_command(app).commands)\n"
        "codes = {CliRunner().invoke(app, [name, '--help']).exit_code for name in names}\n"
        "print(len(names) > 15, codes, [m for m in ('torch', 'pandas', 'numpy', 'h5py') if m in sys.modules])"
    )
    assert run(code) == "True {0} []"


def test_the_core_needs_torch_alone():
    heavy = "('h5py', 'pandas', 'pydantic', 'yaml', 'lightning', 'torchmetrics', 'safetensors', 'matplotlib', 'typer', 'rich')"
    code = f"import sys\nimport gated_srp.srp, gated_srp.models, gated_srp.foreign\nprint([m for m in {heavy} if m in sys.modules])"
    assert run(code) == "[]"


def test_no_file_is_longer_than_400_lines():
    sources = Path(gated_srp.__file__).parent.rglob("*.py")
    long = {path.name: lines for path in sources if (lines := len(path.read_text().splitlines())) > 400}
    assert not long
