"""Pages that are made from the program say what it says."""

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gated_srp.cli import app
from gated_srp.models import ARMS

DOCS = Path(__file__).resolve().parents[1] / "docs"
spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


@pytest.mark.parametrize("name", generate.PAGES)
def test_a_page_is_what_the_program_would_write_now(name):
    assert (DOCS / name).read_text(encoding="utf-8") == generate.PAGES[name](), "run: python docs/generate.py"


def test_every_arm_says_what_it_does_on_the_page_and_on_the_screen():
    page, said = (DOCS / "arms.md").read_text(), CliRunner().invoke(app, ["arms"]).output
    for name, arm in ARMS.items():
        assert (
            arm.about
            and f"`{name}`" in page
            and arm.about in page
            and f"\n{name} " in f"\n{said}"
            and arm.about in said
        )
    assert "a survival time is none" in page and "not for survival or multilabel" in said


def test_the_schema_is_printed_as_json():
    shown = CliRunner().invoke(app, ["schema"])
    assert json.loads(shown.stdout)["properties"]["train"]["anyOf"][0]["properties"]["epochs"]["description"]
