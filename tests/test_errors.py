"""Errors and notes carry their parts; nobody takes a text apart to get them back."""

import ast
import pickle
import re
from pathlib import Path

import pytest

import gated_srp
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


_COUNT = re.compile(r"len\(.*\)|.*\.nunique\(\)|(int\()?.*\.sum\(\)\)?")
_MANY = re.compile(
    r" (slides|files|feature files|slide embeddings|patients|ids|cells|rows|patches|images|runs|seeds|cases|columns|classes|sites)\b"
)
_AMONG = re.compile(r"\b(of|of its|of the|all|the|in|fits)\s$")  # "1 of 4 slides", "all 3 slides"


def test_no_message_counts_one_as_many():
    """`1 slides`: a number before a noun is written by `counted`."""
    found = []
    for path in sorted(Path(gated_srp.__file__).parent.rglob("*.py")):
        texts = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.JoinedStr)]
        for before, number, after in (three for text in texts for three in zip([None, *text.values], text.values, text.values[1:], strict=False)):  # fmt: skip
            if not isinstance(number, ast.FormattedValue) or not isinstance(after, ast.Constant):
                continue
            said = before.value if isinstance(before, ast.Constant) else ""
            counts, many = _COUNT.fullmatch(ast.unparse(number.value)), _MANY.match(after.value)
            if counts and many and not _AMONG.search(said):
                found.append(f"{path.name}:{number.lineno}: {ast.unparse(number.value)}{after.value}")
    assert found == []
