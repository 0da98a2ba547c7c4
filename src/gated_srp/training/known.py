"""What is known of slides that a finished run is used on: their files, ids, patients, and the covariates that its head needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from gated_srp.config.cohort import read_labels
from gated_srp.config.load import load_config
from gated_srp.data.columns import Header, id_columns
from gated_srp.data.files.images import find_images
from gated_srp.data.files.siblings import find_bags, nothing_found
from gated_srp.data.matching import match_slides, slide_stem, tcga_patient
from gated_srp.data.spreadsheet import read_frame
from gated_srp.errors import UserError, counted
from gated_srp.files import as_stored
from gated_srp.training.trained import TrainedRun

if TYPE_CHECKING:
    from gated_srp.data.covariates import Covariates


def known_of(run: TrainedRun, files: Sequence[Path], table: str | Path | None = None) -> dict[Path, dict[str, Any]]:
    """Of each file what `open_slide` has to be told beside it: the patient's other slides, covariates; nothing for other models.

    ``table`` says whose slides they are, as in `predict`; without it TCGA barcodes do.
    """
    if not run.patients and run.covariates is None:
        return {}
    slides = with_ids(files, table, run.covariates)
    known: dict[Path, dict[str, Any]] = {file: {} for file in files}
    if run.patients:
        own: dict[str, list[Path]] = defaultdict(list)
        for case, file in zip(slides["case"], files, strict=True):
            own[case].append(file)
        for case, file in zip(slides["case"], files, strict=True):
            known[file] |= {"beside": [other for other in own[case] if other != file]} if case else {}
    if run.covariates is not None:
        for file, row in zip(files, slides.to_dict("records"), strict=True):
            values = zip(run.covariates.names, run.covariates.stored, strict=True)
            given = {name: None if pd.isna(row[column]) else row[column] for name, column in values}
            known[file] |= {"covariates": given} if row["listed"] else {}
    return known


def with_ids(
    files: Sequence[str | Path], table: str | Path | None, covariates: Covariates | None = None
) -> pd.DataFrame:
    """slide, case and file: ids of the table where one is named, else names of files and patients of TCGA barcodes.

    With ``covariates`` their columns too, as the table has them, and ``listed``: whether it has the slide at all.
    """
    ids = {str(file): (name, tcga_patient(name) or "") for file, name in zip(files, slide_names(files), strict=True)}
    rows: dict[str, dict[Any, Any]] = {}
    if table is not None:
        frame = _listed_slides(Path(table), files, covariates)
        cases = dict(zip(frame["slide"], frame["case"], strict=True))
        found = match_slides(list(cases), files).found
        ids |= {str(file): (slide, cases[slide]) for slide, file in found.items()}
        facts = {str(row["slide"]): row for row in frame.to_dict("records")}
        rows = {str(file): dict(facts[slide]) for slide, file in found.items()}
    slides = pd.DataFrame([(*ids[str(file)], str(file)) for file in files], columns=["slide", "case", "file"])
    if covariates is None:
        return slides
    if table is None:
        from gated_srp.data.covariates import needed  # not above: rarely so

        raise needed(covariates, counted(len(slides), "slide"))
    for name in covariates.stored:
        slides[name] = [rows.get(str(file), {}).get(name) for file in files]
    return slides.assign(listed=[str(file) in rows for file in files])


def _listed_slides(table: Path, files: Sequence[str | Path], covariates: Covariates | None) -> pd.DataFrame:
    """slide, case and the covariates of a spreadsheet's rows, or of a cohort's."""
    if table.suffix in (".yaml", ".yml"):
        config = load_config(table)
        if covariates is not None:
            config = config.model_copy(update={"covariates": covariates})
        frame = read_labels(config, map(Path, files)).frame
        if covariates is not None and not set(covariates.stored) <= set(frame):
            from gated_srp.data.covariates import needed

            raise needed(covariates, table)
        return frame
    cells, _ = read_frame(table)
    columns = [name for key in ("slide", "case") for name in id_columns(cells, key)[:1]]
    if len(columns) < 2:
        raise Header(cells, table).error("no column of slides, or none of patients", "Name them so.")
    frame = cells[columns].dropna().set_axis(["slide", "case"], axis=1)
    if covariates is None:
        return frame
    from gated_srp.data.covariates import read_covariates

    frame = frame.join(read_covariates(cells, covariates, columns, table)).drop_duplicates()
    if (twice := frame["slide"].duplicated()).any():
        what = f"slide {frame['slide'][twice].iloc[0]!r} has rows that differ in {', '.join(covariates.names)}, or in the patient"
        raise UserError(what, where=table, cure="Correct the table.", kind="contradiction")
    return frame


def files_for(run: TrainedRun, place: str | Path) -> list[Path]:
    """The files of a folder that a model reads, images or features; or the one file. Of several encoders, the model's."""
    place = as_stored(place)
    if place.is_file():
        return [place]
    if run.images is not None:
        return find_images(place)
    found = find_bags(place, encoder=run.encoder) or find_bags(place)  # only others: each is refused with its reason
    if not found:
        raise nothing_found(place)
    return found


def low_for(runs: Sequence[TrainedRun], features_low: str | Path | None) -> Path | None:
    """The folder of a lower magnification for runs that were trained on two; useless for others."""
    if features_low is None:
        return None
    if not any(run.card.get("features_low") for run in runs):
        what = "no run was trained on two magnifications, so the lower one would change nothing"
        raise UserError(what, where=features_low, cure="Leave --features-low out.", kind="scales")
    return Path(features_low)


def slide_names(files: Sequence[str | Path]) -> list[str]:
    """Names without endings; with the last folders where they would be the same.

    >>> slide_names(["a/s1.h5", "a/s2.h5"]), slide_names(["a/s1.h5", "b/s1.h5"])
    (['s1', 's2'], ['a/s1', 'b/s1'])
    """
    names = [slide_stem(file) for file in files]
    folders = [list(Path(file).parts[:-1]) for file in files]
    while len(set(names)) < len(names) and any(folders):
        names = [f"{folder.pop()}/{name}" if folder else name for name, folder in zip(names, folders, strict=True)]
    return names
