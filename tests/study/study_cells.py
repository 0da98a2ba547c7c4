"""Cells and finished folders made by hand, for tests of studies that train nothing."""

import json
from pathlib import Path

from gated_srp.config import CohortConfig
from gated_srp.study.cells import Cell, Row, plan

CURVE = "slide,case,label,predicted,prob_a,prob_b\n"


def config(out: Path, **settings: object) -> CohortConfig:
    plain = {
        "name": "toy",
        "task": "classification",
        "classes": ["a", "b"],
        "metric": "macro_f1",
        "score": "slide",
        "train": {"epochs": 10, "lr": 1e-4, "weight_decay": 0.0, "accumulation": 1},
        "out": out,
    }
    return CohortConfig.model_validate(plain | settings)


def cells(
    out: Path, arms: tuple[str, ...] = ("na", "gated_srp"), seeds: tuple[int, ...] = (42, 43), **settings: object
):
    return plan(config(out, **settings), [Row.of(arm) for arm in arms], seeds)


def finish(
    cell: Cell,
    *,
    split: str = "s",
    gates: tuple[float, ...] = (),
    val: float = 0.5,
    best_epoch: int | None = None,
    **metrics: float | None,
) -> None:
    """Write the folder that training would have left."""
    run = cell.run
    run.path.mkdir(parents=True, exist_ok=True)
    run.write_settings(cell.settings)
    (run.path / "split.csv").write_text("slide,split\n" + "s1,train\n" * 7 + "s2,val\n" + "s3,test\n" * 2)
    rows = ["s1,p1,a,a,0.9,0.1", "s2,p2,b,b,0.2,0.8", "s3,p3,a,b,0.4,0.6", "s4,p4,b,b,0.3,0.7"]
    (run.path / "predictions_test_slide.csv").write_text(CURVE + "\n".join(rows) + "\n")
    if gates:
        head = "epoch,layer,mean,std,share_anti,share_identity,share_projection,share_reflection,share_negative,mean_over_delta"
        lines = [f"{epoch},0,{mean},0.1,0.1,0.6,0.2,0.1,0.3,{mean}" for epoch, mean in enumerate(gates, 1)]
        (run.path / "gates.csv").write_text("\n".join([head, *lines]) + "\n")
    content = {"split_hash": split, "best_score": val, "test": {cell.config.score: metrics or {"macro_f1": 0.5}}}
    (run.path / "metrics.json").write_text(json.dumps(content | ({"best_epoch": best_epoch} if best_epoch else {})))
