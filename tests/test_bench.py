"""The benchmark measures what it says; its figures are plain ratios. Nothing here asserts a time."""

import json
import re

import pytest
import torch
from gated_srp_bench import measure as bench
from gated_srp_bench.figures import figures, full_figures, read_rows
from gated_srp_bench.measure import Row, predict_operations
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from gated_srp.cli import app
from gated_srp.errors import UserError


def test_both_subjects_compute_the_same_logits():
    slide = bench.make_slide(60)
    ours, textbook = bench.make("gated_srp", slide), bench.make("textbook", slide)
    for subject in (ours, textbook):
        subject.prepare()
        bench.run_phase(subject, "train", "float32")
    with torch.no_grad():
        torch.testing.assert_close(ours.forward(), textbook.forward(), atol=1e-5, rtol=1e-4)
    name = "blocks.0.attn.qkv.weight"
    grads = [dict(s.model.named_parameters())[name].grad for s in (ours, textbook)]
    torch.testing.assert_close(*grads, atol=1e-6, rtol=1e-3)


def test_rows_cover_every_phase_arm_and_precision():
    rows = bench.time_arms(40, repeats=1)
    assert {(r.phase, r.arm, r.dtype) for r in rows} == {
        ("multiply", "machine", "float32"),
        ("prepare", "textbook", "float32"),
        ("prepare", "gated_srp", "float32"),
        *((p, "textbook", "float32") for p in ("predict", "train")),
        *((p, "gated_srp", d) for p in ("predict", "train") for d in ("float32", "bfloat16")),
        *((p, "na", "float32") for p in ("predict", "train")),
    }
    assert all(r.tokens == 40 and r.seconds > 0 for r in rows)
    assert {len(r.turns) for r in rows} == {1, 4}  # preparing takes milliseconds, so it has more turns


def test_every_turn_begins_with_another_job():
    ran = []
    took = bench.turns_of({name: lambda name=name: ran.append(name) for name in "abc"}, 3)
    assert "".join(ran) == "abc" + "abc" + "bca" + "cab"
    assert {name: len(turns) for name, turns in took.items()} == {"a": 3, "b": 3, "c": 3}


@pytest.mark.parametrize("phase", ["train", "stream", "checkpointed"])
def test_a_peak_comes_from_a_process_of_its_own(phase):
    row = bench.peak(300, phase, "gated_srp", "float32" if phase == "train" else "float16")
    assert row.peak_mb > 1 and row.seconds > 0
    if phase != "train":  # everything is counted there, and what is mapped apart
        assert 10 < row.own_mb < row.peak_mb


def test_figures_are_ratios_of_one_run():
    def timed(phase, arm, dtype, seconds):
        return Row(10_000, phase, arm, dtype, seconds=seconds)

    rows = [
        timed("prepare", "textbook", "float32", 4.0),
        timed("prepare", "gated_srp", "float32", 0.1),
        timed("multiply", "machine", "float32", bench.MULTIPLY_OPERATIONS / 1e11),
        timed("predict", "textbook", "float32", 6.0),
        timed("predict", "gated_srp", "float32", 2.4),
        timed("predict", "gated_srp", "bfloat16", 0.9),
        timed("predict", "na", "float32", 2.4),
        timed("train", "textbook", "float32", 11.0),
        timed("train", "gated_srp", "float32", 4.9),
        timed("train", "gated_srp", "bfloat16", 2.9),
        timed("train", "na", "float32", 4.0),
        *(
            Row(10_000, p, a, "float32", 1.0, mb)
            for p, a, mb in (("train", "textbook", 1000.0), ("train", "na", 556.05))
        ),
        *(
            Row(10_000, p, a, "float32", 1.0, mb)
            for p, a, mb in (("train", "gated_srp", 600.0), ("predict", "na", 90.0))
        ),
        *(
            Row(10_000, p, a, "float32", 1.0, mb)
            for p, a, mb in (("predict", "textbook", 200.0), ("predict", "gated_srp", 100.0))
        ),
    ]
    found = {f.name: (round(f.value, 2), f.holds) for f in figures(rows)}
    assert found["prepare, textbook / ours"] == (40.0, True)
    assert found["prepare + predict, float32"] == (4.0, True)
    assert found["prepare + predict, ours bf16"] == (10.0, True)
    assert found["prepare + train, float32"] == (3.0, True)
    assert found["Gated SRP / NA, train"] == (1.23, False)
    assert found["peak of train, ours / textbook"] == (0.6, True)
    assert found["a gated block adds, of L x C"] == (1.0, False)
    assert found["share of the multiply rate"][0] == round(predict_operations(10_000) / 2.4 / 1e11, 2)
    assert found["predict, our float32 / our bf16"] == (2.67, True)


def timings(gated, na):
    """Rows of 10,000 patches in which only the turns of Gated SRP and NA differ from one second."""
    rows = []
    for phase in ("prepare", "predict", "train"):
        for arm, turns in (("textbook", [2.0] * len(na)), ("gated_srp", gated), ("na", na)):
            rows.append(Row.of(10_000, phase, arm, "float32", turns))
        rows.append(Row.of(10_000, phase, "gated_srp", "bfloat16", gated))
    return [*rows, Row.of(10_000, "multiply", "machine", "float32", [1.0] * len(na))]


