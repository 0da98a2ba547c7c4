"""The tables of speed on the pages are those of a committed file of measurements."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from gated_srp_bench.figures import fallen, figures, read_rows
from gated_srp_bench.measure import Row
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


def test_the_tables_of_a_long_run_have_each_part_with_its_aim(tmp_path):
    def both(value, peak):
        arms = [("textbook", "float32"), ("na", "float32"), ("gated_srp", "float32"), ("gated_srp", "bfloat16")]
        for tokens in (10_000, 49_152):
            yield Row(tokens, "multiply", "machine", "float32", 1.0)
            for phase in ("prepare", "predict", "train"):
                yield from (Row(tokens, phase, arm, dtype, value) for arm, dtype in arms)
                yield from (
                    Row(tokens, phase, arm, "float32", value, peak) for arm, _ in arms[:3] if phase != "prepare"
                )

    more = [
        *(Row(n, "window", a, "float32", s) for n in (77, 512) for a, s in (("one by one", 1.5), ("packed", 1.0))),
        Row(1_000_000, "stream", "gated_srp", "float16", 60.0, 7_000.0, own_mb=3_000.0),
        Row(200_000, "checkpointed", "gated_srp", "float16", 60.0, 7_000.0, own_mb=6_000.0),
        *(
            Row.of(44_000, "epoch", arm, "float32", [s])
            for arm, s in (("bare steps", 10.0), ("gzip files, cold", 12.0))
        ),
        Row.of(44_000, "epoch", "gzip files, cold waiting", "float32", [0.3]),
    ]
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"machine": "here", "rows": [asdict(row) for row in (*both(2.0, 9.0), *more)]}))
    table = PAGES["docs/performance.md"](path)
    for line in (
        "| median over turns (95 % interval) | 10,000 patches | 49,152 patches | aim |",
        "| 77 | training bags, one by one / packed | 1.50 (1.50-1.50) | ≥ 1.6, not reached |",
        "| 512 | training bags, one by one / packed | 1.50 (1.50-1.50) | ≥ 1.3 |",
        "| 1,000,000 | peak of prepare + predict, GB | 6.84 | ≤ 6, not reached |",
        "| 200,000 | peak of a training step with checkpointing, GB | 6.84 | ≤ 20 |",
        "| 44,000 | epoch / bare steps, gzip files, cold | 1.20 (1.20-1.20) | ≤ 1.1, not reached |",
        "| 44,000 | share of waiting, gzip files, cold | 0.02 (0.02-0.02) | ≤ 0.1 |",
        "| 1,000,000 | stream | gated_srp | float16 | 60 s | 7,000 MB, 3,000 own |",
    ):
        assert line in table.splitlines(), line
    assert "epoch" not in table.split("| patches | phase |")[1]
    short = PAGES["README.md"](path)
    for line in (
        "|  | 10,000 patches | 49,152 patches |",
        "| peak memory of a training step, share of the textbook's | 1.00 | 1.00 |",
    ):
        assert line in short.splitlines(), line
    assert "1,000,000 patches predicted within 6.8 GB" in short and "200,000 trained on within 6.8 GB" in short
    old = figures(read_rows(RESULTS / "epyc_zen4.json"))
    assert all((a.tokens, a.name) == (b.tokens, b.name) for a, b in fallen(figures(read_rows(path)), old))
