"""Slides as vectors: what enters the head, in files that TITAN's, TRIDENT's and scverse's readers know."""

import h5py
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import gated_srp
from gated_srp.cli import app
from gated_srp.data import read_bag
from gated_srp.errors import UserError
from gated_srp.models import build_model, load_model, save_model
from gated_srp.training import open_slide


@pytest.fixture
def few(cohort):
    return sorted((cohort.parent / "feats").rglob("*.h5"))[:3]


def expected(run, file):
    """The vector and the tokens of patches by a forward with hooks that are written out."""
    model, bag, caught = load_model(run), open_slide(run, file), {}
    model.norm.register_forward_hook(lambda module, args, out: caught.update(slide=out))
    model.blocks[-1].register_forward_pre_hook(lambda module, args: caught.update(tokens=args[0]))
    with torch.no_grad():
        logits = model(bag.features[None], bag.graph)
        assert torch.allclose(model.head(caught["slide"]), logits)
    return caught["slide"][0].numpy(), caught["tokens"][0, 1 : 1 + len(bag.features)].numpy()


def test_the_vector_of_a_slide_is_what_the_head_reads(finished, few):
    found = gated_srp.embed(finished, few, workers=0)
    assert list(found.slides["slide"]) == [file.stem for file in few] and found.written == ()
    assert found.features.dtype == np.float32 and found.features.shape == (3, 24)
    for row, file in zip(found.features, few, strict=True):
        assert row == pytest.approx(expected(finished, file)[0], abs=1e-5)
    seen = set(found.slides["seen_in_training"])
    assert seen <= {"", "training slide", "validation slide"} and len(seen) > 1


def test_one_file_has_the_names_of_titan_and_a_folder_the_layout_of_trident(finished, few, tmp_path):
    found = gated_srp.embed(finished, few, out=tmp_path / "all.h5", workers=0)
    with h5py.File(tmp_path / "all.h5") as file:
        assert [name.decode() for name in file["filenames"]] == [path.stem for path in few]
        assert np.array_equal(file["embeddings"], found.features)
        assert file.attrs["weights_sha256"] == load_model(finished).card["tensors_sha256"]
    each = gated_srp.embed(finished, few, out=tmp_path / "slide_features", workers=0)
    assert sorted(each.written) == sorted(tmp_path / "slide_features" / f"{path.stem}.h5" for path in few)
    with h5py.File(each.written[1]) as file:
        assert np.array_equal(file["features"], found.features[1]) and file["features"].attrs["name"] == few[1].stem


def test_tokens_of_patches_are_those_that_enter_the_last_block_at_their_positions(finished, few, tmp_path):
    gated_srp.embed(finished, few[:1], out=tmp_path / "all.h5", patches=True, workers=0)
    bag, own = read_bag(tmp_path / f"all_patches/{few[0].stem}.h5"), read_bag(few[0])
    assert bag.features.numpy() == pytest.approx(expected(finished, few[0])[1], abs=1e-5)
    assert torch.equal(bag.coords, own.coords) and bag.stride == own.stride


def test_anndata_reads_slides_and_patches(finished, few, tmp_path):
    anndata = pytest.importorskip("anndata", reason="anndata is not installed (extra: dev)")
    found = gated_srp.embed(finished, few, out=tmp_path / "all.h5ad", patches=True, workers=0)
    slides = anndata.read_h5ad(tmp_path / "all.h5ad")
    assert np.array_equal(slides.X, found.features) and list(slides.obs_names) == [path.stem for path in few]
    assert list(slides.obs.columns) == ["case", "file", "patches", "seen_in_training"]
    assert (
        list(slides.obs["patches"]) == list(found.slides["patches"]) and slides.uns["gated_srp"]["model"] == "gated_srp"
    )
    patches = anndata.read_h5ad(tmp_path / f"all_patches/{few[2].stem}.h5ad")
    assert np.array_equal(patches.obsm["spatial"], read_bag(few[2]).coords)
    assert pytest.approx(expected(finished, few[2])[1], abs=1e-5) == patches.X
    assert set(patches.obs["slide"]) == {few[2].stem} and patches.obs_names.is_unique
    patches.write_h5ad(tmp_path / "again.h5ad")


def test_a_model_without_tokens_gives_vectors_alone(few, tmp_path):
    card = {"task": "classification", "classes": ["a", "b"]}
    save_model(build_model("abmil", in_dim=8, num_outputs=2, dim=12), tmp_path / "abmil/model.safetensors", card)
    found = gated_srp.embed(tmp_path / "abmil", few, workers=0)
    assert found.features.shape == (3, 12)
    with pytest.raises(UserError, match="ABMIL has no tokens of patches"):
        gated_srp.embed(tmp_path / "abmil", few, out=tmp_path / "all.h5", patches=True, workers=0)


@pytest.mark.parametrize(
    ("out", "said"), [("", "holds the features that are read"), ("x.npz", "expected .h5, .h5ad or a folder")]
)
def test_features_are_not_written_over_and_other_endings_are_refused(finished, few, out, said):
    before = few[0].read_bytes()
    with pytest.raises(UserError, match=said):
        gated_srp.embed(finished, few, out=few[0].parent / out, workers=0)
    assert few[0].read_bytes() == before


def test_the_command_says_how_many_and_what_it_wrote(finished, few, tmp_path):
    said = CliRunner().invoke(
        app, ["embed", str(finished), str(few[0]), "-o", str(tmp_path / "e.h5ad"), "--patches", "--workers", "0"]
    )
    assert said.exit_code == 0, said.output
    assert "1 slide as vectors of 24 numbers, 0 skipped" in said.output
    assert (tmp_path / "e.h5ad").is_file() and len(list((tmp_path / "e_patches").iterdir())) == 1
