"""`gated_srp.explain`: one slide, one run, one page with the prediction, maps, patches, the model's card, and how far to trust it."""

import base64
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from gated_srp.data.annotations import find_annotations
from gated_srp.data.files.containers import CONTAINERS
from gated_srp.data.matching import slide_stem
from gated_srp.data.prepared import Preparation
from gated_srp.data.regions import folder_of
from gated_srp.errors import Note, UserError
from gated_srp.files import write_whole
from gated_srp.models import load_card, model_file
from gated_srp.progress import Progress, silent
from gated_srp.reports.draw import is_quiet
from gated_srp.reports.heatmap import draw_slide, known_beside
from gated_srp.reports.maps import SlideView, view_slide
from gated_srp.slides.encoders import find_encoder
from gated_srp.slides.extract import extract
from gated_srp.slides.ome_zarr import is_ome_zarr
from gated_srp.slides.reader import slide_name
from gated_srp.training.predict import predict
from gated_srp.training.trained import TrainedRun

_CARD = ("cohort", "arm", "seed", "task", "classes", "encoder", "best_epoch", "split_hash", "temperature")
_WIDEST = 1400  # pixels of a picture on the page
MEANING = {
    "attention": "Where the model looked, in multiples of the slide's mean: 1 is average, orange is more, purple is less. "
    "The scale is the same for every slide.",
    "change": "Patches that gained (orange) or lost (purple) attention because of the gates, as a share of the slide's mean attention.",
    "beta": "The gates, layer by layer, over their whole range: above zero (orange) the part shared with the neighbours is removed, below "
    "zero (purple) it is amplified, white leaves the patch as it is.",
    "correction": "How much was changed in each patch, in multiples of the slide's mean.",
    "homogeneity": "How similar a patch is to its neighbours: 1 means alike.",
}


@dataclass(frozen=True)
class Prediction:
    """What the model predicts of a slide, in words, and how unlike the training slides it is; ``problem``: why there is none."""

    answers: dict[str, str]
    likeness: str
    unlike: bool
    problem: str = ""

    @property
    def sentence(self) -> str:
        """The answer for somebody who reads nothing else.

        >>> Prediction({"predicted": "tumour", "probability of tumour": "95.9 %"}, "", True).sentence
        'The model says: predicted tumour (95.9 %). But this slide is unlike the training slides: do not rely on it.'
        """
        if not self.answers:
            return self.problem
        name, value = next(iter(self.answers.items()))
        sure = f" ({found})" if (found := self.answers.get(f"probability of {value}")) else ""
        doubt = " But this slide is unlike the training slides: do not rely on it." if self.unlike else ""
        return f"The model says: {name} {value}{sure}.{doubt}"


@dataclass(frozen=True)
class Explanation:
    """The page (one file that needs no other), the pictures beside it, and the prediction; a notebook shows the page."""

    page: Path
    pictures: tuple[Path, ...]
    prediction: Prediction
    notes: tuple[Note, ...] = ()  # about the features

    @property
    def written(self) -> list[Path]:
        return [self.page, *self.pictures]

    def _repr_html_(self) -> str:
        text = html.escape(self.page.read_text(encoding="utf-8"))
        return f'<iframe style="width: 100%; height: 40rem; border: 0" srcdoc="{text}"></iframe>'


