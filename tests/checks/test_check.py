"""`check` names exactly what is wrong, says what to do, and is stopped by nothing."""

import json
import re

import h5py
import numpy as np
import pytest
from broken_files import BROKEN
from factories import (
    make_slide,
    write_atlaspatch,
    write_clam,
    write_clam_pt,
    write_h5,
    write_safetensors,
    write_stamp,
    write_torchmil,
    write_trident,
    write_trident_pt,
)
from training.toy_cohorts import write_cohort, write_yaml
from typer.testing import CliRunner

import gated_srp
import gated_srp.checks.survey as survey_module
from gated_srp.checks.check import check
from gated_srp.checks.findings import facts_in_words
from gated_srp.checks.survey import look_at, survey
from gated_srp.cli import cohorts as commands
from gated_srp.config.cohort import open_cohort
from gated_srp.config.load import load_config
from gated_srp.data.prepared import Preparation
from gated_srp.errors import UserError
from gated_srp.machine import Machine, Trunk

NAMED = (
    *("cut short", "zero bytes", "text renamed .h5", "a slide embedding", "wrong rank", "words for features"),
    *("integers for features", "row mismatch", "no patches", "no positions", "no features", "positions of rank 1"),
    *("a position that is no number", "scattered patches", "an external link", "a 10 GB claim", "pickled code"),
    *("a filter that is missing", "a symlink loop"),
)


def _write_nan(path):
    slide = make_slide(width=16)
    slide.features[3, 1] = np.nan
    return write_h5(path, features=slide.features, coords=slide.cells * 512)


def _good_files(folder, count):
    """Files of nine layouts, all of one width; the encoder, where a file says one, is the same."""
    writers = (
        lambda name, slide: write_trident(folder / "t", name, slide, encoder="mine"),
        lambda name, slide: write_trident(folder / "t20", name, slide, encoder="mine", level0=20),
        lambda name, slide: write_trident_pt(folder / "tp", name, slide, encoder="mine"),
        lambda name, slide: write_atlaspatch(folder / "a", name, slide, encoders={"mine": 16}),
        lambda name, slide: write_clam(folder / "c", name, slide),
        lambda name, slide: write_clam_pt(folder / "cp", name, slide),
        lambda name, slide: write_torchmil(folder / "tm", name, slide),
        lambda name, slide: write_h5(folder / "plain" / f"{name}.h5", features=slide.features, coords=slide.cells),
    )
    for i in range(count):
        yield writers[i % len(writers)](f"slide_{i:03d}", make_slide(i, width=16))


def _cohort(folder, names, *, more="", labels="ab"):
    rows = "".join(f"{name},p{i // 2},{labels[i // 2 % len(labels)]}\n" for i, name in enumerate(names))
    (folder / "table.csv").write_text(f"slide_id,case_id,label\n{rows}")
    path = folder / "cohort.yaml"
    path.write_text(f"name: test\nfeatures: feats\ntable: table.csv\ntarget: label\nseeds: [42, 43]\n{more}")
    return path


def _clam_cohort(folder, slides, **settings):
    names = [write_clam(folder / "feats", f"s{i}", slide).stem for i, slide in enumerate(slides)]
    return load_config(_cohort(folder, names, **settings))


def _noted(found, level="error"):
    return {note.kind: note for note in found.notes if note.level == level}


