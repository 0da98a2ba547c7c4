"""Splits in the layouts of other tools; `imported_splits` reads all of them again.

- clam: ``splits_0.csv`` (slides below train, val, test) and ``splits_0_bool.csv`` (slides x True/False), one of each per fold
- stamp: ``splits.json`` of patients. STAMP draws its validation from ``train_patients`` and ignores other keys, so those who validate
  here are in it, too, and named once more as ``val_patients``
- patho-bench: ``k=all.tsv`` with a column per fold, and ``config.yaml`` that says what its columns are
"""

import csv
import io
import json
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Literal, get_args

import pandas as pd

from gated_srp.data.matching import slide_stem
from gated_srp.data.splits import PARTS, Split, assign_parts
from gated_srp.data.table import Table
from gated_srp.errors import UserError
from gated_srp.files import spreadsheet_safe, write_whole

Layout = Literal["clam", "stamp", "patho-bench"]
_NOT_LABELS = {"slide", "case", "site", "row"}


def export_splits(splits: Sequence[Split], table: Table, folder: str | Path, layout: Layout) -> list[Path]:
    """Write splits of a cohort as the folds of another tool; gives the files written. A patient in two parts is an error."""
    writers: dict[str, Callable[[list[pd.Series], Table], dict[str, str]]] = {
        "clam": _clam,
        "stamp": _stamp,
        "patho-bench": _patho_bench,
    }
    if layout not in writers:
        raise UserError(f"{layout!r} is no layout", where="--format", cure=f"Expected {', '.join(get_args(Layout))}.")
    parts = [assign_parts(split, table) for split in splits]
    written = []
    for name, text in writers[layout](parts, table).items():
        written.append(Path(folder) / name)
        write_whole(written[-1], text)
    return written


def _clam(parts: list[pd.Series], table: Table) -> dict[str, str]:
    found, names = {}, _slide_ids(table)
    for fold, part in enumerate(parts):
        slides = {name: list(names[part == name]) for name in PARTS}
        rows = [[number, *row] for number, row in enumerate(zip_longest(*slides.values(), fillvalue=""))]
        inside = [[slide, *(name == one for one in PARTS)] for name in PARTS for slide in slides[name]]
        found[f"splits_{fold}.csv"] = _text([["", *PARTS], *rows], ",")
        found[f"splits_{fold}_bool.csv"] = _text([["", *PARTS], *inside], ",")
    return found


def _stamp(parts: list[pd.Series], table: Table) -> dict[str, str]:
    folds = []
    for part in parts:
        own = {name: sorted(set(table.frame["case"][part == name])) for name in PARTS}
        train = sorted([*own["train"], *own["val"]])
        folds.append({"train_patients": train, "test_patients": own["test"], "val_patients": own["val"]})
    return {"splits.json": json.dumps({"splits": folds}, indent=4, ensure_ascii=False) + "\n"}


def _patho_bench(parts: list[pd.Series], table: Table) -> dict[str, str]:
    import yaml

    from gated_srp.data.covariates import stored

    labels = [str(name) for name in table.frame if name not in _NOT_LABELS and not str(name).startswith(stored(""))]
    columns = [table.frame[name].map(lambda cell: spreadsheet_safe(str(cell))) for name in ("case", *labels)]
    columns.insert(1, _slide_ids(table))
    rows = zip(*columns, *(part.fillna("") for part in parts), strict=True)
    header = ["case_id", "slide_id", *labels, *(f"fold_{fold}" for fold in range(len(parts)))]
    about: dict[str, object] = {
        "task_col": labels[0],
        "extra_cols": labels[1:],
        "task_type": table.task,
        "metrics": [],
        "sample_col": "case_id",
    }
    if "label" in labels:  # numbers of classes
        about["label_dict"] = dict(enumerate(table.classes))
    tsv = _text([header, *map(list, rows)], "\t")
    return {"k=all.tsv": tsv, "config.yaml": yaml.safe_dump(about, sort_keys=False, allow_unicode=True)}


def _slide_ids(table: Table) -> pd.Series:
    """Without folders and endings, as these tools name slides and look for their files, while that leaves them apart."""
    stems = table.frame["slide"].map(slide_stem)
    return (stems if stems.is_unique else table.frame["slide"]).map(spreadsheet_safe)


def _text(rows: Sequence[Sequence[object]], delimiter: str) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, delimiter=delimiter, lineterminator="\n").writerows(rows)
    return buffer.getvalue()
