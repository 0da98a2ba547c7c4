"""The demo: a generated cohort, and the commands that a user would run on it.

How its settings were chosen, by a rule written down before any run: the numbers of patients, patches and epochs are what two cores
finish in less than four minutes. The strength of the foci is the first of 1, 1.5, 2, ... standard deviations at which plain attention
(NA) alone, with the first seed alone, reaches a macro F1 of 0.7 on validation in its best epoch; chance is 0.5. No other arm was run
while it was chosen, and whatever the comparison then gave was kept. The rest of the recipe are round numbers of an earlier version,
some of whose comparisons had been seen.

Validation F1 at strengths from 1 on: 0.57, 0.67, 0.67, 0.62, 0.62, 0.71; hence 3.5.

docs/evidence/simulation.yaml fixed when another cohort would take its place: if some point of the diagram `structure` had shown that open
gates help. None did, so the cohort stays, and the demo shows that plain attention and Gated SRP agree. docs/evidence/place.yaml fixed that
features_gated_srp_from_1 would be compared beside its other arms if its second claim were shown. It was. `train.gate_lr` is 10 because in
its 260 steps gates could not open at the paper's learning rate (config/reach.py).

Shapes: N patches, C channels.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.ndimage import gaussian_filter

from gated_srp.errors import UserError, counted
from gated_srp.files import whole_hdf5, write_json, write_whole

NAME = "demo"
_MADE = "generated.json"  # written last: the cohort is complete
_PATCH = 512  # level-0 pixels of a patch at 20x of a 40x slide
_TREE = Path("features", "20x_256px_0px_overlap", "features_demo64")


@dataclass(frozen=True)
class Recipe:
    """How the slides are generated; the module's docstring says how these numbers were chosen."""

    seed: int = 0
    patients: int = 200  # every fifth has two slides
    columns: int = 20
    rows: int = 16
    tissue: tuple[float, float] = (0.5, 0.8)  # share of the lattice that is tissue
    width: int = 64
    directions: int = 8  # of feature space along which the background varies
    smooth: float = 2.0  # length in patches over which it varies
    noise: float = 0.25  # independent for each patch and channel
    shift: float = 0.05  # per slide and channel: stain, scanner
    strength: float = 3.5  # of a focus, in standard deviations of the background along the same axis
    foci: tuple[int, int] = (8, 20)  # patches of foci per slide that has any
    # Of a focus: 0 is one patch; 1 are 5, 2 are 13, and then there are fewer foci of as many patches together.
    radius: int = 0
    # slide: the background does not vary along the axis of the foci
    contrast: Literal["neighbourhood", "slide"] = "neighbourhood"
    outline: float | None = None  # length over which the edge of the tissue varies; None: as the background

    def words(self) -> str:
        """What a reader of the report must know about the data."""
        slides = self.patients + self.patients // 5
        return (
            "These data are generated; there is no tissue behind them, and nothing here says how any method does on real slides. "
            f"{slides} slides of {self.patients} patients: each patch has {self.width} features, a background that varies slowly over "
            f"about {self.smooth:g} patches along {self.directions} shared directions, the slide's own shift, and noise of its own. "
            f"In the slides of half of the patients {self.foci[0]} to {self.foci[1]} small foci (single patches) deviate from what "
            f"surrounds them by {self.strength:g} standard deviations along one axis, the same in all slides, along which the background "
            "varies too: a focus is told by how it differs from its neighbours. The label says whether a slide has foci; "
            "the second table gives survival times whose hazard grows with their number. "
            "Sizes and epochs are what two cores finish in minutes. The strength is the first of 1, 1.5, 2, ... at which plain attention "
            "(NA) alone, with the first seed alone, reached a macro F1 of 0.7 on validation; this rule was written down first, no other "
            "arm was run under it, and what the comparison then gave is kept. The other numbers are round ones of an earlier version of "
            "this demo, some of whose comparisons had been seen."
        )


@dataclass(frozen=True, eq=False)
class Generated:
    """A slide: lattice cells (N, 2), features (N, C), whether a patch is a focus (N,), and the number of foci."""

    cells: np.ndarray
    features: np.ndarray
    focal: np.ndarray
    foci: int


