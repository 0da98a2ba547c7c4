"""Every tool's feature file as it is -> `Bag`: TRIDENT, AtlasPatch, CLAM, STAMP, slideflow, tiatoolbox, plain arrays.

Shapes: N patches, C channels.
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gated_srp.data.bag import Bag, BagError, BagHeader
from gated_srp.data.files.containers import Container, opened
from gated_srp.data.files.siblings import (
    Places,
    about_old_name,
    canonical,
    encoder_of_folder,
    is_known,
    known_widths,
    may_be_same,
    only_positions,
    read_positions,
)
from gated_srp.data.files.stride import lattice_of, number, stamp_positions, text
from gated_srp.errors import Note, counted

_FEATURES = ("features", "feats", "patch_embeddings", "embeddings")
_MOST = 8  # names of arrays in a message
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def read_bag(
    path: str | Path,
    *,
    encoder: str | None = None,
    features_key: str | None = None,
    coords_key: str | None = None,
    coords: str | Path | None = None,
    stride: float | None = None,
) -> Bag:
    """Read one slide's features and patch positions from any tool's file.

    Args:
        path: .h5, .hdf5, .pt, .pth, .npz, .npy, .safetensors or .zarr; positions may be in a file beside it.
        encoder: which features, where a file holds several (any spelling).
        features_key, coords_key: names of the arrays, where they are unusual.
        coords: the folder of the files that hold the positions, where that is not beside the features.
        stride: overrules the one declared in the file and the one observed in the coordinates.

    Returns:
        A `Bag`. A file that cannot be used raises `BagError` with a ``kind`` and a cure.

    Example:
        >>> bag = read_bag("features_uni_v2/s17.h5")  # doctest: +SKIP
        >>> bag.features.shape, bag.stride, bag.stride_source  # doctest: +SKIP
        (torch.Size([5213, 1536]), 512.0, 'declared on coords (patch_size_level0), agrees with coordinates')
    """
    with opened(Path(path)) as file:
        key, header = _describe(file, encoder, (features_key, coords_key), coords, stride)
        features = file.read(key)
    features = features.reshape(header.shape).to(header.dtype)  # (N, C); a leading batch axis goes
    return Bag(features=features, **{field.name: getattr(header, field.name) for field in fields(header)})


def read_header(
    path: str | Path,
    *,
    encoder: str | None = None,
    features_key: str | None = None,
    coords_key: str | None = None,
    coords: str | Path | None = None,
    stride: float | None = None,
) -> BagHeader:
    """As `read_bag`, without the feature array: positions and metadata of many files in little time."""
    with opened(Path(path)) as file:
        return _describe(file, encoder, (features_key, coords_key), coords, stride)[1]


def is_slide_embedding(path: str | Path) -> bool:
    """Whether a file holds one vector per slide instead of features of patches."""
    try:
        read_header(path)
    except BagError as error:
        return error.kind == "slide_embedding"
    return False


def _describe(
    file: Container,
    encoder: str | None,
    keys: tuple[str | None, str | None],
    coords: str | Path | None,
    stride: float | None,
) -> tuple[str, BagHeader]:
    """The name of the feature array and the header; what can be refused is refused before the features are read."""
    names = file.names()
    key = _features_name(file, names, encoder, keys[0])
    root, own = file.attrs(), file.attrs(key)
    shape, dtype = _feature_shape(file, key, text(root, "feat_type"))
    positions = read_positions(file, names, keys[1], Path(coords) if coords else None)
    if len(positions.values) != shape[0]:
        if shape[0] == 1:
            what = f"this is a slide embedding: one row of features for {len(positions.values)} positions"
            cure = "Gated SRP needs one row per patch; point at the folder of patch features."
            raise file.error("slide_embedding", what, cure)
        cure = "They come from different extractions, or one was interrupted; extract the slide again."
        what = f"{counted(shape[0], 'row')} of features, but {len(positions.values)} positions"
        raise file.error("row_mismatch", what, cure)
    noted = _encoder_name(key, own, root)
    if encoder and noted and not may_be_same(encoder, noted) and is_known(encoder) and is_known(noted):
        raise file.error("wrong_encoder", _other_encoder(noted, encoder), _RIGHT_ENCODER)
    places: Places = [positions.places[0], ("features", own), ("file root", root), *positions.places[1:]]
    lattice = lattice_of(stamp_positions(positions, places) if key == "feats" else positions, places, file.path, stride)
    warnings = lattice.pop("warnings")
    said = noted or encoder_of_folder(file.path)
    name = noted or (canonical(encoder) if encoder else said)
    return key, BagHeader(
        path=file.path,
        shape=shape,
        dtype=torch.float32 if dtype == torch.float64 else dtype,
        encoder=name,
        warnings=(*warnings, *_duplicates(lattice["coords"]), *_encoder_notes(name, said, encoder, shape[1])),
        **lattice,
        **_about_slide(places),
    )


def _about_slide(places: Places) -> dict[str, Any]:
    """What the file says about the slide image; the first place that says it counts."""
    attrs = {k: v for _, place in reversed(places) for k, v in place.items() if v is not None}
    width, height, image = number(attrs, "level0_width"), number(attrs, "level0_height"), text(attrs, "wsi_path")
    return {
        "wsi_path": Path(image) if image else None,
        "level0_size": (int(width), int(height)) if width and height else None,
        "mpp": number(attrs, "level0_mpp", "mpp", "mpp_x") or None,
        "magnification": number(attrs, "level0_magnification") or None,
    }


def _features_name(file: Container, names: Sequence[str], encoder: str | None, features_key: str | None) -> str:
    """The array to read: the caller's, the encoder's of a group, or the usual names in order."""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    listed = f"{', '.join(names[:_MOST]) or 'nothing'}{more}"
    for name in (features_key,) if features_key else _FEATURES:
        if name in names:
            return name
        if inside := [n for n in names if n.startswith(f"{name}/")]:
            return _of_encoder(file, inside, encoder)
    if features_key and file.has(features_key):
        return features_key
    if not features_key and only_positions(names):
        what = f"positions but no features (found: {listed})"
        cure = "Point at the folder of the features (CLAM: pt_files, which then finds these positions)."
        raise file.error("no_features", what, cure)
    looked = features_key or ", ".join(_FEATURES)
    cure = "Name the key with features_key, or run the tool's feature extraction."
    raise file.error("no_features", f"no features (found: {listed}; looked for {looked})", cure)


def _of_encoder(file: Container, inside: list[str], encoder: str | None) -> str:
    names = {name.rsplit("/", 1)[1]: name for name in inside}
    listed = ", ".join(names)
    if encoder is None:
        if len(names) == 1:
            return inside[0]
        example = canonical(next(iter(names)))
        what, cure = (
            f"features of several encoders ({listed})",
            f"Choose one: `encoder: {example}` in the YAML, encoder={example!r} in Python.",
        )
        raise file.error("several_encoders", what, cure, found=tuple(names))
    if encoder in names:
        return names[encoder]
    same = [full for name, full in names.items() if may_be_same(name, encoder)]
    if len(same) != 1:
        what = f"{len(same) or 'no'} features of {encoder!r} (found: {listed})"
        raise file.error("wrong_encoder", what, "Choose one by its name.", found=tuple(names))
    return same[0]


def _feature_shape(file: Container, key: str, level: str | None) -> tuple[tuple[int, int], torch.dtype]:
    """(N, C) and the type, or a refusal. ``level``: what STAMP says a row is: tile, slide, patient."""
    shape, dtype = file.spec(key)
    rows = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
    if rows and rows[0] == 0:
        cure = "Leave the slide out, or extract it with other tissue settings."
        raise file.error("empty", "no patches: no tissue was found", cure)
    one_row = len(rows) == 2 and rows[0] == 1 and file.path.parent.name.startswith("slide_features")
    if len(shape) == 1 or one_row or level in ("slide", "patient"):
        what = f"this is a slide embedding: '{key}' has shape {shape}, one vector per slide"
        cure = "Gated SRP needs features of patches, (N, C), with positions; point at the folder of patch features."
        raise file.error("slide_embedding", what, cure)
    if len(rows) != 2 or rows[1] == 0:
        what = f"'{key}' has shape {shape}, expected (N, C) or (1, N, C)"
        raise file.error("wrong_rank", what, "Name the right array: features_key.")
    if dtype not in _FLOATS:
        what = f"'{key}' holds {dtype}, expected floats"
        raise file.error("wrong_dtype", what, "Name the right array: features_key.")
    return (rows[0], rows[1]), dtype


def _duplicates(coords: Tensor) -> tuple[Note, ...]:
    again = len(coords) - len(np.unique(coords.double().numpy().view(np.complex128)))
    what = f"{again} of {len(coords)} patches have the coordinates of another"
    return (Note("warning", "duplicates", what, cure="Extract again if this is unexpected."),) if again else ()


def _encoder_name(key: str, own: dict[str, Any], root: dict[str, Any]) -> str | None:
    """What the file itself says: the array's attributes, its group, the file's attributes; in this order."""
    in_group = key.rsplit("/", 1)[1] if key.split("/")[0] in _FEATURES and "/" in key else None
    noted = text(own, "encoder", "extractor") or in_group or text(root, "encoder", "extractor")
    return canonical(noted) if noted else None


def _other_encoder(name: str, asked: str) -> str:
    return f"features of {name!r}, but {canonical(asked)!r} was asked for{about_old_name(name, asked)}"


_RIGHT_ENCODER = "Point at the others, or change encoder."


def _encoder_notes(name: str | None, said: str | None, asked: str | None, width: int) -> tuple[Note, ...]:
    notes: tuple[Note, ...] = ()
    if asked and said and canonical(asked) != said:  # by its folder, or by a name that the table lacks: may be an alias
        notes = (Note("warning", "encoder", _other_encoder(said, asked), cure=_RIGHT_ENCODER),)
    widths = known_widths(name or "")
    if widths and width not in widths:
        what = f"{name} gives {' or '.join(map(str, widths))} channels, these have {width}"
        notes += (Note("warning", "encoder", what, cure="Check what wrote them."),)
    return notes
