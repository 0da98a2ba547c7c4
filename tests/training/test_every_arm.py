"""What training and maps promise holds for every arm of the table: a new arm is tried by itself."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from factories import make_slide, write_trident
from image_cohorts import write_image
from two_scale_cohorts import write_low

from gated_srp.config.cohort import TrainConfig
from gated_srp.data.files.images import ImageGrid
from gated_srp.data.loader import BagLoader, SlideDataset
from gated_srp.data.prepared import Preparation
from gated_srp.errors import Interrupted, UserError
from gated_srp.models import ARMS, SlideModel, build_model, find_arm, save_model
from gated_srp.reports.maps import VALUES, maps_of, view_slide
from gated_srp.tasks import Classification
from gated_srp.training.loop import Training, finish_epoch, train_epoch
from gated_srp.training.ranks import Ranks
from gated_srp.training.state import load_checkpoint, save_checkpoint

BAGS = 3
SIZES = {"dim": 12, "depth": 3, "num_heads": 2, "num_landmarks": 4, "hidden_dim": 4, "num_patches": 16}
RECIPE = TrainConfig(epochs=2, lr=1e-2, weight_decay=0.05, accumulation=1, workers=0)


class Remembered(SlideDataset):
    """Reads each file once."""

    def varied(self, index, variation):
        known = self.__dict__.setdefault("known", {})
        if index not in known:
            bag = super().varied(index, None)
            known[index] = replace(bag, graph=bag.graph.with_covariates(torch.tensor([[1.5, -0.5]])))
        return known[index]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory) -> dict[tuple[bool, int | None, int], SlideDataset]:
    """Three slides, of one magnification and of two, and three images, each with a label."""
    folder = tmp_path_factory.mktemp("every_arm")
    slides = [write_trident(folder, f"s{i}", make_slide(i, columns=4, rows=4, width=8)) for i in range(BAGS)]
    for i in range(BAGS):
        write_low(folder / "low", f"s{i}", make_slide(i, columns=4, rows=4, width=8))
    images = [write_image(folder / f"{i}.png", i, (i % 2, 0), size=8) for i in range(BAGS)]

    def dataset(files: list[Path], **how: object) -> SlideDataset:
        table = pd.DataFrame({"slide": [f"s{i}" for i in range(BAGS)], "case": "p", "file": files})
        return Remembered(table, Preparation(**how), targets=torch.arange(BAGS) % 2)

    both, grid = dataset(slides, features_low=folder / "low"), ImageGrid(8, 2)
    found = {(False, None, 1): dataset(slides), (False, 7, 1): dataset(slides, window=7), (False, None, 2): both}
    return found | {(True, None, 1): dataset(images, images=grid)}


def fitting(name: str, datasets: dict[tuple[bool, int | None, int], SlideDataset]) -> SlideDataset:
    return datasets[find_arm(name).images, find_arm(name).window, find_arm(name).scales]


class Quiet:
    """Callbacks that save at the end of each window, and may stop after the first."""

    def __init__(self, state: Path | None = None) -> None:
        self.state = state

    def bag(self, bag):
        pass

    def window(self, training):
        if self.state is not None:
            save_checkpoint(training.checkpoint(), self.state)
            raise Interrupted("killed")

    def epoch(self, training):
        pass


def tiny(name: str, dataset: SlideDataset) -> SlideModel:
    width, covariates = dataset[0].features.shape[1], 2 * find_arm(name).needs_covariates
    return build_model(name, in_dim=width, num_outputs=2, seed=3, covariates=covariates, **SIZES)


def begun(name: str, dataset: SlideDataset) -> Training:
    loader = BagLoader(dataset, workers=0)
    return Training(Ranks.one("32", "cpu"), tiny(name, dataset), Classification(("a", "b")), loader, RECIPE, 3)


def epoch(training: Training, callbacks: Quiet) -> None:
    train_epoch(training, range(BAGS), callbacks)
    finish_epoch(training, BAGS, {"loss": 0.0}, score=0.0)


@pytest.mark.parametrize("name", ARMS)
def test_killed_within_an_epoch_every_arm_goes_on_to_the_same_bits(name, datasets, tmp_path):
    """Weights, optimiser, losses and statistics of the gates, after the epoch that was left."""
    dataset = fitting(name, datasets)
    straight = begun(name, dataset)
    epoch(straight, Quiet())
    with pytest.raises(Interrupted):
        epoch(begun(name, dataset), Quiet(tmp_path / "state.pt"))
    resumed = begun(name, dataset)
    with torch.no_grad():
        for parameter in resumed.model.parameters():
            parameter.fill_(0.5)  # nothing but the state may lead back
    resumed.restore(load_checkpoint(tmp_path / "state.pt"))
    assert (resumed.progress.step, resumed.progress.bags) == (1, 1)
    epoch(resumed, Quiet())
    assert resumed.progress.step == BAGS and resumed.progress.history == straight.progress.history
    assert resumed.progress.gate_history == straight.progress.gate_history
    assert bool(resumed.progress.gate_history) == any("coefficient" in key for key in resumed.best)
    for mine, other in ((resumed.best, straight.best), (resumed.model.state_dict(), straight.model.state_dict())):
        assert all(torch.equal(mine[key], other[key]) for key in other)
    ours, theirs = (one.optimiser.state_dict()["state"] for one in (resumed, straight))
    assert all(torch.equal(ours[k][what], theirs[k][what]) for k in theirs for what in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_draws_the_maps_that_it_has_and_refuses_the_others_in_words(name, datasets, tmp_path):
    dataset = fitting(name, datasets)
    model, draw = tiny(name, dataset), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw))
    card = {"images": {"size": 8, "patch": 2}} if model.images else {"window": dataset.settings.window}
    card |= {"features_low": {"ratio": [4.0]}} if model.scales > 1 else {}
    save_model(model, tmp_path / "model.safetensors", card)
    if model.images:
        with pytest.raises(UserError, match="a model of images; maps are drawn of slides"):
            view_slide(tmp_path, dataset.files[0])
        return
    if find_arm(name).needs_covariates:
        with pytest.raises(UserError, match="covariates"):
            view_slide(tmp_path, dataset.files[0])
        return
    traced = any(hasattr(part, "cls_attention") for part in model.modules())
    view = view_slide(tmp_path, dataset.files[0], reading=Preparation(features_low=dataset.settings.features_low))
    drawn, refused = {}, {}
    for value in VALUES:
        try:
            drawn[value] = maps_of(view, value)
        except UserError as error:
            refused[value] = error
    gated = find_arm(name).gated
    wanted = {"homogeneity", *(["attention"] if traced else []), *(["beta", "correction"] if gated else [])}
    assert wanted <= set(drawn) and (not gated or ("change" in drawn) == traced)
    assert all(error.cure and "this model has" in error.what for error in refused.values())
    for one in (one for found in drawn.values() for one in found):
        assert one.values.shape == (dataset[0].num_patches,) and np.isfinite(one.values).all()
    if gated:
        assert max(float(np.abs(one.values).max()) for one in drawn["beta"]) > 0
