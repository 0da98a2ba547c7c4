"""The support table of docs/attach.md says what the code does and what the tests try."""

import ast
import re
from pathlib import Path

from gated_srp.foreign.huggingface import FRONT

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "attach.md").read_text()


def table() -> dict[str, list[str]]:
    rows = [re.split(r"\s*\|\s*", line.strip("| \n")) for line in PAGE.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in rows}


def names(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def test_the_families_of_the_table_are_the_modules_of_the_code():
    assert set(table()) == {"torch", "huggingface", "timm", "adapters"}
    files = {path.stem for path in (ROOT / "src" / "gated_srp" / "foreign").glob("*.py")}
    assert {"torch_mha", "huggingface", "timm"} <= files


def test_the_model_types_of_the_table_are_those_that_are_found():
    assert names(table()["huggingface"][0]) == set(FRONT)


def test_every_timm_class_of_the_table_is_tried():
    source = (Path(__file__).parent / "timm_checks.py").read_text()
    used = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    assert names(table()["timm"][0]) <= used


def test_every_family_has_its_three_lines_and_every_example_is_named_or_run():
    block = re.search(r"```text\n(.*?)```", PAGE, re.S).group(1)
    parts = [part.splitlines() for part in block.strip().split("\n\n")]
    assert len(parts) == len(table()) and all(len(lines) == 4 and lines[0].startswith("#") for lines in parts)
    assert sorted(path.stem for path in (ROOT / "examples" / "attach").glob("*.py")) == [
        "frozen_trunk",
        "huggingface_dinov2",
        "torchmil_transmil",
        "transformer_encoder",
    ]
