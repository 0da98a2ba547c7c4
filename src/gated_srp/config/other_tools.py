"""Configurations of other tools, as far as they describe a cohort: STAMP's config.yaml and Patho-Bench's task folders.

What they say of models and recipes is not taken over: it is named, so that the user knows what runs here instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gated_srp.config.load import read_settings
from gated_srp.data.imported_splits import count_folds
from gated_srp.errors import Note, UserError
from gated_srp.tasks import find_task

_SECTIONS = ("crossval", "training", "modeling", "deployment")  # of STAMP; `modeling` is that of its first version
_UNLIKE = ("max_epochs", "patience", "batch_size", "bag_size", "max_lr", "lr", "model_name", "use_alibi")


@dataclass(frozen=True)
class OtherConfig:
    """What a cohort is made of by another tool's file: arguments of `init`, and further settings with reasons."""

    path: Path
    tool: str
    features: Path | None
    table: Path
    slides: Path | None
    columns: Mapping[str, str]  # case, target, time, event, slide
    settings: tuple[tuple[str, Any, str], ...]
    notes: tuple[str, ...]

    @property
    def said(self) -> list[Note]:
        """What to tell the user."""
        return [Note("note", "init", f"{self.tool}: {note}") for note in self.notes]


def read_other(path: str | Path) -> OtherConfig:
    """Read the configuration of another tool; which one is told by its keys."""
    path = Path(path)
    path = path / "config.yaml" if path.is_dir() else path
    settings = read_settings(path).values
    if "task_col" in settings:
        return _patho_bench(path, settings)
    given = [(name, settings[name]) for name in _SECTIONS if isinstance(settings.get(name), dict)]
    if given:
        return _stamp(path, settings, dict(given))
    cure = "Expected STAMP's config.yaml (a section crossval or training), or a task folder of Patho-Bench (task_col)."
    raise UserError("no configuration that can be read", where=path, cure=cure, kind="setting")


def _stamp(path: Path, settings: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]) -> OtherConfig:
    """The first section whose tables are there: STAMP's own file has them all, with made-up paths."""
    usable = {name: own for name, own in sections.items() if own.get("clini_table")}
    there = [name for name, own in usable.items() if _placed(path, own["clini_table"]).is_file()]
    name = next(iter([*there, *usable]), None)
    if name is None:
        raise UserError(f"no clini_table in {', '.join(sections)}", where=path, cure="Name it.", kind="setting")
    own = usable[name]
    places = {key: _placed(path, own[key]) for key in ("clini_table", "slide_table", "feature_dir") if own.get(key)}
    for key, place in places.items():
        if not place.exists():
            what, cure = f"{name}.{key}: {place} is not there", "Correct the path, or run it where STAMP ran."
            raise UserError(what, where=path, cure=cure, kind="missing")
    target = own.get("ground_truth_label") or own.get("target_label")
    several = target if isinstance(target, list) else []
    columns = {
        "case": own.get("patient_label") or "PATIENT",
        "slide": own.get("filename_label") or "FILENAME",
        "target": several[0] if several else target,
        "time": own.get("time_label"),
        "event": own.get("status_label"),
    }
    if columns["time"]:
        columns["target"] = None
    notes = [f"read from the section `{name}`"]
    if several[1:]:
        notes.append(
            f"STAMP trains on several labels at once; the first, {several[0]}, is taken (left: {', '.join(several[1:])})"
        )
    more = {**(settings.get("advanced_config") or {}), **own}
    if said := [f"{key} {more[key]}" for key in _UNLIKE if more.get(key) is not None]:
        notes.append(f"STAMP's recipe is not taken over ({', '.join(said)}); see `train` and `arms`")
    found = tuple(_stamp_settings(path, own))
    plain = {key: str(value) for key, value in columns.items() if value}
    return OtherConfig(
        path,
        "STAMP",
        places.get("feature_dir"),
        places["clini_table"],
        places.get("slide_table"),
        plain,
        found,
        tuple(notes),
    )


def _stamp_settings(path: Path, own: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    if categories := own.get("categories"):
        yield "classes", categories, "categories of STAMP, in its order"
    yield "score", "case", "STAMP scores patients"
    splits = _placed(path, own["output_dir"]) / "splits.json" if own.get("output_dir") else None
    if splits is not None and splits.is_file():
        yield (
            "split",
            str(splits.absolute()),
            "the folds that STAMP drew; it has no validation part, a tenth of the training patients is drawn",
        )
        yield "folds", count_folds(splits), ""
    elif own.get("n_splits"):
        yield "folds", int(own["n_splits"]), "n_splits of STAMP; gated-srp crossval trains them"


def _patho_bench(path: Path, settings: Mapping[str, Any]) -> OtherConfig:
    table = path.parent / "k=all.tsv"
    if not table.is_file():
        cure = "Give the task's folder: k=all.tsv and config.yaml."
        raise UserError("no k=all.tsv beside it", where=path, cure=cure, kind="missing")
    task, extra = settings["task_col"], settings.get("extra_cols") or []
    columns = {"target": task}
    if "time" in find_task(settings.get("task_type")).usual:
        ends = {"event": ("_event", "_status"), "time": ("_days", "_months", "_years", "_time")}
        columns = {key: next((one for one in extra if one.lower().endswith(end)), "") for key, end in ends.items()}
        if missing := [key for key, column in columns.items() if not column]:
            what = f"no column of the {missing[0]} among extra_cols ({', '.join(extra)})"
            raise UserError(what, where=path, cure="Name them TASK_event and TASK_days.", kind="setting")
    found: list[tuple[str, Any, str]] = [
        ("name", f"{path.absolute().parent.parent.name}_{path.absolute().parent.name}", "")
    ]
    if settings.get("sample_col") == "case_id":
        found.append(("score", "case", "Patho-Bench's sample_col is case_id"))
    if (number := count_folds(table)) > 1:
        found.append(("folds", number, "its columns fold_0, fold_1, ...; gated-srp crossval trains them"))
    named = settings.get("label_dict") or {}
    said = ", ".join(f"{number} is {name}" for number, name in named.items())
    notes = (f"{task}: {said}",) if said else ()
    return OtherConfig(path, "Patho-Bench", None, table, None, columns, tuple(found), notes)


def _placed(path: Path, value: str) -> Path:
    """Relative to the working directory, as the tool has it, or to the file."""
    return Path(value) if Path(value).exists() else path.parent / value