def test_a_ratio_is_the_median_of_turns_that_were_run_together():
    # A slow moment of the machine hits both: ratios of medians would say 1.0, ratios of the best 1.1.
    gated, na = [1.1, 11.0, 2.2, 1.1, 3.3, 1.1, 5.5], [1.0, 10.0, 2.0, 1.0, 3.0, 1.1, 5.0]
    found = {figure.name: figure for figure in figures(timings(gated, na))}
    one = found["Gated SRP / NA, predict"]
    assert one.value == pytest.approx(1.1) and not one.holds
    assert (one.low, one.high) == pytest.approx((1.0, 1.1)) and one.words == "1.10 (1.00-1.10)"


def test_a_refactor_that_slows_a_ratio_down_is_refused_and_scatter_is_not(tmp_path, monkeypatch):
    scattered = [1.0, 1.05, 0.95, 1.1, 0.9, 1.0, 1.0]

    def bench_with(gated, *options):
        monkeypatch.setattr(bench, "time_arms", lambda *_, **__: timings(gated, [1.0] * 7))
        monkeypatch.setattr(bench, "memory_arms", lambda _: [])
        monkeypatch.setattr(bench, "windows", lambda *_, **__: [])
        return CliRunner().invoke(app, ["bench", *options])

    base = tmp_path / "base.json"
    assert bench_with(scattered, "--json", str(base)).exit_code == 0
    same = bench_with([one + 0.05 for one in scattered], "--compare", str(base))
    assert same.exit_code == 0 and "ratios fell by more than both runs scatter" in same.output
    slow = bench_with([one + 0.4 for one in scattered], "--compare", str(base))
    assert slow.exit_code == 1
    assert "10,000 patches, Gated SRP / NA, predict: 1.40 (1.30-1.50), before 1.00 (0.90-1.10)" in slow.output
    faster = bench_with([one / 2 for one in scattered], "--compare", str(base))
    assert faster.exit_code == 0
    (tmp_path / "other.json").write_text('{"rows": 1}')
    refused = bench_with(scattered, "--compare", str(tmp_path / "other.json")).exception
    assert isinstance(refused, UserError) and "cannot be read as measurements" in str(refused)


def test_operations_are_those_that_a_prediction_runs(monkeypatch):
    monkeypatch.setattr(
        "gated_srp.models.fast.inference._packs", lambda weight: False
    )  # the counter knows no oneDNN calls
    subject = bench.Ours("gated_srp", bench.make_slide(4096))
    subject.prepare()
    with FlopCounterMode(display=False) as counter:
        bench.run_phase(subject, "predict", "float32")
    convolution = 2 * 4096 * 384 * 49
    # What is not counted: products among landmarks, the gates, CLS alone. They do not grow with the slide.
    assert 1 < (counter.get_total_flops() - convolution) / predict_operations(4096) < 1.02


def test_epochs_from_disk_take_turns_with_their_bare_steps():
    from gated_srp_bench.training import BARE, CACHED, FILES, PARTS, measure_training

    small = {"dim": 12, "depth": 2, "num_heads": 2, "num_landmarks": 4}
    rows = measure_training(slides=4, patches=(20, 62), width=16, turns=2, kinds=(FILES[0], FILES[3], CACHED), **small)
    found = {row.arm: row for row in rows}
    assert {row.tokens for row in rows} == {20 + 34 + 48 + 62} and {row.phase for row in rows} == {"epoch"}
    assert found.keys() == {f"{kind}{end}" for kind in (BARE, FILES[0], FILES[3], CACHED) for end in PARTS}
    assert all(len(row.turns) == 2 for row in rows)
    for kind in (FILES[0], FILES[3], CACHED):
        for waited, all_of_it in zip(found[f"{kind} waiting"].turns, found[kind].turns, strict=True):
            assert 0 < waited < all_of_it
    assert found[f"{BARE} waiting"].turns == (0.0, 0.0)


def test_time_a_patch_is_compared_over_growing_slides_and_the_long_slide_in_gigabytes():
    rows = bench.growth((36, 100))
    assert [(r.tokens, r.phase) for r in rows] == [(36, "growth"), (100, "growth")]
    rows = [
        Row(100, "growth", "gated_srp", "float32", seconds=1.0),
        Row(1600, "growth", "gated_srp", "float32", seconds=20.0),
        Row(9000, "stream", "gated_srp", "float16", seconds=9.0, peak_mb=2048.0),
        Row(512, "train", "textbook", "float32", seconds=3.0),
        Row(512, "train", "gated_srp", "float32", seconds=2.0),
    ]
    rows.append(Row(2000, "checkpointed", "gated_srp", "float16", seconds=9.0, peak_mb=2048.0 * 11))
    biopsy, grown, stream, step = full_figures(rows)
    assert (grown.tokens, grown.value, grown.holds) == (1600, 1.25, False)
    assert (stream.value, stream.holds) == (2.0, True)
    assert (step.tokens, step.value, step.holds) == (2000, 22.0, False)
    assert (biopsy.value, biopsy.holds) == (1.5, True)
    assert [one.name for one in full_figures(rows[2:3])] == ["peak of prepare + predict, GB"]  # of an interrupted run


