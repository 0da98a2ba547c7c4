"""The settings in words and as a JSON schema: every key, and nothing that the loader would not take."""

import re
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any

import pytest
import yaml

from gated_srp.config.schema import fields, json_schema, meanings

HERE = Path(__file__).resolve().parents[2]
SCHEMA = json_schema()


KINDS = {"string": str, "integer": int, "number": (int, float), "null": type(None), "array": list, "object": dict}


def valid(value: Any, schema: dict[str, Any]) -> bool:
    """By the keywords that our schema uses."""
    if "anyOf" in schema:
        return any(valid(value, one) for one in schema["anyOf"])
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    fits = (
        "boolean" in types
        if isinstance(value, bool)
        else any(isinstance(value, KINDS[one]) for one in types if one in KINDS)
    )
    if types and not fits:
        return False
    if isinstance(value, dict):
        inner = schema["properties"]
        return set(value) <= set(inner) and all(valid(value[key], inner[key]) for key in value)
    if isinstance(value, list) and "items" in schema:
        return all(valid(one, schema["items"]) for one in value)
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return False
    for rule, kept in (("minimum", ge), ("maximum", le), ("exclusiveMinimum", gt), ("exclusiveMaximum", lt)):
        if rule in schema and not kept(value, schema[rule]):
            return False
    return value in schema.get("enum", [value]) and value == schema.get("const", value)


def test_every_setting_is_described_once_and_nothing_else_is():
    described = [key for keys in meanings().values() for key in keys]
    assert sorted(described) == sorted(fields()), (
        "add its line to src/gated_srp/config/settings.yaml, then run docs/generate.py"
    )


YAMLS = [
    (page.name, text)
    for page in (HERE / "README.md", *sorted((HERE / "docs").glob("*.md")))
    for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S)
]


@pytest.mark.parametrize(("page", "text"), YAMLS, ids=[page for page, _ in YAMLS])
def test_an_editor_accepts_the_settings_that_the_pages_show(page, text):
    assert valid(yaml.safe_load(text), SCHEMA)


@pytest.mark.parametrize(
    "text",
    ["cache: bags", "cache: {folder: bags, dtype: float16}", "folds: 5", "folds: {number: 5, by: site}", "seeds: 7", "seeds: [1, 2]",
     "classes: [0, 1]", "classes: [no, yes]", "train: {precision: 32}", "train: {precision: bf16-mixed}", "train: {precision: 32-true}",
     "train: {precision: bf16, clip: }", "cap:", "arms: na", "features: [a, b]",
     "train: {log: wandb}", "train: {log: [wandb, mlflow]}", "train: {only: gate}", "task: survival", "model:", "images: pictures"],
)  # fmt: skip
def test_short_forms_and_numbers_as_words_are_accepted(text):
    assert valid(yaml.safe_load(text), SCHEMA)


@pytest.mark.parametrize(
    "text",
    ["epochs: 5", "train: {epoch: 5}", "train: {epochs: 0}", "train: {lr: 0}", "model: {drop_path: 1}", "task: regressin", "window: 2",
     "lattice: round", "train: {only: base}", "folds: 1", "folds: {number: 5, by: scanner}", "seeds: [-1]", "name: /mine"],
)  # fmt: skip
def test_what_the_loader_would_refuse_is_underlined(text):
    assert not valid(yaml.safe_load(text), SCHEMA)
