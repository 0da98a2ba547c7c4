"""Which column of a spreadsheet holds what: slides, patients, sites, and what a task wants to know.

A column is named in the config or found by its usual name, however that is spelt; doubt is an error, not a guess.
"""

import difflib
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from gated_srp.data.matching import Matches, files_of_cases, match_slides, slide_stem
from gated_srp.errors import Note, UserError
from gated_srp.tasks import TASKS, Task, find_task, named_task

# In the order of preference, without case and punctuation (`plain`).
USUAL: dict[str, tuple[str, ...]] = {
    "slide": (
        *("slide_id", "slide", "filename", "image_id", "slide_name"),
        *("wsi_filename", "wsi_name", "wsi", "image", "file_name", "wsi_id", "scan_id", "image_name", "slide_file"),
    ),
    "case": (
        *("case_id", "patient_id", "patient", "case_barcode", "submitter_id"),
        *("case", "subject_id", "bcr_patient_barcode"),
    ),  # more by `_PATIENT`
    "site": ("site", "center", "centre", "institution", "hospital", "data_provider", "tissue_source_site"),
}  # of ids; those of labels belong to the task: `Task.usual`
NO_CASE = "none"  # as ``case`` in a YAML: every slide is of another patient

# Patients, as hospitals and registries call them; names are compared without case, accents and separators.
_PERSON = (
    "patient(?:e|en|in)?|pat|case|subj(?:ect)?|participant|donor|individual|person|proband|paciente|paziente|pasient|pacjent"
    "|potilas|doente|fall|cas|caso|casus|sujet|sujeto|soggetto|患者|病人|病例|症例"
)
_NUMBERED = (
    "ids?|ident(?:ifi(?:er|ant|cador|cativo|kation))?|nr|no|num|number|nummer|numero|code|codigo|codice|kode|barcode|key|index|idx"
    "|uid|uuid|name|nom|pseudonym|kennung|kennziffer|submitterids?|号|番号"
)
_PATIENT = re.compile(
    rf"(?:bcr|tcga|study|trial|anon(?:ymi[sz]ed)?|pseudo(?:nymi[sz]ed)?|deid(?:entified)?|unique|hospital|submitter)?"
    rf"(?:(?:{_NUMBERED}|n)(?:de|du|del|della|of|do|l|le)*(?:{_PERSON})|(?:{_PERSON})s?(?:{_NUMBERED})*|(?:pt|hasta)(?:{_NUMBERED}))"
    r"|pid|mrn|u?subjid|(?:medical|patient)record(?:no|nr|num|number)|(?:hospital|nhs|chart)(?:no|nr|number)|nhc|病历号|病案号|住院号"
)
_UNNAMED = re.compile(r"Unnamed: \d+(_level_\d+)?")  # as pandas calls a column without a name
_SECTION = re.compile(
    r"^(?:cases?|demographic|diagnos[ei]s|follow_ups)\.", re.IGNORECASE
)  # of a column's name in GDC's tables
_YES_NO = {"0", "1", "yes", "no", "true", "false", "case", "control", "cases", "controls"}
_DATE = re.compile(r"\d{1,4}[-./]\d{1,2}[-./]\d{1,4}.*")
_OF_AN_ID = re.compile(
    rf"(?:^|[^a-z])(?:{_NUMBERED}|accession|block|specimen|record)(?:[^a-z]|$)|(?:id|nr|nummer|number)$"
)