def make_slide(rng: np.random.Generator, recipe: Recipe, axes: np.ndarray, foci: int) -> Generated:
    """``axes`` (directions, C): along which the background varies; the foci lie along the first."""
    shape = (recipe.rows, recipe.columns)
    ground = _smooth(rng, shape, recipe.smooth if recipe.outline is None else recipe.outline)
    tissue = ground > np.quantile(ground, 1 - rng.uniform(*recipe.tissue))
    fields = np.stack([_smooth(rng, shape, recipe.smooth) for _ in axes], -1)  # (rows, columns, directions)
    focal = np.zeros(shape, bool)
    place = np.argwhere(tissue)
    reach = np.arange(-recipe.radius, recipe.radius + 1)
    disc = reach**2 + reach[:, None] ** 2 <= recipe.radius**2
    for y, x in place[rng.choice(len(place), min(foci, max(1, round(foci / disc.sum()))), replace=False)]:
        across, down = np.arange(recipe.columns) - x, np.arange(recipe.rows)[:, None] - y
        focal |= across**2 + down**2 <= recipe.radius**2
    if recipe.contrast == "slide":
        fields[..., 0] = 0.0
    fields[..., 0] += recipe.strength * focal
    features = fields @ axes + recipe.noise * rng.standard_normal((*shape, recipe.width))
    features += recipe.shift * rng.standard_normal(recipe.width)
    return Generated(place[:, ::-1], features[tissue].astype(np.float32), focal[tissue], foci)


def _smooth(rng: np.random.Generator, shape: tuple[int, int], sigma: float) -> np.ndarray:
    field: np.ndarray = gaussian_filter(rng.standard_normal(shape), sigma)
    return np.asarray((field - field.mean()) / field.std())


def generate(home: Path, recipe: Recipe = Recipe()) -> bool:  # noqa: B008 - frozen
    """Write the cohort into ``home``: files as TRIDENT writes them, two tables, two YAMLs, the true foci. False if it exists."""
    made = home / _MADE
    if made.is_file() and json.loads(made.read_text(encoding="utf-8")) == json.loads(json.dumps(asdict(recipe))):
        return False
    inside = {path.name for path in home.iterdir()} if home.is_dir() else set()
    stopped = "about.txt" in inside and inside <= _OWN  # a demo that was stopped while generating its cohort
    if home.exists() and (not home.is_dir() or (inside and not made.is_file() and not stopped)):
        what = "exists already and is no demo's folder"
        raise UserError(what, where=home, cure="Choose another with -o, or remove it.")
    write_whole(home / "about.txt", recipe.words() + "\n")
    rng = np.random.default_rng(recipe.seed)
    axes = np.linalg.qr(rng.standard_normal((recipe.width, recipe.directions)))[0].T
    slides, patients = [("slide_id", "patient", "label")], [("patient", "time_days", "event")]
    for number in range(recipe.patients):
        patient, focal, counts = f"P{number + 1:03d}", bool(number % 2), []
        for part in "ab"[: 1 + (number % 5 == 0)]:
            foci = int(rng.integers(recipe.foci[0], recipe.foci[1] + 1)) if focal else 0
            slide = make_slide(rng, recipe, axes, foci)
            counts.append(foci)
            write_trident(home / _TREE / f"{patient}_{part}.h5", slide, recipe)
            # Whether each patch is a focus, for `gated-srp heatmap --value`.
            truth = [("x", "y", "true_focus"), *np.c_[slide.cells * _PATCH, slide.focal].tolist()]
            _write_table(home / "truth" / f"{patient}_{part}.csv", truth)
            slides.append((f"{patient}_{part}", patient, "foci" if focal else "no foci"))
        patients.append((patient, *_fate(rng, sum(counts) / len(counts))))
    _write_table(home / "slides.csv", slides)
    _write_table(home / "survival.csv", patients)
    write_whole(home / "cohort.yaml", _YAML.format(name=NAME, table="slides.csv", what="target: label"))
    survival = "task: survival\ntime: time_days\nevent: event"
    write_whole(home / "survival.yaml", _YAML.format(name=f"{NAME}-survival", table="survival.csv", what=survival))
    write_json(made, asdict(recipe))
    return True


