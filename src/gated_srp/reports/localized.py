"""What `localize` found: means with intervals over resampled patients, arms paired, gates by class; as words, tables, figures.

Shapes: S slides, R resamples of patients, M metrics.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import stats

from gated_srp.errors import Note, UserError, counted
from gated_srp.files import write_json, write_whole
from gated_srp.models import arm_title
from gated_srp.records import csv_text
from gated_srp.reports.localization import (
    METRICS,
    PER_SLIDE,
    RATES,
    Detections,
    Floats,
    Interval,
    Patients,
    froc,
    froc_curve,
    interval,
    mean_over_runs,
    weighted_means,
)
from gated_srp.reports.tables import metric_name
from gated_srp.study.results import Difference, html, judged_cells
from gated_srp.study.statistics import Paired, TTest
from gated_srp.training.folder import defined

if TYPE_CHECKING:
    from gated_srp.reports.localize import ScoredRun

FEATURES = "homogeneity"  # a value of the features: the same for every arm
ELSEWHERE = "elsewhere"  # patches that no drawn region covers
MEANING = {
    "auroc": "AUROC over patches",
    "auprc": "area under the precision-recall curve over patches",
    "pointing": "pointing game (share of slides whose highest patch is inside)",
    "dice": "Dice at the threshold that was best on validation slides",
    "froc": "FROC (mean sensitivity at 1/4 to 8 false positives per slide)",
}


@dataclass(frozen=True, eq=False)
class Localization:
    """Maps against annotations. In a notebook it shows ``table``; ``print(found.verdict)`` gives it in words.

    Attributes:
        table: arm, value, metric, mean, low, high (over resampled patients), slides, patients.
        slides: the same per run and slide: run, arm, seed, value, slide, case, patches, positive, lesions, auroc, auprc, pointing, dice.
        differences: every arm against the reference, value by value, with Holm's correction and a verdict.
        gates: beta and homogeneity by class: arm, value, class, median, low, high, and the paired difference to patches elsewhere.
        notes: what was left out or could not be told. The rest is for figures.
    """

    classes: tuple[str, ...]
    reference: str
    table: pd.DataFrame
    slides: pd.DataFrame
    differences: tuple[Difference, ...]
    gates: pd.DataFrame
    notes: tuple[Note, ...]
    curves: Mapping[tuple[str, str], Sequence[Detections]] = field(default_factory=dict, repr=False)
    samples: Mapping[tuple[str, str, str], Sequence[np.ndarray]] = field(default_factory=dict, repr=False)

    @property
    def verdict(self) -> str:
        """What was found, in words."""
        return "\n".join(in_words(self))

    def write(self, folder: str | Path) -> list[Path]:
        """Tables, figures, README.md and localization.json; gives what was written."""
        folder = Path(folder)
        tables = {"summary": self.table, "slides": self.slides, "gates": self.gates}
        tables["differences"] = pd.DataFrame([_flat(one) for one in self.differences])
        paths = [folder / f"{name}.csv" for name, table in tables.items() if len(table)]
        for path in paths:
            write_whole(path, csv_text(tables[path.stem], float_format="%.6f"))
        paths += draw(self, folder)
        paths += [folder / "README.md", folder / "localization.json"]
        write_whole(paths[-2], "\n".join(["# Maps against annotations", "", *in_words(self, every=True)]) + "\n")
        write_json(paths[-1], self.as_json())
        return paths

    def as_json(self) -> dict[str, Any]:
        """Plain values; what is undefined is None."""
        found = {
            "classes": list(self.classes),
            "reference": self.reference,
            "table": self.table.to_dict("records"),
            "differences": [one.as_json() for one in self.differences],
            "gates": self.gates.to_dict("records"),
            "notes": [note.line for note in self.notes],
            "words": list(in_words(self)),
        }
        return dict(defined(found))

    def _repr_html_(self) -> str:
        return html(self.table)


# All of them ----------------------------------------------------------------------------------------------------------


def collect(
    jobs: Sequence[ScoredRun],
    wanted: tuple[str, ...],
    reference: str | None,
    notes: list[Note],
    *,
    repeats: int,
    seed: int,
) -> Localization:
    if not any(job.slides for job in jobs):
        cure = "Name other slides, or score them all the same with --allow-overlap."
        raise UserError("no annotated slide is left to be scored: the models have seen all of them", cure=cure)
    arms = list(dict.fromkeys(job.arm for job in jobs))
    base = reference or ("na" if "na" in arms else arms[0])
    if base not in arms:
        raise UserError(
            f"{base!r} is not among the arms: {', '.join(arms)}", where="reference", cure="Name one of them."
        )
    arms = [base, *(arm for arm in arms if arm != base)]
    patients = Patients([case for job in jobs for _, case in job.slides], repeats=repeats, seed=seed)
    slides = pd.DataFrame([row for job in jobs for row in job.rows])
    if not (slides["positive"] > 0).any():
        what = f"no patch is covered by {' or '.join(wanted)} to the share that counts"
        raise UserError(what, cure="Lower --cover, or check that the annotations are of these slides.")
    samples = {(job.arm, job.unit): _resampled(job, patients) for job in jobs}
    rows: list[tuple[Any, ...]] = []
    differences: list[Difference] = []
    for arm in arms:
        units = [job.unit for job in jobs if job.arm == arm and job.slides]
        for value in dict.fromkeys(value for unit in units for value in samples[arm, unit]):
            both = np.mean(
                [samples[arm, unit][value] for unit in units if value in samples[arm, unit]], axis=0
            )  # (R, M)
            of = slides[(slides["arm"] == arm) & (slides["value"] == value)]
            for place, metric in enumerate(METRICS):
                found = interval(both[:, place])
                rows.append((arm, value, metric, *found[:3], of["slide"].nunique(), of["case"].nunique()))
            paired = [unit for unit in units if value in samples.get((base, unit), {})]
            if arm != base and paired and value != FEATURES:
                pairs = [(samples[arm, unit][value], samples[base, unit][value]) for unit in paired]
                differences += _differences(pairs, arm, value, slides, base)
    table = pd.DataFrame(rows, columns=["arm", "value", "metric", "mean", "low", "high", "slides", "patients"])
    judged = tuple(judged_cells(differences, (), "patient"))
    curves: dict[tuple[str, str], list[Detections]] = defaultdict(list)
    shown: dict[tuple[str, str, str], list[np.ndarray]] = defaultdict(list)
    for job in jobs:
        for value, detections in job.detections.items():
            curves[job.arm, value] += detections
        for (value, kind), arrays in job.samples.items():
            shown[job.arm, value, kind] += arrays
    gates = gates_by_class(jobs, patients)
    return Localization(wanted, base, table, slides, judged, gates, tuple(notes), dict(curves), dict(shown))


def _resampled(job: ScoredRun, patients: Patients) -> dict[str, Floats]:
    """(R, M) for each value of a run: means over its slides, and FROC of all of them."""
    if not job.slides:
        return {}
    weights = patients.weights([case for _, case in job.slides])
    frame = pd.DataFrame(job.rows)
    found = {}
    for value, part in frame.groupby("value", sort=False):
        means = weighted_means(weights, part[list(PER_SLIDE)].to_numpy(float))
        found[str(value)] = np.concatenate([means, froc(job.detections[str(value)], weights)[:, None]], 1)
    return found


def _differences(
    pairs: Sequence[tuple[Floats, Floats]], arm: str, value: str, slides: pd.DataFrame, base: str
) -> Iterator[Difference]:
    """Arm minus reference by each metric. The interval is over resampled patients; p is of the difference over their deviation."""
    own, other = (np.mean(side, axis=0) for side in zip(*pairs, strict=True))  # (R, M)
    both = slides[(slides["value"] == value) & slides["arm"].isin((arm, base))]
    for place, metric in enumerate(METRICS):
        if math.isnan(own[0, place]) or math.isnan(other[0, place]):
            continue
        found = interval(own[:, place] - other[:, place])
        wins, losses, ties, n = _counts(both, metric, arm, base, found)
        test = TTest(found.value, found.low, found.high, *_test(found, n))
        about = Paired(n, found.deviation * math.sqrt(n), 0.0, test, test, math.nan, wins, losses, ties)
        means = (float(own[0, place]), float(other[0, place]))
        cohort = str(both["unit"].iloc[0]).partition(" seed ")[0]
        yield Difference(cohort, arm, f"{value} {metric}", means, (math.nan, math.nan), test, about, ())


def _test(found: Interval, n: int) -> tuple[float, int, float]:
    if n < 2 or math.isnan(found.deviation):
        return math.nan, max(n - 1, 0), math.nan
    if found.deviation == 0:
        return math.nan, n - 1, 1.0 if found.value == 0 else math.nan
    t = found.value / found.deviation
    return t, n - 1, float(2 * stats.t.sf(abs(t), n - 1))


def _counts(both: pd.DataFrame, metric: str, arm: str, base: str, found: Interval) -> tuple[int, int, int, int]:
    """Patients in which the arm is better, worse, as good, and all; FROC has no number per patient."""
    if metric not in PER_SLIDE:
        number = int(both["case"].nunique())
        return 0, 0, number if found.value == 0 == found.deviation else 0, number
    each = both.pivot_table(index="case", columns="arm", values=metric)
    gap = (each[arm] - each[base]).dropna().round(12)
    return int((gap > 0).sum()), int((gap < 0).sum()), int((gap == 0).sum()), len(gap)


def gates_by_class(jobs: Sequence[ScoredRun], patients: Patients) -> pd.DataFrame:
    """Per arm, value and class: the mean over slides of a slide's median, and its paired difference to patches elsewhere."""
    rows = []
    for arm in dict.fromkeys(job.arm for job in jobs):
        own = [job for job in jobs if job.arm == arm and job.medians]
        frames = [(job, pd.DataFrame(job.medians)) for job in own]
        for value in dict.fromkeys(value for _, frame in frames for value in frame["value"]):
            kinds = dict.fromkeys(kind for _, frame in frames for kind in frame if kind not in ("value", "place"))
            for kind in kinds:
                medians, gaps = [], []
                for job, frame in frames:
                    part = frame[frame["value"] == value]
                    weights = patients.weights([job.slides[place][1] for place in part["place"]])
                    inside, outside = (part.get(one, pd.Series(math.nan, part.index)) for one in (kind, ELSEWHERE))
                    both = np.stack([inside, inside - outside], 1).astype(float)
                    found = weighted_means(weights, both)
                    medians.append(found[:, 0])
                    gaps.append(found[:, 1])
                middle, gap = (interval(mean_over_runs(side)) for side in (medians, gaps))
                if not math.isnan(middle.value):
                    rows.append((arm, value, kind, *middle[:3], *gap[:3]))
    names = ["arm", "value", "class", "median", "low", "high", "minus_elsewhere", "gap_low", "gap_high"]
    return pd.DataFrame(rows, columns=names)


