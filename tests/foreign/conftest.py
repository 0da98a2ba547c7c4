"""timm_checks.py puts a stub in place of torchvision: it runs in a process of its own and must never be imported by pytest."""

collect_ignore = ["timm_checks.py"]
