"""Writes docs/evidence.md from the plans and the tables of this folder: python docs/evidence/page.py

Every number and every statement on that page is computed here; a test holds the page to the tables.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import yaml
from matplotlib.figure import Figure

from gated_srp.config.reach import OUTSIDE, Reach
from gated_srp.models import METHOD, arm_title
from gated_srp.reports.figures import COLOURS, panels, save, tidy
from gated_srp.simulation import KEY, differences, draw_diagram, points_of, read_plan, read_table
from gated_srp.study.results import Difference, compare_results
from gated_srp.study.statistics import holm, paired

HERE = Path(__file__).parent
CHANCE = 0.55  # of an AUC or a C-index, from which on a reference predicts something
STEPS, LR = 400, 2e-4  # of the plan on real tissue, about: 600 to 650 fields train, 16 per step, 10 epochs


def stage_lines(
    plan: dict, results: pd.DataFrame, patients: pd.DataFrame | None = None, folder: Path | None = None
) -> Iterator[str]:
    """Per stage of the plan: what is finished, and its reading once it is complete. ``folder``: where its figure is drawn."""
    for stage in plan["stages"]:
        cohort = plan["cohorts"][stage["cohort"]]
        done, planned = _finished(plan, stage, results)
        yield f"### {stage['name']}: {stage['cohort']}, {cohort['primary']}, {len(done)} of {planned} runs\n"
        if len(done) < planned:
            yield "Not complete, and therefore not read.\n"
            continue
        found = compare_results(done.dropna(), "na", margin=plan["margin"]).cohorts
        yield from _stage_table(found, pd.DataFrame() if patients is None else patients)
        stem = HERE / f"stage_{stage['name']}"
        if folder is not None:
            _draw_stage(found, stem, title=f"{stage['cohort']}, {cohort['primary']}", margin=plan["margin"])
        if stem.with_suffix(".svg").is_file():
            yield f"![Differences to NA, stage {stage['name']}](evidence/{stem.name}.svg)\n"


def _finished(plan: dict, stage: dict, results: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """The primary metric of a stage's finished runs, and how many are planned."""
    cohort = plan["cohorts"][stage["cohort"]]
    units = [
        f"{seed}_fold{fold}" if "folds" in cohort["settings"] else str(seed)
        for seed in stage["seeds"]
        for fold in range(cohort["settings"].get("folds", 1))
    ]
    here = results[(results["cohort"] == stage["cohort"]) & (results["metric"] == cohort["primary"])]
    done = here[here["arm"].isin(stage["arms"]) & here["seed"].isin(units)]
    return done.assign(value=pd.to_numeric(done["value"])), len(stage["arms"]) * len(units)


def secondary(plan: dict, results: pd.DataFrame) -> str:
    """In one sentence the stages, complete by now, that repeat the primary contrast otherwise; hints, as the plan says."""
    said = []
    for stage in plan["stages"][1:]:
        done, planned = _finished(plan, stage, results)
        if stage["arms"] == plan["stages"][0]["arms"] and len(done) == planned:
            found = compare_results(done.dropna(), "na", margin=plan["margin"]).cohorts
            arms = ", ".join(f"{arm_title(one.arm)} {one.test.mean:+.4f}" for one in found)
            claimed, equal = (
                sum(one.claimed for one in found),
                sum(one.no_worse.startswith("no worse") for one in found),
            )
            shown = f"{claimed} of {len(found)} distinguishable from NA, {equal} shown to be no worse by more than {plan['margin']:g}"
            said.append(f"{stage['name']} ({plan['cohorts'][stage['cohort']]['primary']}: {arms}; {shown})")
    return (
        f"Repeated otherwise, as hints: {'; '.join(said)}."
        if said
        else "No stage that repeats it otherwise is complete."
    )


