"""Which of a cohort's files are used: two files per slide, `exclude`, the quarantine, and classes that are left."""

import h5py
import numpy as np
import pytest
from factories import make_slide, write_clam, write_h5, write_trident
from typer.testing import CliRunner

from gated_srp.checks.check import check
from gated_srp.cli import app
from gated_srp.config import load_config, open_cohort
from gated_srp.errors import UserError


def cohort(folder, *, slides=8, more="", labels="ab"):
    """A table and a YAML of slides s0, s1 ... whose features are below feats/."""
    rows = "".join(f"s{i},p{i},{labels[i % len(labels)]}\n" for i in range(slides))
    (folder / "table.csv").write_text(f"slide_id,case_id,label\n{rows}")
    text = f"name: test\nfeatures: feats\ntable: table.csv\ntarget: label\nseeds: [42]\n{more}"
    (folder / "cohort.yaml").write_text(text)
    return folder / "cohort.yaml"


def clam_cohort(folder, **settings):
    for i in range(settings.get("slides", 8)):
        write_clam(folder / "feats", f"s{i}", make_slide(i, width=16))
    return cohort(folder, **settings)


def of_kind(found, kind):
    return [note for note in found.notes if note.kind == kind]


# Two files per slide -------------------------------------------------------------------------------------------------


@pytest.fixture
def two_encoders(tmp_path):
    for i in range(8):
        for encoder in ("uni_v2", "conch_v15"):
            path = write_trident(tmp_path / "feats", f"s{i}", make_slide(i, width=16), encoder=encoder)
        write_h5(path.parents[1] / "slide_features_titan" / f"s{i}.h5", features=np.zeros(768, "f4"))
    return tmp_path


def test_features_of_two_encoders_are_one_error_that_names_both_folders_and_the_choice(two_encoders):
    path = cohort(two_encoders)
    said = r"8 slides have two feature files each, in features_conch_v15 and features_uni_v2 \(below .*px_overlap\)"
    with pytest.raises(UserError, match=said) as caught:
        open_cohort(load_config(path))
    chosen = "Set `encoder: conch_v15` or `encoder: uni_v2`, or point `features` at one of the folders."
    assert caught.value.cure == chosen
    found = check(path)
    (note,) = found.errors
    assert (note.kind, note.cure) == ("several_files", chosen)
    (titan,) = of_kind(found, "slide_embeddings")
    assert titan.level == "note" and "8 slide embeddings" in titan.what and "slide_features_titan" in titan.what
    for choice in ("encoder: uni_v2\n", "encoder: conch_v15\n"):
        chosen_one = check(cohort(two_encoders, more=choice))
        assert chosen_one.facts["slides"]["found"] == 8 and not of_kind(chosen_one, "several_files")


def test_folders_that_name_no_encoder_are_chosen_by_their_path(tmp_path):
    for i in range(4):
        for folder in ("first", "second"):
            write_h5(
                tmp_path / "feats" / folder / f"s{i}.h5", features=make_slide(i).features, coords=make_slide(i).cells
            )
    found = check(cohort(tmp_path, slides=4))
    (note,) = found.errors
    assert "4 slides have two feature files each, in first and second (below" in note.what
    assert note.cure == "Point `features` at one of the folders."


def test_slide_embeddings_in_a_folder_of_any_name_are_left_out_too(tmp_path):
    path = clam_cohort(tmp_path, slides=6)
    for i in range(6):
        write_h5(
            tmp_path / "feats" / "from_titan" / f"s{i}.h5", features=np.zeros((1, 768), "f4"), coords=np.zeros((3, 2))
        )
    found = check(path)
    assert not found.errors and found.facts["slides"]["found"] == 6
    (note,) = of_kind(found, "slide_embeddings")
    assert "6 slide embeddings" in note.what and "from_titan" in note.what


