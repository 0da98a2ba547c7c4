"""What a user is told: `UserError` for a mistake that can be mended, `Note` for what is good to know. Both carry their parts."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

Level = Literal["error", "warning", "note"]


def joined(what: str, where: str = "", cure: str = "") -> str:
    """One text of the parts: ``where: what. cure``.

    >>> joined("no 'coords' (found: features)", "feats/s17.h5", "Name the key with coords_key.")
    "feats/s17.h5: no 'coords' (found: features). Name the key with coords_key."
    """
    text = f"{where}: {what}" if where else what
    if not cure:
        return text
    return f"{text}{'' if text.endswith(('.', '?', '!')) else '.'} {cure}"


def counted(number: int, name: str) -> str:
    """
    >>> counted(1, "slide"), counted(1234, "slide"), counted(2, "patch"), counted(2, "entry"), counted(2, "epoch")
    ('1 slide', '1,234 slides', '2 patches', '2 entries', '2 epochs')
    """
    if number != 1:
        name = (
            f"{name[:-1]}ies" if name.endswith("ry") else f"{name}{'es' if name.endswith(('s', 'x', 'tch')) else 's'}"
        )
    return f"{number:,} {name}"


class UserError(ValueError):
    """A mistake that a user can mend; the command line prints it without a traceback.

    Raised at the boundary (files, tables, settings, arguments) and nowhere else, so that a plain ValueError still means a bug.

    Args:
        what: what is wrong, and what was expected. No final full stop where a cure follows.
        where: the file, slide, setting or argument it is about.
        cure: what to do, as a sentence.
        kind: a word for programs, e.g. ``no_coords``.

    >>> error = UserError("no 'coords' (found: features)", where="s17.h5", cure="Name the key with coords_key.", kind="no_coords")
    >>> str(error)
    "s17.h5: no 'coords' (found: features). Name the key with coords_key."
    >>> error.what, error.cure
    ("no 'coords' (found: features)", 'Name the key with coords_key.')
    """

    def __init__(self, what: str, *, where: str | PathLike[str] = "", cure: str = "", kind: str = "user") -> None:
        super().__init__(what)
        self.what, self.where, self.cure, self.kind = what, str(where), cure, kind

    def __str__(self) -> str:
        return joined(self.what, self.where, self.cure)

    def __reduce__(self) -> tuple[Any, ...]:
        """Survive the way back from another process."""
        return _rebuilt, (type(self), self.__dict__.copy())

    def changed(self, **parts: Any) -> UserError:
        """The same error with other parts, e.g. ``error.changed(where=slide)``."""
        return _rebuilt(type(self), self.__dict__ | parts)


def _rebuilt(kind: type[UserError], parts: dict[str, Any]) -> UserError:
    error = kind.__new__(kind, parts["what"])
    error.__dict__.update(parts)
    return error


class Interrupted(Exception):
    """Long work was asked to stop (Ctrl-C, a scheduler's SIGTERM) and has saved its state; the message says how to go on."""


@dataclass(frozen=True)
class Note:
    """Something to say that stops nothing: a file's oddity, a finding of `check`, a remark on a result.

    error: must be fixed before a run can be trusted. warning: look at it. note: good to know.
    """

    level: Level
    kind: str
    what: str
    where: tuple[str, ...] = ()
    cure: str = ""

    def __str__(self) -> str:
        return joined(self.what, ", ".join(self.where), self.cure)

    @property
    def line(self) -> str:
        """As one line for a screen or a list of remarks: warnings and errors say that they are.

        >>> Note("warning", "table", "only one class", cure="Add slides of another.").line
        'warning: only one class. Add slides of another.'
        """
        return str(self) if self.level == "note" else f"{self.level}: {self}"

    @classmethod
    def of(cls, error: UserError, *, kind: str | None = None, where: tuple[str, ...] | None = None) -> Note:
        """An error as a finding, when one bad file must not abort the whole survey."""
        places = (error.where,) if error.where else ()
        return cls("error", kind or error.kind, error.what, places if where is None else where, error.cure)