# Words and figures ----------------------------------------------------------------------------------------------------


def in_words(found: Localization, *, every: bool = False) -> Iterator[str]:
    """The areas of each arm, the paired differences, gates by class; with ``every`` all metrics."""
    scored = found.slides.drop_duplicates(["slide"])
    yield (
        f"To be found: {', '.join(found.classes)}. {counted(len(scored), 'slide')} of {counted(scored['case'].nunique(), 'patient')}, "
        f"{int((scored['positive'] > 0).sum())} of them with it. Areas count higher values as a sign of it: 0.5 is chance, and below "
        "0.5 low values mark it. Intervals: 95 %, over resampled patients."
    )
    for note in found.notes:
        yield note.line
    for metric in METRICS if every else METRICS[:1]:
        yield f"\n{MEANING[metric]}"
        part = found.table[(found.table["metric"] == metric) & found.table["mean"].notna()]
        for arm, rows in part.groupby("arm", sort=False):
            for row in rows.to_dict("records"):
                if row["value"] == FEATURES and arm != found.reference:
                    continue
                reach = "" if math.isnan(row["low"]) else f" ({row['low']:.3f} to {row['high']:.3f})"
                yield f"  {arm_title(str(arm))}, {spoken(row['value'])}: {row['mean']:.3f}{reach}"
    told = [one for one in found.differences if every or one.metric.endswith(" auroc")]
    if told:
        yield f"\nagainst {arm_title(found.reference)}, on the same slides"
    for one in told:
        value, _, metric = one.metric.rpartition(" ")
        yield (
            f"  {arm_title(one.arm)}, {spoken(value)}, {metric_name(metric)}: {one.means[0]:.3f} against {one.means[1]:.3f}; {one.verdict}"
        )
    yield from _gates_in_words(found.gates)


