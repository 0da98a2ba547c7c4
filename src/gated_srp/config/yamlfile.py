"""A YAML file of settings as plain text values with the line of each key; what a value means is the reader's to say.

Only the schema knows whether ``no``, ``007``, ``1e-4`` or ``null`` is a word or a number, so scalars stay text: YAML's own guesses
turn a class called ``no`` into False and a learning rate of ``1e-4`` into a word.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gated_srp.errors import UserError

_NULLS = {"", "~", "null", "Null", "NULL"}
_DEEPEST = 6
_LARGEST = 2**20  # bytes


@dataclass(frozen=True)
class Settings:
    """``values``: nested dicts and lists of text; None where a key is empty or null. ``lines``: of each key's path."""

    path: Path
    values: dict[str, Any]
    lines: dict[tuple[str, ...], int] = field(default_factory=dict)

    def error(self, keys: tuple[str, ...], message: str) -> UserError:
        """An error at a key: the file, the line of the key or of the section around it, the message."""
        known = next((self.lines[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in self.lines), None)
        where = f"{self.path}, line {known}" if known else str(self.path)
        return UserError(f"{where}: {message}")


def read_settings(path: str | Path) -> Settings:
    """Read a YAML file; broken YAML, a key written twice, tags and anything but a mapping are refused with their line."""
    path = Path(path)
    try:
        if path.stat().st_size > _LARGEST:
            raise UserError(f"{path}: larger than a file of settings can be. Expected a short YAML file.")
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file. Expected the cohort's YAML; `gated-srp init FOLDER TABLE` writes one."
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). Expected the cohort's YAML file.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason}). Save it again as plain text.") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise _broken(path, error) from None
    settings = Settings(path, {})
    if node is None:
        return settings
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}: expected settings as `key: value`, one a line.")
    settings.values.update(_mapping(node, settings, ()))
    return settings


def _broken(path: Path, error: Exception) -> UserError:
    mark = getattr(error, "problem_mark", None)
    said = getattr(error, "problem", None) or str(error) or type(error).__name__
    where = f", line {mark.line + 1}" if mark else ""
    hint = " Indent with spaces, not tabs." if "\\t" in said else ""
    return UserError(f"{path}{where}: not valid YAML ({' '.join(said.split())}). Correct this line.{hint}")


def _value(node: yaml.Node, settings: Settings, keys: tuple[str, ...]) -> Any:
    if len(keys) > _DEEPEST:  # also where an anchor leads back to itself
        raise settings.error(keys, f"{keys[0]}: nested too deeply.")
    if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.rsplit(":", 1)[1] not in ("str", "seq", "map"):
        raise settings.error(keys, f"{'.'.join(keys)}: the tag {node.tag} is not allowed. Write the plain value.")
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
            raise UserError(f"{settings.path}, line {line}: a key must be a word. Write `key: value`.")
        path = (*keys, key.value)
        if key.value in found:
            raise UserError(
                f"{settings.path}, line {line}: {'.'.join(path)} is set twice, first on line {settings.lines[path]}. Keep one."
            )
        settings.lines[path] = line
        empty = isinstance(value, yaml.ScalarNode) and value.style is None and value.value in _NULLS
        found[key.value] = None if empty else _value(value, settings, path)
    return found
