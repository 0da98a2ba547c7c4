"""Folders as `compare` leaves them, without training: for tests of the page."""

import json
from pathlib import Path

import numpy as np
from PIL import Image
from reports.viewer_folders import CARD, CELLS, SIDE, features, run
from study.study_cells import cells, finish

from gated_srp.reports.tables import write_comparison
from gated_srp.study.comparison import collect, compare_cells

HOSTILE = "<script>alert(1)</script>"
SCORES = {"na": (0.60, 0.62, 0.61), "gated_srp": (0.710, 0.731, 0.719), "xsa": (0.60, 0.64, 0.58)}


def compared(home: Path, *, name: str = "toy", **settings: object) -> Path:
    """Three arms, three seeds, figures, a check, maps of two layers; one slide has a hostile name."""
    planned = cells(home / "runs", tuple(SCORES), (42, 43, 44), name=name, **settings)
    for cell in planned:
        value = SCORES[cell.arm][cell.seed - 42]
        gates = (0.1, 0.4) if cell.arm == "gated_srp" else ()
        finish(cell, gates=gates, macro_f1=value, accuracy=value, macro_auc=value)
        metrics = json.loads((cell.key / "metrics.json").read_text())
        about = {"cohort": name, "arm": cell.arm, "seed": cell.seed, "fold": 0, "score": "slide", "select": "macro_f1"}
        (cell.key / "metrics.json").write_text(json.dumps(about | metrics))
        (cell.key / "environment.json").write_text(json.dumps({"versions": {"torch": "2.0"}, "platform": HOSTILE}))
        chance = 0.5 + value / 10
        rows = [f"s{i:02d},p{i},{'ab'[i % 2]},a,{chance:.3f},{1 - chance:.3f}" for i in range(12)]
        rows.append(f"{HOSTILE},p12,a,a,{chance:.3f},{1 - chance:.3f}")
        table = "slide,case,label,predicted,prob_a,prob_b\n" + "\n".join(rows) + "\n"
        (cell.key / "predictions_test_slide.csv").write_text(table)
    results = collect(planned)
    found = compare_cells(planned, results, "na", repeats=20)
    write_comparison(home / "comparison", planned, results, found, title=name)
    (home / "about.txt").write_text("These data are <b>generated</b>.")
    (home / "check.json").write_text(json.dumps(check()))
    for picture in ("attention_layer2", "beta_layer1", "beta_layer2", "homogeneity"):
        draw(home / "heatmaps" / f"s00_{picture}.png")
    return home


def with_maps(home: Path, *, slides: int = 8) -> Path:
    """The same, with models and feature files of the first slides; the truth of the first one is known."""
    (home / "features").mkdir(parents=True)
    table = ["slide,case,label", *(f"s{i:02d},p{i},{'ab'[i % 2]}" for i in range(12))]
    (home / "slides.csv").write_text("\n".join(table) + "\n")
    for number in range(slides):
        features(home / "features", f"s{number:02d}", draw=number)
    named = {"features": [home / "features"], "table": home / "slides.csv", "target": "label"}
    compared(home, **named)
    for arm in ("na", "gated_srp"):
        for seed in (42, 43, 44):
            run(home / "runs" / "toy", arm, seed, CARD | {"classes": ["a", "b"]})
    lines = [f"{x * SIDE},{y * SIDE},{int(place % 5 == 0)}" for place, (x, y) in enumerate(CELLS)]
    (home / "truth").mkdir()
    (home / "truth" / "s00.csv").write_text("x,y,true\n" + "\n".join(lines) + "\n")
    return home


def check() -> dict[str, object]:
    summary = {
        "files": {"usable": 13, "looked_at": 13, "broken": {}, "bytes": 2_000_000, "deep": False},
        "slides": {"slides": 13, "patients": 13, "found": 13, "missing": 0, "unclear": 0, "broken": 0},
        "encoders": {"uni_v2": 13},
        "widths": {"1536": 13},
        "dtypes": {"float32": 13},
        "patches": {"min": 10.0, "median": 20.0, "max": 30.0, "total": 260},
        "strides": [{"stride": "256 px", "source": "patch_size_level0", "files": 13}],
        "neighbours": {"most": 24, "mean": {"min": 3.0, "median": 4.5, "max": 6.0}, "alone": 0.01},
        "cap": {"cap": None, "files": 0, "before": None, "after": None},
        "labels": {"task": "classification", "notes": [f"label: {HOSTILE}"], "classes": {"a": 7, "b": 6}},
    }
    finding = {"severity": "warning", "kind": "odd", "what": HOSTILE, "where": [], "cure": "Look."}
    return {"name": "toy", "must_fix": False, "summary": summary, "findings": [finding]}


def draw(path: Path, size: tuple[int, int] = (60, 40)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
