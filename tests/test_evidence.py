"""The page of evidence says what its committed tables say, and reads a stage only when it is complete."""

import importlib
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def page():
    sys.path.insert(0, str(DOCS / "evidence"))  # as `python docs/evidence/page.py` does
    spec = importlib.util.spec_from_file_location("evidence_page", DOCS / "evidence" / "page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(DOCS / "evidence"))


@pytest.fixture(scope="module")
def generated(page):
    return importlib.import_module("generated")


def test_every_number_and_statement_of_the_page_is_recomputed_from_the_tables(page):
    assert (DOCS / "evidence.md").read_text(encoding="utf-8") == page.render(), "python docs/evidence/page.py writes it"


def test_readme_and_check_say_what_the_tables_say(page):
    from gated_srp.config.reach import EVIDENCE, REMOVAL

    plan = yaml.safe_load((DOCS / "evidence" / "breakhis.yaml").read_text())
    results = pd.read_csv(DOCS / "evidence" / "breakhis.csv", dtype={"seed": str})
    assert page.advice(plan, results, pd.read_csv(DOCS / "evidence" / "breakhis_gates.csv")) == EVIDENCE
    place = page.read_plan(DOCS / "evidence" / "place.yaml"), page.read_table(DOCS / "evidence" / "place.csv")
    tissue = yaml.safe_load((DOCS / "evidence" / "breakhis_place.yaml").read_text())
    assert page.removal(*place, tissue, page.rows_of(DOCS / "evidence" / "breakhis_place.csv")) == REMOVAL
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert readme == page.readme(readme), "python docs/evidence/page.py writes it"
    assert readme.count("- **Behind attention, on real tissue: ") == 1 and "## Speed" in readme


@pytest.mark.parametrize("name", ["breakhis", "breakhis_place", "pretraining", "pretraining_controls"])
def test_the_tables_hold_runs_of_the_plan_alone_and_each_once(name):
    plan = yaml.safe_load((DOCS / "evidence" / f"{name}.yaml").read_text())
    planned = {(stage["cohort"], arm) for stage in plan["stages"] for arm in stage["arms"]}
    found = pd.read_csv(DOCS / "evidence" / f"{name}.csv", dtype=str)
    assert set(zip(found["cohort"], found["arm"], strict=True)) <= planned
    assert not found.duplicated(["cohort", "arm", "seed", "metric"]).any()


def test_a_stage_is_read_when_all_its_runs_are_finished_and_not_before(page):
    plan = {
        "margin": 0.01,
        "cohorts": {"toy": {"primary": "auc", "settings": {}}},
        "stages": [{"name": "first", "cohort": "toy", "seeds": [1, 2], "arms": ["na", "x"]}],
    }
    rows = [("toy", arm, seed, "auc", value) for arm, value in (("na", 0.7), ("x", 0.8)) for seed in "12"]
    table = pd.DataFrame(rows, columns=["cohort", "arm", "seed", "metric", "value"])
    whole = "\n".join(page.stage_lines(plan, table))
    assert "first: toy, auc, 4 of 4 runs" in whole and "| x | 0.8000 | 0.7000 | +0.1000" in whole
    other = {**plan, "stages": [plan["stages"][0] | {"reference": "x"}]}
    assert "| arm | mean | x | difference" in (said := "\n".join(page.stage_lines(other, table)))
    assert "| NA | 0.7000 | 0.8000 | -0.1000" in said and "not distinguishable from x" in said
    partly = "\n".join(page.stage_lines(plan, table[:3]))
    assert "3 of 4 runs" in partly and "not read" in partly and "0.8000" not in partly
    assert (
        page.primary(plan, table[:3])
        == "**Behind attention, on real tissue: open.** 3 of 4 runs of the primary contrast are finished."
    )
    assert page.primary(plan, table).startswith(
        "**Behind attention, on real tissue: no difference seen.** BreaKHis, benign or malignant, 2 seeds, AUC minus that of NA"
    )
    gone = {**plan, "stages": [plan["stages"][0] | {"withdrawn": "twin"}]}
    twins = pd.concat([table[:3], table[:2].assign(cohort="twin", value=[0.7, 0.75])])
    said = "\n".join(page.stage_lines(gone, twins))
    assert "in all 2 runs that are there both one by one and packed (twin), auc differs by at most 0.050000." in said
    assert "Rounding" not in said
    more = [
        twins.assign(metric=name, value=twins["value"] + (twins["cohort"] == "twin") * by)
        for name, by in (("f1", 0.1), ("ece", 0.0))
    ]
    more[1] = more[1].assign(value=0.3)
    same = twins.assign(value=[0.7, 0.8, 0.7, 0.7, 0.8])  # as rounded tables have it: equal
    said = "\n".join(
        page.stage_lines(gone, pd.concat([same.assign(value=same["value"] + 1e-8 * (same["cohort"] == "twin")), *more]))
    )
    assert "auc is the same to six digits. Rounding moves other metrics in 2 of them, by at most: f1 0.1500." in said


def test_the_driver_computes_in_the_order_of_the_plan_and_leaves_alone_what_the_table_has(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("evidence_run", DOCS / "evidence" / "run.py")
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    plan = {
        "repeats": 1,
        "fields": 1,
        "settings": {"task": "classification", "target": "label", "train": {"epochs": 1}},
        "cohorts": {"toy": {"settings": {"train": {"lr": 1e-3}}}, "folded": {"settings": {"folds": 2}}},
        "stages": [
            {"cohort": "toy", "seeds": [1, 2], "arms": ["na", "gated_srp@train.gate_lr=10"]},
            {"cohort": "folded", "seeds": [1], "arms": ["na"]},
            {"cohort": "toy", "seeds": [3], "arms": ["na"], "withdrawn": "folded"},
        ],
    }
    (tmp_path / "data" / "features").mkdir(parents=True)
    (tmp_path / "data" / "slides.csv").write_text("slide_id,case_id,label\ns1,p1,a\ns2,p2,b\n")
    cells = list(run.cells_of(plan, tmp_path / "data", tmp_path / "runs"))
    keys = [run.key_of(cell) for cell in cells]
    assert keys == [
        ("toy", "na", "1"),
        ("toy", "gated_srp@train.gate_lr=10", "1"),
        ("toy", "na", "2"),
        ("toy", "gated_srp@train.gate_lr=10", "2"),
        ("folded", "na", "1_fold0"),
        ("folded", "na", "1_fold1"),
    ]
    assert (cells[0].config.train.lr, cells[1].config.train.gate_lr, cells[4].config.train.epochs) == (1e-3, 10.0, 1)
    table = run.Table(tmp_path / "plan.csv")
    for key in (*keys, keys[0]):  # the first twice, as after an interruption
        table.add(pd.DataFrame([(*key, "auc", 0.5)], columns=[*run.KEY, "metric", "value"]))
    assert len(table.frame) == len(keys)
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    monkeypatch.setattr(run.gated_srp, "train", None)  # would fail
    given = ["run.py", str(tmp_path / "plan.yaml"), "--data", str(tmp_path / "data"), "--out", str(tmp_path / "runs")]
    monkeypatch.setattr("sys.argv", given)
    run.main()
    assert run.Table(tmp_path / "plan.csv").runs == set(keys)
    table.frame = table.frame[:-1]
    table.write()  # the first, added last, is missing, and another process is at it
    with run.only_one(tmp_path / "runs" / "locks" / "-".join(keys[0])) as mine:
        assert mine
        run.main()
    with pytest.raises(TypeError):  # nobody is: train, here None, is called
        run.main()


def test_stages_that_repeat_the_contrast_are_summed_up_when_they_are_complete(page):
    arms = ["na", "gated_srp"]
    plan = {
        "margin": 0.01,
        "cohorts": {"a": {"primary": "auc", "settings": {}}, "b": {"primary": "auc", "settings": {"folds": 2}}},
        "stages": [
            {"name": n, "cohort": c, "seeds": s, "arms": arms} for n, c, s in (("p", "a", [1, 2]), ("q", "b", [7]))
        ],
    }
    units = {"a": ("1", "2"), "b": ("7_fold0", "7_fold1")}
    rows = [
        (c, arm, unit, "auc", 0.5 + 0.1 * (arm != "na") * (unit[-1] == "1"))
        for c in "ab"
        for unit in units[c]
        for arm in arms
    ]
    table = pd.DataFrame(rows, columns=["cohort", "arm", "seed", "metric", "value"])
    words = "not distinguishable from NA, not shown to be no worse by more than 0.01"
    assert (
        page.secondary(plan, table) == f"The first line, repeated otherwise:\n    - q (auc): Gated SRP +0.0500: {words}"
    )
    assert page.secondary(plan, table[:-1]) == "No stage that repeats it otherwise is complete."


def test_other_arms_are_counted_in_complete_stages_alone_and_weak_subtypes_are_said(page):
    cohort = {"primary": "auc", "settings": {}}
    plan = {
        "margin": 0.01,
        "cohorts": {"a": cohort, "b": cohort, "c": cohort},
        "stages": [
            {"name": n, "cohort": c, "seeds": [1, 2, 3], "arms": ["na", *arms]}
            for n, c, arms in (("p", "a", ["gated_srp"]), ("subtypes", "b", ["xsa", "diff"]), ("open", "c", ["xsa"]))
        ],
    }
    gain = {"na": (0, 0, 0), "gated_srp": (0, 0, 0), "xsa": (0.1, 0.11, 0.1), "diff": (0.1, -0.1, 0)}
    rows = [
        (stage["cohort"], arm, str(seed), "auc", 0.25 + gain[arm][seed - 1])
        for stage in plan["stages"]
        for arm in stage["arms"]
        for seed in stage["seeds"]
    ]
    table = pd.DataFrame(rows, columns=["cohort", "arm", "seed", "metric", "value"])[:-1]
    assert (
        page.others(plan, table)
        == "Other attentions and controls (XSA; Diff; stages subtypes): 1 of 2 contrasts are distinguishable from NA: XSA (b, +0.1033)."
    )
    assert page.others(plan, table[:6]) == "No stage of the other arms is complete."
    assert page.few(plan, table).startswith("On subtypes NA itself has a macro F1 of 0.25 (subtypes): of eight classes")


def test_an_interval_over_patients_is_shown_for_all_runs_of_a_contrast_or_not_at_all(page):
    row = next(pd.DataFrame({"low": [-0.1], "high": [0.2], "seeds": [2], "repeats": [543]}).itertuples())
    assert page._over_patients(row, 2) == "-0.1000 to +0.2000 (543 draws)"
    assert (
        page._over_patients(row, 5) == "not computed for all 5 runs" and page._over_patients(None, 5) == "not computed"
    )


def test_the_question_asked_again_is_a_hint_and_holm_counts_its_two_contrasts(generated):
    plan = yaml.safe_load((DOCS / "evidence" / "confirmation.yaml").read_text())
    plan["seeds"] = seeds = [1, 2, 3]
    gain = {("fixed_beta_1", "0"): (0.10, 0.13, 0.12), ("fixed_beta_1", "2"): (-0.01, -0.02, 0.0)}
    rows = [
        (
            "removal",
            x,
            y,
            arm,
            str(seed),
            "macro_auc",
            0.7 + gain.get((arm, y), (0.01, -0.01, 0.0))[seed - 1] * (arm != "na"),
        )
        for x in ("1.5", "4")
        for y in ("0", "2")
        for arm in plan["diagrams"]["removal"]["arms"]
        for seed in seeds
    ]
    rows += [
        ("removal", "1.5", "0", "gated_srp@train.gate_lr=10", str(seed), "mean_beta", 0.1 * seed) for seed in seeds
    ]
    table = pd.DataFrame(rows, columns=[*generated.KEY, "metric", "value"])
    first, second = (stats.ttest_1samp(gain["fixed_beta_1", y], 0).pvalue for y in "02")
    said = generated.confirmed(plan, table)
    assert (
        "3 new generated cohorts per point: better than NA where foci are single patches (+0.117, 95 % interval" in said
    )
    assert f"p {2 * first:.2g} after Holm); not distinguishable from NA where foci are wider" in said
    assert said.endswith(f"p {max(2 * first, second):.2g} after Holm).")
    lines = "\n".join(generated.confirmation_lines(plan, table, None))
    assert said in lines and said.startswith("As a hint,")
    assert (
        "mean (least to greatest cohort), at smooth and radius:\n\n- Gated SRP, gate_lr 10: +0.20 (+0.10 to +0.30) at 1.5, 0\n"
        in lines
    )


def test_claims_on_where_to_remove_are_paired_by_cohort_and_holm_counts_them_all(generated):
    plan = yaml.safe_load((DOCS / "evidence" / "place.yaml").read_text())
    plan["diagrams"] = {name: plan["diagrams"][name] | {"seeds": [1, 2, 3]} for name in ("place", "wide")}
    gain = {"features_beta_1": (0.3, 0.32, 0.35), "features_gated_srp_from_1": (0.01, -0.02, 0.0)}
    rows = [
        (*point.key(arm), "macro_auc", 0.6 + gain.get(arm, (0.0, 0.0, 0.0))[point.seed - 1])
        for point in generated.points_of(plan)
        for arm in point.arms
    ]
    rows.append(("place", "1.5", "1.5", "features_gated_srp_from_1", "2", "mean_beta", 0.9))
    table = pd.DataFrame(rows, columns=[*generated.KEY, "metric", "value"])
    first, second, third, fourth, last = generated.claims_of(plan, table)
    expected = stats.ttest_1samp(gain["features_beta_1"], 0).pvalue
    assert first.p == third.p == last.p == pytest.approx(5 * expected)  # the least of five, three of them equal
    assert (first.verdict, second.verdict, fourth.verdict) == ("better", "not distinguishable", "not distinguishable")
    assert (first.means, last.at) == (pytest.approx((0.6 + 0.97 / 3, 0.6)), "smooth 0.5, radius 2")
    lines = "\n".join(generated.place_lines(plan, table, None))
    shown = f"| smooth 1.5, strength 1.5 | 0.923, 0.600 | +0.323 (+0.261 to +0.386) | {5 * expected:.2g} | **better** |"
    assert f"| features_beta_1 | fixed_beta_1 {shown}" in lines and "- features_gated_srp_from_1: +0.90 (+0.90" in lines
    said = generated.placed(plan, table)
    assert said.startswith(
        "**Taken from the features, before the first layer, in generated cohorts: a gain.** AUC, means of 3"
    )
    assert (
        "varies slowly: NA 0.600, removal by force (`features_beta_1`) 0.923 (better: +0.323, 95 % interval +0.261 to"
        in said
    )
    assert "(`features_gated_srp_from_1`) 0.597 (not distinguishable: -0.003" in said
    assert "to patch: NA 0.600, removal by force (`features_beta_1`) 0.923 (better" in said
    assert (
        "the former, removal by force is better than removal behind attention (`fixed_beta_1`): 0.923, 0.600 (+0.323"
        in said
    )
    assert "is not distinguishable from one that starts at the identity" in said
    assert ": open.** It is being computed." in generated.placed(plan, table.drop(index=0))
    counts = generated.counted_points(plan, table)
    assert (
        "(place, wide), intervals" in counts and "features_beta_1 12 above, 0 below of 12 (+0.323 to +0.323)" in counts
    )
    assert "fixed_beta_1 0 above, 0 below of 12 (+0.000 to +0.000)" in counts
    partly = "\n".join(generated.place_lines(plan, table.drop(index=0), None))
    assert "107 of 108 runs" in partly and "Not complete" in partly and "**better**" not in partly
    assert "macro_auc, 90 of 90 runs" in partly and "0.923" not in partly.split("### wide")[0]  # the other one is read


def test_the_answer_on_generated_cohorts_counts_all_contrasts_and_says_what_chance_gives(page, generated):
    plan = {
        "reference": "na",
        "seeds": [1, 2, 3],
        "recipe": {"foci": [1, 2]},
        "patients": [2, 2, 2],
        "settings": {"train": {}},
        "diagrams": {
            "toy": {
                "metric": "macro_auc",
                "task": {},
                "x": {"dial": "smooth", "values": [1, 2]},
                "y": {"dial": "radius", "values": [0]},
                "arms": ["na", "gated_srp"],
            }
        },
    }
    gain = {1: (0.1, 0.12, 0.11), 2: (-0.1, 0.1, 0.0)}
    rows = [
        ("toy", str(x), "0", arm, str(seed), "macro_auc", 0.6 + gain[x][seed - 1] * (arm != "na"))
        for x in (1, 2)
        for seed in (1, 2, 3)
        for arm in ("na", "gated_srp")
    ]
    table = pd.DataFrame(rows, columns=[*generated.KEY, "metric", "value"])
    said = generated.generated(plan, table)
    assert said.startswith(
        "**Behind attention, in generated cohorts: a gain.** Of 2 contrasts with NA (toy) the 95 % interval of 1 better and 0 worse"
    )
    assert said.endswith("\nDifferences: Gated SRP +0.000 to +0.110 (2 points).")
    assert (
        generated.generated(plan, table[:-1])
        == "**Behind attention, in generated cohorts: open.** No diagram is complete."
    )
    assert [page.lead(one) for one in ((0, 0), (0, 1), (-1,), (1, -1))] == [
        "no difference seen",
        "a gain",
        "a loss",
        "gains and losses",
    ]


def test_a_correlation_of_gates_that_differ_by_nothing_is_not_told_as_dependence(page):
    rows = {"cohort": "toy", "arm": "x", "seed": ["1", "2"], "layer": 0, "correlation": [0.9, 0.1]}
    small = pd.DataFrame({**rows, "beta_lowest_fifth": [0.001, 0.5], "beta_highest_fifth": [0.002, 0.48]})
    said = page._follows(small)
    assert (
        "hardly depends on homogeneity" in said
        and "at most 0.020 in any layer" in said
        and "0.50 in size (median; largest 0.90)" in said
    )
    large = small.assign(beta_highest_fifth=[0.002, 0.8])
    assert "patch depends on homogeneity" in page._follows(large) and "hardly" not in page._follows(large)


def test_trajectories_are_means_of_runs_between_the_least_and_the_greatest(page, tmp_path, monkeypatch):
    values = {"1": (0.0, 0.2), "2": (0.1, 0.6), "3": (0.2, 0.7)}  # by run: two epochs
    rows = [("toy", "gated_srp", run, epoch + 1, 0, value[epoch]) for run, value in values.items() for epoch in (0, 1)]
    rows.append(("toy", "axis_random", "1", 1, 0, -0.3))
    gates = pd.DataFrame(rows, columns=["cohort", "arm", "seed", "epoch", "layer", "mean"])
    drawn = []
    monkeypatch.setattr(page, "_save", lambda figure, stem, title: drawn.append((figure.axes, stem, title)))
    assert not list(page.trajectory_lines(gates, tmp_path))  # no figure beside the page: none is shown
    ((first, second), stem, title) = drawn[0]
    assert stem == tmp_path / "gates_toy" and title == "toy: where the gates went"
    assert [one.get_title().split("\n")[1] for one in (first, second)] == ["3 runs", "1 run"]
    assert np.allclose(first.lines[0].get_ydata(), [0.1, 0.5])
    band = first.collections[0].get_paths()[0].vertices
    assert {tuple(point) for point in band} >= {(1.0, 0.0), (1.0, 0.2), (2.0, 0.2), (2.0, 0.7)}
    assert (band[:, 1].min(), band[:, 1].max()) == (0.0, 0.7)


def test_every_cohort_with_gates_shows_how_they_moved(page):
    gates = pd.read_csv(DOCS / "evidence" / "breakhis_gates.csv")
    shown = (DOCS / "evidence.md").read_text(encoding="utf-8")
    assert all(f"](evidence/gates_{cohort}.svg)" in shown for cohort in gates["cohort"].unique())


def test_a_reference_close_to_chance_is_said(generated):
    points = pd.DataFrame({"x": [1, 1, 2], "y": [1, 1, 1], "reference": [0.54, 0.54, 0.7]})
    assert " At 1 of 2 points NA itself is below 0.55" in generated._weak(points) and generated._weak(points[2:]) == ""


def test_contrasts_of_pretraining_are_read_when_a_stage_is_complete_and_holm_counts_the_first_two(page):
    plan = yaml.safe_load((DOCS / "evidence" / "pretraining.yaml").read_text())
    stage, arms = plan["stages"][0], plan["stages"][0]["arms"]
    assert all(set(pair) <= set(one["arms"]) for pair in plan["contrasts"] for one in plan["stages"])
    gain = {arms[0]: 0.0, arms[1]: 0.1, arms[2]: 0.0, arms[3]: 0.02}
    shifts = {str(seed): 0.01 * place for place, seed in enumerate(stage["seeds"])}
    rows = [("demo", arm, seed, "macro_auc", 0.6 + gain[arm] * (1 + shifts[seed])) for arm in arms for seed in shifts]
    rows += [("demo", arms[1], seed, "pretraining_r2", 0.1 + shift) for seed, shift in shifts.items()]
    table = pd.DataFrame(rows, columns=["cohort", "arm", "seed", "metric", "value"])
    lines = "\n".join(page.pretraining_lines(plan, table))
    assert "demo, macro_auc, 20 of 20 runs" in lines and "breakhis-binary, macro_auc, 0 of 20 runs" in lines
    assert "| NA, pretrained | NA | 0.7020, 0.6000 | +0.1020 (" in lines and "NA, pretrained 0.100 to 0.140" in lines
    assert "| better, no worse by more than 0.01 |" in lines
    partly = "\n".join(page.pretraining_lines(plan, table[1:]))
    assert "19 of 20 runs" in partly and "0.7020" not in partly
    small, other = np.array([0.011, 0.002, 0.018, -0.002, 0.012]), np.array([0.01, 0.02, 0.03, 0.01, 0.02])
    table.loc[5:9, "value"], table.loc[15:19, "value"] = 0.6 + small, 0.6 + other
    first, second = (
        2 * stats.t.sf(one.mean() / (one.std(ddof=1) * np.sqrt(1 / 5 + 0.2 / 0.7)), 4) for one in (small, other)
    )  # corrected for training slides that seeds share
    assert second < first and 2 * second < first  # Holm: the smaller one counts twice
    lines = "\n".join(page.pretraining_lines(plan, table))
    assert f"| {first:.3f} | not distinguishable" in lines and f"| {2 * second:.3f} | not distinguishable" in lines


def test_controls_of_pretraining_are_paired_with_the_runs_of_before_and_read_together(page):
    plan = yaml.safe_load((DOCS / "evidence" / "pretraining_controls.yaml").read_text())
    columns, seeds = ["cohort", "arm", "seed", "metric", "value"], [str(seed) for seed in plan["stages"][0]["seeds"]]
    wobble = dict(zip(seeds, (0.01, -0.01, 0.02, 0.0, -0.02), strict=True))
    explained = {"na": 0.1, "gated_srp": 0.3, "axis_shuffled": 0.2}
    known = [
        (cohort, f"{arm}@train.init=pretrained", seed, "pretraining_r2", explained[arm])
        for cohort in plan["cohorts"]
        for arm in ("na", "gated_srp")
        for seed in seeds
    ]
    rows = [
        (stage["cohort"], arm, seed, "pretraining_r2", explained.get(arm, 0.3) + wobble[seed])
        for stage in plan["stages"]
        for arm in stage["arms"]
        for seed in seeds
    ]
    before, table = pd.DataFrame(known, columns=columns), pd.DataFrame(rows, columns=columns)
    lines = "\n".join(page.control_lines(plan, table, before))
    assert "controls-breakhis 5 of 5 runs; controls-demo 25 of 25 runs; controls-lattice 10 of 10 runs." in lines
    change = 0.1 - np.array(list(wobble.values()))
    p = 2 * stats.t.sf(change.mean() / (change.std(ddof=1) * np.sqrt(1 / 5 + 0.2 / 0.7)), 4)
    claim = f"| **better** (claim, p {2 * p:.2g} after Holm) |"  # both cohorts have the same p: twice the smaller one
    assert lines.count("| Gated SRP | axis_shuffled | 0.300, 0.200 | +0.1000 (") == lines.count(claim) == 2
    assert (
        "| demo | Gated SRP | axis_random | 0.300, 0.300 | +0.0000 (" in lines
        and "| not distinguishable (hint) |" in lines
    )
    assert lines.count("| axis_shuffled | NA | 0.200, 0.100 | +0.1000 (") == 2
    parents = yaml.safe_load((DOCS / "evidence" / "pretraining.yaml").read_text())
    start = {"na": (0.1, 0.11, 0.12, 0.1, 0.1), "gated_srp": (0.2, -0.2, 0.0, 0.1, -0.1)}
    rows = [
        ("breakhis-binary", arm + how, seed, "macro_auc", 0.7 + start[arm][seeds.index(seed)] * bool(how))
        for arm in start
        for how in ("", "@train.init=pretrained")
        for seed in seeds
    ]
    trained = pd.concat([before, pd.DataFrame(rows, columns=columns)])
    said = page.pretrained(parents, trained, plan, table)
    assert said.startswith(
        "**Pretraining on masked patches: a gain for the diagnosis.** BreaKHis, AUC with minus without it: NA +0.1060 ("
    )
    assert (
        "from elsewhere: +0.100 (" in said
        and "; better) on demo. As hints, on the demo, Gated SRP minus fixed_beta_1 +0.000 (" in said
    )
    assert ", minus local_attention +0.000 (" in said
    assert page.pretrained(parents, trained, plan, table[1:]).endswith("from elsewhere: open.")
    partly = "\n".join(page.control_lines(plan, table[1:], before))
    assert "4 of 5 runs" in partly and "not read" in partly and "0.300" not in partly


def test_the_driver_pretrains_before_it_trains_from_it(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("evidence_run", DOCS / "evidence" / "run.py")
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    plan = yaml.safe_load((DOCS / "evidence" / "pretraining.yaml").read_text())
    plan["stages"] = [{"cohort": "demo", "seeds": [7], "arms": ["na", "na@train.init=pretrained"]}]
    (tmp_path / "data" / "demo" / "features").mkdir(parents=True)
    (tmp_path / "data" / "demo" / "slides.csv").write_text("slide_id,case_id,label\ns1,p1,a\ns2,p2,b\n")
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    called = []

    class Done:
        @staticmethod
        def metrics(part):
            return {"r2": 0.25}

    monkeypatch.setattr(run.gated_srp, "pretrain", lambda config, **how: called.append(("pretrain", how)) or Done)
    monkeypatch.setattr(run.gated_srp, "train", lambda config, **how: called.append((config.train.init, how)))
    monkeypatch.setattr(run.Cell, "metrics", lambda cell: {"macro_auc": 0.5})
    given = ["run.py", str(tmp_path / "plan.yaml"), "--data", str(tmp_path / "data"), "--out", str(tmp_path / "runs")]
    monkeypatch.setattr("sys.argv", given)
    run.main()
    which = {"arm": "na", "seed": 7, "fold": 0}
    masks = {"mask": 0.5, "block": 3, "settings": {"train.epochs": 12}}
    assert called == [(None, which), ("pretrain", {**which, **masks}), ("pretrained", which)]
    found = run.Table(tmp_path / "plan.csv").frame
    assert found[found["metric"] == "pretraining_r2"]["arm"].tolist() == ["na@train.init=pretrained"]
    plan["pretraining_alone"], plan["stages"][0]["arms"] = True, ["na"]
    (tmp_path / "alone.yaml").write_text(yaml.safe_dump(plan))
    called.clear()
    monkeypatch.setattr("sys.argv", [given[0], str(tmp_path / "alone.yaml"), *given[2:]])
    run.main()
    assert called == [("pretrain", {**which, **masks})]
    assert run.Table(tmp_path / "alone.csv").frame.to_numpy().tolist() == [["demo", "na", "7", "pretraining_r2", 0.25]]
