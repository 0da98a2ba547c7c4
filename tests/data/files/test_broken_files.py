"""Broken input is classified, never crashes, and is never acted upon."""

import resource

import pytest
from broken_files import BROKEN

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


def test_a_10_gb_claim_takes_no_memory(tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in ("a 10 GB claim", "a 10 GB claim in npz", "a 10 GB claim in pt"):
        with pytest.raises(BagError):
            read_bag(BROKEN[name][1](tmp_path / "s1.h5"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def test_pickled_code_does_not_run(tmp_path):
    path = BROKEN["pickled code"][1](tmp_path / "s1.h5")
    with pytest.raises(BagError):
        read_bag(path)
    assert [p.name for p in tmp_path.iterdir()] == ["s1.pt"]