def test_one_slide_of_many_that_has_two_files_is_named_with_them(tmp_path):
    path = clam_cohort(tmp_path)
    write_clam(tmp_path / "feats" / "again", "s3", make_slide(3, width=16))
    found = check(path)
    (note,) = found.errors
    assert note.what == "slide s3 has two feature files, so none is used" and len(note.where) == 2
    assert {str(file) for file in found.quarantine} == set(note.where)


# exclude -------------------------------------------------------------------------------------------------------------


def test_excluded_slides_are_left_out_with_a_count_and_the_split_of_the_others_stays(tmp_path):
    whole = open_cohort(load_config(clam_cohort(tmp_path)))
    less = open_cohort(load_config(cohort(tmp_path, more="exclude: [s1, S4.svs]\n")))
    assert sorted(set(whole.matches.found) - set(less.matches.found)) == ["s1", "s4"]
    assert less.split(42).hash == whole.split(42).hash
    assert set(less.slides(42)["slide"]) == set(whole.slides(42)["slide"]) - {"s1", "s4"}
    assert "6 slides matched to files, 0 not, 2 left out by `exclude`; 0 files unused" in map(str, less.notes)
    found = check(tmp_path / "cohort.yaml")
    assert (found.facts["slides"]["found"], found.facts["slides"]["excluded"]) == (6, 2)
    assert not of_kind(found, "missing") and not of_kind(found, "unused")


def test_a_text_file_of_slides_or_of_files_may_be_named(tmp_path):
    path = clam_cohort(tmp_path, more="exclude: lists/out.txt\n")
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "out.txt").write_text(f"# blurred\ns1\n\n{tmp_path}/feats/h5_files/s5.h5\r\n")
    assert sorted(open_cohort(load_config(path)).matches.found) == ["s0", "s2", "s3", "s4", "s6", "s7"]
    (tmp_path / "lists" / "out.txt").write_text("s1\n", encoding="utf-8-sig")  # as Notepad and Excel save it
    assert "s1" not in open_cohort(load_config(path)).matches.found
    with pytest.raises(UserError, match=r"gone\.txt: no such file.*list of slides"):
        open_cohort(load_config(path, {"exclude": str(tmp_path / "gone.txt")}))


def test_an_excluded_name_that_no_slide_has_is_a_warning(tmp_path):
    found = check(clam_cohort(tmp_path, more="exclude: [s1, s99]\n"))
    (note,) = of_kind(found, "exclude")
    assert note.level == "warning" and note.what == "1 entry of `exclude` names no slide and no feature file: s99"


def test_what_the_quarantine_lists_can_be_excluded_and_nothing_is_left_to_fix(tmp_path):
    path = clam_cohort(tmp_path, slides=16)
    (tmp_path / "feats" / "h5_files" / "s1.h5").write_bytes(b"")
    write_clam(tmp_path / "feats", "s2", make_slide(2, width=20))  # another width
    write_trident(tmp_path / "feats", "s3", make_slide(3, width=16), encoder="uni_v2")  # and a second file of s3
    first = check(path, quarantine=tmp_path / "broken.txt")
    assert {note.kind for note in first.errors} == {"zero_bytes", "mixed_widths", "several_files"}
    listed = [line.rsplit("/", 1)[-1] for line in (tmp_path / "broken.txt").read_text().split()]
    assert sorted(listed) == ["s1.h5", "s2.h5", "s3.h5", "s3.h5"]
    again = check(load_config(path, {"exclude": str(tmp_path / "broken.txt")}))
    assert again.errors == () and again.facts["slides"]["found"] == 13


def test_files_of_another_known_encoder_are_in_the_quarantine(tmp_path):
    for i in range(8):
        encoder = "gigapath" if i == 5 else "uni_v2"
        write_trident(tmp_path / "feats", f"s{i}", make_slide(i, width=1536), encoder=encoder)
    found = check(cohort(tmp_path))
    assert [note.kind for note in found.errors] == ["mixed_encoders"]
    assert [file.name for file in found.quarantine] == ["s5.h5"] and "gigapath" in str(found.quarantine[0])


