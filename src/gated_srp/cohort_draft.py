"""A first cohort.yaml from a folder of features and a spreadsheet: what can be seen is set, what cannot is a choice in a comment."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from gated_srp.config.draft import FEW, Draft, cohort_name, examples, relative_path
from gated_srp.config.schema import json_schema
from gated_srp.data.bag import BagError, BagHeader
from gated_srp.data.columns import (
    NO_CASE,
    USUAL,
    Columns,
    columns_by_files,
    id_columns,
    named_columns,
    pick_column,
    possible_patients,
    resolve_columns,
    usual_columns,
)
from gated_srp.data.files.formats import read_header
from gated_srp.data.files.siblings import embeddings_left_out, encoder_of_folder, look_into, nothing_found
from gated_srp.data.files.stride import unnamed_source
from gated_srp.data.imported_splits import part_columns
from gated_srp.data.matching import files_of_cases, slide_stem, tcga_patient
from gated_srp.data.spreadsheet import read_frame
from gated_srp.data.table import doubtful_classes
from gated_srp.errors import UserError, counted
from gated_srp.files import write_json, write_whole
from gated_srp.tasks import TASKS, every_task, find_task

if TYPE_CHECKING:
    from gated_srp.config.other_tools import OtherConfig

_LOOKED_AT = 24  # files that are opened; `check` opens all
_LABELS = {key: names for kind in TASKS.values() for key, names in kind.usual.items() if names}
_MEANINGS = {key: meaning for kind in TASKS.values() for key, meaning in kind.meanings.items()}


def init(
    features: str | Path | None = None,
    table: str | Path | None = None,
    *,
    source: str | Path | None = None,
    out: str | Path = "cohort.yaml",
    sheet: str | None = None,
    target: str | Sequence[str] | None = None,
    case: str | None = None,
    slides: str | Path | None = None,
    force: bool = False,
) -> Draft:
    """Look at a folder and a spreadsheet and write a cohort's YAML.

    Args:
        features: the folder of feature files, as the extractor left it.
        table: the spreadsheet of slides or patients: csv, tsv, xlsx, parquet.
        source: another tool's description of the cohort, which says the rest: STAMP's config.yaml, or a task folder of Patho-Bench.
        out: where to write the YAML; its paths are relative to its folder.
        sheet: of an xlsx; the first.
        target: the column to predict, or several of 0 and 1; found where only one can be meant.
        case: the column of patients, or ``none`` if no patient has two slides; found by its name.
        slides: a second table of slides and their patients, where ``table`` has one row per patient.
        force: write over a file that is there.

    Returns:
        A `Draft`: ``path``, ``text``, ``notes`` (what was seen) and ``choices`` (what could not be seen and is a comment in the file).

    Example:
        >>> draft = gated_srp.init("features_uni_v2", "slides.csv")  # doctest: +SKIP
        >>> [note.what for note in draft.choices]  # doctest: +SKIP
        []
    """
    path = Path(out)
    if path.exists() and not force:
        cure = "Choose another name with -o, or --force."
        raise UserError("is there already and stays as it is", where=path, cure=cure, kind="exists")
    other = None
    if source is not None:
        from gated_srp.config.other_tools import read_other

        other = read_other(source)
        features, table, slides = features or other.features, table or other.table, slides or other.slides
        target, case = target or other.columns.get("target"), case or other.columns.get("case")
    if features is None or table is None:
        cure = "Give the folder of feature files, then the spreadsheet; or another tool's configuration with --from."
        raise UserError(f"no {'spreadsheet' if features else 'folder of feature files'} was named", cure=cure)
    named: dict[str, Any] = {"sheet": sheet, "target": target, "case": case, "slides": slides, "other": other}
    draft = draft_cohort(Path(features), Path(table), path, **named)
    write_whole(path, draft.text)
    write_json(_schema_of(path), json_schema())
    return draft


def _schema_of(out: Path) -> Path:
    """The file beside the YAML with which editors complete and check it."""
    return out.with_suffix(".schema.json")


def draft_cohort(
    folder: Path,
    table: Path,
    out: Path,
    *,
    sheet: str | None = None,
    target: str | Sequence[str] | None = None,
    case: str | None = None,
    slides: str | Path | None = None,
    other: OtherConfig | None = None,
) -> Draft:
    """As `init`, without writing the file."""
    home = out.absolute().parent
    files, embeddings = look_into(folder)
    if not files:
        raise nothing_found(folder)
    frame, notes = read_frame(table, sheet=sheet)
    frame = frame[named_columns(frame)]
    stems, usual = {slide_stem(path).casefold() for path in files}, id_columns(frame, "slide")
    if slide := [name for name in named_columns(frame) if slide_stem(name).casefold() in stems and name not in usual]:
        cure = "Write the names of the columns into a row above the first slide."
        raise UserError(f"no header: its first row names the slide {slide[0]!r}", where=table, cure=cure, kind="header")
    draft = Draft(out)
    draft.say(f"yaml-language-server: $schema={_schema_of(out).name}")  # relative to the YAML, as editors expect
    given = [target] if isinstance(target, str) else list(target or ())
    options = {"sheet": sheet, "case": case, "slides": slides, "from": other.path if other else None}
    named = [
        *(f"--target={one}" for one in given),
        *(f"--{key}={one}" for key, one in options.items() if one is not None),
    ]
    said = shlex.join([str(folder), str(table), *named])
    draft.say(f"Written by `gated-srp init {said}`. Paths are relative to this file. Next: gated-srp check")
    own = {key: (value, why) for key, value, why in other.settings} if other else {}
    draft.put("name", *own.pop("name", (cohort_name(folder, table),)))
    draft.say()
    files = _put_features(draft, folder, files, home)
    draft.notes += embeddings_left_out(embeddings)
    draft.say()
    draft.put(
        "table", relative_path(table, home), f"{counted(len(frame), 'row')}, {counted(len(frame.columns), 'column')}"
    )
    if sheet is not None:
        draft.put("sheet", sheet)
    draft.saw(f"{table}: {counted(len(frame), 'row')}")
    draft.notes += notes
    asked = tuple(pick_column(frame, name, table) for name in given)
    if case is not None and (case.casefold() != NO_CASE or case in frame):
        case = pick_column(frame, case, table)
    if slides is None:
        used, found = _put_slides(draft, frame, files, case=case, target=asked)
    else:
        used, found = _put_slide_table(draft, frame, files, Path(slides), home=home, case=case)
    parts = _put_split(draft, frame, table, home, own) if sheet is None else []
    ids = {*used, *parts, *(name for key in USUAL for name in id_columns(frame, key))} - {*asked}
    times = {key: other.columns[key] for key in ("time", "event") if other and key in other.columns}
    task = _put_task(draft, frame[[name for name in frame.columns if name not in ids]], table, asked, times)
    for key, (value, why) in own.items():
        draft.put(key, relative_path(Path(value), home) if key == "split" else value, why)
    draft.notes += other.said if other else ()
    draft.say()
    draft.put_defaults(find_task(task).selects[0], found, drawn=not parts and "split" not in own)
    return draft


def _put_features(draft: Draft, folder: Path, files: Sequence[Path], home: Path) -> list[Path]:
    """The folder and its encoder, from every file's folder and from the headers of some files; gives the files of one encoder."""
    headers, broken = _headers(files)
    said = Counter(encoder_of_folder(path) or "" for path in files)
    for header in headers:
        if header.encoder and not said[header.encoder]:
            said[header.encoder] = 1
    names = sorted(name for name in said if name)
    inside = dict.fromkeys(name for one in broken if one.kind == "several_encoders" for name in one.found)
    names += [name for name in inside if name not in names]
    homes = Counter(path.parent for path in files)
    twice = 2 * len({slide_stem(path) for path in files}) <= len(files)
    if twice and len(homes) > 1 and len(names) < 2:
        number = "two" if len(homes) == 2 else "several"
        question = f"{number} feature files per slide were found; a model is trained on one."
        draft.offer(
            "features",
            [(relative_path(one, home), counted(homes[one], "feature file")) for one in sorted(homes)],
            question,
        )
        files = [path for path in files if path.parent == min(homes)]
    else:
        draft.put("features", relative_path(folder, home), counted(len(files), "feature file"))
        draft.saw(f"{folder}: {counted(len(files), 'feature file')}")
    if len(names) > 1:
        question = "features of several encoders were found; a model is trained on those of one."
        draft.offer("encoder", [(name, counted(said[name], "file") if said[name] else "") for name in names], question)
    elif names:
        draft.put("encoder", names[0])
        draft.saw(f"encoder {names[0]}")
    else:
        draft.say("No file says which encoder made it; name it if you know, so that features of two are never mixed.")
        draft.say("encoder: uni_v2")
    strides = Counter((h.stride, h.unit, unnamed_source(h.path, h.stride_source)) for h in headers)
    for (stride, unit, source), _ in strides.most_common(3):
        draft.say(f"stride {stride:g} {unit}: {source}")
    usual = f"{strides.most_common(1)[0][0][0]:g}" if strides else "512"
    draft.say(f"stride: {usual}      # only where what the files say is wrong")
    if any(one.kind == "no_coords" for one in broken):
        question = "the features have no positions beside them; in which folder are the files that hold these?"
        draft.offer("coords", [("patches", "CLAM's folder of them, for example")], question)
    if others := [one for one in broken if one.kind not in ("several_encoders", "no_coords")]:
        unusable = f"{len(others)} of {len(headers) + len(broken)} files looked at cannot be used"
        draft.say(f"{unusable}; `gated-srp check` names all.")
        draft.saw(f"{unusable}: {others[0]}")
    return [path for path in files if len(names) < 2 or encoder_of_folder(path) in (None, names[0])]