def test_in_a_mixed_folder_exactly_the_broken_files_are_named_with_a_cure_each(tmp_path):
    feats = tmp_path / "feats"
    good = list(_good_files(feats, 180))
    broken = {}
    for i, name in enumerate(NAMED):
        kind, write = BROKEN[name]
        (feats / "broken").mkdir(exist_ok=True)
        broken[str(write(feats / "broken" / f"broken_{i:02d}.h5"))] = kind
    broken[str(_write_nan(feats / "broken" / "broken_19.h5"))] = "nonfinite"
    config = load_config(_cohort(tmp_path, [*(path.stem for path in good), *(f"broken_{i:02d}" for i in range(20))]))

    found = check(config, deep=True)

    assert len(broken) == 20
    notes = [note for note in found.notes if note.kind not in ("reach", "evidence")]  # of the settings, not of a file
    assert {note.where[0]: note.kind for note in notes} == broken
    assert all(note.level == "error" and len(note.where) == 1 for note in notes)
    assert all(note.cure.endswith((".", "hdf5plugin")) and len(note.cure) > 15 for note in notes)
    assert {str(path) for path in found.quarantine} == set(broken)
    assert found.facts["files"]["usable"] == 180
    assert found.facts["slides"] == {
        **{
            "slides": 200,
            "patients": 100,
            "found": 200,
            "missing": 0,
            "unclear": 0,
            "broken": 20,
            "unused_files": 0,
            "excluded": 0,
        }
    }
    shallow = check(config)
    named = {note.where[0] for note in shallow.notes if note.kind not in ("reach", "evidence")}
    assert named == set(broken) - {str(feats / "broken" / "broken_19.h5")}


@pytest.mark.parametrize("name", [name for name in BROKEN if name not in ("no file", "an unknown ending")])
def test_every_broken_file_is_a_finding_of_its_kind(name, tmp_path):
    kind, write = BROKEN[name]
    path = write(tmp_path / "s1.h5")
    facts = look_at(path, Preparation(), deep=True)
    assert facts.problem.kind == kind
    assert facts.problem.what
    assert facts.problem.cure


def test_a_cure_is_ours_even_where_a_library_speaks_in_sentences(tmp_path):
    facts = look_at(BROKEN["pickled code"][1](tmp_path / "s1.h5"), Preparation())
    assert facts.problem.what.startswith("holds more than tensors")
    assert facts.problem.cure.startswith("Save the features alone")


def test_workers_give_the_same_facts_in_the_same_order(tmp_path):
    files = [*_good_files(tmp_path, 9), BROKEN["cut short"][1](tmp_path / "z.h5")]
    seen = []
    assert survey(files, deep=True, workers=2, progress=seen.append) == [
        look_at(f, Preparation(), deep=True) for f in files
    ]
    assert [event.data.path for event in seen] == files


def test_a_bug_in_reading_is_a_finding_of_one_file(tmp_path, monkeypatch):
    def broken(path, settings):
        raise RuntimeError("no such luck")

    monkeypatch.setattr("gated_srp.checks.survey.open_header", broken)
    facts = look_at(tmp_path / "s.h5", Preparation())
    assert facts.problem.kind == "unreadable"
    assert "RuntimeError: no such luck" in facts.problem.what


def test_counts_strides_and_neighbours_are_those_of_a_hand_made_lattice(tmp_path):
    full = make_slide(columns=4, rows=3, kept=1.1)  # corners 3, edges 5, inner 8: (4 * 3 + 6 * 5 + 2 * 8) / 12
    found = check(write_clam(tmp_path, "s", full).parent)
    assert found.facts["patches"] == {"total": 12, "min": 12, "median": 12, "max": 12}
    assert found.facts["strides"] == [
        {"stride": "512 px", "source": "observed from coordinates, nothing declared", "files": 1}
    ]
    assert found.facts["neighbours"]["mean"]["median"] == pytest.approx(58 / 12)
    assert found.facts["neighbours"]["alone"] == 0
    assert found.ok


def test_a_cap_that_thins_the_lattice_is_told_before_and_after(tmp_path):
    slide = make_slide(columns=8, rows=6, kept=1.1)
    found = check(_clam_cohort(tmp_path, [slide] * 12, more="cap: 24\n"))
    cells = sorted(map(tuple, slide.cells))
    kept = [cells[int(step)] for step in np.linspace(0, 47, 24)]
    near = [sum(max(abs(x - u), abs(y - v)) == 1 for u, v in kept) for x, y in kept]
    assert found.facts["cap"]["files"] == 12
    assert found.facts["cap"]["before"] == pytest.approx((4 * 3 + 20 * 5 + 24 * 8) / 48)
    assert found.facts["cap"]["after"] == pytest.approx(sum(near) / 24)
    assert f"thins the lattice: 6.3 -> {sum(near) / 24:.1f} neighbours" in _noted(found, "warning")["cap"].what


