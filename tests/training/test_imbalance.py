"""Rare classes: weights in the training loss and balanced draws, against naive loops; off, they change no bit."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from factories import write_trident
from toy_cohorts import open_config, planted, train_interrupted, write_survival_cohort, write_yaml

import gated_srp
from gated_srp.errors import UserError
from gated_srp.tasks import Classification, Multilabel
from gated_srp.tasks.imbalance import sampling_weights, weighted
from gated_srp.training.loop import bag_order
from gated_srp.training.train import train

CLASSES = ("benign", "tumour", "rare")


def labels(*numbers):
    return pd.DataFrame({"case": [f"p{i}" for i in range(len(numbers))], "label": numbers})


def test_balanced_weights_make_all_classes_weigh_alike():
    rows = labels(0, 0, 0, 0, 1, 1, 2, 0)
    task = weighted(Classification(CLASSES), rows, "balanced")
    assert task.weights == pytest.approx((8 / (3 * 5), 8 / (3 * 2), 8 / 3))
    assert sum(task.weights[y] for y in rows["label"]) == pytest.approx(8)  # on average 1 per slide
    assert task.card()["class_weights"] == dict(zip(CLASSES, task.weights, strict=True))


def test_the_weighted_loss_is_that_of_a_naive_loop_also_of_one_slide():
    task = weighted(Classification(CLASSES), labels(0), {"rare": 5.0})
    logits, target = torch.tensor([[1.0, 0.0, -1.0], [0.2, 0.3, 0.4]]), torch.tensor([0, 2])
    each = [-float(torch.log_softmax(logits, 1)[i, y]) * w for i, (y, w) in enumerate(((0, 1.0), (2, 5.0)))]
    assert task.training_loss(logits, target).item() == pytest.approx(sum(each) / 2)
    assert task.training_loss(logits[1], target[1]).item() == pytest.approx(
        each[1]
    )  # torch's own mean would lose the weight
    plain = Classification(CLASSES)
    assert torch.equal(task.loss(logits, target), plain.loss(logits, target))  # what validation and calibration use
    assert torch.equal(plain.training_loss(logits, target), plain.loss(logits, target))


def test_of_several_labels_the_positives_are_weighted():
    rows = pd.DataFrame({"a": [1, 0, 0, 0], "b": [1, 1, 0, 0]})
    task = weighted(Multilabel(("a", "b")), rows, "balanced")
    assert task.weights == (3.0, 1.0)
    logits, target = torch.tensor([[0.5, -0.5]]), torch.tensor([[1.0, 0.0]])
    p = torch.sigmoid(logits)[0].tolist()
    assert task.training_loss(logits, target).item() == pytest.approx(-(3 * np.log(p[0]) + np.log(1 - p[1])) / 2)


def test_balanced_draws_take_every_class_equally_often():
    chances = sampling_weights(Classification(CLASSES[:2]), labels(0, 0, 0, 1))
    assert chances.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    drawn = Counter(place for epoch in range(300) for place in bag_order(7, epoch, 4, torch.from_numpy(chances)))
    assert drawn[3] / drawn.total() == pytest.approx(0.5, abs=0.05)
    assert bag_order(7, 3, 4, torch.from_numpy(chances)) == bag_order(7, 3, 4, torch.from_numpy(chances))
    assert sorted(bag_order(7, 3, 4)) == [0, 1, 2, 3]


def write_rare(folder, **settings):
    rows = ["slide,case,label"]
    for i in range(16):
        write_trident(folder / "feats", f"s{i:02d}", planted(i, 2.0 if i % 4 == 0 else -2.0, columns=4, rows=3))
        rows.append(f"s{i:02d},p{i:02d},{'tumour' if i % 4 == 0 else 'benign'}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    parts = ["train"] * 8 + ["val"] * 4 + ["test"] * 4
    (folder / "split.csv").write_text("slide_id,split\n" + "".join(f"s{i:02d},{p}\n" for i, p in enumerate(parts)))
    return write_yaml(folder, target="label", split="split.csv", train={"epochs": 2, "accumulation": 3}, **settings)


def test_weights_and_draws_are_named_in_card_log_and_report_and_resume_bit_for_bit(tmp_path, monkeypatch):
    asked = {"train.class_weights": "balanced", "train.sampling": "balanced"}
    config = open_config(
        write_rare(tmp_path), out=str(tmp_path / "whole"), **{k.replace(".", "__"): v for k, v in asked.items()}
    )
    whole = train(config, arm="na", seed=42)
    assert whole.card["sampling"] == "balanced" and whole.card["class_weights"] == pytest.approx(
        {"benign": 8 / 12, "tumour": 2}
    )
    assert (
        "classes are weighted in the training loss (balanced): benign 0.6667, tumour 2"
        in (whole.path / "log.txt").read_text()
    )
    page = gated_srp.report(tmp_path / "whole", out=tmp_path / "r.html").path.read_text()
    assert "Classes are weighted in the training loss (balanced)." in page and "drawn with replacement" in page

    again = config.model_copy(update={"out": tmp_path / "again"})
    seen = train_interrupted(again, "na", after=5, monkeypatch=monkeypatch)
    assert seen and set(seen) <= {f"s{i:02d}" for i in range(8)}  # of the training part
    resumed = train(again, arm="na", seed=42)
    for name in ("model.safetensors", "metrics.json", "history.csv", "predictions_test_slide.csv"):
        assert (resumed.path / name).read_bytes() == (whole.path / name).read_bytes()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train.class_weights": {"tumor": 2}}, "train.class_weights: 'tumor' is no class. Did you mean 'tumour'"),
        ({"train.class_weights": {"tumour": 0}}, "input should be greater than 0"),
        ({"train.class_weights": "even"}, "train.class_weights"),
        ({"train.sampling": "equal"}, "train.sampling"),
    ],
)
def test_weights_that_mean_nothing_are_refused(tmp_path, changes, said):
    with pytest.raises(UserError, match=said):
        train(write_rare(tmp_path), settings=changes)


@pytest.mark.parametrize("key", ["train.class_weights", "train.sampling"])
def test_a_task_without_classes_has_nothing_to_balance(tmp_path, key):
    with pytest.raises(UserError, match=f"{key}: .*survival has no classes"):
        train(write_survival_cohort(tmp_path, slides=12), settings={key: "balanced"})


def test_a_class_that_training_lacks_cannot_be_balanced():
    with pytest.raises(UserError, match="balanced, but no training slide is of rare"):
        weighted(Classification(CLASSES), labels(0, 1), "balanced")
    with pytest.raises(UserError, match="a slide may have several labels"):
        sampling_weights(Multilabel(("a", "b")), pd.DataFrame({"a": [1], "b": [0]}))
