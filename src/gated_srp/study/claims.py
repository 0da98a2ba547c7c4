"""The paper's countable sentences, recomputed: from the printed numbers, and from our own results where there are some.

``studies/claims.yaml`` lists the sentences and says how each is counted. A sentence holds, does not hold, or cannot be told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from scipy import stats

from gated_srp.config.presets import COHORTS, find_cohort
from gated_srp.errors import UserError
from gated_srp.files import write_whole
from gated_srp.models import build_model
from gated_srp.srp import SignedGate
from gated_srp.study.paper import PublishedTable

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be told"
_SPREAD = "-std"  # ends the name of a table of standard deviations
_QUANTITIES: dict[str, Callable[[int, int], bool]] = {  # word -> whether "k of n" is it
    "all": lambda k, n: k == n,
    "most": lambda k, n: 2 * k > n,
    "several": lambda k, n: k >= 3,
    "some": lambda k, n: k > 0,
    "none": lambda k, n: k == 0,
    "mixed": lambda k, n: 0 < k < n,
}


@dataclass(frozen=True)
class Claims:
    """The sentences; ``margin``: how much worse a mean may be and still be on par."""

    sentences: tuple[Mapping[str, Any], ...]
    margin: float


@dataclass(frozen=True)
class Found:
    """What a sentence's numbers say, the verdict, and over how many columns of its table."""

    text: str
    verdict: str
    columns: int


