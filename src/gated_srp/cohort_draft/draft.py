"""The lines of a cohort.yaml as they come to be, with what the user is told."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

_LINE = 110


@dataclass
class Draft:
    """The settings of a cohort as they are found, with what to tell the user."""

    lines: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    def say(self, words: str = "") -> None:
        """A comment, or an empty line."""
        self.lines += [f"# {line}".rstrip() for line in _wrapped(words)] if words else [""]

    def put(self, key: str, value: Any, why: str = "") -> None:
        self.lines.append(setting(key, value, why))

    def offer(self, key: str, values: Sequence[tuple[Any, str]], question: str) -> None:
        """A choice that only the user can make; all of it in comments."""
        self.choices.append(f"{key}: {question}")
        self.say(f"CHOOSE: {question} Remove the # of one line:")
        self.lines += [f"# {setting(key, value, why)}" for value, why in values]


def setting(key: str, value: Any, why: str = "") -> str:
    """``key: value      # why``, on one line."""
    text = (
        yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf).removesuffix("...\n").strip()
    )
    if "\n" in text:  # a name with a line break: only double quotes hold it on one line
        text = yaml.safe_dump(value, default_style='"', width=math.inf).strip()
    comment = " ".join(why.split())
    return f"{key}: {text}      # {comment}" if comment else f"{key}: {text}"


def _wrapped(words: str) -> list[str]:
    return textwrap.wrap(" ".join(words.split()), _LINE, break_long_words=False, break_on_hyphens=False)
