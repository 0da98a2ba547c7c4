"""Slides to files."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gated_srp.data.matching import SLIDE_ENDINGS, files_of_cases, match_slides, slide_stem


def test_a_slide_is_found_by_its_stem_whatever_the_endings_on_either_side() -> None:
    matches = match_slides(["a.svs", "b", "c.h5", "d.ndpi"], ["x/a.h5", "x/b.tiff.h5", "x/c.h5", "x/D.pt"])
    assert matches.found == {
        "a.svs": Path("x/a.h5"),
        "b": Path("x/b.tiff.h5"),
        "c.h5": Path("x/c.h5"),
        "d.ndpi": Path("x/D.pt"),
    }
    assert matches.missing == ()
    assert matches.several == {}
    assert matches.shared == {}
    assert matches.unused == ()


@pytest.mark.parametrize("ending", SLIDE_ENDINGS)
def test_every_slide_ending_is_cut_and_dots_inside_the_name_stay(ending: str) -> None:
    assert slide_stem(f"folder/TCGA-X.79F4.v1{ending.upper()}") == "TCGA-X.79F4.v1"


def test_a_tcga_name_without_its_uuid_finds_the_file_with_it_and_the_other_way_round() -> None:
    short, full = "TCGA-3Z-A93Z-01Z-00-DX1", "TCGA-3Z-A93Z-01Z-00-DX1.79F4D1A6-ACDB"
    assert match_slides([short], [f"{full}.h5"]).found == {short: Path(f"{full}.h5")}
    assert match_slides([full], [f"{short}.h5"]).found == {full: Path(f"{short}.h5")}
    assert match_slides([full], [f"{short}.OTHER-UUID.h5"]).missing == (full,)


def test_a_prefix_ends_where_a_word_ends() -> None:
    assert match_slides(["s_1"], ["s_10.h5"]).missing == ("s_1",)
    assert match_slides(["s_1"], ["s_1-again.h5"]).found == {"s_1": Path("s_1-again.h5")}


def test_files_that_are_found_by_how_their_names_begin_are_kept_apart_but_for_tcgas_uuids() -> None:
    uuid = "TCGA-3Z-A93Z-01Z-00-DX1"
    files = ["s_1-again.h5", "t.h5", f"{uuid}.79F4.h5", "v_patches.h5"]
    matches = match_slides(["s_1", "t", uuid, "v"], files)
    assert matches.by_prefix == ("s_1",) and matches.longer == {"s_1": "-again"} and len(matches.found) == 4
    assert matches.report()[1:] == ("s_1: taken from s_1-again.h5, whose name begins so",)
    many = match_slides([f"m{i}" for i in range(9)], [f"m{i}_x.h5" for i in range(9)]).report()
    assert len(many) == 7 and many[5:] == ("m4: taken from m4_x.h5, whose name begins so", "... and 4 more so")
    assert match_slides(["TCGA-3Z-A93Z"], [f"{uuid}.79F4.h5"]).longer == {"TCGA-3Z-A93Z": "-01Z-00-DX1.79F4"}


def test_a_file_named_in_full_by_one_slide_is_out_of_reach_of_another_slides_prefix() -> None:
    matches = match_slides(["s_1", "s_1_b"], ["s_1_b.h5"])
    assert matches.found == {"s_1_b": Path("s_1_b.h5")}
    assert matches.missing == ("s_1",)


def test_trident_coordinates_serve_only_where_no_features_have_the_name() -> None:
    assert match_slides(["a"], ["patches/a_patches.h5"]).found == {"a": Path("patches/a_patches.h5")}
    matches = match_slides(["a"], ["patches/a_patches.h5", "features/a.h5"])
    assert matches.found == {"a": Path("features/a.h5")}
    assert matches.unused == (Path("patches/a_patches.h5"),)


def test_two_files_for_a_slide_and_two_slides_for_a_file_are_reported_and_not_used() -> None:
    matches = match_slides(["a", "b", "b.svs", "c"], ["1/a.h5", "2/a.h5", "b.h5", "left.h5"])
    assert matches.found == {}
    assert matches.several == {"a": (Path("1/a.h5"), Path("2/a.h5"))}
    assert matches.shared == {Path("b.h5"): ("b", "b.svs")}
    assert matches.missing == ("c",)
    assert matches.unused == (Path("left.h5"),)
    report = "\n".join(matches.report())
    assert report.startswith("0 slides matched to files, 4 not; 1 file unused")
    assert "c: no file of this name" in report
    assert "a: 2 files fit (1/a.h5, 2/a.h5)" in report
    assert "b, b.svs: all fit" in report


def test_folders_in_an_id_and_then_case_decide_between_equal_names() -> None:
    files = ["root/p1/s.h5", "root/p2/s.h5", "root/A.h5", "root/a.h5"]
    assert match_slides(["p2/s.h5", "A"], files).found == {"p2/s.h5": Path("root/p2/s.h5"), "A": Path("root/A.h5")}


def test_an_id_that_climbs_names_nothing_outside_the_listing() -> None:
    matches = match_slides(["../../etc/passwd", "/etc/passwd"], ["feats/a.h5"])
    assert matches.found == {}
    assert len(matches.missing) == 2


def test_a_patients_files_start_with_its_id_and_go_to_the_longest_that_fits() -> None:
    owned = files_of_cases(["P1", "P1-2", "p10", "Q"], ["f/P1_a.h5", "f/P1-2_a.h5", "f/P10.h5", "f/P1.h5", "f/X.h5"])
    assert owned == {
        "P1": (Path("f/P1.h5"), Path("f/P1_a.h5")),
        "P1-2": (Path("f/P1-2_a.h5"),),
        "p10": (Path("f/P10.h5"),),
        "Q": (),
    }


NAMES = st.lists(st.text("ab1_-.", min_size=1, max_size=6).filter(lambda n: n.strip(".")), max_size=8, unique=True)


@settings(deadline=None)
@given(NAMES, NAMES)
def test_every_slide_is_in_one_list_and_every_file_is_used_once_or_unused(slides: list[str], names: list[str]) -> None:
    files = [Path(f"{name}.h5") for name in names]
    matches = match_slides(slides, files)
    told = [
        *matches.found,
        *matches.missing,
        *matches.several,
        *[s for group in matches.shared.values() for s in group],
    ]
    assert sorted(told) == sorted(slides)
    assert len(set(matches.found.values())) == len(matches.found)
    assert not set(matches.unused) & (set(matches.found.values()) | set(matches.shared))
    for slide in slides:  # a full name always wins
        twins = [path for path in files if slide_stem(path).lower() == slide_stem(slide).lower()]
        if len(twins) == 1 and slide in matches.found:
            assert matches.found[slide] == twins[0]
