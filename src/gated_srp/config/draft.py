"""A YAML file as it is drafted for a person: settings, reasons beside them, choices in comments."""

import math
import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from gated_srp.errors import Note, counted

if TYPE_CHECKING:
    import pandas as pd

FEW = 12  # values that a column of classes has at most
_LINE = 110  # characters of a comment


@dataclass
class Draft:
    """A cohort.yaml as it comes to be. ``notes`` say what was seen and, as warnings, what the user has to choose."""

    path: Path
    lines: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The file."""
        return "\n".join(self.lines) + "\n"

    @property
    def choices(self) -> list[Note]:
        """What the user has to choose."""
        return [note for note in self.notes if note.level == "warning"]

    def _repr_html_(self) -> str:
        return f"<p><b>{escape(str(self.path))}</b></p><pre>{escape(self.text)}</pre>"

    def saw(self, what: str) -> None:
        self.notes.append(Note("note", "init", what))

    def ask(self, what: str) -> None:
        self.notes.append(Note("warning", "choice", what))

    def say(self, words: str = "") -> None:
        """A comment, or an empty line."""
        wrapped = textwrap.wrap(" ".join(words.split()), _LINE, break_long_words=False, break_on_hyphens=False)
        self.lines += [f"# {line}".rstrip() for line in wrapped] if words else [""]

    def put(self, key: str, value: Any, why: str = "") -> None:
        """A setting."""
        self.lines.append(_setting(key, value, why))

    def find(self, key: str, column: str, why: str) -> None:
        """A column, which is also said."""
        self.put(key, column, why)
        self.saw(f"{key}: {column!r}, {why}")

    def suggest(self, key: str, value: Any, why: str = "") -> None:
        """A setting in a comment."""
        self.lines.append(f"# {_setting(key, value, why)}")

    def offer(self, key: str, values: Sequence[tuple[Any, str]], question: str) -> None:
        """A choice that only the user can make; all of it in comments."""
        self.ask(f"{key}: {question}")
        self.say(f"CHOOSE: {question} Remove the # of one line:")
        for value, why in values:
            self.suggest(key, value, why)

    def put_defaults(self, metric: str, slides: int, *, drawn: bool) -> None:
        """The usual settings in comments. ``slides``: those with a file; ``drawn``: the split is, instead of being the table's own."""
        self.say("What follows are the defaults; remove a # to change one.")
        self.lines += [
            "# arms: [na, xsa, diff, gated_srp]",
            f"# seeds: [42, 43, 44, 45, 46]      # each {'draws its own split by patient' if drawn else 'has its own start weights'}",
            *(["# folds: 5                         # cross-validation instead of one split per seed"] if drawn else []),
            f"# metric: {metric}                # selects the epoch",
            "# window: 3                        # 8 neighbours; 5 gives 24",
            "# cap: 20000                       # at most so many patches of a slide, if memory is short",
            "# train: {epochs: 15}",
            "# out: runs",
        ]
        if 0 < slides < 20:
            self.saw(f"only {counted(slides, 'slide')} with a file: enough to try things, not to show anything")


def cohort_name(folder: Path, table: Path) -> str:
    """After the table if that says something, else after its folder."""
    words = (table.stem, table.absolute().parent.name, folder.absolute().name, "cohort")
    plain = [re.sub(r"[^\w .+-]", "_", word).lstrip("_ .+-") for word in words]
    dull = {"", "slides", "table", "labels", "cohort", "clinical", "data", "sheet", "features", "feats"}
    return next((word for word in plain if word.casefold() not in dull), "cohort")


def relative_path(path: Path, home: Path) -> str:
    """Relative while it is below or beside ``home``, else in full."""
    relative = os.path.relpath(path.absolute(), home)
    return str(path.absolute()) if relative.startswith(os.path.join("..", "..")) else relative


def examples(column: "pd.Series[Any]") -> str:
    """The values of a column of few, with their counts; of others how many there are."""
    tally = column.value_counts()
    if len(tally) > FEW:
        return f"{len(tally)} different values, such as {', '.join(map(str, tally.index[:2]))}"
    return ", ".join(f"{value} ({count})" for value, count in tally.sort_index().items())


def _setting(key: str, value: Any, why: str = "") -> str:
    """``key: value      # why``, on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf)
    text = text.removesuffix("...\n").strip()
    if "\n" in text:  # a name with a line break: only double quotes hold it on one line
        text = yaml.safe_dump(value, default_style='"', width=math.inf).strip()
    comment = " ".join(why.split())
    return f"{key}: {text}      # {comment}" if comment else f"{key}: {text}"
