"""Every example runs as a user would run it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# What a notebook does: its cells in order in one namespace; a value at the end of a cell is shown.
SHOW = """
import ast, json, sys
names = {"__name__": "__main__"}
for source in json.load(open(sys.argv[1], encoding="utf-8")):
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is not None:
        value = eval(compile(last, "cell", "eval"), names)
        shown = value._repr_html_() if hasattr(value, "_repr_html_") else repr(value)
        print("shown:", type(value).__name__, len(shown))
"""


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    plain = {**os.environ, "MPLBACKEND": "agg"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=folder, check=False, env=plain
    )


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda p: p.stem)
def test_the_example_runs(path, tmp_path):
    done = run([str(path)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.ipynb")), ids=lambda p: p.stem)
def test_the_notebook_runs_from_top_to_bottom_and_everything_it_ends_a_cell_with_can_be_shown(path, tmp_path):
    notebook = json.loads(path.read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    done = run(["-W", "error::UserWarning", "-c", SHOW, "cells.json"], tmp_path)
    assert done.returncode == 0, done.stderr
    shown = dict(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("shown: "))
    for name in ("Check", "CompareResult", "Heatmaps"):
        assert int(shown[name]) > 50


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_is_kept_without_outputs(path):
    cells = json.loads(path.read_text())["cells"]
    assert all(cell.get("outputs", []) == [] and cell.get("execution_count") is None for cell in cells)
