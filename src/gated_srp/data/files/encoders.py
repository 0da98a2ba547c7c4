"""Encoder names: every tool spells them differently, and a width does not identify one (1536: UNI-v2, GigaPath, H-optimus)."""

import json
import re
from itertools import pairwise
from pathlib import Path

# canonical name: (widths it is known to give, other spellings). Case, dashes, dots and spaces do not matter.
_TABLE: dict[str, tuple[tuple[int, ...], str]] = {
    "uni_v1": ((1024,), "uni uni1 uni_1"),
    "uni_v2": ((1536,), "uni2 uni2_h uni_2 uni_v2_h univ2"),
    "conch_v1": ((512,), "conch conch1"),
    "conch_v15": ((768,), "conch1_5 conch_v1_5 conchv1_5 conch_1_5"),
    "virchow": ((2560, 1280), "virchow_v1 virchow_full virchow1"),
    "virchow2": ((2560, 1280), "virchow_v2 virchow2_full"),
    "gigapath": ((1536,), "prov_gigapath"),
    "hoptimus0": ((1536,), "h_optimus_0 hoptimus h_optimus h_optimus0 hoptimus_0"),
    "hoptimus1": ((1536,), "h_optimus_1 h_optimus1 hoptimus_1"),
    "phikon": ((768,), "phikon_v1"),
    "phikon_v2": ((1024,), "phikon2"),
    "ctranspath": ((768,), "chief_ctranspath"),
    "resnet50": ((1024, 2048), "resnet50_trunc resnet_50"),
    "medsiglip_448": ((1152,), "medsiglip med_siglip medsiglip448"),
    "vit_b16": ((768,), "vit_b_16 vit_base_patch16 vit_base_patch16_224 vitb16 vit_base"),
    "efficientnet_lite0": ((1280,), "tf_efficientnet_lite0 efficientnet_lite_0"),
}
_NAMES = {spelling: name for name, (_, others) in _TABLE.items() for spelling in (name, *others.split())}
_CODE_HASH = re.compile(r"-[0-9a-f]{8}$")  # STAMP's folder: <extractor>-<hash of its code>
_FOLDER = re.compile(r"^(?:slide_features_|features_|feats_|extracted-)(?P<name>.+)$")


def canonical(name: str) -> str:
    """The name this package uses; a name that the table lacks comes back tidied, never guessed.

    >>> canonical("UNI2-h"), canonical("prov-gigapath"), canonical("MyEncoder v3")
    ('uni_v2', 'gigapath', 'myencoder_v3')
    """
    tidy = re.sub(r"[^a-z0-9]+", "_", _CODE_HASH.sub("", name.strip().lower())).strip("_")
    return _NAMES.get(tidy, tidy)


def is_known(name: str) -> bool:
    """Whether the table has this encoder under any spelling."""
    return canonical(name) in _TABLE


def known_widths(name: str) -> tuple[int, ...]:
    """Feature widths the encoder is known to give; empty where it is unknown."""
    return _TABLE.get(canonical(name), ((), ""))[0]


def encoder_of_folder(path: Path) -> str | None:
    """The encoder that a feature file's folders name (``features_uni_v2``, STAMP's ``uni2-0f3ab21c``), or None.

    A folder's name is weak evidence: what the file says and what the caller says come first.

    >>> encoder_of_folder(Path("job/20x_256px_0px_overlap/features_uni_v2/s1.h5"))
    'uni_v2'
    """
    for folder, above in pairwise((*path.parts[-2:-5:-1], "")):
        named = _FOLDER.match(folder)
        name = named["name"] if named else folder
        # A name that the table lacks is believed in TRIDENT's tree alone: feats_h5 or features_2024 name no encoder.
        if is_known(name) or (named and above.endswith("px_overlap")):
            return canonical(name)
    return _encoder_of_slideflow(path.parent / "bags_config.json")


def _encoder_of_slideflow(config: Path) -> str | None:
    """From the class of the extractor, such as ``...CTransPathFeatures``."""
    try:
        extractor = json.loads(config.read_text("utf-8"))["extractor"]["class"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    name = str(extractor).rsplit(".", 1)[-1].removesuffix("Features")
    return canonical(name) if is_known(name) else None