def read_claims(path: Path) -> Claims:
    """The sentences of ``studies/claims.yaml``."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Claims(tuple(content["claims"]), float(content["margin"]))
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"not a list of claims ({error!r})", where=path, cure="Restore it from the repository."
        ) from None


def judge_claims(claims: Claims, published: Mapping[str, PublishedTable], out: Path | None = None) -> pd.DataFrame:
    """One row per sentence: where it stands, what the published numbers say of it and what ours do, with a verdict for each.

    ``out``: the folder in which `reproduce` has written our results; without it only the paper's numbers are judged.
    """
    printed = {name: _wide(table.frame, "name", "value") for name, table in published.items()}
    found = {} if out is None else {name: _our_table(out, name) for name in printed}
    # Further rows of ours, such as untuned ones, are none that a sentence speaks of.
    own = {name: t[t.columns.intersection(printed[name].columns)] for name, t in found.items() if t is not None}
    lines = []
    for claim in claims.sentences:
        if "overhead" in claim:  # of the models: the same for everyone
            theirs, ours = _overhead(claim["overhead"]), Found("–", "–", 0)
        else:
            judged = _noninferior if "noninferior" in claim else _counted
            theirs, ours = (judged(claim, tables, claims.margin) for tables in (printed, own))
        complete = ours.columns in (0, theirs.columns)
        lines.append(
            {
                "sentence": claim["sentence"],
                "where": claim["where"],
                "published": theirs.text,
                "verdict": theirs.verdict,
                "ours": ours.text,
                "ours_verdict": ours.verdict
                if complete
                else f"incomplete ({ours.columns} of {theirs.columns} columns)",
            }
        )
    return pd.DataFrame(lines)


def write_claims(folder: Path, title: str, table: pd.DataFrame) -> list[Path]:
    """``table.csv`` and ``table.md``."""
    counts = table["verdict"].value_counts()
    words = {HOLDS: "hold", FAILS: "do not hold", OPEN: "cannot be told"}
    summary = ", ".join(f"{counts[verdict]} {word}" for verdict, word in words.items() if verdict in counts)
    cells = [list(table.columns), ["---"] * len(table.columns), *table.astype(str).to_numpy().tolist()]
    rows = ["| " + " | ".join(part.replace("|", "\\|") for part in row) + " |" for row in cells]
    about = (
        f"Of {len(table)} sentences, by the paper's own printed numbers: {summary}. A column counts where the mean is strictly better; "
        '"cannot be told": five seeds are too few to show it, which is not to say that it is false.'
    )
    texts = {
        "table.csv": table.to_csv(index=False, lineterminator="\n"),
        "table.md": "\n".join([f"# {title}", "", *rows, "", about, ""]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in texts]


# Numbers -------------------------------------------------------------------------------------------------------------


def _wide(frame: pd.DataFrame, rows: str, value: str) -> pd.DataFrame:
    """One row per column of the printed table (cohort, metric), one column per row of it."""
    order = frame[["cohort", "metric"]].drop_duplicates()
    wide = frame.pivot(index=["cohort", "metric"], columns=rows, values=value)
    return wide.loc[pd.MultiIndex.from_frame(order)]


def _our_table(out: Path, name: str) -> pd.DataFrame | None:
    """Our means in the form of a published table, or our standard deviations; None where the study has not been run."""
    path = out / "reproduce" / name.removesuffix(_SPREAD) / "reproduction.csv"
    if not path.is_file():
        return None
    lines = pd.read_csv(path, keep_default_na=False, na_values=[""])  # a row's name is "NA"
    return _wide(lines, "row", "std" if name.endswith(_SPREAD) else "mean")


def _columns(claim: Mapping[str, Any], table: pd.DataFrame) -> pd.DataFrame:
    """The columns of a table that a sentence speaks of."""
    for level in ("cohort", "metric"):
        wanted = claim.get(f"{level}s")
        table = table[table.index.get_level_values(level).isin(wanted)] if wanted else table
    return table


# Counting ------------------------------------------------------------------------------------------------------------


def _counted(claim: Mapping[str, Any], tables: Mapping[str, pd.DataFrame], margin: float) -> Found:
    """On how many columns each row is strictly better than what it is compared with, and by how much on average."""
    if claim["table"] not in tables:
        return Found("", "not run", 0)
    table, sign = _columns(claim, tables[claim["table"]]), -1 if claim.get("lower") else 1
    gains = [_gains(table, row, than, sign) for row, than in claim["count"]]
    if any(len(gain) == 0 for gain in gains):
        return Found("", "not run", 0)
    better = [gain > 0 for gain in gains]
    counts = [(int(found.sum()), len(found)) for found in better]
    cohorts = list(dict.fromkeys(better[0][better[0]].index.get_level_values("cohort")))
    said = claim["says"]
    if isinstance(said, list):
        text = f"{counts[0][0]} of {counts[0][1]}: {', '.join(cohorts)}"
        true = cohorts == said
    elif len(counts) == 1:
        (k, n), mean = counts[0], sign * float(gains[0].mean())
        text = f"{k} of {n}, mean {mean:+.4f}"
        true = k == said if isinstance(said, int) else _QUANTITIES[said](k, n)
    else:
        labels = _labels(claim["count"])
        text = "; ".join(f"{label} {k} of {n}" for label, (k, n) in zip(labels, counts, strict=True))
        first, *others = (k for k, _ in counts)
        true = first > max(others) if said == "first" else all(_QUANTITIES[said](k, n) for k, n in counts)
    return Found(text, HOLDS if true else FAILS, counts[0][1])


def _gains(table: pd.DataFrame, row: str, than: str, sign: int) -> pd.Series:
    """By how much a row is better than another, or than the best of all others, on the columns that have them all."""
    others = [name for name in table.columns if name != row] if than == "all" else [than]
    if not {row, *others} <= set(table.columns):
        return pd.Series(dtype=np.float64)
    present = (sign * table[[row, *others]]).dropna()
    # Printed numbers have four digits: their differences are rounded, lest equal ones differ in the last bit.
    gains: pd.Series = (present[row] - present[others].max(axis=1)).round(10)
    return gains


def _labels(pairs: list[list[str]]) -> list[str]:
    """The first row of each pair, up to a comma; with the second one where the first does not tell pairs apart."""
    names = [row.split(",")[0] for row, _ in pairs]
    return names if len(set(names)) == len(names) else [f"{row} over {than}" for row, than in pairs]


# Size and safety -----------------------------------------------------------------------------------------------------


def _overhead(said: str) -> Found:
    """Three gates over the slide model's own parameters, in per cent, at the paper's hidden widths."""
    hidden = {name: cohort.gate().hidden_dim for name, cohort in COHORTS.items() if not cohort.images}
    slide = build_model("na", in_dim=1536, num_outputs=4)
    share = {h: 3 * _share(h, slide) for h in sorted(set(hidden.values()))}
    if said == "average":
        mean = float(np.mean([share[h] for h in hidden.values()]))
        text = f"{mean:.4f} % on average over the settings of {len(hidden)} cohorts"
        return Found(text, HOLDS if round(mean, 2) == 0.02 else FAILS, len(hidden))
    above = [name for name, h in hidden.items() if share[h] >= 0.02]
    adp = find_cohort("ADP").gate().hidden_dim
    image = 11 * _share(adp, build_model("vit_s16", in_dim=768, num_outputs=38))
    listed = ", ".join(f"{value:.4f} % at h = {h}" for h, value in share.items())
    text = f"{listed}: not below on {len(above)} of {len(hidden)} cohorts ({', '.join(above)}); ADP {image:.3f} %"
    return Found(text, FAILS if above else HOLDS, len(hidden))


def _share(hidden: int, model: Any) -> float:
    gate, whole = (sum(p.numel() for p in part.parameters()) for part in (SignedGate(6, hidden_dim=hidden), model))
    return 100 * gate / whole


def _noninferior(claim: Mapping[str, Any], tables: Mapping[str, pd.DataFrame], margin: float, seeds: int = 5) -> Found:
    """Whether each mean is shown to be no worse than the base's by more than the margin: Welch's one-sided 95 % bound.

    Seeds are taken as unpaired, since the paper prints no paired differences.
    """
    row, base = claim["noninferior"]
    differences, bounds = {}, {}
    for name in claim["tables"]:
        if name not in tables or f"{name}{_SPREAD}" not in tables:
            continue
        means, spreads = (tables[full].reindex(columns=[row, base]).dropna() for full in (name, f"{name}{_SPREAD}"))
        for column in means.index.intersection(spreads.index):
            squares = [float(spreads.loc[column, one]) ** 2 / seeds for one in (row, base)]
            freedom = (
                sum(squares) ** 2 / sum(square**2 / (seeds - 1) for square in squares) if any(squares) else math.inf
            )
            differences[column] = float(means.loc[column, row] - means.loc[column, base])
            bounds[column] = float(stats.t.ppf(0.95, freedom)) * math.sqrt(sum(squares))
    if not differences:
        return Found("", "not run", 0)
    worst = min(differences, key=lambda column: differences[column])
    n, below = len(differences), sum(value < 0 for value in differences.values())
    shown = sum(differences[c] - bounds[c] >= -margin for c in differences)
    inferior = sum(differences[c] + bounds[c] < -margin for c in differences)
    text = f"{below} of {n} means are below the base"
    text += f", the worst by {-differences[worst]:.4f} ({' '.join(worst)})" if below else ""
    text += f"; within the margin {margin:g} with 95 % confidence: {shown} of {n}, beyond it: {inferior} of {n}"
    return Found(text, HOLDS if shown == n else FAILS if inferior else OPEN, n)
