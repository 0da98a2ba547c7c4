"""Models as folders of the Hugging Face Hub's habit: the model and all that its card says travel, and what is not ours is refused."""

import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

import gated_srp
from gated_srp.errors import UserError
from gated_srp.models import SlideModel, build_model, load_card, load_model, save_model

SMALL = {"dim": 12, "depth": 2, "num_heads": 2, "num_landmarks": 4, "hidden_dim": 4}
CARD = {
    "task": "classification",
    "classes": ["benign", "a|b <script>"],
    "encoder": "uni_v1",
    "stride": [{"value": 512.0, "unit": "px", "um": None}],
    "order": "raster",
    "window": 5,
    "temperature": 1.75,
    "calibration_slides": 60,
    "seen": {
        "salt": "00",
        "train": {"slides": ["ab", "cd"], "patients": ["ef"]},
        "val": {"slides": [], "patients": []},
    },
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder as far as its model goes."""
    save_model(
        build_model("gated_srp", in_dim=8, num_outputs=2, seed=3, **SMALL), tmp_path / "run/model.safetensors", CARD
    )
    return tmp_path / "run"


@pytest.fixture
def folder(run: Path, tmp_path: Path) -> Path:
    load_model(run).save_pretrained(tmp_path / "folder")
    return tmp_path / "folder"


def logits(model: torch.nn.Module) -> torch.Tensor:
    features = torch.randn(1, 12, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(features, gated_srp.PatchGraph.from_grid(3, 4).with_features(features[0]))


def test_a_folder_gives_back_the_model_and_every_fact_of_its_card(run, folder):
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    model = SlideModel.from_pretrained(folder)
    assert not model.training and torch.equal(logits(model), logits(load_model(run)))
    assert model.card == load_card(run / "model.safetensors") == json.loads((folder / "config.json").read_text())
    assert {key: model.card[key] for key in CARD} == CARD
    assert torch.equal(logits(gated_srp.load_model(str(folder))), logits(model))


def test_the_readme_states_the_facts_and_no_name_in_them_is_markup(folder):
    text = (folder / "README.md").read_text()
    for fact in ("| patch encoder | uni\\_v1 |", "| order | raster |", "512 px", "| temperature | 1.75 |", "2 names"):
        assert fact in text
    assert "benign, a\\|b &lt;script&gt;" in text and "<script>" not in text
    assert load_card(folder / "model.safetensors")["tensors_sha256"] in text
    assert text.startswith("---\nlibrary_name: gated-srp\n")


def test_weights_that_another_tool_has_saved_again_are_read_with_the_card_of_the_config(folder):
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")  # drops what the file says
    model = SlideModel.from_pretrained(folder)
    assert model.card["temperature"] == 1.75
    weights = load_file(folder / "model.safetensors")
    weights["head.bias"] += 1
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"not the weights that config.json beside it describes"):
        SlideModel.from_pretrained(folder)


def test_a_card_is_not_written_beside_weights_that_it_does_not_describe(run, tmp_path):
    model = load_model(run)
    with torch.no_grad():
        model.head.bias += 1
    with pytest.raises(UserError, match="no longer those that the model's card describes"):
        model.save_pretrained(tmp_path / "tuned")
    assert not (tmp_path / "tuned").exists()
    model.save_pretrained(tmp_path / "tuned", card={**model.card, "temperature": 1.0})
    again = SlideModel.from_pretrained(tmp_path / "tuned")
    assert again.card["temperature"] == 1.0 and again.card["encoder"] == "uni_v1"
    assert torch.equal(logits(again), logits(model))


def test_a_model_that_was_never_in_a_file_is_saved_with_its_settings_alone(tmp_path):
    model = build_model("na", in_dim=8, num_outputs=3, **SMALL).eval()
    model.save_pretrained(tmp_path / "new")
    again = SlideModel.from_pretrained(str(tmp_path / "new"))
    assert torch.equal(logits(again), logits(model)) and again.card["settings"] == model.settings
    assert "| task | not stated |" in (tmp_path / "new/README.md").read_text()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "config.json").write_text('{"temperature": 9'), "config.json: cannot be read"),
        (
            lambda f: (f / "config.json").write_text((f / "config.json").read_text().replace("1.75", "1.85")),
            "does not fit its checksum",
        ),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x08" + b"\0" * 20), "not a readable model file"),
        (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors in this folder"),
        (
            lambda f: save_model(build_model("na", in_dim=8, num_outputs=2, **SMALL), f / "model.safetensors"),
            "config.json: says something else than model.safetensors",
        ),
    ],
)
def test_a_damaged_folder_is_an_error_that_names_the_file(folder, damage, said):
    damage(folder)
    with pytest.raises(UserError, match=said):
        SlideModel.from_pretrained(folder)


def test_a_folder_of_another_library_is_an_error_that_names_it(tmp_path):
    save_file({"embeddings.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "dinov2", "architectures": ["Dinov2Model"]}))
    with pytest.raises(UserError, match=r"no card of gated-srp .config.json beside it is of 'dinov2'"):
        SlideModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["/no/such/folder", "a/b/c", "./model", "model", Path("lab/model")])
def test_a_path_that_is_not_there_is_no_name_of_a_repository(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", pytest.fail)
    with pytest.raises(UserError, match="no such folder"):
        SlideModel.from_pretrained(name)


def test_a_repository_is_downloaded_by_the_library_of_the_hub(folder, monkeypatch):
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model = SlideModel.from_pretrained("lab/model", revision="v2", local_files_only=True)
    assert model.card["classes"] == CARD["classes"]
    assert asked == {
        "name": "lab/model",
        "revision": "v2",
        "local_files_only": True,
        "allow_patterns": ["config.json", "model.safetensors", "README.md"],
    }


def test_what_the_hub_refuses_is_an_error_with_its_words(tmp_path):
    with pytest.raises(UserError, match=r"lab/model: the hub refuses or cannot be reached \(.*cache"):
        SlideModel.from_pretrained("lab/model", local_files_only=True, cache_dir=tmp_path)


def test_a_push_makes_the_repository_and_uploads_the_three_files(run, monkeypatch, tmp_path):
    done = []

    class Api:
        def __init__(self, token=None):
            done.append(("token", token))

        def create_repo(self, repo, **options):
            done.append((repo, options))
            return huggingface_hub.RepoUrl(f"https://huggingface.co/someone/{repo}")

        def upload_folder(self, *, repo_id, folder_path, **options):
            done.append((repo_id, sorted(path.name for path in Path(folder_path).iterdir()), options))
            return "https://huggingface.co/commit"

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    model = load_model(run)
    options = {"private": True, "token": "t", "commit_message": "first", "branch": "b"}
    assert model.push_to_hub("model", **options) == "https://huggingface.co/commit"
    files = ["README.md", "config.json", "model.safetensors"]
    assert done == [
        ("token", "t"),
        ("model", {"exist_ok": True, "private": True}),
        ("someone/model", files, {"commit_message": "first", "revision": "b"}),
    ]
    assert model.save_pretrained(tmp_path / "named", push_to_hub=True) == "https://huggingface.co/commit"
    assert done[4][0] == "named" and (tmp_path / "named/README.md").is_file()


def test_neither_the_core_nor_a_local_folder_needs_the_library_of_the_hub(folder):
    code = (
        "import sys; sys.modules['huggingface_hub'] = None\nfrom gated_srp.models import SlideModel\n"
        f"model = SlideModel.from_pretrained({str(folder)!r}); model.save_pretrained({str(folder / 'again')!r})\n"
        "try: SlideModel.from_pretrained('lab/model')\nexcept ValueError as error: print(error.what)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "the hub needs the package huggingface_hub"
