"""The one YAML that describes a cohort and what to do with it.

    config = load_config("cohort.yaml")

Strings are resolved here, once: presets, defaults of the task, paths. Everything after this works with a frozen `CohortConfig`.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from gated_srp.config.cohort import CohortConfig
from gated_srp.data.columns import Columns, resolve_columns
from gated_srp.data.files.siblings import canonical
from gated_srp.data.spreadsheet import read_frame
from gated_srp.errors import Note, UserError
from gated_srp.files import as_stored
from gated_srp.models import ARMS
from gated_srp.tasks import find_task, named_task, task_names

_IMAGE_ARMS = ("vit_s16", "vit_s16_xsa", "vit_s16_diff", "vit_s16_gated_srp")  # what the paper compares on images
_PATHS = (
    "labels",
    "features",
    "features_low",
    "coords",
    "images",
    "table",
    "slides",
    "split",
    "exclude",
    "cache",
    "regions",
    "out",
)
_INSIDE = {
    "cache": "folder",
    "images": "folder",
    "regions": "annotations",
}  # sections, and which of their values is a path
SHORT = {"cache": "folder", "folds": "number", "images": "folder"}  # sections that may be written as one value
_NULLS = {"", "~", "null", "Null", "NULL"}
_DEEPEST = 6
_LARGEST = 2**20  # bytes
_LONGEST = 4000  # bytes of a path
_MOST_VALUES = 100_000
_UNEXPANDED = re.compile(r"^~|\$[A-Za-z_{]")


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> CohortConfig:
    """Read a cohort's YAML. The user's settings win over the preset's, those over the task's defaults.

    ``overrides`` win over the file: ``{"train.lr": 1e-3, "cap": None}``; their paths are relative to the current folder.
    """
    settings = read_settings(path)
    home = settings.path.absolute().parent
    values = {key: _placed(key, value, home, settings) for key, value in settings.values.items()}
    config = _validated(values, overrides or {}, settings)
    logging.getLogger(__name__).debug("%s: %s", path, config.model_dump_json(exclude_defaults=True))
    return config


def _validated(values: dict[str, Any], overrides: Mapping[str, Any], settings: Settings) -> CohortConfig:
    _override(values, overrides, settings)
    _complete(values, settings)
    try:
        return CohortConfig.model_validate(values)
    except ValidationError as error:
        raise _explained(error, settings) from None


def with_changes(
    cohort: str | Path | CohortConfig, settings: Mapping[str, Any] | None = None, out: str | Path | None = None
) -> CohortConfig:
    """A cohort's settings, from its file or at hand, with some changed; ``out`` is where its runs are written."""
    changes = dict(settings or {}) | ({"out": str(out)} if out else {})
    if not isinstance(cohort, CohortConfig):
        return load_config(cohort, changes)
    return _validated(_said(cohort, changes), changes, Settings(Path(cohort.name), {})) if changes else cohort


