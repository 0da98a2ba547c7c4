"""The paper's studies as cells, and our numbers beside the published."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from study.study_cells import finish
from typer.testing import CliRunner

from gated_srp import report
from gated_srp.errors import UserError
from gated_srp.reports.tables import reproduction_grid, write_reproduction
from gated_srp.study.cells import distinct
from gated_srp.study.engine import Running
from gated_srp.study.paper import read_studies, studies_folder, study_names
from gated_srp.study.reproduction import Sources, beside_published, paper_settings, plan_study, write_study
from gated_srp.study.statistics import judge

FOLDER = Path(__file__).resolve().parents[2] / "studies"
TABLES = [
    "survival",
    "classification",
    "fixed-beta",
    "gate-range",
    "gate-gradient",
    "patch-encoder",
    "gate-factorization",
    "gate-initialization",
    "architecture",
    "neighbourhood",
    "mil-models",
    "slide-backbones",
    "runtime",
    "controls",
    "trajectories",
    "signed-gate",
]


def sources(tmp_path, **features):
    return Sources({name: Path(place) for name, place in features.items()}, {}, tmp_path)


def planned(name, tmp_path, **chosen):
    study = read_studies(name, FOLDER)[0]
    cells, notes = plan_study(study, sources(tmp_path), **chosen)
    return study, cells, notes


def test_the_studies_are_found_in_the_checkout():
    assert studies_folder() == FOLDER
    assert set(TABLES) <= set(study_names(FOLDER))


def test_the_backbones_that_we_have_stand_beside_their_published_numbers(tmp_path):
    study, cells, _ = planned("slide-backbones", tmp_path, seeds=[42])
    assert {(cell.row, cell.arm) for cell in cells} == {
        ("Dense MHSA, baseline", "vit4"),
        ("Dense MHSA, gated_srp", "vit4_gated_srp"),
    }
    assert len(cells) == 2 * 5
    lines = beside_published(study, pd.DataFrame(columns=["cohort", "arm", "seed", "metric", "value"]))
    kirp = lines[(lines["cohort"] == "TCGA-KIRP") & (lines["row"] == "Dense MHSA, gated_srp")]
    assert kirp[["published", "published_std"]].to_numpy().tolist() == [[0.719933, 0.142271]]


def test_the_table_of_mil_models_is_trained_at_the_authors_sizes(tmp_path):
    _, cells, _ = planned("mil-models", tmp_path, cohorts=["KIRP"], seeds=[42])
    assert [cell.arm for cell in cells] == ["abmil_published", "dsmil_published", "transmil", "gated_srp"]


def test_survival_is_five_cohorts_four_arms_five_seeds_and_an_untuned_row_beside(tmp_path):
    study, cells, notes = planned("survival", tmp_path)
    paper = [cell for cell in cells if cell.row in {row.name for row in study.rows}]
    assert len(paper) == len(distinct(paper)) == 100
    assert {(c.cohort, c.config.gate().delta, c.config.gate().hidden_dim) for c in paper if c.arm == "gated_srp"} == {
        ("TCGA-KIRC", 1.5, 128),
        ("TCGA-KIRP", 2.0, 32),
        ("TCGA-LUAD", 1.0, 128),
        ("TCGA-STAD", 0.5, 128),
        ("TCGA-UCEC", 1.5, 32),
    }
    assert {(c.config.train.epochs, c.config.train.lr, c.config.train.accumulation, c.config.cap) for c in paper} == {
        (20, 1e-4, 1, 49_152)
    }
    more = [cell for cell in cells if cell not in paper]
    assert len(more) == 25
    assert {(c.config.gate().delta, c.config.gate().hidden_dim) for c in more} == {(1.0, 64)}
    assert notes == ()


def test_kgh_is_skipped_with_a_note_unless_a_copy_is_named(tmp_path):
    study, cells, notes = planned("classification", tmp_path, seeds=[42])
    assert len(cells) == 4 * 5
    assert notes == ("KGH: skipped, private; name a local copy with --labels KGH=TABLE.csv --features KGH=FOLDER",)
    here = Sources({}, {"KGH": tmp_path / "kgh.csv"}, tmp_path)
    assert len(plan_study(study, here, seeds=[42])[0]) == 5 * 5


def test_an_encoder_and_a_window_are_settings_with_the_papers_gates(tmp_path):
    _, cells, _ = planned("patch-encoder", tmp_path, cohorts=["KIRP"], seeds=[42])
    assert [(c.config.encoder, c.arm, c.config.gate().delta, c.config.gate().hidden_dim) for c in cells][::2] == [
        ("vit_b16_torchvision", "na", 0.5, 64),
        ("medsiglip_448", "na", 2.0, 32),
        ("uni_v2", "na", 2.0, 32),
    ]
    _, cells, _ = planned("neighbourhood", tmp_path, cohorts=["KIRP"], seeds=[42])
    assert [(c.row, c.config.window) for c in cells] == [("3x3", 3), ("5x5", 5), ("7x7", 7)]


def test_dense_attention_has_its_own_gate_and_adp_its_image_model(tmp_path):
    _, cells, notes = planned("architecture", tmp_path, seeds=[42])
    assert [(c.cohort, c.arm, c.config.gate(c.arm).delta, c.config.gate(c.arm).hidden_dim) for c in cells] == [
        ("ADP", "vit_s16", 0.5, 128),
        ("ADP", "vit_s16_gated_srp", 0.5, 128),
        ("ADP", "vit_s16_gated_srp", 1.0, 64),
        ("PANDA", "vit4", 2.0, 32),
        ("PANDA", "vit4_gated_srp_published", 2.0, 32),
        ("PANDA", "vit4_gated_srp_published", 1.0, 64),
    ]
    assert notes == ()
    adp, train = cells[0].config, cells[0].config.train
    assert (adp.encoder, adp.model.depth, adp.sizes("vit_s16")["num_patches"]) == (None, 12, 289)
    assert (train.epochs, train.batch_size, train.accumulation, train.lr, train.weight_decay) == (
        20,
        256,
        1,
        5e-4,
        0.05,
    )
    assert "batch 256, images of 272 pixels, patches of 16" in paper_settings(cells[0])


def test_adps_images_are_looked_for_where_features_are(tmp_path):
    (tmp_path / "adp").mkdir()
    config = sources(tmp_path, **{"": tmp_path}).config("ADP")
    assert config.images.folder == tmp_path / "adp" and config.features == ()


def test_adps_published_numbers_stand_beside_its_rows(tmp_path):
    study = read_studies("architecture", FOLDER)[0]
    table = beside_published(study, pd.DataFrame(columns=["cohort", "arm", "seed", "metric", "value"]))
    adp = table[(table["cohort"] == "ADP") & table["published"].notna()]
    assert adp.groupby("row")["published"].apply(list).to_dict() == {
        "MHSA": [0.7768, 0.6997, 0.9360, 0.9424],
        "Gated SRP": [0.7813, 0.7031, 0.9372, 0.9439],
    }


def test_studies_share_cells(tmp_path):
    cells = [cell for study in read_studies("all", FOLDER) for cell in plan_study(study, sources(tmp_path))[0]]
    runs = distinct(cells)
    assert len(runs) < len(cells)
    base = [c for c in runs if (c.cohort, c.arm, c.seed, c.config.out) == ("TCGA-KIRP", "gated_srp", 42, tmp_path)]
    assert len(base) == 1  # of survival, the ablations, windows, encoders, controls, trajectories


def test_a_wrong_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"no study 'surviva'\. Did you mean survival\?"):
        read_studies("surviva", FOLDER)
    with pytest.raises(UserError, match=r"no cohort 'KIRX'"):
        plan_study(read_studies("survival", FOLDER)[0], Sources({}, {}, Path()), cohorts=["KIRX"])


def test_features_are_looked_for_in_the_cohorts_own_folder_first(tmp_path):
    (tmp_path / "tcga_kirc").mkdir()
    found = Sources({"": tmp_path, "PANDA": tmp_path / "p"}, {}, tmp_path)
    assert found.features_of("TCGA-KIRC") == tmp_path / "tcga_kirc"
    assert found.features_of("TCGA-KIRP") == tmp_path
    assert found.features_of("PANDA") == tmp_path / "p"


@pytest.mark.parametrize(("published", "std"), [(0.72, 0.05), (0.80, 0.01), (0.745, 0.001), (0.80, 0.10)])
@pytest.mark.parametrize("ours", [(0.70, 0.72, 0.75, 0.71, 0.69), (0.70, 0.74), (0.71,)])
def test_the_rule_is_students_test_of_two_samples(published, std, ours):
    spread = np.std(ours, ddof=1) if len(ours) > 1 else 0.0
    p = stats.ttest_ind_from_stats(np.mean(ours), spread, len(ours), published, std, 5).pvalue
    assert judge(ours, published, std).word == ("compatible" if p > 0.05 else "not compatible")


def test_without_a_published_spread_ours_stands_in_for_it():
    ours = [0.70, 0.72, 0.75]
    reach = stats.t.ppf(0.975, 2) * np.std(ours, ddof=1) * np.sqrt(1 / 3 + 1 / 5) + 0.00005
    found = judge(ours, 0.70)
    assert math.isclose(found.high - found.low, 2 * reach)
    assert judge([0.7], 0.9).word == "not judged"


def test_two_seeds_far_off_are_not_called_compatible():
    assert judge([0.32, 0.09], 0.7247, 0.1244).word == "not compatible"


def test_no_spread_leaves_the_printed_digits():
    assert judge([0.71234, 0.71234], 0.7123, 0.0).word == "compatible"
    assert judge([0.7125, 0.7125], 0.7123, 0.0).word == "not compatible"


def test_our_numbers_stand_beside_the_published(tmp_path):
    study = read_studies("survival", FOLDER)[0]
    rows = [("TCGA-KIRC", "NA", str(seed), "c_index", 0.7110 + shift) for seed, shift in ((42, -0.05), (43, 0.05))]
    rows += [("TCGA-KIRC", "Gated SRP, untuned (δ 1, h 64)", "42", "c_index", 0.7)]
    lines = beside_published(study, pd.DataFrame(rows, columns=["cohort", "arm", "seed", "metric", "value"]))
    assert len(lines) == 5 * 5
    first = lines.iloc[0]
    assert (first["published"], first["published_std"], first["verdict"]) == (0.7110, 0.0516, "compatible")
    assert math.isclose(first["difference"], 0, abs_tol=1e-12)
    grid = reproduction_grid(study, lines)
    texts = {name: [entry.text for entry in entries] for name, entries in grid.rows}
    assert texts["NA"] == ["0.7110 ± 0.0707", "–", "–", "–", "–"]
    assert texts["Gated SRP, untuned (δ 1, h 64)"][0] == "0.7000"
    assert grid.rows[1] == ("– published", grid.rows[1][1])
    assert grid.rows[1][1][0].text == "0.7110 ± 0.0516"
    assert grid.rows[2][1][0].text == "+0.0000 (±0.1204) ✓ compatible"
    assert any(note == "Of the published numbers: 1 compatible; 19 not run." for note in grid.notes)
    names = {path.name for path in write_reproduction(tmp_path, study, lines)}
    assert names == {"reproduction.csv", "table.md", "table.tex", "table.csv"}
    assert len((tmp_path / "reproduction.csv").read_text().splitlines()) == 1 + 25


def finished_study(tmp_path, cohorts, present, slides=None):
    study, cells, _ = planned("classification", tmp_path, cohorts=cohorts, seeds=[42, 43])
    for cell in cells:
        finish(cell, macro_f1=0.1 + cell.seed / 1000, accuracy=0.1 + cell.seed / 1000, macro_auc=0.1 + cell.seed / 1000)
        if cell.cohort in (slides or {}):
            (cell.key / "environment.json").write_text(f'{{"slides": {slides[cell.cohort]}}}')
    present = {(cohort, "uni_v2"): count for cohort, count in present.items()}
    return write_study(tmp_path / "t", study, cells, (), Running(), present=present)


@pytest.mark.slow
def test_an_incomplete_cohort_is_counted_and_not_judged(tmp_path):
    # All files of BRACS are there by now, but its runs had fewer.
    present, used = {"CAMELYON16": 40, "BRACS": 547}, {"BRACS": 545}
    found = finished_study(tmp_path, ["CAMELYON16", "BRACS"], present, used)
    lines = found.table[found.table["metric"] == "accuracy"].set_index(["row", "cohort"])
    first, second = (lines.loc[("NA", cohort)] for cohort in ("CAMELYON16", "BRACS"))
    assert (first["verdict"], first["slides"], first["paper_slides"]) == ("incomplete", 40, 270)
    assert (second["verdict"], second["slides"], second["paper_slides"]) == ("incomplete", 545, 546)
    assert math.isnan(first["low"]) and first["difference"] < -0.5
    words = "CAMELYON16: 40 of 270 slides, so its numbers say nothing about the paper's and are not judged"
    table, _, about = found.text.partition("Published:")
    assert ", 40 of 270 slides: not judged" in table and ", 545 of 546 slides: not judged" in table
    assert words in found.text and "compatible" not in table + about.partition("Rule:")[0]
    assert words in (tmp_path / "t" / "comparison" / "README.md").read_text()
    page = report(tmp_path / "t", out=tmp_path / "page.html").path.read_text()
    judged = int((found.table["verdict"] == "incomplete").sum())
    said = f"No number is judged: {judged} are of incomplete cohorts (CAMELYON16: 40 of 270 slides; BRACS: 545 of 546 slides)"
    assert said in page and words.replace("'", "&#39;") in page


@pytest.mark.slow
def test_a_complete_cohort_is_judged(tmp_path):
    found = finished_study(tmp_path, ["BRACS"], {"BRACS": 547}, {"BRACS": 546})
    own = found.table[found.table["cohort"] == "BRACS"]
    assert set(own["verdict"]) == {"not compatible", "not published"} and own["slides"].eq(546).all()
    assert "of 546" not in found.text


def test_a_dry_run_lists_every_cell_and_writes_nothing(tmp_path, monkeypatch):
    import typer

    from gated_srp.cli import studies

    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(studies.reproduce)
    shown = CliRunner().invoke(app, ["survival", "--dry-run"])
    assert shown.exit_code == 0
    lines = shown.output.splitlines()
    assert "100 cells" in lines[0]
    assert sum(line.startswith("  TCGA-") and "untuned" not in line for line in lines) == 100
    assert any("TCGA-KIRP   Gated SRP  " in line and "delta 2, h 32" in line for line in lines)
    assert lines[-1] == "125 distinct runs"
    assert list(tmp_path.iterdir()) == []


def test_runtime_is_measured_cell_by_cell_and_stands_beside_the_authors_numbers(tmp_path, monkeypatch):
    study, cells, _ = planned("runtime", tmp_path, cohorts=["KIRP"])
    assert {(cell.config.train.epochs, cell.unit) for cell in cells} == {(3, "42")}
    speeds = {"peak_reserved_gib": 2.5, "train_wsi_per_second": 1.0, "test_wsi_per_second": 4.0}
    monkeypatch.setattr("gated_srp.study.worker.measure", lambda spec: speeds)
    said = []
    running = Running(progress=lambda event: said.append(event.text))
    found = write_study(tmp_path / "t", study, cells, ("on a laptop",), running)
    assert "peak_reserved_gib 2.500" in said[0] and len(said) == len(cells)
    assert found.text.startswith("**") and "on a laptop" in found.text
    lines = pd.read_csv(tmp_path / "t" / "reproduction.csv", keep_default_na=False)
    own = lines[(lines["cohort"] == "TCGA-KIRP") & (lines["row"] == "NA")]
    assert own[["metric", "mean", "published", "verdict"]].to_numpy().tolist() == [
        ["peak_reserved_gib", "2.5", 2.041, "not judged"],
        ["train_wsi_per_second", "1.0", 1.9189, "not judged"],
    ]
    assert not (tmp_path / "t" / "comparison").exists()


def test_trajectories_and_the_gates_geometry_are_drawn_by_name(tmp_path):
    from study.study_cells import finish

    study, cells, _ = planned("trajectories", tmp_path, seeds=[42])
    for cell in cells:
        finish(cell, gates=(0.1, 0.2), c_index=0.5)
    write_study(tmp_path / "f", study, cells, (), Running())
    assert {path.name for path in (tmp_path / "f").glob("*.svg")} == {
        "trajectories_main.svg",
        "trajectories_survival.svg",
        "trajectories_classification.svg",
    }
    main = (tmp_path / "f" / "trajectories_main.svg").read_text()
    assert all(name in main for name in ("KIRC (1 seed)", "CAM16 (1 seed)", "PANDA (1 seed)"))
    found = write_study(tmp_path / "g", read_studies("signed-gate", FOLDER)[0], [], (), Running())
    assert (tmp_path / "g" / "signed_gate.png") in found.files
    found = write_study(tmp_path / "g", read_studies("redundancy", FOLDER)[0], [], (), Running())
    assert (found.files, found.command) == (
        (),
        "gated-srp redundancy cohort.yaml --images PHOTOGRAPHS --encoder uni_v2 --run RUN",
    )


def test_settings_of_ones_own_are_named_beside_the_judgement(tmp_path):
    (study,) = read_studies("survival", FOLDER)
    _, silent = plan_study(study, sources(tmp_path), cohorts=["KIRP"])
    _, notes = plan_study(study, Sources({}, {}, tmp_path, {"train.epochs": 1}), cohorts=["KIRP"])
    assert not any("set by hand" in note for note in silent)
    assert any("set by hand: train.epochs = 1." in note and "nothing about the paper" in note for note in notes)