def pretraining_lines(plan: dict, results: pd.DataFrame) -> Iterator[str]:
    """Per stage of the plan on pretraining: what is finished, and its contrasts once it is complete."""
    for stage in plan["stages"]:
        metric = plan["cohorts"][stage["cohort"]]["primary"]
        done, planned = _finished(plan, stage, results)
        yield f"### {stage['name']}: {stage['cohort']}, {metric}, {len(done)} of {planned} runs\n"
        if len(done) < planned:
            yield "Not complete, and therefore not read.\n"
            continue
        wide = done.pivot(index="seed", columns="arm", values="value")
        tests = [paired(wide[one] - wide[other]).corrected for one, other in plan["contrasts"]]
        adjusted = [*holm([test.p for test in tests[:2]]), *(test.p for test in tests[2:])]
        yield "| first | second | means | difference (95 % interval) | p (Holm over the first two) | what it shows |\n|---|---|---|---|---|---|"
        for (one, other), test, p in zip(plan["contrasts"], tests, adjusted, strict=True):
            interval = f"{test.mean:+.4f} ({test.low:+.4f} to {test.high:+.4f})"
            decided = p < 0.05 and (test.low > 0 or test.high < 0)
            words = ("better" if test.mean > 0 else "worse") if decided else "not distinguishable"
            words += f", no worse by more than {plan['margin']:g}" if test.low > -plan["margin"] else ""
            names = " | ".join(map(_with_start, (one, other)))
            yield f"| {names} | {wide[one].mean():.4f}, {wide[other].mean():.4f} | {interval} | {p:.3f} | {words} |"
        here = results[(results["cohort"] == stage["cohort"]) & (results["metric"] == "pretraining_r2")]
        shown = here.groupby("arm", sort=False)["value"].agg(["min", "max"])
        spans = ", ".join(f"{_with_start(arm)} {row['min']:.3f} to {row['max']:.3f}" for arm, row in shown.iterrows())
        yield f"\nR2 of masked patches on validation, over seeds: {spans}.\n"


def _with_start(arm: str) -> str:
    name, _, start = arm.partition("@train.init=")
    return f"{arm_title(name)}, {start}" if start else arm_title(name)


def _stage_table(found: Sequence[Difference], patients: pd.DataFrame) -> Iterator[str]:
    beside = {(row.cohort, row.arm, row.metric): row for row in patients.itertuples()}
    yield "| arm | mean | NA | difference (95 % interval) | over resampled patients | what it shows |\n|---|---|---|---|---|---|"
    for one in found:
        interval = f"{one.test.mean:+.4f} ({one.test.low:+.4f} to {one.test.high:+.4f})"
        words = _shown(one).partition(" is ")[2].partition(" (")[0]
        row = beside.get((one.cohort, one.arm, one.metric))
        drawn = f"{row.low:+.4f} to {row.high:+.4f}, {row.seeds} runs" if row else ""
        yield f"| {arm_title(one.arm)} | {one.means[0]:.4f} | {one.means[1]:.4f} | {interval} | {drawn} | {words} |"
    yield ""


def _draw_stage(found: Sequence[Difference], stem: Path, *, title: str, margin: float) -> None:
    """Differences to NA with their intervals; the dotted line is the margin below which an arm is called no worse."""
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
    tidy(axis, x="arm minus NA (95 % interval)", y="")
    _save(figure, stem, f"{title}: difference to NA")


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
        reach = Reach(STEPS, LR, factor, 1.0, 64).beta
        means = ", ".join(f"{value:+.2f}" for value in part.groupby("layer")["mean"].mean())
        rows = alike[(alike["cohort"] == cohort) & (alike["arm"] == arm)]
        follow = ", ".join(f"{value:+.2f}" for value in rows.groupby("layer")["correlation"].mean())
        apart = ", ".join(f"{value:+.3f}" for value in _apart(rows).groupby(rows["layer"]).mean())
        left = 100 * (1 - part["share_identity"].mean())
        yield f"| {cohort} | {arm_title(arm)} | {part['seed'].nunique()} | ±{reach:.2f} | {means} | {left:.0f} % | {follow} | {apart} |"
    yield ""


def _apart(alike: pd.DataFrame) -> pd.Series:
    """By how much beta of the most homogeneous fifth of the patches differs from that of the least."""
    return alike["beta_highest_fifth"] - alike["beta_lowest_fifth"]


