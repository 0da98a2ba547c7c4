"""The paper as data: its printed numbers, its studies (the rows and columns of a table or figure), and its countable sentences.

A study's file (``studies/NAME.yaml``) takes rows and columns from a table of ``published.yaml``, or lists its own.
``studies/claims.yaml`` lists sentences and how each is counted. By the printed numbers, and by our own results where there are
some, a sentence holds, does not hold, or cannot be told.
"""

from __future__ import annotations

import difflib
import math
import site
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import yaml
from scipy import stats

from gated_srp.config.presets import COHORTS, SEEDS, find_cohort
from gated_srp.errors import UserError
from gated_srp.files import write_whole
from gated_srp.models import Sizes, build_model, find_arm
from gated_srp.srp import SignedGate
from gated_srp.study.cells import Row

Kind = Literal["table", "runtime", "trajectories", "signed-gate", "claims", "elsewhere"]


@dataclass(frozen=True)
class PublishedTable:
    """One table; ``frame`` has one row per number: name (as printed), arm, cohort, metric, value, and the row's settings."""

    source: str
    frame: pd.DataFrame


def read_published(path: str | Path) -> dict[str, PublishedTable]:
    """All tables of a file in the form of ``studies/published.yaml``."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        return {name: PublishedTable(table["source"], _numbers(table)) for name, table in content["tables"].items()}
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        what = f"not a file of published tables ({error})"
        raise UserError(what, where=path, cure="Restore studies/published.yaml.") from None


def _numbers(table: dict[str, Any]) -> pd.DataFrame:
    columns = [(cohort, metric) for cohort, metrics in table["columns"].items() for metric in metrics]
    rows = []
    for row in table["rows"]:
        about = {key: value for key, value in row.items() if key != "values"}
        for (cohort, metric), value in zip(columns, row["values"], strict=True):
            rows.append({**about, "cohort": cohort, "metric": metric, "value": value})
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class Study:
    """One table or figure.

    ``columns``: metrics by cohort; ``panels``: cohorts by figure; ``skip``: reasons by cohort; ``arms``: by cohort, the arm that
    stands for a row's where the cohort needs another kind of model.
    """

    name: str
    title: str
    kind: Kind
    rows: tuple[Row, ...]
    columns: Mapping[str, tuple[str, ...]]
    published: PublishedTable | None = None
    std: PublishedTable | None = None
    seeds: tuple[int, ...] = SEEDS
    untuned: bool = False
    epochs: int | None = None
    panels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    skip: Mapping[str, str] = field(default_factory=dict)
    arms: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    command: str = ""  # of a figure that another command draws

    @property
    def all_rows(self) -> tuple[Row, ...]:
        """With an untuned one after each Gated SRP row, where the study asks for it."""
        found: list[Row] = []
        for row in self.rows:
            found.append(row)
            if self.untuned and find_arm(row.arm).method:  # delta 1 and h 64, as an untuned user would take them
                defaults = {"model.delta": Sizes.delta, "model.hidden_dim": Sizes.hidden_dim}
                found.append(Row(f"{row.name}, untuned (δ 1, h 64)", row.arm, {**row.changes, **defaults}))
        return tuple(found)

    def only(self, cohorts: Sequence[str]) -> Study:
        """The same with the columns of these cohorts; with all of them where none is named."""
        wanted = {find_cohort(name).name for name in cohorts}
        kept = {cohort: metrics for cohort, metrics in self.columns.items() if cohort in wanted}
        return replace(self, columns=kept) if wanted else self


# Reading -------------------------------------------------------------------------------------------------------------


def studies_folder() -> Path:
    """``studies/`` of the checkout, or of the installed package."""
    shares = [Path(sysconfig.get_path("data")), Path(site.getuserbase())]
    places = [Path(__file__).resolve().parents[3] / "studies", *(share / "share/gated-srp/studies" for share in shares)]
    found = next((place for place in places if (place / "published.yaml").is_file()), None)
    if found is None:
        raise UserError("the folder studies/ of gated-srp is missing", cure="Install the package again.")
    return found


def study_names(folder: Path) -> list[str]:
    """In alphabetical order; ``all`` stands for all of them."""
    return sorted(path.stem for path in folder.glob("*.yaml") if path.stem != "published")


def read_studies(name: str, folder: Path) -> tuple[Study, ...]:
    """The study of this name; all of them for ``all``."""
    names = study_names(folder)
    if name != "all" and name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        guess = f"Did you mean {near[0]}? " if near else ""
        raise UserError(f"no study {name!r}", cure=f"{guess}There are: {', '.join(names)}, all.")
    published = read_published(folder / "published.yaml")
    return tuple(_read(folder / f"{one}.yaml", published) for one in (names if name == "all" else [name]))


def _read(path: Path, published: Mapping[str, PublishedTable]) -> Study:
    try:
        content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        table = published[content["published"]] if "published" in content else None
        columns = {str(cohort): tuple(metrics) for cohort, metrics in content.get("columns", {}).items()}
        panels = {str(name): tuple(cohorts) for name, cohorts in content.get("panels", {}).items()}
        columns |= {cohort: () for cohorts in panels.values() for cohort in cohorts}
        if table is not None:
            pairs = table.frame[["cohort", "metric"]].drop_duplicates()
            columns = {str(cohort): tuple(part["metric"]) for cohort, part in pairs.groupby("cohort", sort=False)}
        return Study(
            name=path.stem,
            title=content["title"],
            kind=content.get("kind", "table"),
            rows=tuple(_row(row) for row in content.get("rows", [])) or _rows_of(table),
            columns=columns,
            published=table,
            std=published[content["std"]] if "std" in content else None,
            seeds=tuple(content.get("seeds", SEEDS)),
            panels=panels,
            **{name: content[name] for name in ("untuned", "epochs", "skip", "arms", "command") if name in content},
        )
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"not a study ({error!r})", where=path, cure="Restore it from the repository.") from None


def _row(row: Mapping[str, Any]) -> Row:
    return Row(row["name"], row["arm"], {key: value for key, value in row.items() if key not in ("name", "arm")})


def _rows_of(table: PublishedTable | None) -> tuple[Row, ...]:
    """The rows of a published table: arms, and settings such as the encoder or the window."""
    if table is None:
        return ()
    about = table.frame.drop(columns=["cohort", "metric", "value"]).drop_duplicates("name")
    return tuple(
        _row({str(key): value.item() if isinstance(value, np.generic) else value for key, value in row.items()})
        for row in about.to_dict("records")
    )


# Sentences -----------------------------------------------------------------------------------------------------------

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


class Found(NamedTuple):
    """What a sentence's numbers say, the verdict, and over how many columns of its table."""

    text: str
    verdict: str
    columns: int


