"""What runs and slides show: tables, figures, maps and pages (extra ``train``)."""
