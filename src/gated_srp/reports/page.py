"""One self-contained page about a folder of runs: `gated-srp report DIR`. Nothing on it is loaded from anywhere."""

from __future__ import annotations

import base64
import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from gated_srp import __version__
from gated_srp.files import write_whole
from gated_srp.models import arm_title
from gated_srp.reports.page_differences import all_rows, differences, forests, tone, where
from gated_srp.reports.page_inline import inline_svg, small_png, within
from gated_srp.reports.page_maps import Gallery, gallery
from gated_srp.reports.page_material import Material, Run, Study, gather
from gated_srp.reports.page_reproduction import agreement, reproduction
from gated_srp.reports.page_tables import check_facts, cohort_metrics, hashes, run_metrics, run_name, slides
from gated_srp.reports.tables import metric_name

LARGEST = 5_000_000  # bytes of a page
_CAPTIONS = {
    "paired": "Every seed, and the differences with their intervals",
    "trajectories": "Gates over the epochs: mean β of each layer",
    "regimes": "What the gates do in the last epoch",
    "kaplan_meier": "Survival of test patients by predicted risk",
    "roc": "ROC and precision-recall on test slides",
    "reliability": "Calibration on test slides",
    "redundancy": "How alike neighbouring patches are",
    "history": "Loss and score by epoch",
    "signed_gate": "Geometry of the signed gate",
}


class Figure(NamedTuple):
    caption: str
    markup: str


def write_page(folder: Path, output: Path) -> int:
    """The page of a folder, written whole; its size in bytes."""
    text = build_page(folder)
    write_whole(output, text)
    return len(text.encode())


