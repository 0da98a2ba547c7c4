"""How `gated-srp check` shows what it found: a table of facts, then notes by level and kind, then the verdict."""

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from gated_srp.checks.check import Check
    from gated_srp.errors import Note

_COLOURS = {"error": "bold red", "warning": "bold yellow", "note": "bold blue"}
_PLACES = 5  # places named in full before "and N more"
_ALIKE = 20  # notes of one kind that are listed


def show(check: "Check", console: "Console") -> None:
    """Print a check for a reader who has never seen one."""
    from rich.table import Table

    from gated_srp.checks.findings import facts_in_words

    facts = Table(show_header=False, box=None, pad_edge=False, title=f"check of {check.name}", title_justify="left")
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in [("folder", _home(check) or "-"), *facts_in_words(check.facts)]:
        facts.add_row(name, text)
    console.print(facts, markup=False)
    home = _home(check)
    for (level, kind, cure), alike in groupby(check.notes, key=lambda f: (f.level, f.kind, f.cure)):
        shortened = [replace(note, where=tuple(w.removeprefix(home) for w in note.where)) for note in alike]
        _show_kind(level, kind, cure, alike=shortened, console=console)
    console.print()
    _show_verdict(check, console)


def _home(check: "Check") -> str:
    """The folder of all files, with its separator: paths are shown below it."""
    folders = {str(file.path.parent) for file in check.files}
    return os.path.join(os.path.commonpath(folders), "") if folders else ""


def _show_kind(level: str, kind: str, cure: str, *, alike: Sequence["Note"], console: "Console") -> None:
    from rich.padding import Padding
    from rich.text import Text

    count = f" ({len(alike)} times)" if len(alike) > 1 else ""
    console.print()
    console.print(Text.assemble((level, _COLOURS[level]), " ", (kind.replace("_", " "), "bold"), count))
    for note in alike[:_ALIKE]:
        one = len(note.where) == 1 and level == "error"
        line = f"{note.where[0]}: {note.what}" if one else note.what
        console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))
        if note.where and not one:
            more = len(note.where) - _PLACES
            places = ", ".join(note.where[:_PLACES]) + (f" and {more:,} more" if more > 0 else "")
            console.print(Padding(Text(f"in {places}", style="dim"), (0, 0, 0, 2), expand=False))
    if len(alike) > _ALIKE:
        console.print(
            Padding(Text(f"... and {len(alike) - _ALIKE} more; --json FILE lists all"), (0, 0, 0, 2), expand=False)
        )
    console.print(Padding(Text.assemble(("do: ", "bold green"), cure), (0, 0, 0, 2), expand=False))


def _show_verdict(check: "Check", console: "Console") -> None:
    from rich.text import Text

    tally = {name: sum(f.level == name for f in check.notes) for name in _COLOURS}
    counts = ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for name, count in tally.items() if count)
    if not check.ok:
        console.print(Text(f"Not ready: {counts}. Fix the errors, then check again.", style="bold red"))
        if check.quarantine:
            console.print(
                "To go on without the broken files: --quarantine broken.txt, then\n"
                "  mkdir broken && xargs -d '\\n' -a broken.txt mv -n -t broken/",
                markup=False,
                highlight=False,
            )
    else:
        console.print(Text(f"Ready{f': {counts}' if counts else ', no issues found'}.", style="bold green"))
    if not check.facts["files"]["deep"]:
        console.print("The feature values were not read; --deep looks for NaN, infinity and damage in them.")