def test_a_cap_that_leaves_no_neighbours_is_one_error_and_breaks_no_file(tmp_path):
    found = check(_clam_cohort(tmp_path, [make_slide(columns=30, rows=30)] * 12, more="cap: 20\n"))
    assert "almost none stay on 12 slides" in _noted(found)["cap"].what
    assert "Raise `cap`" in _noted(found)["cap"].cure
    assert not found.quarantine


def test_a_wrong_stride_that_leaves_no_neighbours_is_an_error(tmp_path):
    config = _clam_cohort(tmp_path, [make_slide(i) for i in range(12)], more="stride: 100\n")
    found = check(config)
    assert [f.kind for f in found.notes if f.level == "error"][:12] == ["no_neighbours"] * 12
    assert "leave stride out" in found.notes[0].cure


def test_mixed_widths_and_encoders_are_errors_that_name_the_minority(tmp_path):
    for i in range(3):
        write_trident(tmp_path, f"s{i}", make_slide(i), encoder="uni_v2")
    odd = write_trident(tmp_path, "s9", make_slide(9, width=8), encoder="gigapath")
    found = _noted(check(tmp_path))
    assert found["mixed_widths"].where == found["mixed_encoders"].where == (str(odd),)
    assert "12 (3 files), 8 (1 file)" in found["mixed_widths"].what
    assert "uni_v2 (3 files), gigapath (1 file)" in found["mixed_encoders"].what


def test_patches_of_several_sizes_of_tissue_are_warned_about(tmp_path):
    write_trident(tmp_path, "a", make_slide(0))  # 512 px at 40x
    write_trident(tmp_path, "b", make_slide(1), level0=20)  # 256 px at 20x: the same tissue
    assert not [note for note in check(tmp_path).notes if note.kind == "mixed_magnifications"]
    slide = make_slide(2)
    odd = write_trident(tmp_path, "c", slide)
    with h5py.File(odd, "a") as file:  # 10x: 1024 px at 40x
        file["coords"][...] = slide.cells * 1024
        file["coords"].attrs.update({"patch_size_level0": 1024, "target_magnification": 10.0})
    found = check(tmp_path)
    (said,) = [note for note in found.notes if note.kind == "mixed_magnifications"]
    assert said.level == "warning" and said.where == (str(odd),)
    assert "128 um (2 files), 256 um (1 file)" in said.what
    assert {file.path.stem: file.stride_um for file in found.files} == {"a": 128.0, "b": 128.0, "c": 256.0}


def test_duplicates_zeros_and_second_lattices_are_warnings(tmp_path):
    slide = make_slide(columns=6, rows=6, kept=1.1)
    cells, features = slide.cells, slide.features
    features[:2] = 0
    write_h5(tmp_path / "twice.h5", features=features[[0, *range(36)]], coords=(cells * 512)[[0, *range(36)]])
    shifted = np.concatenate([cells * 512, cells * 512 + 200])
    write_h5(tmp_path / "two.h5", features=np.ones((72, 12), "f4"), coords=shifted)
    found = check(tmp_path, deep=True)
    assert [note.kind for note in found.notes if note.level == "warning"].count("duplicates") == 1
    found = _noted(found, "warning")
    assert found["duplicates"].where == (str(tmp_path / "twice.h5"),)
    assert found["duplicates"].what.startswith("1 patch with")
    assert found["zero_rows"].what.startswith("3 patches")
    assert found["lattice"].where == (str(tmp_path / "two.h5"),)
    assert "50 %" in found["lattice"].what


def test_slides_without_a_file_with_several_and_files_without_a_slide_are_told(tmp_path):
    slides = [make_slide(i) for i in range(12)]
    config = _clam_cohort(tmp_path, slides)
    write_clam(tmp_path / "feats" / "again", "s3", slides[3])
    (tmp_path / "feats" / "h5_files" / "s5.h5").rename(tmp_path / "feats" / "h5_files" / "other.h5")
    (tmp_path / "feats" / "pt_files" / "s5.pt").unlink()
    found = check(config)
    assert _noted(found, "warning")["missing"].where == ("s5",)
    assert len(_noted(found)["several_files"].where) == 2
    assert _noted(found, "note")["unused"].where == (str(tmp_path / "feats" / "h5_files" / "other.h5"),)
    assert not found.ok


