"""The documentation site: it is built without a warning, its equations and code are rendered, and it loads nothing from other hosts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gated_srp

HERE = Path(__file__).resolve().parents[1]
pytest.importorskip("mkdocstrings", reason="make venv installs what the site is built with")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    # Not quiet: with --quiet MkDocs does not count warnings, and --strict lets them pass.
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def read(site, page):
    return (site / page / "index.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_equations_are_mathml_and_none_is_left_as_source(site):
    page = read(site, "method")
    assert page.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">') >= 4
    assert "arithmatex" not in page and "\\frac" not in page and "<mfrac>" in page


@pytest.mark.slow
def test_the_reference_explains_every_name_of_the_package(site):
    page = read(site, "reference")
    for name in set(gated_srp.__all__) - {"__version__"}:
        assert re.search(rf'<h3 id="gated_srp[\w.]*\.{name}"', page), name
    assert "other_package" not in page and "doctest: +SKIP" not in page
    assert page.count("Returns:") >= 12 and page.count("highlight") > 20


@pytest.mark.slow
def test_nothing_is_loaded_from_another_host(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"(?:https?:)?//[^\"]+", text), page
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"url\(\"?https?://|@import", sheet.read_text(encoding="utf-8")), sheet


@pytest.mark.slow
def test_code_has_copy_buttons_and_every_page_is_in_the_menu(site):
    home = (site / "index.html").read_text(encoding="utf-8")
    assert "content.code.copy" in home
    pages = {path.stem for path in (HERE / "docs").glob("*.md")} - {"index"}
    assert {name for name in pages if f'href="{name}/"' not in home} == set()
