"""Who had the event and when, as a table's cells say it: words, codes, the two times of GDC, and what speaks against a reading."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gated_srp.errors import Note
from gated_srp.tasks import task as base
from gated_srp.tasks.task import Cells, Header, Labels

if TYPE_CHECKING:
    import pandas as pd

# What a cell of a yes/no column says; survival reads a column of events with the same words.
FLAGS = {"1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0, "yes": 1.0, "no": 0.0, "true": 1.0, "false": 0.0}
# What a word says of the event by itself, whatever the column is called; cBioPortal writes "0:LIVING" and "1:DECEASED".
_FATES = {
    **dict.fromkeys(("dead", "deceased", "died", "event", "uncensored", "verstorben"), 1.0),
    **dict.fromkeys(("alive", "living", "censored", "lebend"), 0.0),
}
_CODED_FATES = {
    **{
        f"1:{word}": 1.0
        for word in ("deceased", "dead", "event", "progression", "recurred/progressed", "dead with tumor")
    },
    **{f"0:{word}": 0.0 for word in ("living", "alive", "censored", "diseasefree", "alive or dead tumor free")},
}
# Names of columns that usually say 1 for those who did not have the event, and for those who did.
_MEANS_CENSORED = re.compile(r"censor|cens$|zensier|^c$|alive|living|lebend")
_MEANS_EVENT = re.compile(r"event|death|dead|died|decease|vital")
_MANY, _FEW, _ENOUGH = 0.75, 0.03, 20  # shares of events that are doubted, and patients from which on
_DEATH = ("days_to_death", "death_days_to")
_CONTACT = ("days_to_last_follow_up", "days_to_last_followup", "days_to_last_contact", "last_contact_days_to")


def read_flags(cells: Cells, where: Path) -> Cells:
    """A yes/no label as 1 / 0, missing where empty."""
    words = cells.map(lambda cell: cell.casefold(), na_action="ignore")
    base.refuse_unreadable(cells, words.notna() & ~words.isin(list(FLAGS)), where, "0, 1, yes/no, true/false")
    return words.map(FLAGS).astype(float)


def two_times(header: Header) -> tuple[str, ...]:
    """GDC's columns, if they are there: of the death, and of the last contact with those who live."""
    found = (*header.usual(_DEATH), *header.usual(_CONTACT)[:1])
    return found if len(found) == 2 else ()


def read_follow_up(frame: pd.DataFrame, columns: Any, where: Path) -> Labels:
    """``time``, and ``event``: 1 where it was seen, 0 where the case is censored."""
    import pandas as pd

    status = frame[columns.censorship or columns.event]
    event = read_events(status, where, censorship=columns.censorship is not None)
    names: tuple[str, ...] = columns.time if isinstance(columns.time, tuple) else (columns.time,)
    times = [base.read_numbers(frame[name], where) for name in names]
    time = times[0].where(event == 1, times[-1])
    commas = {name: base.decimal_comma(frame[name]) for name in names}
    said = [f"{name!r}: the comma in {cell!r} is read as a decimal point" for name, cell in commas.items() if cell]
    if len(names) > 1:
        said.append(f"time: {names[0]} where the event was seen, {names[1]} where not")
    first = ~frame[columns.case].duplicated() if columns.case in frame else event.notna()
    notes = [*(Note("note", "labels", one) for one in said), *_doubts(columns, status, event[first].dropna())]
    unusable = (time <= 0) & event.notna()
    dropped = ((unusable, "its time is not positive"),)
    return Labels(pd.DataFrame({"time": time, "event": event}), (), dropped, tuple(notes))


def read_events(cells: Cells, where: Path, *, censorship: bool) -> Cells:
    """1 = the event was seen, 0 = censored, missing where empty. ``censorship``: the column says 1 for censored."""
    if censorship:
        meaning: Mapping[str, float] = {word: 1 - flag for word, flag in FLAGS.items()} | _FATES
    else:
        meaning = FLAGS | _FATES | _CODED_FATES
    words = cells.map(lambda cell: re.sub(r"\s*:\s*", ":", cell.casefold()), na_action="ignore")
    expected = "0, 1, dead/alive, deceased/living, 1:DECEASED/0:LIVING, yes/no, true/false, event/censored"
    base.refuse_unreadable(cells, words.notna() & ~words.isin(list(meaning)), where, expected)
    return words.map(meaning).astype(float)


def _doubts(columns: Any, cells: Cells, event: Cells) -> Iterator[Note]:
    """What speaks against the reading of 0 and 1; a word (dead, alive) leaves no doubt. Nothing is turned round here."""
    if not set(cells.dropna().str.casefold()) <= set(FLAGS) or event.empty:
        return
    key, other = ("censorship", "event") if columns.censorship else ("event", "censorship")
    name, share = str(cells.name), float(event.mean())
    meant = "that the event was seen" if columns.censorship else "censored there"
    cure = f"If 1 means {meant}, write `{other}: {name}` instead of `{key}: {name}`."
    events, plain = f"{100 * share:.0f} % of {len(event)} patients", name.casefold()
    odd = bool(_MEANS_EVENT.search(plain) and not _MEANS_CENSORED.search(plain))
    if odd if columns.censorship else _MEANS_CENSORED.search(plain):
        reading = "censored" if columns.censorship else "event seen"
        what = f"`{key}: {name}` is read as 1 = {reading} ({events} with the event), but its name says the opposite"
        yield Note("warning", "events", what, cure=cure)
    elif len(event) >= _ENOUGH and not _FEW < share < _MANY:
        what = f"{events} had the event, {'more' if share > 0.5 else 'fewer'} than in most cohorts"
        yield Note("warning", "events", what, cure=f"{cure} Otherwise leave it.")
