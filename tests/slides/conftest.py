"""Fixtures of the tests on slides."""

from images import real_slide  # noqa: F401
