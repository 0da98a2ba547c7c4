"""The paper's splits, drawn again from the public tables: unit and group of each cohort."""

from pathlib import Path

import numpy as np

from gated_srp.data.splits.balance import balanced_parts, validation_part
from gated_srp.data.splits.rules import Split, case_groups, dealt_hold_out, hold_out
from gated_srp.data.tables.table import Table
from gated_srp.errors import UserError


def by_class(table: Table, seed: int) -> Split:
    """CAMELYON16, KGH: slides, grouped by label."""
    frame = table.frame.sort_values("slide")
    return Split(
        "slide_id",
        hold_out(dict(zip(frame["slide"], frame["label"], strict=True)), seed),
        f"published rule, seed {seed}",
    )


def by_centre(table: Table, seed: int) -> Split:
    """CAMELYON17: patients, grouped by medical centre."""
    return Split("patient_id", hold_out(dict(table.cases["site"]), seed), f"published rule, seed {seed}")


def by_provider_and_grade(table: Table, seed: int) -> Split:
    """PANDA: slides in the table's own order, grouped by provider and grade."""
    frame = table.frame
    groups = dict(zip(frame["slide"], zip(frame["site"], map(int, frame["label"]), strict=True), strict=True))
    return Split("image_id", hold_out(groups, seed), f"published rule, seed {seed}")


def by_event_and_time(table: Table, seed: int) -> Split:
    """TCGA: patients, grouped by event and quarter of the time."""
    return Split("case_id", dealt_hold_out(case_groups(table), seed), f"published rule, seed {seed}")


def by_label_vector(table: Table, seed: int) -> Split:
    """BRACS: patients, balanced over the classes of all their slides; the seed says which fifth tests."""
    frame, width = table.frame, len(table.classes)
    vectors = {
        str(case): np.bincount(labels, minlength=width).astype(float) for case, labels in frame.groupby("case")["label"]
    }
    test = balanced_parts(vectors, 5)[seed % 5]
    rest = {case: vector for case, vector in vectors.items() if case not in test}
    val = validation_part(balanced_parts(rest, 10), rest)
    parts = {case: "test" if case in test else "val" if case in val else "train" for case in vectors}
    return Split("patient_id", parts, f"published rule, seed {seed}")


def from_row_files(table: Table, folder: str | Path) -> Split:
    """ADP: row numbers of the label table in train.npy, valid.npy and test.npy, as released; no seed."""
    folder = Path(folder)
    parts: dict[str, str] = {}
    for part, name in (("train", "train.npy"), ("val", "valid.npy"), ("test", "test.npy")):
        path = folder / name
        try:
            rows = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            cure = "ADP's row files train.npy, valid.npy and test.npy come with it."
            raise UserError(f"cannot be read ({error})", where=path, cure=cure, kind="split") from None
        if rows.ndim != 1 or rows.dtype.kind not in "iu":
            what = f"expected a list of row numbers, found {rows.dtype} of shape {rows.shape}"
            raise UserError(what, where=path, cure="Download the release again.", kind="split")
        if rows.size and (rows.min() < 0 or rows.max() >= len(table.frame)):
            what = f"row numbers run to {rows.max()}, the table has {len(table.frame)} rows"
            raise UserError(what, where=path, cure="Is it of another release?", kind="split")
        patches = table.frame["slide"].to_numpy()[rows].tolist()
        again = [patch for patch in patches if patch in parts]
        if again or len(set(patches)) < len(patches):
            what = f"a row is named twice, e.g. {(again or patches)[0]}"
            raise UserError(what, where=path, cure="The three row files must not overlap.", kind="split")
        parts |= dict.fromkeys(patches, part)
    return Split("patch_id", parts, f"row files in {folder.name}")
