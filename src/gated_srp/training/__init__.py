"""Training: runs that resume and explain themselves. Names are resolved on first use (PEP 562)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gated_srp.training.job import train_run
    from gated_srp.training.keeper import Interrupted

__all__ = ["Interrupted", "train_run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gated_srp.training' has no attribute {name!r}")
    from gated_srp.training import job, keeper

    return getattr(keeper if name == "Interrupted" else job, name)
