"""A feature file is taken for a slide's only if it was made of that slide, with that encoder and those settings."""

import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from images import mean_colour, picture, write_slide

from gated_srp.data import read_bag
from gated_srp.errors import UserError
from gated_srp.slides.extract import Extraction, extract_slides
from gated_srp.slides.reader import SlideInfo
from gated_srp.slides.store import AtlasPatch, Trident, identity, refuse_other_slide
from gated_srp.slides.tiles import Tiling

PIECE = [(64, 64, 256, 192)]


def _slide(folder: Path, *, seed: int = 0, size: tuple[int, int] = (400, 320)) -> Path:
    return write_slide(folder / "a.tif", picture(size, PIECE, seed=seed))


def _settings(out: Path, layout=Trident, encoder=None) -> Extraction:
    encoder = encoder or mean_colour()
    return Extraction(encoder=encoder, tiling=Tiling(size=64), layout=layout(out), workers=0, batch=5)


def _file(settings: Extraction, slide: Path) -> Path:
    return settings.layout.path(settings.job(slide))


@pytest.mark.parametrize("layout", [Trident, AtlasPatch])
def test_another_slide_of_the_same_name_is_refused_and_both_are_named(tmp_path, layout):
    first, second = _slide(tmp_path / "x"), _slide(tmp_path / "y", seed=1)
    settings = _settings(tmp_path / "out", layout)
    extract_slides([first], settings)
    before = _file(settings, first).read_bytes()
    with pytest.raises(UserError, match=r"holds the features of another slide") as error:
        extract_slides([second], settings)
    assert str(first.resolve()) in str(error.value) and str(second.resolve()) in str(error.value)
    assert error.value.where.endswith("a.h5") and "Choose another -o" in error.value.cure
    assert _file(settings, first).read_bytes() == before


def test_another_slide_of_the_same_name_bytes_and_levels_is_known_by_its_content(tmp_path):
    known = []
    for seed in (0, 1):
        path = tmp_path / str(seed) / "a.svs"
        path.parent.mkdir()
        path.write_bytes(np.random.default_rng(seed).bytes(300_000))
        known.append(identity(SlideInfo(path, (400, 320), (1.0, 4.0), 0.5, 20.0)))
    assert [known[0][key] == known[1][key] for key in ("bytes", "levels", "size", "blocks")] == [True] * 3 + [False]
    with pytest.raises(UserError, match="holds the features of another slide"):
        refuse_other_slide(tmp_path / "a.h5", known[0], known[1])
    refuse_other_slide(tmp_path / "a.h5", known[0], {**known[0], "path": "/elsewhere/a.svs"})


def test_a_slide_that_was_moved_or_copied_is_the_same_slide(tmp_path):
    first = _slide(tmp_path / "x")
    settings = _settings(tmp_path / "out")
    extract_slides([first], settings)
    (tmp_path / "y").mkdir()
    copy = tmp_path / "y" / "a.tif"
    copy.write_bytes(first.read_bytes())
    assert extract_slides([copy], settings).there == [copy]


def test_a_second_encoder_does_not_join_the_file_of_another_slide(tmp_path):
    first, second = _slide(tmp_path / "x"), _slide(tmp_path / "y", seed=1)
    extract_slides([first], _settings(tmp_path / "out", AtlasPatch))
    other = _settings(tmp_path / "out", AtlasPatch, replace(mean_colour(), name="other"))
    with pytest.raises(UserError, match=r"holds the features of another slide"):
        extract_slides([second], other)


class Linear(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        weight = np.random.default_rng(seed).normal(size=(6, 3))
        self.weight = torch.nn.Parameter(torch.tensor(weight, dtype=torch.float32))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3)) @ self.weight.T


def test_features_of_other_weights_are_refused_also_where_nothing_else_is_to_do(tmp_path):
    slide = _slide(tmp_path)
    one, two = (replace(mean_colour(), build=lambda weights, s=seed: Linear(s)) for seed in (1, 2))
    extract_slides([slide], _settings(tmp_path / "out", encoder=one))
    assert extract_slides([slide], _settings(tmp_path / "out", encoder=one)).there == [slide]
    with pytest.raises(UserError, match=r"made with other weights of the encoder 'mean_colour'"):
        extract_slides([slide], _settings(tmp_path / "out", encoder=two))


