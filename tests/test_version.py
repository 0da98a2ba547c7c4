"""One version: `gated_srp.__version__`; what must repeat it is held equal."""

import re
import tomllib
from pathlib import Path

from gated_srp import __version__

HERE = Path(__file__).resolve().parents[1]
CHANGELOG = (HERE / "CHANGELOG.md").read_text()


def test_the_package_takes_its_version_from_the_source():
    project = tomllib.loads((HERE / "pyproject.toml").read_text())
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "gated_srp.__version__"}


def test_the_citation_names_this_version():
    assert re.search(r"^version: (.+)$", (HERE / "CITATION.cff").read_text(), re.M).group(1) == __version__


def test_the_newest_version_of_the_changelog_is_this_one_and_what_is_unreleased_stands_above_it():
    titles = re.findall(r"^## (\S+)", CHANGELOG, re.M)
    assert titles[:2] == ["Unreleased", __version__]
