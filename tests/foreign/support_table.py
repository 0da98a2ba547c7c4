"""The examples and the support table of docs/attach.md, read: for the tests of this process and for those of timm's."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECTION = (ROOT / "docs" / "attach.md").read_text().split("## By family")[1].split("Refused with a clear error")[0]
COLUMNS = ["family", "models", "tokens known", "tested with", "limits"]


def rows() -> list[list[str]]:
    lines = [line.strip("|").split("|") for line in SECTION.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines if not line[0].startswith("-")]


def cell(family: str, column: str) -> str:
    return next(row for row in rows() if row[0] == family)[COLUMNS.index(column)]


def handled(family: str) -> set[str]:
    """Classes that the table calls supported."""
    return set(re.findall(r"`(\w+)`", cell(family, "models")))


def refused(family: str) -> set[str]:
    """Classes and options that the table calls refused."""
    return set(re.findall(r"`(\w+)`", cell(family, "limits"))) - {"vision_model", "adapters"}


def code(heading: str) -> str:
    """The block of code under the paragraph that begins with ``heading``."""
    return re.search(rf"^{heading}:.*?```python\n(.*?)```", SECTION, re.S | re.M).group(1)