def explain(
    run: str | Path,
    slide: str | Path,
    *,
    out: str | Path = "explained",
    encoder: str | None = None,
    weights: str | Path | None = None,
    size: int | None = None,
    magnification: float = 20.0,
    mpp: float | None = None,
    table: str | Path | None = None,
    annotations: str | Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Explanation:
    """From a slide to one page: features if needed, prediction, maps, patches, and how far to trust it.

    Args:
        run: a run's folder, or its model file.
        slide: the slide image, or a feature file of it. The other arguments are for images.
        out: folder of the page.
        encoder: where the run's card names none.
        weights: the encoder's, without internet.
        size: pixels of a patch; the encoder's own if not set.
        magnification: of the patches.
        mpp: microns per pixel, where the slide does not say.
        table: as in `heatmap`, for a run with covariates, or whose bags are patients (of which feature files are explained).
        annotations: what was drawn on the slide, a file or the folder that has it: its outlines are shown; as in `heatmap`.
        force: as in `predict`: go on with another stride, or an encoder's name that we do not know, than in training.
        progress: called with the stage ``patches`` while features are extracted.

    Returns:
        The page, its pictures and the prediction.

    Example:
        >>> gated_srp.explain("runs/luad/gated_srp/seed42", "slides/s1.svs").page  # doctest: +SKIP
        PosixPath('explained/s1.html')
    """
    run, slide, out = Path(run), Path(slide), Path(out)
    if slide.suffix.lower() in CONTAINERS and not is_ome_zarr(slide):
        return explain_file(run, slide, out, table=table, annotations=annotations, force=force)
    if TrainedRun.open(run).patients:
        cure = "Make feature files of all of them with `gated-srp extract`, then explain one of these, with --table."
        raise UserError("the model sees all slides of a patient at once", where=slide, cure=cure)
    options: dict[str, Any] = {"encoder": encoder, "weights": weights, "size": size, "magnification": magnification}
    file, notes = features_of_slide(run, slide, out / "features", mpp=mpp, force=force, progress=progress, **options)
    found = explain_file(run, file, out, image=slide, table=table, annotations=annotations, force=force)
    return replace(found, notes=(*notes, *found.notes))


def features_of_slide(
    run: Path,
    slide: Path,
    folder: Path,
    *,
    encoder: str | None = None,
    force: bool = False,
    progress: Progress = silent,
    **options: Any,
) -> tuple[Path, tuple[Note, ...]]:
    """The feature file of a slide image, made with the encoder of a run where it is not there yet; ``options`` as of `extract`.

    Notes say what could not be compared where it was there. Patches of quite another size than in training are refused at once.
    """
    encoder = encoder or _encoder_of(run)
    size, magnification = options.get("size") or find_encoder(encoder).tile, options.get("magnification") or 20.0
    apart, trained = (
        size * 10 / magnification,
        [entry.get("um") for entry in TrainedRun.open(run).card.get("stride", [])],
    )
    known = sorted({um for um in trained if um})
    if known and not force and not any(math.isclose(apart, um, rel_tol=0.25) for um in known):
        pixels = " or ".join(f"--size {um * magnification / 10:.0f}" for um in known[:3])
        said = f"patches of {size} pixels lie {apart:g} um apart at {magnification:g}x, but {known[0]:g} um in training"
        cure = f"Add {pixels}. If patches overlapped in training, make the features as then, and name their file."
        raise UserError(said, where=slide, cure=cure, kind="stride")
    outcome = extract(
        [slide],
        folder,
        encoder=encoder,
        progress=lambda event: progress(event) if event.stage == "patches" else None,
        **options,
    )
    if outcome.failed:
        raise outcome.failed[0]
    if outcome.empty:
        cure = f"Look at the preview: {outcome.previews / f'{slide_name(slide)}.jpg'}"
        raise UserError("no tissue was found", where=slide, cure=cure, kind="no_tissue")
    return outcome.folder / f"{slide_name(slide)}.h5", tuple(outcome.notes)


def explain_file(
    run: Path,
    file: Path,
    out: Path,
    *,
    image: Path | None = None,
    table: str | Path | None = None,
    annotations: str | Path | None = None,
    force: bool = False,
) -> Explanation:
    """As `explain`, of a feature file; ``image``: the slide image, if it is not the one that the file names."""
    from jinja2 import Environment, PackageLoader

    trained = TrainedRun.open(run)
    known = known_beside(trained, file, [file], table).get(file, {})
    view = view_slide(run, file, known=known, reading=Preparation(regions=folder_of(annotations)), force=force)
    drawn = annotations if trained.card.get("regions") else None
    how: dict[str, Any] = {"beside": known.get("beside", ()), "table": table, "annotations": drawn, "force": force}
    prediction = predict_in_words(run, file, **how)
    name = slide_stem(file)
    outlines = None if annotations is None else find_annotations(annotations, [name])[name]
    sections, written, notes = _sections(view, file, out, image, outlines)
    page = Environment(loader=PackageLoader("gated_srp.reports"), autoescape=True).get_template("explain.html.j2")
    content = page.render(
        style=files("gated_srp.reports").joinpath("templates", "page.css").read_text("utf-8"),
        slide=file.stem,
        prediction=prediction,
        sections=sections,
        card=_describe_card(load_card(model_file(run))),
        header=view.patches.header,
        patches=view.patches,
    )
    target = out / f"{file.stem}.html"
    write_whole(target, content)
    return Explanation(target, tuple(written), prediction, tuple(dict.fromkeys([*view.warnings, *notes])))


def _encoder_of(run: Path) -> str:
    name = load_card(model_file(run)).get("encoder")
    if name is None:
        what = "its card does not name the encoder of its features"
        raise UserError(what, where=run, cure="Name it with --encoder.", kind="no_encoder")
    return str(name)


def predict_in_words(
    run: Path,
    file: Path,
    *,
    beside: Sequence[Path] = (),
    table: str | Path | None = None,
    annotations: str | Path | None = None,
    force: bool = False,
) -> Prediction:
    """Of a slide, or of a patient with more slides ``beside``; a model without a task gives a reason instead of a prediction."""
    try:
        found = predict(run, [file, *beside], table=table, annotations=annotations, workers=0, force=force)
    except UserError as error:
        return Prediction({}, "Not known: there is no prediction.", False, f"No prediction: {error}")
    row = found.table.iloc[0]
    left = ("slide", "case", "file", "patches", "training_distance", "unlike_training", "seen_in_training")
    answers = dict(in_words(str(name), value) for name, value in row.items() if name not in left)
    distance, unlike = float(row["training_distance"]), bool(row["unlike_training"])
    if distance != distance:
        return Prediction(answers, "Not known: the model's card has no statistics of its training slides.", False)
    advice = "This slide is unlike the training slides: do not rely on the prediction."
    likeness = f"Its mean feature lies {distance:.2f} times as far from the training slides' mean as the farthest of them does. "
    return Prediction(answers, likeness + (advice if unlike else "That is not unusual."), unlike)


def in_words(name: str, value: object) -> tuple[str, str]:
    """A column of the table of predictions as a reader would call it.

    >>> in_words("prob_tumour", 0.959), in_words("risk", 1.25), in_words("predicted", "tumour")
    (('probability of tumour', '95.9 %'), ('risk', '1.25'), ('predicted', 'tumour'))
    """
    for start, words in (("prob_", "probability of"), ("calibrated_", "calibrated probability of")):
        if isinstance(value, float) and name.startswith(start):
            return f"{words} {name.removeprefix(start)}", f"{100 * value:.1f} %"
    return name, f"{value:.4g}" if isinstance(value, float) else str(value)


def _sections(
    view: SlideView, file: Path, out: Path, image: Path | None, outlines: Path | None
) -> tuple[list[dict[str, Any]], list[Path], list[Note]]:
    sections, written = [], []
    notes: list[Note] = []
    for value, text in MEANING.items():
        try:
            drawn = draw_slide([view], file, out, value=value, image=image, annotations=outlines)
        except UserError:
            if value == "attention":
                raise
            continue  # a model without gates has no such map
        written += drawn.written
        notes += drawn.warnings
        if value != "homogeneity" and all(is_quiet(one) for one in drawn.maps):
            text += " Next to nothing happens in this map" + (
                "." if value == "attention" else ": the gates of this model have hardly opened."
            )
        shown = drawn.written if value == "attention" else drawn.written[:1]
        pictures = [_embedded(path) for path in shown]
        sections.append({"name": value.capitalize(), "text": text, "pictures": pictures})
    return sections, written, notes


def _embedded(path: Path) -> str:
    """A picture for the page, small enough that the page stays below 3 MB: the files beside it have every pixel."""
    with Image.open(path) as picture:
        small = picture.convert("RGB")
    small.thumbnail((_WIDEST, _WIDEST))
    buffer = BytesIO()
    small.save(buffer, "JPEG", quality=85)
    return base64.b64encode(buffer.getvalue()).decode()


def _describe_card(card: Mapping[str, Any]) -> dict[str, str]:
    settings = card.get("settings", {})
    known = {**settings, **card}
    listed = {name: known[name] for name in _CARD if known.get(name) is not None}
    listed["size"] = ", ".join(f"{k} {settings[k]}" for k in ("dim", "depth", "num_heads", "delta") if k in settings)
    return {name: ", ".join(map(str, v)) if isinstance(v, list) else str(v) for name, v in listed.items()}
