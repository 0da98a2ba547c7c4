"""Fixtures of the tests on slides."""

from images import real_slide  # noqa: F401

collect_ignore = ["timm_encoders.py"]  # it puts a stub in place of torchvision: a process of its own runs it
