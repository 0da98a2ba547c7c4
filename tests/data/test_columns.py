"""Which column is the patient: loosely matched names, ids that repeat, TCGA barcodes, and the explicit choice of none."""

from pathlib import Path

import pandas as pd
import pytest

from gated_srp.data.splits import own_split
from gated_srp.data.table import Columns, read_table
from gated_srp.errors import UserError

PATIENTS = [
    *["PatientID", "CaseID", "case_submitter_id", "MRN", "pid", "Patient_Nr", "participant_id", "Patienten-ID"],
    *["PATIENT", "patient id", "Patient-Id", "patientId", "Patient No.", "Patient Number", "patient_code", "PatNr"],
    *["pat_no", "Pat.-Nr.", "Pat_ID", "PtID", "pt_no", "Patient Name", "Anonymized Patient ID", "patient_barcode"],
    *["Patientennummer", "Patienten_Nr", "Patientin", "Fall", "Fall-Nr.", "Fallnummer"],
    *["Identifiant patient", "N° patient", "numéro de patient", "Cas", "ID_paciente", "Número de paciente", "Caso"],
    *["ID paziente", "Codice paziente", "Patiëntnummer", "patiënt", "Pasient ID", "pacjent_id", "potilas"],
    *["subject", "SubjectID", "subject_code", "USUBJID", "SUBJID", "donor", "Donor ID", "individual_id", "person_id"],
    *[
        "bcr_patient_barcode",
        "cases.submitter_id",
        "case",
        "Case No",
        "case_barcode",
        "患者ID",
        "病历号",
        "hospital number",
    ],
    *["Medical Record Number", "NHS number"],
]
OTHERS = [
    *["patient_age", "patch_id", "case_notes", "pT", "pTN", "n_patients", "patient_status", "case_control", "pattern"],
    *[
        "patient sex",
        "pathology",
        "subject_area",
        "casein",
        "fallback",
        "donor_age",
        "person_years",
        "idh",
        "case_type",
    ],
]


def write(folder: Path, **columns: list[str]) -> Path:
    """Twelve slides, two per patient."""
    slides = {"slide_id": [f"s{i:02d}" for i in range(12)], "label": list("aabb") * 3}
    pd.DataFrame(slides | columns).to_csv(folder / "t.csv", index=False)
    return folder / "t.csv"


def pairs(prefix: str = "P") -> list[str]:
    return [f"{prefix}{i // 2}" for i in range(12)]


@pytest.mark.parametrize("name", PATIENTS)
def test_a_patient_column_is_found_under_any_ordinary_name(tmp_path: Path, name: str) -> None:
    table = read_table(write(tmp_path, **{name: pairs()}))
    assert list(table.frame["case"]) == pairs()


@pytest.mark.parametrize("name", OTHERS)
def test_a_column_that_only_sounds_like_a_patient_is_not_taken(tmp_path: Path, name: str) -> None:
    table = read_table(write(tmp_path, **{name: pairs("")}))
    assert list(table.frame["case"]) == list(table.frame["slide"])


