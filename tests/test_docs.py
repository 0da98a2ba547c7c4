"""What the documentation quotes is what the program says."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]
SOURCE = "\n".join(path.read_text() for path in sorted((HERE / "src").rglob("*.py")))
TABLES = (HERE / "docs" / "troubleshooting.md").read_text().partition("## How commands end")[0]
MESSAGES = [line.split(" | ")[0].removeprefix("| ").strip("` ") for line in re.findall(r"^\| `.*", TABLES, re.M)]
NOT_OURS = {"Illegal instruction"}


@pytest.mark.parametrize("words", MESSAGES)
def test_the_words_of_a_message_are_said_by_the_program(words):
    assert words in SOURCE or words in NOT_OURS


def test_most_of_the_messages_of_a_users_day_are_there():
    assert len(MESSAGES) > 30
