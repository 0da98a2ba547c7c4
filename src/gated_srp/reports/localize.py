"""`gated_srp.localize`: maps of finished runs against what was drawn on the slides, per arm and paired between arms.

Shapes: L patches, S slides, R resamples of patients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from gated_srp.data.annotations import NOTHING, Annotations, annotations_of, find_annotations, plain, refuse_unknown
from gated_srp.data.prepared import Preparation, open_header
from gated_srp.data.regions import folder_of
from gated_srp.errors import Note, UserError, counted
from gated_srp.models import SlideModel
from gated_srp.progress import Event, Progress, silent
from gated_srp.reports import maps
from gated_srp.reports.localization import (
    Detections,
    Floats,
    best_threshold,
    detect,
    find_lesions,
    score,
)
from gated_srp.reports.localized import ELSEWHERE, Localization, collect
from gated_srp.reports.maps import Patches, SlideView, view_slide
from gated_srp.srp.graph import PatchGraph
from gated_srp.training.folder import PRETRAINED, RunFolder
from gated_srp.training.known import files_for, known_of, with_ids
from gated_srp.training.seen import overlap_in_words, refuse_seen
from gated_srp.training.trained import TrainedRun, open_runs

_SAMPLE = 200  # patches per slide, class and layer that are kept for a figure


def localize(
    runs: str | Path | Sequence[str | Path],
    slides: str | Path,
    *,
    annotations: str | Path,
    classes: str | Sequence[str] = (),
    cover: float = 0.5,
    normal: bool = False,
    table: str | Path | None = None,
    reference: str | None = None,
    allow_overlap: bool = False,
    repeats: int = 1000,
    seed: int = 0,
    coords: str | Path | None = None,
    stride: float | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Localization:
    """Score what runs show of slides against drawn regions, and arms against each other on the same slides.

    Args:
        runs: run folders, model files, or a folder of runs (COHORT with ARM/seed42 below it).
        slides: folder of feature files, or one.
        annotations: folder with a file of annotations per slide (see docs/annotations.md), or the file of the one slide.
        classes: what is to be found; all regions where they have one class.
        cover: share of a patch that regions must cover for it to count as positive.
        normal: slides without a file of annotations have nothing to find, instead of being left out.
        table: a spreadsheet of slides and their patients; of the runs' own predictions if not set.
        reference: the arm that others are compared with; ``na`` if it is among them, otherwise the first.
        allow_overlap: score training slides too, which is no test; validation slides never are, they choose the threshold.
        repeats: how often patients are resampled.
        seed: of the resampling.
        coords, stride, force: as in `predict`.
        progress: called after each slide.

    Returns:
        `Localization`: ``table``, ``slides``, ``differences``, ``gates``, ``verdict``, ``write(folder)``.

    Example:
        >>> found = gated_srp.localize("demo/runs/demo", "demo/features", annotations="demo/truth")  # doctest: +SKIP
        >>> print(found.verdict)  # doctest: +SKIP
    """
    if not 0 < cover <= 1:
        raise UserError(f"{cover:g}, expected above 0, up to 1.", where="cover")
    members = open_runs(find_runs(runs))
    arms = _arms(members)
    reading = Preparation(coords=Path(coords) if coords else None, stride=stride, regions=folder_of(annotations))
    files = files_for(members[0], slides)
    known = _with_cases(members, with_ids(files, table))
    beside = known_of(members[0], files, table)
    drawn, wanted, notes = _annotations(known, Path(annotations), classes, reading, normal=normal)
    known = known[known["slide"].isin(drawn)].reset_index(drop=True)
    parts = [_parts(run, known) for run in members]
    jobs = [ScoredRun(run, arm, unit) for run, (arm, unit) in zip(members, arms, strict=True)]
    notes += list(_overlap(jobs, parts, known, allow_overlap))
    for test in (False, True):  # validation slides first: they choose thresholds
        for row, slide, case, file in known[["slide", "case", "file"]].itertuples():
            wants = [
                job
                for job, words in zip(jobs, parts, strict=True)
                if (_part(words[row]) == "val") != test and (not test or allow_overlap or not words[row])
            ]
            if wants:
                truth = Truth.of(Path(file), drawn[slide], wanted, cover, reading)
                truth = replace(truth, known=beside.get(Path(file), {}))
                for job in wants:
                    job.see(truth, slide, case, test=test, reading=reading, force=force)
            progress(Event("slides", row + 1 + test * len(known), 2 * len(known)))
    return collect(jobs, wanted, reference, notes, repeats=repeats, seed=seed)


def find_runs(runs: str | Path | Sequence[str | Path]) -> list[Path]:
    """Runs as they are named; of a folder that is none, all runs below it.

    >>> [str(run) for run in find_runs(["a/seed42", "b/model.safetensors"])]
    ['a/seed42', 'b/model.safetensors']
    """
    named = [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]
    found: list[Path] = []
    for place in named:
        below = []
        if place.is_dir() and not (place / "model.safetensors").is_file():
            runs_below = (path.relative_to(place) for path in place.rglob("model.safetensors"))
            below = sorted(place / path.parent for path in runs_below if PRETRAINED not in path.parts)
        found += below or [place]
    return found


def _arms(members: Sequence[TrainedRun]) -> list[tuple[str, str]]:
    """Arm and unit (cohort, seed, fold) of each run; runs of one arm and unit are told apart by their folder."""
    found = []
    for run in members:
        card = run.card
        arm = str(card.get("arm", card["settings"].get("arm", "model")))
        seed = card.get("seed", run.path.name.removeprefix("seed"))
        found.append((arm, f"{card.get('cohort', '')} seed {seed} fold {card.get('fold', 0)}"))
    double = {one for one in found if found.count(one) > 1}
    return [
        (f"{arm} ({run.path})", unit) if (arm, unit) in double else (arm, unit)
        for run, (arm, unit) in zip(members, found, strict=True)
    ]


def _with_cases(members: Sequence[TrainedRun], slides: pd.DataFrame) -> pd.DataFrame:
    """Patients from the runs' own predictions, where no table names them."""
    cases: dict[str, str] = {}
    for run in members:
        for part in ("test", "val"):
            with suppress(UserError, OSError):
                own = RunFolder(run.path).predictions(part, "slide")
                cases |= dict(zip(own["slide"].astype(str), own["case"].astype(str), strict=True))
    kept = [case or cases.get(slide, "") for slide, case in zip(slides["slide"], slides["case"], strict=True)]
    return slides.assign(case=kept)


