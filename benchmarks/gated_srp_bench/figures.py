"""The ratios that we promise, computed from measurements: medians over turns, with the interval of the median."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb, nan
from pathlib import Path
from statistics import median

from gated_srp.errors import UserError
from gated_srp_bench.measure import MULTIPLY_OPERATIONS, Row, predict_operations

STEADY = 0.02  # two measurements of a peak of memory differ by less; and few turns may agree by chance


@dataclass(frozen=True)
class Figure:
    """A ratio that we promise, and what this run gave; ``low`` to ``high`` is where its median lies (95 %)."""

    tokens: int
    name: str
    value: float
    bound: float
    at_least: bool = True
    low: float = nan
    high: float = nan

    @property
    def holds(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    @property
    def words(self) -> str:
        return f"{self.value:.2f}" if self.low != self.low else f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"

    def fell_below(self, base: "Figure") -> bool:
        """Whether it is worse than the same figure of another run by more than both scatter."""
        here, there = (
            (min(one.value * (1 - STEADY), one.low), max(one.value * (1 + STEADY), one.high)) for one in (self, base)
        )
        return here[1] < there[0] if self.at_least else here[0] > there[1]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which of the values the true median lies with at least 95 %; least and greatest where there are too few to say.

    >>> median_interval([3.0, 1.0, 2.0])
    (1.0, 3.0)
    >>> median_interval(list(range(16)))  # P(at most 3 of 16 below) is 1 %
    (3, 12)
    """
    n, ordered = len(values), sorted(values)
    outside, cut = 0.0, 0
    while 2 * (outside + comb(n, cut) / 2**n) <= 0.05:
        outside += comb(n, cut) / 2**n
        cut += 1
    place = max(0, cut - 1)
    return ordered[place], ordered[n - 1 - place]


def _ratio(tokens: int, name: str, pairs: Sequence[tuple[float, float]], bound: float, at_least: bool = True) -> Figure:
    """The median of above / below over turns."""
    ratios = [above / below for above, below in pairs]
    return Figure(tokens, name, median(ratios), bound, at_least, *median_interval(ratios))


def multiply_rate(rows: list[Row]) -> float:
    """Operations a second of a bare matrix product, the best that took turns with predictions: what this machine can do."""
    return MULTIPLY_OPERATIONS / min(seconds for row in rows if row.phase == "multiply" for seconds in _turns(row))


def _turns(row: Row) -> tuple[float, ...]:
    return row.turns or ((row.seconds,) if row.seconds else ())


def figures(rows: list[Row]) -> list[Figure]:
    """The promised ratios, for every measured size that a promise is made for."""
    found: list[Figure] = []
    for tokens in sorted({r.tokens for r in rows if r.phase == "train" and r.tokens >= 10_000}):
        here = [row for row in rows if row.tokens == tokens]
        found += _time_figures(tokens, here)
        peaks = {(row.phase, row.arm): row.peak_mb for row in here if row.peak_mb is not None}
        if ("train", "na") in peaks:
            found += _memory_figures(tokens, peaks)
    return [*found, *_window_figures(rows), *full_figures(rows), *epoch_figures(rows)]


def _window_figures(rows: list[Row]) -> Iterator[Figure]:
    turns = {(row.tokens, row.arm): _turns(row) for row in rows if row.phase == "window"}
    for tokens in sorted({tokens for tokens, _ in turns}):
        pairs = list(zip(turns[tokens, "one by one"], turns[tokens, "packed"], strict=True))
        yield _ratio(tokens, "training bags, one by one / packed", pairs, 1.6 if tokens < 512 else 1.3)


