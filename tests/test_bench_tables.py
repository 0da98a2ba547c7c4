"""The tables of speed on the pages are those of a committed file of measurements."""

from pathlib import Path

import pytest
from gated_srp_bench.figures import figures, read_rows
from gated_srp_bench.tables import HOME, PAGES, RESULTS, ratios, source, with_table


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_what_its_file_of_measurements_says(page):
    text = (HOME / page).read_text(encoding="utf-8")
    path = RESULTS / source(text)
    assert with_table(text, path, PAGES[page]) == text, f"run: python -m gated_srp_bench.tables {path}"


def test_both_pages_show_the_same_file():
    assert len({source((HOME / page).read_text(encoding="utf-8")) for page in PAGES}) == 1


def test_a_table_says_which_aims_are_not_reached_and_keeps_sizes_apart():
    text = "a\n<!-- bench old.json -->\nold\n<!-- end of bench -->\nb\n"
    path = RESULTS / source((HOME / "README.md").read_text(encoding="utf-8"))
    assert with_table(text, Path("new.json"), lambda _: "new\n") == (
        "a\n<!-- bench new.json -->\n\nnew\n\n<!-- end of bench -->\nb\n"
    )
    with pytest.raises(ValueError, match="no lines"):
        source("a page without a table")
    found = figures(read_rows(path))
    lines = ratios(found).splitlines()
    for figure in found:
        (line,) = [one for one in lines if f"| {figure.name} |" in one and figure.words in one]
        assert ("not reached" in line) or figure.holds
