"""Tables of predictions compared with each other, whatever tool wrote them: paired over patients, by bootstrap and, for AUC, by DeLong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gated_srp.data.prediction_tables import distinct_names, read_any_predictions
from gated_srp.errors import Note, UserError, counted
from gated_srp.study.results import LOWER_IS_BETTER, REFERENCE, InWords, html
from gated_srp.study.statistics import Bootstrap, compare_areas, holm, paired_bootstrap

_KEYS = ("fold", "slide", "case")
_TRUTHS = ("label", "value", "time", "event")


@dataclass(frozen=True, eq=False)
class PredictionComparison(InWords):
    """What tables of predictions show against a reference; in a notebook it shows itself as its ``table``.

    Attributes:
        reference: the table that others are compared with.
        metrics: arm, metric, value with its 95 % interval over resampled patients (low, high), rows and patients.
        table: arm, metric, means, difference with its interval over patients; paired on the rows that both have.
        areas: DeLong's test of each class against the rest: arm, class, areas, difference, low, high, p, p_holm; patients clustered.
        notes: how the tables were read and what to know.
    """

    reference: str
    metrics: pd.DataFrame
    table: pd.DataFrame
    areas: pd.DataFrame
    notes: tuple[str, ...]

    def _repr_html_(self) -> str:
        return f"<p>against {escape(self.reference)}</p>{html(self.table)}{html(self.areas)}"

    def _lines(self) -> Iterator[str]:
        yield from (f"note: {note}" for note in self.notes)
        for arm, rows in self.metrics.groupby("arm", sort=False):
            first = rows.iloc[0]
            yield f"\n{arm}: {counted(int(first['rows']), 'row')} of {counted(int(first['patients']), 'patient')}"
            for row in rows.to_dict("records"):
                yield f"  {row['metric']:<30}{row['value']:>8.4f}   {row['low']:.4f} to {row['high']:.4f}"
        if len(self.table):
            yield f"\nagainst {self.reference}, paired over patients (95 % intervals by bootstrap)"
        for row in self.table.to_dict("records"):
            found = f"{row['difference']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f})"
            yield f"  {row['arm']}, {row['metric']}: {row['value']:.4f} against {row['other']:.4f}; {found}, {row['verdict']}"
        if len(self.areas):
            yield f"\nAUC of a class against the rest, DeLong's test, slides of a patient clustered, against {self.reference}"
        for row in self.areas.to_dict("records"):
            found = f"{row['difference']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f})"
            yield (
                f"  {row['arm']}, {row['class']}: {row['auc']:.4f} against {row['other']:.4f}; {found}, p {row['p']:.4f}, "
                f"Holm {row['p_holm']:.4f}"
            )

    def as_json(self) -> dict[str, Any]:
        """Plain values; what is undefined is null."""
        from gated_srp.training.folder import defined

        tables = {name: getattr(self, name).to_dict("records") for name in ("metrics", "table", "areas")}
        return dict(defined({"reference": self.reference, **tables, "notes": list(self.notes)}))


def compare_predictions(
    tables: Sequence[str | Path] | Mapping[str, pd.DataFrame], *, reference: str = REFERENCE, repeats: int = 1000
) -> PredictionComparison:
    """Compare tables of predictions of the same patients. See `gated_srp.stats`."""
    from gated_srp.training.evaluate import bootstrap

    arms, notes = _arms(tables)
    if reference not in arms:
        if reference != REFERENCE:  # which nobody asked for
            cure = f"Name one of them: {', '.join(arms)}."
            raise UserError(f"{reference!r} is none of the tables", where="reference", cure=cure)
        reference = next(iter(arms))
    rows, differences, areas = [], [], []
    for arm, table in arms.items():
        about = {"rows": len(table), "patients": table["case"].nunique()}
        if about["patients"] < about["rows"]:
            notes.append(
                f"{arm}: {counted(about['rows'], 'row')} of {counted(about['patients'], 'patient')}; patients are resampled and clustered"
            )
        found = bootstrap(table, metrics, repeats=repeats).drop(columns="resamples")
        rows += [{"arm": arm, **row, **about} for row in found.to_dict("records")]
        if arm == reference:
            continue
        first, second, said = _paired(table, arms[reference], arm, reference)
        notes += said
        values, others = metrics(first), metrics(second)
        for name, one in paired_bootstrap([(first, second)], metrics, repeats=repeats).items():
            words = _words(one, name in LOWER_IS_BETTER)
            where = {"arm": arm, "metric": name, "value": values[name], "other": others[name]}
            where |= {"difference": one.difference, "low": one.low, "high": one.high}
            differences.append({**where, "verdict": words})
        areas += [{"arm": arm, **found} for found in _areas(first, second)]
    if len(differences) > 1:
        notes.append(
            "the intervals of differences are not corrected for the number of comparisons; Holm's p of DeLong's test is"
        )
    frame = pd.DataFrame(areas)
    if len(frame):
        frame["p_holm"] = holm(frame["p"])
    return PredictionComparison(
        reference, pd.DataFrame(rows), pd.DataFrame(differences), frame, tuple(dict.fromkeys(notes))
    )


def metrics(table: pd.DataFrame) -> Mapping[str, float]:
    """Those of the task that the columns tell."""
    from gated_srp.study.comparison import metrics_of

    return metrics_of(table)


def _arms(tables: Sequence[str | Path] | Mapping[str, pd.DataFrame]) -> tuple[dict[str, pd.DataFrame], list[str]]:
    """Every table by its name; one with a column ``arm`` is several."""
    if isinstance(tables, Mapping):
        named: dict[str, tuple[pd.DataFrame, tuple[Note, ...]]] = {name: (one, ()) for name, one in tables.items()}
    else:
        paths = [Path(table) for table in tables]
        named = dict(zip(distinct_names(paths), map(read_any_predictions, paths), strict=True))
    arms: dict[str, pd.DataFrame] = {}
    notes: list[str] = []
    for name, (table, said) in named.items():
        notes += [f"{name}: {note.line}" for note in said]
        own = (
            {str(arm): part.drop(columns="arm") for arm, part in table.groupby("arm", sort=False)}
            if "arm" in table
            else {name: table}
        )
        for arm, part in own.items():
            if arm in arms:
                raise UserError(f"two tables of {arm!r}", where=name, cure="Give each arm one table.")
            keys = [key for key in _KEYS if key in part]
            if part.duplicated(keys).any():
                first = part[part.duplicated(keys)].iloc[0]
                where = ", ".join(f"{key} {first[key]}" for key in keys)
                raise UserError(
                    f"a second row for {where}", where=arm, cure="Keep one row for each, or add a column `fold`."
                )
            arms[arm] = part.reset_index(drop=True)
    return arms, notes


def _paired(
    first: pd.DataFrame, second: pd.DataFrame, arm: str, reference: str
) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """The rows that both have, in one order; truths must agree. Where only one names slides, slides become patients by their mean."""
    notes = []
    if ("slide" in first) != ("slide" in second):
        notes.append(
            f"{arm if 'slide' in first else reference} is by slide, the other by patient: slides of a patient are averaged"
        )
        first, second = (_by_case(table) if "slide" in table else table for table in (first, second))
    keys = [key for key in _KEYS if key in first and key in second]
    if any(table.duplicated(keys).any() for table in (first, second)):
        raise UserError(
            f"the rows of {arm} and {reference} cannot be paired: only one of them says the fold",
            cure="Add the column `fold`.",
        )
    a, b = first.set_index(keys, drop=False), second.set_index(keys, drop=False)
    both = a.index.intersection(b.index).sort_values()
    if not len(both):
        what = f"{arm} and {reference} have no {' and '.join(keys)} in common"
        raise UserError(what, cure="Compare predictions of the same patients.")
    if len(a) + len(b) > 2 * len(both):
        lost = f"{len(a) - len(both)} of {arm}, {len(b) - len(both)} of {reference}"
        notes.append(f"compared on {counted(len(both), 'row')} that both have; left out: {lost}")
    a, b = a.loc[both].reset_index(drop=True), b.loc[both].reset_index(drop=True)
    for name in _TRUTHS:
        if name in a and name in b and (differ := a[name] != b[name]).any():
            row = a[differ].iloc[0]
            what = f"{arm} and {reference} differ in the truth of {', '.join(f'{key} {row[key]}' for key in keys)} ({name})"
            raise UserError(what, cure="Compare predictions of the same labels.")
    return a, b, notes


def _by_case(slides: pd.DataFrame) -> pd.DataFrame:
    keys = [key for key in ("fold", "case") if key in slides]
    truths = [name for name in _TRUTHS if name in slides]
    groups = slides.groupby(keys, sort=False)
    for name in truths:
        if (groups[name].nunique() > 1).any():
            raise UserError(f"slides of one patient differ in {name}", cure="Compare tables by slide.")
    numbers = [str(name) for name in slides.select_dtypes("number") if name not in (*keys, *truths)]
    cases = groups[numbers].mean().join(groups[truths].first()).reset_index()
    probabilities = [name for name in numbers if name.startswith("prob_")]
    if probabilities:
        likeliest = cases[probabilities].to_numpy().argmax(1)
        cases["predicted"] = [probabilities[place].removeprefix("prob_") for place in likeliest]
    return cases


def _areas(first: pd.DataFrame, second: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Each class against the rest; of two classes the second, whose area is that of both."""
    names = [str(name) for name in first if str(name).startswith("prob_") and name in second]
    for name in names[1:] if len(names) == 2 else names:
        positive = (first["label"] == name.removeprefix("prob_")).to_numpy()
        found = compare_areas(positive, first[name], second[name], first["case"])
        plain = asdict(found) | {"difference": found.difference}
        yield {"class": name.removeprefix("prob_"), "auc": plain["first"], "other": plain["second"]} | {
            key: plain[key] for key in ("difference", "low", "high", "p")
        }


def _words(one: Bootstrap, lower: bool) -> str:
    if one.low <= 0 <= one.high or np.isnan(one.low):
        return "not distinguishable from zero"
    return "better" if (one.difference < 0) == lower else "worse"