def spoken(value: str) -> str:
    """
    >>> spoken("attention_layer2"), spoken("homogeneity")
    ('attention of layer 2', 'homogeneity')
    """
    what, _, layer = value.partition("_layer")
    return f"{what} of layer {layer}" if layer else what


def _gates_in_words(gates: pd.DataFrame) -> Iterator[str]:
    drawn = gates[gates["class"] != ELSEWHERE].dropna(subset=["gap_low"])
    drawn = drawn[(drawn["value"] != FEATURES) | ~drawn.duplicated(["value", "class"])]
    if len(drawn):
        yield "\nby class: the median of a slide's patches, mean over slides, and on the same slides its difference to patches that nothing covers"
    for row in drawn.to_dict("records"):
        sure = row["gap_low"] > 0 or row["gap_high"] < 0
        side = ("higher" if row["minus_elsewhere"] > 0 else "lower") if sure else "not distinguishable from elsewhere"
        yield (
            f"  {arm_title(row['arm'])}, {spoken(row['value'])} in {row['class']}: {row['median']:+.3f}, {side} "
            f"({row['minus_elsewhere']:+.3f}, {row['gap_low']:+.3f} to {row['gap_high']:+.3f})"
        )
    if len(drawn):
        yield "  These intervals are not corrected for their number, and say where values differ, not why."