def _said(cohort: CohortConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A cohort's settings as plain values, without what `_complete` would fill in: another task or preset fills in its own.

    A value that somebody wrote into the file and that is the usual one cannot be told from it.
    """
    plain = cohort.model_dump(mode="json")
    open_keys = {"metric", "score", "train"}
    open_keys |= {"name", "cap", "seeds", "classes"} if cohort.cohort or "cohort" in changes else set()
    open_keys |= {"arms", "model"} if cohort.images or "images" in changes else set()
    columns = {"target", "time", "event", "censorship", "table"} & changes.keys()
    open_keys |= {"task"} if columns and "task" not in changes else set()  # which may take a look into the table
    bare = {key: value for key, value in plain.items() if key not in open_keys}
    usual = _validated(bare, {}, Settings(Path(cohort.name), {})).model_dump(mode="json")
    for key in open_keys:
        if isinstance(plain[key], dict):
            plain[key] = {name: value for name, value in plain[key].items() if usual[key][name] != value}
        elif plain[key] == usual[key]:
            del plain[key]
    return plain


def for_arm(config: CohortConfig, arm: str) -> CohortConfig:
    """The same settings with the window that an arm needs, where it needs one of its own, and without a second magnification if it takes none."""
    changes: dict[str, Any] = {} if arm not in ARMS else {"window": ARMS[arm].window or config.window}
    changes |= {"features_low": None} if arm in ARMS and ARMS[arm].scales == 1 else {}
    changed = {key: value for key, value in changes.items() if value != getattr(config, key)}
    return config.model_copy(update=changed) if changed else config


def arm_notes(config: CohortConfig, arm: str) -> list[Note]:
    """What `for_arm` changes, in words."""
    own, said = for_arm(config, arm), []
    if own.window != config.window:
        about = f"{arm} needs neighbours in a window of {own.window} (it says itself which windows it uses), not of {config.window}"
        said.append(Note("note", "window", f"{about} as the cohort sets it"))
    if own.features_low != config.features_low:
        taking = [name for name, other in ARMS.items() if other.scales > 1]
        what = f"features_low: {arm} sees the patches of `features` alone"
        said.append(Note("note", "scales", what, cure=f"Arms that see both magnifications: {', '.join(taking)}."))
    return said


def _placed(key: str, value: Any, home: Path, settings: Settings) -> Any:
    """A path setting made absolute; other values as they are."""
    if key not in _PATHS or (key == "exclude" and isinstance(value, list | tuple)):
        return value
    if isinstance(value, dict) and (inner := _INSIDE.get(key, "")) in value:
        return value | {inner: _placed(key, value[inner], home, settings)}
    if isinstance(value, list):
        return [_placed(key, item, home, settings) for item in value]
    if not isinstance(value, str | Path):
        return value
    text = str(value)
    if "\0" in text or len(os.fsencode(text)) > _LONGEST or max(len(os.fsencode(p)) for p in text.split("/")) > 255:
        what = f"{key}: {text[:40]!r} is no path: it is too long, or holds a character that no name has"
        raise settings.error((key,), what, "Write a path that exists.")
    if _UNEXPANDED.search(str(value)) and not (home / value).exists():
        what = f"{key}: {str(value)!r} is taken as it stands: ~ and $NAME are not expanded"
        raise settings.error((key,), what, "Write the path out.")
    return str(as_stored(home / value))


def _override(values: dict[str, Any], overrides: Mapping[str, Any], settings: Settings) -> None:
    """``{"train.lr": x}`` and ``{"train": {"lr": x}}`` alike change one value and leave the rest of the section."""
    for key, value in overrides.items():
        top, _, inner = key.partition(".")
        settings.changed.add(tuple(key.split(".")))
        changes = {inner: value} if inner else value
        if isinstance(changes, Mapping):
            section = values.get(top) or {}
            old = section if isinstance(section, Mapping) else {SHORT.get(top, ""): section}
            values[top] = {**old, **_placed(top, dict(changes), Path.cwd(), settings)}
        else:
            values[top] = _placed(top, value, Path.cwd(), settings)


def _complete(values: dict[str, Any], settings: Settings) -> None:
    """Fill in what was not said: from the preset, then from the task. What has the wrong type is left to validation."""
    preset = None
    if isinstance(values.get("cohort"), str):
        from gated_srp.config.presets import find_cohort  # not above: a cohort of one's own needs none of it

        try:
            preset = find_cohort(values["cohort"])
        except UserError as error:
            raise settings.error(("cohort",), f"cohort: {error.what}", error.cure) from None
        values["cohort"] = preset.name
    if isinstance(values.get("encoder"), str):
        values["encoder"] = canonical(values["encoder"])
    if values.get("bag") == "patient":
        values.setdefault("score", "case")
    if preset:
        for key in ("name", "metric", "score", "cap", "seeds"):
            values.setdefault(key, getattr(preset, key))
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
        own = kind.recipe
        if values.get("images") is not None:  # the paper's for images, but none is left out of a small cohort's epochs
            from gated_srp.config.presets import find_cohort

            own = replace(find_cohort("ADP").recipe, drop_last=False)
        values["train"] = asdict(preset.recipe if preset and preset.task == kind.name else own) | section
    for key in ("model", "cache"):
        if values.get(key, {}) is None:
            del values[key]
    if values.get("images") is not None:
        values.setdefault("arms", _IMAGE_ARMS)
        if isinstance(section := values.get("model", {}), dict):
            values["model"] = dict(ARMS[_IMAGE_ARMS[0]].defaults) | section


def _task_of(values: dict[str, Any]) -> Any:
    """What the named columns or, failing that, the table's usual columns allow; None where there is no table."""
    if kind := named_task(values):
        return kind.name
    if not isinstance(values.get("table"), str):
        return None
    frame, _ = read_frame(values["table"], sheet=values.get("sheet"))
    named = {key: values[key] for key in ("slide", "case", "site") if isinstance(values.get(key), str)}
    if values.get("slides"):  # then the slides are a column of the other table
        named.pop("slide", None)
    return resolve_columns(frame, Columns(**named), None, Path(values["table"]))[1]


def _explained(error: ValidationError, settings: Settings) -> UserError:
    """All that is wrong, one line each, with the file's lines and the nearest key."""
    found = []
    for item in error.errors(include_url=False):
        keys = tuple(str(key) for key in item["loc"])
        said = (
            item["msg"]
            .removeprefix("Value error, ")
            .replace("is not a valid path for <class 'pathlib.Path'>", "should be a path")
        )
        if item["type"] == "string_pattern_mismatch":  # of `name`, which folders are called by
            said = "should be letters, digits, spaces or . + - _, and begin with a letter or a digit"
        if item["type"] == "extra_forbidden":
            found.append(str(settings.error(keys, f"{'.'.join(keys)}: no such setting", _nearest(keys))))
            continue
        elif keys:
            given = repr(item["input"]) if len(repr(item["input"])) < 60 else "this"
            said = f"{'.'.join(keys)}: {said[0].lower()}{said[1:]}, found {given}."
        found.append(str(settings.error(keys, said)))
    return UserError("\n".join(dict.fromkeys(found)))


def config_sections() -> dict[str, type[BaseModel]]:
    """The settings that are sections with settings of their own: ``train``, ``model``, ..."""
    kinds = {key: get_args(field.annotation) or (field.annotation,) for key, field in CohortConfig.model_fields.items()}
    own = {
        key: [kind for kind in found if isinstance(kind, type) and issubclass(kind, BaseModel)]
        for key, found in kinds.items()
    }
    return {key: found[0] for key, found in own.items() if found}


def _nearest(keys: tuple[str, ...]) -> str:
    """The setting that was probably meant."""
    sections = config_sections()
    schema = sections.get(keys[0], CohortConfig) if len(keys) > 1 else CohortConfig
    near = difflib.get_close_matches(keys[-1].lower(), schema.model_fields, n=1, cutoff=0.5)
    elsewhere = [f"{name}.{keys[-1]}" for name, section in sections.items() if keys[-1] in section.model_fields]
    hint = [*elsewhere, *near] if len(keys) == 1 else [f"{keys[0]}.{key}" for key in near]
    return f"Did you mean {hint[0]}?" if hint else f"Known: {', '.join(schema.model_fields)}."


# YAML as plain text values with the line of each key. Only the schema knows whether ``no``, ``007``, ``1e-4`` or ``null`` is a word
# or a number, so scalars stay text: YAML's own guesses turn a class called ``no`` into False and a learning rate of ``1e-4`` into a word.


@dataclass(frozen=True)
class Settings:
    """``values``: nested dicts and lists of text; None where a key is empty or null. ``lines``: of each key's path."""

    path: Path
    values: dict[str, Any]
    lines: dict[tuple[str, ...], int] = field(default_factory=dict)
    changed: set[tuple[str, ...]] = field(default_factory=set)  # keys that were given beside the file

    def error(self, keys: tuple[str, ...], what: str, cure: str = "") -> UserError:
        """An error at a key: the file, and the line of the key or of the section around it; or that it is not the file's."""
        if any(keys[:n] in self.changed for n in range(1, len(keys) + 1)):
            return UserError(what, where=f"a setting given beside {self.path} (--set)", cure=cure, kind="setting")
        known = next((self.lines[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in self.lines), None)
        return self.at(known, what, cure)

    def at(self, line: int | None, what: str, cure: str) -> UserError:
        """An error in a line."""
        where = f"{self.path}, line {line}" if line else str(self.path)
        return UserError(what, where=where, cure=cure, kind="setting")


def read_settings(path: str | Path) -> Settings:
    """Read a YAML file; broken YAML, a key written twice, tags and anything but a mapping are refused with their line."""
    path = as_stored(path)
    try:
        if path.stat().st_size > _LARGEST:
            what = "larger than a file of settings can be"
            raise UserError(what, where=path, cure="Expected a short YAML file.", kind="setting")
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except FileNotFoundError:
        cure = "Expected the cohort's YAML; `gated-srp init FOLDER TABLE` writes one."
        raise UserError("no such file", where=path, cure=cure, kind="missing") from None
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        raise UserError(what, where=path, cure="Expected the cohort's YAML file.", kind="setting") from None
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text ({error.reason})"
        raise UserError(what, where=path, cure="Save it again as plain text.", kind="setting") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise _broken(path, error) from None
    settings = Settings(path, {})
    if node is None:
        return settings
    if not isinstance(node, yaml.MappingNode):
        raise UserError("expected settings as `key: value`, one per line", where=path, kind="setting")
    if _count(node, {}) > _MOST_VALUES:
        what = f"more than {_MOST_VALUES:,} values, by anchors that are used again and again"
        raise UserError(what, where=path, cure="Write the values out.", kind="setting")
    settings.values.update(_mapping(node, settings, ()))
    return settings


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Values with every use of an anchor written out, each node looked at once; an anchor inside itself is found elsewhere."""
    if id(node) not in known:
        known[id(node)] = 0
        inside = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for item in inside for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_count(part, known) for part in parts)
    return known[id(node)]


def _broken(path: Path, error: Exception) -> UserError:
    mark = getattr(error, "problem_mark", None)
    said = getattr(error, "problem", None) or str(error) or type(error).__name__
    cure = "Correct this line. Indent with spaces, not tabs." if "\\t" in said else "Correct this line."
    what = f"not valid YAML ({' '.join(said.split())})"
    return Settings(path, {}).at(mark.line + 1 if mark else None, what, cure)


def _value(node: yaml.Node, settings: Settings, keys: tuple[str, ...]) -> Any:
    if len(keys) > _DEEPEST:  # also where an anchor leads back to itself
        raise settings.error(keys, f"{keys[0]}: nested too deeply")
    if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.rsplit(":", 1)[1] not in ("str", "seq", "map"):
        raise settings.error(keys, f"{'.'.join(keys)}: the tag {node.tag} is not allowed", "Write the plain value.")
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, settings, keys)
    if isinstance(node, yaml.SequenceNode):  # an item that spells null is a label or an arm of that name
        return [_value(item, settings, (*keys, str(i))) for i, item in enumerate(node.value)]
    return node.value


def _mapping(node: yaml.MappingNode, settings: Settings, keys: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise settings.at(line, "a key must be a word", "Write `key: value`.")
        path = (*keys, key.value)
        if key.value in found:
            raise settings.at(line, f"{'.'.join(path)} is set twice, first on line {settings.lines[path]}", "Keep one.")
        settings.lines[path] = line
        empty = isinstance(value, yaml.ScalarNode) and value.style is None and value.value in _NULLS
        found[key.value] = None if empty else _value(value, settings, path)
    return found
