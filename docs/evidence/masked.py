"""What the plans on pretraining show, for the page of evidence: trainings that start from it, masked patches, and the controls for them."""

import math
from collections.abc import Iterator

import pandas as pd
from reading import finished, lead, verdict

from gated_srp.models import METHOD, arm_title
from gated_srp.study.statistics import holm, paired


def pretraining_lines(plan: dict, results: pd.DataFrame) -> Iterator[str]:
    """Per stage of the plan on pretraining: what is finished, and its contrasts once it is complete."""
    for stage in plan["stages"]:
        metric = plan["cohorts"][stage["cohort"]]["primary"]
        done, planned = finished(plan, stage, results)
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
            words = verdict(test, p)
            words += f", no worse by more than {plan['margin']:g}" if test.low > -plan["margin"] else ""
            names = " | ".join(map(_with_start, (one, other)))
            yield f"| {names} | {wide[one].mean():.4f}, {wide[other].mean():.4f} | {interval} | {p:.3f} | {words} |"
        explained = _explained(results, stage["cohort"])
        spans = ", ".join(f"{_with_start(arm)} {one.min():.3f} to {one.max():.3f}" for arm, one in explained.items())
        yield f"\nR2 of masked patches on validation, over seeds: {spans}.{_more_explained(plan, explained)}\n"


def _explained(results: pd.DataFrame, cohort: str) -> pd.DataFrame:
    """R2 of masked patches on validation: a row per seed, a column per arm, in the order of the table."""
    here = results[(results["cohort"] == cohort) & (results["metric"] == "pretraining_r2")]
    return here.pivot(index="seed", columns="arm", values="value")[list(here["arm"].unique())]


def _more_explained(plan: dict, explained: pd.DataFrame) -> str:
    """The last contrast of the plan, by R2; a hint."""
    first, second = plan["contrasts"][-1]
    if not {first, second} <= set(explained):
        return ""
    test = paired(explained[first] - explained[second]).corrected
    said = f" As a hint, {_with_start(first)} minus {_with_start(second)}: {test.mean:+.4f} (95 % interval {test.low:+.4f} to {test.high:+.4f})"
    return f"{said}, {'which excludes zero' if test.excludes_zero else 'not distinguishable'}."


def control_lines(plan: dict, results: pd.DataFrame, before: pd.DataFrame) -> Iterator[str]:
    """Whether any gate would predict masked patches as well: controls beside the pretrainings of before, once all are finished."""
    counts = [(stage["name"], *finished(plan, stage, results)) for stage in plan["stages"]]
    yield f"{'; '.join(f'{name} {len(done)} of {planned} runs' for name, done, planned in counts)}.\n"
    tests, adjusted = _control_tests(plan, results, before)
    if not tests:
        yield "Not complete, and therefore not read.\n"
        return
    yield "| cohort | first | second | mean R2 | difference (95 % interval) | what it shows |\n|---|---|---|---|---|---|"
    for key, (means, test) in tests.items():
        p = adjusted.get(key, math.nan)
        words = verdict(test, adjusted.get(key, 0.0))
        words = f"**{words}** (claim, p {p:.2g} after Holm)" if key in adjusted else f"{words} (hint)"
        names = " | ".join(arm_title(arm) for arm in key[1:])
        interval = f"{test.mean:+.4f} ({test.low:+.4f} to {test.high:+.4f})"
        yield f"| {key[0]} | {names} | {means.iloc[0]:.3f}, {means.iloc[1]:.3f} | {interval} | {words} |"
    yield ""


def _control_tests(plan: dict, results: pd.DataFrame, before: pd.DataFrame) -> tuple[dict, dict]:
    """Means and test by cohort, first and second arm, and p after Holm of those that are claims; nothing until all runs are finished."""
    counts = (finished(plan, stage, results) for stage in plan["stages"])
    if any(len(done) < planned for done, planned in counts):
        return {}, {}
    tests = {}
    for stage in plan["stages"]:
        known = _explained(before, stage["cohort"]).rename(columns=lambda arm: arm.partition("@")[0])
        wide = known.join(_explained(results, stage["cohort"]))
        pairs = [(METHOD, arm) for arm in (*stage["arms"], "na")] + [(arm, "na") for arm in stage["arms"]]
        for one, other in pairs:
            tests[stage["cohort"], one, other] = wide[[one, other]].mean(), paired(wide[one] - wide[other]).corrected
    claims = [key for key in tests if key[1:] == (METHOD, "axis_shuffled")]
    return tests, dict(zip(claims, holm([tests[key][1].p for key in claims]), strict=True))


def _controlled(plan: dict, results: pd.DataFrame, before: pd.DataFrame) -> str:
    """Whether the true neighbours are what predicts masked patches better, in a sentence."""
    what = "Masked patches themselves (R2 on validation), Gated SRP minus the same gate along the mean of patches from elsewhere"
    tests, adjusted = _control_tests(plan, results, before)
    said = [
        f"{tests[key][1].mean:+.3f} ({tests[key][1].low:+.3f} to {tests[key][1].high:+.3f}; {verdict(tests[key][1], p)}) on {key[0]}"
        for key, p in adjusted.items()
    ]
    hints = [
        f"{key[2]} {test.mean:+.3f} ({test.low:+.3f} to {test.high:+.3f})"
        for key, (_, test) in tests.items()
        if key[0] == "demo" and key[1] == METHOD and key[2] in ("fixed_beta_1", "local_attention")
    ]
    more = f" As hints, on the demo, Gated SRP minus {', minus '.join(hints)}." if hints else ""
    return f"{what}: {', '.join(said) or 'open'}.{more}"


def pretrained(plan: dict, results: pd.DataFrame, controls: dict, beside: pd.DataFrame) -> str:
    """Pretraining in short: the claims of its plan and of the plan of its controls."""
    stage = next(one for one in plan["stages"] if one["cohort"] == "breakhis-binary")
    done, planned = finished(plan, stage, results)
    if len(done) < planned:
        return f"**Pretraining: open.** {len(done)} of {planned} runs on BreaKHis are finished."
    wide = done.pivot(index="seed", columns="arm", values="value")
    tests = [paired(wide[one] - wide[other]).corrected for one, other in plan["contrasts"][:2]]
    shown = [
        test.mean * (verdict(test, p) in ("better", "worse"))
        for p, test in zip(holm([one.p for one in tests]), tests, strict=True)
    ]
    said = ", ".join(
        f"{arm_title(other)} {test.mean:+.4f} ({test.low:+.4f} to {test.high:+.4f})"
        for (_, other), test in zip(plan["contrasts"], tests, strict=False)
    )
    answer = f"**Pretraining on masked patches: {lead(shown)} for the diagnosis.** BreaKHis, AUC with minus without it"
    return f"{answer}: {said}. {_controlled(controls, beside, results)}"


def _with_start(arm: str) -> str:
    name, _, start = arm.partition("@train.init=")
    return f"{arm_title(name)}, {start}" if start else arm_title(name)
