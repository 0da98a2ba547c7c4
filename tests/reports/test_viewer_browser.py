"""The viewer in a real browser, served and from the disk: no error, no request elsewhere, layers, side by side, jumps, keys, what-ifs."""

import threading

import numpy as np
import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

import shapely  # noqa: E402
from factories import draw  # noqa: E402
from reports.test_browser import CHROMIUM, FLAGS  # noqa: E402
from reports.viewer_folders import CELLS, SIDE, features, image, run  # noqa: E402

from gated_srp import view  # noqa: E402
from gated_srp.reports.viewer.server import make_server  # noqa: E402

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; Debian's package is `chromium`")
READY = "() => window.GatedSRPViewer && GatedSRPViewer.panes.length && GatedSRPViewer.panes.every(p => p.picture && p.viewer.isOpen())"


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Addresses by name: the served viewer, the exported folder, and one of a slide without an image."""
    home = tmp_path_factory.mktemp("viewed")
    image(home)
    runs = [run(home, arm) for arm in ("na", "gated_srp")]
    viewer = view(features(home), runs, wsi=home)
    server = make_server(viewer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    (home / "bare").mkdir()
    bare = view(features(home / "bare", "s2"), runs, export=home / "lattice")
    yield {
        "served": f"http://127.0.0.1:{server.server_address[1]}/",
        "exported": viewer.export(home / "exported").page.as_uri(),
        "lattice": bare.page.as_uri(),
    }
    server.shutdown()
    server.server_close()
    thread.join()
    viewer.close()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(params=["served", "exported", "lattice"])
def page(request, browser, places):
    said, asked = [], []
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda one: asked.append(one.url))
    page.goto(places[request.param])
    page.wait_for_function(READY)
    page.kind = request.param
    yield page
    page.close()
    home = places[request.param].rpartition("/")[0]
    assert said == []
    assert [url for url in asked if not url.startswith((home, "data:"))] == []


def zoom(page, pane=0):
    return page.evaluate(f"GatedSRPViewer.panes[{pane}].viewer.viewport.getZoom()")


def test_a_slide_opens_with_its_answers_legend_and_top_patches(page):
    assert page.locator("h1").inner_text() == ("s2" if page.kind == "lattice" else "s1")
    assert page.locator("#answers table").count() == 2
    assert "times the mean of the slide" in page.locator(".legend").inner_text()
    assert page.locator("#strip button").count() == 12
    assert page.locator("#strip img").count() == (0 if page.kind == "lattice" else 12)


def test_layers_switch_by_mouse_and_key_and_say_what_they_mean(page):
    choice = page.locator(".pane select")
    wanted = choice.locator("option", has_text="beta, layer 1").first
    choice.select_option(wanted.get_attribute("value"))
    assert "over the whole range of the gate" in page.locator(".legend").inner_text()
    before = choice.input_value()
    page.locator("h1").click()
    page.keyboard.press("l")
    assert choice.input_value() == str(int(before) + 1)
    assert page.evaluate("GatedSRPViewer.switched") < 200


def test_side_by_side_maps_move_together(page):
    page.locator("#layout button", has_text="3").click()
    page.wait_for_function(READY)
    assert page.locator(".pane").count() == 3
    assert "minus" in page.locator(".pane select").nth(2).locator("option:checked").inner_text()
    page.evaluate("GatedSRPViewer.panes[1].viewer.viewport.zoomTo(4)")
    page.wait_for_timeout(500)
    assert zoom(page, 0) == pytest.approx(4, rel=0.01) and zoom(page, 2) == pytest.approx(4, rel=0.01)
    boxes = [page.locator(".stage").nth(number).bounding_box() for number in range(3)]
    assert {(box["y"], box["height"]) for box in boxes} == {(boxes[0]["y"], boxes[0]["height"])}


def test_a_top_patch_is_jumped_to_and_its_numbers_are_read_under_the_mouse(page):
    page.locator("#strip button").nth(2).click()
    row = page.evaluate("GatedSRPViewer.data.layers[GatedSRPViewer.chosen[0]].top[2]")
    box = page.locator(".stage").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_function("() => GatedSRPViewer.under >= 0")
    x, y = (CELLS[row] * SIDE).tolist()
    assert page.locator("#patch caption").inner_text() == f"Patch {row} at ({x}, {y})"
    assert page.evaluate("GatedSRPViewer.under") == row
    value, unit = page.evaluate(
        "(one => [one.values[one.top[2]], one.unit])(GatedSRPViewer.data.layers[GatedSRPViewer.chosen[0]])"
    )
    said = page.locator("#strip button").nth(2).inner_text()
    assert float(said.partition("(")[2].removesuffix(" x)")) == pytest.approx(value / unit, rel=0.01)


def test_keys_move_and_zoom_wherever_the_focus_is(page):
    centre = "GatedSRPViewer.panes[0].viewer.viewport.getCenter(false)"
    page.locator("h1").click()
    for _ in range(4):
        page.keyboard.press("+")
    near, at = page.evaluate("GatedSRPViewer.panes[0].viewer.viewport.getZoom(false)"), page.evaluate(centre)
    assert near > 1.4 * page.evaluate("GatedSRPViewer.panes[0].viewer.viewport.getHomeZoom()")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("s")
    moved = page.evaluate(centre)
    assert moved["x"] > at["x"] and moved["y"] > at["y"]
    page.keyboard.press("-")
    assert page.evaluate("GatedSRPViewer.panes[0].viewer.viewport.getZoom(false)") < near


def test_the_wheel_zooms_and_0_shows_the_whole_slide(page):
    start = zoom(page)
    page.locator(".stage").hover()
    page.mouse.wheel(0, -600)
    page.wait_for_timeout(500)
    assert zoom(page) > start
    page.locator("h1").click()
    page.keyboard.press("0")
    page.wait_for_timeout(100)
    assert zoom(page) == pytest.approx(start, rel=0.01)


def test_what_if_answers_where_there_is_a_model(page):
    if page.kind != "served":
        assert "no model to ask" in page.locator("#outcome").inner_text()
        return
    page.locator("#draw").click()
    box = page.locator(".stage").bounding_box()
    left, top = box["x"] + box["width"] * 0.35, box["y"] + box["height"] * 0.35
    page.mouse.move(left, top)
    page.mouse.down()
    for dx, dy in ((150, 0), (150, 150), (0, 150)):
        page.mouse.move(left + dx, top + dy, steps=4)
    page.mouse.up()
    page.locator("#whatif button[type=submit]").click()
    page.wait_for_selector("#outcome table")
    inside = int(page.locator("#outcome p").inner_text().split()[1])
    assert 0 < inside < len(CELLS)
    assert page.locator("#outcome caption").all_inner_texts() == ["as learned", "with gates set"]


def test_on_a_phone_nothing_is_wider_than_the_screen(page):
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    stage, aside = (page.locator(part).first.bounding_box() for part in (".stage", "aside"))
    assert stage["width"] > 380 and aside["y"] > stage["y"] + stage["height"]  # one below the other
    assert "width=device-width" in page.locator("meta[name=viewport]").get_attribute("content")  # which no laptop obeys


def test_the_overlay_lies_on_the_patches(page):
    """The colour at a patch's middle on the overlay is the legend's colour of its place, and there is none beside the patches."""
    if page.kind == "lattice":
        page.locator(".pane select").select_option(index=1)
    found = page.evaluate(
        """() => { const s = GatedSRPViewer, d = s.data, p = s.panes[0].picture, k = p.width / d.size[0];
        const pixels = p.getContext('2d').getImageData(0, 0, p.width, p.height).data;
        const at = (x, y) => { const i = 4 * (Math.floor(y * k) * p.width + Math.floor(x * k)); return Array.from(pixels.slice(i, i + 4)); };
        const layer = d.layers[s.chosen[0]], colours = d.colours[layer.colours];
        return { patches: [...Array(d.count).keys()].map(i => [at(d.corners[2*i] + d.side / 2, d.corners[2*i+1] + d.side / 2).slice(0, 3),
          Array.from(colours.slice(3 * layer.places[i], 3 * layer.places[i] + 3))]), beside: at(d.side / 2, d.side / 2) }; }"""
    )
    shown, wanted = (np.array(one) for one in zip(*found["patches"], strict=True))
    assert np.abs(shown - wanted).max() <= 4  # transparency rounds colours
    assert found["beside"][3] == 0


def test_drawn_regions_are_shown_by_class_and_hidden_by_their_boxes(browser, tmp_path):
    shapes = {"tumour": shapely.box(100, 100, 300, 300), "<b>pen</b>": shapely.box(400, 100, 600, 400)}
    draw(tmp_path / "drawn" / "s1.geojson", **shapes)
    runs = [run(tmp_path, "na")]
    found = view(features(tmp_path), runs, annotations=tmp_path / "drawn", export=tmp_path / "out")
    page = browser.new_page(viewport={"width": 900, "height": 700})
    page.goto(found.page.as_uri())
    page.wait_for_function(READY)
    assert [text.strip() for text in page.locator("#drawn label").all_inner_texts()] == ["<b>pen</b>", "tumour"]
    # The colour of the overlay where the left side of each box is, in the slide's pixels.
    pixel = """([x, y]) => { const one = GatedSRPViewer.panes[0], ratio = devicePixelRatio, p = one.viewer.viewport.imageToViewerElementCoordinates(
        new OpenSeadragon.Point(x, y)); return [...one.over.getContext("2d").getImageData(p.x * ratio, p.y * ratio, 1, 1).data.slice(0, 3)]; }"""
    at = {"pen": [400, 250], "tumour": [100, 200]}
    pen, tumour = [0, 114, 178], [213, 94, 0]
    assert [page.evaluate(pixel, at[name]) for name in ("pen", "tumour")] == [pen, tumour]
    page.locator("#drawn input").first.uncheck()
    assert page.evaluate(pixel, at["pen"]) != pen and page.evaluate(pixel, at["tumour"]) == tumour
    page.locator("#name").click()
    page.keyboard.press("r")
    assert page.evaluate(pixel, at["tumour"]) != tumour
    page.keyboard.press("r")
    assert [page.evaluate(pixel, at[name]) for name in ("pen", "tumour")] == [pen, tumour]
    page.close()
