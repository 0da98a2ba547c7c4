"""`predict --budget`: what the tables say of it, that all patches are the plain prediction, and the curve in the report."""

import json
import re
import shutil
from pathlib import Path

import h5py
import pandas as pd
import pytest
from typer.testing import CliRunner

import gated_srp
from gated_srp.cli import app
from gated_srp.errors import UserError
from gated_srp.models import build_model, save_model

ROOT = Path(__file__).parents[2]


def answers(found):
    return found.table.drop(columns=["budget", "kept_patches"], errors="ignore")


def test_a_budget_is_said_in_the_table_and_one_of_all_patches_changes_no_bit(finished, cohort):
    features = cohort.parent / "feats"
    files = sorted(features.rglob("*.h5"))[:4]
    plain, whole, half = (gated_srp.predict(finished, files, workers=0, budget=b) for b in (None, 1.0, 0.5))
    assert not {"budget", "kept_patches"} & set(plain.table)
    pd.testing.assert_frame_equal(answers(whole), answers(plain), check_exact=True)
    assert (whole.table["kept_patches"] == whole.table["patches"]).all() and set(half.table["budget"]) == {0.5}
    assert half.table["kept_patches"].tolist() == [-(-n // 2) for n in half.table["patches"]]
    numbers = [one.table.filter(like="prob_").to_numpy() for one in (half, plain)]
    assert 0 < abs(numbers[0] - numbers[1]).max() < 0.5
    again = gated_srp.predict(finished, files, workers=0, budget=0.5)
    pd.testing.assert_frame_equal(again.table, half.table, check_exact=True)
    assert any(note.kind == "budget" and "50" in note.what for note in half.notes)


def test_the_curve_is_written_and_shown_by_the_report(finished, cohort, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for file in finished.iterdir():
        if file.name != ".lock":
            (run / file.name).write_bytes(file.read_bytes())
    done = CliRunner().invoke(
        app, ["predict", str(run), str(cohort.parent / "feats"), "--budget-curve", str(run / "budget")]
    )
    assert done.exit_code == 0, done.output
    assert (
        "100% asked, 100.0% kept: logits drift by 0 (at most 0), 0 of 24 slides decided otherwise, 1.00 of the time"
        in done.output
    )
    table = json.loads((run / "budget" / "budget.json").read_text())["table"]
    assert [row["share"] for row in table] == [1.0, 0.9, 0.75, 0.5, 0.25]
    kept, drift = ([row[key] for row in table] for key in ("kept", "drift"))
    assert kept == sorted(kept, reverse=True) and drift[0] == 0 < min(drift[1:])
    assert all(row["largest_drift"] >= row["drift"] for row in table)
    gated_srp.report(run, out=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Redundancy budget: Gated SRP, run, 24 slides" in page and re.search(r"drift of\s+logits", page)


def test_the_curve_reads_files_as_predict_does_and_ignores_no_option(finished, cohort, tmp_path):
    file = tmp_path / "odd" / "s000.h5"
    file.parent.mkdir()
    shutil.copy(next((cohort.parent / "feats").rglob("s000.h5")), file)
    with h5py.File(file, "a") as content:
        content.move("features", "odd_name")
    asked = ["predict", str(finished), str(file.parent), "--features-key", "odd_name", "--budget-curve"]
    done = CliRunner().invoke(app, [*asked, str(tmp_path / "curve")])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "0 of 1 slide" in done.output
    for option in (["--budget", "0.5"], ["--format", "stamp"]):
        done = CliRunner().invoke(app, [*asked, str(tmp_path / "other"), *option])
        assert "--budget-curve: goes with neither --format nor --budget" in str(done.exception)


def test_the_page_says_what_the_curves_of_trained_models_gave():
    """Of docs/evidence/budget.csv: the curves of the runs of `gated-srp demo`."""
    table, page = (ROOT / "docs" / name for name in ("evidence/budget.csv", "method.md"))
    curves, text, rising = pd.read_csv(table), page.read_text(), []
    assert (len(curves), set(curves["arm"]), set(curves["seed"])) == (20, {"na", "gated_srp"}, {42, 43})
    for share in (0.9, 0.75, 0.5, 0.25):
        rows = [curves[(curves["share"] == share) & (curves["arm"] == arm)] for arm in ("na", "gated_srp")]
        cells = [f"{', '.join(f'{one:.3f}' for one in row['drift'])} | {row['changed'].sum()}" for row in rows]
        assert f"| {share:.0%} | {cells[0]} | {cells[1]} |".replace("%", " %") in text
    for _, run in curves.groupby(["arm", "seed"]):
        drift = run.sort_values("share", ascending=False)["drift"].tolist()
        rising.append(drift == sorted(drift))
        assert drift[0] == 0 and drift[-1] == max(drift)
    assert sum(rising) == 1 and "in one run of four" in text
    assert f"as much as {curves['largest_drift'].max():.2f}" in text


def test_bad_shares_and_arms_that_need_all_patches_are_refused(finished, cohort, tmp_path):
    with pytest.raises(UserError, match=r"budget: is 1\.5"):
        gated_srp.predict(finished, cohort.parent / "feats", workers=0, budget=1.5)
    card = gated_srp.load_model(finished).card
    sizes = {**card["settings"], "arm": "local_attention"}
    kept = {key: card[key] for key in ("task", "classes", "window")}
    save_model(build_model(**sizes), tmp_path / "model.safetensors", kept)
    with pytest.raises(UserError, match="'local_attention' takes no budget"):
        gated_srp.predict(tmp_path, cohort.parent / "feats", workers=0, budget=0.5)