def test_a_file_whose_name_goes_on_after_the_slides_id_is_said_to_be_taken(tmp_path):
    folder = tmp_path / "features"
    for name in ("a", "b-2", "c"):
        write_trident(folder, name, make_slide(0))
    (tmp_path / "t.csv").write_text("slide,case,label\na,1,x\nb,2,y\nc,3,x\n")
    (tmp_path / "c.yaml").write_text("table: t.csv\nfeatures: features\ntarget: label\n")
    (said,) = [note for note in check(tmp_path / "c.yaml").notes if note.kind == "longer_names"]
    assert said.level == "warning" and said.where == ("b",) and "(b: b-2.h5)" in said.what
    assert "b: taken from b-2.h5, whose name begins so" in [
        note.what for note in open_cohort(load_config(tmp_path / "c.yaml")).notes
    ]
    (tmp_path / "t.csv").write_text("slide,case,label\nx,1,x\ny,2,y\n")
    for name in ("x_feats", "y_feats"):  # one habit of naming, not one slide
        write_trident(folder, name, make_slide(0))
    (said,) = [note for note in check(tmp_path / "c.yaml").notes if note.kind == "longer_names"]
    assert said.level == "note" and said.where == ("x", "y")


def test_a_patient_on_both_sides_of_a_split_is_an_error(tmp_path):
    config = _clam_cohort(tmp_path, [make_slide(i) for i in range(12)], more="split: split.csv\n")
    parts = ["train", "test", *["train"] * 6, "val", "val", "test", "test"]
    rows = "".join(f"s{i},{part}\n" for i, part in enumerate(parts))
    (tmp_path / "split.csv").write_text(f"slide_id,split\n{rows}")
    found = check(config)
    error = _noted(found)["split"]
    assert "p0" in error.what + error.cure
    assert not found.ok


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ""),
        ({"metric": "quadratic_kappa"}, ""),
        ({"metric": "nonsense"}, "'nonsense' cannot select"),
        ({"train": {"loss": "huber"}}, "huber"),
        ({"train": {"class_weights": {"tumor": 2.0}}}, "'tumor' is no class. Did you mean 'tumour'?"),
        ({"arms": ["na", "nosuch"]}, "arm 'nosuch' is not known"),
        ({"score": "case"}, "so a case has no single truth"),
        ({"task": "regression", "target": "num", "train": {"sampling": "balanced"}}, "regression has no classes"),
    ],
)
def test_what_train_and_compare_refuse_at_once_is_an_error_of_check(tmp_path, settings, words):
    yaml = write_cohort(tmp_path, slides=16)
    torn = "score" in settings
    rows = [f"s{i:03d},p{i // 2 if torn else i},{('benign', 'tumour')[i % 2]},{i}.5" for i in range(16)]
    (tmp_path / "table.csv").write_text("slide,case,label,num\n" + "\n".join(rows) + "\n")
    config = load_config(write_yaml(tmp_path, **{"target": "label"} | settings))
    found = check(config, seeds=[42])
    assert [words in str(note) for note in found.errors] == ([True] if words else []), found.errors
    if words and "arms" not in settings:
        with pytest.raises(UserError, match=re.escape(words)):
            gated_srp.train(yaml, arm="na", seed=42)


def test_a_part_without_a_class_or_without_slides_is_told(tmp_path):
    config = _clam_cohort(tmp_path, [make_slide(i) for i in range(12)], more="split: split.csv\n")
    parts = ["train", "train", "train", "train", *["test"] * 8]
    rows = "".join(f"s{i},{part}\n" for i, part in enumerate(parts))
    (tmp_path / "split.csv").write_text(f"slide_id,split\n{rows}")
    found = check(config)
    assert {note.what for note in found.errors if note.kind == "split"} == {"no usable slide in val"}
    assert any("no validation part: a tenth of the training patients was drawn" in note.what for note in found.notes)