def simulation_lines(plan: dict, results: pd.DataFrame, folder: Path | None) -> Iterator[str]:
    """Per diagram: how much is finished, and the differences of the points that have all their seeds."""
    done = set(results[KEY].itertuples(index=False, name=None))
    found = differences(results, plan)
    for name, diagram in plan["diagrams"].items():
        points = [point for point in points_of(plan) if point.diagram == name]
        runs = sum(point.key(arm) in done for point in points for arm in point.arms)
        planned = sum(len(point.arms) for point in points)
        yield f"### {name}: {diagram['title']}, {diagram['metric']}, {runs} of {planned} runs\n"
        here = found[(found["diagram"] == name) & (found["n"] == len(diagram.get("seeds", plan["seeds"])))]
        if not len(here):
            yield "No point has all its seeds yet, so nothing is read.\n"
            continue
        yield f"| {diagram['x']['dial']} | {diagram['y']['dial']} | arm | NA | difference (95 % interval) | |\n|---|---|---|---|---|---|"
        for row in here.itertuples():
            mark = "excludes zero" if row.low > 0 or row.high < 0 else ""
            interval = f"{row.difference:+.3f} ({row.low:+.3f} to {row.high:+.3f})"
            yield f"| {row.x} | {row.y} | {arm_title(row.arm)} | {row.reference:.3f} | {interval} | {mark} |"
        marked = int(((here["low"] > 0) | (here["high"] < 0)).sum())
        yield f"\n{marked} of {len(here)} intervals exclude zero; {len(here) / 20:.1f} would by chance.{_weak(here)}\n"
        if runs == planned and folder is not None:
            draw_diagram(here, plan, name, folder / f"diagram_{name}")[-1].unlink()  # pages show the SVG
        if (HERE / f"diagram_{name}.svg").is_file():
            yield f"![{diagram['title']}](evidence/diagram_{name}.svg)\n"


def _weak(here: pd.DataFrame) -> str:
    """Where the reference itself hardly predicts, a missing difference says nothing."""
    points = here.drop_duplicates(["x", "y"])
    weak = int((points["reference"] < CHANCE).sum())
    said = f" At {weak} of {len(points)} points NA itself is below {CHANCE}, hardly better than chance: nothing could be seen there."
    return said if weak else ""


def simulated_gates(results: pd.DataFrame) -> Iterator[str]:
    """How far gates went in generated cohorts, all finished runs together."""
    yield "| arm | runs | least, median, greatest mean beta | coefficients outside the identity |\n|---|---|---|---|"
    beta = results[results["metric"] == "mean_beta"].assign(value=lambda one: pd.to_numeric(one["value"]))
    moved = results[results["metric"] == "share_moved"].assign(value=lambda one: pd.to_numeric(one["value"]))
    for arm, part in beta.groupby("arm", sort=False):
        share = 100 * moved[moved["arm"] == arm]["value"].mean()
        low, middle, high = part["value"].quantile([0, 0.5, 1])
        yield f"| {arm_title(arm)} | {len(part)} | {low:+.2f}, {middle:+.2f}, {high:+.2f} | {share:.0f} % |"
    yield ""


def render(tables: Path = HERE, draw: Path | None = None) -> str:
    plans = [yaml.safe_load((HERE / "breakhis.yaml").read_text(encoding="utf-8")), read_plan(HERE / "simulation.yaml")]
    names = ("", "_gates", "_homogeneity", "_bootstrap")
    real, gates, alike, patients = (pd.read_csv(tables / f"breakhis{name}.csv", dtype={"seed": str}) for name in names)
    simulated = read_table(tables / "simulation.csv")
    third = yaml.safe_load((HERE / "pretraining.yaml").read_text(encoding="utf-8"))
    rows = tables / "pretraining.csv"
    columns = ["cohort", "arm", "seed", "metric", "value"]
    pretrained = pd.read_csv(rows, dtype={"seed": str}) if rows.is_file() else pd.DataFrame(columns=columns)
    needed = math.ceil(2 * (math.atanh(OUTSIDE) / (2 * LR) - 1))
    small = Reach(135, LR, 1.0, 1.0, 64)
    parts = (
        (HERE / "page.txt")
        .read_text(encoding="utf-8")
        .format(
            needed=f"{needed:,}",
            small=f"{small.beta:.2f}",
            small_limit=f"{small.limit:.2f}",
            factor=small.factor,
            steps=STEPS,
            reach=f"{Reach(STEPS, LR, 1.0, 1.0, 64).beta:.2f}",
            reach10=f"{Reach(STEPS, LR, 10.0, 1.0, 64).beta:.2f}",
            pretraining="\n".join(pretraining_lines(third, pretrained)),
            stages="\n".join(stage_lines(plans[0], real, patients, draw)),
            gates="\n".join(gate_lines(gates, alike)),
            trajectories="\n".join(trajectory_lines(gates, draw)),
            diagrams="\n".join(simulation_lines(plans[1], simulated, draw)),
            simulated_gates="\n".join(simulated_gates(simulated)),
            primary=_primary(plans[0], real),
            secondary=secondary(plans[0], real),
            generated=_generated(plans[1], simulated),
            sign=_sign(simulated),
            follows=_follows(alike),
        )
    )
    return parts