def build_page(folder: Path) -> str:
    """The page of what lies in a folder: a run, a comparison, a reproduction, or several of them."""
    material = gather(folder)
    environment = Environment(
        loader=PackageLoader("gated_srp.reports"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page = environment.get_template("page.html.j2")
    context = _context(material)
    bare = page.render(context, gallery=Gallery((), (), ()))
    pictures = ((name, png) for name, png in _pictures(material.maps))
    kept, left_out = within(pictures, LARGEST - len(bare.encode()) - 50_000)
    return page.render(context, gallery=gallery(kept, left_out))


def _pictures(maps: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    for path in maps:
        png = small_png(path)
        if png is not None:
            yield f"{path.parent.name}/{path.stem}", png


def _context(material: Material) -> dict[str, Any]:
    style, script = (files("gated_srp.reports").joinpath("templates", name).read_text("utf-8") for name in _ASSETS)
    newest = max(material.runs, key=lambda run: str(run.environment.get("started")), default=None)
    cohorts = {name for study in material.studies for name in study.cohorts}
    alone = [run for run in material.runs if run.cohort not in cohorts]
    return {
        "title": _title(material),
        "style": style,
        "script": script,
        "policy": _policy(script),
        "about": [part for part in material.about.split("\n\n") if part.strip()],
        "verdicts": [
            *filter(None, map(agreement, material.studies)),
            *_verdicts(material.studies, material.runs),
            *map(_result, alone),
        ],
        "notes": [str(note) for study in material.studies for note in study.comparison.get("notes") or ()],
        "studies": [_study(study, f"s{i}-") for i, study in enumerate(material.studies)],
        "runs": run_metrics(material.runs),
        "figures_": [*_drawn(material.drawings, "d"), *_run_figures(alone)],
        "slides": list(slides(material.runs)),
        "checks": [(check, check_facts(check)) for check in material.checks],
        "hashes": hashes(material),
        "configs": _configs(material.runs),
        "environment": newest.environment if newest else {},
        "commands": list(_commands(material)),
        "version": __version__,
        "when": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "folder": str(material.home),
    }


_ASSETS = ("page.css", "page.js")


def _policy(script: str) -> str:
    """Nothing may be loaded, and no script may run but the page's own."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _title(material: Material) -> str:
    names = {name for study in material.studies for name in study.cohorts} or {run.cohort for run in material.runs}
    return ", ".join(sorted(names)[:4]) + (" and more" if len(names) > 4 else "")


# Words ---------------------------------------------------------------------------------------------------------------


def _verdicts(studies: Sequence[Study], runs: Sequence[Run]) -> Iterator[dict[str, str]]:
    """On the metric that selects; the rest is in the tables."""
    selecting = {run.cohort: run.metrics.get("select") for run in runs}
    for study in studies:
        rows = all_rows(study)
        first: dict[str, Any] = {}
        for row in rows:
            first.setdefault(where(row), row.get("metric"))
        for row in rows:
            wanted = selecting.get(where(row))
            usual = (
                wanted if any((where(r), r.get("metric")) == (where(row), wanted) for r in rows) else first[where(row)]
            )
            if row.get("metric") == usual:
                against = (
                    f"{arm_title(str(row.get('arm')))} against {arm_title(str(study.comparison.get('reference')))}"
                )
                what = f"{against}, {where(row)}, {metric_name(str(row.get('metric')))}"
                yield {"what": what, "words": str(row.get("verdict")), "tone": tone(row)}


def _result(run: Run) -> dict[str, str]:
    scores = (run.metrics.get("test") or {}).get(run.metrics.get("score")) or {}
    metric = str(run.metrics.get("select"))
    value = scores.get(metric)
    said = "is not defined on its test set" if value is None else f"{value:.4f} on the test set"
    words = f"{metric_name(metric)} {said}. One run: it says how this model does, not whether its method is better."
    return {"what": f"{run_name(run)}, {run.cohort}, seed {run.unit}", "words": words, "tone": "open"}


def _commands(material: Material) -> Iterator[str]:
    versions = next((run.environment.get("versions") or {} for run in material.runs if run.environment), {})
    torch = str(versions.get("torch", "")).split("+")[0]
    yield f"pip install 'gated-srp[train]=={versions.get('gated_srp', __version__)}'" + (
        f" torch=={torch}" if torch else ""
    )
    cohorts: dict[str, list[Run]] = {}
    for run in material.runs:
        cohorts.setdefault(run.cohort, []).append(run)
    compared = {name for study in material.studies for name in study.cohorts}
    again = [study for study in material.studies if study.reproduction]
    for study in again:
        yield f"gated-srp reproduce {study.path.name} --features FOLDER --labels FOLDER"
        for name in study.cohorts:
            cohorts.pop(name, None)
    for name, runs in cohorts.items():
        seeds = sorted({str(run.metrics.get("seed")) for run in runs})
        yield f"# settings of {name}: below, saved as cohort.yaml"
        if name in compared:
            arms = ",".join(dict.fromkeys(run.arm for run in runs))
            yield f"gated-srp compare cohort.yaml --arms {arms} --seeds {','.join(seeds)}"
        else:
            yield from (f"gated-srp train cohort.yaml --arm {run.arm} --seed {run.metrics.get('seed')}" for run in runs)


def _configs(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """One a cohort and arm, without the seed: they differ in that alone."""
    found: dict[str, str] = {}
    for run in runs:
        found.setdefault(f"{run.cohort}, {run_name(run)}", run.config_text)
    return list(found.items())


# Figures -------------------------------------------------------------------------------------------------------------


def _study(study: Study, prefix: str) -> dict[str, Any]:
    compared = bool(study.comparison.get("cohorts"))
    return {
        "name": ", ".join(sorted(study.cohorts)) or study.path.name,
        "quick": study.comparison.get("quick"),
        "differences": differences(study) if compared else None,
        "forests": list(forests(study)) if compared else [],
        "metrics": list(cohort_metrics(study)),
        "reproduction": reproduction(study),
        "figures": list(_drawn(study.drawings, prefix)),
    }


def _drawn(paths: Sequence[Path], prefix: str) -> Iterator[Figure]:
    for place, path in enumerate(sorted(paths, key=_place)):
        markup = inline_svg(path, f"{prefix}{place}-")
        if markup is not None:
            yield Figure(_caption(path.stem), markup)


def _place(path: Path) -> int:
    """In the order of the captions; others last."""
    return next((i for i, name in enumerate(_CAPTIONS) if path.stem.startswith(name)), len(_CAPTIONS))


def _caption(stem: str) -> str:
    for name, words in _CAPTIONS.items():
        if stem.startswith(name):
            rest = stem.removeprefix(name).strip("_").replace("_", " ")
            return f"{words} ({rest})" if rest else words
    return stem.replace("_", " ")


def _run_figures(runs: Sequence[Run]) -> list[Figure]:
    """Those of runs that belong to no comparison, drawn now."""
    from gated_srp.reports.curves import draw_curves
    from gated_srp.reports.figures import draw_regimes, draw_trajectories
    from gated_srp.reports.history import draw_history

    found: list[Figure] = []
    for place, run in enumerate(runs):
        name = f"{run_name(run)}, seed {run.unit}"
        with tempfile.TemporaryDirectory() as folder:
            home, of = Path(folder), {run.cohort: [run.path]}
            drawn = [*draw_history(run.path, home / "history", title=name)]
            drawn += draw_trajectories(of, home / "trajectories", title=name)
            drawn += draw_regimes(of, home / "regimes", title=name)
            cell = run.cell()
            drawn += draw_curves(home, [cell]) if cell is not None else []
            found += _drawn([path for path in drawn if path.suffix == ".svg"], f"r{place}-")
    return found
