"""One spreadsheet -> one tidy table of slides."""