def read_claims(path: Path) -> tuple[list[Mapping[str, Any]], float]:
    """The sentences of ``studies/claims.yaml``; and the margin: how much worse a mean may be and still be on par."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return list(content["claims"]), float(content["margin"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        what = f"not a list of claims ({error!r})"
        raise UserError(what, where=path, cure="Restore it from the repository.") from None


def judge_claims(
    claims: tuple[Sequence[Mapping[str, Any]], float], published: Mapping[str, PublishedTable], out: Path | None = None
) -> pd.DataFrame:
    """One row per sentence: where it stands, what the published numbers say of it and what ours do, with a verdict for each.

    ``out``: the folder in which `reproduce` has written our results; without it only the paper's numbers are judged.
    """
    printed = {name: _wide(table.frame, "name", "value") for name, table in published.items()}
    found = {} if out is None else {name: _our_table(out, name) for name in printed}
    # Further rows of ours, such as untuned ones, are none that a sentence speaks of.
    own = {name: t[t.columns.intersection(printed[name].columns)] for name, t in found.items() if t is not None}
    lines, (sentences, margin) = [], claims
    for claim in sentences:
        if "overhead" in claim:  # of the models: the same for everyone
            theirs, ours = _overhead(claim["overhead"]), Found("–", "–", 0)
        else:
            judged = _noninferior if "noninferior" in claim else _counted
            theirs, ours = (judged(claim, tables, margin) for tables in (printed, own))
        part = f"incomplete ({ours.columns} of {theirs.columns} columns)"
        ours_verdict = ours.verdict if ours.columns in (0, theirs.columns) else part
        lines.append((claim["sentence"], claim["where"], theirs.text, theirs.verdict, ours.text, ours_verdict))
    return pd.DataFrame(lines, columns=["sentence", "where", "published", "verdict", "ours", "ours_verdict"])


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
    value = "std" if name.endswith(_SPREAD) else "mean"
    if "verdict" in lines:  # of part of a cohort: no number of the paper's table
        lines.loc[lines["verdict"] == "incomplete", value] = float("nan")
    return _wide(lines, "row", value)


def _counted(claim: Mapping[str, Any], tables: Mapping[str, pd.DataFrame], margin: float) -> Found:
    """On how many columns each row is strictly better than what it is compared with, and by how much on average."""
    if claim["table"] not in tables:
        return Found("", "not run", 0)
    table, sign = tables[claim["table"]], -1 if claim.get("lower") else 1
    for level in ("cohort", "metric"):  # the columns that the sentence speaks of
        if wanted := claim.get(f"{level}s"):
            table = table[table.index.get_level_values(level).isin(wanted)]
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
        labels = [row.split(",")[0] for row, _ in claim["count"]]
        if len(set(labels)) < len(labels):
            labels = [f"{row} over {than}" for row, than in claim["count"]]
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
            parts = sum(square**2 / (seeds - 1) for square in squares)
            freedom = sum(squares) ** 2 / parts if parts else math.inf
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