def epochs_from_disk():
    """An epoch of gzip files that loses a fifth, half of it to waiting; one of plain files that loses nothing."""
    took = {
        "bare steps": [10.0, 20.0, 10.0],
        "plain files, warm": [10.0, 20.0, 11.0],
        "gzip files, cold": [12.0, 24.0, 13.0],
    }
    waited = {"plain files, warm": [0.1, 0.2, 0.1], "gzip files, cold": [1.2, 2.4, 3.0]}
    ends = {"": took, " waiting": waited, " processor": took}
    return [Row.of(44_000, "epoch", f"{k}{end}", "float32", t) for end, of in ends.items() for k, t in of.items()]


def test_an_epoch_is_given_in_times_of_its_bare_steps():
    found = {one.name: (one.value, one.low, one.high, one.holds) for one in figures(epochs_from_disk())}
    assert found == {
        "epoch / bare steps, plain files, warm": (1.0, 1.0, 1.1, True),
        "share of waiting, plain files, warm": (0.01, pytest.approx(0.1 / 11), 0.01, True),
        "epoch / bare steps, gzip files, cold": (1.2, 1.2, 1.3, False),
        "share of waiting, gzip files, cold": (pytest.approx(0.1), pytest.approx(0.1), 3 / 13, True),
    }


def test_the_long_benchmark_writes_every_row_and_prints_every_promise(tmp_path, monkeypatch):
    def timed(tokens, repeats, warm_up=True):
        arms = [("textbook", "float32"), ("na", "float32"), ("gated_srp", "float32"), ("gated_srp", "bfloat16")]
        rows = [Row(tokens, p, a, d, seconds=1.0) for p in ("prepare", "predict", "train") for a, d in arms]
        return [*rows, Row(tokens, "multiply", "machine", "float32", seconds=1.0)]

    def weighed(tokens):
        arms = ("textbook", "gated_srp", "na")
        return [Row(tokens, p, a, "float32", 1.0, 10.0) for p in ("predict", "train") for a in arms]

    monkeypatch.setattr(bench, "time_arms", timed)
    monkeypatch.setattr(bench, "memory_arms", weighed)
    monkeypatch.setattr(bench, "growth", lambda sizes: [Row(n, "growth", "gated_srp", "float32", 1.0) for n in sizes])
    monkeypatch.setattr(bench, "peak", lambda *a: Row(*a, seconds=1.0, peak_mb=1024.0))
    monkeypatch.setattr("gated_srp_bench.training.measure_training", lambda **_: epochs_from_disk())
    how = {"one by one": 2.0, "packed": 1.0}
    monkeypatch.setattr(
        bench,
        "windows",
        lambda sizes, repeats: [Row(n, "window", a, "float32", s) for n in sizes for a, s in how.items()],
    )
    done = CliRunner().invoke(app, ["bench", "--full", "--json", str(tmp_path / "rows.json")])
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "rows.json").read_text())
    assert "threads, torch" in written["machine"]
    rows = written["rows"]
    assert {row["tokens"] for row in rows} == {77, 512, 10_000, 44_000, 49_152, 160_000, 200_000, 1_000_000}
    phases = {"prepare", "predict", "train", "multiply", "growth", "stream", "checkpointed", "window", "epoch"}
    assert {row["phase"] for row in rows} == phases
    assert "10 of 10: epochs from disk (about 2.0 min, 2 to go)" in done.output
    assert len(read_rows(tmp_path / "rows.json")) == len(rows)
    for promise in ("prepare, textbook / ours", "share of the multiply rate", "against 10,000 ", "<= 6 yes"):
        assert promise in done.output


def test_what_was_measured_is_kept_when_a_part_fails(tmp_path, monkeypatch):
    def fails(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "time_arms", lambda *_, **__: timings([1.0], [1.0]))
    monkeypatch.setattr(bench, "memory_arms", fails)
    CliRunner().invoke(app, ["bench", "--json", str(tmp_path / "rows.json")])
    assert read_rows(tmp_path / "rows.json") == timings([1.0], [1.0])


def test_windows_are_timed_per_bag_one_by_one_and_packed():
    rows = bench.windows((9,), bags=2, repeats=2)
    assert [(r.tokens, r.phase, r.arm, len(r.turns)) for r in rows] == [
        (9, "window", "one by one", 2),
        (9, "window", "packed", 2),
    ]
    (figure,) = figures([Row(9, "window", "one by one", "float32", 3.0), Row(9, "window", "packed", "float32", 1.5)])
    assert (figure.value, figure.bound, figure.holds) == (2.0, 1.6, True)


def test_without_the_benchmark_the_command_says_where_to_find_it(monkeypatch):
    monkeypatch.setattr("gated_srp.cli.find_spec", lambda name: None)
    refused = CliRunner().invoke(app, ["bench"]).exception
    assert isinstance(refused, UserError)
    assert re.search(r"has no benchmark.*PYTHONPATH=benchmarks gated-srp bench", str(refused))
