"""Two magnifications from a YAML to maps: one bag from two folders, what is refused in words, and what other arms do."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from factories import Slide, make_slide, write_trident
from toy_cohorts import open_config
from two_scale_cohorts import write_low, write_two_scale_cohort

import gated_srp
from gated_srp.config.load import arm_notes, for_arm
from gated_srp.data.cache import BagCache
from gated_srp.data.files.formats import read_header
from gated_srp.data.loader import SlideDataset
from gated_srp.data.prepared import Preparation, files_of, prepare
from gated_srp.data.two_scales import low_file
from gated_srp.errors import UserError
from gated_srp.training.inputs import changed_files, fingerprints
from gated_srp.training.train import train
from gated_srp.training.trained import open_slide


@pytest.fixture(scope="module")
def cohort(tmp_path_factory) -> Path:
    return write_two_scale_cohort(tmp_path_factory.mktemp("two_scales"), slides=12, drop=1, seeds=[42])


@pytest.fixture(scope="module")
def run(cohort):
    said: list[str] = []
    changes = {"train.epochs": 1}
    done = train(cohort, arm="two_scales_gated_srp", settings=changes, progress=lambda event: said.append(event.text))
    return done, "\n".join(said)


@pytest.fixture
def slide(tmp_path) -> tuple[Path, Preparation]:
    fine = make_slide(3, columns=9, rows=6, width=8)
    write_low(tmp_path / "low", "a", fine, drop=1)
    return write_trident(tmp_path / "fine", "a", fine), Preparation(features_low=tmp_path / "low")


def test_a_bag_has_the_fine_patches_first_and_a_parent_for_each_that_lies_in_a_coarse_one(slide):
    path, settings = slide
    bag, fine = prepare(path, settings), prepare(path, replace(settings, features_low=None))
    count = len(fine.features)
    assert (
        bag.graph.lengths == (count,) and bag.num_patches == count and torch.equal(bag.features[:count], fine.features)
    )
    assert torch.equal(bag.graph.neighbours[: len(fine.graph.neighbours)], fine.graph.neighbours)
    assert torch.equal(bag.graph.homogeneity[:count], fine.graph.homogeneity)
    for row, (x, y) in enumerate(bag.coords[:count].tolist()):
        listed = bag.graph.parents[bag.graph.parent_offsets[row] : bag.graph.parent_offsets[row + 1]].tolist()
        around = [
            j for j, (a, b) in enumerate(bag.coords.tolist()) if j >= count and a <= x < a + 2048 and b <= y < b + 2048
        ]
        assert listed == around
    lone = count - len(bag.graph.parents)
    assert lone == int((fine.coords < 2048).all(1).sum()) == 14  # those of the coarse patch that is missing
    assert f"{lone} of {count} fine patches lie in no coarse patch" in bag.warnings[-1].what


def test_the_cache_keeps_each_magnification_for_itself_and_files_of_both_are_known_again(slide, tmp_path):
    path, settings = slide
    cache, plain = BagCache(tmp_path / "cache"), prepare(path, settings)
    for _ in range(2):
        bag = cache.read(path, settings)
        for name in ("neighbours", "offsets", "homogeneity", "places", "parents", "parent_offsets"):
            assert torch.equal(getattr(bag.graph, name), getattr(plain.graph, name))
        assert torch.equal(bag.features, plain.features) and torch.equal(bag.coords, plain.coords)
    assert len(list(cache.folder.glob("a-*.safetensors"))) == 2
    assert cache.entry(path, settings) == cache.entry(path, replace(settings, features_low=None))
    assert [file.parts[-3] for file in files_of(path, settings) if file.name == "a.h5" and file.is_file()] == [
        "20x_256px_0px_overlap",
        "5x_256px_0px_overlap",
    ]


def test_what_does_not_fit_is_refused_with_the_file_and_a_cure(slide, tmp_path):
    path, settings = slide
    fine = make_slide(3, columns=9, rows=6, width=8)
    narrow = Slide(fine.cells, fine.features[:, :4])

    def refused(said: str, cure: str, name: str = "a", **how: object) -> None:
        low = tmp_path / said[:5].strip()
        if how:
            write_low(low, name, **how)
        else:
            write_trident(low, name, fine)  # no lower magnification at all
        with pytest.raises(UserError, match=said) as error:
            prepare(path, replace(settings, features_low=low))
        assert str(path) in error.value.where and cure in error.value.cure

    refused("no feature file of slide 'a' in", "Extract its lower magnification", name="b", fine=fine)
    refused("has features of 'gigapath', these are of 'uni_v2'", "one encoder", fine=fine, encoder="gigapath")
    refused("has 4 channels, these 8", "one encoder", fine=narrow)
    refused("has patches 512 px apart, these are 512 apart", "exchanged")
    refused("none of 45 patches lies in one of", "level-0 pixels", fine=fine, shift=10**6)
    write_low(tmp_path / "low" / "again", "a", fine)
    with pytest.raises(UserError, match="its lower magnification has 2 files"):
        prepare(path, settings)


def test_arms_of_one_magnification_take_the_fine_patches_and_say_so(cohort):
    config = open_config(cohort)
    assert for_arm(config, "na").features_low is None and for_arm(config, "two_scales") is config
    (note,) = arm_notes(config, "na")
    assert "na sees the patches of `features` alone" in note.what and "two_scales, two_scales_gated_srp" in note.cure
    assert not arm_notes(config, "two_scales")
    with pytest.raises(UserError, match="two magnifications, and the cohort has one"):
        train(config, arm="two_scales", settings={"features_low": None})
    for other in ({"bag": "patient"}, {"regions": {"annotations": "drawn", "only": "x"}}):
        with pytest.raises(UserError, match="features_low: it goes with neither"):
            open_config(cohort, **other)


def test_check_counts_coarse_patches_and_those_without_a_parent(cohort):
    notes = [str(note) for note in gated_srp.check(cohort).notes]
    assert any("coarse patches beside" in note and "two_scales_gated_srp" in note for note in notes)
    assert any("fine patches, on 12 of 12 slides, lie in no coarse patch" in note for note in notes)


def test_a_run_predicts_evaluates_and_draws_with_both_folders_and_refuses_without(cohort, run, tmp_path):
    done, said = run
    assert "patches of two magnifications are one bag" in said and "lie in no coarse patch" in said
    assert done.card["features_low"] == {"ratio": [4.0]} and done.settings["features_low"] == str(cohort.parent / "low")
    feats, low = cohort.parent / "feats", cohort.parent / "low"
    found = gated_srp.predict(done.path, feats, features_low=low, workers=0)
    mine = done.predictions("test", "slide").set_index("slide")
    both = found.table.set_index("slide").loc[mine.index]
    np.testing.assert_allclose(both["prob_tumour"], mine["prob_tumour"], atol=1e-6)
    scored = gated_srp.evaluate(done.path, cohort, allow_overlap=True, repeats=2)
    again = scored.slides.set_index("slide").loc[mine.index]
    np.testing.assert_allclose(again["prob_tumour"], mine["prob_tumour"], atol=1e-6)
    file = next(feats.rglob("s000.h5"))
    maps = gated_srp.heatmap(done.path, file, value="beta", features_low=low, out=tmp_path)
    patches = read_header(file).shape[0]
    assert all(one.values.shape == (patches,) for one in maps.slides[0].maps)
    assert found.table.set_index("slide")["patches"]["s000"] == patches
    assert any("maps show the fine patches" in note.what for note in maps.warnings)
    for command in (
        lambda: gated_srp.predict(done.path, feats, workers=0),
        lambda: gated_srp.heatmap(done.path, file, out=tmp_path),
    ):
        with pytest.raises(UserError, match="two magnifications, and nothing says where the lower one") as error:
            command()
        assert "--features-low" in error.value.cure
    with pytest.raises(UserError, match="takes no budget"):
        gated_srp.predict(done.path, feats, features_low=low, workers=0, budget=0.5)


def test_a_slide_whose_lower_magnification_is_another_than_in_training_is_refused(run, tmp_path):
    fine = make_slide(3, columns=9, rows=6, width=8)
    file = write_trident(tmp_path, "x", fine)
    write_trident(tmp_path / "low", "x", fine, level0=80)  # twice as far apart, not four times
    with pytest.raises(UserError, match="a coarse stride has 2 fine ones, but 4 in training"):
        open_slide(run[0].path, file, reading=Preparation(features_low=tmp_path / "low"))


def test_a_run_of_one_magnification_refuses_a_second(cohort, tmp_path):
    one = train(cohort, arm="na", settings={"train.epochs": 1}, out=tmp_path)
    assert "features_low" not in one.card
    log = (one.path / "log.txt").read_text()
    assert "features_low: na sees the patches of `features` alone" in log
    with pytest.raises(UserError, match="no run was trained on two magnifications"):
        gated_srp.predict(one.path, cohort.parent / "feats", features_low=cohort.parent / "low", workers=0)


def test_changed_files_of_the_lower_magnification_are_noticed(slide):
    path, settings = slide
    bags = SlideDataset(pd.DataFrame({"slide": ["a"], "case": ["p"], "file": [path]}), settings)
    known, low = fingerprints(bags), low_file(path, settings)
    assert not changed_files(known, bags)
    low.write_bytes(low.read_bytes() + b"x")
    assert changed_files(known, bags) == [("a", path)]
    alone = SlideDataset(bags.slides.assign(file=[path]), replace(settings, features_low=None))
    assert fingerprints(alone)["bytes"][0] == str(path.stat().st_size)