# Classes -------------------------------------------------------------------------------------------------------------


def test_a_cohort_of_one_class_is_an_error_of_check(tmp_path):
    found = check(clam_cohort(tmp_path, labels="a"))
    (note,) = of_kind(found, "one_class")
    assert (
        note.level == "error"
        and note.what == "all 8 slides that can be used are of one class, a: there is nothing to learn"
    )


def test_one_class_may_be_all_that_has_files(tmp_path):
    path = clam_cohort(tmp_path)
    for i in range(1, 8, 2):
        (tmp_path / "feats" / "h5_files" / f"s{i}.h5").unlink()
        (tmp_path / "feats" / "pt_files" / f"s{i}.pt").unlink()
    (note,) = of_kind(check(path), "one_class")
    assert note.what == "all 4 slides that can be used are of one class, a: there is nothing to learn"


def test_a_training_part_without_a_class_is_an_error_and_a_test_part_a_warning(tmp_path):
    path = clam_cohort(tmp_path, slides=12, more="split: split.csv\n")
    parts = {i: ("test" if i < 4 else "val" if i < 6 else "train") for i in range(12)}
    parts |= {7: "test", 9: "test", 11: "test"}
    (tmp_path / "split.csv").write_text("slide_id,split\n" + "".join(f"s{i},{part}\n" for i, part in parts.items()))
    (note,) = [note for note in check(path).errors if note.kind == "split"]
    assert note.what == "no usable slide of class b in train: there is nothing to learn"


def test_pt_files_of_clam_pass_check_and_report_their_positions(tmp_path):
    path = clam_cohort(tmp_path)
    for file in (tmp_path / "feats" / "h5_files").glob("*.h5"):
        with h5py.File(file, "a") as content:
            del content["features"]
    found = check(path)
    assert found.errors == () and found.facts["files"]["usable"] == 8
    assert [one["stride"] for one in found.facts["strides"]] == ["512 px"]


def test_check_says_how_many_folds_an_imported_split_has_and_which_is_used(tmp_path):
    path = clam_cohort(tmp_path, more="split: splits\n")
    (tmp_path / "splits").mkdir()
    for k in range(3):
        rows = [
            f"{i},{a},{b},{c}" for i, (a, b, c) in enumerate([("s0", "s2", "s4"), ("s1", "s3", "s5"), ("s6", "", "")])
        ]
        (tmp_path / "splits" / f"splits_{k}.csv").write_text("\n".join([",train,val,test", *rows]) + "\n")
    notes = [note.what for note in of_kind(check(path), "split") if note.level == "note"]
    assert "fold 0 of the 3 folds of splits is used; `folds: 3` uses all" in notes
    assert "1 slide of the table in no part of the split, left out" in notes


def test_where_no_file_can_be_used_the_split_is_not_blamed(tmp_path):
    path = clam_cohort(tmp_path)
    for file in (tmp_path / "feats" / "h5_files").glob("*.h5"):
        file.write_bytes(b"")
    assert {note.kind for note in check(path).errors} == {"zero_bytes"}


def test_the_command_advises_to_exclude_only_where_something_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # a path that is longer than a line is broken
    path = clam_cohort(tmp_path, slides=24)
    (tmp_path / "feats" / "h5_files" / "s1.h5").write_bytes(b"")
    said = " ".join(CliRunner().invoke(app, ["check", str(path)]).output.split())
    assert "To go on without them: --quarantine broken.txt, then `exclude: broken.txt` in the YAML." in said
    listed = tmp_path / "q.txt"
    said = " ".join(CliRunner().invoke(app, ["check", str(path), "--quarantine", str(listed)]).output.split())
    assert f"To go on without them: `exclude: {listed}` in the YAML." in said and listed.is_file()
    for file in (tmp_path / "feats" / "h5_files").glob("*.h5"):
        file.write_bytes(b"")
    assert "quarantine" not in CliRunner().invoke(app, ["check", str(path)]).output
