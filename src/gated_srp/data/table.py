"""The user's spreadsheet as one tidy table of slides: who, which patient, what label.

Nothing is dropped or guessed silently: every reading is a note to print, every dropped row is listed with its reason.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from gated_srp.data.matching import files_of_cases, slide_stem
from gated_srp.data.tablefile import pick_column, read_frame, usual_columns
from gated_srp.data.targets import describe_survival, read_classes, read_events, read_flags, read_times
from gated_srp.errors import UserError

Task = Literal["classification", "survival", "multilabel"]

USUAL: dict[str, tuple[str, ...]] = {
    "slide": (
        "slide_id",
        "slide",
        "filename",
        "image_id",
        "slide_name",
        "wsi_filename",
        "wsi_name",
        "wsi",
        "image",
        "file_name",
    ),
    "case": (
        "case_id",
        "patient_id",
        "patient",
        "case_barcode",
        "submitter_id",
        "case",
        "subject_id",
        "bcr_patient_barcode",
    ),
    "site": ("site", "center", "centre", "institution", "hospital", "data_provider", "tissue_source_site"),
    "target": ("label", "target"),
    "time": (
        "time",
        "time_days",
        "survival_months",
        "survival_days",
        "os_survival_days",
        "os_time",
        "os_days",
        "os_months",
        "survival_time",
    ),
    "event": ("event", "status", "os", "vital_status", "os_status", "os_event"),
    "censorship": ("censorship", "os_censorship", "censored"),
}
_BARCODE = re.compile(r"TCGA-[A-Z0-9]{2}-[A-Z0-9]{4}(?![A-Z0-9])", re.IGNORECASE)
_SEVERAL = r"\s*[;|,\n]\s*"  # several slides in one cell


@dataclass(frozen=True)
class Columns:
    """Which column holds what; None: found by its usual name. Several targets: one 0/1 column a label."""

    slide: str | None = None
    case: str | None = None
    target: str | tuple[str, ...] | None = None
    time: str | None = None
    event: str | None = None
    censorship: str | None = None
    site: str | None = None


@dataclass(frozen=True)
class Table:
    """One row a slide. ``frame``: slide, case, then label (number of its class) | time, event | one column a label; site if known.

    ``dropped`` names each row left out and why, ``notes`` say how the file was read.
    """

    frame: pd.DataFrame
    task: Task
    classes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def cases(self) -> pd.DataFrame:
        """The first row of each patient, by patient."""
        return self.frame.drop_duplicates("case").set_index("case").sort_index()


@dataclass
class _Log:
    where: Path
    notes: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def drop(self, frame: pd.DataFrame, gone: "pd.Series[bool]", reason: str) -> pd.DataFrame:
        """The rows that stay; the others are listed by the id that they have."""
        if gone.any():
            lost = frame[gone]
            ids = lost["slide"] if "slide" in frame else lost.iloc[:, 0]
            names = [f"row {row} ({name}): {reason}" for row, name in zip(lost.index, ids.fillna("no id"), strict=True)]
            self.dropped += names
            more = ", ..." if len(names) > 3 else ""
            self.notes.append(
                f"dropped {len(names)} rows: {reason} ({', '.join(map(str, ids.fillna('no id').iloc[:3]))}{more})"
            )
        return frame[~gone]


def read_table(
    path: str | Path,
    columns: Columns = Columns(),  # noqa: B008 - frozen
    *,
    task: Task | None = None,
    classes: Sequence[str] | None = None,
    sheet: str | None = None,
    slide_table: str | Path | None = None,
    files: Iterable[str | Path] | None = None,
) -> Table:
    """Read a table of slides, of patients with their slides, or of patients joined to ``slide_table`` by patient.

    ``files`` are the feature files that were found: a patient's row without slides stands for the files whose name starts with its id.
    """
    path = Path(path)
    frame, notes = read_frame(path, sheet=sheet)
    log = _Log(path, list(notes))
    columns, task = _resolve(frame, columns, task, log)
    labels, order = _labels(frame, columns, task, classes, log)
    rows = _ids(frame, columns, log) if slide_table is None else _joined_ids(frame, columns, Path(slide_table), log)
    rows = rows.join(labels, on="row").set_index("row")
    rows = _with_slides(rows, files, log)
    rows = _with_cases(rows, log)
    names = list(labels.columns)
    if task == "classification" and classes is not None and columns.target is not None:
        other = rows["label"].isna() & frame[str(columns.target)].reindex(rows.index).notna()
        rows = log.drop(rows, other, "its label is none of `classes`")
    for name in names:
        rows = log.drop(rows, rows[name].isna(), f"no {name}")
    if task == "survival":
        rows = log.drop(rows, rows["time"] <= 0, "its time is not positive")
    rows = _unique(rows, names, task, log)
    if task != "survival":
        rows[names] = rows[names].astype("int64")
    if rows.empty:
        raise UserError(f"{path}: no usable row is left. " + " ".join(log.notes))
    table = Table(rows.reset_index(drop=True), task, order)
    log.notes += _readings(table, columns)
    return replace(table, dropped=tuple(log.dropped), notes=tuple(log.notes))


def _resolve(frame: pd.DataFrame, columns: Columns, task: Task | None, log: _Log) -> tuple[Columns, Task]:
    """Every column by its name in the file, and the task that these columns allow."""
    named = {
        key: tuple(pick_column(frame, name, log.where) for name in value)
        if isinstance(value, tuple)
        else pick_column(frame, value, log.where)
        for key, value in vars(columns).items()
        if value is not None
    }
    for key in ("slide", "case", "site"):
        found = usual_columns(frame, USUAL[key])
        if key not in named and found:
            named[key] = found[0]
            if len(found) > 1:
                _check_same_grouping(frame, key, found, log)
    task = task or _only_task(frame, columns, log)
    if task == "multilabel":
        if not isinstance(named.get("target"), tuple):
            raise UserError(
                f"{log.where}: a multilabel task needs its label columns; list them under `target`. Columns: {', '.join(frame)}."
            )
    elif task == "classification":
        named.setdefault("target", _only(frame, "target", log))
    else:
        named.setdefault("time", _only(frame, "time", log))
        if "event" in named and "censorship" in named:
            raise UserError(
                f"{log.where}: both `event` and `censorship` are named; keep one, they say the opposite of each other."
            )
        if "event" not in named and "censorship" not in named:
            statuses = [(key, column) for key in ("event", "censorship") for column in usual_columns(frame, USUAL[key])]
            if len(statuses) != 1:
                seen = (
                    f"several columns could tell ({', '.join(column for _, column in statuses)})"
                    if statuses
                    else "no column tells"
                )
                raise UserError(
                    f"{log.where}: {seen} whether the event was seen. Name one in the config: `event` (1 = event) or `censorship` (1 = censored)."
                )
            named[statuses[0][0]] = statuses[0][1]
    return Columns(**named), task  # type: ignore[arg-type]


def _check_same_grouping(frame: pd.DataFrame, key: str, found: list[str], log: _Log) -> None:
    """Two patient columns that group differently would leak patients across splits: the user must say which counts."""
    first = found[0]
    differ = [
        name for name in found[1:] if len(frame[[first, name]].drop_duplicates()) != frame[first].nunique(dropna=False)
    ]
    if key == "case" and differ:
        raise UserError(
            f"{log.where}: {first!r} and {differ[0]!r} group the slides differently. Name the patient column with `case`."
        )
    log.notes.append(f"{key}: column {first!r} (also seen: {', '.join(found[1:])})")


def _only_task(frame: pd.DataFrame, columns: Columns, log: _Log) -> Task:
    survival = columns.time or columns.event or columns.censorship
    if columns.target is not None and not survival:
        return "multilabel" if isinstance(columns.target, tuple) else "classification"
    if survival and columns.target is None:
        return "survival"
    has_label = bool(usual_columns(frame, USUAL["target"]))
    has_time = bool(usual_columns(frame, USUAL["time"])) and bool(
        usual_columns(frame, USUAL["event"] + USUAL["censorship"])
    )
    if has_label == has_time:
        seen = (
            "columns for classes and for survival" if has_label else f"no usual label column among {', '.join(frame)}"
        )
        raise UserError(
            f"{log.where}: {seen}. Say `task`, and name `target`, or `time` with `event` or `censorship`, in the config."
        )
    return "classification" if has_label else "survival"


def _only(frame: pd.DataFrame, key: str, log: _Log) -> str:
    found = usual_columns(frame, USUAL[key])
    if len(found) != 1:
        seen = (
            f"several columns could be the {key} ({', '.join(found)})"
            if found
            else f"no usual {key} column among {', '.join(frame)}"
        )
        raise UserError(f"{log.where}: {seen}. Name it with `{key}` in the config.")
    return found[0]


def _labels(
    frame: pd.DataFrame, columns: Columns, task: Task, classes: Sequence[str] | None, log: _Log
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The numbers to learn, by row of the file, and the names of classes."""
    if task == "classification":
        codes, order = read_classes(frame[str(columns.target)], classes, log.where)
        return pd.DataFrame({"label": codes}), order
    if task == "multilabel":
        names = tuple(columns.target or ())
        clash = {"slide", "case", "site", "row"} & set(names)
        if clash:
            raise UserError(f"{log.where}: a label may not be called {clash.pop()!r}; rename the column.")
        return pd.DataFrame({name: read_flags(frame[name], log.where) for name in names}), names
    events = read_events(
        frame[columns.censorship or columns.event], log.where, censorship=columns.censorship is not None
    )
    return pd.DataFrame({"time": read_times(frame[columns.time], log.where), "event": events}), ()