def _annotations(
    known: pd.DataFrame, place: Path, classes: str | Sequence[str], reading: Preparation, *, normal: bool
) -> tuple[dict[str, Annotations], tuple[str, ...], list[Note]]:
    """What is drawn on each slide, the classes that are wanted, and what to say of it."""
    files = find_annotations(place, list(known["slide"]))
    drawn: dict[str, Annotations] = {}
    for slide, file in zip(known["slide"], known["file"], strict=True):
        if slide in files:
            drawn[slide] = annotations_of(files[slide], open_header(file, reading))
    there = {plain(name): name for one in drawn.values() for name in one.classes}
    wanted = (classes,) if isinstance(classes, str) else tuple(classes)
    refuse_unknown(wanted, there.values(), place)
    if not wanted and len(there) != 1:
        listed = ", ".join(sorted(there.values())) or "none"
        raise UserError(f"which class is to be found? Drawn are: {listed}", where=place, cure="Name it with --class.")
    wanted = wanted or tuple(there.values())
    notes = [note for one in drawn.values() for note in one.notes][:5]
    if missing := [slide for slide in known["slide"] if slide not in drawn]:
        who = f"{counted(len(missing), 'slide')} without a file of annotations"
        how = "taken to have nothing drawn" if normal else "left out; --normal says that they have nothing to find"
        notes.append(Note("note", "unannotated", f"{who}: {how}"))
        drawn |= dict.fromkeys(missing if normal else (), NOTHING)
    return drawn, wanted, notes


def _parts(run: TrainedRun, slides: pd.DataFrame) -> list[str]:
    """What the run has seen of each slide; nothing where it is new to it, or that is not known."""
    rows = zip(slides["slide"], slides["case"], slides["file"], strict=True)
    return ["" if run.seen is None else run.seen.of(*map(str, row)) for row in rows]


def _part(word: str) -> str:
    return word and ("val" if word.startswith("validation") else "train")


def _overlap(
    jobs: Sequence[ScoredRun], parts: Sequence[list[str]], known: pd.DataFrame, allowed: bool
) -> Iterator[Note]:
    said_of: dict[Note, None] = {}
    for job, words in zip(
        jobs, parts, strict=True
    ):  # as `evaluate` does: what is scored must be new to the model, or it is said
        scored_by = known[[_part(word) != "val" and (allowed or not word) for word in words]]
        if len(scored_by):
            said_of |= dict.fromkeys(refuse_seen(job.run.seen, scored_by, where=job.label, allowed=allowed))
    yield from said_of
    for job, words in list(zip(jobs, parts, strict=True))[:1]:
        if said := overlap_in_words(words):
            how = "scored all the same, which is no test" if allowed else "left out of the scores"
            yield Note(
                "warning" if allowed else "note", "seen_in_training", f"{said}; training slides are {how} ({job.label})"
            )
    if not any(_part(word) == "val" for words in parts for word in words):
        said = "no annotated slide is in a run's validation part, so there is no threshold for Dice, and no Dice"
        yield Note("note", "no_validation", said)
    scored = [row for row in range(len(known)) if allowed or any(not words[row] for words in parts)]
    if unknown := int((known["case"][scored] == "").sum()):
        said = f"the patients of {counted(unknown, 'slide')} are not known; each is taken for a patient of its own"
        yield Note("warning", "patients_unknown", said, cure="Name their spreadsheet with --table.")


