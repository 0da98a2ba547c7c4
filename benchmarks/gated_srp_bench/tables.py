"""The tables of docs/performance.md and of the README, from one file of `gated-srp bench --full --json FILE`.

    python -m gated_srp_bench.tables benchmarks/results/FILE.json

writes between the lines `<!-- bench FILE.json -->` and `<!-- end of bench -->` of both pages; `tests/test_bench_tables.py` fails where a page
and its file differ.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from gated_srp_bench.figures import Figure, figures, multiply_rate, read_rows
from gated_srp_bench.measure import Row

HOME = Path(__file__).resolve().parents[2]
RESULTS = HOME / "benchmarks" / "results"
_BETWEEN = re.compile(r"(?<=<!-- bench )(\S+)( -->\n).*?(?=<!-- end of bench -->)", re.S)
_SHORT = {  # of the README
    "prepare + predict, float32": "prepare and predict, times as fast",
    "prepare + train, float32": "prepare and train one step, times as fast",
    "peak of predict, ours / textbook": "peak memory of a prediction, share of the textbook's",
    "peak of train, ours / textbook": "peak memory of a training step, share of the textbook's",
    "Gated SRP / NA, predict": "time of a prediction, Gated SRP / plain Nystrom attention",
    "Gated SRP / NA, train": "time of a training step, Gated SRP / plain Nystrom attention",
}
_LONG = {  # of the README
    "peak of prepare + predict, GB": "patches predicted",
    "peak of a training step with checkpointing, GB": "trained on",
}


def ratios(found: Sequence[Figure]) -> str:
    """Every promised ratio, a column per size; what was measured at one size only stands below."""
    sizes = sorted({figure.tokens for figure in found if figure.name.startswith("prepare,")})
    wide = {figure.name: [f for f in found if f.name == figure.name] for figure in found if figure.tokens in sizes}
    rows = [(name, *_by_size(same, sizes), " / ".join(dict.fromkeys(map(_aim, same)))) for name, same in wide.items()]
    table = _table(("median over turns (95 % interval)", *(f"{n:,} patches" for n in sizes), "aim"), rows)
    others = [(f"{f.tokens:,}", f.name, f.words, _aim(f)) for f in found if f.name not in wide]
    return table + (f"\n\n{_table(('patches', 'ratio', 'median (95 %)', 'aim'), others)}" if others else "")


def measurements(rows: Sequence[Row]) -> str:
    """Seconds and peaks as measured."""
    kept = [row for row in rows if row.phase not in ("multiply", "epoch")]
    seen: dict[tuple[int, str, str, str], list[str]] = {}
    for row in kept:
        cells = seen.setdefault((row.tokens, row.phase, row.arm, row.dtype), ["", ""])
        if row.peak_mb is None:
            cells[0] = f"{row.seconds:.3g} s"
        else:
            cells[1] = f"{row.peak_mb:,.0f} MB" + (
                f", {row.own_mb:,.0f} own" if row.tokens > 100_000 and row.own_mb else ""
            )
            cells[0] = cells[0] or f"{row.seconds:.3g} s"
    lines = [(f"{tokens:,}", *what, *cells) for (tokens, *what), cells in seen.items()]
    return _table(("patches", "phase", "arm", "numbers", "median", "peak"), lines)


def long_table(path: Path) -> str:
    """For docs/performance.md."""
    rows = read_rows(path)
    rate = f"{multiply_rate(rows) / 1e9:.0f} Gflop/s in a bare float32 product"
    return f"Machine: {machine(path)}; {rate}.\n\n{ratios(figures(rows))}\n\n{measurements(rows)}\n"


def short_table(path: Path) -> str:
    """For the README."""
    found = figures(read_rows(path))
    sizes = sorted({figure.tokens for figure in found if figure.name in _SHORT})
    rows = [(words, *_by_size([f for f in found if f.name == name], sizes)) for name, words in _SHORT.items()]
    others = [f"{f.tokens:,} {_LONG[f.name]} within {f.value:.1f} GB" for f in found if f.name in _LONG]
    table = _table(("", *(f"{n:,} patches" for n in sizes)), rows)
    return f"{table}\n" + (f"\n{'; '.join(others)}.\n" if others else "")


def machine(path: Path) -> str:
    content = json.loads(path.read_text(encoding="utf-8"))
    return str(content["machine"]) if isinstance(content, dict) else "not recorded"


def _by_size(same: Sequence[Figure], sizes: Iterable[int]) -> list[str]:
    found = {figure.tokens: figure.words for figure in same}
    return [found.get(tokens, "") for tokens in sizes]


def _aim(figure: Figure) -> str:
    return f"{'≥' if figure.at_least else '≤'} {figure.bound:g}{'' if figure.holds else ', not reached'}"


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *map(list, rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


PAGES: dict[str, Callable[[Path], str]] = {"docs/performance.md": long_table, "README.md": short_table}


def source(text: str) -> str:
    """The file that a page's table comes from."""
    found = _BETWEEN.search(text)
    if found is None:
        raise ValueError("no lines <!-- bench FILE.json --> and <!-- end of bench -->")
    return found[1]


def with_table(text: str, path: Path, table: Callable[[Path], str]) -> str:
    """The page with the tables of this file."""
    return _BETWEEN.sub(lambda found: f"{path.name}{found[2]}\n{table(path)}\n", text)


def main(path: Path) -> None:
    for name, table in PAGES.items():
        page = HOME / name
        text = page.read_text(encoding="utf-8")
        source(text)
        page.write_text(with_table(text, path, table), encoding="utf-8")
        print(f"written: {page}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
