"""Tables of predictions of any tool, as one tidy table: ``case``, ``slide``, truth and predictions under our names; and ours in STAMP's form.

- ours: label, predicted, prob_<class>; value, predicted_value; risk, time, event
- STAMP ``patient-preds.csv``: PATIENT, KRAS, pred, KRAS_<class>, ...; of survival PATIENT, pred_score, time, event; of its crossval the output folder
- CLAM ``fold_0.csv``: slide_id, Y, Y_hat, p_0, p_1, ...; or the folder of them
- others: a column of the truth, and a column of probabilities per class whose name ends in the class, or a single one for labels of 0 and 1
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gated_srp.data.columns import id_columns, listed, usual_columns
from gated_srp.data.matching import slide_stem, tcga_patient
from gated_srp.data.spreadsheet import read_frame
from gated_srp.errors import Note, UserError, counted
from gated_srp.records import parse_numbers
from gated_srp.tasks.metrics import without_deviations

_TRUTH = ("label", "y", "y_true", "true_label", "truth", "ground_truth", "gt", "target", "true", "class", "true_class")
_PREDICTED = ("predicted", "pred", "y_hat", "y_pred", "prediction", "predicted_label", "predicted_class")
_ALONE = (
    "prob",
    "probability",
    "score",
    "y_score",
    "y_prob",
    "pred_prob",
    "prob_positive",
    "probs",
    "positive_probability",
)
_RISK = ("risk", "pred_score", "pred_risk", "risk_score", "predicted_risk", "hazard")
_EVENT = {"1": 1, "0": 0, "1.0": 1, "0.0": 0, "true": 1, "false": 0, "dead": 1, "alive": 0}
_NAMES = {"value": ("value",), "predicted_value": ("predicted_value",)}
_FOLDS = ("split-*/patient-preds.csv", "fold_*.csv")  # STAMP's crossval, CLAM's evaluation
_WRONG = 0.01  # by how much probabilities may miss a sum of one: files are rounded


def read_any_predictions(path: str | Path) -> tuple[pd.DataFrame, tuple[Note, ...]]:
    """A labelled table of predictions, and how it was read. Rows without truth are left out, and said.

    Columns: case, slide (where there is one), fold and arm (where they are there), then label, predicted, prob_<class>, or
    value, predicted_value, or risk, time, event.
    """
    path = Path(path)
    if not path.is_dir():
        frame, notes = read_frame(path)
        return _tidy(frame, path, list(notes))
    files = next((found for pattern in _FOLDS if (found := sorted(path.glob(pattern), key=_number))), [])
    if not files:
        cure = "Expected a table, or a folder with split-0/patient-preds.csv (STAMP) or fold_0.csv (CLAM)."
        raise UserError("no predictions in it", where=path, cure=cure, kind="missing")
    tables: list[pd.DataFrame] = []
    said: dict[str, Note] = {}
    for fold, file in enumerate(files):
        table, notes = read_any_predictions(file)
        tables.append(table.assign(fold=str(fold)))
        said |= {note.what: note for note in notes}
    pooled = Note(
        "note",
        "predictions",
        f"{counted(len(files), 'fold')} of {path} pooled: scores of different models are ranked against each other",
    )
    shared = [name for name in tables[0] if all(name in table for table in tables)]
    return pd.concat([table[shared] for table in tables], ignore_index=True), (pooled, *said.values())


def _number(file: Path) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", "/".join(file.parts[-2:]))))


def _tidy(frame: pd.DataFrame, path: Path, notes: list[Note]) -> tuple[pd.DataFrame, tuple[Note, ...]]:
    def say(what: str, level: Any = "note") -> None:
        notes.append(Note(level, "predictions", what))

    ids = {key: id_columns(frame, key)[:1] for key in ("case", "slide")}
    if not (ids["case"] or ids["slide"]):
        raise UserError("no column of patients or slides", where=path, cure=listed(frame), kind="column")
    table = pd.DataFrame(index=frame.index)
    if ids["slide"]:
        table["slide"] = frame[ids["slide"][0]].map(slide_stem, na_action="ignore")
    if ids["case"]:
        table["case"] = frame[ids["case"][0]]
    else:
        barcodes = table["slide"].map(tcga_patient, na_action="ignore")
        known = bool(barcodes.notna().all())
        table["case"] = barcodes if known else table["slide"]
        if known:
            say("patients by the TCGA barcodes of the slides")
        else:
            say(
                "no column of patients: every slide counts as one, and intervals are too narrow where a patient has several",
                "warning",
            )
    for name in ("fold", "arm"):
        if name in frame:
            table[name] = frame[name]
    found, truth = _risk(frame, path) or _numbers(frame, path) or _classes(frame, path, {*ids["case"], *ids["slide"]})
    for note in found.attrs.get("notes", ()):
        say(note)
    table = table.join(found)
    keep = table[["case", *truth]].notna().all(axis=1)
    if not keep.any():
        raise UserError(
            "no row has a truth to compare with", where=path, cure=f"Columns of it: {', '.join(truth)}.", kind="empty"
        )
    if not keep.all():
        say(f"left out: {counted(int((~keep).sum()), 'row')} without a patient or a truth")
    return table[keep].reset_index(drop=True), tuple(notes)


_Found = tuple[pd.DataFrame, tuple[str, ...]]  # truth and predictions; the names of the truth


def _risk(frame: pd.DataFrame, path: Path) -> _Found | None:
    """A risk, a time and an event: larger means earlier, as STAMP's and ours do."""
    columns = {
        "risk": usual_columns(frame, _RISK),
        "time": usual_columns(frame, ("time",)),
        "event": usual_columns(frame, ("event",)),
    }
    if not all(columns.values()):
        return None
    first = {key: found[0] for key, found in columns.items()}
    events = frame[first["event"]].str.casefold().map(_EVENT)
    if (strange := frame[first["event"]][events.isna() & frame[first["event"]].notna()]).any():
        raise UserError(f"event {strange.iloc[0]!r} is none of 0 and 1", where=path, cure="Correct it.", kind="column")
    found = pd.DataFrame({key: _number_cells(frame, first[key], path) for key in ("time", "risk")}).assign(event=events)
    found.attrs["notes"] = (f"risk: column {first['risk']!r}, larger means an earlier event",)
    return found, ("time", "event")


