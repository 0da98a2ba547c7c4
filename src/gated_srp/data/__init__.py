"""Feature files, tables, splits and datasets (extra ``train``); names are resolved on first use (PEP 562)."""

from importlib import import_module
from typing import Any

_HOMES = {
    "Bag": "bag",
    "BagCache": "cache",
    "BagError": "bag",
    "BagHeader": "bag",
    "BagLoader": "loader",
    "Columns": "tables.columns",
    "Matches": "tables.matching",
    "Preparation": "prepared",
    "PreparedBag": "prepared",
    "SlideBag": "loader",
    "SlideDataset": "loader",
    "Split": "splits.rules",
    "Table": "tables.table",
    "assign_parts": "splits.rules",
    "canonical": "files.encoders",
    "find_bags": "files.siblings",
    "import_split": "splits.imported",
    "k_folds": "splits.rules",
    "match_slides": "tables.matching",
    "own_split": "splits.rules",
    "prepare": "prepared",
    "read_bag": "files.formats",
    "read_header": "files.formats",
    "read_table": "tables.table",
    "site_folds": "splits.rules",
    "write_split": "splits.rules",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
