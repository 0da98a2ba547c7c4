"""Run by test_encoders.py in a process of its own: timm with a stub in place of torchvision, which must not enter the tests' process.

Usage: python timm_encoders.py FOLDER_WITH_TIMM
"""

import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

sys.path[:0] = [sys.argv[1], str(Path(__file__).resolve().parents[1])]

from torchvision_stub import install  # noqa: E402

install()

import pytest  # noqa: E402
import timm  # noqa: E402
import torch  # noqa: E402

from gated_srp.errors import UserError  # noqa: E402
from gated_srp.slides import pretrained as hub  # noqa: E402

# As their authors state them, in millions.
PARAMETERS = {"uni_v1": 303, "uni_v2": 681, "gigapath": 1135, "virchow2": 631}
REGISTERS = {"uni_v1": 0, "uni_v2": 8, "gigapath": 0, "virchow2": 4}


def check_size(name: str) -> None:
    """The model in full, on a device where nothing is computed."""
    with (
        patch.object(hub, "download", lambda repository: Path("none")),
        patch.object(hub, "load_weights", lambda model, file: None),
        torch.device("meta"),
    ):
        model = hub.BUILD[name](None)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert round(millions) == PARAMETERS[name], (name, millions)


def check_tokens(name: str, place: Path) -> None:
    """The same class in small, its weights from a file: CLS after the last norm, for Virchow2 beside the patches' mean."""
    create, made = timm.create_model, []

    def small(architecture: str, **settings: object) -> torch.nn.Module:
        settings |= {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 2 * settings.get("patch_size", 16)}
        if "patch14" in architecture:
            settings["img_size"] = 2 * settings.get("patch_size", 14)
        torch.manual_seed(len(made))
        made.append(create(architecture, **settings).eval())
        return made[-1]

    with patch.object(timm, "create_model", small):
        with patch.object(hub, "load_weights", lambda model, file: torch.save(model.state_dict(), file)):
            hub.BUILD[name](_touched(place / "pytorch_model.bin"))
        model = hub.BUILD[name](place).eval()  # the folder, another seed: its weights must come from the file
    side = made[0].patch_embed.img_size[0]
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        tokens = made[0].forward_features(images)  # (2, 1 + registers + 4, 32)
        found = model(images)
    assert tokens.shape[1] == 1 + REGISTERS[name] + 4, tokens.shape
    wanted = tokens[:, 0]
    if name == "virchow2":
        wanted = torch.cat([wanted, tokens[:, -4:].mean(1)], -1)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    with (
        patch.object(timm, "create_model", lambda *_, **__: torch.nn.Linear(3, 3)),
        pytest.raises(UserError, match="lacks 2 of 2 weights"),
    ):
        hub.BUILD[name](place)


def _touched(path: Path) -> Path:
    path.touch()
    return path


for encoder in PARAMETERS:
    check_size(encoder)
    with tempfile.TemporaryDirectory() as folder:
        check_tokens(encoder, Path(folder))
print("all checks passed")