_OWN = {"about.txt", "features", "truth", "slides.csv", "survival.csv", "cohort.yaml", "survival.yaml"}
_YAML = """\
# Written by `gated-srp demo`; on your own data `gated-srp init FOLDER TABLE` writes such a file.
name: {name}
features: features
table: {table}
{what}

# A small model and few epochs, so that the demo takes minutes, and gates that learn ten times as fast, so that they can open
# in so few steps. Without these two lines: the paper's settings.
model: {{dim: 64, depth: 2, num_heads: 4, num_landmarks: 16, hidden_dim: 16}}
train: {{epochs: 6, lr: 5e-4, gate_lr: 10, accumulation: 4, workers: 0}}

arms: [na, xsa, diff, gated_srp, features_gated_srp_from_1]
seeds: [42, 43]
out: runs
"""


def _fate(rng: np.random.Generator, foci: float) -> tuple[str, str]:
    """Days to the event or to the end of follow-up, and whether it was the event; each focus raises the hazard by a tenth."""
    death = rng.exponential(1500.0) / 1.1**foci
    end = rng.uniform(300.0, 3000.0)
    return f"{max(1.0, min(death, end)):.0f}", str(int(death <= end))


def write_trident(path: Path, slide: Generated, recipe: Recipe) -> None:
    """Features as TRIDENT writes them: the same arrays and attributes, at the same place in the tree."""
    with whole_hdf5(path) as file:
        features = file.create_dataset("features", data=slide.features)
        features.attrs.update({"name": path.stem, "encoder": "demo64"})
        coords = file.create_dataset("coords", data=slide.cells * _PATCH)
        sizes = {"level0_width": recipe.columns * _PATCH, "level0_height": recipe.rows * _PATCH}
        scale = {"patch_size": 256, "patch_size_level0": _PATCH, "level0_magnification": 40, "target_magnification": 20}
        coords.attrs.update({**scale, "overlap": 0, "name": path.stem, **sizes})


def _write_table(path: Path, rows: Sequence[Sequence[object]]) -> None:
    write_whole(path, "".join(",".join(map(str, row)) + "\n" for row in rows))


# Steps ---------------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A step of the demo in words, and the arguments of the `gated-srp` command that does it."""

    words: str
    command: tuple[str, ...]


def steps(home: Path) -> Iterator[Step]:
    """Do each step before asking for the next: which slide is drawn depends on the split."""
    cohort, runs = str(home / "cohort.yaml"), home / "runs" / NAME
    yield Step("what is in the folder, and is it usable?", ("check", cohort, "--json", str(home / "check.json")))
    yield Step(
        "how redundant are neighbouring patches?",
        ("redundancy", cohort, "--slides", "60", "-o", str(home / "redundancy")),
    )
    yield Step("five models, two seeds, identical splits", ("compare", cohort))
    run = runs / "gated_srp" / "seed42"
    slide = heatmap_slide(run)
    file, out = str(home / _TREE / f"{slide}.h5"), ("-o", str(home / "heatmaps"))
    truth = ("heatmap", file, "--value", str(home / "truth" / f"{slide}.csv"), "--percentile", *out)
    yield Step(f"the true foci of {slide}, the first test slide that has any", truth)
    for words, *value in (
        ("what the model attends to in layer 1", "attention", "--layer", "1"),
        ("what the model attends to in layer 2", "attention", "--layer", "2"),
        ("what its gates do there", "beta"),
        ("where its gates draw attention to", "change"),
        ("how alike its neighbours are", "homogeneity"),
    ):
        yield Step(words, ("heatmap", str(run), file, "--value", *value, *out))
    yield Step("everything on one page", ("report", str(home), "-o", str(home / "report.html")))


def heatmap_slide(run: Path) -> str:
    """The first test slide, by name, that has foci."""
    return _with_foci(run)[0]["slide"]


def _with_foci(run: Path) -> list[dict[str, str]]:
    """Test slides that have foci, by name."""
    with (run / "predictions_test_slide.csv").open(encoding="utf-8", newline="") as file:
        return sorted((row for row in csv.DictReader(file) if row["label"] == "foci"), key=lambda row: row["slide"])


