"""What the plans on generated cohorts show, for the page of evidence: each diagram, what its gates did, and the question asked again."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from reading import lead, verdict

from gated_srp.models import METHOD, arm_title
from gated_srp.simulation import KEY, differences, draw_diagram, points_of, reference_of
from gated_srp.study.statistics import TTest, holm, t_test

HERE = Path(__file__).parent
CHANCE = 0.55  # of an AUC or a C-index, from which on a reference predicts something


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
        base = arm_title(reference_of(plan, diagram))
        yield f"| {diagram['x']['dial']} | {diagram['y']['dial']} | arm | {base} | difference (95 % interval) | |\n|---|---|---|---|---|---|"
        for row in here.itertuples():
            mark = "excludes zero" if row.low > 0 or row.high < 0 else ""
            interval = f"{row.difference:+.3f} ({row.low:+.3f} to {row.high:+.3f})"
            yield f"| {row.x} | {row.y} | {arm_title(row.arm)} | {row.reference:.3f} | {interval} | {mark} |"
        marked = int(((here["low"] > 0) | (here["high"] < 0)).sum())
        yield f"\n{marked} of {len(here)} intervals exclude zero; {len(here) / 20:.1f} would by chance.{_weak(here, base)}\n"
        if runs == planned and folder is not None:
            draw_diagram(here, plan, name, folder / f"diagram_{name}")[-1].unlink()  # pages show the SVG
        if (HERE / f"diagram_{name}.svg").is_file():
            yield f"![{diagram['title']}](evidence/diagram_{name}.svg)\n"


def _weak(here: pd.DataFrame, base: str = "NA") -> str:
    """Where the reference itself hardly predicts, a missing difference says nothing."""
    points = here.drop_duplicates(["x", "y"])
    weak = int((points["reference"] < CHANCE).sum())
    said = f" At {weak} of {len(points)} points {base} itself is below {CHANCE}, hardly better than chance: a missing difference says nothing there."
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


def complete_diagrams(plan: dict, results: pd.DataFrame) -> list[str]:
    """Those of which every run is finished."""
    done = set(results[KEY].itertuples(index=False, name=None))
    return [
        name
        for name in plan["diagrams"]
        if all(point.key(arm) in done for point in points_of(plan) if point.diagram == name for arm in point.arms)
    ]


def _complete_differences(plan: dict, results: pd.DataFrame) -> tuple[list[str], pd.DataFrame]:
    """The complete diagrams, and the differences at all their points."""
    complete, found = complete_diagrams(plan, results), differences(results, plan)
    return complete, found[found["diagram"].isin(complete)]


def _span(part: pd.DataFrame) -> str:
    return f"{part['difference'].min():+.3f} to {part['difference'].max():+.3f}"


def generated(plan: dict, results: pd.DataFrame) -> str:
    """What the complete diagrams show: all contrasts with NA, and the span of those of Gated SRP with slow and fast gates."""
    complete, found = _complete_differences(plan, results)
    if not len(found):
        return "**Behind attention, in generated cohorts: open.** No diagram is complete."
    up, down = found["low"] > 0, found["high"] < 0
    spans = (
        f"{arm_title(arm)} {_span(part)} ({len(part)} points)"
        for arm, part in found[found["arm"].str.startswith(METHOD)].groupby("arm", sort=False)
    )
    counts = f"{int(up.sum())} better and {int(down.sum())} worse" if (up | down).any() else "none"
    chance = f"{len(found) / 20:.0f} would by chance alone"
    return (
        f"**Behind attention, in generated cohorts: {lead(found['difference'] * (up | down))}.** Of {len(found)} contrasts with NA "
        f"({', '.join(complete)}) the 95 % interval of {counts} excludes zero, where {chance}.\nDifferences: {', '.join(spans)}."
    )


def sign(simulated: pd.DataFrame) -> str:
    """Where open gates went."""
    fast = simulated["arm"].str.startswith("gated_srp@train.gate_lr")  # along the neighbours; controls have other axes
    rows = simulated[(simulated["metric"] == "mean_beta") & fast]
    values = pd.to_numeric(rows["value"])
    if not len(values):
        return "No run with faster gates is finished."
    below = int((values < 0).sum())
    said = f"In {below} of {len(values)} finished runs with faster gates the mean of beta is below zero: there the gates add to what neighbours have in common"
    return f"{said}, the opposite of removing a redundancy."


_WHERE = {"0": "foci are single patches", "2": "foci are wider than the window"}  # by radius


def confirmed(plan: dict, results: pd.DataFrame) -> str:
    """What the plan that asked again with new cohorts gave: a hint, since no history shows that it came before its results."""
    found = differences(results, plan).set_index(["diagram", "arm", "x", "y"])
    rows = [found.loc[(one["diagram"], one["arm"], str(one["x"]), str(one["y"]))] for one in plan["claims"]]
    said = []
    for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):
        decided = p < 0.05 and (row["low"] > 0 or row["high"] < 0)
        words = (
            ("better than NA" if row["difference"] > 0 else "worse than NA")
            if decided
            else "not distinguishable from NA"
        )
        interval = f"95 % interval {row['low']:+.3f} to {row['high']:+.3f}, p {p:.2g} after Holm"
        said.append(f"{words} where {_WHERE[row.name[3]]} ({row['difference']:+.3f}, {interval})")
    what = "As a hint, removing by force, behind attention, what neighbours share (beta 1 for every patch)"
    return f"{what}, {len(plan['seeds'])} new generated cohorts per point: {'; '.join(said)}."


def confirmation_lines(plan: dict, results: pd.DataFrame, folder: Path | None) -> Iterator[str]:
    """The plan that asked again: its two questions, then all its contrasts and what its gates chose."""
    head, *lines = simulation_lines(plan, results, folder)
    yield head
    yield f"**{confirmed(plan, results)}**\n"
    yield from lines
    yield from _chosen(plan, results)


# The plan with a positive control ------------------------------------------------------------------------------------


class Claim(NamedTuple):
    """First minus second at a point of a diagram, paired by cohort; p after Holm's correction over the plan's claims."""

    diagram: str
    first: str
    second: str
    at: str
    means: tuple[float, float]
    test: TTest
    p: float

    @property
    def verdict(self) -> str:
        return verdict(self.test, self.p)

    @property
    def words(self) -> str:
        return f"{self.test.mean:+.3f}, 95 % interval {self.test.low:+.3f} to {self.test.high:+.3f}"


def claims_of(plan: dict, results: pd.DataFrame) -> list[Claim]:
    """The claims of a plan whose diagrams are complete."""
    found = []
    for one in plan["claims"]:
        diagram = plan["diagrams"][one["diagram"]]
        chosen = (results["diagram"] == one["diagram"]) & (results["metric"] == diagram["metric"])
        here = results[chosen & (results["x"] == str(one["x"])) & (results["y"] == str(one["y"]))]
        wide = here.assign(value=pd.to_numeric(here["value"])).pivot(index="seed", columns="arm", values="value")
        first, second = wide[one["first"]], wide[one["second"]]
        at = f"{diagram['x']['dial']} {one['x']}, {diagram['y']['dial']} {one['y']}"
        means = float(first.mean()), float(second.mean())
        found.append((one["diagram"], one["first"], one["second"], at, means, t_test((first - second).to_numpy())))
    return [Claim(*one, p) for one, p in zip(found, holm([one[-1].p for one in found]), strict=True)]


def placed(plan: dict, results: pd.DataFrame) -> str:
    """The claims on where to remove, for a reader in a hurry; that they are open where runs are missing."""
    what = "Taken from the features, before the first layer, in generated cohorts"
    if not {one["diagram"] for one in plan["claims"]} <= set(complete_diagrams(plan, results)):
        return f"**{what}: open.** It is being computed."
    claims = claims_of(plan, results)
    against_na = [one for one in claims if one.second == "na"]
    shown = (one.test.mean * (one.verdict != "not distinguishable") for one in against_na)
    said = [f"**{what}: {lead(shown)}.** AUC, means of {int(claims[0].test.df) + 1} cohorts."]
    for diagram, where in _SITUATION.items():
        here = [one for one in against_na if one.diagram == diagram]
        arms = (f"{_PLAIN[one.first]} {one.means[0]:.3f} ({one.verdict}: {one.words})" for one in here)
        said.append(f"{where}: NA {here[0].means[1]:.3f}, {', '.join(arms)}.")
    rest = (
        f"{_PLAIN[one.first].partition(' (')[0]} is {one.verdict} {_THAN[one.verdict]} {_PLAIN[one.second]}: "
        f"{one.means[0]:.3f}, {one.means[1]:.3f} ({one.words})"
        for one in claims
        if one.second != "na"
    )
    return f"{' '.join(said)}\nIn the former, {'; '.join(rest)}."


def counted_points(plan: dict, results: pd.DataFrame) -> str:
    """Per arm, at how many points of the complete diagrams its interval lies above zero, and at how many below."""
    complete, found = _complete_differences(plan, results)
    if not len(found):
        return "Where to remove: no diagram is complete."
    said = []
    for arm, part in found.groupby("arm", sort=False):
        up, down = int((part["low"] > 0).sum()), int((part["high"] < 0).sum())
        said.append(f"{arm_title(arm)} {up} above, {down} below of {len(part)} ({_span(part)})")
    names = ", ".join(complete)
    where = f"Where to remove, all points ({names}), intervals that lie above or below zero: {'; '.join(said)}. "
    chance = "One in twenty does by chance; diagrams have seeds in common, so that points at the same dials are the same cohorts."
    return f"{where}{chance}"


_THAN = {"better": "than", "worse": "than", "not distinguishable": "from"}
_SITUATION = {  # of the claims, by diagram
    "place": "Foci of single patches in a background that varies slowly",
    "wide": "Foci wider than the window in a background that hardly goes on from patch to patch",
}
_PLAIN = {
    "fixed_beta_1": "removal behind attention (`fixed_beta_1`)",
    "features_beta_1": "removal by force (`features_beta_1`)",
    "features_gated_srp_from_1": "a gate that starts at removal (`features_gated_srp_from_1`)",
    "features_gated_srp@train.gate_lr=10": "one that starts at the identity (`features_gated_srp`, gate_lr 10)",
}


def place_lines(plan: dict, results: pd.DataFrame, folder: Path | None) -> Iterator[str]:
    """The claims, once their diagrams are complete, and each diagram, once it is."""
    complete = complete_diagrams(plan, results)
    if {one["diagram"] for one in plan["claims"]} <= set(complete):
        yield "| first | second | where | means | difference (95 % interval) | p after Holm | first is |\n|---|---|---|---|---|---|---|"
        for one in claims_of(plan, results):
            names = f"{arm_title(one.first)} | {arm_title(one.second)}"
            interval = f"{one.test.mean:+.3f} ({one.test.low:+.3f} to {one.test.high:+.3f})"
            means = f"{one.means[0]:.3f}, {one.means[1]:.3f}"
            yield f"| {names} | {one.at} | {means} | {interval} | {one.p:.2g} | **{one.verdict}** |"
        yield ""
    for name, diagram in plan["diagrams"].items():
        alone = plan | {"diagrams": {name: diagram}}
        if name in complete:
            yield from simulation_lines(alone, results, folder)
            yield from _chosen(alone, results)
            continue
        head, *_ = simulation_lines(alone, results[:0], None)
        done = set(results[KEY].itertuples(index=False, name=None))
        runs = sum(point.key(arm) in done for point in points_of(alone) for arm in point.arms)
        yield head.replace(" 0 of", f" {runs} of") + "\nNot complete, and therefore not read.\n"


def _chosen(plan: dict, results: pd.DataFrame) -> Iterator[str]:
    """Where the gates of a diagram ended, point by point: mean over cohorts, least and greatest."""
    ((name, diagram),) = plan["diagrams"].items()
    beta = results[(results["diagram"] == name) & (results["metric"] == "mean_beta")]
    beta = beta.assign(value=pd.to_numeric(beta["value"]))
    if not len(beta):
        return
    dials = f"{diagram['x']['dial']} and {diagram['y']['dial']}"
    yield f"Mean beta that gates ended with, mean (least to greatest cohort), at {dials}:\n"
    for arm, part in beta.groupby("arm", sort=False):
        points = part.groupby(["x", "y"], sort=False)["value"].agg(["mean", "min", "max"])
        said = (
            f"{row['mean']:+.2f} ({row['min']:+.2f} to {row['max']:+.2f}) at {x}, {y}"
            for (x, y), row in points.iterrows()
        )
        yield f"- {arm_title(arm)}: {'; '.join(said)}"
    yield ""
