"""The public label files of the paper's cohorts: where they lie, whether they are as released, how to read each."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gated_srp.data.tables.matching import slide_stem
from gated_srp.data.tables.read import read_frame
from gated_srp.data.tables.table import Columns, Table, read_table, tidy_table
from gated_srp.errors import Note, UserError

if TYPE_CHECKING:
    from gated_srp.config.presets import Cohort


@dataclass(frozen=True)
class LabelFile:
    """A released file: its name, the folder it lies in among other cohorts' files, its checksum, where to get it."""

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


def camelyon16(path: Path, cohort: "Cohort") -> Table:
    """Columns slide_id, class_name."""
    columns = Columns(slide="slide_id", case="slide_id", target="class_name")
    return read_table(path, columns, task="classification", classes=cohort.classes)


def camelyon17(path: Path, cohort: "Cohort") -> Table:
    """Rows of slides stand among rows of patients; the patient is the first part of the slide's name."""
    frame, notes = read_frame(path)
    _need(path, set(frame.columns), {"patient", "stage", "center"})
    frame = frame[frame["patient"].str.fullmatch(r"patient_\d+_node_\d+\.tif", na=False)]
    if frame.empty:
        what = "no row is named patient_NNN_node_M.tif"
        raise UserError(what, where=path, cure="Expected the challenge's stages.csv.")
    frame = frame.assign(
        slide=frame["patient"].map(slide_stem), case=frame["patient"].str.extract(r"(patient_\d+)_")[0]
    )
    columns = Columns(slide="slide", case="case", target="stage", site="center")
    return tidy_table(frame, columns, where=path, task="classification", classes=cohort.classes, notes=notes)


def kgh(path: Path, cohort: "Cohort") -> Table:
    """A table slide_id, label; normal slides, if listed, are left out."""
    columns = Columns(slide="slide_id", case="slide_id", target="label")
    return read_table(path, columns, task="classification", classes=cohort.classes)


def panda(path: Path, cohort: "Cohort") -> Table:
    """The challenge's train.csv; the data provider is the site."""
    columns = Columns(slide="image_id", case="image_id", target="isup_grade", site="data_provider")
    return read_table(path, columns, task="classification", classes=cohort.classes)


def bracs(path: Path, cohort: "Cohort") -> Table:
    """Sheet WSI_Information."""
    columns = Columns(slide="WSI Filename", case="Patient Id", target="WSI label")
    return read_table(path, columns, task="classification", classes=cohort.classes, sheet="WSI_Information")


def tcga(path: Path, cohort: "Cohort") -> Table:
    """Overall survival of one cohort; slides are named without their ending."""
    frame, notes = read_frame(path)
    _need(path, set(frame.columns), {"cohort", "endpoint", "case_barcode", "filename", "event", "time_days"})
    key = cohort.name.replace("-", "_")
    chosen = frame[(frame["cohort"] == key) & (frame["endpoint"] == "OS")]
    if chosen.empty:
        what = f"no row of cohort {key} with endpoint OS"
        raise UserError(what, where=path, cure="Expected the matched survival table.")
    chosen = chosen.assign(slide=chosen["filename"].map(slide_stem, na_action="ignore"))
    columns = Columns(slide="slide", case="case_barcode", time="time_days", event="event")
    return tidy_table(chosen, columns, where=path, task="survival", notes=notes)


def adp(path: Path, cohort: "Cohort") -> Table:
    """Patches with 0/1 columns; each patch counts as its own patient, as its release splits them."""
    columns = Columns(slide="Patch Names", case="Patch Names", target=cohort.classes)
    return read_table(path, columns, task="multilabel")


def _need(path: Path, found: set[str], wanted: set[str]) -> None:
    if not wanted <= found:
        what = f"no column {', '.join(sorted(wanted - found))}"
        raise UserError(what, where=path, cure="Expected the released table.", kind="column")
