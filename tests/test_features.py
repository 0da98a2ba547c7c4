"""The table of features of docs/coming_from.md is true for our column: whatever a "yes" names exists."""

import ast
import re
from pathlib import Path

import pytest
import typer

import gated_srp
from gated_srp.cli import app
from gated_srp.config.schema import fields

HERE = Path(__file__).resolve().parents[1]


def rows() -> list[list[str]]:
    lines = (HERE / "docs" / "coming_from.md").read_text().split("## Features", 1)[1].splitlines()
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return found[2:]  # without header and rule


def exists(name: str) -> bool:
    """A command with options, a function of the API, a key of the YAML, or a test."""
    if name.startswith("gated-srp "):
        command, *options = name.split()[1:]
        found = typer.main.get_command(app).commands.get(command)
        return found is not None and set(options) <= {option for param in found.params for option in param.opts}
    if name.startswith("gated_srp."):
        return name.removeprefix("gated_srp.") in gated_srp.__all__
    if name.startswith("tests/"):
        path, _, test = name.partition("::")
        if not (HERE / path).is_file():
            return False
        functions = {
            node.name for node in ast.walk(ast.parse((HERE / path).read_text())) if isinstance(node, ast.FunctionDef)
        }
        return not test or test in functions
    return name in fields()


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_every_yes_of_ours_names_what_exists(row):
    assert len(row) == 6 and all(row), "six cells: the feature, ours, STAMP, CLAM, TRIDENT, Patho-Bench"
    said = re.fullmatch(r"(yes|part:.*?|no)((?: `[^`]+`)*)", row[1])
    assert said, f"our cell is yes, part: ... or no, then names in backticks: {row[1]!r}"
    names = re.findall(r"`([^`]+)`", said[2])
    assert names or said[1] == "no"
    assert [name for name in names if not exists(name)] == []


def test_what_does_not_exist_is_found_out():
    assert not any(
        map(exists, ("gated-srp fly", "gated-srp crossval --wings", "gated_srp.fly", "tests/test_fly.py", "train.fly"))
    )
    assert not exists("tests/test_features.py::test_fly") and len(rows()) > 15


def test_the_page_names_commands_and_options_that_exist():
    """Every gated-srp command on the page, up to the next comma or backtick."""
    text = (HERE / "docs" / "coming_from.md").read_text()
    commands = typer.main.get_command(app).commands
    for said in re.findall(r"`gated-srp ([^`]+)`", text):
        command, *words = said.split()
        assert command in commands, said
        known = {option for param in commands[command].params for option in param.opts}
        assert {word for word in words if word.startswith("-")} <= known, said
