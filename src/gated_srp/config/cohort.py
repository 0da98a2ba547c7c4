"""The settings of a cohort's YAML (names, types, bounds) and what they lead to: the table, the file of each slide, the parts
(``open_cohort(load_config("cohort.yaml")).slides(seed=42)``: a row per slide with slide, case, label(s), file and part)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import pandas as pd
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gated_srp.data.columns import Columns
from gated_srp.data.files.siblings import embeddings_left_out, look_into, nothing_found
from gated_srp.data.matching import Matches, match_features, several_files
from gated_srp.data.prepared import READING, Preparation
from gated_srp.data.splits import Split, assign_parts, check_fold, k_folds, own_split, site_folds
from gated_srp.data.table import Table, read_table
from gated_srp.errors import Note, UserError
from gated_srp.machine import precision_name
from gated_srp.models import ARMS, Sizes, arm_settings, find_arm
from gated_srp.tasks import task_names

if TYPE_CHECKING:
    from gated_srp.config.presets import Cohort

SEEDS = (42, 43, 44, 45, 46)  # the paper's


@dataclass(frozen=True)
class Gate:
    """Signed range and hidden width; ``note`` says where they come from if the paper gives none for this use."""

    delta: float
    hidden_dim: int
    note: str = ""


_SIZES = Sizes()  # the paper's
_GATE = Gate(delta=_SIZES.delta, hidden_dim=_SIZES.hidden_dim)  # for cohorts that the paper did not tune
_no_switch = BeforeValidator(lambda value: str(value) if isinstance(value, bool) else value)  # true would be 1


def _tupled(value: Any) -> Any:
    return (value,) if isinstance(value, str | int | Path) else value


def _listed_or_named(value: Any) -> Any:
    """A list is one of slides, a single value the name of a file of them."""
    return tuple(map(str, value)) if isinstance(value, list | tuple) else value and Path(value)


def _section(key: str) -> BeforeValidator:
    """A section that may be written as its most used value alone: ``folds: 5``, ``cache: DIR``."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str | int | Path) else value)


def _known_task(value: str) -> str:
    if value in (names := task_names()):
        return value
    *first, last = map(repr, names)
    raise ValueError(f"input should be {', '.join(first)} or {last}")


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False, protected_namespaces=()
    )


class ModelConfig(_Section):
    """Sizes of the slide model. ``delta`` and ``hidden_dim`` of None: the paper's for the cohort, see `CohortConfig.sizes`."""

    dim: int = Field(default=_SIZES.dim, ge=1, le=2**14)
    depth: int = Field(default=_SIZES.depth, ge=1, le=1000)
    num_heads: int = Field(default=_SIZES.num_heads, ge=1, le=2**14)
    num_landmarks: int = Field(default=_SIZES.num_landmarks, ge=1, le=2**16)
    delta: float | None = Field(default=None, gt=0)
    hidden_dim: int | None = Field(default=None, ge=1, le=2**16)
    drop_path: float = Field(default=_SIZES.drop_path, ge=0, lt=1)


class TrainConfig(_Section):
    """How to train; `load_config` fills in the recipe of the preset or of the task."""

    epochs: int = Field(ge=1)
    patience: int | None = Field(default=None, ge=1)
    lr: float = Field(gt=0)
    gate_lr: float = Field(default=1.0, gt=0)  # factor on lr for the parameters of gates; 1 is the paper
    weight_decay: float = Field(ge=0)
    accumulation: int = Field(ge=1)
    batch_size: int = Field(default=1, ge=1)
    pack: Annotated[int | None, _no_switch] = Field(default=None, ge=1)
    drop_last: bool = False
    clip: float | None = Field(default=1.0, gt=0)
    warmup: float = Field(default=0.05, ge=0, le=1)
    precision: Annotated[Literal["auto", "32", "bf16"], BeforeValidator(precision_name)] = "auto"
    checkpointing: bool = False
    only: Literal["gate"] | None = None
    init: Literal["pretrained"] | None = None  # of `gated-srp pretrain`, for the same arm, seed and fold
    workers: int = Field(default=1, ge=0, le=1024)
    loss: str | None = None  # of those that the task has; None: its first
    class_weights: Literal["balanced"] | dict[str, Annotated[float, Field(gt=0)]] | None = None
    sampling: Literal["balanced"] | None = None
    log: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow"], ...], BeforeValidator(_tupled)] = ()

    def epoch_bags(self, bags: int) -> int:
        """Of so many bags those that an epoch trains on: with ``drop_last`` whole batches alone, if there is one."""
        return (bags - bags % self.batch_size if self.drop_last else 0) or bags

    def steps(self, bags: int) -> int:
        """Of the optimiser, in all epochs."""
        return self.epochs * math.ceil(self.epoch_bags(bags) / (self.accumulation * self.batch_size))


