"""A cohort's settings turned into slides: the table, the file of each slide, who trains and who tests.

data = open_cohort(load_config("cohort.yaml"))
slides = data.slides(seed=42)                     # one row per slide: slide, case, label(s), file, part
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd
from torch import Tensor

from gated_srp.config.schema import CohortConfig
from gated_srp.data.files.siblings import find_bags
from gated_srp.data.loader import SlideDataset
from gated_srp.data.prepared import Preparation
from gated_srp.data.splits.rules import Split, assign_parts, k_folds, own_split, site_folds
from gated_srp.data.tables.matching import Matches, match_slides
from gated_srp.data.tables.table import Table, read_table
from gated_srp.errors import Note, UserError


@dataclass(frozen=True)
class CohortData:
    """What the settings lead to. Splits are drawn on the whole table; slides without a file are left out afterwards."""

    config: CohortConfig
    table: Table
    matches: Matches

    @cached_property
    def notes(self) -> tuple[Note, ...]:
        """How the table was read and which slides have no file."""
        return (*self.table.notes, *(Note("note", "files", line) for line in self.matches.report()))

    def split(self, seed: int, fold: int = 0) -> Split:
        """The split of a seed (and of a fold): imported, published, or drawn by patient."""
        config, table = self.config, self.table
        number = config.folds.number if config.folds else 1
        if not 0 <= fold < number:
            what = f"this cohort has {number}, counted from 0"
            raise UserError(what, where=f"fold {fold}", cure="Set `folds` for more.", kind="split")
        if config.split is not None:
            path = str(config.split).replace("{seed}", str(seed)).replace("{fold}", str(fold))
            from gated_srp.data.splits.imported import import_split

            return import_split(path, table, fold=fold, seed=seed)
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
        frame = self.table.frame.assign(
            file=self.table.frame["slide"].map(self.matches.found), part=assign_parts(split, self.table)
        )
        return frame.dropna(subset=["file", "part"]).reset_index(drop=True)


def open_cohort(config: CohortConfig, files: Iterable[Path] | None = None) -> CohortData:
    """Read the table and find each slide's file; ``files`` are those to choose from (images, say), else `find_files`."""
    found = find_files(config) if files is None else list(files)
    table = read_labels(config, found)
    matches = match_slides(list(table.frame["slide"]), found)
    if not matches.found:
        example = f"the first slide is {table.frame['slide'].iloc[0]!r}, the first file {str(found[0])!r}"
        what = f"none of {len(table.frame)} slides has a file of its name: {example}"
        cure = f"Check `slide` and `{'images' if config.images else 'features'}`."
        raise UserError(what, cure=cure, kind="matching")
    data = CohortData(config, table, matches)
    for note in data.notes:
        logging.getLogger(__name__).debug("%s: %s", config.name, note)
    return data


def find_files(config: CohortConfig) -> list[Path]:
    """All feature files of the cohort's folders, or its images."""
    if config.images is not None:
        if config.images.folder is None:
            cure = "Name the folder of the images."
            raise UserError("`images` is not set", where=config.name, cure=cure, kind="setting")
        from gated_srp.data.files.images import find_images

        return find_images(config.images.folder)
    if not config.features:
        cure = "Name the folder of the feature files."
        raise UserError("`features` is not set", where=config.name, cure=cure, kind="setting")
    found = [path for folder in config.features for path in find_bags(folder, encoder=config.encoder)]
    if not found:
        of = f" of {config.encoder}" if config.encoder else ""
        cure, where = "Check `features` and `encoder`.", ", ".join(map(str, config.features))
        raise UserError(f"no feature file{of} in it", where=where, cure=cure, kind="missing")
    return found


def read_labels(config: CohortConfig, files: Iterable[Path] = ()) -> Table:
    """The cohort's table of slides: the preset's public files, or the user's own."""
    if config.table is not None:
        return read_table(
            config.table,
            config.columns,
            task=config.task,
            classes=config.classes,
            sheet=config.sheet,
            slide_table=config.slides,
            files=files,
        )
    if config.preset and config.labels:
        return config.preset.read_labels(config.labels)
    wanted = (
        "`labels`, the folder of its public label files," if config.preset else "`table`, one row per slide or patient,"
    )
    raise UserError(f"{wanted} is not set", where=config.name, cure="Labels cannot be read.", kind="setting")


def preparation(config: CohortConfig) -> Preparation:
    """The settings of a cohort that change what a model sees of a file."""
    images = None
    if config.images is not None:
        from gated_srp.data.files.images import ImageGrid

        images = ImageGrid(config.images.size, config.images.patch)
    same = {key: getattr(config, key) for key in ("window", "lattice", "order", "cap")}
    return Preparation(**config.reading, **same, dtype=config.cache.dtype, images=images)


def slide_dataset(config: CohortConfig, slides: pd.DataFrame, targets: Tensor | None = None) -> SlideDataset:
    """The bags of these slides (as `CohortData.slides` gives them), with the settings and the cache of a cohort."""
    cache = None
    if config.cache.folder:
        from gated_srp.data.cache import BagCache

        cache = BagCache(config.cache.folder)
    return SlideDataset(slides, preparation(config), targets=targets, cache=cache)
