"""Gated SRP in models that people already have."""

from gated_srp.foreign.handle import Handle, attach, handle_of
from gated_srp.foreign.site import Taps

__all__ = ["Handle", "Taps", "attach", "handle_of"]
