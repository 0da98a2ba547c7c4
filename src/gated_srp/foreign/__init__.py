"""Gated SRP in models that people already have."""

from gated_srp.foreign.handle import attach

__all__ = ["attach"]
