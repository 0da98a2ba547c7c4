"""Feature files, tables, splits, cohorts and datasets (extra ``train``); names are resolved on first use (PEP 562)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gated_srp.data.bag import Bag, BagError, BagHeader
    from gated_srp.data.cache import BagCache
    from gated_srp.data.cohort_data import CohortData, open_cohort
    from gated_srp.data.cohorts import COHORTS, Cohort, find_cohort
    from gated_srp.data.config import CohortConfig, load_config
    from gated_srp.data.dataset import BagLoader, SlideBag, SlideDataset
    from gated_srp.data.encoders import canonical
    from gated_srp.data.formats import read_bag, read_header
    from gated_srp.data.imported_splits import import_split
    from gated_srp.data.matching import Matches, match_slides
    from gated_srp.data.preparation import Preparation, PreparedBag, prepare
    from gated_srp.data.siblings import find_bags
    from gated_srp.data.splits import Split, assign_parts, k_folds, own_split, site_folds, write_split
    from gated_srp.data.table import Columns, Table, read_table

_HOMES = {
    "bag": ("Bag", "BagError", "BagHeader"),
    "cache": ("BagCache",),
    "cohort_data": ("CohortData", "open_cohort"),
    "cohorts": ("COHORTS", "Cohort", "find_cohort"),
    "config": ("CohortConfig", "load_config"),
    "dataset": ("BagLoader", "SlideBag", "SlideDataset"),
    "encoders": ("canonical",),
    "formats": ("read_bag", "read_header"),
    "imported_splits": ("import_split",),
    "matching": ("Matches", "match_slides"),
    "preparation": ("Preparation", "PreparedBag", "prepare"),
    "siblings": ("find_bags",),
    "splits": ("Split", "assign_parts", "k_folds", "own_split", "site_folds", "write_split"),
    "table": ("Columns", "Table", "read_table"),
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
    return getattr(import_module(f"gated_srp.data.{_HOME_OF[name]}"), name)
