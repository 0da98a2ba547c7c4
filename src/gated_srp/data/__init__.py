"""Feature files, tables, splits and datasets (extra ``train``); names are resolved on first use (PEP 562)."""

from gated_srp import lazily

_HOMES = {
    "Bag": "bag",
    "BagCache": "cache",
    "BagError": "bag",
    "BagHeader": "bag",
    "BagLoader": "loader",
    "Columns": "spreadsheet",
    "Matches": "matching",
    "Preparation": "prepared",
    "PreparedBag": "prepared",
    "SlideBag": "loader",
    "SlideDataset": "loader",
    "Split": "splits",
    "Table": "table",
    "assign_parts": "splits",
    "canonical": "files.siblings",
    "find_bags": "files.siblings",
    "import_split": "imported_splits",
    "k_folds": "splits",
    "match_slides": "matching",
    "own_split": "splits",
    "prepare": "prepared",
    "read_bag": "files.formats",
    "read_header": "files.formats",
    "read_table": "table",
    "site_folds": "splits",
    "write_split": "splits",
}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazily(__name__, _HOMES)
