"""Facts live on their objects: outside its room nobody asks which task there is, nor takes the name of an arm apart."""

import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "gated_srp"

# By subject: the rooms that may, what to write instead, and patterns that say someone did it elsewhere.
# A default such as `arm: str = "gated_srp"` or a tuple of arms to begin with is no question about an arm, and passes.
_ARM = r"""["'](?:(?:na|xsa|diff|adapter|abmil)["']|(?:gated_srp|axis_|fixed_beta|vit4?|vit_s16)\w*["'])"""
_TASK = r"""["'](?:classification|survival|multilabel)["']"""
RULES = {
    "tasks": (
        ("tasks", "models"),
        "ask the task, or gated_srp.tasks.find_task(name); add a fact to `Task` where one is missing",
        (
            rf"(?:==|!=|\bin|\bcase)\s*[(\[{{]?\s*{_TASK}",
            rf"{_TASK}\s*(?:==|!=|\bin\b)",
            rf"^\s*{_TASK}: (?!{{)",  # a table by the kind of task
            r"isinstance\([^)]*\b(?:Survival|Classification|Multilabel)\b",
            r"\bimport\b.*\b(?:Survival|Classification|Multilabel)\b",
        ),
    ),
    "numbers": (
        ("records.py",),
        "read text as numbers with gated_srp.records.parse_numbers: pandas crashes on some exponents, such as 1e2147483648",
        (r"\bto_numeric\b",),
    ),
    "arms": (
        ("models",),
        "ask gated_srp.models.find_arm(name) for .dense, .gated, .images, .trunk, .base, .method; add a fact where one is missing",
        (
            r"""\.startswith\(\(?\s*["'](?:vit|gated["']|gated_srp_|axis|fixed_beta)""",  # `gated_srp` begins names of modules, too
            rf"\.endswith\(\(?\s*{_ARM}",
            rf"(?:==|!=)\s*{_ARM}",
            rf"{_ARM}\s*(?:==|!=)",
            rf"\barm\w*\s+(?:not\s+)?in\s+[(\[{{]\s*{_ARM}",
            r"\barm(?:\.name)?\.(?:startswith|endswith|removeprefix|removesuffix|partition|rpartition|split)\(",
        ),
    ),
}


def taken_apart(text: str, patterns: tuple[str, ...]) -> list[str]:
    """The lines of a source that a pattern matches."""
    return [line.strip() for line in text.splitlines() if any(re.search(pattern, line) for pattern in patterns)]


@pytest.mark.parametrize("subject", RULES)
def test_facts_are_asked_of_the_object(subject):
    rooms, instead, patterns = RULES[subject]
    found = [
        f"{path.relative_to(SOURCE)}: {line}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).parts[0] not in rooms
        for line in taken_apart(path.read_text(encoding="utf-8"), patterns)
    ]
    assert not found, f"{instead}:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        'dense = arm.startswith("vit")',
        'if self.untuned and row.arm.endswith("gated_srp"):',
        'if arm == "gated_srp":',
        'bases = [row for row in rows if row.arm in ("na", "vit4")]',
        'family = cell.arm.split("_")[0]',
    ],
)
def test_the_rule_on_arms_sees_a_name_taken_apart(line):
    assert taken_apart(line, RULES["arms"][2])


@pytest.mark.parametrize(
    "line",
    [
        'def gate(self, arm: str = "gated_srp") -> Gate:',
        'arms: tuple[str, ...] = ("na", "xsa", "diff", "gated_srp")',
        'against = reference or ("na" if "na" in arms else arms[0])',
        'if (error.name or "").startswith("gated_srp"):',
        'trunks={"vit4": Gate(2.0, 32)},',
        "for arm in config.arms:",
    ],
)
def test_the_rule_on_arms_lets_defaults_pass(line):
    assert not taken_apart(line, RULES["arms"][2])


@pytest.mark.parametrize(
    "line", ['if table.task == "survival":', "elif isinstance(task, Survival):", '    "multilabel": ("macro_map",),']
)
def test_the_rule_on_tasks_sees_a_question_about_the_kind(line):
    assert taken_apart(line, RULES["tasks"][2])


@pytest.mark.parametrize("line", ['task="survival",', '"classification": {"name": name, "color": _HOT},  # of QuPath'])
def test_the_rule_on_tasks_lets_names_pass(line):
    assert not taken_apart(line, RULES["tasks"][2])
