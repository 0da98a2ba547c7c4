"""The page in a real browser: it runs without an error, asks for nothing, and its controls work by mouse and by keyboard."""

import os
import shutil

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from reports.page_folders import HOSTILE, with_maps  # noqa: E402
from reports.viewer_folders import CARD, features, image, run  # noqa: E402

from gated_srp import report  # noqa: E402
from gated_srp.reports.explain import explain_file  # noqa: E402

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
]
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; Debian's package is `chromium`")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    home = with_maps(tmp_path_factory.mktemp("browser"))
    report(home, out=home / "report.html")
    report(home, out=home / "plain.html", maps=0)
    return home / "report.html"


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, path):
    """The page open on a laptop; what it said and asked for is checked when the test ends."""
    said, asked = [], []
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    yield page
    page.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("data:", path.as_uri()))] == []


def column(page, table, number):
    return page.locator(f"#{table}-t tbody tr:visible td:nth-child({number})").all_inner_texts()


def test_a_page_opens_without_an_error_or_a_request(page):
    assert page.locator("h1").inner_text() == "toy"
    assert page.locator("#verdict li").count() == 2


def test_a_hostile_name_stays_text(page):
    assert HOSTILE in column(page, "slides1", 1)
    assert page.locator("script").count() == 1


def test_columns_sort_as_numbers_both_ways(page):
    button = page.locator("#runs-t thead button", has_text="F1")
    button.click()
    up = [float(text) for text in column(page, "runs", 5)]
    assert up == sorted(up) and up[0] == 0.58
    assert page.locator("#runs-t th[aria-sort=ascending]").inner_text().startswith("F1")
    button.click()
    assert [float(text) for text in column(page, "runs", 5)] == sorted(up, reverse=True)


def test_sorting_works_by_keyboard(page):
    page.locator("#runs-t thead button", has_text="Seed").focus()
    page.keyboard.press("Enter")
    assert column(page, "runs", 3) == ["42"] * 3 + ["43"] * 3 + ["44"] * 3


def test_search_keeps_rows_with_every_word(page):
    field = page.get_by_label("Search slides of toy")
    field.fill("s03")
    assert column(page, "slides1", 1) == ["s03"]
    assert page.locator("#slides1-n").inner_text() == "1 of 13"
    field.fill("alert p12")
    assert column(page, "slides1", 1) == [HOSTILE]
    field.fill("s03 p12")  # each word in another row
    assert column(page, "slides1", 1) == []
    field.fill("nothing like it")
    assert column(page, "slides1", 1) == []
    field.fill("")
    assert len(column(page, "slides1", 1)) == 13


def shown(page):
    return page.locator("#gallery figure:visible figcaption").all_inner_texts()


def test_switches_choose_value_and_layer(page):
    assert len(shown(page)) == 4
    page.get_by_label("beta", exact=True).check()
    assert shown(page) == ["beta, layer 1, slide s00", "beta, layer 2, slide s00"]
    page.get_by_role("group", name="Layer").get_by_label("2", exact=True).check()
    assert shown(page) == ["beta, layer 2, slide s00"]
    page.get_by_label("homogeneity").check()
    assert shown(page) == ["homogeneity, slide s00"]  # of no layer: in every layer
    page.get_by_label("attention").check()
    page.get_by_role("group", name="Layer").get_by_label("1", exact=True).check()
    assert shown(page) == [] and page.get_by_text("No picture of this value").is_visible()


def test_switches_work_by_keyboard(page):
    page.get_by_role("group", name="Value").get_by_label("all").focus()
    page.keyboard.press("ArrowDown")
    assert shown(page) == ["attention, layer 2, slide s00"]


def test_every_control_can_be_reached_by_tab(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(120):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.tagName"))
    assert {"A", "BUTTON", "INPUT", "SUMMARY", "PRE"} <= reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(browser, path, scheme):
    page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert "width=device-width" in page.locator("meta[name=viewport]").get_attribute("content")  # which no laptop obeys
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 28)"
    assert dark == (scheme == "dark")
    page.close()


def test_pages_of_paper_are_few_and_leave_out_what_only_a_screen_can_use(browser, path):
    page = browser.new_page()
    page.goto(path.as_uri())
    printed = page.pdf()
    assert printed.startswith(b"%PDF") and printed.count(b"/Type /Page\n") <= 8
    page.emulate_media(media="print")
    for hidden in ("nav", "#slides", "#reproduce details >> nth=0"):
        assert not page.locator(hidden).is_visible()
    page.locator(".words summary").evaluate(
        "one => { one.parentElement.open = true; }"
    )  # what the reader has opened is printed
    assert page.locator(".words").is_visible()
    page.close()


def test_a_slide_of_the_table_leads_to_its_maps_also_to_folded_ones(page):
    assert not page.locator("#map7").is_visible()
    page.locator("#slides a", has_text="s07").click()
    assert page.url.endswith("#map7") and page.locator("#map7 img").count() == 3
    away = "Math.abs(document.querySelector('#map7').getBoundingClientRect().top)"
    for _ in range(50):  # it scrolls smoothly; the page's own rules forbid wait_for_function, which is eval
        page.wait_for_timeout(100)
        if page.evaluate(away) < 120:
            break
    assert page.evaluate(away) < 120
    assert page.locator("#map7 figcaption").all_inner_texts() == ["NA", "Gated SRP", "Gated SRP minus NA"]
    page.locator("#slides a", has_text="s00").click()
    assert page.locator("#map0 figcaption").first.inner_text() == "what is true"


def test_a_map_of_another_kind_is_led_to_where_no_pair_was_drawn(browser, path):
    page = browser.new_page()
    page.goto((path.parent / "plain.html").as_uri())
    page.locator("#slides a[data-slide]", has_text="s00").first.click()
    assert page.url.endswith("#maps") and page.locator("#gallery figure:visible").count() == 4
    page.close()


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    home = tmp_path_factory.mktemp("explained")
    trained = run(
        home, "gated_srp", card=CARD | {"split_hash": "9" * 64, "encoder": "a_very_long_name_of_an_encoder_" * 3}
    )
    return explain_file(trained, features(home), home / "out", image=image(home)).page


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_the_page_of_explain_answers_first_and_fits_a_phone_and_a_laptop(browser, explained, width, scheme):
    said, asked = [], []
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.on("console", lambda message: said.append(message.text))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(explained.as_uri())
    assert page.locator(".headline").inner_text().startswith("The model says: predicted ")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert "width=device-width" in page.locator("meta[name=viewport]").get_attribute("content")
    assert page.evaluate("[...document.images].every(one => one.complete && one.naturalWidth > 0)")
    beside = page.evaluate(
        "(([a, b]) => a.getBoundingClientRect().top === b.getBoundingClientRect().top)(document.querySelectorAll('main section:not(.whole)'))"
    )
    assert beside == (width == 1280)
    assert said == [] and [url for url in asked if not url.startswith(("data:", explained.as_uri()))] == []
    if width == 1280:
        assert page.pdf(format="A4").count(b"/Type /Page\n") <= 5
        assert explained.stat().st_size < 3_000_000
    page.close()
