"""Writes docs/evidence.md from the plans and the tables of this folder: python docs/evidence/page.py

Every number and every statement on that page is computed here; a test holds the page to the tables.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from generated import (
    claims_of,
    confirmation_lines,
    confirmed,
    counted_points,
    generated,
    place_lines,
    placed,
    sign,
    simulated_gates,
    simulation_lines,
)
from masked import control_lines, pretrained, pretraining_lines
from matplotlib.figure import Figure
from reading import finished, lead, rows_of

from gated_srp.config.reach import FURTHEST, OUTSIDE, Reach
from gated_srp.models import arm_settings, arm_title, find_arm
from gated_srp.reports.figures import COLOURS, panels, save, tidy
from gated_srp.simulation import read_plan, read_table
from gated_srp.study.results import Difference, compare_results

HERE = Path(__file__).parent
STEPS, LR = 400, 2e-4  # of the plan on real tissue, about: 600 to 650 fields train, 16 per step, 10 epochs


def stage_lines(
    plan: dict, results: pd.DataFrame, patients: pd.DataFrame | None = None, folder: Path | None = None
) -> Iterator[str]:
    """Per stage of the plan: what is finished, and its reading once it is complete. ``folder``: where its figure is drawn."""
    for stage in plan["stages"]:
        cohort = plan["cohorts"][stage["cohort"]]
        done, planned = finished(plan, stage, results)
        yield f"### {stage['name']}: {stage['cohort']}, {cohort['primary']}, {len(done)} of {planned} runs\n"
        if len(done) < planned:
            yield f"{_twins(stage, cohort['primary'], results) if 'withdrawn' in stage else 'Not complete, and therefore not read.'}\n"
            continue
        base = stage.get("reference", "na")
        found = compare_results(done.dropna(), base, margin=plan["margin"]).cohorts
        yield from _stage_table(found, pd.DataFrame() if patients is None else patients, arm_title(base))
        stem = HERE / f"stage_{stage['name']}"
        if folder is not None:
            title = f"{stage['cohort']}, {cohort['primary']}"
            _draw_stage(found, stem, title=title, margin=plan["margin"], base=arm_title(base))
        if stem.with_suffix(".svg").is_file():
            yield f"![Differences to {arm_title(base)}, stage {stage['name']}](evidence/{stem.name}.svg)\n"


def _twins(stage: dict, metric: str, results: pd.DataFrame) -> str:
    """Why a stage was withdrawn: what its finished runs differ by from the same runs in the cohort that stands for it, in every metric."""
    here = results[results["arm"].isin(stage["arms"])].set_index(["arm", "seed", "metric"])
    own, other = (
        pd.to_numeric(here[here["cohort"] == name]["value"]) for name in (stage["cohort"], stage["withdrawn"])
    )
    apart = (own - other).dropna().abs().round(6)  # one of the tables was written with six digits
    runs, most = len(apart.xs(metric, level="metric")), apart.groupby("metric", sort=False).max()
    gap = f"differs by at most {most[metric]:.6f}" if most[metric] else "is the same to six digits"
    said = f"Withdrawn by an amendment, and not read: in all {runs} runs that are there both one by one and packed ({stage['withdrawn']}), {metric} {gap}."
    moved = apart[apart > 1e-5].reset_index()  # more than a last digit
    moved = moved[moved["metric"] != metric]
    if not len(moved):
        return said
    others = ", ".join(f"{name} {most[name]:.4f}" for name in moved["metric"].unique())
    count = len(moved[["arm", "seed"]].drop_duplicates())
    return f"{said} Rounding moves other metrics in {count} of them, by at most: {others}."


def secondary(plan: dict, results: pd.DataFrame) -> str:
    """Line by line the stages, complete by now, that repeat the primary contrast otherwise; hints, as the plan says."""
    said = [
        f"    - {stage['name']} ({found[0].metric}): "
        + "; ".join(f"{arm_title(one.arm)} {one.test.mean:+.4f}: {_verdict(one)}" for one in found)
        for stage, found in _read(plan, results)
        if stage["arms"] == plan["stages"][0]["arms"]
    ]
    return (
        "\n".join(["The first line, repeated otherwise:", *said])
        if said
        else "No stage that repeats it otherwise is complete."
    )


def others(plan: dict, results: pd.DataFrame) -> str:
    """How many contrasts of the other arms are distinguishable, over the stages that are complete by now."""
    stages = [
        (stage["name"], found) for stage, found in _read(plan, results) if stage["arms"] != plan["stages"][0]["arms"]
    ]
    if not stages:
        return "No stage of the other arms is complete."
    found = [one for _, part in stages for one in part]
    claimed = [f"{arm_title(one.arm)} ({one.cohort}, {one.test.mean:+.4f})" for one in found if one.claimed]
    words = f"{len(claimed)} of {len(found)} contrasts are distinguishable from NA{': ' * bool(claimed)}{', '.join(claimed)}"
    names = "; ".join(dict.fromkeys(arm_title(one.arm) for one in found))
    return f"Other attentions and controls ({names}; stages {', '.join(name for name, _ in stages)}): {words}."


def _read(plan: dict, results: pd.DataFrame) -> Iterator[tuple[dict, Sequence[Difference]]]:
    """The complete stages after the first, with their differences."""
    for stage in plan["stages"][1:]:
        done, planned = finished(plan, stage, results)
        if len(done) == planned:
            yield stage, compare_results(done.dropna(), "na", margin=plan["margin"]).cohorts


def few(plan: dict, results: pd.DataFrame) -> str:
    """What NA itself reaches on subtypes: where it tells few classes, a missing difference says little."""
    stages = [(one, *finished(plan, one, results)) for one in plan["stages"] if "subtypes" in one["name"]]
    means = [
        f"{done[done['arm'] == 'na']['value'].mean():.2f} ({one['name']})"
        for one, done, all_ in stages
        if len(done) == all_
    ]
    said = ", ".join(dict.fromkeys(means))
    why = "of eight classes, three with too few patients, it tells few, so that a missing difference says little there"
    return f"On subtypes NA itself has a macro F1 of {said}: {why}."


def _stage_table(found: Sequence[Difference], patients: pd.DataFrame, base: str) -> Iterator[str]:
    beside = {(row.cohort, row.arm, row.metric): row for row in patients.itertuples()}
    yield f"| arm | mean | {base} | difference (95 % interval) | equal pairs | over resampled patients | what it shows |\n|---|---|---|---|---|---|---|"
    for one in found:
        interval = f"{one.test.mean:+.4f} ({one.test.low:+.4f} to {one.test.high:+.4f})"
        drawn = _over_patients(beside.get((one.cohort, one.arm, one.metric)), one.statistics.n)
        equal = f"{one.statistics.ties} of {one.statistics.n}"
        means = f"{one.means[0]:.4f} | {one.means[1]:.4f}"
        yield f"| {arm_title(one.arm)} | {means} | {interval} | {equal} | {drawn} | {_verdict(one, base)} |"
    yield ""


def _over_patients(row: Any, runs: int) -> str:
    """The interval over resampled patients, of all runs of a contrast or of none: one of fewer would not belong to the mean beside it."""
    if row is None or row.seeds != runs:
        return "not computed" if row is None else f"not computed for all {runs} runs"
    return f"{row.low:+.4f} to {row.high:+.4f} ({row.repeats} draws)"


def _draw_stage(found: Sequence[Difference], stem: Path, *, title: str, margin: float, base: str) -> None:
    """Differences to the reference with their intervals; the dotted line is the margin below which an arm is called no worse."""
    figure, (axis,) = panels(1, width=6.5, height=0.3 * len(found) + 0.9)
    for place, one in enumerate(reversed(found)):
        axis.errorbar(
            one.test.mean,
            place,
            xerr=[[one.test.mean - one.test.low], [one.test.high - one.test.mean]],
            fmt="o",
            color="#0072B2" if one.claimed else "#555555",
            capsize=3,
        )
    axis.axvline(0.0, color="#000000", linewidth=0.8)
    axis.axvline(-margin, color="#888888", linewidth=0.8, linestyle=":")
    axis.set_yticks(range(len(found)), [arm_title(one.arm) for one in reversed(found)])
    axis.set_ylim(-0.6, len(found) - 0.4)
    tidy(axis, x=f"arm minus {base} (95 % interval)", y="")
    _save(figure, stem, f"{title}: difference to {base}")


def _save(figure: Figure, stem: Path, title: str) -> None:
    _, picture = save(figure, stem, title=title)
    picture.unlink()  # pages show the SVG


def draw_gates(gates: pd.DataFrame, cohort: str, stem: Path) -> None:
    """Mean beta of each layer by epoch, mean over finished runs, with a band from the least to the greatest run; one panel per arm.

    Not a standard deviation: with few runs it would reach where no gate was, or could be.
    """
    here = gates[gates["cohort"] == cohort]
    figure, axes = panels(here["arm"].nunique(), width=3.2, height=2.4)
    for axis, (arm, part) in zip(axes, here.groupby("arm", sort=False), strict=True):
        for place, (layer, rows) in enumerate(part.groupby("layer")):
            by_epoch = rows.groupby("epoch")["mean"].agg(["mean", "min", "max"])
            axis.plot(by_epoch.index, by_epoch["mean"], color=COLOURS[place], label=f"layer {int(layer) + 1}")
            axis.fill_between(
                by_epoch.index, by_epoch["min"], by_epoch["max"], color=COLOURS[place], alpha=0.18, linewidth=0
            )
        axis.set_ylim(-1.05, 1.05)
        runs = part["seed"].nunique()
        title = f"{arm_title(arm)}\n{runs} run{'s' * (runs > 1)}"
        tidy(axis, x="epoch", y="mean beta", title=title, whole_numbers=True)
    axes[0].legend(fontsize=7, frameon=False)
    _save(figure, stem, f"{cohort}: where the gates went")


def trajectory_lines(gates: pd.DataFrame, folder: Path | None) -> Iterator[str]:
    """A figure per cohort of how beta moved from epoch to epoch. ``folder``: where figures are drawn."""
    for cohort in gates["cohort"].unique():
        stem = HERE / f"gates_{cohort}"
        if folder is not None:
            draw_gates(gates, cohort, folder / stem.name)
        if stem.with_suffix(".svg").is_file():
            yield f"![Mean beta by epoch, {cohort}](evidence/{stem.name}.svg)\n"


def gate_lines(gates: pd.DataFrame, alike: pd.DataFrame) -> Iterator[str]:
    """What gates did in the last epoch, beside what they could; and whether beta follows homogeneity."""
    columns = "mean beta by layer | left the identity | correlation with homogeneity by layer | beta, most minus least homogeneous fifth"
    yield f"| cohort | arm | runs | reach | {columns} |"
    yield "|---|---|---|---|---|---|---|---|"
    last = gates[gates["epoch"] == gates.groupby(["cohort", "arm"])["epoch"].transform("max")]
    for (cohort, arm), part in last.groupby(["cohort", "arm"], sort=False):
        factor = float(arm.partition("gate_lr=")[2] or 1)
        reach = Reach(STEPS, LR, factor, 1.0, 64)
        means = ", ".join(f"{value:+.2f}" for value in part.groupby("layer")["mean"].mean())
        rows = alike[(alike["cohort"] == cohort) & (alike["arm"] == arm)]
        follow = ", ".join(f"{value:+.2f}" for value in rows.groupby("layer")["correlation"].mean())
        apart = ", ".join(f"{value:+.3f}" for value in _apart(rows).groupby(rows["layer"]).mean())
        left = 100 * (1 - part["share_identity"].mean())
        shut = find_arm(arm_settings(arm)[0]).moved_by_biases  # else it does not start at 0
        could = f"±{reach.beta:.2f}, ±{reach.furthest:.2f}" if shut else ""
        runs = part["seed"].nunique()
        yield f"| {cohort} | {arm_title(arm)} | {runs} | {could} | {means} | {left:.0f} % | {follow} | {apart} |"
    yield ""


def _apart(alike: pd.DataFrame) -> pd.Series:
    """By how much beta of the most homogeneous fifth of the patches differs from that of the least."""
    return alike["beta_highest_fifth"] - alike["beta_lowest_fifth"]


def render(tables: Path = HERE, draw: Path | None = None) -> str:
    plans = [yaml.safe_load((HERE / "breakhis.yaml").read_text(encoding="utf-8")), read_plan(HERE / "simulation.yaml")]
    names = ("", "_gates", "_homogeneity", "_bootstrap")
    real, gates, alike, patients = (pd.read_csv(tables / f"breakhis{name}.csv", dtype={"seed": str}) for name in names)
    simulated = read_table(tables / "simulation.csv")
    third = yaml.safe_load((HERE / "pretraining.yaml").read_text(encoding="utf-8"))
    pretrained = rows_of(tables / "pretraining.csv")
    controls = yaml.safe_load((HERE / "pretraining_controls.yaml").read_text(encoding="utf-8"))
    again = read_plan(HERE / "confirmation.yaml"), read_table(tables / "confirmation_before.csv")
    where = read_plan(HERE / "place.yaml"), read_table(tables / "place.csv")
    tissue = yaml.safe_load((HERE / "breakhis_place.yaml").read_text(encoding="utf-8"))
    moved = [rows_of(tables / f"breakhis_place{name}.csv") for name in names]
    parts = (
        (HERE / "page.txt")
        .read_text(encoding="utf-8")
        .format(
            answers="\n".join(f"- {' '.join(one.splitlines())}" for one in answers(tables)),
            steps=STEPS,
            reach=f"{Reach(STEPS, LR, 1.0, 1.0, 64).beta:.2f}",
            reach10=f"{Reach(STEPS, LR, 10.0, 1.0, 64).beta:.2f}",
            pretraining="\n".join(pretraining_lines(third, pretrained)),
            controls="\n".join(control_lines(controls, rows_of(tables / "pretraining_controls.csv"), pretrained)),
            stages="\n".join(stage_lines(plans[0], real, patients, draw)),
            gates="\n".join(gate_lines(gates, alike)),
            trajectories="\n".join(trajectory_lines(gates, draw)),
            diagrams="\n".join(simulation_lines(plans[1], simulated, draw)),
            simulated_gates="\n".join(simulated_gates(simulated)),
            secondary=secondary(plans[0], real),
            others=others(plans[0], real),
            few=few(plans[0], real),
            confirmed=confirmed(*again),
            counted_points=counted_points(*where),
            confirmation="\n".join(confirmation_lines(*again, draw)),
            place="\n".join(place_lines(*where, draw)),
            tissue="\n".join(stage_lines(tissue, moved[0], moved[3], draw)),
            tissue_gates="\n".join(gate_lines(moved[1], moved[2])) if len(moved[1]) else "",
            sign=sign(simulated),
            follows=_follows(alike),
        )
    )
    return parts


def _follows(alike: pd.DataFrame) -> str:
    """Whether beta of a patch depends on how alike its neighbours are."""
    sizes, apart = alike["correlation"].abs(), float(_apart(alike).abs().max())
    runs = alike[["cohort", "arm", "seed"]].drop_duplicates()
    strength = "hardly depends on" if apart < 0.1 else "depends on"
    said = f"Beta of a patch {strength} homogeneity on real tissue: in {len(runs)} finished runs the most and the least homogeneous fifth of the patches"
    follows = f"differ by at most {apart:.3f} in any layer, and the correlation is {sizes.median():.2f} in size (median; largest {sizes.max():.2f})"
    return (
        f"{said} {follows}. Gates act per layer and head, and hardly per patch."
        if apart < 0.1
        else f"{said} {follows}."
    )


def primary(plan: dict, results: pd.DataFrame, what: str = "Behind attention, on real tissue") -> str:
    """The answer of the stage that the plan claims from, or that there is none yet."""
    done, planned = finished(plan, plan["stages"][0], results)
    if len(done) < planned:
        return f"**{what}: open.** {len(done)} of {planned} runs of the primary contrast are finished."
    found = compare_results(done, "na", margin=plan["margin"]).cohorts
    alike: dict[str, list[Difference]] = {}
    for one in found:
        alike.setdefault(_verdict(one), []).append(one)
    said = "; ".join(f"{', '.join(map(_shown, some))}: {verdict}" for verdict, some in alike.items())
    seeds = len(plan["stages"][0]["seeds"])
    return (
        f"**{what}: {lead(one.test.mean * one.claimed for one in found)}.** BreaKHis, benign or malignant, {seeds} seeds, AUC minus that of NA "
        f"(95 % interval): {said}."
    )


def _shown(one: Difference) -> str:
    equal = f"; {one.statistics.ties} of {one.statistics.n} pairs equal" if one.statistics.ties else ""
    return f"{arm_title(one.arm)} {one.test.mean:+.4f} ({one.test.low:+.4f} to {one.test.high:+.4f}{equal})"


def _verdict(one: Difference, base: str = "NA") -> str:
    verdict = ("better" if one.test.mean > 0 else "worse") if one.claimed else f"not distinguishable from {base}"
    return ", ".join(filter(None, (verdict, one.no_worse)))


def advice(plan: dict, results: pd.DataFrame, gates: pd.DataFrame) -> str:
    """What faster gates did and gave in the primary contrast: `check` says it where it advises to open them."""
    here = results[(results["cohort"] == "breakhis-binary") & (results["metric"] == "macro_auc")]
    fast = "gated_srp@train.gate_lr=10"
    here = here[here["arm"].isin(["na", fast]) & here["seed"].isin(map(str, plan["stages"][0]["seeds"]))]
    (one,) = compare_results(here, "na", margin=plan["margin"]).cohorts
    gates = gates[(gates["cohort"] == "breakhis-binary") & (gates["arm"] == fast)]
    left = 100 * (1 - gates[gates["epoch"] == gates["epoch"].max()]["share_identity"].mean())
    said = f"on real tissue gate_lr 10 let {left:.0f} % of coefficients leave the identity and changed the AUC by {one.test.mean:+.3f}"
    return f"{said} (95 % interval {one.test.low:+.3f} to {one.test.high:+.3f})"


def removal(plan: dict, simulated: pd.DataFrame, tissue: dict, results: pd.DataFrame) -> str:
    """What the gate on the features that starts at removal gave in the two plans on place: `check` says it."""
    arm = "features_gated_srp_from_1"
    claims = {(one.diagram, one.first): one for one in claims_of(plan, simulated) if one.second == "na"}
    claim, cost = claims["place", arm], claims["wide", "features_beta_1"]
    done, _ = finished(tissue, tissue["stages"][0], results)
    (real,) = (one for one in compare_results(done, "na", margin=tissue["margin"]).cohorts if one.arm == arm)
    where = "in generated cohorts whose foci are single patches in a background that varies slowly"
    return (
        f"{arm} takes from the features what neighbours share: {where} it changed the AUC of NA by {claim.test.mean:+.3f} "
        f"(95 % interval {claim.test.low:+.3f} to {claim.test.high:+.3f}), on real tissue (BreaKHis) by {real.test.mean:+.3f} "
        f"({real.test.low:+.3f} to {real.test.high:+.3f}); in generated cohorts whose neighbours share the signal "
        f"removal by force changed it by {cost.test.mean:+.3f} ({cost.test.low:+.3f} to {cost.test.high:+.3f})"
    )


def answers(tables: Path = HERE) -> list[str]:
    """The page in short: the answers of the plans that claim something, for its top; the first line of each for the README."""
    real = yaml.safe_load((HERE / "breakhis.yaml").read_text(encoding="utf-8"))
    tissue = yaml.safe_load((HERE / "breakhis_place.yaml").read_text(encoding="utf-8"))
    return [
        primary(real, rows_of(tables / "breakhis.csv")),
        generated(read_plan(HERE / "simulation.yaml"), read_table(tables / "simulation.csv")),
        placed(read_plan(HERE / "place.yaml"), read_table(tables / "place.csv")),
        primary(tissue, rows_of(tables / "breakhis_place.csv"), "Taken from the features, on real tissue"),
        pretrained(
            yaml.safe_load((HERE / "pretraining.yaml").read_text(encoding="utf-8")),
            rows_of(tables / "pretraining.csv"),
            yaml.safe_load((HERE / "pretraining_controls.yaml").read_text(encoding="utf-8")),
            rows_of(tables / "pretraining_controls.csv"),
        ),
        few_steps(),
    ]


def few_steps() -> str:
    """How far gates go in few steps, for 200 slides with the default recipe."""
    typical, sure = (math.ceil(2 * (math.atanh(OUTSIDE) / (2 * times * LR) - 1)) for times in (1, FURTHEST))
    small = Reach(135, LR, 1.0, 1.0, 64)
    return (
        f"**Few steps: gates hardly open.** A gate starts at zero and moves by about the learning rate per step. 200 slides with the default recipe make "
        f"{small.steps} steps: the mean of beta gets to about ±{small.beta:.2f}, hardly beyond ±{small.furthest:.2f}, "
        f"so that the model stays close to the attention under it; `gated-srp check` says it for your cohort.\n"
        f"Until it leaves ±{OUTSIDE:g} a typical run needs about {typical:,} steps, and one that goes as far as any here {sure:,}. "
        f"`train.gate_lr` opens gates sooner (there: {small.factor}); the lines above have what that gives."
    )


def readme(text: str, tables: Path = HERE) -> str:
    """The README with the answers, shortened and without that on pretraining, between its marks."""
    start, end = "<!-- evidence: docs/evidence/page.py writes this -->\n", "<!-- end of evidence -->"
    before, _, rest = text.partition(start)
    lines = (f"- {one.splitlines()[0]}\n" for one in answers(tables) if "Pretraining" not in one)
    return before + start + "".join(lines) + end + rest.partition(end)[2]


if __name__ == "__main__":
    (HERE.parent / "evidence.md").write_text(render(draw=HERE), encoding="utf-8")
    front = HERE.parents[1] / "README.md"
    front.write_text(readme(front.read_text(encoding="utf-8")), encoding="utf-8")