class SelectConfig(_Section):
    """Which of the epochs that share the best validation score is kept: the ``first``, or the one of the lowest validation ``loss``."""

    ties: Literal["first", "loss"] = "first"


class FoldsConfig(_Section):
    """``folds: 5``, or ``folds: {number: 5, by: site}`` to keep each site in one part."""

    number: int = Field(ge=2)
    by: Literal["patient", "site"] = "patient"


class CacheConfig(_Section):
    """``cache: DIR``, or ``cache: {folder: DIR, dtype: float16}``; None keeps the features as they are stored."""

    folder: Path | None = None
    dtype: Literal["float32", "float16", "bfloat16"] | None = None


class ImagesConfig(_Section):
    """``images: DIR`` instead of ``features``, or ``images: {folder: DIR, size: 272, patch: 16}``: sides in pixels."""

    folder: Path | None = None
    size: int = Field(default=272, ge=1, le=2**14)
    patch: int = Field(default=16, ge=1, le=2**14)


class CovariatesConfig(_Section):
    """Columns of the table that the head sees beside the slide: ``covariates: {numeric: age, categorical: [sex, stage]}``."""

    numeric: Annotated[tuple[str, ...], BeforeValidator(_tupled)] = ()
    categorical: Annotated[tuple[str, ...], BeforeValidator(_tupled)] = ()


class RegionsConfig(_Section):
    """``regions: {annotations: DIR, only: tumour, exclude: [pen, fold]}``: patches inside or outside of what was drawn."""

    annotations: Path
    only: Annotated[tuple[str, ...], BeforeValidator(_tupled)] = ()
    exclude: Annotated[tuple[str, ...], BeforeValidator(_tupled)] = ()
    cover: float = Field(default=0.5, gt=0, le=1)
    unannotated: Literal["refuse", "whole"] = "refuse"


