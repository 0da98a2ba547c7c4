"""Survival in discrete time (paper, appendix "Training objectives"): one hazard per time bin.

Shapes: B bags, K = 4 time bins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from gated_srp.errors import Note, UserError, counted
from gated_srp.tasks import metrics as scores
from gated_srp.tasks import task as base
from gated_srp.tasks.metrics import FollowUp
from gated_srp.tasks.task import (
    Cells,
    Columns,
    Findings,
    Header,
    Labels,
    Level,
    Matched,
    Metrics,
    Recipe,
    Task,
    first_rows,
)

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

BINS = 4
SMALLEST = 1e-7  # hazards are clamped to [SMALLEST, 1 - SMALLEST]
_SCALE = 5.0  # times the training follow-up from which on the unit of time is doubted
_PER_YEAR = {"day": 365.25, "month": 12.0, "year": 1.0}


@dataclass(frozen=True)
class Survival(Task):
    """Negative log likelihood of hazards in four bins; the case C-index selects.

    ``edges`` come from the training cases (`Survival.fit`); so does ``training``, by which the other metrics correct
    for censoring (without it, the evaluated cases themselves serve). Fewer than three edges (tied times) leave the last
    outputs without a bin; nothing trains them and no prediction uses them.
    Columns: ``time``, ``event`` (truth), ``risk``, ``survival_at_<edge>``: the probability to outlive the end of bin 1, 2, ...
    """

    edges: tuple[float, ...]
    training: FollowUp | None = None

    name: ClassVar[str] = "survival"
    subject: ClassVar[str] = "survival"
    selects: ClassVar[tuple[str, ...]] = ("c_index",)
    shown: ClassVar[tuple[str, ...]] = ("c_index",)
    figures: ClassVar[tuple[str, ...]] = ("kaplan_meier",)
    recipe: ClassVar[Recipe] = Recipe(epochs=20, lr=1e-4, weight_decay=1e-5, accumulation=1)
    score: ClassVar[Level] = "case"
    usual: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "time": (
            *("time", "time_days", "survival_months", "survival_days", "survival_time"),
            *(
                "os_survival_days",
                "os_time",
                "os_days",
                "os_months",
                "overall_survival_months",
                "overall_survival_days",
            ),
        ),
        "event": ("event", "status", "os", "vital_status", "os_status", "os_event", "overall_survival_status"),
        "censorship": ("censorship", "os_censorship", "censored"),
    }
    meanings: ClassVar[Mapping[str, str]] = {"event": "1 = the event was seen", "censorship": "1 = censored"}
    real: ClassVar[tuple[str, ...]] = ("time",)
    one_truth_per_case: ClassVar[bool] = True
    hold_out: ClassVar[Literal["shuffled", "dealt"]] = "dealt"
    judges_training: ClassVar[bool] = True
    num_outputs: ClassVar[int] = BINS
    truth: ClassVar[tuple[str, ...]] = ("time", "event")
    calibrates: ClassVar[bool] = False  # a temperature would reorder risks: they are sums over bins

    @classmethod
    def named_by(cls, settings: Mapping[str, Any]) -> bool:
        """By ``time``, ``event`` or ``censorship``, without a ``target``."""
        return any(settings.get(key) for key in cls.usual) and not settings.get("target")

    @classmethod
    def seen_in(cls, header: Header) -> bool:
        from gated_srp.tasks.events import two_times  # not above: other tasks do without

        status = header.usual(cls.usual["event"] + cls.usual["censorship"])
        return bool(status and (header.usual(cls.usual["time"]) or two_times(header)))

    @classmethod
    def find_columns(cls, named: Mapping[str, Any], header: Header) -> dict[str, Any]:
        """A time, and one of event and censorship."""
        from gated_srp.tasks.events import two_times  # not above: other tasks do without

        both, seen = two_times(header), header.usual(cls.usual["time"])
        if both and named.get("time") == both[0]:
            what = f"`time: {both[0]}` leaves out everyone without the event"
            raise header.error(what, f"Write `time: [{', '.join(both)}]`.")
        alone = both if both and not seen else None
        time = {"time": named.get("time") or alone or header.only("time", cls.usual["time"])}
        given = {key: named[key] for key in cls.meanings if key in named}
        if len(given) == 2:
            raise header.error("`event` and `censorship` say the opposite of each other", "Name one of them.")
        found = [(key, name) for key in cls.meanings for name in header.usual(cls.usual[key])]
        if given or len(found) == 1:
            return time | (given or dict(found))
        names = ", ".join(name for _, name in found)
        said = (
            f"{f'several columns ({names}) could say' if names else 'no usual column says'} whether the event was seen"
        )
        raise header.error(said, "Name one in the config: `event` (1 = event) or `censorship` (1 = censored).")

    @classmethod
    def read(cls, frame: pd.DataFrame, columns: Any, *, classes: Sequence[str] | None, where: Path) -> Labels:
        """``time``, and ``event``: 1 where it was seen, 0 where the case is censored."""
        from gated_srp.tasks import events  # not above: other tasks do without

        return events.read_follow_up(frame, columns, where)

    @classmethod
    def describe(cls, frame: pd.DataFrame, classes: tuple[str, ...], columns: Any) -> list[Note]:
        """A flipped sign of censorship is the commonest slip of the field."""
        cases, time = first_rows(frame), columns.time if isinstance(columns.time, str) else " or ".join(columns.time)
        reading = "1 = censored -> event = 1 - censorship" if columns.censorship else "1 = event, 0 = censored"
        median = float(cases["time"].median())
        unit = next((unit for unit in _PER_YEAR if unit in time.casefold()), None)
        follow_up = f"{median / _PER_YEAR[unit]:.1f} y" if unit else f"{median:g} in the unit of {time!r}"
        events = f"{100 * cases['event'].mean():.0f} % events"
        said = f"{columns.censorship or columns.event}: {reading}; {events}; median follow-up {follow_up} "
        return [Note("note", "labels", f"{said}({counted(len(cases), 'patient')})")]

    @classmethod
    def strata(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> dict[str, str]:
        """Event and quarter of the time; the event alone where that leaves fewer than five patients in a stratum."""
        cases = first_rows(frame)
        times = cases["time"].to_numpy(float)
        edges = np.unique(np.quantile(times, [0.25, 0.5, 0.75]))
        quarter = np.searchsorted(edges, times, side="right")
        fine = {case: f"event{e}_time{q}" for case, e, q in zip(cases.index, cases["event"], quarter, strict=True)}
        if min(np.unique(list(fine.values()), return_counts=True)[1]) >= 5:
            return fine
        return {case: f"event{e}" for case, e in zip(cases.index, cases["event"], strict=True)}

    @classmethod
    def tally(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> dict[str, Any]:
        """Patients, events and follow-up."""
        cases = first_rows(frame)
        seen = cases["event"] == 1
        about = {"patients": len(cases), "events": int(seen.sum()), "follow_up": _spread(cases["time"])}
        return about | {"follow_up_of_censored": _spread(cases.loc[~seen, "time"])}

    @classmethod
    def tally_lines(cls, tally: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        times, censored = tally["follow_up"], tally["follow_up_of_censored"]
        share = 100 * tally["events"] / max(1, tally["patients"])
        late = f", of the censored {censored['median']:g}" if censored else ""
        yield "events", f"{tally['events']:,} of {tally['patients']:,} patients ({share:.0f} %)"
        said = f"median {times['median']:g}{late}, from {times['min']:g} to {times['max']:g} (unit of the table)"
        yield "follow-up", said

    @classmethod
    def scarce(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> Iterator[Note]:
        events = int(first_rows(frame)["event"].sum())
        if events < base.SCARCE:
            yield base.scarce_note("few_events", f"only {counted(events, 'patient')} with an event", "patients")

    @classmethod
    def lacks(cls, frame: pd.DataFrame, classes: tuple[str, ...], part: str) -> Iterator[Note]:
        if not frame["event"].any():
            level: Literal["error", "warning"] = "error" if part == "train" else "warning"
            yield Note(level, "split", f"no event in {part}: its C-index is not defined")

    @classmethod
    def fit(cls, training: pd.DataFrame, classes: tuple[str, ...] = (), metric: str | None = None) -> Survival:
        """Edges from a table of TRAINING rows (slides or cases): each case counts once.

        They are the distinct quartiles of event times, or of all times with fewer than four events.
        """
        cls.checked_metric(metric)
        cases = training.drop_duplicates("case") if "case" in training else training
        follow_up = read_follow_up(cases)
        if not len(follow_up.time):
            cure = "Check the split and the table's time column."
            raise UserError("the training split has no case", where="survival", cure=cure)
        events = follow_up.time[follow_up.event]
        edges = np.unique(np.quantile(events if len(events) >= BINS else follow_up.time, (0.25, 0.5, 0.75)))
        return cls(tuple(edges.tolist()), follow_up)

    def card(self) -> dict[str, Any]:
        seen = self.training
        follow_up = None if seen is None else {"time": seen.time.tolist(), "event": seen.event.astype(int).tolist()}
        return {"bin_edges": list(self.edges), "follow_up": follow_up}

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> Survival:
        seen = card.get("follow_up")
        return cls(tuple(card["bin_edges"]), None if seen is None else FollowUp.of(seen["time"], seen["event"]))

    @property
    def outputs(self) -> tuple[str, ...]:
        return (f"{len(self.edges) + 1} time bins",)

    def bins(self, time: np.ndarray) -> np.ndarray:
        """Number of edges <= t.

        >>> Survival((1.0, 2.0, 3.0)).bins(np.array([0.5, 1.0, 9.0])).tolist()
        [0, 1, 3]
        """
        return np.searchsorted(np.asarray(self.edges), time, side="right")

    def encode(self, table: pd.DataFrame) -> Tensor:
        """(B, 2) whole numbers: the bin of ``time`` (found here, in the edges' double precision) and ``event``."""
        import torch

        follow_up = read_follow_up(table)
        return torch.from_numpy(np.stack([self.bins(follow_up.time), follow_up.event], 1).astype(np.int64))

    def answers(self, table: pd.DataFrame) -> Columns:
        """``time``, and ``event`` as 0 or 1."""
        follow_up = read_follow_up(table)
        return {"time": follow_up.time, "event": follow_up.event.astype(np.int64)}

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean negative log likelihood of (B, K) logits and (B, 2) targets.

        An event in bin y: survival of the bins before y and the hazard of y. Censored in bin y: survival through y.
        """
        import torch

        logits = scores.full_precision(logits).reshape(-1, BINS)
        place, event = target.reshape(-1, 2).to(logits.device).unbind(1)
        log_hazard, log_survival = _log_hazard(logits), _log_hazard(-logits)  # 1 - sigmoid(x) = sigmoid(-x)
        before = torch.arange(BINS, device=logits.device) < place[:, None]  # (B, K)
        lived = torch.where(before, log_survival, 0.0).sum(1)  # (B,)
        last = torch.where(event.bool()[:, None], log_hazard, log_survival).gather(1, place[:, None])[:, 0]
        return -(lived + last).mean()

    def predict(self, logits: Tensor) -> Columns:
        """Survival curve, and risk = minus its sum (larger: earlier event)."""
        from scipy.special import expit

        hazard = np.clip(expit(scores.as_numpy(logits)), SMALLEST, 1 - SMALLEST)
        curve = np.cumprod(1 - hazard, axis=1)[:, : len(self.edges) + 1]  # (B, bins); the last bin has no end
        return {"risk": -curve.sum(1), **dict(zip(self._curve, curve.T[:-1], strict=True))}

    def by_case(self, slides: pd.DataFrame) -> pd.DataFrame:
        """Mean risk, and mean survival curve, of the slides."""
        return base.mean_by_case(slides, self.truth, ["risk", *self._curve])

    def metrics(self, predictions: pd.DataFrame) -> Metrics:
        """C-index and Uno's C of the risk; Brier score and AUC at the bin edges.

        These are the only times of which the model speaks: to live through bin k is to outlive edge k, so
        ``survival_at_<edge k>`` is the prediction for that time, without interpolation.
        """
        cases = read_follow_up(predictions)
        training = self.training or cases
        risk = predictions["risk"].to_numpy(np.float64)
        survival = predictions[self._curve].to_numpy(np.float64)  # (B, edges)
        return {
            "c_index": scores.concordance_index(risk, cases),
            "uno_c": scores.uno_concordance(risk, cases, training),
            **scores.survival_at_times(survival, np.asarray(self.edges), cases, training),
        }

    @classmethod
    def metrics_of(cls, predictions: pd.DataFrame) -> Metrics | None:
        """The C-index, which needs nothing but the table: ``risk``, ``time`` and ``event``."""
        if not {"risk", "time", "event"} <= set(predictions):
            return None
        cases = FollowUp.of(predictions["time"], predictions["event"])
        return {"c_index": scores.concordance_index(predictions["risk"].to_numpy(np.float64), cases)}

    @classmethod
    def headline(cls, predictions: pd.DataFrame) -> tuple[str, list[float]]:
        return "Predicted risk", predictions["risk"].tolist()

    def training_facts(self, cases: pd.DataFrame) -> dict[str, Any]:
        """The median risk, by which later cases are put into groups of low and high risk."""
        return {"median_risk": float(cases["risk"].median())}

    @classmethod
    def member_numbers(cls, tasks: Sequence[Task], logits: Sequence[Tensor]) -> list[Columns]:
        """Risk, and survival at common times: the edges of the first member, or of the first with more of them."""
        edges = [tuple(task.edges) for task in tasks if isinstance(task, Survival)]
        times = max(edges, key=len)
        found: list[Columns] = []
        for task, own, one in zip(tasks, edges, logits, strict=True):
            columns = task.predict(one)
            curve = np.stack([columns[name] for name in _names(own)], 1)  # (B, edges)
            if times != own:
                curve = scores.curve_at(np.asarray(times), np.asarray(own), curve)
            found.append({"risk": columns["risk"], **dict(zip(_names(times), curve.T, strict=True))})
        return found

    def summary(self, predictions: pd.DataFrame) -> list[str]:
        names = [str(name) for name in predictions if not str(name).endswith("_std")]
        times = [name.removeprefix("survival_at_") for name in names if name.startswith("survival_at_")]
        low, middle, high = predictions["risk"].quantile([0, 0.5, 1])
        return [
            f"risk: median {middle:.3f}, from {low:.3f} to {high:.3f} (higher: earlier event)",
            f"survival at {', '.join(times)}, in the unit of time of the training table",
        ]

    def matched(self, frame: pd.DataFrame, classes: tuple[str, ...], *, where: str) -> Matched:
        """Times in days and in months are told apart by their median."""
        if self.training is None:
            return frame, ()
        here, there = float(frame["time"].median()), float(np.median(self.training.time))
        if 1 / _SCALE < here / there < _SCALE:
            return frame, ()
        said = f"the median time is {here:g} here and was {there:g} in training. Are both in the same unit?"
        return frame, (Note("warning", "time_unit", said),)

    def examine(self, cases: pd.DataFrame, card: Mapping[str, Any]) -> Findings | None:
        """Cases above and not above the median risk of the training cases: Kaplan-Meier curves and the log-rank test."""
        if card.get("median_risk") is None:
            return None
        threshold = float(card["median_risk"])
        risk = cases["risk"].to_numpy(np.float64)
        group = np.where(risk > threshold, "high", "low")
        found = scores.risk_groups(risk, FollowUp.of(cases["time"], cases["event"]), threshold)
        counts = {name: int((group == name).sum()) for name in ("low", "high")}
        facts = {"threshold": card["median_risk"], "cases": counts}
        facts |= {"log_rank_statistic": found.statistic, "log_rank_p": found.p_value}
        test = "no test" if math.isnan(found.p_value) else f"log-rank p {found.p_value:.4g}"
        said = f"split at the training median risk: {counted(counts['high'], 'case')} high, {counts['low']} low, {test}"
        return Findings({"risk_group": group}, {"kaplan_meier": found.curves}, {"risk_groups": facts}, (said,))

    @property
    def _curve(self) -> list[str]:
        return _names(self.edges)


def _names(times: Sequence[float]) -> list[str]:
    return [f"survival_at_{time:.10g}" for time in times]


def _spread(values: Cells) -> dict[str, float]:
    if not len(values):
        return {}
    return {"min": float(values.min()), "median": float(np.median(values)), "max": float(values.max())}


def _log_hazard(logits: Tensor) -> Tensor:
    """log of the clamped sigmoid, without forming the sigmoid: in single precision that is exactly 1 from 17 on."""
    from torch.nn import functional as F

    return F.logsigmoid(logits).clamp(math.log(SMALLEST), math.log1p(-SMALLEST))


def read_follow_up(table: pd.DataFrame) -> FollowUp:
    """``time`` and ``event`` of a tidy table."""
    time, event = (table[name].to_numpy(np.float64) for name in ("time", "event"))
    bad = ~np.isfinite(time) | (time < 0) | ~np.isin(event, (0, 1))
    if bad.any():
        row = int(np.argmax(bad))
        said = f"time {time[row]}, event {event[row]}; expected a time of at least 0, and event 0 (censored) or 1"
        raise UserError(said, where=f"survival, row {row + 1}", cure="Correct or drop the row.")
    return FollowUp(time, event.astype(bool))
