"""The one YAML that describes a cohort and what to do with it.

    config = load_config("cohort.yaml")

Strings are resolved here, once: presets, defaults of the task, paths. Everything after this works with a frozen `CohortConfig`.
"""

import difflib
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from gated_srp.config.presets import find_cohort
from gated_srp.config.schema import CacheConfig, CohortConfig, FoldsConfig, ImagesConfig, ModelConfig, TrainConfig
from gated_srp.config.yamlfile import Settings, read_settings
from gated_srp.data.files.encoders import canonical
from gated_srp.data.tables.columns import Columns, resolve_columns
from gated_srp.data.tables.read import read_frame
from gated_srp.errors import UserError
from gated_srp.models import ARMS
from gated_srp.tasks import find_task, named_task, task_names

__all__ = ["CacheConfig", "CohortConfig", "FoldsConfig", "ImagesConfig", "ModelConfig", "TrainConfig", "load_config"]

_IMAGE_RECIPE = find_cohort("ADP").recipe  # whatever the task
_PATHS = ("labels", "features", "images", "table", "slides", "split", "cache", "out")
_SHORT = {"cache": "folder", "folds": "number", "images": "folder"}  # sections that may be written as one value
_UNEXPANDED = re.compile(r"^~|\$[A-Za-z_{]")


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> CohortConfig:
    """Read a cohort's YAML. The user's settings win over the preset's, those over the task's defaults.

    ``overrides`` win over the file: ``{"train.lr": 1e-3, "cap": None}``; their paths are relative to the current folder.
    """
    settings = read_settings(path)
    home = settings.path.absolute().parent
    values = {key: _placed(key, value, home, settings) for key, value in settings.values.items()}
    _override(values, overrides or {}, settings)
    _complete(values, settings)
    try:
        config = CohortConfig.model_validate(values)
    except ValidationError as error:
        raise _explained(error, settings) from None
    logging.getLogger(__name__).debug("%s: %s", path, config.model_dump_json(exclude_defaults=True))
    return config


def _placed(key: str, value: Any, home: Path, settings: Settings) -> Any:
    """A path setting made absolute; other values as they are."""
    if key not in _PATHS:
        return value
    if key in ("cache", "images") and isinstance(value, dict) and "folder" in value:
        return value | {"folder": _placed(key, value["folder"], home, settings)}
    if isinstance(value, list):
        return [_placed(key, item, home, settings) for item in value]
    if not isinstance(value, str | Path):
        return value
    if _UNEXPANDED.search(str(value)) and not (home / value).exists():
        raise settings.error(
            (key,), f"{key}: {str(value)!r} is taken as it stands: ~ and $NAME are not expanded. Write the path out."
        )
    return str(home / value)


def _override(values: dict[str, Any], overrides: Mapping[str, Any], settings: Settings) -> None:
    """``{"train.lr": x}`` and ``{"train": {"lr": x}}`` alike change one value and leave the rest of the section."""
    for key, value in overrides.items():
        top, _, inner = key.partition(".")
        changes = {inner: value} if inner else value
        if isinstance(changes, Mapping):
            section = values.get(top) or {}
            old = section if isinstance(section, Mapping) else {_SHORT.get(top, ""): section}
            values[top] = {**old, **_placed(top, dict(changes), Path.cwd(), settings)}
        else:
            values[top] = _placed(top, value, Path.cwd(), settings)


def _complete(values: dict[str, Any], settings: Settings) -> None:
    """Fill in what was not said: from the preset, then from the task. What has the wrong type is left to validation."""
    preset = None
    if isinstance(values.get("cohort"), str):
        try:
            preset = find_cohort(values["cohort"])
        except UserError as error:
            raise settings.error(("cohort",), f"cohort: {error}") from None
        values["cohort"] = preset.name
    if isinstance(values.get("encoder"), str):
        values["encoder"] = canonical(values["encoder"])
    if preset:
        told: dict[str, Any] = {"name": preset.name, "metric": preset.metric, "score": preset.score, "cap": preset.cap}
        values |= {key: value for key, value in told.items() if key not in values}
        values.setdefault("seeds", preset.seeds)
        if preset.images and not values.get("features"):
            values.setdefault("images", {})
        if values.get("task") in (None, preset.task):
            values |= {"task": preset.task, "classes": values.get("classes") or preset.classes or None}
    values["task"] = task = values.get("task") or _task_of(values)
    kind = find_task(task if task in task_names() else None)  # an unknown one is refused by validation
    values.setdefault("name", settings.path.stem)
    values.setdefault("out", str(settings.path.absolute().parent / "runs"))
    values.setdefault("metric", kind.selects[0])
    values.setdefault("score", kind.score)
    section = values.get("train") or {}
    if isinstance(section, dict):
        own = _IMAGE_RECIPE if values.get("images") is not None else kind.recipe
        values["train"] = asdict(preset.recipe if preset and preset.task == kind.name else own) | section
    for key in ("model", "cache"):
        if values.get(key, {}) is None:
            del values[key]
    if values.get("images") is not None:
        arms = {name: arm for name, arm in ARMS.items() if arm.images}
        values.setdefault("arms", tuple(arms))
        section = values.get("model", {})
        defaults = dict(next(iter(arms.values())).defaults)
        values["model"] = defaults | section if isinstance(section, dict) else section


def _task_of(values: dict[str, Any]) -> Any:
    """What the named columns or, failing that, the table's usual columns allow; None where there is no table."""
    if kind := named_task(values):
        return kind.name
    if not isinstance(values.get("table"), str):
        return None
    frame, _ = read_frame(values["table"], sheet=values.get("sheet"))
    return resolve_columns(frame, Columns(), None, Path(values["table"]))[1]


def _explained(error: ValidationError, settings: Settings) -> UserError:
    """All that is wrong, one line each, with the file's lines and the nearest key."""
    found = []
    for item in error.errors(include_url=False):
        keys = tuple(str(key) for key in item["loc"])
        said = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            said = _unknown(keys, settings)
        elif keys:
            given = repr(item["input"]) if len(repr(item["input"])) < 60 else "this"
            said = f"{'.'.join(keys)}: {said[0].lower()}{said[1:]}, found {given}."
        found.append(str(settings.error(keys, said)))
    return UserError("\n".join(dict.fromkeys(found)))


def _unknown(keys: tuple[str, ...], settings: Settings) -> str:
    sections: dict[str, type[BaseModel]] = {
        "model": ModelConfig,
        "train": TrainConfig,
        "folds": FoldsConfig,
        "cache": CacheConfig,
        "images": ImagesConfig,
    }
    schema = sections.get(keys[0], CohortConfig) if len(keys) > 1 else CohortConfig
    near = difflib.get_close_matches(keys[-1].lower(), schema.model_fields, n=1, cutoff=0.5)
    elsewhere = [f"{name}.{keys[-1]}" for name, section in sections.items() if keys[-1] in section.model_fields]
    hint = [*elsewhere, *near] if len(keys) == 1 else [f"{keys[0]}.{key}" for key in near]
    cure = f"Did you mean {hint[0]}?" if hint else f"Known: {', '.join(schema.model_fields)}."
    return f"{'.'.join(keys)}: no such setting. {cure}"