def _flat(one: Difference) -> dict[str, Any]:
    row = one.as_json()
    kept = (
        "cohort",
        "arm",
        "metric",
        "mean",
        "reference_mean",
        "n",
        "difference",
        "p",
        "p_holm",
        "wins",
        "losses",
        "ties",
    )
    low, high = row["interval"]
    return {name: row[name] for name in kept} | {"low": low, "high": high, "verdict": row["verdict"]}


def draw(found: Localization, folder: Path) -> list[Path]:
    """Areas with intervals, free-response curves, and gates by class."""
    from gated_srp.reports.figures import COLOURS, MARKERS, STYLES, panels, save, tidy

    arms = list(dict.fromkeys(found.table["arm"]))
    area = found.table[(found.table["metric"] == "auroc") & found.table["mean"].notna()]
    values = list(dict.fromkeys(area["value"]))
    figure, (axis,) = panels(1, width=7.0, height=0.6 + 0.34 * max(len(values), 4))
    for number, arm in enumerate(arms):
        rows = area[area["arm"] == arm]
        at = np.array([values.index(value) for value in rows["value"]]) + 0.16 * (number - (len(arms) - 1) / 2)
        spread = np.abs(rows[["low", "high"]].to_numpy().T - rows["mean"].to_numpy())
        marks: dict[str, Any] = {
            "fmt": MARKERS[number % 8],
            "color": COLOURS[number % 8],
            "label": arm_title(arm),
            "markersize": 4,
        }
        axis.errorbar(rows["mean"], at, xerr=np.nan_to_num(spread), elinewidth=1.2, **marks)
    axis.axvline(0.5, color="#888888", linewidth=0.8, linestyle=":")
    axis.set_yticks(range(len(values)), [spoken(value) for value in values])
    axis.invert_yaxis()
    tidy(axis, x="AUROC over patches, 95 % interval over patients", y="")
    axis.legend(fontsize=8, frameon=False)
    written = save(figure, folder / "localization")
    shown = [value for value in values if value.startswith("attention")]
    if shown and any(len(one.hits) for slides in found.curves.values() for one in slides):
        figure, axes = panels(len(shown))
        for axis, value in zip(axes, shown, strict=True):
            for number, arm in enumerate(arms):
                if (arm, value) in found.curves:
                    rates, sensitivities = froc_curve(found.curves[arm, value])
                    line: dict[str, Any] = {"color": COLOURS[number % 8], "linestyle": STYLES[number % 4]}
                    axis.plot(rates[0], sensitivities[0], drawstyle="steps-post", label=arm_title(arm), **line)
            axis.set(xlim=(0, RATES[-1]), ylim=(0, 1))
            axis.set_xscale("symlog", linthresh=RATES[0])
            axis.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
            axis.minorticks_off()
            tidy(axis, x="false positives per slide", y="sensitivity", title=spoken(value))
        axes[0].legend(fontsize=8, frameon=False)
        written += save(figure, folder / "froc")
    return written + _draw_gates(found, folder)


def _draw_gates(found: Localization, folder: Path) -> list[Path]:
    """Violins of beta and homogeneity by class, one panel per arm and value, with the medians of slides and their intervals."""
    from gated_srp.reports.figures import COLOURS, panels, save, tidy

    keys = list(
        dict.fromkeys((arm, value) for arm, value in zip(found.gates["arm"], found.gates["value"], strict=True))
    )
    gated = [key for key in keys if not key[1].startswith(FEATURES)]
    keys = gated + [key for key in keys if key not in gated][:1]  # of the features: one panel for all arms
    if not keys:
        return []
    figure, axes = panels(len(keys), width=2.9)
    for axis, (arm, value) in zip(axes, keys, strict=True):
        rows = found.gates[(found.gates["arm"] == arm) & (found.gates["value"] == value)]
        pooled = [np.concatenate(found.samples[arm, value, kind]) for kind in rows["class"]]
        bodies = axis.violinplot(
            [one if len(one) > 1 else np.repeat(one, 2) for one in pooled], showextrema=False, widths=0.8
        )
        drawn: Any = bodies["bodies"]
        for number, body in enumerate(drawn):
            body.set(facecolor=COLOURS[number % 8], alpha=0.35)
        spread = np.abs(rows[["low", "high"]].to_numpy().T - rows["median"].to_numpy())
        axis.errorbar(
            range(1, len(rows) + 1), rows["median"], yerr=np.nan_to_num(spread), fmt="o", color="black", markersize=3.5
        )
        axis.set_xticks(range(1, len(rows) + 1), list(rows["class"]), fontsize=8)
        tidy(axis, x="", y=spoken(value), title=arm_title(arm) if value != FEATURES else "of the features")
    return save(
        figure,
        folder / "gates_by_class",
        title="patches by what covers them; dots: medians of slides, 95 % over patients",
    )