def complete_diagrams(plan: dict, results: pd.DataFrame) -> list[str]:
    """Those of which every run is finished."""
    done = set(results[KEY].itertuples(index=False, name=None))
    return [
        name
        for name in plan["diagrams"]
        if all(point.key(arm) in done for point in points_of(plan) if point.diagram == name for arm in point.arms)
    ]


def _generated(plan: dict, results: pd.DataFrame) -> str:
    """What the complete diagrams show of Gated SRP with slow and fast gates, all points together."""
    complete = complete_diagrams(plan, results)
    found = differences(results, plan)
    found = found[found["diagram"].isin(complete)]
    if not len(found):
        return "On generated cohorts the answer is still open: no diagram is complete."
    said = []
    for arm, part in found[found["arm"].str.startswith(METHOD)].groupby("arm", sort=False):
        up, down = int((part["low"] > 0).sum()), int((part["high"] < 0).sum())
        span = f"{part['difference'].min():+.3f} to {part['difference'].max():+.3f}"
        said.append(f"{arm_title(arm)} better at {up}, worse at {down} of {len(part)} points (differences {span})")
    names = ", ".join(complete)
    return f"On generated cohorts with a known truth (diagrams complete: {names}), against NA by 95 % intervals: {'; '.join(said)}."


def _sign(simulated: pd.DataFrame) -> str:
    """Where open gates went."""
    fast = simulated["arm"].str.startswith("gated_srp@train.gate_lr")  # along the neighbours; controls have other axes
    rows = simulated[(simulated["metric"] == "mean_beta") & fast]
    values = pd.to_numeric(rows["value"])
    if not len(values):
        return "No run with faster gates is finished."
    below = int((values < 0).sum())
    said = f"In {below} of {len(values)} finished runs with faster gates the mean of beta is below zero: there the gates add to what neighbours have in common"
    return f"{said}, the opposite of removing a redundancy."


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


def _primary(plan: dict, results: pd.DataFrame) -> str:
    """The answer of the stage that the plan claims from, or that there is none yet."""
    first = next(iter(plan["stages"]))
    cohort = plan["cohorts"][first["cohort"]]
    here = results[(results["cohort"] == first["cohort"]) & (results["metric"] == cohort["primary"])]
    here = here[here["arm"].isin(first["arms"]) & here["seed"].isin(map(str, first["seeds"]))]
    if len(here) < len(first["arms"]) * len(first["seeds"]):
        return f"On real tissue the answer is still open: {len(here)} of {len(first['arms']) * len(first['seeds'])} runs of the primary contrast are finished."
    found = compare_results(here, "na", margin=plan["margin"]).cohorts
    return f"On real tissue (BreaKHis, benign or malignant, AUC minus that of NA): {'; '.join(map(_shown, found))}."


def _shown(one: Difference) -> str:
    """A difference in words: what the interval allows one to say, and no more."""
    verdict = ("better" if one.test.mean > 0 else "worse") if one.claimed else "not distinguishable from NA"
    interval = f"{one.test.mean:+.4f}, 95 % interval {one.test.low:+.4f} to {one.test.high:+.4f}"
    return f"{arm_title(one.arm)} is {', '.join(filter(None, (verdict, one.no_worse)))} ({interval})"


def advice(plan: dict, results: pd.DataFrame) -> str:
    """What open gates gave in the primary contrast: `check` says it where it advises to open them."""
    here = results[(results["cohort"] == "breakhis-binary") & (results["metric"] == "macro_auc")]
    fast = "gated_srp@train.gate_lr=10"
    here = here[here["arm"].isin(["na", fast]) & here["seed"].isin(map(str, plan["stages"][0]["seeds"]))]
    (one,) = compare_results(here, "na", margin=plan["margin"]).cohorts
    return f"on real tissue open gates changed the AUC by {one.test.mean:+.3f} (95 % interval {one.test.low:+.3f} to {one.test.high:+.3f})"


if __name__ == "__main__":
    (HERE.parent / "evidence.md").write_text(render(draw=HERE), encoding="utf-8")
