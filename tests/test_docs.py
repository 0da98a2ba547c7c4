"""What the documentation quotes is what the program says."""

import re
import shlex
from pathlib import Path

import pytest
from test_layers import LAYERS

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


# Paths and rooms ------------------------------------------------------------------------------------------------------

PAGES = [HERE / "README.md", HERE / "CONTRIBUTING.md", *sorted((HERE / "docs").glob("*.md"))]
PLACES = (HERE, HERE / "src", HERE / "src" / "gated_srp", HERE / "src" / "gated_srp" / "srp")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_file_of_ours_that_a_page_names_exists(page):
    named = set(re.findall(r"`((?:[a-z_.]+/)+[\w-]*(?:\.py|\.yaml|\.md)?)`", page.read_text()))
    known = {
        "src",
        "tests",
        "docs",
        "benchmarks",
        "examples",
        "studies",
        *(p.name for p in (HERE / "src/gated_srp").iterdir()),
    }
    ours = {name for name in named if name.split("/")[0] in known}
    assert {name for name in ours if not any((place / name).exists() for place in PLACES)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_link_of_a_page_leads_somewhere(page):
    links = re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_design_names_every_room_at_its_layer():
    table = (HERE / "docs" / "design.md").read_text().partition("## Layers")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", table, re.M)
    found = {
        name.strip("/").removesuffix(".py"): int(layer)
        for layer, names in rows
        for name in re.findall(r"`(.*?)`", names)
    }
    assert found == {name: layer for name, layer in LAYERS.items() if name != "study/__init__"}


def test_the_readme_is_short():
    assert len((HERE / "README.md").read_text().splitlines()) <= 150


# Commands --------------------------------------------------------------------------------------------------------------


def commands_of(page: Path) -> list[str]:
    """What a page tells a reader to type: lines of its shell blocks, and commands within sentences."""
    text = page.read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in (*lines, *re.findall(r"`(gated-srp [^`]+)`", text)) if line.startswith("gated-srp ")]


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=lambda page: page.stem)
def test_commands_and_options_that_a_page_tells_to_type_exist(page):
    from typer.main import get_command

    from gated_srp.cli import app

    group = get_command(app)
    own = {option for one in group.params for option in one.opts} | {"--help"}
    for line in commands_of(page):
        words = shlex.split(line, comments=True)[1:]
        while words and words[0] in own:
            words = words[2:] if words[0] == "--log" else words[1:]
        if not words or words[0] in ("COMMAND", "..."):
            continue
        assert words[0] in group.commands, line
        if words[0] == "bench":  # a program of its own
            continue
        known = {option for one in group.commands[words[0]].params for option in one.opts} | {"--help"}
        typed = {word.split("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)}
        assert typed <= known, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_functions_that_a_page_calls_exist(page):
    import gated_srp

    called = set(re.findall(r"(?<![\w/.])gated_srp\.(\w+)\(", page.read_text(encoding="utf-8")))
    assert {name for name in called if not hasattr(gated_srp, name)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_installs_the_package_from_an_index_that_lacks_it(page):
    assert not re.search(r"(pip|uv) (install|add)[^\n]*\bgated-srp\b(?!/)", page.read_text(encoding="utf-8"))
