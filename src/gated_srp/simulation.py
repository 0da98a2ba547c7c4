"""Generated cohorts with a known truth, over two dials at a time: where does an arm differ from the reference, and by how much?

A plan (YAML) fixes dials, grid, seeds, cohort and model sizes before anything runs; docs/evidence/simulation.yaml is one. Every seed draws
a cohort of its own, so that differences of seeds are independent and the plain paired t test holds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from textwrap import fill
from typing import Any

import pandas as pd
import yaml

from gated_srp.demo import Recipe, generate
from gated_srp.errors import UserError
from gated_srp.files import write_json, write_whole
from gated_srp.models import arm_title
from gated_srp.progress import Event, Progress, silent
from gated_srp.records import Record, parse_numbers, read_record
from gated_srp.study.cells import Cell, Row, plan
from gated_srp.study.statistics import t_test

KEY = ["diagram", "x", "y", "arm", "seed"]
_DIALS = {one.name for one in fields(Recipe)}


@dataclass(frozen=True)
class Point:
    """One cohort of a diagram: the values of both dials and the seed that draws it."""

    diagram: str
    x: str
    y: str
    seed: int
    recipe: Recipe
    parts: tuple[int, int, int]  # patients that train, validate and test
    settings: dict[str, Any]
    arms: tuple[str, ...]

    def key(self, arm: str) -> tuple[str, ...]:
        return (self.diagram, self.x, self.y, arm, str(self.seed))


@dataclass(frozen=True, eq=False)
class SimulationResult:
    """What `simulate` found.

    Attributes:
        results: diagram, x, y, arm, seed, metric, value: test metrics, and mean_beta and share_moved of the last epoch.
        differences: one row per diagram, point and arm: the mean difference to the reference, its 95 % interval and p, not corrected.
        files: the table and the figures.
    """

    results: pd.DataFrame
    differences: pd.DataFrame
    files: tuple[Path, ...]


def simulate(
    study: str | Path, *, out: str | Path, table: str | Path | None = None, progress: Progress = silent
) -> SimulationResult:
    """Compute a plan of generated cohorts and draw each diagram. Called again, it goes on where it was.

    Args:
        study: the plan's YAML: seeds, reference, recipe, patients, settings and diagrams.
        out: folder for the runs in progress and the figures.
        table: where results are added run by run, OUT/results.csv by default; what it has is not computed again. Beside it results.plan.json
            keeps what they were computed with: a plan with another recipe, other patients, settings or dials is refused.
        progress: called with an `Event` after each run.

    Returns:
        All results, the differences to the reference with their intervals, and the files written.

    Example:
        >>> found = gated_srp.simulate("simulation.yaml", out="sim")  # doctest: +SKIP
        >>> found.differences  # doctest: +SKIP
    """
    content, out = read_plan(Path(study)), Path(out).absolute()
    path = Path(table) if table else out / "results.csv"
    results = read_table(path)
    _keep_plan(content, path, results)
    done = set(results[KEY].itertuples(index=False, name=None))
    points = list(points_of(content))
    total = sum(len(point.arms) for point in points)
    for point in points:
        missing = [arm for arm in point.arms if point.key(arm) not in done]
        if not missing:
            continue
        home = out / "cohorts" / "_".join((point.diagram, point.x, point.y, str(point.seed)))
        for cell in _cells(point, missing, home):
            rows = _run(cell, point)
            if content["diagrams"][point.diagram]["metric"] not in set(rows["metric"]):
                what = f"diagram {point.diagram!r} has no metric {content['diagrams'][point.diagram]['metric']!r}"
                raise UserError(what, where=study, cure=f"Its task has {', '.join(rows['metric'])}.")
            results = pd.concat([results, rows], ignore_index=True) if len(results) else rows
            write_whole(path, results.to_csv(index=False, lineterminator="\n", float_format="%.6g"))
            done.add(point.key(cell.row))
            progress(Event("simulate", text=f"{len(done)} of {total} runs: {', '.join(point.key(cell.row))}"))
        shutil.rmtree(home)
    found = differences(results, content)
    files = [path]
    for name in content["diagrams"]:
        files += draw_diagram(found, content, name, out / f"diagram_{name}")
    return SimulationResult(results, found, tuple(files))


def read_plan(path: Path) -> dict[str, Any]:
    """The plan; a dial that is neither a field of the recipe nor a setting is refused."""
    try:
        content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        dials = [one[axis]["dial"] for one in content["diagrams"].values() for axis in ("x", "y")]
        absent = {"seeds", "reference", "recipe", "patients", "settings"} - set(content)
        absent |= {f"metric of {name}" for name, one in content["diagrams"].items() if "metric" not in one}
        unknown = sorted({*absent, *(dial for dial in dials if dial not in _DIALS | {"slides"} and "." not in dial)})
        references = {name: reference_of(content, one) for name, one in content["diagrams"].items()}
        alone = [name for name, one in content["diagrams"].items() if references[name] not in one["arms"]]
        for point in () if unknown else points_of(content):
            if len(point.parts) != 3 or any(type(part) is not int or part < 1 for part in point.parts):
                raise ValueError("patients: three numbers of at least 1, those that train, validate and test")
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        what = f"cannot be read as a plan ({error!r})"
        raise UserError(what, where=path, cure="docs/evidence/simulation.yaml is one.") from None
    if unknown:
        cure = f"Expected seeds, reference, recipe, patients, settings, diagrams; dials: slides, a setting, {', '.join(sorted(_DIALS))}."
        raise UserError(f"missing or unknown: {', '.join(unknown)}", where=path, cure=cure)
    if alone:
        what = "; ".join(f"reference {references[name]!r} is not among the arms of {name}" for name in alone)
        raise UserError(what, where=path, cure="Differences are to it: add it to the arms of every diagram.")
    return content


def reference_of(content: Mapping[str, Any], diagram: Mapping[str, Any]) -> str:
    """The arm that the others of a diagram are compared with: its own, or that of the plan."""
    found: str = diagram.get("reference", content.get("reference"))
    return found


def _keep_plan(content: Mapping[str, Any], table: Path, results: pd.DataFrame) -> None:
    """What the results of each diagram are computed with, beside their table; refused where the plan says otherwise by now.

    Seeds, values of dials and arms may be added. A table of before that was kept has no such file, and is taken as it is.
    """
    path, stored = table.with_suffix(".plan.json"), {}
    if path.is_file():
        cure = "Give the plan a table of its own (--table, or another --out)."
        stored = read_record(path, Record, cure=cure)
    elif len(results):
        return
    for name, one in content["diagrams"].items():
        facts = {
            "recipe": content["recipe"] | one.get("recipe", {}),
            "patients": content["patients"],
            "settings": content["settings"] | one["task"],
            "dials": [one[axis]["dial"] for axis in ("x", "y")],
        }
        facts, before = json.loads(json.dumps(facts, default=str)), stored.get(name)
        other = [part for part, value in facts.items() if not isinstance(before, dict) or before.get(part) != value]
        if other and name in set(results["diagram"]):
            what = f"diagram {name!r} was computed with other {', '.join(other)} than the plan has now"
            cure = "Give the new plan a table of its own (--table, or another --out), or the diagram another name."
            raise UserError(what, where=table, cure=cure)
        stored[name] = facts
    write_json(path, stored)


def read_table(path: Path) -> pd.DataFrame:
    """Results so far; none where there is no file."""
    if not path.is_file():
        return pd.DataFrame(columns=[*KEY, "metric", "value"])
    return pd.read_csv(path, dtype=dict.fromkeys(KEY, str), keep_default_na=False, float_precision="round_trip")


def points_of(content: Mapping[str, Any]) -> Iterator[Point]:
    """Diagram by diagram, seed by seed, so that what is finished covers a diagram."""
    for name, diagram in content["diagrams"].items():
        for seed in diagram.get("seeds", content["seeds"]):
            for y in diagram["y"]["values"]:
                for x in diagram["x"]["values"]:
                    yield _point(content, name, {diagram["x"]["dial"]: x, diagram["y"]["dial"]: y}, seed, (x, y))


def _point(content: Mapping[str, Any], name: str, dials: dict[str, Any], seed: int, at: tuple[Any, Any]) -> Point:
    diagram = content["diagrams"][name]
    recipe = {**content["recipe"], **diagram.get("recipe", {}), "seed": seed}
    recipe |= {dial: value for dial, value in dials.items() if dial in _DIALS}
    parts = tuple(content["patients"]) if "slides" not in dials else (dials["slides"], *content["patients"][1:])
    made = Recipe(**{**recipe, "patients": sum(parts), "foci": tuple(recipe["foci"])})
    settings = {key: dict(value) if isinstance(value, dict) else value for key, value in content["settings"].items()}
    for dial, value in dials.items():
        section, dot, inner = dial.partition(".")
        if dot:
            settings[section] = {**settings.get(section, {}), inner: value}
    arms = tuple(diagram["arms"])
    return Point(name, str(at[0]), str(at[1]), seed, made, parts, settings | diagram["task"], arms)


def _cells(point: Point, arms: list[str], home: Path) -> tuple[Cell, ...]:
    """The cohort on disk, and its runs."""
    from gated_srp.config.load import load_config

    generate(home, point.recipe)
    train, validate, _ = point.parts
    patients = [f"P{number + 1:03d}" for number in range(sum(point.parts))]
    parts = ["train"] * train + ["val"] * validate + ["test"] * (len(patients) - train - validate)
    split = "".join(f"{patient},{part}\n" for patient, part in zip(patients, parts, strict=True))
    write_whole(home / "split.csv", "patient,split\n" + split)
    table = "survival.csv" if point.settings.get("time") else "slides.csv"
    settings = point.settings | {"name": "generated", "features": "features", "table": table, "split": "split.csv"}
    settings["cache"] = "cache"  # prepared once for all arms; the numbers are the same
    write_whole(home / "simulated.yaml", yaml.safe_dump(settings))
    return plan(load_config(home / "simulated.yaml"), [Row.of(arm) for arm in arms], [point.seed])


def _run(cell: Cell, point: Point) -> pd.DataFrame:
    """Its test metrics, and what its gates did in the last epoch."""
    from gated_srp.training.train import train

    train(cell.config, arm=cell.arm, seed=cell.seed)
    found, gates = cell.metrics(), cell.run.gates
    if len(gates):
        last = gates[gates["epoch"] == gates["epoch"].max()]
        found |= {"mean_beta": float(last["mean"].mean()), "share_moved": float(1 - last["share_identity"].mean())}
    rows = [(*point.key(cell.row), metric, value) for metric, value in found.items()]
    return pd.DataFrame(rows, columns=[*KEY, "metric", "value"])


# What it shows -------------------------------------------------------------------------------------------------------


def differences(results: pd.DataFrame, content: Mapping[str, Any]) -> pd.DataFrame:
    """diagram, x, y, arm, n, reference (its mean), difference, low, high, p: by the metric of the diagram, paired by seed."""
    rows = []
    for name, diagram in content["diagrams"].items():
        reference = reference_of(content, diagram)
        part = results[(results["diagram"] == name) & (results["metric"] == diagram["metric"])]
        part = part.assign(value=parse_numbers(part["value"]))
        for y in map(str, diagram["y"]["values"]):
            for x in map(str, diagram["x"]["values"]):
                here = part[(part["x"] == x) & (part["y"] == y)]
                wide = here.pivot(index="seed", columns="arm", values="value")
                for arm in diagram["arms"]:
                    if arm == reference or arm not in wide or reference not in wide:
                        continue
                    pairs = wide[[arm, reference]].dropna()
                    test = t_test((pairs[arm] - pairs[reference]).to_numpy())
                    base = float(pairs[reference].mean())
                    rows.append((name, x, y, arm, len(pairs), base, test.mean, test.low, test.high, test.p))
    columns = ["diagram", "x", "y", "arm", "n", "reference", "difference", "low", "high", "p"]
    return pd.DataFrame(rows, columns=columns)


def draw_diagram(found: pd.DataFrame, content: Mapping[str, Any], name: str, stem: Path) -> list[Path]:
    """One panel per arm: colour and number are the difference to the reference, a frame says that its interval excludes zero."""
    from gated_srp.reports.figures import panels, save

    diagram, here = content["diagrams"][name], found[found["diagram"] == name]
    arms = [arm for arm in diagram["arms"] if arm in set(here["arm"])]
    if not arms:
        return []
    xs, ys = (list(map(str, diagram[axis]["values"])) for axis in ("x", "y"))
    figure, axes = panels(len(arms), width=1.3 * len(xs) + 1.2, height=0.75 * len(ys) + 1.3, most=3)
    # Dark cells would hide their numbers, and differences of a hundredth must not look like something.
    limit = max(0.1, 1.6 * float(here["difference"].abs().max()))
    for axis, arm in zip(axes, arms, strict=True):
        grid = [[float("nan")] * len(xs) for _ in ys]
        for row in here[here["arm"] == arm].itertuples():
            at = xs.index(row.x), ys.index(row.y)
            grid[at[1]][at[0]] = row.difference
            words = f"{row.difference:+.3f}\n({row.low:+.3f} to\n{row.high:+.3f})"
            axis.text(*at, words, ha="center", va="center", fontsize=6.5)
            if row.low > 0 or row.high < 0:
                edge = {"fill": False, "edgecolor": "black", "linewidth": 1.8}
                axis.add_patch(_frame(at, edge))
        axis.imshow(grid, cmap="PuOr", vmin=-limit, vmax=limit, origin="lower", aspect="auto", alpha=0.7)
        axis.set_xticks(range(len(xs)), xs)
        axis.set_yticks(range(len(ys)), ys)
        axis.set(
            xlabel=diagram["x"].get("words", diagram["x"]["dial"]),
            ylabel=fill(
                diagram["y"].get("words", diagram["y"]["dial"]), 11 * len(ys)
            ),  # no longer than the axis is high
        )
        axis.set_title(arm_title(arm), fontsize=9)
    title = (
        f"{diagram.get('title', name)}: difference to {arm_title(reference_of(content, diagram))}, {diagram['metric']}"
    )
    return save(figure, stem, title=f"{title} (95 % interval; frame: excludes 0)")


def _frame(at: tuple[int, int], style: Mapping[str, Any]) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((at[0] - 0.48, at[1] - 0.47), 0.96, 0.94, **style)
