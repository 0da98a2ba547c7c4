"""How a long computation reports how far it is: one callback that is called with an `Event`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    """``done`` of ``total`` of a ``stage`` (slides, patches, epochs, cells), or with ``total=None`` and a text a line to show."""

    stage: str
    done: int = 0
    total: int | None = None
    text: str = ""
    data: Any = None  # the object it is about, for callers that want to show more: an epoch's metrics, a study's board


Progress = Callable[[Event], None]


def silent(event: Event) -> None:
    """Show nothing: the default of every function of the API."""


def spoken(seconds: float) -> str:
    """A time as a person says it.

    >>> spoken(42), spoken(600), spoken(9000)
    ('42 s', '10 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