class CohortConfig(_Section):
    """All settings of one cohort, complete and checked. Made by `load_config`."""

    name: str = Field(pattern=r"^\w[\w .+-]*$")
    cohort: str | None = None
    labels: Path | None = None
    features: Annotated[tuple[Path, ...], BeforeValidator(_tupled)] = ()
    features_low: Path | None = None
    images: Annotated[ImagesConfig | None, _section("folder")] = None
    coords: Path | None = None
    encoder: str | None = None
    table: Path | None = None
    slides: Path | None = None
    sheet: str | None = None
    task: Annotated[str, AfterValidator(_known_task)] | None = None
    target: str | tuple[str, ...] | None = None
    classes: tuple[str, ...] | None = None
    missing: Annotated[tuple[str, ...] | None, BeforeValidator(_tupled)] = None
    time: str | Annotated[tuple[str, ...], Field(min_length=2, max_length=2)] | None = None
    event: str | None = None
    censorship: str | None = None
    slide: str | None = None
    case: str | None = None
    site: str | None = None
    covariates: CovariatesConfig | None = None
    metric: str
    exclude: Annotated[Path | tuple[str, ...] | None, BeforeValidator(_listed_or_named)] = None
    bag: Literal["slide", "patient"] = "slide"
    score: Literal["slide", "case"]
    select: SelectConfig = SelectConfig()
    stride: float | None = Field(default=None, gt=0)
    window: int = Field(default=3, ge=3, le=255)
    lattice: Literal["floor", "exact"] = "floor"
    order: Literal["file", "raster"] = "file"
    coords_key: str | None = None
    features_key: str | None = None
    model: ModelConfig = ModelConfig()
    train: TrainConfig
    arms: Annotated[tuple[str, ...], BeforeValidator(_tupled)] = ("na", "xsa", "diff", "gated_srp")
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_tupled)] = SEEDS
    folds: Annotated[FoldsConfig | None, _section("number")] = None
    split: Path | None = None
    cap: int | None = Field(default=None, ge=1)
    regions: RegionsConfig | None = None
    cache: Annotated[CacheConfig, _section("folder")] = CacheConfig()
    out: Path = Path("runs")

    @model_validator(mode="after")
    def _together(self) -> "CohortConfig":
        """Settings that exclude or need each other."""
        if self.event and self.censorship:
            raise ValueError("event and censorship say the opposite of each other; name one of them")
        if self.labels and not self.cohort:
            raise ValueError("labels are a preset's public files; name the preset with cohort, or use table")
        if self.labels and self.table:
            raise ValueError("labels (a preset's public files) and table (your own) are both set; keep one")
        if (self.slides or self.covariates) and not self.table:
            raise ValueError("slides is joined to a patient table, covariates are its columns; name that with table")
        if self.bag == "patient" and (self.images or self.score == "slide"):
            raise ValueError("bag: patient: it has no use with score: slide, nor with images; leave one out")
        if self.features_low and (self.images or self.regions or self.bag == "patient"):
            raise ValueError("features_low: it goes with neither images, nor regions, nor bag: patient; leave one out")
        if self.window % 2 == 0:
            raise ValueError(f"window is {self.window}, expected an odd number (3 gives 8 neighbours, 5 gives 24)")
        if self.images:
            own = ("features", "coords", "encoder", "stride", "coords_key", "features_key", "cap", "regions")
            for key in [key for key in own if getattr(self, key)] + (["cache"] if self.cache.folder else []):
                raise ValueError(f"images and {key} are both set; {key} is for feature files, keep one of them")
            if (size := self.images.size) % (n := self.images.patch) or size < 2 * n:
                raise ValueError(f"images.size is {size}, expected a multiple of images.patch ({n}), twice it at least")
        for key, listed in (("arms", self.arms), ("seeds", self.seeds)):
            if not listed or len(set(listed)) < len(listed):
                raise ValueError(f"{key} must name at least one, each once")
        return self

    @property
    def main_arm(self) -> str:
        """What is trained unless another arm is named: the first Gated SRP among the arms, else the first of them."""
        names = [arm_settings(name)[0] for name in self.arms]
        return next((arm for arm in names if arm in ARMS and ARMS[arm].method), names[0])

    @property
    def unit(self) -> str:
        """The column of a cohort's slides that tells bags apart."""
        return "case" if self.bag == "patient" else "slide"

    @property
    def at_once(self) -> int:
        """Bags that go through a model together: images fill a batch."""
        return self.train.batch_size if self.images else 1

    def together(self, largest: int) -> int:
        """Patches that go through a model together at most, if a bag has at most ``largest``."""
        return max(largest * self.at_once, min(self.train.pack or 0, largest * self.train.accumulation))

    @property
    def preset(self) -> "Cohort | None":
        """The paper's cohort that this one is, or follows."""
        if self.cohort is None:
            return None
        from gated_srp.config.presets import find_cohort  # not above: a cohort of one's own needs none of it

        return find_cohort(self.cohort)

    @property
    def columns(self) -> Columns:
        """Columns of the user's table that were named."""
        return Columns(**{key: getattr(self, key) for key in Columns.__dataclass_fields__})

    @property
    def reading(self) -> dict[str, Any]:
        """Keyword arguments of `read_bag` and `read_header`."""
        return {key: getattr(self, key) for key in READING}

    def gate(self, arm: str = "gated_srp") -> Gate:
        """Range and width of an arm's gate: the user's, else the paper's for cohort, encoder and trunk, else 1 and 64."""
        base = self.preset.gate(self.encoder or "uni_v2", trunk=find_arm(arm).trunk) if self.preset else _GATE
        delta, hidden = self.model.delta or base.delta, self.model.hidden_dim or base.hidden_dim
        return Gate(delta, hidden, "" if self.model.delta and self.model.hidden_dim else base.note)

    def sizes(self, arm: str = "gated_srp") -> dict[str, Any]:
        """Keyword arguments of ``build_model`` for an arm, nothing left open."""
        return self._model(arm) | ({"num_patches": (self.images.size // self.images.patch) ** 2} if self.images else {})

    def _model(self, arm: str) -> dict[str, Any]:
        return self.model.model_dump() | {key: getattr(self.gate(arm), key) for key in ("delta", "hidden_dim")}

    def resolved(self, arm: str | None = None) -> dict[str, Any]:
        """Everything as plain values for a YAML file, paths absolute; with ``arm`` the settings of that arm alone."""
        own = {"model": self._model(arm or self.main_arm), **({"arms": [arm]} if arm else {})}
        return self.model_dump(mode="json") | own


# What they lead to ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CohortData:
    """What the settings lead to. Splits are drawn on the whole table; slides without a file are left out afterwards."""

    config: CohortConfig
    table: Table
    matches: Matches
    left_out: tuple[Note, ...] = ()  # files that are no features of patches

    @cached_property
    def notes(self) -> tuple[Note, ...]:
        """How the table was read and which slides have no file."""
        return (*self.table.notes, *self.left_out, *(Note("note", "files", line) for line in self.matches.report()))

    def split(self, seed: int, fold: int = 0) -> Split:
        """The split of a seed (and of a fold): imported, published, or drawn by patient."""
        config, table = self.config, self.table
        number = config.folds.number if config.folds else 1
        if config.split is not None:
            from gated_srp.data.imported_splits import import_fold

            return import_fold(config.split, table, fold=fold, folds=number if config.folds else None, seed=seed)
        check_fold(fold, number)
        if config.folds:
            return (site_folds if config.folds.by == "site" else k_folds)(table, number, seed)[fold]
        if config.preset and config.labels:
            return config.preset.read_split(config.labels, seed, table=table)
        return own_split(table, seed)

    def slides(self, seed: int, fold: int = 0) -> pd.DataFrame:
        """The table's rows that have a file and a part, in the table's order, with columns ``file`` and ``part``."""
        return self.with_parts(self.split(seed, fold))

    def with_parts(self, split: Split) -> pd.DataFrame:
        """As `slides`, for a split at hand."""
        frame = self.table.frame
        frame = frame.assign(file=frame["slide"].map(self.matches.found), part=assign_parts(split, self.table))
        return frame.dropna(subset=["file", "part"]).reset_index(drop=True)


class FoundFiles(NamedTuple):
    """The feature files of a cohort, or its images, and what is to be said of others."""

    files: list[Path]
    notes: tuple[Note, ...] = ()


def open_cohort(config: CohortConfig, files: FoundFiles | None = None) -> CohortData:
    """Read the table and find each slide's file; ``files`` are those to choose from, where they were found already."""
    found, notes = files or find_files(config)
    table = read_labels(config, found)
    matches, more = match_features(list(table.frame["slide"]), found, config.exclude)
    if not matches.found:
        for note in several_files(matches, config.slide):
            raise UserError(note.what, cure=note.cure, kind=note.kind)
        what = f"none of {len(table.frame)} slides has a file of its name: the first slide is "
        what += f"{table.frame['slide'].iloc[0]!r}, the first file {str(found[0])!r}"
        raise UserError(what, cure=f"Check `slide` and `{'images' if config.images else 'features'}`.", kind="matching")
    return CohortData(config, table, matches, notes + more)


def find_files(config: CohortConfig) -> FoundFiles:
    """All feature files of the cohort's folders, or its images."""
    if config.images is not None:
        if config.images.folder is None:
            raise UserError("`images` is not set", where=config.name, cure="Name their folder.", kind="setting")
        from gated_srp.data.files.images import find_images

        return FoundFiles(find_images(config.images.folder))
    if not config.features:
        raise UserError("`features` is not set", where=config.name, cure="Name their folder.", kind="setting")
    folders = [look_into(folder, encoder=config.encoder) for folder in config.features]
    if not any(folder.bags for folder in folders):
        raise nothing_found(config.features[0], encoder=config.encoder)
    notes = embeddings_left_out([path for folder in folders for path in folder.embeddings])
    return FoundFiles([path for folder in folders for path in folder.bags], notes)


def read_labels(config: CohortConfig, files: Iterable[Path] = ()) -> Table:
    """The cohort's table of slides: the preset's public files, or the user's own."""
    if config.table is not None:
        how: Any = {key: getattr(config, key) for key in ("task", "classes", "sheet", "missing", "covariates")}
        return read_table(config.table, config.columns, **how, slide_table=config.slides, files=files)
    if config.preset and config.labels:
        return config.preset.read_labels(config.labels)
    wanted = "`labels`, the folder of its public files," if config.preset else "`table`, one row per slide or patient,"
    raise UserError(f"{wanted} is not set", where=config.name, cure="Labels cannot be read.", kind="setting")


def preparation(config: CohortConfig) -> Preparation:
    """The settings of a cohort that change what a model sees of a file."""
    images = regions = None
    if config.images is not None:
        from gated_srp.data.files.images import ImageGrid

        images = ImageGrid(config.images.size, config.images.patch)
    if config.regions is not None:
        from gated_srp.data.regions import Regions

        regions = Regions.of(dict(config.regions))
    same = {key: getattr(config, key) for key in ("window", "lattice", "order", "cap", "features_low")}
    return Preparation(**config.reading, **same, dtype=config.cache.dtype, images=images, regions=regions)
