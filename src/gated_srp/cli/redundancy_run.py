"""Slides of a cohort or a folder, each measured for `gated-srp redundancy`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gated_srp.errors import UserError

if TYPE_CHECKING:
    from gated_srp.data.preparation import Preparation
    from gated_srp.data.redundancy import Redundancy

Progress = Callable[[int], Callable[[object], None]]


def measure_slides(
    cohort: Path, run: Path | None, *, layer: int, at_most: int | None, seed: int, progress: Progress
) -> tuple[str, list["Redundancy"], list[str]]:
    """The cohort's name, what was measured slide by slide, and why slides were left out."""
    from gated_srp.data.preparation import prepare
    from gated_srp.data.redundancy import measure
    from gated_srp.models import SlideTransformer, load_model
    from gated_srp.report.redundancy import attention_tokens

    name, files, settings = _files(cohort)
    if at_most is not None and at_most < len(files):
        files = [files[i * len(files) // at_most] for i in range(at_most)]
    model = None if run is None else load_model(run / "model.safetensors" if run.is_dir() else run)
    if model is not None and not isinstance(model, SlideTransformer):
        raise UserError(f"{run}: a {type(model).__name__} has no attention layers whose tokens could be measured.")
    measured: list[Redundancy] = []
    left_out = []
    step = progress(len(files))
    for slide, path in files:
        try:
            bag = prepare(path, settings)
            if not bag.graph.neighbour_count.any():
                raise UserError(f"{path}: no patch has a neighbour.")
        except UserError as error:
            left_out.append(str(error))
            continue
        finally:
            step(path)
        kinds = {"features": bag.features}
        if model is not None:
            kinds = attention_tokens(model, bag.features, bag.graph, layer)
        measured += [measure(slide, rows, bag.graph, what=what, seed=seed) for what, rows in kinds.items()]
    if not measured:
        first = f" The first: {left_out[0]}" if left_out else ""
        raise UserError(f"{cohort}: no slide can be measured.{first} `gated-srp check` says what is wrong with each.")
    return name, measured, left_out


def _files(cohort: Path) -> tuple[str, list[tuple[str, Path]], "Preparation"]:
    """Slides with their files. Labels are not needed: without a table every file of the folder is a slide."""
    from gated_srp.data.cohort_data import find_files, open_cohort
    from gated_srp.data.config import load_config
    from gated_srp.data.matching import slide_stem
    from gated_srp.data.preparation import Preparation
    from gated_srp.data.siblings import find_bags

    if cohort.is_dir():
        found = find_bags(cohort)
        names = [slide_stem(path) for path in found]
        if len(set(names)) < len(names):  # the same slide in several folders
            names = [str(path.relative_to(cohort).with_suffix("")) for path in found]
        return cohort.resolve().name, list(zip(names, found, strict=True)), Preparation()
    config = load_config(cohort)
    if config.table or config.labels:
        return config.name, list(open_cohort(config).matches.found.items()), Preparation.of(config)
    return config.name, [(slide_stem(path), path) for path in find_files(config)], Preparation.of(config)