def test_survival_balance_is_counted_by_patient(tmp_path):
    for i in range(12):
        write_clam(tmp_path / "feats", f"s{i}", make_slide(i))
    rows = "".join(f"s{i},p{i // 2},{100 * (i // 2 + 1)},{int(i < 4)}\n" for i in range(12))
    (tmp_path / "t.csv").write_text(f"slide_id,case_id,time,event\n{rows}")
    (tmp_path / "c.yaml").write_text("name: t\nfeatures: feats\ntable: t.csv\ntask: survival\n")
    found = check(load_config(tmp_path / "c.yaml"))
    labels = found.facts["labels"]
    assert (labels["patients"], labels["events"]) == (6, 2)
    assert labels["follow_up"] == {"min": 100, "median": 350, "max": 600}
    assert labels["follow_up_of_censored"] == {"min": 300, "median": 450, "max": 600}
    assert _noted(found, "warning")["few_events"].what == "only 2 patients with an event"


def test_the_estimate_counts_patches_epochs_arms_and_seeds(tmp_path):
    config = _clam_cohort(tmp_path, [make_slide(i, columns=4, rows=3, kept=1.1) for i in range(40)])
    # The inverse of the landmarks is the same for 12 patches as for 12,000: 24 products of 64 x 64, in 6 heads and 4 blocks.
    linear, inverse = 1.3 * 12 * 2 * (12 * 384**2 * 4 + 12 * 384), 4 * 6 * 24 * 2 * 64**3
    assert Trunk(in_dim=12, landmarks=64).operations(12) == linear + inverse > 2 * linear
    found = check(config, machine=Machine("a machine", rate=linear + inverse, memory=1e6))
    slides = next(iter(found.facts["split"].values()))["slides"]
    forward = 1 + 4 * 0.005  # four blocks have to be called, however little they compute
    epochs = config.train.epochs * (3 * slides["train"] + slides["val"])
    seconds = 5 + forward * (epochs + slides["val"] + slides["test"])  # libraries are imported first
    cost = found.facts["cost"]
    assert cost["run_seconds"] == pytest.approx(seconds)
    assert cost["runs"] == len(config.arms) * 2
    assert cost["comparison_seconds"] == pytest.approx(seconds * cost["runs"])
    assert "a machine has 0.0" in _noted(found, "warning")["memory"].what


def test_a_table_that_cannot_be_read_is_a_finding_and_files_are_still_looked_at(tmp_path):
    config = _clam_cohort(tmp_path, [make_slide(0)])
    (tmp_path / "table.csv").write_text("nothing,here\n1,2\n")
    found = check(config)
    assert _noted(found).keys() == {"cohort"}
    assert found.facts["files"]["looked_at"] == 1


def test_the_quarantine_is_written_whole_or_not_at_all(tmp_path):
    BROKEN["zero bytes"][1](tmp_path / "s1.h5")
    check(tmp_path, quarantine=tmp_path / "out" / "q.txt")
    assert (tmp_path / "out" / "q.txt").read_text() == f"{tmp_path / 's1.h5'}\n"
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        check(tmp_path, quarantine=tmp_path / "taken")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "s1.h5", "taken"]


def _command():
    import typer

    app = typer.Typer()
    app.command("check")(commands.check)
    return app


def test_the_command_exits_with_1_when_something_must_be_fixed_and_writes_json(tmp_path):
    config = _clam_cohort(tmp_path, [make_slide(i) for i in range(40)])
    said = CliRunner().invoke(_command(), [str(tmp_path / "cohort.yaml"), "--json", str(tmp_path / "o.json")])
    assert said.exit_code == 0, said.output
    assert "Ready" in said.output
    assert json.loads((tmp_path / "o.json").read_text())["must_fix"] is False
    with h5py.File(tmp_path / "feats" / "h5_files" / "s7.h5", "a") as file:
        file["features"][2, 2] = np.inf
    deep = CliRunner().invoke(
        _command(), [str(tmp_path / "cohort.yaml"), "--deep", "--quarantine", str(tmp_path / "q")]
    )
    assert deep.exit_code == 1
    assert "1 of " in deep.output
    assert (tmp_path / "q").read_text().endswith("s7.h5\n")
    assert config.name in deep.output


