"""Files are whole or not there."""

import errno
import hashlib
import os

import h5py
import pytest

from gated_srp.errors import UserError
from gated_srp.files import full_hash, sampled_hash, whole, whole_hdf5, write_whole


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


def test_two_writers_with_one_process_number_have_drafts_of_their_own(tmp_path):
    """As in two containers, or on two machines: the process number says nothing there."""
    with whole(tmp_path / "a.txt") as mine:
        mine.write_text("mine")
        with whole(tmp_path / "a.txt") as theirs:
            theirs.write_text("theirs")
        assert mine.read_text() == "mine"
    assert (tmp_path / "a.txt").read_text() == "mine"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_file_and_folder_are_on_the_disk_when_the_older_copy_goes(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor):
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("replace"), replace(*names)))
    with whole(tmp_path / "a.txt") as draft:
        draft.write_text("words")
    assert done == ["file", "replace", "folder"]


def test_drafts_of_a_killed_writer_go_at_the_next_start_and_those_of_a_living_one_stay(tmp_path):
    dead = tmp_path / ".a.txt.00.part"
    dead.write_text("half")
    with whole(tmp_path / "a.txt") as living:
        living.write_text("slow")
        write_whole(tmp_path / "a.txt", "fast")
        assert living.exists() and not dead.exists()
    assert (tmp_path / "a.txt").read_text() == "slow"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_an_hdf5_file_is_written_in_one_piece_so_that_a_full_disk_is_an_error_and_no_crash(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(value):
        with whole_hdf5(tmp_path / "a.h5") as file:
            file["x"] = [value]

    write(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="No space left on device"):
            write(2)
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["x"][:].tolist() == [1]
    assert os.listdir(tmp_path) == ["a.h5"]


def test_a_fingerprint_changes_with_the_content_and_not_with_the_time(tmp_path):
    file = tmp_path / "a.h5"
    content = bytearray(os.urandom(10_000_000))
    file.write_bytes(content)
    before = sampled_hash(file)
    os.utime(file, (1, 1))
    assert sampled_hash(file) == before
    for place in (0, len(content) - 1, 4096 * 16):  # the ends, and a place that is not looked at
        changed = bytearray(content)
        changed[place] ^= 1
        file.write_bytes(changed)
        assert (sampled_hash(file) == before) == (place == 4096 * 16)
        assert full_hash(file) == hashlib.sha256(changed).hexdigest()
    file.write_bytes(content + b"x")
    assert sampled_hash(file) != before


def test_a_folder_has_a_fingerprint_of_all_its_files(tmp_path):
    for name in "abc":
        write_whole(tmp_path / "zarr" / name, name * 100)
    seen = {(sampled_hash(tmp_path / "zarr"), full_hash(tmp_path / "zarr"))}
    for name, text in (("b", "B" * 100), ("d", ""), ("e/f", "deep")):
        write_whole(tmp_path / "zarr" / name, text)
        seen.add((sampled_hash(tmp_path / "zarr"), full_hash(tmp_path / "zarr")))
    assert len(seen) == 4 and len({one for one, _ in seen}) == len({one for _, one in seen}) == 4


def test_a_name_as_long_as_the_file_system_allows_can_be_written(tmp_path):
    name = "s" * 251 + ".csv"
    write_whole(tmp_path / name, "words")
    assert os.listdir(tmp_path) == [name]
