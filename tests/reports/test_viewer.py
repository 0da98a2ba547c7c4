"""The viewer: tiles at their places, the same numbers as the maps, a server that serves its own page alone, a folder that needs none."""

import base64
import http.client
import json
import socket
import struct
import threading
import time
from dataclasses import replace
from io import BytesIO

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from reports.viewer_folders import CARD, CELLS, SIDE, SIZE, features, image, run
from slides.images import picture, write_slide

from gated_srp import view
from gated_srp.errors import UserError
from gated_srp.models import load_model
from gated_srp.reports.explain import predict_in_words
from gated_srp.reports.maps import maps_of, view_slide
from gated_srp.reports.viewer import Viewer, tiles
from gated_srp.reports.viewer import scene as scenes
from gated_srp.reports.viewer.server import make_server
from gated_srp.reports.viewer.tiles import TileReader, grid, levels
from gated_srp.reports.viewer.what_if import inside
from gated_srp.slides.reader import SlideImage
from gated_srp.slides.tiles import Tiling, plan_slide
from gated_srp.srp.trace import set_gates
from gated_srp.training.trained import TrainedRun, average, open_slide


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("viewer")
    image(home)
    features(home)
    for arm in ("na", "gated_srp"):
        run(home, arm)
    return home


@pytest.fixture(scope="module")
def viewer(home):
    runs = [home / "na" / "seed42", home / "gated_srp" / "seed42"]
    viewer = view(home / "s1.h5", runs, wsi=home)
    assert isinstance(viewer, Viewer)
    yield viewer
    viewer.close()


# What it shows --------------------------------------------------------------------------------------------------------