@pytest.mark.parametrize("writer", [write_stamp, write_safetensors])
def test_one_file_of_a_layout_passes(writer, tmp_path):
    writer(tmp_path, "s", make_slide(width=1536))
    assert not check(tmp_path, deep=True).notes


def test_a_check_is_a_table_in_a_notebook_and_the_quarantine_is_a_list(tmp_path):
    BROKEN["zero bytes"][1](tmp_path / "<s1>.h5")
    found = gated_srp.check(str(tmp_path))
    assert not found.ok
    assert [note.kind for note in found.errors] == ["zero_bytes"]
    assert found.quarantine == (tmp_path / "<s1>.h5",)
    assert list(found.to_frame()["level"]) == ["error"]
    assert "not ready, 1 to fix" in found._repr_html_()
    assert "<s1>" not in found._repr_html_()
    assert found.to_json()["findings"][0]["severity"] == "error"  # as check.json has always called it


def test_the_splits_of_other_seeds_can_be_checked(tmp_path):
    config = _clam_cohort(tmp_path, [make_slide(i) for i in range(12)])
    assert list(check(config).facts["split"]) == ["seed 42", "seed 43"]
    assert list(check(config, seeds=[7]).facts["split"]) == ["seed 7"]


def test_a_split_that_all_seeds_share_is_called_one_split(tmp_path):
    config = _clam_cohort(tmp_path, [make_slide(i) for i in range(12)], more="split: split.csv\n")
    parts = ["train"] * 6 + ["val"] * 2 + ["test"] * 4
    (tmp_path / "split.csv").write_text("slide_id,split\n" + "".join(f"s{i},{p}\n" for i, p in enumerate(parts)))
    said = dict(facts_in_words(check(config).facts))["split"]
    assert said.startswith("slides: 6 train, 2 val, 4 test (the same split for both seeds)")
    (tmp_path / "split.csv").unlink()
    own = config.model_copy(update={"split": None})
    assert "4 test (seed 42, one of 2 splits)" in dict(facts_in_words(check(own).facts))["split"]
    assert "4 test (seed 42)" in dict(facts_in_words(check(own, seeds=[42]).facts))["split"]


def _split_line(found):
    return dict(facts_in_words(found.facts))["split"]


def test_patients_are_said_to_be_in_one_part_only_where_they_are_known(tmp_path):
    config = _clam_cohort(tmp_path, [make_slide(i) for i in range(24)])
    known = check(config)
    assert _split_line(known).endswith("; no patient is in two parts")
    assert dict(facts_in_words(known.facts))["slides"].startswith(
        "24 slides of 12 patients in the table; 24 with a file"
    )
    (tmp_path / "table.csv").write_text((tmp_path / "table.csv").read_text().replace("case_id", "Block"))
    unknown = check(config)
    assert _split_line(unknown).endswith("; the patients are not known, so one may be in two parts")
    assert dict(facts_in_words(unknown.facts))["slides"].startswith("24 slides in the table; ")
    assert "'Block' (12 values in 24 rows)" in _noted(unknown, "warning")["patients"].what
    chosen = check(config.model_copy(update={"case": "none"}))
    assert _split_line(chosen).endswith("; each slide counts as its own patient, as chosen")
    assert "patients" not in _noted(chosen, "warning")
    assert any(line.startswith("case: none, as chosen") for line in chosen.facts["labels"]["notes"])