def _numbers(frame: pd.DataFrame, path: Path) -> _Found | None:
    if not set(_NAMES) <= set(frame):
        return None
    return pd.DataFrame({name: _number_cells(frame, name, path) for name in _NAMES}), ("value",)


def _classes(frame: pd.DataFrame, path: Path, used: set[str]) -> _Found:
    for truth, prefix, classes in _candidates(frame, used):
        found = pd.DataFrame({f"prob_{name}": _number_cells(frame, f"{prefix}{name}", path) for name in classes})
        if ((found < -_WRONG) | (found > 1 + _WRONG)).any(axis=None):
            continue
        labels = _spelt(frame[truth], classes)
        off = (found.sum(axis=1) - 1).abs() > _WRONG
        said = [f"truth: column {truth!r}; probabilities: {', '.join(prefix + name for name in classes)}"]
        if off.any():
            said.append(f"the probabilities of {counted(int(off.sum()), 'row')} do not add up to one")
        return _decided(found.assign(label=labels), frame, classes, tuple(said))
    for truth in [name for name in usual_columns(frame, _TRUTH) if name not in used]:
        labels, alone = _spelt(frame[truth], ["0", "1"]), usual_columns(frame, _ALONE)
        if alone and labels[frame[truth].notna()].isin(["0", "1"]).all():
            positive = _number_cells(frame, alone[0], path)
            found = pd.DataFrame({"prob_0": 1 - positive, "prob_1": positive}).assign(label=labels)
            return _decided(
                found, frame, ["0", "1"], (f"truth: column {truth!r}; {alone[0]!r} is the probability of 1",)
            )
    cure = f"Expected a column of the truth and one of the probability of each class, e.g. label, prob_0, prob_1. {listed(frame)}"
    raise UserError("no truth with probabilities of its classes", where=path, cure=cure, kind="column")


