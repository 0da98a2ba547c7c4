"""Training: runs that resume and explain themselves. Names are resolved on first use (PEP 562)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gated_srp.errors import Interrupted
    from gated_srp.training.train import train_run

__all__ = ["Interrupted", "train_run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gated_srp.training' has no attribute {name!r}")
    from gated_srp import errors
    from gated_srp.training import train

    return getattr(errors if name == "Interrupted" else train, name)