def test_one_row_per_patient_under_slide_is_cured_by_case_and_not_by_deleting(tmp_path):
    for i in range(24):
        write_clam(tmp_path / "feats", f"P{i // 2:02d}_{i % 2}", make_slide(i))
    rows = "".join(f"P{i:02d},{'ab'[i % 2]}\n" for i in range(12))
    (tmp_path / "table.csv").write_text(f"ID,label\n{rows}")
    text = "features: feats\ntable: table.csv\ntarget: label\nseeds: [42]\n"
    (tmp_path / "cohort.yaml").write_text(f"{text}slide: ID\n")
    cure = "If each row is a patient with several slides, write `case: ID` instead of `slide: ID` in the YAML."
    (none,) = check(tmp_path / "cohort.yaml").errors
    assert none.cure == cure and none.what == "slide P00 has two feature files, so none is used"
    for i in range(6):  # half of the patients have one
        (tmp_path / "feats" / "h5_files" / f"P{i:02d}_1.h5").unlink()
        (tmp_path / "feats" / "pt_files" / f"P{i:02d}_1.pt").unlink()
    found = check(tmp_path / "cohort.yaml")
    several = [note for note in found.errors if note.kind == "several_slides"]
    assert len(several) == 6 and {note.cure for note in several} == {cure}
    assert not found.quarantine  # nobody is told to move these away
    (tmp_path / "cohort.yaml").write_text(f"{text}case: ID\n")
    found = check(tmp_path / "cohort.yaml")
    assert found.facts["slides"]["slides"] == 18 and found.facts["slides"]["patients"] == 12
    assert not [note for note in found.notes if note.kind.startswith("several")]


def test_what_a_cache_would_save_is_said_where_files_are_compressed_or_steps_would_wait(tmp_path, monkeypatch):
    config = _clam_cohort(tmp_path, [make_slide(i, columns=4, rows=3, kept=1.1) for i in range(40)])
    asked = []

    def measured(facts, settings):
        asked.append({file.path.stem for file in facts})
        return 0.1, 0.01  # seconds per patch: reading, copying

    monkeypatch.setattr("gated_srp.checks.check.reading_seconds", measured)
    slow = Machine("slow", rate=1e6, memory=1e12)
    assert "reading" not in {note.kind for note in check(config, machine=slow).notes}  # hidden behind the steps
    found = check(config, machine=Machine("fast", rate=1e15, memory=1e12))
    slides = next(iter(found.facts["split"].values()))["slides"]
    number = slides["train"] + slides["val"]
    note = _noted(found, "warning")["reading"]
    assert f"takes about {number * 12 * 0.1:.0f} s per epoch" in note.what and "steps wait" in note.what
    assert f"saves about {number * 12 * 0.09:.0f} s per epoch" in note.cure and len(asked[-1]) == number
    for path in (tmp_path / "feats").rglob("*.h5"):
        with h5py.File(path) as file:
            arrays = {
                name: (np.zeros_like(data[()]) if name == "features" else data[()]) for name, data in file.items()
            }
            attributes = {name: dict(data.attrs) for name, data in file.items()}
        with h5py.File(path, "w") as file:
            for name, array in arrays.items():
                file.create_dataset(
                    name, data=np.tile(array, (1, 200)) if name == "features" else array, compression="gzip"
                )
                file[name].attrs.update(attributes[name])
    note = _noted(check(config, machine=slow), "note")["reading"]
    assert f"{number} of {number} files are compressed" in note.what and "steps wait" not in note.what
    kept = config.model_copy(update={"cache": config.cache.model_copy(update={"folder": tmp_path / "cache"})})
    before = len(asked)
    assert "reading" not in {note.kind for note in check(kept, machine=slow).notes} and len(asked) == before


def test_reading_is_measured_on_files_of_middle_length(tmp_path, monkeypatch):
    files = [write_clam(tmp_path, f"s{n}", make_slide(n, columns=n, rows=n, kept=1.1)) for n in (3, 4, 5, 6, 7, 8)]
    opened = []
    real = survey_module.prepare
    monkeypatch.setattr(survey_module, "prepare", lambda path, settings: opened.append(path) or real(path, settings))
    clock = iter(range(100))
    monkeypatch.setattr(survey_module.time, "perf_counter", lambda: next(clock))
    facts = survey_module.survey(files)
    assert survey_module.reading_seconds(facts, Preparation(), tried=2) == (2 / (36 + 49), 2 / (36 + 49))
    assert opened == files[3:5]
