"""Slides as vectors: what a trained model gives its head, and on request the tokens of their patches, in files that other tools read.

Shapes: B slides, D width of the model, N patches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from gated_srp.data.prepared import Preparation
from gated_srp.errors import Note, UserError
from gated_srp.files import whole_hdf5
from gated_srp.models import SlideTransformer
from gated_srp.progress import Progress, silent
from gated_srp.training.known import files_for, low_for, with_ids
from gated_srp.training.predict import RunModel, run_models, seen_by
from gated_srp.training.trained import TrainedRun, drawn_for

if TYPE_CHECKING:
    import h5py
    from torch import Tensor

    from gated_srp.data.loader import SlideBag

Sink = Callable[["SlideBag", np.ndarray], None]  # a bag and the tokens (N, D) of its patches


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Row b of ``features`` (B, D) is the vector of row b of ``slides``: slide, case, file, patches, seen_in_training."""

    slides: pd.DataFrame
    features: np.ndarray
    skipped: pd.DataFrame  # slide, file, problem
    notes: tuple[Note, ...]
    run: TrainedRun
    written: tuple[Path, ...] = ()

    def _repr_html_(self) -> str:
        return f"<p>{self.features.shape[0]} slides, {self.features.shape[1]} numbers each</p>{self.slides.to_html()}"


def embed(
    run: str | Path | TrainedRun,
    features: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    patches: bool = False,
    features_key: str | None = None,
    coords_key: str | None = None,
    coords: str | Path | None = None,
    table: str | Path | None = None,
    annotations: str | Path | None = None,
    features_low: str | Path | None = None,
    stride: float | None = None,
    force: bool = False,
    workers: int = 1,
    progress: Progress = silent,
) -> Embeddings:
    """Turn slides into vectors: what the model of a finished run gives its head (CLS after the last norm, or the pooled patches).

    Args:
        run: a run's folder, a model file, or a folder that ``save_pretrained`` wrote.
        features: a folder of feature files, one file, or a list of files.
        out: NAME.h5 (``embeddings`` and ``filenames``, as TITAN's), NAME.h5ad (AnnData), or a folder (SLIDE.h5 with ``features``, as TRIDENT's).
        patches: also write the tokens of patches, as they enter the last block, with their positions: one file per slide.
        features_key: name of the feature array, where it is unusual.
        coords_key: name of the array of positions, where it is unusual.
        coords: the folder of the positions, where it is not beside the features.
        table: a spreadsheet of slides and their patients, or a cohort's YAML: the ids are then its own. Covariates as in `predict`;
            they do not enter the vectors, which are of slides alone.
        annotations, features_low: as in `predict`.
        stride: distance between patches, where what the file says is wrong.
        force: as in `predict`.
        workers: processes that read ahead.
        progress: called after each slide.

    Returns:
        `Embeddings`: ``features`` (B, D), ``slides``, ``skipped``, ``notes``, ``written``.

    Example:
        >>> import gated_srp
        >>> found = gated_srp.embed("runs/BRACS/gated_srp/seed42", "feats/", out="slides.h5ad")  # doctest: +SKIP
        >>> found.features.shape  # doctest: +SKIP
        (547, 384)
    """
    trained = TrainedRun.open(run)
    files = files_for(trained, features) if isinstance(features, str | Path) else list(features)
    slides = with_ids(files, table, trained.covariates)
    target = None if out is None else _target(Path(out), files)
    if patches and target is None:
        raise UserError("tokens of patches are written, not kept in memory", where="patches", cure="Name `out`.")
    keys: dict[str, Any] = {"features_key": features_key, "coords_key": coords_key, "stride": stride}
    keys |= {"regions": drawn_for([trained], annotations), "features_low": low_for([trained], features_low)}
    reading = Preparation(**keys, coords=Path(coords) if coords else None)
    written: list[Path] = []
    sink = partial(_write_tokens, target, trained, written) if patches and target is not None else None
    found = run_models(
        [trained],
        slides,
        reading=reading,
        force=force,
        workers=workers,
        progress=progress,
        model=partial(_Embedder, sink=sink),
    )
    seen, notes = seen_by([trained], slides, found.slides)
    about = found.slides[["slide", "case", "file", "patches"]].assign(seen_in_training=seen)
    vectors = found.logits[0].numpy()
    if target is not None:
        written += write_embeddings(target, about, vectors, trained)
    return Embeddings(about, vectors, found.skipped, (*found.notes, *notes), trained, tuple(dict.fromkeys(written)))


