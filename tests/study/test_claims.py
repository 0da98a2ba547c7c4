"""Every countable sentence of the paper, recomputed: the counts, the verdicts, and the same from our own results."""

import pandas as pd
import pytest

import gated_srp
from gated_srp.study.paper import judge_claims, read_claims, read_published, read_studies, studies_folder

CLAIMS = judge_claims(
    read_claims(studies_folder() / "claims.yaml"), read_published(studies_folder() / "published.yaml")
)


def claim(part: str) -> dict:
    found = CLAIMS[CLAIMS["sentence"].str.contains(part, regex=False)]
    assert len(found) == 1, (part, list(found["sentence"]))
    return found.iloc[0].to_dict()


@pytest.mark.parametrize(
    ("part", "computed", "verdict"),
    [
        ("12 of the 16 reported classification metrics", "12 of 16, mean +0.0071", "holds"),
        ("reduces standard deviation compared to NA in 9 out of 16", "9 of 16", "holds"),
        ("highest mean C-index among the compared attention variants on all five", "5 of 5", "holds"),
        ("the mean C-index improves across all cohorts", "5 of 5, mean +0.0269", "holds"),
        ("best mean AUC on three of the five", "3 of 5", "holds"),
        ("best F1 and accuracy on KGH and BRACS", "4 of 4", "holds"),
        ("detached inputs give stronger results on most metrics", "12 of 13", "holds"),
        ("the signed gate gives stronger overall mean performance", "12 of 13", "holds"),
        ("zero initialization is favourable in most scenarios", "8 of 13", "holds"),
        ("token-only gate is never the best", "0 of 13", "holds"),
        ("head-only gate performs best on BRACS", "3 of 3", "holds"),
        ("gate without bias is strongest on LUAD", "1 of 1", "holds"),
        ("improves all reported metrics on both datasets", "8 of 8", "holds"),
        ("MedSigLIP-448 also improves all TCGA survival cohorts", "3 of 3", "holds"),
        ("lowest standard deviation on KIRP and STAD", "2 of 5: TCGA-KIRP, TCGA-STAD", "holds"),
        (
            "most consistent improvements appear with UNI-v2",
            "UNI-v2 11 of 13; MSL-448 9 of 13; ViT-B/16 11 of 13",
            "does not hold",
        ),
    ],
)
def test_a_sentence_is_counted_and_judged(part, computed, verdict):
    found = claim(part)
    assert found["published"].startswith(computed), found
    assert found["verdict"] == verdict


def test_the_overhead_is_exact_and_not_below_what_is_said():
    below = claim("less than 0.02%")
    assert below["verdict"] == "does not hold"
    for part in (
        "0.0043 % at h = 16",
        "0.0074 % at h = 32",
        "0.0136 % at h = 64",
        "0.0261 % at h = 128",
        "ADP 0.034 %",
    ):
        assert part in below["published"]
    assert "4 of 10 cohorts" in below["published"]
    average = claim("On average, it adds only a lightweight gate with ~0.02%")
    assert average["published"].startswith("0.0155 %") and average["verdict"] == "holds"


def test_on_par_in_the_worst_case_is_asked_as_non_inferiority():
    found = claim("on par with the base attention in the worst-case")
    assert found["published"].startswith("4 of 21 means are below the base, the worst by 0.0062 (CAMELYON17 accuracy)")
    assert "margin 0.02" in found["published"]
    assert found["verdict"] == "cannot be told"


def test_no_sentence_is_left_unjudged_and_each_says_where_it_stands():
    assert len(CLAIMS) == 31
    assert CLAIMS["verdict"].value_counts().to_dict() == {"holds": 28, "does not hold": 2, "cannot be told": 1}
    assert (CLAIMS["where"] != "").all() and (CLAIMS["published"] != "").all()
    assert set(CLAIMS["ours_verdict"]) == {"not run", "–"}  # the overhead is that of the models, not of results


def test_sentences_are_the_papers(shared):
    """Each quotation stands in the paper's source, apart from TeX's signs and line breaks."""
    text = plain((shared / "paper" / "gated_srp.tex").read_text(encoding="utf-8"))
    missing = [s for s in CLAIMS["sentence"] for part in s.split(" ... ") if plain(part) not in text]
    assert not missing


def plain(text: str) -> str:
    import re

    text = re.sub(r"Table~\\ref\{[^}]*\}|Table~?\s?\d*", "", text)
    text = re.sub(r"\\text\w*\{~?\}?|\\[a-zA-Z]+\{?|[{}$\\~+]", "", text)
    return re.sub(r"\s+", "", text)


def ours(folder, study: str, rows: dict[str, list[float]], columns: list[tuple[str, str]], std: float = 0.01) -> None:
    lines = [
        {"row": row, "cohort": cohort, "metric": metric, "mean": value, "std": std, "seeds": 5}
        for row, values in rows.items()
        for (cohort, metric), value in zip(columns, values, strict=True)
    ]
    (folder / "reproduce" / study).mkdir(parents=True)
    pd.DataFrame(lines).to_csv(folder / "reproduce" / study / "reproduction.csv", index=False)


def test_our_own_results_are_judged_beside_the_published(tmp_path):
    columns = [(f"TCGA-{name}", "c_index") for name in ("KIRC", "KIRP", "LUAD", "STAD", "UCEC")]
    rows = {"NA": [0.7] * 5, "XSA": [0.6] * 5, "Diff": [0.6] * 5, "Gated SRP": [0.8, 0.8, 0.8, 0.8, 0.65]}
    rows["Gated SRP, untuned (δ 1, h 64)"] = [
        0.9
    ] * 5  # a row that the paper does not have, so no sentence speaks of it
    ours(tmp_path, "survival", rows, columns)
    ours(tmp_path, "gate-range", {"Sigmoid [0,delta]": [0.7], "Signed tanh [-delta,delta]": [0.8]}, columns[1:2])
    found = gated_srp.reproduce("claims", out=tmp_path).studies[0]
    at = {line["sentence"]: line for line in found.table.to_dict("records")}
    best = next(line for sentence, line in at.items() if "highest mean C-index" in sentence)
    assert (best["ours"], best["ours_verdict"]) == ("4 of 5, mean +0.0700", "does not hold")
    signed = next(line for sentence, line in at.items() if "signed gate gives stronger" in sentence)
    assert signed["ours"].startswith("1 of 1") and signed["ours_verdict"] == "incomplete (1 of 13 columns)"
    assert (tmp_path / "reproduce/claims/table.csv").is_file()
    assert "| sentence |" in found.text and "does not hold" in found.text


def test_results_of_incomplete_cohorts_judge_no_sentence(tmp_path):
    ours(tmp_path, "survival", {"NA": [0.5], "Gated SRP": [0.6]}, [("TCGA-KIRP", "c_index")])
    path = tmp_path / "reproduce" / "survival" / "reproduction.csv"
    table = pd.read_csv(path, keep_default_na=False)
    path.write_text(table.assign(verdict="incomplete").to_csv(index=False))
    found = judge_claims(
        read_claims(studies_folder() / "claims.yaml"), read_published(studies_folder() / "published.yaml"), tmp_path
    )
    assert set(found["ours_verdict"]) == {"not run", "–"}


def test_it_is_a_study_that_needs_no_data_and_comes_last_of_all(tmp_path):
    assert [study.kind for study in read_studies("claims", studies_folder())] == ["claims"]
    result = gated_srp.reproduce("claims", out=tmp_path)
    assert result.runs == 0 and result.studies[0].table["verdict"].value_counts()["does not hold"] >= 2