def test_every_level_of_tiles_shows_the_slide_where_it_is(home):
    with SlideImage(home / "s1.tif") as slide:
        reader = TileReader(slide)
        assert levels(SIZE) == 10
        for level in (8, 9, 10):
            scale = 2 ** (10 - level)
            columns, rows = grid(SIZE, level)
            whole = Image.new("RGB", (-(-SIZE[0] // scale), -(-SIZE[1] // scale)))
            for column in range(columns):
                for row in range(rows):
                    tile = Image.open(BytesIO(reader.tile(level, column, row)))
                    whole.paste(tile, (column * 256, row * 256))
            found = np.asarray(whole).astype(int)
            green = (found[..., 1] > 150) & (found[..., 0] < 90)
            ys, xs = np.nonzero(green)
            assert (xs.min() * scale, ys.min() * scale) == pytest.approx((320, 192), abs=2 * scale)
            assert (xs.max() * scale, ys.max() * scale) == pytest.approx((384, 256), abs=2 * scale)


def test_coarse_tiles_are_means_of_the_slide_which_is_read_once_for_them(home, monkeypatch):
    with SlideImage(home / "s1.tif") as slide:
        pixels, reads = slide.read(0, 0, level=0, size=SIZE).astype(float), []
        read = SlideImage.read
        monkeypatch.setattr(SlideImage, "read", lambda self, *at, **how: reads.append(at) or read(self, *at, **how))
        monkeypatch.setattr(tiles, "_encoded", np.asarray)  # before a JPEG changes them
        reader = TileReader(slide)
        for level, step in ((10, 1), (9, 2), (8, 4)):
            for column, row in np.ndindex(grid(SIZE, level)):
                tile = reader.tile(level, column, row).astype(float)
                top, left = row * 256 * step, column * 256 * step
                part = pixels[top : top + 256 * step, left : left + 256 * step]
                high, wide = (side // step for side in part.shape[:2])
                means = part[: high * step, : wide * step].reshape(high, step, wide, step, 3).mean((1, 3))
                assert tile.shape[:2] == tuple(-(-side // step) for side in part.shape[:2])
                assert np.abs(tile[:high, :wide] - means).max() <= 1, (level, column, row)  # of rounding
        assert len(reads) == 1


@pytest.mark.parametrize("place", [(7, 1, 0), (10, 3, 0), (10, 0, 2), (11, 0, 0), (-1, 0, 0)])
def test_a_tile_that_is_not_there_is_refused(home, place):
    with SlideImage(home / "s1.tif") as slide, pytest.raises(UserError, match="no tile"):
        TileReader(slide).tile(*place)


def test_layers_hold_the_numbers_of_the_maps(viewer, home):
    scene = viewer.scene(0)
    seen = view_slide(home / "gated_srp" / "seed42", home / "s1.h5")
    for value in ("attention", "beta", "homogeneity", "correction", "change"):
        mine = {layer.one.name: layer.values for layer in scene.layers if layer.run == 1 and layer.value == value}
        theirs = {one.name: one.values for one in maps_of(seen, value)}
        assert mine.keys() == theirs.keys()
        for name, values in theirs.items():
            np.testing.assert_allclose(mine[name], values, atol=1e-6)
    content = scene.content(finest=10, coarsest=8)
    packed = content["layers"][0]
    np.testing.assert_allclose(
        np.frombuffer(base64.b64decode(packed["values"]), "<f4"), scene.layers[0].values.astype("f4")
    )
    assert np.frombuffer(base64.b64decode(content["corners"]), "<f4").reshape(-1, 2).tolist() == (CELLS * SIDE).tolist()


def test_the_difference_is_the_second_run_minus_the_first_in_multiples_of_their_means(viewer):
    layers = viewer.scene(0).layers
    na, gated = (next(x for x in layers if x.run == r and x.value == "attention").values for r in (0, 1))
    found = next(layer for layer in layers if layer.value == "difference")
    np.testing.assert_allclose(found.values, gated / gated.mean() - na / na.mean(), atol=1e-6)
    assert [layer.run for layer in layers if layer.value == "difference"] == [-1]


def test_a_slide_is_read_once_and_each_model_loaded_once_also_for_what_ifs(home, tmp_path, monkeypatch):
    loaded, read = [], []
    load, open_ = TrainedRun.load, scenes.open_slide
    monkeypatch.setattr(TrainedRun, "load", lambda self: loaded.append(self.path.parent.name) or load(self))
    monkeypatch.setattr(
        scenes, "open_slide", lambda run, file, **how: read.append(file.name) or open_(run, file, **how)
    )
    runs = [home / arm / "seed42" for arm in ("na", "gated_srp")]
    viewer = view([home / "s1.h5", features(tmp_path, "s2")], runs)
    viewer.open_ahead()
    viewer.scene(0)
    viewer.what_if(0, 1, beta=0.0)
    assert (loaded, read) == (["na", "gated_srp"], ["s1.h5", "s1.h5"])  # as each run sees it
    first = viewer.what_if(0, 1, beta=1.0)
    viewer.scene(1)
    assert read[2:] == ["s2.h5", "s2.h5"] and viewer.what_if(0, 1, beta=1.0) == first  # read again: one slide is kept


def test_what_is_wrong_with_a_slide_is_said_to_the_page_and_not_before(home, tmp_path):
    (tmp_path / "s3.h5").write_bytes(b"nothing")
    viewer = view(tmp_path / "s3.h5", home / "na" / "seed42")
    viewer.open_ahead()
    with pytest.raises(UserError, match="not an HDF5 file"):
        viewer.scene(0)


def test_top_patches_are_the_highest_and_ties_are_not_filled_up(viewer):
    layer = viewer.scene(0).layers[0]
    assert layer.top == np.argsort(-layer.values)[:12].tolist()
    flat = replace(layer, values=np.ones(len(CELLS)))
    assert flat.top == []
    few = flat.values.copy()
    few[[5, 9]] = 2.0
    assert replace(layer, values=few).top == [5, 9]


def test_the_scale_bar_is_that_of_the_pixel_size_that_the_features_know(home, tmp_path):
    file = features(tmp_path)  # the image says 0.5
    with h5py.File(file, "r+") as inside_:
        inside_.attrs["mpp"] = 0.25
    known = view(file, home / "na" / "seed42", wsi=home / "s1.tif").scene(0).content(finest=9, coarsest=8)
    assert (known["mpp"], known["magnification"]) == (0.25, 20) and "0.25 µm per pixel" in known["about"]
    image = view(home / "s1.h5", home / "na" / "seed42", wsi=home / "s1.tif").scene(0).content(finest=9, coarsest=8)
    assert image["mpp"] == pytest.approx(0.5, abs=1e-3)


def test_without_an_image_there_is_the_lattice(home, tmp_path):
    viewer = view(features(tmp_path, "s2"), home / "na" / "seed42")
    scene = viewer.scene(0)
    assert scene.image is None and viewer.reader(0) is None
    assert scene.size == (10 * SIDE, 7 * SIDE)


# What if --------------------------------------------------------------------------------------------------------------


def test_gates_off_answer_as_the_model_without_its_correction(viewer, home):
    found = viewer.what_if(0, 1, beta=0.0)
    place = home / "gated_srp" / "seed42"
    assert found.before == predict_in_words(place, home / "s1.h5").answers
    model, trained = load_model(place / "model.safetensors").eval(), TrainedRun.open(place)
    for block in model.blocks:
        block.correction = None
    bag = open_slide(trained, home / "s1.h5")
    with torch.no_grad():
        row = average([trained], [model(bag.features[None], bag.graph)]).iloc[0]
    assert found.after["probability of tumour"] == f"{100 * row['prob_tumour']:.1f} %"
    assert found.before != found.after and found.patches == len(CELLS)


def test_a_region_takes_the_patches_whose_centres_lie_in_it(viewer):
    region = [(0, 0), (4 * SIDE, 0), (4 * SIDE, 4 * SIDE), (0, 4 * SIDE)]
    within = int((CELLS < 4).all(1).sum())
    assert viewer.what_if(0, 1, beta=2.0, region=region).patches == within
    crossed = [(0, 0), (10, 10), (10, 0), (0, 10)]
    points = np.array([[1.0, 5.0], [9.0, 5.0], [5.0, 1.0]])
    assert inside(crossed, points).tolist() == [True, True, False]


def test_a_region_of_a_bag_in_another_order_than_the_file_changes_the_patches_that_were_drawn(tmp_path):
    place, file = run(tmp_path, "gated_srp", card=CARD | {"cap": 20, "order": "file"}), features(tmp_path)
    region = [(0, 0), (4 * SIDE, 0), (4 * SIDE, 10 * SIDE), (0, 10 * SIDE)]
    found = view(file, place).what_if(0, 0, beta=2.0, region=region)
    trained = TrainedRun.open(place)
    bag, seen, model = open_slide(trained, file), view_slide(place, file).patches, trained.load()
    assert len(seen.rows) == 20 and (np.diff(seen.rows) < 0).any()  # of 46, by columns
    drawn = torch.from_numpy(seen.corners[:, 0] < 4 * SIDE)
    with torch.no_grad(), set_gates(model, 2.0, patches=drawn):
        row = average([trained], [model(bag.features[None], bag.graph)]).iloc[0]
    assert found.after["probability of tumour"] == f"{100 * row['prob_tumour']:.1f} %"
    assert found.patches == int(drawn.sum())


def test_a_run_without_gates_cannot_be_asked(viewer):
    with pytest.raises(UserError, match="has no gates"):
        viewer.what_if(0, 0, beta=0.0)


# The server -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(viewer):
    server = make_server(viewer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(server, path, *, method="GET", body=None, **headers):
    host, port = server.server_address[:2]
    connection = http.client.HTTPConnection(host, port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    for name, value in ({"Host": f"127.0.0.1:{port}"} | headers).items():
        connection.putheader(name.replace("_", "-"), value)
    if body is not None:
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def test_the_server_listens_on_loopback_alone(server):
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("path", ["/", "/viewer.js", "/index.js", "/slide/0/data.js", "/slide/0/tiles/10/0_0.jpg"])
def test_the_server_gives_the_page_and_its_parts(server, path):
    status, content = ask(server, path)
    assert status == 200 and content


def test_a_patch_is_cut_at_its_place(server, viewer):
    row = int(np.flatnonzero((CELLS == (5, 3)).all(1))[0])
    status, content = ask(server, f"/slide/0/patch/{row}.jpg")
    pixels = np.asarray(Image.open(BytesIO(content))).astype(int)
    inner = pixels[SIDE // 2 + 8 : -SIDE // 2 - 8, SIDE // 2 + 8 : -SIDE // 2 - 8]
    assert status == 200 and inner[..., 1].min() > 150 and inner[..., 0].max() < 90
    assert pixels[:8, :8, 1].max() < 150


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/../../etc/passwd",
            "/%2e%2e/viewer.js",
            "/static/viewer.js",
            "/slide/1/data.js",
            "/slide/0/tiles/10/9_9.jpg",
        ),
        *("/slide/0/patch/999999.jpg", "/slide/-1/data.js", "/what-if", "/slide/0/data.js/.."),
    ],
)
def test_path_tricks_and_unknown_names_are_not_found(server, path):
    assert ask(server, path)[0] == 404


def test_a_page_that_is_closed_between_two_requests_leaves_no_traceback(server, monkeypatch):
    seen = []
    monkeypatch.setattr(server, "handle_error", lambda *about: seen.append(about))
    with socket.create_connection(server.server_address[:2]) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets the connection
        line.sendall(b"GET / HTTP/1.1\r\n")
    assert ask(server, "/")[0] == 200  # accepted after it
    for _ in range(100):  # until its thread is gone
        if not any("process_request_thread" in one.name for one in threading.enumerate()):
            break
        time.sleep(0.02)
    assert seen == []


def test_a_page_of_another_host_gets_nothing(server):
    port = server.server_address[1]
    assert ask(server, "/", Host=f"evil.example:{port}")[0] == 403
    assert ask(server, "/slide/0/data.js", Host="127.0.0.1")[0] == 403
    question = json.dumps({"slide": 0, "run": 1, "beta": 0}).encode()
    assert ask(server, "/what-if", method="POST", body=question, Origin="http://evil.example")[0] == 404
    assert ask(server, "/what-if", method="POST", body=question)[0] == 404
    status, content = ask(server, "/what-if", method="POST", body=question, Origin=f"http://127.0.0.1:{port}")
    assert status == 200 and json.loads(content)["patches"] == len(CELLS)


@pytest.mark.parametrize(
    "question",
    [b"{", b"[]", b'{"slide": 0}', b'{"slide": 9, "run": 1, "beta": 0}', b'{"slide":0,"run":1,"beta":"NaN"}'],
)
def test_a_broken_question_is_refused(server, question):
    origin = f"http://127.0.0.1:{server.server_address[1]}"
    assert ask(server, "/what-if", method="POST", body=question, Origin=origin)[0] == 422


# The folder -----------------------------------------------------------------------------------------------------------


def test_an_export_holds_every_tile_and_replaces_an_earlier_one_whole(viewer, tmp_path):
    found = viewer.export(tmp_path / "out")
    place = tmp_path / "out" / "slide" / "0"
    for level in (8, 9, 10):
        columns, rows = grid(SIZE, level)
        assert len(list((place / "tiles" / str(level)).iterdir())) == columns * rows
    tops = {row for layer in viewer.scene(0).layers for row in layer.top}
    assert {path.stem for path in (place / "patch").iterdir()} == {str(row) for row in tops}
    assert found.page.is_file() and found.size == sum(p.stat().st_size for p in found.page.parent.rglob("*.*"))
    (tmp_path / "out" / "old.txt").write_text("x")
    viewer.export(tmp_path / "out")
    assert not (tmp_path / "out" / "old.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_is_no_viewer_is_not_written_over(viewer, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="is no viewer"):
        viewer.export(tmp_path / "precious")
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "x"


@pytest.mark.parametrize(("place", "said"), [("file", "is no viewer"), (".", "folder that you are in")])
def test_an_export_onto_a_file_or_into_the_folder_one_is_in_is_refused(viewer, tmp_path, monkeypatch, place, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "file").write_text("x") if place == "file" else None
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(UserError, match=said):
        viewer.export(place)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty", *(["file"] if place == "file" else [])]


def test_a_slide_that_cannot_be_shown_is_left_out_of_an_export_of_several(home, tmp_path):
    (tmp_path / "a0.h5").write_bytes(b"nothing")
    both = [tmp_path / "a0.h5", features(tmp_path, "s2")]
    found = view(both, home / "na" / "seed42", export=tmp_path / "out")
    (note,) = found.notes
    assert note.startswith("left out: ") and "a0.h5" in note
    assert '["s2"]' in (tmp_path / "out" / "index.js").read_text()
    assert [path.name for path in (tmp_path / "out" / "slide").iterdir()] == ["0"]
    assert '"s2"' in (tmp_path / "out" / "slide" / "0" / "data.js").read_text()[:200]
    with pytest.raises(UserError, match="not an HDF5 file"):
        view(both[:1], home / "na" / "seed42", export=tmp_path / "none")


def test_a_slide_image_that_needs_an_option_of_extract_is_sent_there(home, tmp_path, monkeypatch):
    bare = write_slide(tmp_path / "bare.tif", picture(SIZE, []), mpp=None)
    with pytest.raises(UserError, match="does not name the encoder") as caught:
        view(bare, home / "na" / "seed42", features=tmp_path / "f")
    assert "`gated-srp extract" in caught.value.cure and "--encoder" in caught.value.cure
    monkeypatch.setattr(
        "gated_srp.reports.viewer.features_of_slide", lambda run, slide, *_, **how: plan_slide(slide, Tiling(size=64))
    )
    with pytest.raises(UserError, match="says neither its magnification") as caught:
        view(bare, home / "na" / "seed42")
    assert "`gated-srp extract" in caught.value.cure and "--mpp" in caught.value.cure


def test_a_large_slide_is_exported_up_to_a_level_that_is_named(viewer, tmp_path, monkeypatch):
    monkeypatch.setattr("gated_srp.reports.viewer._TILES", 4)
    found = viewer.export(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out" / "slide" / "0" / "tiles").iterdir()) == ["8", "9"]
    assert found.notes == ("s1: tiles up to 1/2 of full resolution; the server has all of it",)