def _candidates(frame: pd.DataFrame, used: set[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Columns that may be the truth, usual names first, with a prefix that every one of its values has a column of."""
    names = [str(name) for name in frame]
    order = dict.fromkeys([*usual_columns(frame, _TRUTH), *names])
    guesses = set(usual_columns(frame, _PREDICTED))
    for truth in [name for name in order if name not in used and name not in guesses]:
        values = sorted({cell.removesuffix(".0") for cell in frame[truth].dropna()})
        if not 1 <= len(values) <= 50:
            continue
        for known in (
            f"{truth}_",
            "prob_",
            "p_",
            *(name[: -len(values[0])] for name in names if name.endswith(values[0])),
        ):
            if known and all(f"{known}{value}" in names for value in values):
                more = [name.removeprefix(known) for name in names if name.startswith(known) and name != truth]
                more = without_deviations(more, values)
                classes = [one for one in more if one in values or parse_numbers(frame[known + one]).notna().all()]
                if len(classes) > 1:
                    yield truth, known, classes
                    break


def _spelt(cells: pd.Series, classes: Sequence[str]) -> pd.Series:
    """Labels in the spelling of the classes: pandas writes 1.0 for 1 where a column has gaps."""
    return cells.map(lambda cell: cell if cell in classes else cell.removesuffix(".0"), na_action="ignore")


def _decided(found: pd.DataFrame, frame: pd.DataFrame, classes: Sequence[str], said: tuple[str, ...]) -> _Found:
    """With what the tool itself predicted, where that is one of the classes; otherwise the likeliest class."""
    likeliest = np.asarray(classes, dtype=object)[found[[f"prob_{name}" for name in classes]].to_numpy(float).argmax(1)]
    own = [_spelt(frame[name], classes) for name in usual_columns(frame, _PREDICTED)]
    own = [cells for cells in own if cells.isin(list(classes)).all()]
    found = found.assign(predicted=own[0] if own else likeliest)
    found.attrs["notes"] = said
    return found, ("label",)


def _number_cells(frame: pd.DataFrame, name: str, path: Path) -> pd.Series:
    numbers = parse_numbers(frame[name])
    wrong = numbers.isna() & frame[name].notna() & (frame[name].str.casefold() != "nan")
    if wrong.any() or np.isinf(numbers).any():
        row = frame.index[wrong | np.isinf(numbers)][0]
        raise UserError(
            f"{frame[name][row]!r} is no finite number",
            where=f"{path}, column {name}, row {row}",
            cure="Correct it.",
            kind="column",
        )
    return numbers.astype(float)


# Ours in STAMP's form ------------------------------------------------------------------------------------------------


def stamp_table(cases: pd.DataFrame, target: str = "label") -> pd.DataFrame:
    """One row per patient with STAMP's columns: PATIENT, the truth where it is known, pred, TARGET_<class>, loss; or pred_score, time, event.

    ``loss``: cross-entropy of the truth, or of numbers the absolute difference; rows are sorted by it.

    >>> ours = pd.DataFrame({"case": ["p1"], "label": ["a"], "predicted": ["a"], "prob_a": [0.5], "prob_b": [0.5]})
    >>> stamp_table(ours, "KRAS").columns.tolist()
    ['PATIENT', 'KRAS', 'pred', 'KRAS_a', 'KRAS_b', 'loss']
    """
    probabilities = [name for name in map(str, cases) if name.startswith("prob_")]
    names = {
        "case": "PATIENT",
        "label": target,
        "predicted": "pred",
        "risk": "pred_score",
        "value": target,
        "predicted_value": "pred",
    }
    names |= {name: f"{target}_{name.removeprefix('prob_')}" for name in probabilities}
    order = ["case", "label", "value", "predicted", "predicted_value", *probabilities, "risk", "time", "event"]
    found = cases[[name for name in order if name in cases]].rename(columns=names)
    if "label" in cases and probabilities:
        rows = cases.to_dict("records")
        found["loss"] = [-np.log(max(float(row.get(f"prob_{row['label']}", np.nan)), 1e-12)) for row in rows]
    elif "value" in cases:
        found["loss"] = (cases["predicted_value"] - cases["value"]).abs()
    return found.sort_values("loss", kind="stable", ignore_index=True) if "loss" in found else found


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Short names of files: their stems, with as many folders in front as it takes to tell them apart.

    >>> distinct_names([Path("a/patient-preds.csv"), Path("b/patient-preds.csv")])
    ['a/patient-preds', 'b/patient-preds']
    """
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join((*path.parts[:-1], path.stem if path.suffix else path.name)[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise UserError("the same file is named twice", where=paths[0], cure="Name each once.")
