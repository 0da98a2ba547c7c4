"""Slides of a cohort or a folder, or photographs, each measured for `gated-srp redundancy`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gated_srp.errors import UserError

if TYPE_CHECKING:
    from gated_srp.data.prepared import Preparation
    from gated_srp.data.redundancy import Redundancy

Progress = Callable[[int], Callable[[object], None]]


def refuse_mixed(of_slides: Mapping[str, object], of_images: Mapping[str, object]) -> None:
    """Slides or photographs, not both: each has arguments (the first of them needed) that mean nothing to the other."""
    slides, photographs = ([name for name, value in own.items() if value is not None] for own in (of_slides, of_images))
    if slides and photographs:
        raise UserError(
            f"redundancy: {', '.join(slides)} and {', '.join(photographs)} together: it measures slides (COHORT, with --run "
            "perhaps) or photographs (--images FOLDER --encoder NAME). Give one of them, and call it twice to compare."
        )
    if of_images["--images"] is not None and of_images["--encoder"] is None:
        raise UserError(
            "redundancy --images: no encoder was named. Name the one that your slides' features come from, e.g. --encoder "
            "uni_v2; --encoder efficientnet_lite0 needs no download."
        )
    if of_slides["COHORT"] is None and of_images["--images"] is None:
        given = next(iter(slides + photographs), None)
        raise UserError(
            f"redundancy: {'nothing' if given is None else f'{given}, but nothing'} to measure was named. Expected a cohort's YAML "
            "or a folder of feature files, or --images FOLDER --encoder NAME for photographs."
        )


def measure_images(
    folder: Path,
    encoder: str,
    *,
    weights: Path | None,
    size: int | None,
    at_most: int | None,
    seed: int,
    progress: Progress,
) -> tuple[str, list["Redundancy"], list[str]]:
    """As `measure_slides`, for photographs."""
    from gated_srp.reports.redundancy import find_photographs, measure_photographs
    from gated_srp.slides.encoders import find_encoder
    from gated_srp.slides.extract import best_device

    files = find_photographs(folder)
    files = [files[i] for i in _evenly(len(files), at_most)]
    spec = find_encoder(encoder)
    model = spec.load(weights).to(best_device())
    step = progress(len(files))
    measured, left_out = measure_photographs(files, model, size=size or spec.tile, seed=seed, step=step)
    return folder.resolve().name, measured, left_out


def measure_slides(
    cohort: Path, run: Path | None, *, layer: int, at_most: int | None, seed: int, progress: Progress
) -> tuple[str, list["Redundancy"], list[str]]:
    """The cohort's name, what was measured slide by slide, and why slides were left out."""
    from gated_srp.data.prepared import prepare
    from gated_srp.data.redundancy import measure
    from gated_srp.models import SlideTransformer, load_model
    from gated_srp.reports.redundancy import attention_tokens

    name, files, settings = _files(cohort)
    files = [files[i] for i in _evenly(len(files), at_most)]
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


def _evenly(count: int, at_most: int | None) -> list[int]:
    """Numbers of those that are taken of ``count``."""
    taken = count if at_most is None else min(at_most, count)
    return [i * count // taken for i in range(taken)]


def _files(cohort: Path) -> tuple[str, list[tuple[str, Path]], "Preparation"]:
    """Slides with their files. Labels are not needed: without a table every file of the folder is a slide."""
    from gated_srp.config.cohort import find_files, open_cohort, preparation
    from gated_srp.config.load import load_config
    from gated_srp.data.files.siblings import find_bags
    from gated_srp.data.prepared import Preparation
    from gated_srp.data.tables.matching import slide_stem

    if cohort.is_dir():
        found = find_bags(cohort)
        names = [slide_stem(path) for path in found]
        if len(set(names)) < len(names):  # the same slide in several folders
            names = [str(path.relative_to(cohort).with_suffix("")) for path in found]
        return cohort.resolve().name, list(zip(names, found, strict=True)), Preparation()
    config = load_config(cohort)
    if config.table or config.labels:
        return config.name, list(open_cohort(config).matches.found.items()), preparation(config)
    return config.name, [(slide_stem(path), path) for path in find_files(config)], preparation(config)