def _ids(frame: pd.DataFrame, columns: Columns, log: _Log) -> pd.DataFrame:
    """Columns row, slide, case and site; one row for each slide named in a cell."""
    if columns.slide is None and columns.case is None:
        raise UserError(
            f"{log.where}: no slide and no patient column among {', '.join(frame)}. Name them with `slide` and `case`."
        )
    rows = pd.DataFrame({"row": frame.index})
    for key in ("slide", "case", "site"):
        column = getattr(columns, key)
        rows[key] = frame[column].to_numpy() if column else None
    if not columns.site:
        rows = rows.drop(columns="site")
    several = rows["slide"].astype("string").str.contains(_SEVERAL, regex=True, na=False)
    if several.any():
        log.notes.append(f"{int(several.sum())} cells of {columns.slide!r} list several slides; each becomes a row")
        rows["slide"] = rows["slide"].map(
            lambda cell: [part for part in re.split(_SEVERAL, cell) if part], na_action="ignore"
        )
        rows = rows.explode("slide", ignore_index=True)
    return rows


def _joined_ids(frame: pd.DataFrame, columns: Columns, slide_table: Path, log: _Log) -> pd.DataFrame:
    """The patient table's rows joined to the slides of a second table; who has no partner is listed."""
    slides, notes = read_frame(slide_table)
    named = {}
    for key in ("slide", "case"):
        wanted = getattr(columns, key)
        found = [wanted] if wanted in slides.columns else usual_columns(slides, USUAL[key])
        if not found:
            raise UserError(
                f"{slide_table}: no {key} column among {', '.join(slides)}. The slide table needs a patient and a slide column."
            )
        named[key] = found[0]
    if columns.case is None:
        raise UserError(
            f"{log.where}: no patient column among {', '.join(frame)}, so {slide_table} cannot be joined. Name it with `case`."
        )
    log.notes += notes
    right = _ids(slides, Columns(**named), log)[["slide", "case"]]
    left = _ids(frame, replace(columns, slide=None), log).drop(columns="slide")
    joined = left.merge(right, on="case", how="outer", indicator=True)
    for side, reason in (
        ("left_only", f"no slide in {slide_table.name}"),
        ("right_only", f"its patient is not in {log.where.name}"),
    ):
        joined = log.drop(joined, (joined["_merge"] == side) | joined["case"].isna(), reason)
    return joined.drop(columns="_merge").astype({"row": int}).sort_values(["row", "slide"], ignore_index=True)


