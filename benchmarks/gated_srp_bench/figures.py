"""The ratios that we promise, computed from measurements."""

from dataclasses import dataclass

from gated_srp_bench.measure import MULTIPLY_OPERATIONS, Row, predict_operations


@dataclass(frozen=True)
class Figure:
    """A ratio that we promise, and what this run gave."""

    tokens: int
    name: str
    value: float
    bound: float
    at_least: bool = True

    @property
    def holds(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def multiply_rate(rows: list[Row]) -> float:
    """Operations a second of a bare matrix product, the best that took turns with predictions: what this machine can do."""
    return MULTIPLY_OPERATIONS / min(row.seconds for row in rows if row.phase == "multiply" and row.seconds)


def figures(rows: list[Row]) -> list[Figure]:
    """The promised ratios, for every measured size that a promise is made for."""
    seconds = {(r.tokens, r.phase, r.arm, r.dtype): r.seconds for r in rows if r.peak_mb is None and r.seconds}
    peaks = {(r.tokens, r.phase, r.arm): r.peak_mb for r in rows if r.peak_mb is not None}
    found = []
    for tokens in sorted({r.tokens for r in rows if r.phase == "train" and r.tokens >= 10_000}):

        def took(phase: str, arm: str, dtype: str = "float32", n: int = tokens) -> float:
            return seconds[n, phase, arm, dtype]

        def ratio(phase: str, dtype: str) -> float:
            ours = took("prepare", "gated_srp") + took(phase, "gated_srp", dtype)
            return (took("prepare", "textbook") + took(phase, "textbook")) / ours

        wanted = 20 if tokens < 49_152 else 25
        found += [
            Figure(
                tokens, "prepare, textbook / ours", took("prepare", "textbook") / took("prepare", "gated_srp"), wanted
            ),
            Figure(tokens, "prepare + predict, float32", ratio("predict", "float32"), 2.5),
            Figure(tokens, "prepare + predict, ours bf16", ratio("predict", "bfloat16"), 5),
            Figure(tokens, "prepare + train, float32", ratio("train", "float32"), 1.7),
            Figure(tokens, "prepare + train, ours bf16", ratio("train", "bfloat16"), 3),
            Figure(
                tokens, "Gated SRP / NA, predict", took("predict", "gated_srp") / took("predict", "na"), 1.05, False
            ),
            Figure(tokens, "Gated SRP / NA, train", took("train", "gated_srp") / took("train", "na"), 1.05, False),
            Figure(
                tokens,
                "predict, share of the multiply rate",
                predict_operations(tokens)
                / took("predict", "gated_srp")
                / multiply_rate([r for r in rows if r.tokens == tokens]),
                0.8,
            ),
        ]
        if (tokens, "train", "na") in peaks:
            found += _memory_figures(tokens, {key[1:]: mb for key, mb in peaks.items() if key[0] == tokens})
    return found


def _memory_figures(tokens: int, peaks: dict[tuple[str, str], float]) -> list[Figure]:
    added = (peaks["train", "gated_srp"] - peaks["train", "na"]) / 3  # gated blocks
    tensor = tokens * 384 * 4 / 2**20
    return [
        Figure(
            tokens,
            "peak of train, ours / textbook",
            peaks["train", "gated_srp"] / peaks["train", "textbook"],
            0.6,
            False,
        ),
        Figure(
            tokens,
            "peak of predict, ours / textbook",
            peaks["predict", "gated_srp"] / peaks["predict", "textbook"],
            0.6,
            False,
        ),
        Figure(tokens, "a gated block adds to train, of an (L x C)", added / tensor, 0.3, False),
    ]


def full_figures(rows: list[Row]) -> list[Figure]:
    """What only the long benchmark measures: growth of time per patch, the very long slide, the biopsy."""
    grown = {row.tokens: row.seconds / row.tokens for row in rows if row.phase == "growth" and row.seconds}
    small, large = min(grown), max(grown)
    stream = next(row for row in rows if row.phase == "stream")
    assert stream.peak_mb is not None
    step = {row.arm: row.seconds for row in rows if (row.tokens, row.phase, row.dtype) == (512, "train", "float32")}
    return [
        Figure(large, f"time per patch, against {small:,} patches", grown[large] / grown[small], 1.15, False),
        Figure(stream.tokens, "peak of prepare + predict, GB", stream.peak_mb / 1024, 20, False),
        Figure(
            512, "training steps per second, ours / textbook", (step["textbook"] or 0) / (step["gated_srp"] or 1), 1.3
        ),
    ]