def _put_split(draft: Draft, frame: pd.DataFrame, table: Path, home: Path, own: dict[str, Any]) -> list[str]:
    """A split that the table brings along; gives its columns. ``own``: settings that are put later."""
    columns = [] if "split" in own else part_columns(frame)
    if columns:
        shown = ", ".join(columns) if len(columns) < 5 else f"{columns[0]} to {columns[-1]}"
        draft.find("split", relative_path(table, home), f"of the table itself: {shown}")
    if len(columns) > 1 and "folds" not in own:
        draft.suggest("folds", len(columns), "all of them; fold 0 alone if not set")
    return columns


def _headers(files: Sequence[Path]) -> tuple[list[BagHeader], list[BagError]]:
    """Of some files, evenly chosen."""
    count = min(_LOOKED_AT, len(files))
    headers, broken = [], []
    for number in range(count):
        try:
            headers.append(read_header(files[number * len(files) // count]))
        except BagError as error:
            broken.append(error)
    return headers, broken


# The table -----------------------------------------------------------------------------------------------------------


def _put_slides(
    draft: Draft, frame: pd.DataFrame, files: Sequence[Path], *, case: str | None, target: Sequence[str]
) -> tuple[set[str], int]:
    """Which columns name slides, patients and sites: those that were used, and how many slides have a file."""
    named, owner, found = columns_by_files(frame, files, [*target, *filter(None, [case])])
    usual = [name for name in id_columns(frame, "slide") if name != owner]
    cases = [case] if case else [name for name in id_columns(frame, "case") if name != named]
    if named is not None:
        draft.find("slide", named, f"{found} of {frame[named].nunique()} name a file")
    elif usual:
        draft.put("slide", usual[0], "WARNING: none of its values names a feature file")
        draft.ask(f"slide: no value of {usual[0]!r} names a feature file; look at both spellings.")
    if len({tuple(pd.factorize(frame[name])[0]) for name in cases if name in frame}) > 1:  # rows that are put together
        question = "several columns could be the patient, and they group the slides differently."
        draft.offer("case", [(name, counted(frame[name].nunique(), "patient")) for name in cases], question)
        cases = []
    elif cases and cases[0] not in frame:
        draft.find("case", NO_CASE, "as chosen: no patient has two slides")
    elif (cases or owner) and named is None and not usual:
        cases = [owner if owner and not case else cases[0]]
        found = sum(map(len, files_of_cases(frame[cases[0]].dropna().unique(), files).values()))
        count = frame[cases[0]].nunique()
        draft.find(
            "case",
            cases[0],
            f"{counted(count, 'patient')}, whose ids begin the names of {counted(found, 'file')}: their slides",
        )
    elif cases:
        draft.find("case", cases[0], f"{counted(frame[cases[0]].nunique(), 'patient')}, each in one part of a split")
        if empty := int(frame[cases[0]].isna().sum()):
            merged = "of merged cells a spreadsheet keeps the first alone"
            draft.ask(f"case: {counted(empty, 'row')} of {cases[0]!r} without a patient; fill in the cells ({merged}).")
    elif named is not None:
        _ask_for_patients(draft, frame, named, {named, *target})
    else:
        others = [(name, examples(frame[name])) for name in frame.columns]
        draft.offer("slide", others, "no column names slides or patients in the usual way, and none names the files.")
    if site := id_columns(frame, "site"):
        draft.put("site", site[0], counted(frame[site[0]].nunique(), "site"))
    return {name for name in (named, *cases) if name}, found


def _ask_for_patients(draft: Draft, frame: pd.DataFrame, slide: str, used: set[str]) -> None:
    """No column is named like a patient: TCGA barcodes say it, or the user must."""
    barcodes = frame[slide].dropna().map(tcga_patient)
    if barcodes.notna().all():
        draft.say(f"No patient column: {counted(barcodes.nunique(), 'patient')} by the TCGA barcodes of the slides.")
        draft.saw(f"patients: {barcodes.nunique()}, by the TCGA barcodes of the slides")
        return
    likely = [(name, f"{frame[name].nunique()} values in {len(frame)} rows") for name in possible_patients(frame, used)]
    question = "no column is named like a patient, and slides of one patient must not be in two parts of a split."
    draft.offer("case", [*likely, (NO_CASE, "if no patient has two slides")], question)


def _put_slide_table(
    draft: Draft, frame: pd.DataFrame, files: Sequence[Path], slides: Path, *, home: Path, case: str | None
) -> tuple[set[str], int]:
    """A second table, with the slides of the first one's patients."""
    theirs, notes = read_frame(slides)
    draft.notes += notes
    draft.put("slides", relative_path(slides, home), f"{counted(len(theirs), 'row')}; joined to the table by patient")
    named, _, found = columns_by_files(theirs, files, ())
    column = named or next(iter(id_columns(theirs, "slide")), None)
    patients = case or next(iter(id_columns(frame, "case")), None)
    for key, chosen, where in (("slide", column, theirs), ("case", patients, frame)):
        if chosen is None:
            draft.offer(
                key, [(name, examples(where[name])) for name in named_columns(where)], f"no usual {key} column."
            )
        else:
            said = f"of {slides.name}; {found} of" if key == "slide" else ""
            draft.find(key, chosen, f"{said} {where[chosen].nunique()} {'name a file' if said else 'patients'}".strip())
    return {patients} if patients else set(), found


def _put_task(
    draft: Draft, frame: pd.DataFrame, table: Path, target: tuple[str, ...], times: Mapping[str, str]
) -> str | None:
    """What is to be learnt, if it was said or the columns leave no doubt. ``frame`` is without the columns of ids."""
    draft.say()
    alone = None if target or times else _only_classes(frame)
    try:
        named = Columns(target=target[0] if len(target) == 1 else target or alone, **times)
        plain = [
            kind.name for kind in every_task() if isinstance(named.target, str) and kind.suits(frame[named.target])
        ]
        columns, task, _ = resolve_columns(frame, named, plain[0] if plain else None, table)
        kind = find_task(task)
        order = kind.class_names(frame, columns, table)
    except UserError:
        if target or times:
            raise
        _offer_targets(draft, frame)
        return None
    why = f"{columns.target}: {examples(frame[named.target])}; as classes: task: classification" if plain else ""
    draft.put("task", task, why)
    for key in kind.usual:
        column = getattr(columns, key)
        if isinstance(column, tuple):
            draft.put(key, list(column), kind.meanings.get(key, ""))
        elif column:
            meaning = f"{kind.meanings[key]}; {examples(frame[column])}" if key in kind.meanings else ""
            draft.put(key, column, "the only column that can be classes" if alone else meaning)
    if order:
        doubtful = doubtful_classes(order)
        draft.suggest("classes", [name for name in order if name not in doubtful], "to set their order")
        draft.saw(f"{columns.target}: {examples(frame[str(columns.target)])}")
        if doubtful:
            words = "a class, or a word" if len(doubtful) == 1 else "classes, or words"
            question = f"{', '.join(map(repr, doubtful))}: {words} for a label that is missing?"
            draft.offer(
                "missing", [(doubtful, "missing: leave these rows out"), ([], "classes like the others")], question
            )
    draft.saw(f"task: {task}{f' ({why})' if why else ''}")
    return task


def _offer_targets(draft: Draft, frame: pd.DataFrame) -> None:
    """Several tasks, or none that is named in the usual way."""
    usual, times = usual_columns(frame, _LABELS["target"]), usual_columns(frame, _LABELS["time"])
    status = [(key, name) for key in _MEANINGS for name in usual_columns(frame, _LABELS[key])]
    known = {*usual, *times, *(name for _, name in status)}
    classes = [name for name in frame.columns if name not in known and _could_be_classes(frame[name])]
    draft.ask("target, or time with event or censorship: which column is to be predicted?")
    draft.say("CHOOSE: what is to be predicted? Remove the # of one line for classes:")
    for name in [*usual, *classes] or ["label"]:
        draft.suggest("target", name, examples(frame[name]) if name in frame else "")
    for kind in every_task():
        numbers = [name for name in frame.columns if name not in known and kind.suits(frame[name])]
        if numbers:
            draft.say(f"or of two lines for {kind.subject} per slide:")
            draft.suggest("task", kind.name)
        for name in numbers[:FEW]:
            draft.suggest("target", name, examples(frame[name]))
    if not (times or status):
        draft.say(
            "For survival write `time: COLUMN`, and `event: COLUMN` (1 = seen) or `censorship: COLUMN` (1 = censored)."
        )
        return
    draft.say("or of a time and of a line that says who had the event, for survival:")
    for name in times or ["COLUMN"]:
        draft.suggest("time", name)
    for key, name in status or [("event", "COLUMN")]:
        draft.suggest(key, name, _MEANINGS[key])


def _only_classes(frame: pd.DataFrame) -> str | None:
    """The one column that can be classes, where none has the usual name of anything to predict."""
    if any(usual_columns(frame, names) for names in _LABELS.values()):
        return None
    found = [str(name) for name in frame.columns if _could_be_classes(frame[name])]
    return found[0] if len(found) == 1 else None


def _could_be_classes(column: pd.Series[Any]) -> bool:
    tally = column.value_counts()
    return 2 <= len(tally) <= FEW and bool(tally.iloc[0] > 1)
