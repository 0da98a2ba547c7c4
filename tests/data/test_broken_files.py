"""Broken input is classified, never crashes, and is never acted upon."""

import pytest
from factories import BROKEN

from gated_srp.data import BagError, read_bag, read_header


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("read", [read_bag, read_header])
def test_a_broken_file_is_refused_with_its_kind_its_path_and_a_cure(name, read, tmp_path):
    kind, write = BROKEN[name]
    path = write(tmp_path / "s1.h5")
    with pytest.raises(BagError) as caught:
        read(path)
    assert caught.value.kind == kind
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value).split(". ")) >= 2, "what is wrong, then what to do"


def test_pickled_code_does_not_run(tmp_path):
    path = BROKEN["pickled code"][1](tmp_path / "s1.h5")
    with pytest.raises(BagError):
        read_bag(path)
    assert [p.name for p in tmp_path.iterdir()] == ["s1.pt"]
