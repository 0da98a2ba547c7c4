"""The one YAML that describes a cohort, what it leads to, and the paper's cohorts as presets; resolved on first use (PEP 562)."""

from gated_srp import lazily

_HOMES = {
    "COHORTS": "presets",
    "Cohort": "presets",
    "CohortConfig": "cohort",
    "CohortData": "cohort",
    "find_cohort": "presets",
    "load_config": "load",
    "open_cohort": "cohort",
}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazily(__name__, _HOMES)