def pick_column(frame: pd.DataFrame, name: str, where: str | Path) -> str:
    """The column that the user named: exactly, or the only one that agrees apart from case and punctuation."""
    if _UNNAMED.fullmatch(name):
        cure = "Give it one in the table, or delete what stands above the header. "
        raise UserError(
            f"column {name!r} has no name in the header", where=where, cure=cure + listed(frame), kind="column"
        )
    name = unicodedata.normalize("NFC", name)
    if name in frame.columns:
        return name
    alike = [column for column in frame.columns if _squashed(column) == _squashed(name)]
    if len(alike) == 1:
        return alike[0]
    near = difflib.get_close_matches(name, list(frame.columns), n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise UserError(f"no column {name!r}", where=where, cure=f"{hint}{listed(frame)}", kind="column")


def usual_columns(frame: pd.DataFrame, usual: Iterable[str]) -> list[str]:
    """Columns under one of the usual names, however they are spelt, in the order of those names."""
    spelt = {column: _squashed(column) for column in frame.columns}
    return [column for name in usual for column in frame.columns if spelt[column] == _squashed(name)]


def id_columns(frame: pd.DataFrame, key: str) -> list[str]:
    """Columns whose names say that they hold slides, patients (``case``) or sites, the likeliest first."""
    found = usual_columns(frame, USUAL[key])
    if key == "case":
        found += [name for name in frame.columns if name not in found and _PATIENT.fullmatch(_squashed(name))]
        found = [name for name in found if not _SECTION.match(name) or name.casefold().startswith("case")]
        found = [name for name in found if len(frame) < 10 or not _two_groups(frame[name])]
    return found


def _two_groups(cells: "pd.Series[Any]") -> bool:
    """Cases and controls, say: no patients."""
    return cells.nunique() == 2 and set(cells.dropna().str.casefold()) <= _YES_NO


def possible_patients(frame: pd.DataFrame, used: Collection[str | None] = ()) -> list[str]:
    """Columns that may be the patient although their names do not say so: ids that repeat, most different values first."""

    def repeats(name: str) -> bool:
        cells = frame[name].dropna()
        count, named = cells.nunique(), bool(_OF_AN_ID.search(plain(name)))
        if not max(3, len(cells) / (20 if named else 5)) <= count < len(cells) or len(cells) < 0.9 * len(frame):
            return False
        ids = cells.map(
            lambda cell: any(map(str.isdigit, cell)) and not (_DATE.fullmatch(cell) or re.search(r"^-?\d+[.,]\d", cell))
        )
        return bool(ids.mean() > 0.9 and (named or cells.map(lambda cell: any(map(str.isalpha, cell))).mean() > 0.9))

    found = [name for name in named_columns(frame) if name not in used and repeats(name)]
    return sorted(found, key=lambda name: -frame[name].nunique())


def columns_by_files(
    frame: pd.DataFrame, files: Sequence[Path], taken: Sequence[str]
) -> tuple[str | None, str | None, int]:
    """The column whose values name files, one each, or the one whose values begin the names of several: slides or patients.

    A usual name comes first where it does as well. The number is that of slides with a file.
    """
    usual, patients = id_columns(frame, "slide"), id_columns(frame, "case")
    order = [*usual, *(name for name in frame.columns if name not in {*usual, *patients, *taken})]
    matches = {name: match_slides(list(frame[name].dropna().unique()), files) for name in order}
    best = max(order, key=lambda name: len(matches[name].found) + len(matches[name].several), default=None)
    if best is not None and matches[best].found and not _several_each(matches[best]):
        return best, None, len(matches[best].found)
    owners = {name: sum(map(len, files_of_cases(frame[name].dropna().unique(), files).values())) for name in patients}
    if best is not None and _several_each(matches[best]):
        owners[best] = len(matches[best].found) + sum(map(len, matches[best].several.values()))
    owner = max(owners, key=lambda name: owners[name], default=None)
    return None, owner if owner is not None and owners[owner] else None, 0


def _several_each(matches: Matches) -> bool:
    """Whether several files of different names begin with one id."""
    return any(len({slide_stem(file) for file in several}) > 1 for several in matches.several.values())


def listed(frame: pd.DataFrame) -> str:
    """The columns there are, for an error message."""
    return f"Columns: {', '.join(named_columns(frame))}."


def plain(name: str) -> str:
    """A column's name without case and punctuation.

    >>> plain("OS.time"), plain("Patient Id")
    ('os_time', 'patient_id')
    """
    return re.sub(r"[^a-z0-9]+", "_", name.casefold()).strip("_")


def named_columns(frame: pd.DataFrame) -> list[str]:
    """Those that have a name in the header."""
    return [name for name in frame.columns if not _UNNAMED.fullmatch(name)]


def _squashed(name: str) -> str:
    """Letters and digits alone: ``PatientID``, ``patient id`` and ``Patient_Id`` are one name."""
    folded = unicodedata.normalize("NFKD", _SECTION.sub("", name)).casefold()
    return "".join(filter(str.isalnum, folded))


@dataclass(frozen=True)
class Columns:
    """Which column holds what; None: found by its usual name. Several targets: one 0/1 column per label.

    ``case`` may be `NO_CASE`. Two times: of the event, and of the last contact with those who did not have it.
    """

    slide: str | None = None
    case: str | None = None
    target: str | tuple[str, ...] | None = None
    time: str | tuple[str, ...] | None = None
    event: str | None = None
    censorship: str | None = None
    site: str | None = None


@dataclass(frozen=True, eq=False)
class Header:
    """The columns of a table, as a task looks for its own among them."""

    frame: pd.DataFrame
    where: Path

    def usual(self, names: Collection[str]) -> list[str]:
        """Columns with one of these usual names."""
        return usual_columns(self.frame, names)

    def only(self, key: str, names: Collection[str]) -> str:
        """The one column with a usual name; none or several is an error that asks for the setting ``key``."""
        found = self.usual(names)
        if len(found) == 1:
            return found[0]
        seen = f"several columns could be the {key} ({', '.join(found)})" if found else f"no usual {key} column"
        raise self.error(seen, f"Name it with `{key}` in the config.", kind="user" if found else "no_labels")

    def error(self, what: str, cure: str, *, kind: str = "user") -> UserError:
        """An error that names the table and lists its columns."""
        return UserError(what, where=self.where, cure=f"{cure} {listed(self.frame)}".strip(), kind=kind)


def resolve_columns(
    frame: pd.DataFrame, columns: Columns, task: str | None, where: Path
) -> tuple[Columns, str, tuple[Note, ...]]:
    """Every column by its name in the file, the task that these columns allow, and notes to print."""
    named: dict[str, Any] = {}
    for key, value in vars(columns).items():
        if isinstance(value, tuple):
            named[key] = tuple(pick_column(frame, name, where) for name in value)
        elif key == "case" and value is not None and value.casefold() == NO_CASE and value not in frame.columns:
            named[key] = NO_CASE
        elif value is not None:
            named[key] = pick_column(frame, value, where)
    notes: list[Note] = []
    for key in USUAL:
        found = [name for name in id_columns(frame, key) if name not in named.values()]
        if key not in named and found:
            named[key] = found[0]
            notes += _others(frame, key, found, where)
    header = Header(frame, where)
    kind = find_task(task) if task else _only_task(columns, header)
    return Columns(**named | kind.find_columns(named, header)), kind.name, tuple(notes)


def _others(frame: pd.DataFrame, key: str, found: list[str], where: Path) -> list[Note]:
    """Two patient columns that group differently would leak patients across splits: the user must say which counts."""
    first = found[0]
    pairs = {name: frame[[first, name]] for name in found[1:]}
    differ = [name for name, two in pairs.items() if len(two.drop_duplicates()) != min(two.nunique(dropna=False))]
    if key == "case" and differ:
        what = f"{first!r} and {differ[0]!r} group slides differently"
        raise UserError(what, where=where, cure="Name the patients with `case`.", kind="column")
    said = f"{key}: column {first!r} (also seen: {', '.join(found[1:])})"
    return [Note("note", "table", said)] if len(found) > 1 else []


def _only_task(columns: Columns, header: Header) -> type[Task]:
    """The task that the named columns mean; where none is named, the only one whose usual columns are there."""
    if kind := named_task(vars(columns)):
        return kind
    seen = [kind for kind in TASKS.values() if kind.seen_in(header)]
    if len(seen) == 1 and columns.target is None:
        return seen[0]
    what = f"columns for {' and for '.join(kind.subject for kind in seen)}" if seen else "no usual label column"
    cure = "Set `task`, and name `target`, or `time` with `event` or `censorship`."
    raise header.error(what, cure, kind="user" if seen else "no_labels")