def test_features_that_are_there_are_kept_with_a_note_where_the_encoder_cannot_be_loaded(tmp_path):
    slide = _slide(tmp_path)
    extract_slides([slide], _settings(tmp_path / "out"))

    def gone(weights):
        raise UserError("the weights cannot be fetched", kind="no_weights")

    outcome = extract_slides([slide], _settings(tmp_path / "out", encoder=replace(mean_colour(), build=gone)))
    assert outcome.there == [slide]
    assert [note.kind for note in outcome.notes] == ["no_weights"] and "could not be compared" in str(outcome.notes[0])


def test_other_normalisation_of_the_encoder_is_refused(tmp_path):
    slide = _slide(tmp_path)
    extract_slides([slide], _settings(tmp_path / "out"))
    other = replace(mean_colour(), normalisation=((0.5,) * 3, (1.0,) * 3))
    with pytest.raises(
        UserError, match=r"was extracted with other settings \(normalisation mean \(0\.0, .*asked mean \(0\.5"
    ):
        extract_slides([slide], _settings(tmp_path / "out", encoder=other))


def test_the_file_says_what_it_was_made_of(tmp_path):
    slide = _slide(tmp_path)
    settings = _settings(tmp_path / "out")
    extract_slides([slide], settings)
    with h5py.File(_file(settings, slide)) as file:
        made = json.loads(file["features"].attrs["gated_srp"])
    assert made["slide"]["bytes"] == slide.stat().st_size and made["slide"]["levels"] == [[400, 320], [100, 80]]
    assert len(made["slide"]["blocks"]) == 32 and len(made["weights_sha256"]) == 64
    assert (made["tissue"], made["mpp"], made["precision"]) == (0.25, None, "32")
    assert made["normalisation"] == "mean (0.0, 0.0, 0.0), std (1.0, 1.0, 1.0), middle 64"


def _forget(path: Path) -> None:
    """As a version that recorded the settings alone."""
    with h5py.File(path, "r+") as file:
        made = json.loads(file["features"].attrs["gated_srp"])
        keys = ("patch_size", "target_magnification", "overlap", "tissue", "mpp", "weights")
        file["features"].attrs["gated_srp"] = json.dumps({key: made[key] for key in keys})


def test_a_file_of_an_earlier_version_is_kept_with_a_warning_unless_its_size_shows_another_slide(tmp_path):
    first = _slide(tmp_path / "x")
    settings = _settings(tmp_path / "out")
    extract_slides([first], settings)
    _forget(_file(settings, first))
    outcome = extract_slides([first], settings)
    assert outcome.there == [first]
    assert "by an earlier version, which did not record what slide they are of" in outcome.notes[0].what
    assert "a.h5" in str(outcome.notes[0].where) and "Remove" in outcome.notes[0].cure
    with pytest.raises(UserError, match=r"holds the features of another slide"):
        extract_slides([_slide(tmp_path / "y", size=(464, 320))], settings)


FULL = """
    import resource, sys
    from dataclasses import replace
    from pathlib import Path
    sys.path.insert(0, {here!r})
    from images import MeanColour, mean_colour
    from gated_srp.slides.extract import Extraction, extract_slides
    from gated_srp.slides.store import {layout}
    from gated_srp.slides.tiles import Tiling

    class Wide(MeanColour):
        def forward(self, images):
            return super().forward(images).repeat(1, 512)

    encoder = replace(mean_colour(), width=3072, build=lambda weights: Wide())
    settings = Extraction(encoder=encoder, tiling=Tiling(size=64), layout={layout}(Path({out!r})), workers=0, batch=5)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))  # writing more fails, as on a disk that is full
    extract_slides([Path({slide!r})], settings)
"""


@pytest.mark.parametrize("layout", ["Trident", "AtlasPatch"])
def test_on_a_full_disk_extraction_ends_with_a_message_and_leaves_nothing(tmp_path, layout):
    slide, script = _slide(tmp_path), tmp_path / "full.py"
    made = {"here": str(Path(__file__).parent), "slide": str(slide), "out": str(tmp_path / "out"), "layout": layout}
    script.write_text(textwrap.dedent(FULL.format(**made)))
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "a.h5: cannot be written (File too large)" in ended.stderr
    assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == ["a.jpg"]
    settings = _settings(tmp_path / "out", {"Trident": Trident, "AtlasPatch": AtlasPatch}[layout])
    assert extract_slides([slide], settings).done == [slide]
    assert len(read_bag(_file(settings, slide)).coords) == 12
