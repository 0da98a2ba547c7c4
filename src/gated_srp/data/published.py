"""The paper's cohorts as they were released: the public label files, which of their rows count, and the rules of the splits."""

import hashlib
import io
import math
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from gated_srp.data.matching import slide_stem
from gated_srp.data.splits import Split, balanced_parts, case_groups, dealt_hold_out, hold_out, validation_part
from gated_srp.data.table import Table
from gated_srp.errors import Note, UserError, counted

Array = npt.NDArray[Any]
_ADP_PARTS = (14_134, 1_767, 1_767)  # train, valid and test of the release's 17,668 rows


@dataclass(frozen=True)
class LabelFile:
    """A released file: its name, the folder it is in among other cohorts' files, its checksum, where to get it."""

    folder: str
    name: str
    sha256: str | None
    source: str

    def find(self, place: str | Path) -> Path:
        """The file in ``place``, or in its own folder there, or ``place`` itself."""
        place = Path(place)
        candidates = [place, place / self.name, place / self.folder / self.name]
        found = next((path for path in candidates if path.is_file()), None)
        if found is None:
            what = f"no {self.name}, nor {self.folder}/{self.name}"
            raise UserError(what, where=place, cure=f"Where to get it: {self.source}.", kind="missing")
        return found

    def differences(self, path: Path) -> tuple[Note, ...]:
        """Empty when the file is the released one to the last byte, else a warning."""
        if self.sha256 is None or hashlib.sha256(path.read_bytes()).hexdigest() == self.sha256:
            return ()
        what = f"{path.name} is not the released file (checksum differs); splits may differ from the published"
        return (Note("warning", "table", what, cure=f"Where to get it: {self.source}."),)


def camelyon17(frame: pd.DataFrame, path: Path, name: str) -> pd.DataFrame:
    """Rows of slides are mixed with rows of patients; the patient is the first part of the slide's name."""
    _need(path, set(frame.columns), {"patient", "stage", "center"})
    frame = frame[frame["patient"].str.fullmatch(r"patient_\d+_node_\d+\.tif", na=False)]
    if frame.empty:
        what = "no row is named patient_NNN_node_M.tif"
        raise UserError(what, where=path, cure="Expected the challenge's stages.csv.")
    slides = frame["patient"].map(slide_stem)
    return frame.assign(slide=slides, case=frame["patient"].str.extract(r"(patient_\d+)_")[0])


def tcga(frame: pd.DataFrame, path: Path, name: str) -> pd.DataFrame:
    """Overall survival of one cohort; slides are named without their ending."""
    _need(path, set(frame.columns), {"cohort", "endpoint", "case_barcode", "filename", "event", "time_days"})
    key = name.replace("-", "_")
    chosen = frame[(frame["cohort"] == key) & (frame["endpoint"] == "OS")]
    if chosen.empty:
        what = f"no row of cohort {key} with endpoint OS"
        raise UserError(what, where=path, cure="Expected the matched survival table.")
    return chosen.assign(slide=chosen["filename"].map(slide_stem, na_action="ignore"))


def _need(path: Path, found: set[str], wanted: set[str]) -> None:
    if not wanted <= found:
        what = f"no column {', '.join(sorted(wanted - found))}"
        raise UserError(what, where=path, cure="Expected the released table.", kind="column")


# Splits: unit and group of each cohort --------------------------------------------------------------------------------


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
        rows = _row_numbers(path)
        if rows.ndim != 1 or rows.dtype.kind not in "iu":
            what = f"expected a list of row numbers, found {rows.dtype} of shape {rows.shape}"
            raise UserError(what, where=path, cure="Download the release again.", kind="split")
        if rows.size and (rows.min() < 0 or rows.max() >= len(table.frame)):
            what = f"row numbers run to {rows.max()}, the table has {counted(len(table.frame), 'row')}"
            raise UserError(what, where=path, cure="Is it of another release?", kind="split")
        patches = table.frame["slide"].to_numpy()[rows].tolist()
        again = [patch for patch in patches if patch in parts]
        if again or len(set(patches)) < len(patches):
            what = f"a row is named twice, e.g. {(again or patches)[0]}"
            raise UserError(what, where=path, cure="The three row files must not overlap.", kind="split")
        parts |= dict.fromkeys(patches, part)
    split = Split("patch_id", parts, f"row files in {folder.name}")
    found = tuple(split.counts.values())
    if len(table.frame) != sum(_ADP_PARTS) or found == _ADP_PARTS:
        return split
    sizes, released = (" / ".join(f"{count:,}" for count in counts) for counts in (found, _ADP_PARTS))
    what = f"the row files have {sizes} rows (train, valid, test), those of the release {released}"
    return replace(split, notes=(Note("warning", "split", what, cure="Is it the release's own split?"),))


def _row_numbers(path: Path) -> Array:
    """The content of a row file. Numbers that were stored as Python objects are read, too: nothing else is unpickled."""
    try:
        file = io.BytesIO(path.read_bytes())  # a header that claims to be longer ends with the file
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        if dtype.hasobject:
            return np.array(_Numbers(file).load().tolist())
        if dtype.itemsize * math.prod(shape) > file.getbuffer().nbytes:
            raise ValueError(f"it claims {math.prod(shape):,} numbers, which are not there")
        file.seek(0)
        plain: Array = np.lib.format.read_array(file, allow_pickle=False)
        return plain
    except pickle.UnpicklingError as error:
        what = f"holds other Python objects than numbers ({error})"
        cure = "Such files are not opened, since that would run their code. Download the release again."
        raise UserError(what, where=path, cure=cure, kind="split") from None
    except Exception as error:  # damage shows as anything: a tokenizer's, an unpickler's error
        cure = "ADP's row files train.npy, valid.npy and test.npy come with it."
        what = f"cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        raise UserError(what, where=path, cure=cure, kind="split") from None


class _Numbers(pickle.Unpickler):
    """Unpickles arrays and numbers; whatever else a pickle names is refused before it is imported."""

    def find_class(self, module: str, name: str) -> Any:
        makers = (np.ndarray, np.dtype, np.empty(0).__reduce__()[0], np.int64(0).__reduce__()[0])
        known = dict(zip(("ndarray", "dtype", "_reconstruct", "scalar"), makers, strict=True))
        if module in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray") and name in known:
            return known[name]  # wherever this version of numpy has it
        raise pickle.UnpicklingError(f"{module}.{name}")
