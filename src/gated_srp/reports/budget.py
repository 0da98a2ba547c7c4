"""`gated_srp.budget_curve`: how far logits drift, and what time is saved, when models see a share of each slide's patches."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from gated_srp.data.loader import SlideBag
from gated_srp.errors import Note, UserError, counted
from gated_srp.files import write_whole
from gated_srp.models import arm_title
from gated_srp.progress import Progress, silent
from gated_srp.training.budget import ThinnedModel
from gated_srp.training.known import files_for, with_ids
from gated_srp.training.predict import reading_of, run_models
from gated_srp.training.trained import TrainedRun

SHARES = (1.0, 0.9, 0.75, 0.5, 0.25)


@dataclass(frozen=True, eq=False)
class BudgetCurve:
    """One row per share in ``table``: share (asked), kept (mean share that stayed), drift and largest_drift (of logits), changed (slides with
    another likeliest output), time (of the model, as a share of that with all patches; the median over slides)."""

    run: str
    slides: int
    table: pd.DataFrame
    skipped: pd.DataFrame
    notes: tuple[Note, ...] = ()

    def words(self) -> list[str]:
        """A line per share."""
        return [
            f"{row['share']:.0%} asked, {row['kept']:.1%} kept: logits drift by {row['drift']:.3g} (at most {row['largest_drift']:.3g}), "
            f"{row['changed']} of {counted(self.slides, 'slide')} decided otherwise, {row['time']:.2f} of the time"
            for row in self.table.to_dict("records")
        ]

    def write(self, folder: str | Path) -> list[Path]:
        """budget.csv, budget.json for `gated-srp report`, and the figure."""
        folder = Path(folder)
        record = {"run": self.run, "slides": self.slides, "table": self.table.to_dict("records"), "words": self.words()}
        write_whole(folder / "budget.csv", self.table.to_csv(index=False, lineterminator="\n"))
        write_whole(folder / "budget.json", json.dumps(record, indent=1) + "\n")
        drawn = draw_budget(self, folder / "budget_curve")
        return [folder / "budget.csv", folder / "budget.json", *drawn]


class _Timed(ThinnedModel):
    """All shares of a bag one after the other, so that a slow moment hits them alike: logits (shares * K,)."""

    def __init__(self, run: TrainedRun, *, shares: Sequence[float], seen: list[list[tuple[int, int, float]]]) -> None:
        super().__init__(run, share=1.0, kept={})
        self.shares, self.seen, self.warm = shares, seen, False

    def __call__(self, bag: SlideBag) -> Tensor:
        found, facts = [], []
        for share in self.shares if self.warm else (self.shares[-1], *self.shares):  # the first call also makes buffers
            self.share, start = share, time.perf_counter()
            found.append(super().__call__(bag))
            facts.append((self.kept[bag.slide], len(bag.features), time.perf_counter() - start))
        self.warm = True
        self.seen.append(facts[-len(self.shares) :])
        return torch.cat(found[-len(self.shares) :])


def budget_curve(
    run: str | Path | TrainedRun,
    features: str | Path,
    *,
    shares: Sequence[float] = SHARES,
    table: str | Path | None = None,
    force: bool = False,
    out: str | Path | None = None,
    progress: Progress = silent,
    **reading: Any,
) -> BudgetCurve:
    """Predict slides with all patches and with shares of them.

    Args:
        run: a finished run's folder, or its model file.
        features: a folder of feature files, or one of them.
        shares: of the patches; 1 is always among them.
        table: as in `gated_srp.predict`.
        force: as in `gated_srp.predict`.
        out: where budget.csv, budget.json and the figure are written; in or below a run's folder `gated-srp report` shows them.
        progress: called after each slide.
        reading: features_key, coords_key, coords, stride, annotations, features_low: as in `gated_srp.predict`.

    Returns:
        `BudgetCurve`: ``table``, ``words()``, ``write(folder)``.

    Example:
        >>> gated_srp.budget_curve("runs/luad/gated_srp/seed42", "feats/").table  # doctest: +SKIP
    """
    trained = TrainedRun.open(run)
    shares = sorted({1.0, *shares}, reverse=True)
    slides = with_ids(files_for(trained, features), table, trained.covariates)
    seen: list[list[tuple[int, int, float]]] = []
    timed = partial(_Timed, shares=shares, seen=seen)
    how: dict[str, Any] = {"reading": reading_of([trained], **reading), "force": force, "workers": 0}
    found = run_models([trained], slides, **how, progress=progress, model=timed)
    logits = found.logits[0].view(len(seen), len(shares), -1)  # (B, S, K)
    whole = logits[:, :1]
    away = (logits - whole).abs().amax(-1)  # (B, S)
    changed = (logits.argmax(-1) != whole.argmax(-1)).sum(0)
    facts = torch.tensor(seen, dtype=torch.double)  # (B, S, 3)
    rows: dict[str, Any] = {
        "share": shares,
        "kept": (facts[..., 0] / facts[..., 1]).mean(0).tolist(),
        "drift": away.mean(0).tolist(),
        "largest_drift": away.amax(0).tolist(),
        "changed": changed.tolist(),
        "time": (facts[..., 2] / facts[:, :1, 2]).median(0).values.tolist(),
    }
    arm = arm_title(str(trained.card["settings"].get("arm", "model")))
    name = f"{arm}, {Path(trained.path).resolve().name}"
    curve = BudgetCurve(name, len(seen), pd.DataFrame(rows), found.skipped, found.notes)
    if not len(seen):
        raise UserError("no slide could be predicted", where=str(features))
    if out is not None:
        curve.write(out)
    return curve


def draw_budget(curve: BudgetCurve, stem: Path) -> list[Path]:
    """Drift of the logits and time of the model over the share that was kept."""
    from gated_srp.reports.figures import COLOURS, panels, save, tidy

    figure, (left, right) = panels(2)
    kept = 100 * curve.table["kept"]
    left.plot(kept, curve.table["drift"], "o-", color=COLOURS[0], label="mean over slides")
    left.plot(kept, curve.table["largest_drift"], "s--", color=COLOURS[1], label="largest")
    left.legend(frameon=False, fontsize=8)
    right.plot(kept, 100 * curve.table["time"], "o-", color=COLOURS[0])
    right.axline((100, 100), slope=1, color="0.7", linestyle=":")
    right.set_ylim(bottom=0)
    tidy(left, x="patches kept (%)", y="change of logits", title="Drift")
    tidy(right, x="patches kept (%)", y="time of the model (%)", title="Time")
    return save(figure, stem, title=f"Redundancy budget: {curve.run}, {counted(curve.slides, 'slide')}")
