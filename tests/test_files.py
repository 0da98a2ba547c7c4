"""Files are whole or not there."""

import os

import pytest

from gated_srp.errors import UserError
from gated_srp.files import whole, write_whole


def test_a_file_and_its_folders_are_made(tmp_path):
    write_whole(tmp_path / "new" / "a.txt", "words")
    assert (tmp_path / "new" / "a.txt").read_text() == "words"
    assert os.listdir(tmp_path / "new") == ["a.txt"]


def test_a_failure_leaves_the_old_file_and_nothing_beside(tmp_path):
    write_whole(tmp_path / "a.txt", "old")

    def stops_in_the_middle() -> None:
        with whole(tmp_path / "a.txt") as draft:
            draft.write_text("half")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        stops_in_the_middle()
    assert (tmp_path / "a.txt").read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_place_that_cannot_be_written_is_the_users_to_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_whole(tmp_path / "file" / "a.txt", b"bytes")
