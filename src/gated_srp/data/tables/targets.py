"""Label cells to numbers: classes, survival times and events, several yes/no labels.

What cannot be read is refused with its row.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from gated_srp.data.tables.read import plain
from gated_srp.errors import UserError

# What a word says of the event by itself, whatever the column is called; cBioPortal writes "0:LIVING" and "1:DECEASED".
_FATES = {
    "dead": 1.0,
    "deceased": 1.0,
    "died": 1.0,
    "event": 1.0,
    "uncensored": 1.0,
    "alive": 0.0,
    "living": 0.0,
    "censored": 0.0,
}
_CODED_FATES = {"1:deceased": 1.0, "0:living": 0.0, "1:dead": 1.0, "0:alive": 0.0, "1:event": 1.0, "0:censored": 0.0}
# What a word says of the column's own name: 1 in `event` is an event, 1 in `censorship` is none.
_FLAGS = {"1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0, "yes": 1.0, "no": 0.0, "true": 1.0, "false": 0.0}

_PER_YEAR = {"day": 365.25, "month": 12.0, "year": 1.0}


def read_classes(
    cells: "pd.Series[Any]", classes: Sequence[str] | None, where: Path
) -> tuple["pd.Series[Any]", tuple[str, ...]]:
    """Class numbers (missing where the cell is empty, or of no wanted class) and the names in order.

    Without ``classes`` whole numbers are sorted by value, anything else by name.
    """
    named = cells.dropna()
    numeric = all(re.fullmatch(r"-?\d+(\.0+)?", cell) for cell in named)
    if numeric:  # "1.0" and "1" are one class: spreadsheets add the ending to columns with gaps
        cells = cells.map(lambda cell: str(int(float(cell))), na_action="ignore")
        named = cells.dropna()
    found = sorted(set(named), key=(lambda cell: int(cell)) if numeric else None)
    if classes is None and len(found) > 20 and len(found) > len(named) / 2:
        raise UserError(
            f"{where}: column {cells.name!r} holds {len(found)} different values in {len(named)} rows: "
            "no classes. Name the label column with `target`, or list `classes`."
        )
    order = tuple(map(str, classes)) if classes is not None else tuple(found)
    absent = [name for name in order if name not in set(found)]
    if absent or not order:
        raise UserError(
            f"{where}: no row of class {', '.join(absent) or '(any)'} in column {cells.name!r}. "
            f"Found: {', '.join(found)}. Correct `classes` or `target`."
        )
    return cells.map({name: i for i, name in enumerate(order)}), order


def read_events(cells: "pd.Series[Any]", where: Path, *, censorship: bool) -> "pd.Series[Any]":
    """1 = the event was seen, 0 = censored, missing where empty. ``censorship``: the column says 1 for censored."""
    if censorship:
        meaning: Mapping[str, float] = {word: 1 - flag for word, flag in _FLAGS.items()} | _FATES
    else:
        meaning = _FLAGS | _FATES | _CODED_FATES
    words = cells.map(lambda cell: re.sub(r"\s*:\s*", ":", cell.casefold()), na_action="ignore")
    _refuse_unknown(
        cells,
        words.notna() & ~words.isin(list(meaning)),
        where,
        "0, 1, dead/alive, deceased/living, yes/no, true/false, event/censored",
    )
    return words.map(meaning).astype(float)


def read_times(cells: "pd.Series[Any]", where: Path) -> "pd.Series[Any]":
    """Times as numbers, missing where empty."""
    times = pd.to_numeric(cells, errors="coerce").astype(float)
    wrong = cells.notna() & (times.isna() | times.isin([float("inf"), float("-inf")]))
    _refuse_unknown(cells, wrong, where, "a number (a decimal point, no unit)")
    return times


def read_flags(cells: "pd.Series[Any]", where: Path) -> "pd.Series[Any]":
    """A yes/no label as 1 / 0, missing where empty."""
    words = cells.map(lambda cell: cell.casefold(), na_action="ignore")
    _refuse_unknown(cells, words.notna() & ~words.isin(list(_FLAGS)), where, "0, 1, yes/no, true/false")
    return words.map(_FLAGS).astype(float)


def describe_survival(cases: pd.DataFrame, time: str, status: str, *, censorship: bool) -> str:
    """How the columns were read, to confirm by eye: a flipped sign of censorship is the field's commonest slip."""
    reading = "1 = censored -> event = 1 - censorship" if censorship else "1 = event, 0 = censored"
    median = float(cases["time"].median())
    unit = next((unit for unit in _PER_YEAR if unit in plain(time)), None)
    follow_up = f"{median / _PER_YEAR[unit]:.1f} y" if unit else f"{median:g} in the unit of {time!r}"
    events = f"{100 * cases['event'].mean():.0f} % events"
    return f"{status}: {reading}; {events}; median follow-up {follow_up} ({len(cases)} patients)"


def _refuse_unknown(cells: "pd.Series[Any]", wrong: "pd.Series[bool]", where: Path, expected: str) -> None:
    if wrong.any():
        rows = "; ".join(f"row {row}: {cells[row]!r}" for row in cells.index[wrong][:5])
        raise UserError(
            f"{where}: column {cells.name!r} holds {int(wrong.sum())} values that cannot be read ({rows}). "
            f"Expected {expected}. Correct the cells, or name another column in the config."
        )