# One slide ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Truth:
    """A slide's patches, whether each is positive, how far each class covers it, and the lesions."""

    file: Path
    patches: Patches
    positive: np.ndarray  # (N,) of all patches of the file
    of_class: Mapping[str, np.ndarray]  # (N,) whether a patch is of a class; elsewhere: of none
    shape: Any
    known: Mapping[str, Any] = field(default_factory=dict)  # `known_of`: the patient's other slides, covariates

    @classmethod
    def of(cls, file: Path, drawn: Annotations, wanted: Sequence[str], cover: float, reading: Preparation) -> Truth:
        patches = Patches.of(open_header(file, reading))
        shares = {name: drawn.coverage(patches.corners, patches.side, [name]) for name in drawn.classes}
        of_class = {plain(name): share >= cover for name, share in shares.items()}
        touched = np.sum(list(shares.values()), axis=0) if shares else np.zeros(len(patches.corners))
        positive = drawn.coverage(patches.corners, patches.side, wanted) >= cover
        return cls(file, patches, positive, {**of_class, ELSEWHERE: touched == 0}, drawn.shape(wanted))


@dataclass(eq=False)
class ScoredRun:
    """A run and what its maps gave so far."""

    run: TrainedRun
    arm: str
    unit: str
    model: SlideModel | None = None
    validation: dict[str, list[tuple[Floats, np.ndarray]]] = field(default_factory=lambda: defaultdict(list))
    thresholds: dict[str, float] = field(default_factory=dict)
    slides: list[tuple[str, str]] = field(default_factory=list)  # slide and case, in the order of the rest
    rows: list[dict[str, Any]] = field(default_factory=list)
    detections: dict[str, list[Detections]] = field(default_factory=lambda: defaultdict(list))
    medians: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[tuple[str, str], list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))

    @property
    def label(self) -> str:
        return f"{self.arm}, {self.unit.strip()}"

    def see(self, truth: Truth, slide: str, case: str, *, test: bool, reading: Preparation, force: bool) -> None:
        """One slide: of validation for the thresholds, of the test for the scores."""
        self.model = self.model or self.run.load()
        how: dict[str, Any] = {"reading": reading, "model": self.model, "force": force}
        view = view_slide(self.run, truth.file, every=True, known=truth.known, **how)
        rows = view.patches.rows
        positive = truth.positive[rows]
        values = shown_values(view)
        if not test:
            for name, found in values.items():
                self.validation[name].append((found, positive))
            return
        self.slides.append((slide, case or slide))
        corners, header = view.patches.corners, view.patches.header
        graph = PatchGraph.from_coords(torch.from_numpy(corners), stride=header.stride, window=3)
        lesions = find_lesions(truth.shape, corners, view.patches.side, header.mpp)
        about: dict[str, Any] = {
            "run": str(self.run.path),
            "arm": self.arm,
            "unit": self.unit,
            "slide": slide,
            "case": case or slide,
        }
        about |= {"patches": len(rows), "positive": int(positive.sum()), "lesions": lesions.count}
        for name, found in values.items():
            if name not in self.thresholds:
                self.thresholds[name] = best_threshold(self.validation.pop(name, []))
            self.rows.append({**about, "value": name, **score(found, positive, self.thresholds[name])})
            self.detections[name].append(detect(found, graph, lesions))
            if name.startswith(("beta", "homogeneity")):
                self._by_class(name, found, {kind: chosen[rows] for kind, chosen in truth.of_class.items()})

    def _by_class(self, name: str, values: Floats, of_class: Mapping[str, np.ndarray]) -> None:
        medians = {}
        for kind, chosen in of_class.items():
            if (count := int(chosen.sum())) > 0:
                medians[kind] = float(np.median(values[chosen]))
                some = np.linspace(0, count - 1, min(count, _SAMPLE)).astype(int)
                self.samples[name, kind].append(np.sort(values[chosen])[some])
        self.medians.append({"value": name, "place": len(self.slides) - 1, **medians})


def shown_values(view: SlideView) -> dict[str, Floats]:
    """Every map of a view, (L,), in units that slides share: attention, correction and change in multiples of the slide's mean."""
    found: dict[str, Floats] = {}
    for value in maps.VALUES:
        layers = range(1, len(view.layers) + 1) if value in ("attention", "change") else (None,)
        for layer in layers:
            with suppress(UserError):  # this model has no such value
                for one in maps.maps_of(view, value, layer=layer):
                    if not one.name.endswith("_positive"):
                        found[one.name] = np.asarray(one.values, np.float64) / (one.unit or 1.0)
    return found
