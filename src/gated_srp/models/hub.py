"""Models as folders in the habit of the Hugging Face Hub: config.json, model.safetensors, README.md. huggingface_hub is asked only by name.

    model.save_pretrained("folder"); model.push_to_hub("lab/model"); SlideModel.from_pretrained("folder" or "lab/model")

The card is in model.safetensors and, the same, in config.json; `models.store` reads both.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Any

from gated_srp.errors import UserError, counted
from gated_srp.files import tensors_hash, write_json, write_whole
from gated_srp.models.slide import SlideModel
from gated_srp.models.store import CONFIG, load_card, load_model, save_model

_FILES = (CONFIG, "model.safetensors", "README.md")
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # a single word is a folder that is not there
_OWN = ("format", "settings", "tensors_sha256", "sha256")  # entries that saving writes itself


def save_folder(model: SlideModel, folder: Path, card: Mapping[str, Any] | None) -> None:
    """Write the three files; ``card``: what is true of the model, None: what its own card says, if that is still about these weights."""
    if card is None:
        card = getattr(model, "card", {})
        if card.get("tensors_sha256") not in (None, tensors_hash(model.state_dict())):
            raise UserError(
                "the weights are no longer those that the model's card describes (its temperature and statistics are of others)",
                where="model.card",
                cure="Say what holds now: save_pretrained(folder, card={**model.card, 'temperature': 1.0}).",
            )
    if not hasattr(model, "settings"):
        raise UserError("the model does not say how it was built", cure="Make it with gated_srp.models.build_model.")
    if folder.is_file():
        raise UserError("a file, expected a folder", where=folder)
    save_model(model, folder / "model.safetensors", {key: value for key, value in card.items() if key not in _OWN})
    written = load_card(folder / "model.safetensors", beside=False)
    write_json(folder / CONFIG, written)
    write_whole(folder / "README.md", readme(written))


def open_pretrained(name: str | Path, **options: Any) -> SlideModel:
    """From a folder, or from a repository of the hub; ``options`` are those of `huggingface_hub.snapshot_download`."""
    folder = Path(name)
    if folder.exists():
        return load_model(folder)
    if isinstance(name, Path) or not _REPOSITORY.fullmatch(name):
        cure = "Expected a folder that save_pretrained wrote, a run, or a repository of the hub such as lab/model."
        raise UserError("no such folder", where=name, cure=cure)
    with _errors_of_the_hub(name) as hub:
        found = hub.snapshot_download(name, allow_patterns=list(_FILES), **options)
    try:
        return load_model(found)
    except UserError as error:
        raise error.changed(where=f"{name} ({error.where})") from None


def upload(model: SlideModel, repo: str, card: Mapping[str, Any] | None, **options: Any) -> str:
    """Create the repository where it is missing and upload the three files in one commit; returns the commit's address."""
    access = {key: options.pop(key) for key in ("private", "token") if key in options}
    if "branch" in options:  # its name in PyTorchModelHubMixin
        options["revision"] = options.pop("branch")
    with tempfile.TemporaryDirectory() as draft:
        save_folder(model, Path(draft), card)
        with _errors_of_the_hub(repo) as hub:
            api = hub.HfApi(token=access.get("token"))
            repo = api.create_repo(repo, exist_ok=True, private=access.get("private")).repo_id
            return str(api.upload_folder(repo_id=repo, folder_path=draft, **options))


@contextmanager
def _errors_of_the_hub(name: str) -> Iterator[ModuleType]:
    """huggingface_hub; what it says of names, rights and the network is the user's to mend."""
    try:
        import huggingface_hub
    except ImportError:
        cure = "Install it: pip install huggingface_hub. A folder that is already here needs no such package."
        raise UserError("the hub needs the package huggingface_hub", where=name, cure=cure) from None
    try:
        yield huggingface_hub
    except (OSError, ValueError, RuntimeError) as error:  # HfHubHTTPError, LocalEntryNotFoundError, HFValidationError
        if isinstance(error, UserError):
            raise
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        cure = "Check the name, the network, and `hf auth login` for repositories that are not public."
        raise UserError(f"the hub refuses or cannot be reached ({first[:300]})", where=name, cure=cure) from error


# The README ------------------------------------------------------------------------------------------------------------


def readme(card: Mapping[str, Any]) -> str:
    """A model card in Markdown: what the model is, what it expects, how it is used."""
    settings, width = card["settings"], card["settings"].get("in_dim")
    rows = "\n".join(f"| {name} | {_cell(value)} |" for name, value in _facts(card))
    seen = card.get("seen")
    known = "" if seen is None else _SEEN.format(slides=counted(len(seen["train"]["slides"]), "name"))
    arm = str(settings.get("arm", "gated_srp"))
    named = ", ".join(f"{one['name']!r}: ..." for one in card.get("covariates") or ())
    beside = f", covariates={{{named}}}" if named else ""
    return _README.format(arm=_cell(arm), width=width, rows=rows, seen=known, beside=beside)


def _facts(card: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "task", card.get("task") or "not stated"
    for name, key in (("classes", "classes"), ("boundaries of time", "bin_edges")):
        if key in card:
            yield name, ", ".join(map(str, card[key]))
    yield "patch encoder", card.get("encoder") or "not stated"
    yield "channels of a patch", card["settings"].get("in_dim")
    strides = [f"{one['value']:g} {one['unit']}" for one in card.get("stride", ())]
    yield "distance of patches in training", ", ".join(strides) or "not stated"
    for one in card.get("covariates") or ():
        how = ", ".join(one["categories"]) if one.get("categories") else f"mean {one['mean']:.4g}, std {one['std']:.4g}"
        yield f"covariate {one['name']}", how
    for name in ("order", "window", "lattice", "cap", "dtype", "temperature", "calibration_slides", "cohort", "seed"):
        if card.get(name) is not None:
            yield name.replace("_", " "), card[name]
    yield "settings", json.dumps(card["settings"], sort_keys=True)
    yield "SHA-256 of the weights", card["tensors_sha256"]


def _cell(value: object) -> str:
    """Text of a table's cell: nothing in it is HTML, Markdown or another cell."""
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", escape(" ".join(str(value).split()), quote=False))


_SEEN = """
config.json holds salted hashes of the slides and patients of the training ({slides} of slides): `gated-srp predict` and `evaluate` say when one of
them comes back. The ids themselves are not there, but whoever has a list of ids can tell which of them were in the training.
"""

_README = """---
library_name: gated-srp
tags:
- gated-srp
- pathology
- whole-slide-images
- multiple-instance-learning
---

# {arm}: a slide model of gated-srp

It maps the features of a slide's patches, {width} channels each, and their positions to a prediction for the slide.

| | |
|---|---|
{rows}
{seen}
## Use

```python
import torch
from gated_srp.models import SlideModel
from gated_srp.training import open_slide

folder = "."                                             # this folder; of the hub: huggingface_hub.snapshot_download("lab/model")
model = SlideModel.from_pretrained(folder)
bag = open_slide(folder, "slide.h5"{beside})                     # refuses features of another encoder, width or stride
with torch.no_grad():
    logits = model(bag.features[None], bag.graph)
temperature = model.card.get("temperature", 1.0)         # calibrated probabilities: (logits / temperature).softmax(-1)
```

`gated-srp predict FOLDER features/ -o predictions.csv` does the same for many slides.

For research. It is no medical device, and nothing is known here of how it does on slides of another scanner, stain or hospital.
"""
