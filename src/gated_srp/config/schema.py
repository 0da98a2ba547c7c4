"""The settings of a cohort's YAML for people and editors: what each key means (settings.yaml), and the file's JSON schema."""

from importlib.resources import files
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from gated_srp.config.cohort import CohortConfig
from gated_srp.config.load import SHORT, config_sections
from gated_srp.models import ARMS
from gated_srp.tasks import task_names

_TEXT = {"type": ["string", "number", "boolean"]}  # a class may be called 0 or no: the loader reads all of them as text


def meanings() -> dict[str, dict[str, str]]:
    """Subject -> key -> what it means; the keys of sections are spelt ``train.epochs``."""
    words: dict[str, dict[str, str]] = yaml.safe_load(
        files(__package__).joinpath("settings.yaml").read_text(encoding="utf-8")
    )
    return words


def fields() -> dict[str, FieldInfo]:
    """All keys, those of sections too, as the schema has them."""
    found = dict(CohortConfig.model_fields)
    for name, section in config_sections().items():
        found |= {f"{name}.{key}": field for key, field in section.model_fields.items()}
    return found


def json_schema() -> dict[str, Any]:
    """What an editor needs to complete and check a cohort's YAML: every key optional, short forms allowed, all in words."""
    raw = CohortConfig.model_json_schema()
    words = {key: text for keys in meanings().values() for key, text in keys.items()}
    named = {definition["title"]: definition for definition in raw.pop("$defs").values()}
    top = _loosened(raw["properties"], "", words)
    for name, section in config_sections().items():
        inner = _loosened(named[section.__name__]["properties"], f"{name}.", words)
        whole: dict[str, Any] = {"type": "object", "properties": inner, "additionalProperties": False}
        short = [inner[SHORT[name]]] if name in SHORT else []
        top[name] = {"description": words.get(name, ""), "anyOf": [*short, whole, {"type": "null"}]}
    top["task"] |= {"anyOf": [{"enum": list(task_names())}, {"type": "null"}]}
    precision = top["train"]["anyOf"][-2]["properties"]["precision"]["anyOf"][0]
    precision["enum"] += ["32-true", "bf16-mixed"]  # Lightning's names of the same
    top["arms"]["anyOf"][0] = {"type": "string", "examples": list(ARMS)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The cohort's YAML of gated-srp",
        "type": "object",
        "properties": top,
        "additionalProperties": False,
    }


def _loosened(properties: dict[str, Any], section: str, words: dict[str, str]) -> dict[str, Any]:
    """As the loader takes them: one value for a list, numbers for text, nothing for a default."""
    found = {}
    for key, stored in properties.items():
        field = {name: value for name, value in stored.items() if name not in ("title", "default", "$ref")}
        options = [_text(option) for option in field.pop("anyOf", [field]) if "$ref" not in option]
        lists = [_text(option["items"]) for option in options if option.get("type") == "array" and "items" in option]
        either = [*lists, *options, {"type": "null"}]
        distinct = [option for number, option in enumerate(either) if option not in either[:number]]
        found[key] = {"anyOf": distinct, "description": words.get(section + key, "")}
    return found


def _text(option: dict[str, Any]) -> dict[str, Any]:
    if "enum" in option:
        numbers = [int(value) for value in option["enum"] if str(value).isdigit()]
        return {"enum": [*option["enum"], *numbers]}
    if option.get("type") == "array":
        return option | {"items": _text(option["items"])} if "items" in option else option
    exact = {"pattern", "const"} & set(option)
    return _TEXT if option.get("type") == "string" and not exact else option