def _time_figures(tokens: int, rows: list[Row]) -> Iterator[Figure]:
    turns = {(row.phase, row.arm, row.dtype): _turns(row) for row in rows if row.peak_mb is None}

    def pairs(phase: str, arms: tuple[str, str], dtype: str = "float32") -> list[tuple[float, float]]:
        """Seconds of two arms in the same turn; ``dtype`` is the first one's."""
        return list(zip(turns[phase, arms[0], dtype], turns[phase, arms[1], "float32"], strict=True))

    def with_preparation(phase: str, dtype: str) -> list[tuple[float, float]]:
        ours, textbook = (median(turns["prepare", arm, "float32"]) for arm in ("gated_srp", "textbook"))
        return [(textbook + b, ours + a) for a, b in pairs(phase, ("gated_srp", "textbook"), dtype)]

    yield _ratio(
        tokens, "prepare, textbook / ours", pairs("prepare", ("textbook", "gated_srp")), 20 if tokens < 49_152 else 25
    )
    for phase, plain, half in (("predict", 3.5, 5), ("train", 3, 3)):
        yield _ratio(tokens, f"prepare + {phase}, float32", with_preparation(phase, "float32"), plain)
        yield _ratio(tokens, f"prepare + {phase}, ours bf16", with_preparation(phase, "bfloat16"), half)
        both = [(b, a) for a, b in pairs(phase, ("gated_srp", "gated_srp"), "bfloat16")]
        yield _ratio(tokens, f"{phase}, our float32 / our bf16", both, 1.8)
        yield _ratio(tokens, f"Gated SRP / NA, {phase}", pairs(phase, ("gated_srp", "na")), 1.05, False)
    products = predict_operations(tokens) / MULTIPLY_OPERATIONS
    bare = [products * seconds for seconds in turns["multiply", "machine", "float32"]]
    share = list(zip(bare, turns["predict", "gated_srp", "float32"], strict=True))
    yield _ratio(tokens, "share of the multiply rate", share, 0.8)


def _memory_figures(tokens: int, peaks: dict[tuple[str, str], float]) -> Iterator[Figure]:
    added = (peaks["train", "gated_srp"] - peaks["train", "na"]) / 3  # gated blocks
    tensor = tokens * 384 * 4 / 2**20
    for phase in ("train", "predict"):
        ratio = peaks[phase, "gated_srp"] / peaks[phase, "textbook"]
        yield Figure(tokens, f"peak of {phase}, ours / textbook", ratio, 0.6, False)
    yield Figure(tokens, "a gated block adds, of L x C", added / tensor, 0.3, False)


def full_figures(rows: list[Row]) -> Iterator[Figure]:
    """What only the long benchmark measures: the biopsy, growth of time per patch, long slides; what was not measured is left out."""
    step = {row.arm: _turns(row) for row in rows if (row.tokens, row.phase, row.dtype) == (512, "train", "float32")}
    if step:
        biopsy = list(zip(step["textbook"], step["gated_srp"], strict=True))
        yield _ratio(512, "training steps, ours / textbook", biopsy, 1.3)
    grown = {row.tokens: [seconds / row.tokens for seconds in _turns(row)] for row in rows if row.phase == "growth"}
    if grown:
        small, large = min(grown), max(grown)
        pairs = list(zip(grown[large], grown[small], strict=True))
        yield _ratio(large, f"time per patch, against {small:,}", pairs, 1.15, False)
    for phase, name, most in (
        ("stream", "peak of prepare + predict, GB", 6),
        ("checkpointed", "peak of a training step with checkpointing, GB", 20),
    ):
        for row in rows:
            if row.phase == phase and row.peak_mb is not None:
                yield Figure(row.tokens, name, row.peak_mb / 1024, most, False)


def epoch_figures(rows: list[Row]) -> Iterator[Figure]:
    """What an epoch from disk takes, in times of its bare steps, and the share of it that steps wait for slides."""
    found = {(row.arm, row.dtype): row for row in rows if row.phase == "epoch"}
    for (arm, dtype), row in found.items():
        if arm.startswith("bare") or arm.endswith((" waiting", " processor")):
            continue
        name = arm if dtype == "float32" else f"{arm}, {dtype}"
        bare, waited = found["bare steps", dtype], found[f"{arm} waiting", dtype]
        pairs = list(zip(_turns(row), bare.turns, strict=True))
        yield _ratio(row.tokens, f"epoch / bare steps, {name}", pairs, 1.1, False)
        yield _ratio(
            row.tokens, f"share of waiting, {name}", list(zip(waited.turns, row.turns, strict=True)), 0.1, False
        )


def read_rows(path: Path) -> list[Row]:
    """The measurements that `bench --json` wrote; older files have nothing else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = content["rows"] if isinstance(content, dict) else content
        return [Row(**{**row, "turns": tuple(row.get("turns", ()))}) for row in rows]
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        cure = "Name a file that `gated-srp bench --json FILE` has written."
        raise UserError(f"cannot be read as measurements ({error})", where=path, cure=cure) from None


def fallen(here: list[Figure], base: list[Figure]) -> list[tuple[Figure, Figure]]:
    """Figures that are worse than those of another run by more than both scatter, each with the other run's."""
    there = {(one.tokens, one.name): one for one in base}
    pairs = [(one, there[one.tokens, one.name]) for one in here if (one.tokens, one.name) in there]
    return [(one, other) for one, other in pairs if one.fell_below(other)]
