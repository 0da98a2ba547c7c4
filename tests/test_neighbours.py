"""A stranger's folder in the layout of each neighbouring tool goes through init, check, train, predict and heatmap.

The folders are written by `neighbours.py`, which shares nothing with the readers.
"""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from neighbours import COHORTS, COUNT, Cohort

import gated_srp
from gated_srp.config import load_config

TINY = {"dim": 8, "depth": 2, "num_heads": 2, "num_landmarks": 4, "hidden_dim": 4}
SETTINGS = {f"model.{key}": value for key, value in TINY.items()} | {
    "train.epochs": 1,
    "train.workers": 0,
    "seeds": [42],
}
# What is said of so small a cohort, or of a tool whose files name no encoder and whose tables name no patient.
EXPECTED = {"rare_class", "few_events", "split", "reach"}


def mean_neighbours(corners: np.ndarray, stride: float) -> float:
    """By the definition: patches one stride away, in a row, a column or a diagonal."""
    apart = np.abs(corners[:, None] - corners[None]).max(-1)
    return float((np.isclose(apart, stride)).sum(1).mean())


def started(cohort: Cohort, home: Path) -> Path:
    """The YAML that `init` writes, with what only the user can know."""
    draft = gated_srp.init(cohort.features, cohort.table, slides=cohort.slides, out=home / "cohort.yaml")
    assert f"{cohort.files} feature files" in draft.text
    lines = [*draft.lines, *cohort.settings.splitlines()]
    draft.path.write_text("\n".join(lines) + "\n")
    return draft.path


def checked(path: Path, cohort: Cohort) -> None:
    found = gated_srp.check(load_config(path, SETTINGS))
    assert found.errors == (), [str(note) for note in found.errors]
    assert {note.kind for note in found.warnings} <= EXPECTED, [str(note) for note in found.warnings]
    slides = found.facts["slides"]
    assert (slides["slides"], slides["found"], slides["missing"], slides["unclear"]) == (COUNT, COUNT, 0, 0)
    assert found.facts["files"]["usable"] == COUNT and slides["unused_files"] == 0
    assert [one["stride"] for one in found.facts["strides"]] == [f"{cohort.stride:g} {cohort.unit}"]
    assert found.facts["encoders"] == {cohort.encoder or "not said": COUNT}
    means = [mean_neighbours(corners, cohort.stride) for corners in cohort.corners.values()]
    assert found.facts["neighbours"]["mean"]["median"] == pytest.approx(np.median(means))


def walked(path: Path, cohort: Cohort, home: Path) -> None:
    """Train, predict every slide, draw one and compare where its patches are."""
    said: list[str] = []
    reading = {"coords": cohort.coords} if cohort.coords else {}
    run = gated_srp.train(path, settings=SETTINGS, out=home / "runs", progress=lambda event: said.append(event.text))
    assert [line for line in said if line.startswith("warning") and "the mean of beta typically" not in line] == []
    predicted = gated_srp.predict(run.path, cohort.features, workers=0, **reading)
    assert sorted(predicted.table["slide"]) == sorted(cohort.corners) and not len(predicted.skipped)
    assert {note.kind for note in predicted.notes if note.level != "note"} <= {"seen_in_training"}, predicted.notes
    file = predicted.table.set_index("slide")["file"][(name := next(iter(cohort.corners)))]
    formats = ["csv", "geojson"] if cohort.unit == "px" else ["csv"]
    drawn = gated_srp.heatmap(run.path, file, value="beta", export=formats, out=home / "maps", **reading)
    table = pd.read_csv(next(one for one in drawn.written if one.suffix == ".csv"))
    np.testing.assert_array_equal(table[["x", "y"]].to_numpy(), cohort.corners[name])
    assert set(table["side"]) == {cohort.side}
    if cohort.unit == "px":
        content = json.loads(next(one for one in drawn.written if one.suffix == ".geojson").read_text())
        squares = [
            one["geometry"]["coordinates"][0]
            for one in content["features"]
            if one["properties"]["objectType"] == "detection"
        ]
        np.testing.assert_array_equal([square[0] for square in squares], cohort.corners[name])
        np.testing.assert_array_equal([square[2] for square in squares], cohort.corners[name] + cohort.side)


@pytest.mark.slow
@pytest.mark.parametrize("layout", COHORTS)
def test_a_strangers_folder_goes_through_init_check_train_predict_and_heatmap(layout, tmp_path):
    cohort = COHORTS[layout](tmp_path)
    path = started(cohort, tmp_path)
    checked(path, cohort)
    walked(path, cohort, tmp_path)