def _with_slides(rows: pd.DataFrame, files: Iterable[str | Path] | None, log: _Log) -> pd.DataFrame:
    """Rows without a slide get those of the patient's files; ids that climb out of a folder are dropped."""
    blank = rows["slide"].isna() & rows["case"].notna()
    if blank.any() and files is not None:
        owned = files_of_cases(rows.loc[blank, "case"].unique(), files)
        stems = {case: sorted({slide_stem(path) for path in paths}) or [None] for case, paths in owned.items()}
        rows["slide"] = [
            stems[case] if empty else slide
            for slide, case, empty in zip(rows["slide"], rows["case"], blank, strict=True)
        ]
        rows = rows.explode("slide")
        log.notes.append(
            f"slides of {len(stems)} patients found by name: {sum(map(len, owned.values()))} files start with a patient's id"
        )
        rows = log.drop(
            rows.assign(slide=rows["slide"].fillna(rows["case"])),
            rows["slide"].isna(),
            "no file starts with the patient's id",
        )
    elif blank.all():
        rows["slide"] = rows["case"]
        log.notes.append(
            "warning: no slide column: each patient's id stands for its slide until the feature files are known"
        )
    rows = log.drop(rows, rows["slide"].isna(), "no slide")
    climbs = rows["slide"].map(lambda slide: ".." in re.split(r"[\\/]", slide))
    return log.drop(rows, climbs, "its id holds '..', which no file name needs")


