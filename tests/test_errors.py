"""Errors and notes carry their parts; nobody takes a text apart to get them back."""

import pickle
from pathlib import Path

import pytest

from gated_srp.errors import Note, UserError, joined


class FileError(UserError):
    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message, where=path, kind="file")
        self.size = 5


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (("what",), "what"),
        (("what", "where"), "where: what"),
        (("what", "where", "Do it."), "where: what. Do it."),
        (("what?", "", "Do it."), "what? Do it."),
        (("what.", "", "Do it."), "what. Do it."),
    ],
)
def test_a_text_is_where_what_and_cure(parts, text):
    assert joined(*parts) == text


def test_an_error_survives_pickling_with_its_class_and_parts():
    error = FileError("cut short", Path("a.h5"))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is FileError
    assert (again.what, again.where, again.kind, again.size, str(again)) == ("cut short", "a.h5", "file", 5, str(error))


def test_a_changed_error_keeps_the_other_parts():
    error = FileError("cut short", Path("a.h5")).changed(what="cut short (slide 'a')", cure="Copy it again.")
    assert str(error) == "a.h5: cut short (slide 'a'). Copy it again."
    assert isinstance(error, FileError) and error.size == 5


def test_an_error_becomes_a_finding():
    note = Note.of(UserError("no table", where="t.csv", cure="Name it.", kind="missing"), kind="cohort")
    assert note == Note("error", "cohort", "no table", ("t.csv",), "Name it.")
    assert str(note) == "t.csv: no table. Name it."