class _Embedder(RunModel):
    """Gives what enters the head, (D,), instead of the logits; ``sink`` gets what enters the last block of patches."""

    def __init__(self, run: TrainedRun, sink: Sink | None = None) -> None:
        super().__init__(run)
        self.sink = sink
        self.caught: dict[str, Any] = {}
        self.model.get_submodule("head").register_forward_pre_hook(
            lambda module, args: self.caught.update(slide=args[0])
        )
        if sink is None:
            return
        if not isinstance(self.model, SlideTransformer):
            what = f"a {type(self.model).__name__} has no tokens of patches"
            raise UserError(what, where=run.path, cure="Leave --patches out; its slides have vectors all the same.")
        self.model.blocks[-1].register_forward_pre_hook(lambda module, args: self.caught.update(tokens=args[:2]))

    def __call__(self, bag: SlideBag) -> Tensor:
        super().__call__(bag)
        if self.sink is not None:
            rows, graph = self.caught["tokens"]
            self.sink(bag, rows[0, graph.before :][: bag.graph.lengths[0]].float().cpu().numpy())
        vector: Tensor = self.caught["slide"][0].float().cpu()
        if not len(vector):
            raise UserError("the model looks at no patch, so it has no vector of a slide", cure="Take another arm.")
        return vector.clone()


# Files ----------------------------------------------------------------------------------------------------------------


def _target(out: Path, files: Sequence[str | Path]) -> Path:
    """Where to write, if no feature file is there."""
    if out.suffix not in ("", ".h5", ".h5ad") and not out.is_dir():
        raise UserError(f"ending {out.suffix}, expected .h5, .h5ad or a folder", where=out)
    taken = {Path(file).resolve() for file in files}
    if out.resolve() in taken or any(path.parent == out.resolve() for path in taken):
        raise UserError("holds the features that are read", where=out, cure="Choose another file or folder.")
    return out


def write_embeddings(path: Path, slides: pd.DataFrame, vectors: np.ndarray, run: TrainedRun) -> list[Path]:
    """All slides in one file by its ending, or one file per slide in a folder."""
    if path.suffix == ".h5ad":
        names = slides["slide"].astype(str)
        write_h5ad(path, vectors, names, slides.drop(columns="slide"), about=_about(run))
        return [path]
    if path.suffix == ".h5":
        with whole_hdf5(path) as file:
            file["embeddings"] = vectors
            for name, column in (("filenames", "slide"), ("case", "case"), ("seen_in_training", "seen_in_training")):
                _strings(file, name, slides[column])
            file.attrs.update(_about(run))
        return [path]
    places = [_place(path, slide, ".h5") for slide in slides["slide"]]
    for place, slide, vector in zip(places, slides["slide"], vectors, strict=True):
        with whole_hdf5(place) as file:
            rows = file.create_dataset("features", data=vector)
            rows.attrs.update({"name": str(slide), "savetodir": "None", "encoder": "gated_srp"})
            file.attrs.update(_about(run))
    return places


