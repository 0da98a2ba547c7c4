"""The parts of `gated-srp bench`, in their order, each with its time on two cores of a Zen 4."""

from collections.abc import Callable
from dataclasses import dataclass

from gated_srp_bench import measure
from gated_srp_bench.measure import Row


@dataclass(frozen=True)
class Part:
    """``minutes``: about how long it takes, to tell how much is to come."""

    name: str
    minutes: float
    measure: Callable[[], list[Row]]


def parts(*, full: bool) -> list[Part]:
    """What is measured: 10,000 patches and windows of small slides; with ``full`` everything that a promise is made for."""
    plain = [
        Part("time of 10,000 patches", 2.4, lambda: measure.time_arms(10_000, repeats=7)),
        Part("memory of 10,000 patches, in processes of their own", 0.6, lambda: measure.memory_arms(10_000)),
        Part("windows of small slides, one by one and packed", 0.6, lambda: measure.windows((77, 512), repeats=7)),
    ]
    if not full:
        return plain
    return [
        *plain,
        Part("time of 512 patches", 0.3, lambda: measure.time_arms(512, repeats=9)),
        Part("time of 49,152 patches", 3.2, lambda: measure.time_arms(49_152, repeats=2, warm_up=False)),
        Part("memory of 49,152 patches, in processes of their own", 1.5, lambda: measure.memory_arms(49_152)),
        Part("growth to 160,000 patches", 0.8, lambda: measure.growth((10_000, 160_000))),
        Part("a prediction of 1,000,000 patches", 1.6, lambda: _long(1_000_000, "stream")),
        Part("a training step of 200,000 patches", 1.0, lambda: _long(200_000, "checkpointed")),
        Part("epochs from disk", 2.0, _epochs),
    ]


def _long(tokens: int, phase: str) -> list[Row]:
    return [measure.peak(tokens, phase, "gated_srp", "float16")]


def _epochs() -> list[Row]:
    """Four slides of 2,000 to 20,000 patches, two turns; `bench --training` has 64 of them."""
    from gated_srp_bench.training import FILES, measure_training

    return measure_training(slides=4, turns=2, kinds=FILES)
