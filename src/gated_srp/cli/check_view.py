"""How `gated-srp check` shows what it found: a table of facts, then notes by level and kind, then the verdict."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from gated_srp.progress import spoken

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

    facts = Table(show_header=False, box=None, pad_edge=False, title=f"check of {check.name}", title_justify="left")
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in [("folder", _home(check) or "-"), *_facts(check.facts)]:
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


# The table of facts --------------------------------------------------------------------------------------------------


def _facts(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    files, slides = summary["files"], summary.get("slides")
    if slides:
        yield (
            "slides",
            f"{slides['slides']:,} of {slides['patients']:,} patients in the table; "
            + _words({k: slides[k] for k in ("found", "missing", "unclear", "broken")}),
        )
    kinds = f" ({_words(files['broken'])})" if files["broken"] else ""
    broken = files["looked_at"] - files["usable"]
    yield "files", f"{files['usable']:,} usable, {broken:,} broken{kinds}; {_size(files['bytes'])}"
    if not files["usable"]:
        return
    yield "encoder", f"{_tally(summary['encoders'])}; width {_tally(summary['widths'])}; {_tally(summary['dtypes'])}"
    patches = summary["patches"]
    yield (
        "patches",
        f"{patches['min']:,.0f} to {patches['max']:,.0f} per slide, median {patches['median']:,.0f}; "
        f"{patches['total']:,} in all",
    )
    for place, one in enumerate(summary["strides"][:_PLACES]):
        yield "" if place else "stride", f"{one['stride']}: {one['source']} ({one['files']:,} files)"
    if len(summary["strides"]) > _PLACES:
        yield "", f"... and {len(summary['strides']) - _PLACES} more"
    yield from _neighbours(summary["neighbours"], summary["cap"])
    if "labels" in summary:
        yield from _labels(summary["labels"])
    if summary.get("split"):
        yield "split", _split(summary["split"])
    if "cost" in summary:
        yield from _cost(summary["cost"])


def _neighbours(neighbours: dict[str, Any], cap: dict[str, Any]) -> Iterator[tuple[str, str]]:
    mean = neighbours["mean"]
    yield (
        "neighbours",
        f"{mean['median']:.1f} of {neighbours['most']} per patch (median of slides; {mean['min']:.1f} to "
        f"{mean['max']:.1f}); {100 * neighbours['alone']:.1f} % of patches have none",
    )
    if cap["files"]:
        yield (
            "after the cap",
            f"{cap['files']:,} slides have more than {cap['cap']:,} patches; on them "
            f"{cap['before']:.1f} -> {cap['after']:.1f} neighbours per patch",
        )
    elif cap["cap"]:
        yield "after the cap", f"unchanged: no slide has more than {cap['cap']:,} patches"


def _labels(labels: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for note in labels["notes"]:
        yield "labels", note  # how the table was read; with the balance of classes
    from gated_srp.tasks import find_task

    yield from find_task(labels["task"]).tally_lines(labels)


def _split(splits: dict[str, Any]) -> str:
    name, first = next(iter(splits.items()))
    others = f", like {len(splits) - 1} other splits" if len(splits) > 1 else ""
    return f"{_words(first['slides'])} slides ({name}{others}); no patient is in two parts"


def _cost(cost: dict[str, Any]) -> Iterator[tuple[str, str]]:
    machine = cost["machine"]
    yield (
        "one run",
        f"roughly {spoken(cost['run_seconds'])} ({cost['epochs']} epochs) and {_size(cost['run_bytes'])} of memory",
    )
    yield (
        "comparison",
        f"{cost['runs']} runs one after another: roughly {spoken(cost['comparison_seconds'])}; from the number of "
        f"patches and {machine['rate'] / 1e9:,.0f} billion operations per second, measured on {machine['name']}",
    )


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count) or "none"


def _tally(counts: dict[str, int]) -> str:
    return (
        next(iter(counts)) if len(counts) == 1 else ", ".join(f"{name} ({count:,})" for name, count in counts.items())
    )


def _size(count: float) -> str:
    for unit, power in (("GB", 1e9), ("MB", 1e6)):
        if count >= power:
            return f"{count / power:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"
