"""Training: runs that resume and explain themselves. Names are resolved on first use (PEP 562)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gated_srp.training.callbacks import Interrupted
    from gated_srp.training.train import train_run

__all__ = ["Interrupted", "train_run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gated_srp.training' has no attribute {name!r}")
    from gated_srp.training import callbacks, train

    return getattr(callbacks if name == "Interrupted" else train, name)
