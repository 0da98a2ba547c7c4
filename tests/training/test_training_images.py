"""Images through the same loop, run folders and commands as slides."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from image_cohorts import LABELS, write_image, write_images
from toy_cohorts import open_config

from gated_srp.data.loader import BagLoader, together
from gated_srp.errors import Interrupted, UserError
from gated_srp.models import build_model, load_card
from gated_srp.reports.maps import view_slide
from gated_srp.streams import stream
from gated_srp.training.callbacks import RunCallbacks
from gated_srp.training.evaluate import evaluate as evaluate_run
from gated_srp.training.inputs import load_inputs
from gated_srp.training.known import files_for
from gated_srp.training.loop import Training, bag_order, fit, predict_logits, train_epoch
from gated_srp.training.optim import learning_rate
from gated_srp.training.predict import predict
from gated_srp.training.ranks import Ranks
from gated_srp.training.train import train
from gated_srp.training.trained import TrainedRun

ARM = "vit_s16_gated_srp"
RESULTS = (
    *("metrics.json", "history.csv", "gates.csv", "split.csv", "model.safetensors"),
    *(f"predictions_{part}_{level}.csv" for part in ("val", "test") for level in ("slide", "case")),
)


class Nobody:
    def bag(self, bag): ...

    def window(self, training): ...

    def epoch(self, training): ...


def results(run: Path) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in RESULTS}


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def finished(cohort, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("runs"))
    return train(open_config(cohort, out=out, train__epochs=12), arm=ARM, seed=42).path


@pytest.fixture
def make(cohort):
    def build(**overrides):
        config = open_config(cohort, **overrides)
        material = load_inputs(config, 42)
        model = build_model(ARM, in_dim=192, num_outputs=2, seed=42, **config.sizes(ARM))
        loader = BagLoader(material.bags, workers=0)
        return Training(Ranks(torch.device("cpu")), model, material.task, loader, config.train, 42), material

    return build


def gradients(training, rows):
    seen = []
    training.optimiser.register_step_pre_hook(lambda *_: seen.append(training.gradient.clone()))
    train_epoch(training, rows, Nobody())
    return seen


def test_mini_batches_are_windows_of_single_images(make):
    """Batches of 4 in windows of 8, batches of 8, and one image after another give one gradient."""
    ways = (
        {"batch_size": 4, "accumulation": 2},
        {"batch_size": 8, "accumulation": 1},
        {"batch_size": 1, "accumulation": 8},
    )
    found, forwards = [], []
    for way in ways:
        # Adam would enlarge differences of rounding: the weights stand still.
        training, material = make(train__lr=1e-12, **{f"train__{key}": value for key, value in way.items()})
        sizes = []
        training.model.register_forward_pre_hook(lambda module, args, sizes=sizes: sizes.append(len(args[0])))
        found.append(gradients(training, material.rows("train")))
        forwards.append(sizes)
    count = len(material.rows("train"))
    assert forwards[1] == [8] * (count // 8) + [count % 8] * (count % 8 > 0)
    assert max(forwards[0]) == 4 and set(forwards[2]) == {1} and sum(forwards[0]) == count
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_the_last_smaller_batch_of_an_epoch_is_dropped_where_asked(make):
    training, material = make(train__batch_size=8, train__drop_last=True, train__epochs=2, train__lr=1e-3)
    rows, sizes, rates = material.rows("train"), [], []
    assert len(rows) % 8
    training.model.register_forward_pre_hook(
        lambda module, args: sizes.append(len(args[0])) if module.training else None
    )
    training.optimiser.register_step_pre_hook(lambda *_: rates.append(training.optimiser.param_groups[0]["lr"]))
    fit(training, rows, lambda: ({}, 0.0), Nobody())
    steps = 2 * (len(rows) // 8)
    assert sizes == [8] * steps
    assert rates == [learning_rate(step, steps, lr=1e-3, warmup=training.settings.warmup) for step in range(steps)]
    assert (training.progress.epoch, training.progress.bags) == (2, 0)
    short, _ = make(train__batch_size=1000, train__drop_last=True, train__epochs=1)
    fit(short, rows, lambda: ({}, 0.0), Nobody())  # an epoch of less than one batch is not dropped as a whole
    assert short.progress.step == 1


def test_the_first_update_is_that_of_a_plain_batch_of_augmented_images(make):
    training, material = make(train__batch_size=8, train__clip=1e6)
    rows, model = material.rows("train"), training.model
    twin = build_model(
        ARM,
        in_dim=192,
        num_outputs=2,
        seed=42,
        **{k: model.settings[k] for k in ("dim", "depth", "num_heads", "hidden_dim", "num_patches")},
    )
    chosen = [rows[i] for i in bag_order(42, 0, len(rows))][:8]
    bags = [material.bags.varied(row, (42, 0)) for row in chosen]
    keep = torch.cat([twin.draw_keep(1, generator=stream(42, f"drop path/0/{bag.slide}")) for bag in bags], -1)
    features, graph = together(bags)
    material.task.loss(twin.train()(features, graph, keep), torch.stack([bag.target for bag in bags])).backward()
    expected = torch.cat([p.grad.flatten() for p in twin.parameters()])
    torch.testing.assert_close(gradients(training, rows)[0], expected, atol=1e-6, rtol=1e-4)


def test_an_image_varies_with_seed_and_epoch_in_training_and_never_elsewhere(make):
    _, material = make()
    bags = material.bags
    first = bags.varied(0, (42, 0)).features
    assert torch.equal(bags.varied(0, (42, 0)).features, first)
    for seed, epoch in ((42, 1), (43, 0)):
        assert not torch.equal(bags.varied(0, (seed, epoch)).features, first)
    assert torch.equal(bags[0].features, bags[0].features) and not torch.equal(bags[0].features, first)
    assert torch.equal(bags.varied(0, (42, 0)).target, bags[0].target)
    with BagLoader(bags, workers=0) as plain, BagLoader(bags, workers=1) as worker:
        for a, b in zip(plain.epoch([2, 0], (42, 3)), worker.epoch([2, 0], (42, 3)), strict=True):
            assert a.slide == b.slide and torch.equal(a.features, b.features)


def test_predictions_do_not_depend_on_the_size_of_a_batch(make):
    training, _ = make()
    rows = list(range(7))
    one, three = (predict_logits(training.ranks, training.model, training.loader, rows, batch=b) for b in (1, 3))
    torch.testing.assert_close(one, three, atol=1e-6, rtol=1e-5)


def test_gate_statistics_are_means_over_images_whatever_the_batch(make):
    found = []
    for size in (1, 5):
        training, material = make(train__batch_size=size, train__accumulation=5 // size, train__lr=1e-9)
        for name, parameter in training.model.named_parameters():
            if "coefficient" in name:
                torch.nn.init.normal_(parameter, std=1.0, generator=torch.Generator().manual_seed(len(name)))
        train_epoch(training, material.rows("train"), Nobody())
        found.append(training.progress.gates / len(material.rows("train")))
    assert float(found[0].abs().max()) > 0.1
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-3)


def test_a_run_learns_the_planted_colours_and_writes_what_every_run_writes(finished):
    assert {path.name for path in finished.iterdir()} == {
        *RESULTS,
        "config.yaml",
        "environment.json",
        "features.csv",
        "log.txt",
        ".lock",
    }
    found = json.loads((finished / "metrics.json").read_text())
    assert found["select"] == "macro_map" and found["val"]["slide"]["macro_map"] > 0.9
    card = load_card(finished / "model.safetensors")
    assert card["images"] == {"size": 32, "patch": 8} and card["settings"]["num_patches"] == 16
    assert card["stride"] == [{"value": 8.0, "unit": "px", "um": None}] and card["encoder"] is None
    gates = pd.read_csv(finished / "gates.csv")
    assert set(gates["layer"]) == {0} and float(gates["mean"].abs().max()) > 0


CHILD = """
import sys, torch
from gated_srp.config import load_config
from gated_srp.training.train import train
torch.set_num_threads(1)
train(load_config(sys.argv[1], {"out": sys.argv[2]}), arm="vit_s16_gated_srp", seed=42, save_every=0.0)
"""


def test_killed_or_stopped_a_run_ends_with_the_same_bits(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    yaml = write_images(tmp_path / "data", train={"epochs": 3, "batch_size": 2, "accumulation": 2, "workers": 1})
    expected = results(train(open_config(yaml, out=str(tmp_path / "whole")), arm=ARM, seed=42).path)
    out = tmp_path / "killed"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(yaml), str(out)], stdout=subprocess.DEVNULL)
    state, writes, last, deadline = out / "toy" / ARM / "seed42/state.pt", 0, None, time.monotonic() + 120
    while writes < 4 and child.poll() is None and time.monotonic() < deadline:
        now = state.stat().st_mtime_ns if state.exists() else None
        writes += now is not None and now != last
        last = now
        time.sleep(0.001)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert not (state.parent / "metrics.json").exists()
    assert results(train(open_config(yaml, out=str(out)), arm=ARM, seed=42).path) == expected

    plain, calls = RunCallbacks.bag, []

    def stops(self, bag):
        calls.append(bag.slide)
        if len(calls) == 7:  # in the midst of a window
            raise Interrupted("now")
        plain(self, bag)

    config = open_config(yaml, out=str(tmp_path / "stopped"), train__workers=0)
    with monkeypatch.context() as patch:
        patch.setattr(RunCallbacks, "bag", stops)
        with pytest.raises(Interrupted):
            train(config, arm=ARM, seed=42)
    assert results(train(config, arm=ARM, seed=42).path) == expected


def test_new_images_are_predicted_and_bad_ones_skipped_with_their_reason(finished, tmp_path):
    for i in range(8):
        write_image(tmp_path / f"new{i}.png", 100 + i, (i % 2, i // 2 % 2))
    write_image(tmp_path / "wide.png", 1, (0, 0), size=40)
    (tmp_path / "broken.png").write_bytes((tmp_path / "new0.png").read_bytes()[:300])
    found = predict([finished], files_for(TrainedRun.open(finished), tmp_path))
    table = found.table.set_index("slide")
    assert sorted(table.index) == [f"new{i}" for i in range(8)] and set(table["patches"]) == {16}
    truth = np.array([[i % 2, i // 2 % 2] for i in range(8)])
    probabilities = table.loc[[f"new{i}" for i in range(8)], [f"prob_{name}" for name in LABELS]].to_numpy()
    assert ((probabilities > 0.5) == truth).mean() > 0.8
    reasons = found.skipped.set_index("slide")["problem"]
    assert "40 x 40 pixels, expected 32 x 32" in reasons["wide"]
    assert "cut short, damaged" in reasons["broken"]


def test_a_labelled_cohort_of_images_is_evaluated(finished, tmp_path):
    other = write_images(tmp_path, count=16, first=200)
    found = evaluate_run(finished, open_config(other), repeats=10)
    metrics = found.metrics.set_index("metric")["value"]
    assert len(found.slides) == 16 and metrics["macro_map"] > 0.9
    of_slides = open_config(other).model_copy(update={"images": None})
    with pytest.raises(
        UserError, match=r"a cohort of feature files, but .* was trained on images\. Name those with `images`"
    ):
        evaluate_run(finished, of_slides)


def test_maps_of_slides_are_refused_for_a_model_of_images(finished, tmp_path):
    with pytest.raises(UserError, match="a model of images; maps are drawn of slides"):
        view_slide(finished, write_image(tmp_path / "a.png", 0, (0, 0)))


def test_slide_arms_and_image_arms_do_not_mix(cohort, tmp_path):
    with pytest.raises(UserError, match=r"arm 'na' is for slides.*vit_s16"):
        train(open_config(cohort, out=str(tmp_path)), arm="na", seed=42)


def test_an_image_that_is_broken_stops_the_run_with_its_name(tmp_path):
    yaml = write_images(tmp_path, count=20)
    for path in sorted((tmp_path / "images").iterdir()):
        path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match=r"\.png.*: cut short, damaged or no image"):
        train(open_config(yaml, out=str(tmp_path / "runs")), arm=ARM, seed=42)


def test_missing_images_are_named_and_a_folder_without_any_is_refused(tmp_path):
    yaml = write_images(tmp_path, count=20)
    (tmp_path / "images" / "003.png_crop_3.png").unlink()
    material = load_inputs(open_config(yaml), 42)
    assert len(material.slides) == 19
    assert any("003.png_crop_3" in str(note) and "no file of this name" in str(note) for note in material.notes)
    with pytest.raises(UserError, match=r"no such folder\. Expected a folder of images"):
        load_inputs(open_config(yaml, images__folder=str(tmp_path / "nowhere")), 42)
