"""Results from anywhere: reading, comparing, verdicts, the command."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
import typer
from typer.testing import CliRunner

from gated_srp.cli import studies
from gated_srp.errors import UserError
from gated_srp.study.comparison import metrics_of, stats
from gated_srp.study.results import compare_results as compare
from gated_srp.study.results import find_arm, read_results
from gated_srp.tasks import Classification, Multilabel, Survival

app = typer.Typer()
app.command()(studies.stats)


def rows(cohort, arm, values, metric="macro_f1"):
    return [
        {"cohort": cohort, "arm": arm, "seed": str(42 + i), "metric": metric, "value": value}
        for i, value in enumerate(values)
    ]


def frame(*parts):
    return pd.DataFrame([row for part in parts for row in part])


def write(path, text):
    path.write_text("cohort,arm,seed,metric,value\n" + text)
    return path


def test_arms_that_spell_a_missing_value_stay_arms(tmp_path):
    path = write(tmp_path / "r.csv", "A,NA,42,f1,0.5\nA,nan,42,f1,0.6\nA,None,42,f1,0.7\nA,null,42,f1,0.8\n")
    results, notes = read_results(path)
    assert results["arm"].tolist() == ["NA", "nan", "None", "null"]
    assert notes == ()
    assert [cell.arm for cell in compare(results, "na").cohorts] == ["nan", "None", "null"]


def test_a_value_that_is_missing_is_left_out_and_said(tmp_path):
    path = write(tmp_path / "r.csv", "A,na,42,f1,0.5\nA,na,43.0,f1,0.4\nA,x,42,f1,\nA,x,43,f1,0.6\nA,x,44,f1,nan\n")
    results, notes = read_results(path)
    assert notes == ("left out: 2 rows without a value",)
    comparison = compare(results, "na", notes=notes)
    (cell,) = comparison.cohorts
    assert (cell.statistics.n, cell.missing) == (1, ("42",))
    assert cell.verdict == "one seed: +0.2000, without an interval and therefore without a claim"
    assert comparison.notes[1] == "A, f1: seed 42 of only one of x and the reference; left out"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A,na,42,f1,good\n", r"row 2: value 'good' is no finite number"),
        ("A,na,42,f1,inf\n", r"row 2: value 'inf'"),
        ("A,na,42,f1,0.5\nA,,42,f1,0.5\n", r"row 3: 'arm' is empty"),
        ("A,na,42,f1,0.5\nA,na,42,f1,0.6\n", r"row 3: a second value for A, na, 42, f1"),
        ("", "no rows"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        read_results(write(tmp_path / "r.csv", text))


def test_a_table_without_a_column_is_refused(tmp_path):
    (tmp_path / "r.csv").write_text("cohort,arm,seed,value\nA,na,42,0.5\n")
    with pytest.raises(UserError, match="no column 'metric'"):
        read_results(tmp_path / "r.csv")


def test_a_reference_is_found_by_its_name_and_else_by_its_case():
    both = frame(rows("A", "NA", [0.1]), rows("A", "na", [0.1]))
    assert find_arm(both, "na") == "na"
    assert find_arm(frame(rows("A", "NA", [0.1])), "na") == "NA"
    with pytest.raises(UserError, match="'base' is not among the arms: NA, na"):
        find_arm(both, "base")


def test_pairs_are_made_by_seed_whatever_the_order_of_rows():
    table = frame(rows("A", "na", [0.1, 0.5, 0.9]), rows("A", "x", [0.2, 0.6, 1.1])).sample(frac=1, random_state=0)
    (cell,) = compare(table, "na").cohorts
    assert cell.statistics.plain.mean == pytest.approx(0.4 / 3)
    assert cell.means == pytest.approx((1.9 / 3, 0.5))
    assert cell.stds == pytest.approx((np.std([0.2, 0.6, 1.1], ddof=1), 0.4))


def test_verdicts_say_no_more_than_the_interval():
    table = frame(
        rows("A", "na", [0.50, 0.51, 0.52, 0.53, 0.54]),
        rows("A", "clear", [0.70, 0.72, 0.71, 0.74, 0.73]),
        rows("A", "noise", [0.49, 0.53, 0.51, 0.55, 0.53]),
        rows("A", "equal", [0.50, 0.51, 0.52, 0.53, 0.54]),
        rows("A", "shifted", [0.60, 0.61, 0.62, 0.63, 0.64]),
        rows("A", "worse", [0.30, 0.32, 0.31, 0.34, 0.33]),
    )
    found = {cell.arm: cell for cell in compare(table, "na").cohorts}
    assert found["clear"].verdict.startswith("better (+0.2000, 95 % interval +0.1")
    assert found["clear"].verdict.endswith("also after Holm's correction over 4 comparisons")
    assert found["worse"].verdict.startswith("worse (-0.2000, 95 % interval -0.2")
    assert found["noise"].verdict.startswith(
        "not distinguishable from zero with five seeds (+0.0020, 95 % interval -0.0"
    )
    assert found["noise"].verdict.endswith("no number of seeds on these data would show a difference of this size")
    assert found["equal"].verdict == "equal in all five seeds"
    assert found["shifted"].verdict.startswith("the same difference, +0.1000, in all five seeds: no spread")
    assert {arm for arm, cell in found.items() if cell.claimed} == {"clear", "worse"}


def test_less_is_better_for_an_error():
    table = frame(
        rows("A", "na", [0.50, 0.51, 0.52], "brier"),
        rows("A", "x", [0.300, 0.312, 0.321], "brier"),
    )
    (cell,) = compare(table, "na").cohorts
    assert cell.verdict.startswith("better (-0.1990")
    assert cell.statistics.wins == 3
    (cell,) = compare(table, "na", lower_is_better=()).cohorts
    assert cell.verdict.startswith("worse (-0.1990")


def test_an_interval_that_does_not_survive_holm_is_only_a_hint():
    wide = [0.50, 0.51, 0.52, 0.53, 0.54]
    hint = [0.520, 0.524, 0.549, 0.545, 0.562]
    noise = [[0.49, 0.53, 0.51, 0.55, 0.53 + i / 100] for i in range(8)]
    table = frame(rows("A", "na", wide), rows("A", "hint", hint), *(rows("A", f"n{i}", v) for i, v in enumerate(noise)))
    cell = compare(table, "na").cohorts[0]
    assert cell.test.excludes_zero
    assert not cell.claimed
    assert cell.verdict.endswith("but not after Holm's correction over 9 comparisons: only a hint")


def test_across_cohorts_each_cohort_is_one_difference_of_means():
    table = frame(
        *(rows(c, "na", [0.5, 0.6]) for c in "ABC"),
        rows("A", "x", [0.6, 0.6]),
        rows("B", "x", [0.6, 0.8]),
        rows("C", "x", [0.6, 0.7]),
    )
    (cell,) = compare(table, "na").across
    assert cell.test.mean == pytest.approx((0.05 + 0.15 + 0.10) / 3)
    assert cell.test.t == pytest.approx(0.1 / (0.05 / math.sqrt(3)))
    assert (cell.statistics.n, cell.cohort) == (3, None)


def test_a_cohort_without_the_reference_is_left_out_and_named():
    table = frame(rows("A", "na", [0.5, 0.6]), rows("A", "x", [0.6, 0.6]), rows("B", "x", [0.9, 0.9]))
    comparison = compare(table, "na")
    assert comparison.cohorts[1].verdict == "nothing to compare: no seed has both arms"
    assert comparison.across[0].missing == ("B",)
    assert comparison.across[0].verdict.startswith("one cohort: +0.0500")


def test_na_against_na_with_other_seeds_gives_at_most_five_percent_false_alarms():
    # 300 tables of three cohorts whose two arms differ by the seeds' noise alone; any claim in a table is an alarm.
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(300):
        values = rng.normal(0.7, 0.02, (2, 3, 5))
        table = frame(
            *(rows(c, a, values[i, j]) for i, a in enumerate(("na", "NA again")) for j, c in enumerate("ABC"))
        )
        alarms += any(cell.claimed for cell in compare(table, "na").cohorts)
    assert alarms / 300 <= 0.05


def test_json_has_plain_values_and_null_for_the_undefined(tmp_path):
    path = write(tmp_path / "r.csv", "A,na,42,f1,0.5\nA,na,43,f1,0.4\nA,x,42,f1,0.6\nA,x,43,f1,0.55\n")
    result = CliRunner().invoke(app, [str(path), "--reference", "na", "--json", str(tmp_path / "new" / "out.json")])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "new" / "out.json").read_text())
    (cell,) = written["cohorts"]
    assert cell["difference"] == pytest.approx(0.125)
    assert cell["corrected"]["interval"][0] < cell["interval"][0] < 0.125
    assert (cell["n"], cell["wins"], cell["bootstrap"], cell["claimed"]) == (2, 2, None, False)
    assert written["across"][0]["interval"] == [None, None]
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["out.json"]
    assert "not distinguishable from zero with two seeds" in result.output


def test_the_printed_survival_means_through_the_command(tmp_path):
    base, ours = [0.7110, 0.7247, 0.5513, 0.5910, 0.6756], [0.7257, 0.7648, 0.5832, 0.6171, 0.6973]
    text = "".join(
        f"C{i},NA,mean,c_index,{b}\nC{i},Gated SRP,mean,c_index,{o}\n"
        for i, (b, o) in enumerate(zip(base, ours, strict=True))
    )
    result = CliRunner().invoke(app, [str(write(tmp_path / "r.csv", text)), "--json", str(tmp_path / "o.json")])
    assert result.exit_code == 0, result.output
    (cell,) = json.loads((tmp_path / "o.json").read_text())["across"]
    assert round(cell["difference"], 4) == 0.0269
    assert [round(x, 4) for x in cell["interval"]] == [0.0149, 0.0389]
    assert (round(cell["t"], 2), cell["df"], round(cell["p"], 4)) == (6.21, 4, 0.0034)
    assert "better (+0.0269, 95 % interval +0.0149 to +0.0389)" in result.output


def write_run(folder, predictions, level):
    folder.mkdir(parents=True)
    predictions.to_csv(folder / f"predictions_test_{level}.csv", index=False)
    pd.DataFrame({"slide": list("abcdefghi"), "split": ["train"] * 6 + ["val"] + ["test"] * 2}).to_csv(
        folder / "split.csv", index=False
    )


def test_patients_are_resampled_where_run_folders_have_predictions(tmp_path):
    task = Classification(("NA", "b"))
    generator = torch.Generator().manual_seed(0)
    labels = np.array([0, 1] * 30)
    values = {}
    for arm, strength in (("na", 0.0), ("x", 4.0)):
        for seed in (42, 43):
            logits = torch.randn(60, 2, generator=generator) + strength * torch.eye(2)[labels]
            table = pd.DataFrame({"slide": [f"s{i}" for i in range(60)], "case": [f"0{i // 2}" for i in range(60)]})
            table = table.assign(**task.answers(pd.DataFrame({"label": labels})), **task.predict(logits))
            write_run(tmp_path / "A" / arm / f"seed{seed}", table, "slide")
            values[arm, seed] = task.metrics(table)["accuracy"]
    results = frame(*(rows("A", arm, [values[arm, 42], values[arm, 43]], "accuracy") for arm in ("na", "x")))
    found = stats(results, runs=tmp_path, repeats=100)
    (cell,) = found.cohorts
    assert cell.bootstrap.difference == pytest.approx(cell.statistics.plain.mean)
    assert 0 < cell.bootstrap.low < cell.bootstrap.difference < cell.bootstrap.high
    assert found.ratio == pytest.approx(2 / 6)
    results.to_csv(tmp_path / "r.csv", index=False)
    shown = CliRunner().invoke(app, [str(tmp_path / "r.csv"), "--runs", str(tmp_path), "--repeats", "50"])
    assert "over resampled patients +0." in shown.output


def test_survival_runs_are_resampled_by_their_case_table(tmp_path):
    task = Survival((1.0, 2.0, 3.0))
    cases = pd.DataFrame({"case": list("abcdefgh"), "time": np.arange(8.0), "event": [1, 1, 1, 0, 1, 1, 0, 1]})
    for arm, sign in (("na", 1), ("x", -1)):
        logits = sign * torch.arange(8.0)[:, None].expand(8, 4) / 4
        folder = tmp_path / "A" / arm / "seed42"
        write_run(folder, cases.assign(**task.predict(logits)), "case")
        misleading = cases.assign(slide="s", **task.predict(-logits))  # slides are not what survival is scored by
        misleading.to_csv(folder / "predictions_test_slide.csv", index=False)
    results = frame(rows("A", "na", [0.0], "c_index"), rows("A", "x", [1.0], "c_index"))
    (cell,) = stats(results, runs=tmp_path, repeats=20).cohorts
    assert (cell.bootstrap.difference, cell.bootstrap.low, cell.bootstrap.high) == (1.0, 1.0, 1.0)


def test_a_multilabel_table_is_known_by_its_columns():
    task = Multilabel(("E", "H"))
    truth = pd.DataFrame({"E": [1, 0], "H": [0, 1]})
    table = truth.assign(case=["a", "b"], **task.predict(torch.tensor([[1.0, -1.0], [-1.0, 1.0]])))
    assert metrics_of(table)["macro_map"] == 1.0


def test_broken_predictions_are_refused_by_name(tmp_path):
    folder = tmp_path / "A" / "x" / "seed42"
    for arm in ("x", "na"):
        write_run(tmp_path / "A" / arm / "seed42", pd.DataFrame({"slide": ["a"]}), "slide")
    results = frame(rows("A", "na", [0.0]), rows("A", "x", [1.0]))
    with pytest.raises(UserError, match="no column 'case'"):
        stats(results, runs=tmp_path)
    (folder / "predictions_test_slide.csv").write_text("")
    with pytest.raises(UserError, match="cannot be read"):
        stats(results, runs=tmp_path)


def test_from_two_seeds_nothing_is_concluded_about_other_numbers_of_seeds():
    table = frame(rows("A", "na", [0.50, 0.51]), rows("A", "other", [0.49, 0.53]))
    (found,) = compare(table, "na").cohorts
    assert found.verdict.endswith("; two seeds are too few to say how many would show it")
    assert "no number of seeds" not in found.verdict


# Differences -0.002, 0.004, 0.001: mean 0.001, standard deviation 0.003; with ratio 0.25 the error is 0.003 sqrt(1/3 + 1/4) = 0.0022913,
# t of two degrees of freedom 4.3027, so the interval is -0.008859 to +0.010859.
CLOSE = frame(rows("A", "na", [0.700, 0.700, 0.700]), rows("A", "x", [0.698, 0.704, 0.701]))


def test_no_worse_is_the_end_of_the_corrected_interval_against_the_margin():
    (cell,) = compare(CLOSE, "na", ratio=0.25).cohorts
    assert (round(cell.test.low, 6), round(cell.test.high, 6)) == (-0.008859, 0.010859)
    assert cell.no_worse == "no worse by more than 0.01"
    # (0.001 + 0.01) / 0.0022913 = 4.8008; one-sided with two degrees of freedom
    assert cell.p_no_worse == pytest.approx(0.02038, abs=1e-5)
    (strict,) = compare(CLOSE, "na", ratio=0.25, margin=0.005).cohorts
    assert strict.no_worse == "not shown to be no worse by more than 0.005"
    assert strict.verdict == cell.verdict and "not distinguishable from zero" in cell.verdict


def test_no_worse_looks_at_the_other_end_where_less_is_better():
    table = CLOSE.assign(metric="brier")
    (cell,) = compare(table, "na", ratio=0.25).cohorts
    assert cell.no_worse == "not shown to be no worse by more than 0.01"  # its upper end is 0.010859
    (wide,) = compare(table, "na", ratio=0.25, margin=0.011).cohorts
    assert wide.no_worse == "no worse by more than 0.011"
    t = (0.011 - 0.001) / (0.003 * math.sqrt(1 / 3 + 1 / 4))  # with two degrees of freedom the tail has a closed form
    assert wide.p_no_worse == pytest.approx((1 - t / math.sqrt(t * t + 2)) / 2, rel=1e-6)


def test_no_worse_is_corrected_by_holm_and_needs_an_interval():
    table = frame(
        rows("A", "na", [0.700] * 3),
        rows("A", "x", [0.698, 0.704, 0.701]),
        rows("A", "y", [0.698, 0.704, 0.701]),
        rows("A", "same", [0.700] * 3),
        rows("A", "shifted", [0.710] * 3),
        rows("A", "bad", [0.600, 0.604, 0.602]),
    )
    found = {cell.arm: cell for cell in compare(table, "na", ratio=0.25).cohorts}
    assert found["x"].no_worse == "no worse by more than 0.01 by itself, but not after Holm's correction"
    assert found["same"].no_worse == "no worse by more than 0.01" and found["shifted"].no_worse == ""
    assert found["bad"].no_worse == "worse by more than 0.01"
    assert compare(frame(rows("A", "na", [0.7]), rows("A", "x", [0.7])), "na").cohorts[0].no_worse == ""


def test_worse_by_more_than_the_margin_is_corrected_by_holm_as_no_worse_is():
    base, drop = [0.70, 0.75, 0.80, 0.72, 0.78], [-0.03, -0.075, -0.05, -0.065, -0.03]
    worse = rows("A", "bad", [one + change for one, change in zip(base, drop, strict=True)])
    alone = compare(frame(rows("A", "na", base), worse), "na", ratio=0.25).cohorts[0]
    assert alone.no_worse == "worse by more than 0.01"
    wobble = [0.02, -0.02, 0.01, -0.01, 0.03]
    others = [rows("A", f"o{n}", [one + n * 1e-3 + w for one, w in zip(base, wobble, strict=True)]) for n in range(9)]
    among = {cell.arm: cell for cell in compare(frame(rows("A", "na", base), worse, *others), "na", ratio=0.25).cohorts}
    assert among["bad"].p_no_worse == pytest.approx(alone.p_no_worse) and 10 * (1 - alone.p_no_worse) > 0.025
    assert among["bad"].no_worse == "worse by more than 0.01 by itself, but not after Holm's correction"


def test_the_margin_is_an_option_and_stands_in_words_and_numbers(tmp_path):
    path = tmp_path / "r.csv"
    CLOSE.to_csv(path, index=False)
    out = CliRunner().invoke(
        app, [str(path), "--ratio", "0.25", "--margin", "0.02", "--json", str(tmp_path / "s.json")]
    )
    assert out.exit_code == 0 and "no worse by more than 0.02" in out.stdout
    (row,) = json.loads((tmp_path / "s.json").read_text())["cohorts"]
    assert (row["margin"], row["no_worse"]) == (0.02, "no worse by more than 0.02") and row["p_no_worse"] < 0.025
    with pytest.raises(UserError, match="margin"):
        stats(path, margin=0)