def _write_tokens(target: Path, run: TrainedRun, written: list[Path], bag: SlideBag, tokens: np.ndarray) -> None:
    """One file per slide, beside the vectors: NAME_patches/SLIDE.h5 or .h5ad."""
    folder = target.with_name(f"{target.stem}_patches")
    parts = bag.parts or ((bag.slide, bag.path, len(tokens)),)
    ends = np.cumsum([rows for _, _, rows in parts])[:-1]
    coords = bag.coords[: bag.graph.lengths[0]].numpy()  # of two magnifications the fine patches
    for (slide, _, _), own, xy in zip(parts, np.split(tokens, ends), np.split(coords, ends), strict=True):
        place = _place(folder, slide, target.suffix or ".h5")
        if target.suffix == ".h5ad":
            names = pd.Series([f"{slide}_{x:g}_{y:g}_{row}" for row, (x, y) in enumerate(xy.tolist())])
            obs = pd.DataFrame({"slide": [slide] * len(own)})
            write_h5ad(place, own, names, obs, obsm={"spatial": xy}, about=_about(run))
        else:
            with whole_hdf5(place) as file:
                file["features"] = own
                rows = file.create_dataset("coords", data=xy)
                rows.attrs.update({"patch_size_level0": bag.stride, "unit": bag.unit, "name": slide})
                file["features"].attrs["encoder"] = "gated_srp"
                file.attrs.update(_about(run))
        written.append(place)


def _place(folder: Path, slide: str, ending: str) -> Path:
    place = folder / f"{slide}{ending}"
    if not place.resolve().is_relative_to(folder.resolve()):
        raise UserError("its name leads out of the folder", where=f"slide {slide!r}", cure="Write one file, NAME.h5.")
    return place


def _about(run: TrainedRun) -> dict[str, str]:
    said = {"model": run.card["settings"].get("arm"), "patch_encoder": run.encoder, "cohort": run.card.get("cohort")}
    said |= {"weights_sha256": run.card.get("tensors_sha256"), "written_by": "gated-srp"}
    return {key: str(value) for key, value in said.items() if value is not None}


def _strings(group: h5py.Group, name: str, values: Any) -> h5py.Dataset:
    import h5py

    return group.create_dataset(name, data=[str(value) for value in values], dtype=h5py.string_dtype())


def write_h5ad(
    path: Path,
    x: np.ndarray,
    names: pd.Series[str],
    obs: pd.DataFrame,
    *,
    obsm: Mapping[str, np.ndarray] | None = None,
    about: Mapping[str, str] | None = None,
) -> None:
    """AnnData's on-disk format (0.8 and later): a row of X per name, its columns in obs, arrays beside it in obsm, ``about`` in uns."""

    def kind(place: Any, encoding: str, version: str) -> Any:
        place.attrs.update({"encoding-type": encoding, "encoding-version": version})
        return place

    def frame(group: h5py.Group, index: Any, columns: pd.DataFrame | None) -> None:
        kind(group, "dataframe", "0.2.0")
        import h5py

        listed = [] if columns is None else [str(name) for name in columns]
        group.attrs["_index"] = "_index"
        group.attrs.create("column-order", data=listed, shape=(len(listed),), dtype=h5py.string_dtype())
        kind(_strings(group, "_index", index), "string-array", "0.2.0")
        for name in listed:
            column = columns[name]  # type: ignore[index]
            if pd.api.types.is_numeric_dtype(column):
                kind(group.create_dataset(name, data=column.to_numpy()), "array", "0.2.0")
            else:
                kind(_strings(group, name, column), "string-array", "0.2.0")

    with whole_hdf5(path) as file:
        kind(file, "anndata", "0.1.0")
        kind(file.create_dataset("X", data=x), "array", "0.2.0")
        frame(file.create_group("obs"), names, obs)
        frame(file.create_group("var"), [f"gated_srp_{number}" for number in range(x.shape[1])], None)
        for name in ("layers", "obsm", "obsp", "uns", "varm", "varp"):
            kind(file.create_group(name), "dict", "0.1.0")
        for name, values in (obsm or {}).items():
            kind(file["obsm"].create_dataset(name, data=values), "array", "0.2.0")
        if about:
            group = kind(file["uns"].create_group("gated_srp"), "dict", "0.1.0")
            for name, text in about.items():
                kind(group.create_dataset(name, data=text), "string", "0.2.0")
