"""From a slide to one page that says what the model saw, and that it is for research alone."""

import numpy as np
import pytest
import torch
import typer
from factories import make_slide, write_clam
from typer.testing import CliRunner

from gated_srp import explain
from gated_srp.cli import slides as commands
from gated_srp.errors import UserError
from gated_srp.models import build_model, save_model
from gated_srp.reports.explain import predict_in_words
from gated_srp.training.inputs import FeatureStatistics

CARD = {"task": "classification", "classes": ["benign", "tumour"], "cohort": "toy"}


def _run(folder, *, width=12, arm="gated_srp", **card):
    model = build_model(arm, in_dim=width, num_outputs=2, dim=24, depth=2, num_heads=2, num_landmarks=4).eval()
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=draw)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, folder / "model.safetensors", card)
    return folder


def _statistics(shift):
    means = torch.randn(8, 12, generator=torch.Generator().manual_seed(0)) * 0.3 + shift
    return FeatureStatistics.fit(means).as_card()


def test_the_page_holds_prediction_maps_card_and_a_warning_in_one_file(tmp_path):
    file = write_clam(tmp_path, "s1", make_slide(1))
    run = _run(tmp_path / "run", **CARD, features=_statistics(0.0))
    found = explain(run, file, out=tmp_path / "out")
    page, *pictures = found.written
    text = page.read_text()
    assert page.name == "s1.html"
    for wanted in ("research use only", "probability of tumour", "That is not unusual", "toy", "gated_srp"):
        assert wanted in text
    assert text.count("data:image/jpeg;base64,") == 5  # attention, change, beta, correction, homogeneity
    assert "http:" not in text and "https:" not in text and all(path.is_file() for path in pictures)
    assert set(found.prediction.answers) == {"predicted", "probability of benign", "probability of tumour"}
    assert found._repr_html_().startswith("<iframe") and not found.prediction.unlike


def test_a_slide_unlike_the_training_slides_is_flagged_and_one_without_a_task_says_why(tmp_path):
    file = write_clam(tmp_path, "s1", make_slide(1))
    far = predict_in_words(_run(tmp_path / "far", **CARD, features=_statistics(50.0)), file)
    assert far.unlike and "do not rely" in far.likeness
    bare = predict_in_words(_run(tmp_path / "bare"), file)
    assert not bare.answers and "card names no task" in bare.problem


def test_a_model_without_gates_has_a_page_without_their_maps(tmp_path):
    file = write_clam(tmp_path, "s1", make_slide(1))
    found = explain(_run(tmp_path / "na", arm="na", **CARD), file, out=tmp_path / "out")
    assert found.page.read_text().count("data:image/jpeg;base64,") == 2  # attention, homogeneity


def test_gates_that_have_hardly_opened_are_said_to_show_nothing(tmp_path):
    file = write_clam(tmp_path, "s1", make_slide(1))
    model = build_model("gated_srp", in_dim=12, num_outputs=2, dim=24, depth=2, num_heads=2, num_landmarks=4).eval()
    save_model(model, tmp_path / "shut" / "model.safetensors", CARD)  # as it starts: every beta is zero
    texts = [_run(tmp_path / "open", **CARD), tmp_path / "shut", _run(tmp_path / "na", arm="na", **CARD)]
    pages = [explain(run, file, out=tmp_path / run.name / "out").page.read_text() for run in texts]
    assert [page.count("have hardly opened") for page in pages] == [0, 3, 0]  # change, beta, correction


def test_names_are_escaped_on_the_page(tmp_path):
    file = write_clam(tmp_path, "s1", make_slide(1))
    run = _run(tmp_path / "run", **{**CARD, "cohort": "<script>x</script>"})
    assert "<script>" not in explain(run, file, out=tmp_path / "out").page.read_text()


def _command(*arguments):
    app = typer.Typer()
    app.command("explain")(commands.explain)
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_the_command_goes_from_a_slide_to_the_page(tmp_path, monkeypatch):
    tifffile = pytest.importorskip("tifffile", reason="needs the extra `slides`")
    rng = np.random.default_rng(0)
    image = np.full((320, 400, 3), 244, np.uint8)
    image[64:256, 64:320] = rng.integers((170, 60, 120), (220, 110, 170), (192, 256, 3))
    options = {"tile": (64, 64), "photometric": "rgb", "compression": "zlib"}
    tifffile.imwrite(tmp_path / "x.tif", image, resolution=(20000, 20000), resolutionunit=3, **options)
    module = tmp_path / "my_encoder_for_explain.py"
    module.write_text(
        "import torch\nfrom gated_srp.slides.encoders import Encoder\n\n\nclass Mean(torch.nn.Module):\n"
        "    def forward(self, x):\n        return x.mean((2, 3)).repeat(1, 4)\n\n\ndef mine():\n"
        "    return Encoder(name='mine', tile=64, width=12, resize=64, build=lambda w: Mean(), licence='none')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    run = _run(tmp_path / "run", **CARD)
    half = _run(tmp_path / "half", **CARD, stride=[{"value": 32, "unit": "px", "um": 16.0}], encoder="mine")
    wrong = _command(half, tmp_path / "x.tif", "-o", tmp_path / "none", "-e", "my_encoder_for_explain:mine").exception
    assert isinstance(wrong, UserError) and not (tmp_path / "none").exists()  # before the slide is read
    assert (
        wrong.what == "patches of 64 pixels lie 32 um apart at 20x, but 16 um in training" and "--size 32" in wrong.cure
    )
    said = _command(run, tmp_path / "x.tif", "-o", tmp_path / "out", "-e", "my_encoder_for_explain:mine")
    assert said.exit_code == 0, (said.output, said.exception)
    text = (tmp_path / "out" / "x.html").read_text()
    assert text.count("data:image/jpeg;base64,") == 6  # with the contact sheet
    assert isinstance(
        _command(run, tmp_path / "x.tif", "-o", tmp_path / "o").exception, UserError
    )  # no encoder in the card
    before = (tmp_path / "out" / "x.html").read_bytes()
    (tmp_path / "other").mkdir()
    tifffile.imwrite(tmp_path / "other" / "x.tif", image[::-1], resolution=(20000, 20000), resolutionunit=3, **options)
    error = _command(
        run, tmp_path / "other" / "x.tif", "-o", tmp_path / "out", "-e", "my_encoder_for_explain:mine"
    ).exception
    assert isinstance(error, UserError) and "holds the features of another slide" in str(error)
    assert str(tmp_path / "x.tif") in str(error) and str(tmp_path / "other" / "x.tif") in str(error)
    assert (tmp_path / "out" / "x.html").read_bytes() == before
