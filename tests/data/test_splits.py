"""Splits: the published rules against plain loops, a user's own, and other tools' files."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from factories import peak
from hypothesis import given, settings
from hypothesis import strategies as st

from gated_srp.data import published as published_splits
from gated_srp.data.exported_splits import export_splits
from gated_srp.data.imported_splits import count_folds, import_split
from gated_srp.data.splits import (
    Split,
    assign_parts,
    balanced_parts,
    case_groups,
    hold_out,
    k_folds,
    nearest_part,
    own_split,
    site_folds,
    validation_part,
    write_split,
)
from gated_srp.data.table import Table
from gated_srp.errors import UserError


def classification(cases: list[str], labels: list[int], sites: list[str] | None = None) -> Table:
    frame = pd.DataFrame({"slide": [f"s{i:03}" for i in range(len(cases))], "case": cases, "label": labels})
    if sites is not None:
        frame["site"] = sites
    return Table(frame, "classification", tuple(map(str, range(max(labels) + 1))))


def survival(times: list[float], events: list[int]) -> Table:
    cases = [f"c{i:03}" for i in range(len(times))]
    return Table(pd.DataFrame({"slide": cases, "case": cases, "time": times, "event": events}), "survival")


def test_hold_out_equals_a_plain_loop_over_the_rule() -> None:
    groups = {f"u{i:03}": "ba"[i % 2] if i < 50 else "c" for i in range(73)} | {"x1": "d", "x2": "d", "y": "e"}
    rng, wanted = np.random.default_rng(7), {}
    for group in ["a", "b", "c", "d", "e"]:
        units = [unit for unit in sorted(groups) if groups[unit] == group]
        rng.shuffle(units)
        n = len(units)
        test = 0 if n <= 2 else min(max(1, round(0.2 * n)), n - 2)
        rest = units[test:]
        val = 0 if len(rest) <= 1 else min(max(1, round(0.1 * len(rest))), len(rest) - 1)
        for i, unit in enumerate(units):
            wanted[unit] = "test" if i < test else "val" if i < test + val else "train"
    assert hold_out(dict(sorted(groups.items())), 7) == wanted
    sizes = Counter((group, hold_out(groups, 7)[unit]) for unit, group in groups.items())
    # 25 units: 5 test, 2 of 20 val. 23: round(4.6) = 5, round(1.8) = 2. Two: one val, one train. One: train.
    assert [sizes["a", p] for p in ("test", "val", "train")] == [5, 2, 18]
    assert [sizes["c", p] for p in ("test", "val", "train")] == [5, 2, 16]
    assert [sizes["d", p] for p in ("test", "val", "train")] == [0, 1, 1]
    assert [sizes["e", p] for p in ("test", "val", "train")] == [0, 0, 1]


def test_survival_split_equals_a_plain_loop_over_the_rule() -> None:
    rng = np.random.default_rng(0)
    table = survival(rng.integers(1, 60, 80).astype(float).tolist(), rng.integers(0, 2, 80).tolist())
    times = dict(zip(table.frame["case"], table.frame["time"], strict=True))
    edges = sorted(set(np.quantile(list(times.values()), [0.25, 0.5, 0.75])))
    names = {
        c: f"event{e}_time{sum(edge <= times[c] for edge in edges)}"
        for c, e in table.frame[["case", "event"]].to_numpy()
    }
    if min(Counter(names.values()).values()) < 5:
        names = {case: name.split("_")[0] for case, name in names.items()}

    def first_hand(cases: list[str], hands: int, seed: int) -> set[str]:
        draw, hand = np.random.default_rng(seed), set()
        for name in sorted({names[case] for case in cases}):
            members = sorted(case for case in cases if names[case] == name)
            draw.shuffle(members)
            hand |= {case for i, case in enumerate(members) if i % hands == 0}
        return hand

    test = first_hand(list(names), 5, 43)
    val = first_hand([case for case in names if case not in test], 8, 43_017)
    split = published_splits.by_event_and_time(table, 43)
    assert split.parts == {case: "test" if case in test else "val" if case in val else "train" for case in names}
    assert own_split(table, 43).parts == split.parts


def test_survival_strata_are_events_alone_where_quarters_would_be_too_small() -> None:
    fine = case_groups(survival([float(i) for i in range(1, 41)], [0, 1] * 20))
    # edges 10.75, 20.5, 30.25: quarters of ten, five of each event
    assert (fine["c000"], fine["c009"], fine["c010"], fine["c039"]) == (
        "event0_time0",
        "event1_time0",
        "event0_time1",
        "event1_time3",
    )
    coarse = case_groups(survival([float(i) for i in range(1, 40)], [0, 1] * 19 + [0]))
    assert set(coarse.values()) == {"event0", "event1"}


def test_a_time_on_an_edge_counts_to_the_later_quarter() -> None:
    strata = case_groups(survival([1.0] * 10 + [2.0] * 20 + [3.0] * 10, [1] * 40))  # edges 1.75, 2, 2.25
    assert [strata[c] for c in ("c000", "c010", "c039")] == ["event1_time0", "event1_time2", "event1_time3"]


def test_balanced_parts_share_classes_and_visit_the_rarest_first() -> None:
    vectors = {"a": np.array([4.0, 0]), "b": np.array([4.0, 0]), "c": np.array([0, 1.0]), "d": np.array([0, 1.0])}
    assert [sorted(part) for part in balanced_parts(vectors, 2)] == [["a", "c"], ["b", "d"]]
    assert nearest_part([["a"], ["c", "d"], []], vectors) == ["c", "d"]


def test_validation_takes_every_class_before_it_takes_the_right_size() -> None:
    vectors = {"a": np.array([9.0, 0]), "b": np.array([40.0, 5]), "c": np.array([41.0, 5])}  # a tenth is 9 and 1
    assert validation_part([["a"], ["b"], ["c"]], vectors) == ["b"]
    assert nearest_part([["a"], ["b"], ["c"]], vectors) == ["a"]


def naive_greedy(vectors: dict[str, np.ndarray], parts: int, seed: int) -> list[list[str]]:
    """The published rule to the letter, with the draws that decide nothing."""
    rng = np.random.default_rng(seed)
    total = sum(vectors.values())
    n = total.sum()
    rng.permutation(sorted(vectors))
    order = sorted(
        vectors, key=lambda i: (-sum(vectors[i] / np.maximum(total, 1)), -(vectors[i] > 0).sum(), -vectors[i].sum(), i)
    )
    held, chosen = np.zeros((parts, len(total))), [[] for _ in range(parts)]
    for unit in order:
        rng.permutation(parts)
        scores = []
        for part in range(parts):
            trial = held.copy()
            trial[part] = trial[part] + vectors[unit]
            sizes = trial.sum(1)
            classes = ((trial - total / parts) ** 2 / (total / parts + 1)).sum()
            scores.append((classes + 0.05 * ((sizes - n / parts) ** 2 / (n / parts + 1)).sum(), sizes[part], part))
        best = min(scores)[2]
        held[best] += vectors[unit]
        chosen[best].append(unit)
    return chosen


def test_bracs_rule_equals_the_rule_to_the_letter() -> None:
    rng = np.random.default_rng(3)
    table = classification([str(i) for i in rng.integers(0, 50, 200)], rng.integers(0, 7, 200).tolist())
    vectors = {c: np.bincount(g, minlength=7).astype(float) for c, g in table.frame.groupby("case")["label"]}
    for seed in (42, 46):
        test = naive_greedy(vectors, 5, seed)[seed % 5]
        rest = {case: vector for case, vector in vectors.items() if case not in test}
        pool = sum(rest.values())
        keys = []
        for part in naive_greedy(rest, 10, seed * 1000 + 17):
            count = sum((rest[case] for case in part), np.zeros(7))
            missing, size, wanted = int((count == 0).sum()), count.sum(), 0.1 * pool.sum()
            off = sum(abs(c - t) / (t + 1) for c, t in zip(count, 0.1 * pool, strict=True))
            key = 1000 * missing + off + 0.25 * abs(size - wanted) / (wanted + 1)
            keys.append((key, missing, abs(size - round(wanted)), sorted(part)))
        val = min(keys)[3]
        told = published_splits.by_label_vector(table, seed).parts
        assert told == {case: "test" if case in test else "val" if case in val else "train" for case in vectors}


def test_bracs_rule_keeps_patients_whole_and_turns_the_test_part_with_the_seed() -> None:
    rng = np.random.default_rng(1)
    table = classification([str(i) for i in rng.integers(0, 40, 160)], rng.integers(0, 7, 160).tolist())
    tests = []
    for seed in range(42, 47):
        split = published_splits.by_label_vector(table, seed)
        parts = assign_parts(split, table)
        assert set(parts) == {"train", "val", "test"}
        assert (abs(parts.value_counts()["test"] - 32)) <= 3
        tests.append({case for case, part in split.parts.items() if part == "test"})
    assert sum(map(len, tests)) == len(set().union(*tests)) == table.frame["case"].nunique()  # five parts, no overlap


def test_a_patients_group_is_the_class_of_most_slides_and_ties_go_to_the_higher() -> None:
    table = classification(["p", "p", "p", "q", "q", "r"], [0, 0, 2, 0, 1, 2])
    assert case_groups(table) == {"p": "0", "q": "1", "r": "2"}


def test_with_several_labels_a_patients_group_is_the_rarest_it_has() -> None:
    frame = pd.DataFrame({"slide": list("abcd"), "case": list("ppqr"), "A": [1, 0, 1, 0], "B": [0, 1, 0, 0]})
    assert case_groups(Table(frame, "multilabel", ("A", "B"))) == {"p": "B", "q": "A", "r": "none"}


PATIENTS = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 2), st.integers(0, 4)), min_size=6, max_size=60)


@settings(deadline=None)
@given(PATIENTS, st.integers(0, 1000))
def test_no_patient_and_no_site_ever_crosses(rows: list[tuple[int, int, int]], seed: int) -> None:
    site_of = {patient: site for patient, _, site in rows}
    table = classification(
        [f"p{p}" for p, _, _ in rows], [label for _, label, _ in rows], [f"h{site_of[p]}" for p, _, _ in rows]
    )
    cases, sites = table.frame["case"], table.frame["site"]
    for split in (own_split(table, seed), *(k_folds(table, 2, seed) if cases.nunique() > 1 else ())):
        assert set(split.parts) == set(cases)
        assert assign_parts(split, table).notna().all()
    if cases.nunique() >= 3:
        folds = k_folds(table, 3, seed)
        tested = [case for split in folds for case, part in split.parts.items() if part == "test"]
        assert sorted(tested) == sorted(set(cases))
        sizes = [split.counts["test"] for split in folds]
        assert max(sizes) - min(sizes) <= 1
    if sites.nunique() >= 2:
        folds = site_folds(table, 2, seed)
        for split in folds:
            parts = assign_parts(split, table)
            in_test = set(sites[parts == "test"])
            assert in_test
            assert not in_test & set(sites[parts != "test"])
            if sites.nunique() - len(in_test) > 1:
                assert not set(sites[parts == "val"]) & set(sites[parts == "train"])
        assert set(sites[assign_parts(folds[0], table) == "test"]) | set(
            sites[assign_parts(folds[1], table) == "test"]
        ) == set(sites)


def test_folds_are_stratified() -> None:
    table = classification([f"p{i:02}" for i in range(40)], [int(i < 10) for i in range(40)])
    for split in k_folds(table, 5, 42):
        tested = [case for case, part in split.parts.items() if part == "test"]
        assert Counter(int(case[1:]) < 10 for case in tested) == {True: 2, False: 6}


def test_a_cohort_too_small_to_split_says_so() -> None:
    split = own_split(classification(["p", "q"], [0, 1]), 42)
    assert split.counts == {"train": 2, "val": 0, "test": 0}
    assert [(note.level, note.what) for note in split.notes] == [
        ("warning", "no patient in val, test: the cohort is too small for this split")
    ]


def test_too_many_folds_and_missing_or_double_sites_are_users_errors() -> None:
    table = classification(["p", "q", "r"], [0, 1, 0])
    with pytest.raises(UserError, match="4 folds of 3 patients"):
        k_folds(table, 4, 42)
    with pytest.raises(UserError, match="need the site of every slide"):
        site_folds(table, 2, 42)
    with pytest.raises(UserError, match=r"1 patient with slides of several sites \(p\)"):
        site_folds(classification(["p", "p", "q"], [0, 1, 0], ["x", "y", "x"]), 2, 42)


# The file


def test_a_split_is_written_sorted_and_its_hash_does_not_depend_on_order(tmp_path: Path) -> None:
    split = Split("slide_id", {"b": "test", "a,1": "train"}, "x")
    write_split(split, tmp_path / "deep" / "split.csv")
    assert (tmp_path / "deep" / "split.csv").read_text() == 'slide_id,split\n"a,1",train\nb,test\n'
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["split.csv"]
    assert split.hash == Split("other", {"a,1": "train", "b": "test"}, "y").hash
    assert split.hash != replace(split, parts={"b": "val", "a,1": "train"}).hash
    assert split.counts == {"train": 1, "val": 0, "test": 1}


def test_a_split_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "split.csv").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        write_split(Split("slide_id", {"a": "train"}, "x"), tmp_path / "split.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["split.csv"]


def test_a_patient_in_two_parts_is_refused_by_name() -> None:
    table = classification(["p", "p", "q"], [0, 1, 0])
    with pytest.raises(UserError, match=r"1 patient in more than one part \(p\)"):
        assign_parts(Split("slide_id", {"s000": "train", "s001": "test", "s002": "train"}, "x"), table)
    with pytest.raises(UserError, match="none of its slide_ids is in the table"):
        assign_parts(Split("slide_id", {"z": "train"}, "x"), table)


# Other tools' files

TABLE = Table(
    pd.DataFrame({"slide": ["a.svs", "b", "c", "d", "e"], "case": ["p", "p", "q", "r", "t"], "label": [0, 0, 1, 0, 1]}),
    "classification",
    ("0", "1"),
)
BY_SLIDE = {"a.svs": "train", "b": "train", "c": "val", "d": "test", "e": "train"}
BY_CASE = {"p": "train", "q": "val", "r": "test", "t": "train"}


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("splits_0.csv", ",train,val,test\n0,a,c,d\n1,b,,\n2,e,,\n", BY_SLIDE),
        (
            "splits_0_bool.csv",
            ",train,val,test\na,True,False,False\nb,True,False,False\nc,False,True,False\nd,False,False,True\ne,True,False,False\n",
            BY_SLIDE,
        ),
        ("splits_0.csv", ",train,val,test\n0,p,q,r\n1,t,,\n", BY_CASE),
        (
            "k=all.tsv",
            "case_id\tslide_id\ty\tfold_0\np\ta\t0\ttrain\np\tb\t0\ttrain\nq\tc\t1\tval\nr\td\t0\ttest\nt\te\t1\ttrain\n",
            BY_SLIDE,
        ),
        ("split.csv", "slide_id,split\nA.SVS,Training\nb,train\nc,Validation\nd,Testing\ne,train\n", BY_SLIDE),
        ("split.csv", "patient_id,split\np,train\nq,val\nr,test\nt,train\n", BY_CASE),
    ],
)
def test_other_tools_files_are_read_in_the_tables_own_ids(
    tmp_path: Path, name: str, text: str, wanted: dict[str, str]
) -> None:
    (tmp_path / name).write_text(text)
    split = import_split(tmp_path / name, TABLE)
    assert split.parts == wanted
    assert split.by_slide == (wanted is BY_SLIDE)
    assert split.notes == ()


def test_our_own_file_comes_back_with_the_same_hash(tmp_path: Path) -> None:
    split = own_split(TABLE, 42)
    write_split(split, tmp_path / "split.csv")
    again = import_split(tmp_path / "split.csv", TABLE)
    assert (again.hash, again.unit) == (split.hash, "case_id")


def test_folds_are_chosen_by_number(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "slide_id,fold_0,fold_1\na,train,test\nb,train,test\nc,val,val\nd,test,train\ne,train,train\n"
    )
    assert import_split(tmp_path / "t.csv", TABLE, fold=1).parts["a.svs"] == "test"
    (tmp_path / "splits_0.csv").write_text(",train,val,test\n0,p,q,r\n1,t,,\n")
    (tmp_path / "splits_1.csv").write_text(",train,val,test\n0,r,q,p\n1,t,,\n")
    assert import_split(tmp_path, TABLE, fold=1).parts["p"] == "test"
    with pytest.raises(UserError, match="no column train, fold_2 or split"):
        import_split(tmp_path / "t.csv", TABLE, fold=2)
    with pytest.raises(UserError, match=r"no train.csv, splits_7.csv"):
        import_split(tmp_path, TABLE, fold=7)


def test_a_panther_folder_is_read(tmp_path: Path) -> None:
    fold = tmp_path / "TASK_k=0"
    fold.mkdir()
    (fold / "train.csv").write_text("case_id,slide_id\np,a.svs\np,b\nt,e\n")
    (fold / "val.csv").write_text("case_id,slide_id\nq,c\n")
    (fold / "test.csv").write_text("case_id,slide_id\nr,d\n")
    assert import_split(fold, TABLE).parts == BY_SLIDE
    assert import_split(tmp_path, TABLE, fold=0).parts == BY_SLIDE


def test_stamp_folds_get_a_validation_part_drawn_from_training_patients(tmp_path: Path) -> None:
    table = classification([f"p{i:02}" for i in range(30)], [i % 2 for i in range(30)])
    test = [f"p{i:02}" for i in range(6)]
    train = [f"p{i:02}" for i in range(6, 30)]
    path = tmp_path / "splits.json"
    path.write_text(json.dumps({"splits": [{"train_patients": train, "test_patients": test}]}))
    split = import_split(path, table)
    assert split.counts == {"train": 22, "val": 2, "test": 6}
    assert {case for case, part in split.parts.items() if part == "test"} == set(test)
    assert "no validation part" in split.notes[-1].what
    with pytest.raises(UserError, match="fold 3"):
        import_split(path, table, fold=3)
    path.write_text("{]")
    with pytest.raises(UserError, match=r"not a splits.json of STAMP"):
        import_split(path, table)


def test_survpath_files_of_train_and_val_test_on_their_val(tmp_path: Path) -> None:
    table = classification([f"p{i:02}" for i in range(30)], [i % 2 for i in range(30)])
    rows = "".join(f"{i},p{i:02},{f'p{i + 24:02}' if i < 6 else ''}\n" for i in range(24))
    (tmp_path / "splits_0.csv").write_text(",train,val\n" + rows)
    split = import_split(tmp_path / "splits_0.csv", table)
    assert {case for case, part in split.parts.items() if part == "test"} == {f"p{i}" for i in range(24, 30)}
    assert split.counts["val"] == 2
    assert "its val is read as test" in split.notes[0].what


def test_numbers_that_pandas_wrote_with_a_point_are_the_tables_ids(tmp_path: Path) -> None:
    table = classification([f"{1000 + i}" for i in range(30)], [i % 2 for i in range(30)])
    table.frame["slide"] = [str(10 + i) for i in range(30)]
    columns = [pd.Series(range(10, 30)), pd.Series(range(30, 35)), pd.Series(range(35, 40))]
    pd.concat(columns, axis=1, keys=["train", "val", "test"]).to_csv(tmp_path / "splits_0.csv")
    assert "30.0" in (tmp_path / "splits_0.csv").read_text()  # beside gaps pandas has no whole numbers
    split = import_split(tmp_path / "splits_0.csv", table)
    assert split.parts == {str(i): "train" if i < 30 else "val" if i < 35 else "test" for i in range(10, 40)}
    assert split.notes == ()


def test_slides_of_one_name_in_two_folders_keep_their_own_parts(tmp_path: Path) -> None:
    table = classification([f"p{i}" for i in range(8)], [0, 1] * 4)
    table.frame["slide"] = [f"site{'AB'[i % 2]}/{i // 2}.svs" for i in range(8)]
    parts = dict(
        zip(table.frame["slide"], ["train", "test", "val", "train", "test", "val", "train", "train"], strict=True)
    )
    for layout, name in (("clam", "splits_0.csv"), ("patho-bench", "k=all.tsv")):
        export_splits([Split("slide_id", parts, "")], table, tmp_path, layout)
        back = import_split(tmp_path / name, table)
        assert back.parts == parts and back.notes == ()
    del parts["siteB/3.svs"]
    write_split(Split("slide_id", parts, ""), tmp_path / "split.csv")
    some = import_split(tmp_path / "split.csv", table)
    assert some.parts == parts and [note.what for note in some.notes] == [
        "1 slide of the table in no part of the split, left out"
    ]
    (tmp_path / "s.csv").write_text("slide_id,split\nsiteA/0,train\nsiteC/0,test\nx/siteB/0,val\n1,val\n")
    with pytest.raises(UserError, match=r"'1' may be any of siteA/1.svs, siteB/1.svs. Write these ids as the table"):
        import_split(tmp_path / "s.csv", table)


def test_strangers_and_absent_slides_are_counted(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text("slide_id,split\na,train\nc,val\nd,test\nzzz,train\n")
    assert [note.what for note in import_split(tmp_path / "s.csv", TABLE).notes] == [
        "1 of its 4 ids not in the table, left out",
        "2 slides of the table in no part of the split, left out",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slide_id,split\na,train\nb,test\nc,val\n", r"1 patient in more than one part \(p\)"),
        ("slide_id,split\nc,train\nC.svs,test\n", r"1 id in more than one part \(c\)"),
        ("slide_id,split\na,training set\n", "'training set'"),
        ("slide_id,split\nzzz,train\n", "is a slide or a patient of the table"),
        ("slide_id,label\na,1\n", "names no parts"),
        (
            "slide_id,split\na,train\nc,val\nx,test\ny,test\n",
            r"none of its ids in test \(e.g. 'x'\) is a slide of the t",
        ),
    ],
)
def test_an_imported_split_that_cannot_be_trusted_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "s.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        import_split(tmp_path / "s.csv", TABLE)


def test_adp_row_files_give_the_parts_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    table = Table(
        pd.DataFrame({"slide": list("abcdef"), "case": list("abcdef"), "X": [0, 1] * 3}), "multilabel", ("X",)
    )
    for name, rows in (("train", [5, 0, 1]), ("valid", [2]), ("test", [3, 4])):
        np.save(tmp_path / f"{name}.npy", np.array(rows))
    split = published_splits.from_row_files(table, tmp_path)
    assert split.parts == {"f": "train", "a": "train", "b": "train", "c": "val", "d": "test", "e": "test"}
    assert assign_parts(split, table).tolist() == ["train", "train", "val", "test", "test", "train"]
    for rows, message in (([1], "named twice"), ([9], "row numbers run to 9"), ([0.5], "list of row numbers")):
        np.save(tmp_path / "test.npy", np.array(rows))
        with pytest.raises(UserError, match=message):
            published_splits.from_row_files(table, tmp_path)
    np.save(tmp_path / "test.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="list of row numbers"):
        published_splits.from_row_files(table, tmp_path)
    claim = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000,), }\n"
    for damaged in (
        b"no array",
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff{",  # a header of 4 GB
        b"\x93NUMPY\x01\x00" + bytes([len(claim), 0]) + claim + bytes(16),
        b"\x93NUMPY\x01\x00\x08\x00{'descr'",
    ):
        (tmp_path / "test.npy").write_bytes(damaged)
        before = peak()
        with pytest.raises(UserError, match="cannot be read"):
            published_splits.from_row_files(table, tmp_path)
        assert peak() - before < 2**31


class Malice:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran"),))


def test_adp_row_files_of_pickled_numbers_are_read_and_pickled_code_is_not_run(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    table = Table(pd.DataFrame({"slide": list("abcd"), "case": list("abcd"), "X": [0, 1] * 2}), "multilabel", ("X",))
    pickled = {"train": [np.int64(3), 0], "valid": [1], "test": [np.int32(2)]}
    for name, rows in pickled.items():
        np.save(tmp_path / f"{name}.npy", np.array(rows, dtype=object), allow_pickle=True)
    split = published_splits.from_row_files(table, tmp_path)
    assert split.parts == {"d": "train", "a": "train", "b": "val", "c": "test"}
    np.save(tmp_path / "test.npy", np.array([Malice()], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=r"test\.npy: .*not opened, since that would run their code"):
        published_splits.from_row_files(table, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_parts_of_another_size_than_adps_are_spoken_of(tmp_path: Path) -> None:
    count = 17_668
    names = [f"{number:05}" for number in range(count)]
    table = Table(pd.DataFrame({"slide": names, "case": names, "X": [0, 1] * (count // 2)}), "multilabel", ("X",))
    for sizes, said in (((14_134, 1767, 1767), ()), ((14_000, 1901, 1767), ("14,000 / 1,901 / 1,767",))):
        rows = np.split(np.arange(count), np.cumsum(sizes)[:2])
        for name, part in zip(("train", "valid", "test"), rows, strict=True):
            np.save(tmp_path / f"{name}.npy", part)
        notes = published_splits.from_row_files(table, tmp_path).notes
        assert len(notes) == len(said) and all(part in note.what for part, note in zip(said, notes, strict=True))


def _clam_folds(folder):
    for k in range(4):
        (folder / f"splits_{k}.csv").write_text(",train,val,test\n0,s1,s2,s3\n")
        (folder / f"splits_{k}_bool.csv").write_text(",train,val,test\ns1,True,False,False\n")
        (folder / f"splits_{k}_descriptor.csv").write_text(",train\n")
    return folder


def _panther_folds(folder):
    for k in range(3):
        (folder / f"TCGA_KIRC_overall_survival_k={k}").mkdir()
    return folder


def _stamp_folds(folder):
    (folder / "splits.json").write_text('{"splits": [{}, {}]}')
    return folder / "splits.json"


def _columns(folder, text):
    (folder / "k=all.tsv").write_text(text)
    return folder / "k=all.tsv"


@pytest.mark.parametrize(
    ("write", "number"),
    [
        (_clam_folds, 4),
        (_panther_folds, 3),
        (_stamp_folds, 2),
        (lambda folder: _columns(folder, "slide_id\tfold_0\tfold_1\ns1\ttrain\ttest\n"), 2),
        (lambda folder: _columns(folder, "slide_id\tsplit\ns1\ttrain\n"), 1),
        (lambda folder: folder / "gone.csv", 1),
    ],
)
def test_the_folds_of_every_form_of_split_are_counted(write, number, tmp_path):
    assert count_folds(write(tmp_path)) == number
