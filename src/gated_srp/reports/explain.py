"""One slide, one run, one page: prediction, maps, patches, the model's card, and how far to trust it."""

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gated_srp.errors import UserError
from gated_srp.files import write_whole
from gated_srp.models import load_card, model_file
from gated_srp.reports.show import Request, show_views
from gated_srp.reports.values import View, look
from gated_srp.training.predict import predict_files

_CARD = ("cohort", "arm", "seed", "task", "classes", "encoder", "best_epoch", "split_hash", "temperature")
_OPEN = 0.05  # size of beta below which a gate does next to nothing; the paper's regimes begin at 0.5
_WHAT = {
    "attention": "Where the model looked. Colours go by rank within the slide, so that they differ even where attention hardly does: "
    "the line below the map says how much. The bar has the raw values.",
    "change": "Patches that gained (red) or lost (blue) attention because of the gates.",
    "beta": "The gates, layer by layer: above zero the part shared with the neighbours is removed, below zero it is amplified.",
    "correction": "How much was changed in each patch.",
    "homogeneity": "How alike a patch is to its neighbours.",
}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ slide }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1a1a1a; }
.warn { border-left: 5px solid #b3261e; background: #fbeceb; padding: .6rem 1rem; margin: 1rem 0; }
.note { border-left: 5px solid #5b7aa6; background: #eef3fa; padding: .6rem 1rem; margin: 1rem 0; }
table { border-collapse: collapse; } td, th { padding: .2rem .9rem .2rem 0; text-align: left; vertical-align: top; }
img { max-width: 100%; height: auto; } h2 { margin-top: 2rem; }
</style></head><body>
<h1>{{ slide }}</h1>
<p class="warn"><strong>For research use only.</strong> Not a medical device; not for diagnosis or treatment. A map shows what the
model weighed, not what caused its answer.</p>
<h2>Prediction</h2>
{% if prediction %}<table>{% for name, value in prediction.items() %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>{% endfor %}</table>
{% else %}<p class="note">{{ no_prediction }}</p>{% endif %}
<h2>Is this slide like those of the training?</h2>
<p class="{{ 'warn' if unlike else 'note' }}">{{ likeness }}</p>
{% for section in sections %}<h2>{{ section.name }}</h2><p>{{ section.text }}</p>
{% for picture in section.pictures %}<p><img alt="{{ section.name }}" src="data:image/png;base64,{{ picture }}"></p>
{% endfor %}{% endfor %}
<h2>The model</h2>
<table>{% for name, value in card.items() %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>{% endfor %}</table>
<h2>The features</h2>
<table>{% for name, value in features.items() %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>{% endfor %}</table>
</body></html>
"""


@dataclass(frozen=True)
class Judgement:
    """What the model says of a slide, and how unlike the training slides it is; ``why`` there is no answer."""

    answers: dict[str, str]
    likeness: str
    unlike: bool
    why: str = ""


def explain_slide(run: Path, file: Path, out: Path, *, image: Path | None = None) -> list[Path]:
    """Predict, draw and write ``out``/<slide>.html, one file that needs no other; the pictures lie beside it."""
    from jinja2 import Environment

    view = look(run, file)
    judged = judge(run, file)
    sections, written = _sections(view, file, out, image)
    page = Environment(autoescape=True).from_string(_PAGE)
    content = page.render(
        slide=file.stem,
        prediction=judged.answers,
        no_prediction=judged.why,
        likeness=judged.likeness,
        unlike=judged.unlike,
        sections=sections,
        card=describe_card(load_card(model_file(run))),
        features=_describe_features(view),
    )
    target = out / f"{file.stem}.html"
    write_whole(target, content)
    return [target, *written]


def judge(run: Path, file: Path) -> Judgement:
    """The prediction in words; a model without a task, or a file that does not fit, gives a reason instead."""
    try:
        found = predict_files([run], [file], workers=0)
    except UserError as error:
        return Judgement({}, "Not known: there is no prediction.", False, f"No prediction: {error}")
    row = found.table.iloc[0]
    left = ("slide", "file", "patches", "training_distance", "unlike_training")
    answers = dict(_in_words(str(name), value) for name, value in row.items() if name not in left)
    distance, unlike = float(row["training_distance"]), bool(row["unlike_training"])
    if distance != distance:
        return Judgement(answers, "Not known: the model's card has no statistics of its training slides.", False)
    said = f"Its mean feature lies {distance:.2f} times as far from the training slides' mean as the farthest of them does. "
    said += (
        "This slide is unlike the training slides: do not rely on the prediction." if unlike else "That is not unusual."
    )
    return Judgement(answers, said, unlike)


def _in_words(name: str, value: object) -> tuple[str, str]:
    """A column of the table of predictions, as a reader would say it.

    >>> _in_words("prob_tumour", 0.959), _in_words("risk", 1.25), _in_words("predicted", "tumour")
    (('probability of tumour', '95.9 %'), ('risk', '1.25'), ('predicted', 'tumour'))
    """
    if isinstance(value, float) and name.startswith("prob_"):
        return f"probability of {name.removeprefix('prob_')}", f"{100 * value:.1f} %"
    return name, f"{value:.4g}" if isinstance(value, float) else str(value)


def gates_in_words(view: View) -> str:
    """A warning where the gates hardly do anything: maps of them are scaled to their own size and look strong all the same."""
    sizes = [float(layer.beta.abs().max()) for layer in view.layers if layer.beta is not None]
    if not sizes or max(sizes) >= _OPEN:
        return ""
    return (
        f" The gates of this model have hardly opened (largest size {max(sizes):.2g}): this map shows next to nothing."
    )


def describe_card(card: Mapping[str, Any]) -> dict[str, str]:
    """What a reader wants of it."""
    settings = card.get("settings", {})
    known = {**settings, **card}
    listed = {name: known[name] for name in _CARD if known.get(name) is not None}
    listed["size"] = ", ".join(f"{k} {settings[k]}" for k in ("dim", "depth", "num_heads", "delta") if k in settings)
    return {name: ", ".join(map(str, v)) if isinstance(v, list) else str(v) for name, v in listed.items()}


def _sections(view: View, file: Path, out: Path, image: Path | None) -> tuple[list[dict[str, Any]], list[Path]]:
    sections, written = [], []
    for value, text in _WHAT.items():
        try:
            paths = show_views([view], file, Request(value=value, image=image), out)
        except UserError:
            if value == "attention":
                raise
            continue  # a model without gates has no such map
        written += paths
        shown = paths if value == "attention" else paths[:1]
        pictures = [base64.b64encode(path.read_bytes()).decode() for path in shown]
        text += gates_in_words(view) if value in ("change", "beta", "correction") else ""
        sections.append({"name": value.capitalize(), "text": text, "pictures": pictures})
    return sections, written


def _describe_features(view: View) -> dict[str, str]:
    header = view.patches.header
    facts = {
        "file": header.path.name,
        "patches": f"{len(view.patches.rows):,} of {header.shape[0]:,}",
        "encoder": header.encoder,
        "patch": f"{view.patches.side:g} {header.unit} a side, every {header.stride:g} ({header.stride_source})",
        "magnification of level 0": header.magnification,
        "microns a pixel": header.mpp,
        "slide": None if header.wsi_path is None else os.path.basename(header.wsi_path),
    }
    return {name: str(value) for name, value in facts.items() if value is not None}
