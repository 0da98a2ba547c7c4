"""The public API: what `gated_srp` itself offers is typed, documented, light to import, and independent of the command line."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gated_srp

HERE = Path(__file__).resolve().parents[1]
SOURCE = HERE / "src" / "gated_srp"
FLOWS = {
    "init",
    "check",
    "extract",
    "train",
    "predict",
    "pretrain",
    "evaluate",
    "compare",
    "tune",
    "reproduce",
    "stats",
    "heatmap",
}
FLOWS |= {
    "budget_curve",
    "compare_targets",
    "crossval",
    "embed",
    "explain",
    "report",
    "load_model",
    "localize",
    "view",
    "simulate",
    "readers",
    "score_readers",
}
OTHERS = {"GatedSRP", "PatchGraph", "attach", "trace", "UserError", "__version__"}
QUICK = {
    "init",
    "stats",
    "load_model",
    "report",
    "heatmap",
    "score_readers",
}  # seconds: they need not say how far they are


def test_these_names_are_the_api():
    assert set(gated_srp.__all__) == FLOWS | OTHERS
    assert all(hasattr(gated_srp, name) for name in gated_srp.__all__)


@pytest.mark.parametrize("name", sorted(FLOWS))
def test_a_function_of_the_api_is_typed(name):
    signature = inspect.signature(getattr(gated_srp, name))
    assert signature.return_annotation not in (inspect.Signature.empty, None, "None")
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter


@pytest.mark.parametrize("name", sorted(FLOWS))
def test_a_function_of_the_api_takes_at_most_two_arguments_by_position(name):
    parameters = inspect.signature(getattr(gated_srp, name)).parameters.values()
    assert sum(one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for one in parameters) <= 2


@pytest.mark.parametrize("name", sorted(FLOWS))
def test_a_function_of_the_api_says_what_it_takes_what_it_returns_and_how_it_is_called(name):
    words = inspect.getdoc(getattr(gated_srp, name))
    assert "Args:" in words and "Returns:" in words
    assert re.search(rf">>> .*\b{name}\(", words) or name == "load_model"  # whose example begins with `with`
    for parameter in inspect.signature(getattr(gated_srp, name)).parameters:
        assert re.search(rf"\b{parameter}\b", words), f"{name} does not explain {parameter}"


@pytest.mark.parametrize("name", sorted(FLOWS - QUICK))
def test_a_long_function_of_the_api_takes_the_one_progress_callback(name):
    from gated_srp.progress import silent

    assert inspect.signature(getattr(gated_srp, name)).parameters["progress"].default is silent


@pytest.mark.parametrize("name", sorted(FLOWS))
def test_the_page_of_the_api_lists_the_function_with_all_its_arguments(name):
    page = (HERE / "docs" / "api.md").read_text()
    listed = re.search(rf"^{name}\((.*?)\)$", page, re.M | re.S)
    assert listed, f"docs/api.md lacks {name}"
    assert re.findall(r"(\w+)(?==|,|\)|$)", re.sub(r"=[^,]*", "", listed.group(1)).replace("*,", "")) == list(
        inspect.signature(getattr(gated_srp, name)).parameters
    )


def test_the_package_itself_imports_nothing_heavy():
    code = (
        "import sys, gated_srp; print([m for m in ('torch', 'numpy', 'pandas', 'typer', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


BELOW = sorted(path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "cli")


@pytest.mark.parametrize("path", BELOW, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_below_the_command_line_prints_or_imports_its_tools(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {name.split(".")[0] for name in names} & {"typer", "rich", "click"}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            assert "file" in [
                keyword.arg for keyword in node.keywords
            ]  # a worker's answers to the process that started it


def test_the_help_of_every_command_loads_no_torch():
    code = """
import sys
from typer.main import get_command
from typer.testing import CliRunner
from gated_srp.cli import app
names = sorted(get_command(app).commands)
for name in names:
    assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0, name
print(len(names), [m for m in ("torch", "numpy", "pandas", "yaml", "h5py") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    number, heavy = done.stdout.strip().split(" ", 1)
    assert int(number) >= 18 and heavy == "[]"


def test_the_page_of_the_api_names_every_command_that_is_no_function():
    import typer

    from gated_srp.cli import app

    page = (HERE / "docs" / "api.md").read_text("utf-8")
    named = re.findall(r"`(\w+)`", re.search(r"\(all but (.*?)\)", page, re.DOTALL)[1])
    commands = typer.main.get_command(app).commands
    assert named == sorted(name for name in commands if name not in gated_srp.__all__)
