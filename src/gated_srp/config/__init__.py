"""The one YAML that describes a cohort, what it leads to, and the paper's cohorts as presets; resolved on first use (PEP 562)."""

from importlib import import_module
from typing import Any

_HOMES = {
    "COHORTS": "presets",
    "Cohort": "presets",
    "CohortConfig": "schema",
    "CohortData": "cohort",
    "find_cohort": "presets",
    "load_config": "load",
    "open_cohort": "cohort",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
