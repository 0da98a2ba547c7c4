"""The one YAML that describes a cohort, and the paper's cohorts as presets."""
