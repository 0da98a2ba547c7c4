"""Feature files, tables, splits, cohorts and datasets (extra ``train``); names are resolved on first use (PEP 562)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gated_srp.config.load import CohortConfig, load_config
    from gated_srp.config.presets import COHORTS, Cohort, find_cohort
    from gated_srp.data.bag import Bag, BagError, BagHeader
    from gated_srp.data.cache import BagCache
    from gated_srp.data.cohort import CohortData, open_cohort
    from gated_srp.data.files.encoders import canonical
    from gated_srp.data.files.formats import read_bag, read_header
    from gated_srp.data.files.siblings import find_bags
    from gated_srp.data.loader import BagLoader, SlideBag, SlideDataset
    from gated_srp.data.prepared import Preparation, PreparedBag, prepare
    from gated_srp.data.splits.imported import import_split
    from gated_srp.data.splits.rules import Split, assign_parts, k_folds, own_split, site_folds, write_split
    from gated_srp.data.tables.matching import Matches, match_slides
    from gated_srp.data.tables.table import Columns, Table, read_table

_HOMES = {
    "gated_srp.data.bag": ("Bag", "BagError", "BagHeader"),
    "gated_srp.data.cache": ("BagCache",),
    "gated_srp.data.cohort": ("CohortData", "open_cohort"),
    "gated_srp.config.presets": ("COHORTS", "Cohort", "find_cohort"),
    "gated_srp.config.load": ("CohortConfig", "load_config"),
    "gated_srp.data.loader": ("BagLoader", "SlideBag", "SlideDataset"),
    "gated_srp.data.files.encoders": ("canonical",),
    "gated_srp.data.files.formats": ("read_bag", "read_header"),
    "gated_srp.data.splits.imported": ("import_split",),
    "gated_srp.data.tables.matching": ("Matches", "match_slides"),
    "gated_srp.data.prepared": ("Preparation", "PreparedBag", "prepare"),
    "gated_srp.data.files.siblings": ("find_bags",),
    "gated_srp.data.splits.rules": ("Split", "assign_parts", "k_folds", "own_split", "site_folds", "write_split"),
    "gated_srp.data.tables.table": ("Columns", "Table", "read_table"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "COHORTS",
    "Bag",
    "BagCache",
    "BagError",
    "BagHeader",
    "BagLoader",
    "Cohort",
    "CohortConfig",
    "CohortData",
    "Columns",
    "Matches",
    "Preparation",
    "PreparedBag",
    "SlideBag",
    "SlideDataset",
    "Split",
    "Table",
    "assign_parts",
    "canonical",
    "find_bags",
    "find_cohort",
    "import_split",
    "k_folds",
    "load_config",
    "match_slides",
    "open_cohort",
    "own_split",
    "prepare",
    "read_bag",
    "read_header",
    "read_table",
    "site_folds",
    "write_split",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'gated_srp.data' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