# What was found ------------------------------------------------------------------------------------------------------

_SHOWN = 20  # test slides on which maps are scored


def outcome(home: Path) -> Iterator[str]:
    """What was planted and what was found, for somebody who has read nothing else."""
    import pandas as pd

    from gated_srp.config.reach import gates_moved
    from gated_srp.models import METHOD
    from gated_srp.training.folder import RunFolder

    found = json.loads((home / "runs" / NAME / "comparison" / "comparison.json").read_text(encoding="utf-8"))
    run = RunFolder(home / "runs" / NAME / METHOD / "seed42")
    rows = {one["arm"]: one for one in found["cohorts"] if one["metric"] == "macro_auc"}
    yield "Planted: small foci in the slides of half of the patients; each differs from the patches around it."
    yield (
        f"Found: slides with foci are told from others with an AUC of {rows[METHOD]['reference_mean']:.2f} by plain attention (NA) and of "
        f"{_against(rows[METHOD], 'Gated SRP')}."
    )
    if early := rows.get(_EARLY):
        what = "Removed before the first layer instead, what neighbours share"
        yield f"{what}: an AUC of {_against(early, _EARLY)}. docs/evidence.md asks it of many such cohorts."
    if len(run.gates):
        yield f"The gates, in the last epoch: {gates_moved(run.gates)} (seed 42; maps show the epoch that validation kept)."
    slides = [row["slide"] for row in _with_foci(run.path)][:_SHOWN]
    truths = {slide: pd.read_csv(home / "truth" / f"{slide}.csv")["true_focus"].to_numpy(bool) for slide in slides}
    scores = {name: np.mean(values) for name, values in _map_scores(run.path, home, truths).items() if len(values)}
    said = ", ".join(f"{name} {100 * score:.0f} %" for name, score in scores.items())
    yield f"The maps: of two patches, one of them a focus, this puts the focus first: {said}; 50 % is chance ({len(slides)} test slides)."


_EARLY = "features_gated_srp_from_1"  # of the demo by the rule of docs/evidence/place.yaml


def _against(row: Mapping[str, Any], name: str) -> str:
    """What an arm reached, and whether that differs from plain attention: over seeds, which may be too few, and over patients."""
    seeds, (low, high) = counted(row["n"], "seed"), row["corrected"]["interval"]
    patients = row["bootstrap"]  # `compare` draws it unless it is told not to
    better = "better" if row["difference"] > 0 else "worse"
    if row["claimed"]:
        shown = f"is measurably {better}"
    elif patients["low"] > 0 or patients["high"] < 0:
        shown = f"is {better} over resampled patients, a hint: {seeds} cannot show it"
    else:
        shown = "is not distinguishable from plain attention here"
    over = f"over {seeds} " + ("no interval" if low is None else f"{low:+.4f} to {high:+.4f}")
    spans = f"95 % interval {over}, over resampled patients {patients['low']:+.4f} to {patients['high']:+.4f}"
    return f"{row['mean']:.2f} by {name}, which {shown} ({row['difference']:+.4f}; {spans})"


def _map_scores(run: Path, home: Path, truths: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
    from gated_srp.reports.maps import maps_of, view_slide

    found: dict[str, list[float]] = {"low homogeneity": [], "high beta of layer 1": [], "attention of layer 1": []}
    for slide, focal in truths.items():
        view = view_slide(run, home / _TREE / f"{slide}.h5", layer=1)
        maps = [-maps_of(view, "homogeneity")[0].values]
        maps += [maps_of(view, value, layer=1)[0].values for value in ("beta", "attention")]
        for scores, values in zip(found.values(), maps, strict=True):
            scores.append(ranked_first(values, focal))
    return found


def ranked_first(values: np.ndarray, focal: np.ndarray) -> float:
    """The share of pairs of a focus and another patch in which the focus has the higher value; ties count half.

    >>> ranked_first(np.array([3.0, 1.0, 2.0, 1.0]), np.array([True, True, False, False]))
    0.625
    """
    first, others = values[focal][:, None], values[~focal][None]
    return float(((first > others) + 0.5 * (first == others)).mean())