def _with_cases(rows: pd.DataFrame, log: _Log) -> pd.DataFrame:
    """Who has no patient: the TCGA barcode if the name is one, else the slide itself. TCGA barcodes also tell the site."""
    rows = rows.copy()
    unknown = rows["case"].isna()
    barcodes: pd.Series[Any] = (
        rows["slide"].map(lambda slide: _BARCODE.match(slide_stem(slide)) is not None).astype(bool)
    )
    for mask, derive, note in (
        (unknown & barcodes, lambda slide: slide_stem(slide)[:12].upper(), "no patient column: patient = first 12 characters of the TCGA barcode"),
        (unknown & ~barcodes, lambda slide: slide, "warning: no patient column: every slide counts as its own patient; name it with `case` if some share one"),
    ):  # fmt: skip
        if mask.any():
            rows.loc[mask, "case"] = rows.loc[mask, "slide"].map(derive)
            log.notes.append(f"{note} ({rows.loc[mask, 'case'].nunique()} patients)")
    if "site" not in rows and len(rows) and all(_BARCODE.match(case) for case in rows["case"]):
        rows["site"] = rows["case"].str[5:7]
        log.notes.append(f"site: characters 6-7 of the TCGA barcode ({rows['site'].nunique()} sites)")
    order = [
        "slide",
        "case",
        *[name for name in rows if name not in {"slide", "case", "site"}],
        *(["site"] if "site" in rows else []),
    ]
    return rows[order]


def _unique(rows: pd.DataFrame, names: list[str], task: Task, log: _Log) -> pd.DataFrame:
    """One row a slide; a slide (or in survival a patient) that says two things is refused."""
    for key, facts in (("slide", ["case", *names]), *([("case", names)] if task == "survival" else [])):
        distinct = rows.drop_duplicates([key, *facts])
        torn = distinct.loc[distinct[key].duplicated(), key].unique()
        if len(torn):
            raise UserError(
                f"{log.where}: {len(torn)} {'patients' if key == 'case' else 'slides'} have conflicting rows ({', '.join(torn[:5])}): "
                f"they differ in {', '.join(facts)}. Correct the table."
            )
    repeated = rows["slide"].duplicated()
    if repeated.any():
        log.notes.append(f"{int(repeated.sum())} rows repeat a slide with the same label; each slide is taken once")
    return rows[~repeated].copy()


def _readings(table: Table, columns: Columns) -> list[str]:
    """What the columns were taken to mean, in words."""
    if table.task == "survival":
        status = columns.censorship or columns.event or ""
        return [describe_survival(table.cases, columns.time or "", status, censorship=columns.censorship is not None)]
    if table.task == "multilabel":
        counts = table.frame[list(table.classes)].sum()
        return ["labels: " + ", ".join(f"{name} {counts[name]}" for name in table.classes)]
    tally = table.frame["label"].value_counts()
    balance = ", ".join(f"{name} {tally.get(i, 0)}" for i, name in enumerate(table.classes))
    alone = ["warning: only one class; nothing can be learnt from it"] if len(table.classes) == 1 else []
    return [f"{columns.target}: {balance} (slides by class)", *alone]
