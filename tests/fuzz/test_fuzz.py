"""Two hundred damaged files for all readers; `make fuzz` tries thousands. See fuzz_harness.py."""

from collections import Counter

import pytest
from fuzz_harness import BAD, fuzz
from fuzz_targets import CORPUS, TARGETS


@pytest.mark.slow
def test_no_damaged_file_ends_in_a_traceback_a_hang_a_flood_of_memory_or_code_that_runs(tmp_path):
    counts = fuzz(200, tmp_path / "findings")
    total: Counter[str] = sum(counts.values(), Counter())
    found = {str(path.parent.relative_to(tmp_path)): path.read_text()[-600:] for path in tmp_path.rglob("finding.txt")}
    assert not any(total[kind] for kind in BAD), found
    assert total["read"] and total["refused"] and set(counts) == set(TARGETS)


def test_every_folder_of_the_corpus_belongs_to_a_target():
    assert {path.name for path in CORPUS.iterdir()} <= set(TARGETS)