def test_without_a_patient_column_an_id_that_repeats_is_proposed_and_the_leak_is_said(tmp_path: Path) -> None:
    more = {"age": [str(40 + i // 3) for i in range(12)], "Accession": pairs("H21-"), "grade": ["G1", "G2"] * 6}
    table = read_table(write(tmp_path, **more))
    (warning,) = [note for note in table.notes if note.level == "warning"]
    assert warning.kind == "patients" and table.patients == "unknown"
    assert "slides of one patient may be in two parts" in warning.what
    assert "'Accession' (6 values in 12 rows)" in warning.what and "age" not in warning.what
    assert warning.cure.startswith("Name the patients with `case: Accession`, or write `case: none`")


def test_case_none_is_an_explicit_choice_that_silences_the_warning_and_is_said(tmp_path: Path) -> None:
    path = write(tmp_path, PatientID=pairs())
    table = read_table(path, Columns(case="none"))
    assert list(table.frame["case"]) == list(table.frame["slide"]) and table.patients == "slide"
    assert [note.level for note in table.notes] == ["note"] * len(table.notes)
    assert any(note.what.startswith("case: none, as chosen") for note in table.notes)


def test_case_none_holds_for_tcga_barcodes_and_a_column_of_that_name_is_a_column(tmp_path: Path) -> None:
    slides = [f"TCGA-AA-{1000 + i // 2}-01Z-00-DX{i}" for i in range(12)]
    assert read_table(write(tmp_path, slide_id=slides)).patients == "barcode"
    assert list(read_table(write(tmp_path, slide_id=slides), Columns(case="none")).frame["case"]) == slides
    assert list(read_table(write(tmp_path, none=pairs()), Columns(case="none")).frame["case"]) == pairs()


def test_cases_and_controls_are_no_patients(tmp_path: Path) -> None:
    assert read_table(write(tmp_path, case=["case", "control"] * 6)).patients == "unknown"


def test_empty_cells_of_a_patient_column_are_said_with_merged_cells_as_a_cause(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, PatientID=[name if i % 2 == 0 else "" for i, name in enumerate(pairs())]))
    (warning,) = [note for note in table.notes if note.level == "warning"]
    assert (
        warning.what.startswith("6 slides without a patient in 'PatientID': each counts as its own")
        and "merged cells" in warning.cure
    )
    assert table.patients == "partly"


def test_two_patient_columns_of_one_grouping_agree_and_of_two_are_refused(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, case_id=pairs("uuid-"), case_submitter_id=pairs()))
    assert list(table.frame["case"]) == pairs("uuid-")
    with pytest.raises(UserError, match=r"'PatientID' and 'Fall-Nr\.' group slides differently"):
        read_table(write(tmp_path, PatientID=pairs(), **{"Fall-Nr.": [f"F{i // 3}" for i in range(12)]}))


def test_a_slide_table_is_joined_by_columns_of_other_names(tmp_path: Path) -> None:
    (tmp_path / "clinical.csv").write_text("Patienten-ID,KRAS\nP1,mut\nP2,wt\n")
    (tmp_path / "slides.csv").write_text("PatNr,Scan\nP1,a\nP1,b\nP2,c\n")
    table = read_table(
        tmp_path / "clinical.csv", Columns(target="KRAS", slide="Scan"), slide_table=tmp_path / "slides.csv"
    )
    assert list(zip(table.frame["slide"], table.frame["case"], strict=True)) == [("a", "P1"), ("b", "P1"), ("c", "P2")]


def test_a_patient_column_of_tcga_samples_is_not_trusted(tmp_path: Path) -> None:
    slides = [f"TCGA-AA-{1000 + i // 2}-01Z-00-DX{1 + i % 2}" for i in range(12)]
    table = read_table(write(tmp_path, slide_id=slides, case_id=[name[:23] for name in slides]))
    (warning,) = [note for note in table.notes if note.level == "warning"]
    assert "'case_id' has several ids for 6 patients, by the TCGA barcodes (TCGA-AA-1000)" in warning.what
    assert table.patients == "unknown"
    assert read_table(write(tmp_path, slide_id=slides, case_id=[name[:12] for name in slides])).patients == "column"


def test_ids_of_diagnoses_in_gdcs_table_are_no_patients(tmp_path: Path) -> None:
    more = {"cases.submitter_id": pairs(), "diagnoses.submitter_id": [f"D{i}" for i in range(12)]}
    assert list(read_table(write(tmp_path, **more)).frame["case"]) == pairs()


def test_a_split_without_known_patients_is_not_called_one_by_patient(tmp_path: Path) -> None:
    assert own_split(read_table(write(tmp_path)), 42).source == "hold-out by slide, seed 42"
    known = read_table(write(tmp_path, PatientID=pairs()))
    assert own_split(known, 42).source == "hold-out by patient, seed 42"
