"""Cohorts of images: their settings, ADP's files as released, and what `check` says of them."""

import numpy as np
import pytest
from image_cohorts import write_image, write_images

from gated_srp.checks.check import check
from gated_srp.config import COHORTS, load_config, open_cohort
from gated_srp.errors import UserError
from gated_srp.machine import Machine


def write(folder, text):
    (folder / "c.yaml").write_text(text)
    return folder / "c.yaml"


def test_images_bring_the_papers_recipe_twelve_blocks_and_arms_with_positions(tmp_path):
    config = load_config(write(tmp_path, "images: pictures\ntable: t.csv\ntarget: [a, b]\n"))
    assert config.images.folder == tmp_path / "pictures" and (config.images.size, config.images.patch) == (272, 16)
    assert config.arms == ("vit_s16", "vit_s16_xsa", "vit_s16_diff", "vit_s16_gated_srp")
    assert config.main_arm == "vit_s16_gated_srp"
    assert (config.task, config.metric, config.at_once) == ("multilabel", "macro_map", 256)
    assert (config.train.epochs, config.train.lr, config.train.weight_decay, config.train.accumulation) == (
        20,
        5e-4,
        0.05,
        1,
    )
    sizes = config.sizes(config.main_arm)
    assert (sizes["depth"], sizes["num_patches"], sizes["delta"], sizes["hidden_dim"]) == (12, 289, 1.0, 64)
    assert "num_patches" not in config.resolved()["model"]  # which must be readable as settings again
    own = load_config(
        tmp_path / "c.yaml", {"model.depth": 3, "images.size": 64, "arms": ["vit_s16"], "task": "classification"}
    )
    assert (own.model.depth, own.images.size, own.images.folder) == (3, 64, tmp_path / "pictures")
    assert own.sizes("vit_s16")["num_patches"] == 16 and own.arms == ("vit_s16",) and own.metric == "macro_f1"


def test_slides_are_as_they_were(tmp_path):
    config = load_config(write(tmp_path, "features: f\ntable: t.csv\ntarget: label\n"))
    assert config.images is None and config.at_once == 1 and config.model.depth == 4
    assert config.main_arm == "gated_srp" and "num_patches" not in config.sizes()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("images: a\nfeatures: b\n", "images and features are both set"),
        ("images: a\ncap: 100\n", "images and cap are both set"),
        ("images: a\ncache: b\n", "images and cache are both set"),
        (
            "images: {folder: a, size: 270}\n",
            "images.size is 270, expected a multiple of images.patch .16., twice it at least",
        ),
        ("images: {folder: a, sise: 270}\n", r"images\.sise: no such setting\. Did you mean images\.size\?"),
        ("images: {folder: a, patch: 0}\n", r"images\.patch: "),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path, text, said):
    with pytest.raises(UserError, match=said):
        load_config(write(tmp_path, f"{text}table: t.csv\ntarget: label\n"))


def test_a_folder_that_is_not_named_is_asked_for(tmp_path):
    with pytest.raises(UserError, match="ADP: `images` is not set"):
        open_cohort(load_config(write(tmp_path, "cohort: ADP\nlabels: .\n")))


def test_adp_as_released_is_images_row_files_and_38_labels(tmp_path):
    classes = [*COHORTS["ADP"].classes, "N.G.A", "N.G.E", "N.G.O", "N.G.R", "N.G.T"]
    names = [f"00{i}.png_crop_{i}.png" for i in range(6)]
    rows = [",".join([name, *(str((i + j) % 3 % 2) for j in range(38)), *"00000"]) for i, name in enumerate(names)]
    (tmp_path / "ADP_EncodedLabels_Release1_Flat.csv").write_text(
        "\n".join([",".join(["Patch Names", *classes]), *rows])
    )
    for part, numbers in {"train": [4, 0, 2], "valid": [1, 3], "test": [5]}.items():
        np.save(tmp_path / f"{part}.npy", np.array(numbers))
    for i, name in enumerate(names):
        write_image(tmp_path / "img" / "below" / name, i, (0, 0))
    config = load_config(write(tmp_path, "cohort: ADP\nlabels: .\nimages: img\n"))
    data = open_cohort(config)
    parts = [data.slides(seed).set_index("slide")["part"].tolist() for seed in (42, 43)]
    assert parts[0] == parts[1] == ["train", "val", "train", "val", "train", "test"]  # no seed draws ADP's split
    assert len(data.table.classes) == 38 and config.gate().delta == 0.5 and config.gate().hidden_dim == 128


def test_check_names_the_images_that_are_no_good(tmp_path):
    config = load_config(write_images(tmp_path, count=20))
    images = sorted((tmp_path / "images").iterdir())
    write_image(images[3], 3, (0, 0), size=40)
    whole = images[5].read_bytes()
    images[5].write_bytes(whole[: len(whole) // 2])
    images[7].write_text("no image")
    shallow, deep = (check(config, deep=deep) for deep in (False, True))
    assert shallow.facts["files"]["broken"] == {"wrong_size": 1, "truncated": 1}
    assert deep.facts["files"]["broken"] == {"wrong_size": 1, "truncated": 2}  # a torn end is seen when decoded
    assert set(deep.quarantine) == {images[3], images[5], images[7]}
    assert deep.facts["encoders"] == {"none, pixels": 17} and deep.facts["widths"] == {"192": 17}
    assert deep.facts["neighbours"]["mean"]["median"] == (4 * 3 + 8 * 5 + 4 * 8) / 16


def test_only_adp_itself_drops_its_last_batch(tmp_path):
    assert not load_config(write_images(tmp_path, count=20)).train.drop_last
    assert load_config(write(tmp_path, "cohort: ADP\nlabels: .\nimages: img\n")).train.drop_last


def test_check_asks_for_smaller_batches_where_memory_is_short(tmp_path):
    config = load_config(write_images(tmp_path, count=20), {"train.batch_size": 8})
    found = check(config, machine=Machine("a small machine", 1e9, 0.5e9))
    memory = next(one for one in found.notes if one.kind == "memory")
    assert "a batch of 8 images needs about" in memory.what and "raise train.accumulation" in memory.cure
    room = found.facts["cost"]["run_bytes"] - 0.5e9
    assert room == pytest.approx(8 * 16 * 4 * (18 * 24 * 2 + 192))  # eight images of sixteen patches
