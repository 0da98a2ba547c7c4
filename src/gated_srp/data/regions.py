"""Patches inside or outside drawn regions: the rule, and which rows of a slide it keeps.

    regions = Regions(annotations=Path("drawn"), only=("tumour",), exclude=("pen",))
    regions.look(read_header("feats/s17.h5")).rows     # (L,) rows of the file

Shapes: N patches of a slide, L of them that are kept.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gated_srp.data.annotations import (
    DRAWINGS,
    ENDINGS,
    Annotations,
    annotations_of,
    plain,
    read_annotations,
    refuse_unknown,
)
from gated_srp.data.bag import BagHeader
from gated_srp.data.matching import slide_stem
from gated_srp.errors import Note, UserError, counted

_CLASSES = ("only", "exclude")
_RECENT = 2.0  # seconds: a folder that changed so lately may change again within the tick of its clock
_listed: dict[Path, tuple[dict[Path, int], dict[str, list[Path]]]] = {}  # folders and their times, and files by slide


@dataclass(frozen=True, eq=False)
class Kept:
    """What a rule leaves of a slide: its ``rows`` (L,), the classes drawn there (None: nobody drew on it), and what to say."""

    rows: Tensor
    classes: tuple[str, ...] | None
    note: Note


@dataclass(frozen=True, kw_only=True)
class Regions:
    """A patch is kept if regions of ``only`` cover at least the share ``cover`` of its area, and regions of ``exclude`` less.

    ``annotations``: the folder with a file per slide, of the slide's name. ``unannotated``: a slide without a file is refused, or
    used whole with a note. Without ``only`` and ``exclude`` it names a folder alone, for a model that brings the rule.
    """

    annotations: Path
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    cover: float = 0.5
    unannotated: Literal["refuse", "whole"] = "refuse"

    def __post_init__(self) -> None:
        if not 0 < self.cover <= 1:
            raise UserError(f"{self.cover:g}, expected above 0, up to 1.", where="cover")
        for name in self.only:
            if plain(name) in map(plain, self.exclude):
                raise UserError(f"the class {name!r} is in only and in exclude", where="regions", cure="Keep one.")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Regions":
        """From plain values, as a cohort's YAML or a caller writes them; one class may stand for a list of it."""
        names = {
            key: (value,) if isinstance(value := settings.get(key) or (), str) else tuple(value) for key in _CLASSES
        }
        if unknown := set(settings) - set(cls.__dataclass_fields__):
            cure = f"Known: {', '.join(cls.__dataclass_fields__)}."
            raise UserError(f"no such setting: {sorted(unknown)[0]}", where="regions", cure=cure)
        if not settings.get("annotations") or not any(names.values()):
            cure = "Name the folder (annotations), and the classes to keep (only) or to leave out (exclude)."
            raise UserError("nothing to choose by", where="regions", cure=cure)
        return cls(**{**settings, **names, "annotations": Path(settings["annotations"])})

    @property
    def rule(self) -> dict[str, Any]:
        """All but the folder, as a model's card and a feature file keep it."""
        return {
            "only": list(self.only),
            "exclude": list(self.exclude),
            "cover": self.cover,
            "unannotated": self.unannotated,
        }

    def __str__(self) -> str:
        """
        >>> str(Regions(annotations=Path("drawn"), only=("tumour",), exclude=("pen", "fold")))
        'at least 50 % inside tumour, less than 50 % inside pen or fold'
        """
        parts = [(self.only, "at least"), (self.exclude, "less than")]
        return ", ".join(f"{how} {100 * self.cover:g} % inside {' or '.join(names)}" for names, how in parts if names)

    def file_of(self, slide: str | Path) -> Path | None:
        """The file of a slide, by its own name (or that of its feature file); ``_mask`` may follow. Never that of a similar name."""
        found = _listing(self.annotations).get(_key(slide), [])
        if len(found) > 1:
            names = ", ".join(str(file.relative_to(self.annotations)) for file in found[:4])
            what = f"slide {slide_stem(slide)} has {counted(len(found), 'file')} of annotations: {names}"
            raise UserError(what, where=self.annotations, cure="Keep one of them in the folder.", kind="annotations")
        return found[0] if found else None

    def needed(self, slide: str | Path) -> Path | None:
        """As `file_of`; a slide without one is refused unless such slides are used whole."""
        if (file := self.file_of(slide)) is None and self.unannotated == "refuse":
            cure = "Draw on the slide, leave it out, or use slides without a file whole: `unannotated: whole` below `regions`"
            raise UserError(
                f"no file of annotations in {self.annotations} has the name of slide {slide_stem(slide)!r}",
                where=slide,
                cure=f"{cure} (--unannotated whole).",
                kind="unannotated",
            )
        return file

    def inside(self, drawn: Annotations, corners: np.ndarray, side: float) -> np.ndarray:
        """(N,) which squares of ``side`` with top-left ``corners`` (N, 2) are kept."""
        kept = np.ones(len(corners), bool)
        if self.only:
            kept &= drawn.coverage(corners, side, self.only) >= self.cover
        if self.exclude:
            kept &= drawn.coverage(corners, side, self.exclude) < self.cover
        return kept

    def look(self, header: BagHeader) -> Kept:
        """What is left of the slide of a feature file; nothing is an error."""
        count, file = len(header.coords), self.needed(header.path)
        if file is None:
            said = Note("warning", "regions", "no file of annotations: the whole slide is used")
            return Kept(torch.arange(count), None, said)
        drawn = annotations_of(file, header)
        side = float(header.patch_size_level0 or header.stride)
        rows = np.flatnonzero(self.inside(drawn, header.coords.double().numpy(), side))
        if not len(rows):
            raise self.nothing_left(count, drawn.classes, header.path)
        lacking = [name for name in self.exclude if plain(name) not in map(plain, drawn.names)]
        more = f"; nothing of {' or '.join(lacking)} is drawn on it" if lacking else ""
        more += "".join(f"; {note.what}. {note.cure}" for note in drawn.notes if note.kind == "qupath")
        words = f"{len(rows)} of {counted(count, 'patch')} kept: {self}{more}"
        return Kept(torch.from_numpy(rows), drawn.names, Note("note", "regions", words))

    def nothing_left(self, count: int, classes: Sequence[str], where: str | Path) -> UserError:
        """A slide of which the rule leaves no patch."""
        what = f"no patch is left: none of {count} is {self} (drawn on it: {', '.join(classes) or 'nothing'})"
        cure = "Correct the classes or the share, or leave the slide out (`exclude` in the YAML)."
        return UserError(what, where=where, cure=cure, kind="regions")

    def refuse_unknown_on(self, slides: Sequence[str]) -> None:
        """As `refuse_unknown_classes`, from the files of slides whose sizes are not known yet; masks keep their classes to themselves."""
        classes: set[str] = set()
        for file in filter(None, map(self.file_of, slides)):
            if file.suffix.lower() not in DRAWINGS:
                return
            with suppress(UserError):  # listed with its slide later
                classes.update(read_annotations(file, side=1.0).classes)
        self.refuse_unknown_classes(classes)

    def refuse_unknown_classes(self, classes: Iterable[str]) -> None:
        """``classes`` of all slides together: a class that is drawn nowhere is a mistake in its name."""
        refuse_unknown((*self.only, *self.exclude), classes, self.annotations)


def as_trained(rule: Mapping[str, Any] | None, given: Regions | None, where: str | Path) -> Regions | None:
    """The regions by which a model's bags are made: the rule of its card with the folder that was given; others are refused."""
    chosen = given is not None and bool(given.only or given.exclude)
    if rule is None:
        if chosen:
            what = f"trained on all patches of its slides, but only those are asked for that are {given}"
            raise UserError(what, where=where, cure="Leave `regions` out, or train a model with it.", kind="regions")
        return None
    trained: dict[str, Any] = {
        "only": tuple(rule["only"]),
        "exclude": tuple(rule["exclude"]),
        "cover": float(rule["cover"]),
    }
    wanted = Regions(annotations=Path(), **trained, unannotated=rule.get("unannotated", "refuse"))
    if given is None:
        what = f"trained on patches {wanted}, and nothing says where these are on other slides"
        cure = "Name the folder of their annotations with --annotations (in a cohort's YAML: `regions`)."
        raise UserError(what, where=where, cure=cure, kind="regions")
    if not chosen:
        return replace(wanted, annotations=given.annotations)
    if any(_plain(trained[key]) != _plain(getattr(given, key)) for key in trained):
        what = f"trained on patches {wanted}, but those are asked for that are {given}"
        raise UserError(what, where=where, cure="Set `regions` as in its training.", kind="regions")
    return given


def folder_of(annotations: str | Path | None) -> Regions | None:
    """A folder of annotations for models that bring the rule themselves; None where there is none."""
    return None if annotations is None else Regions(annotations=Path(annotations))


def _plain(value: Any) -> Any:
    return sorted(map(plain, value)) if isinstance(value, tuple) else value


def _key(name: str | Path) -> str:
    return slide_stem(name).casefold().removesuffix("_patches")


def _listing(place: Path) -> dict[str, list[Path]]:
    """Files of annotations below a folder by the slide they name; listed again when one of its folders has changed."""
    if place.is_file():
        return {key: [place] for key in _keys(place)}
    if not place.is_dir():
        raise UserError("no such folder of annotations", where=place, kind="annotations")
    if place in _listed and all(_changed(folder) == then for folder, then in _listed[place][0].items()):
        return _listed[place][1]
    times, files = {place: _changed(place)}, defaultdict(list)
    for path in sorted(place.rglob("*")):
        if path.is_dir():
            times[path] = _changed(path)
        elif path.suffix.lower() in ENDINGS and not path.name.startswith("."):
            for key in _keys(path):
                files[key].append(path)
    if time.time() - max(times.values()) / 1e9 > _RECENT:
        _listed[place] = times, dict(files)
    return files


def _keys(path: Path) -> set[str]:
    key = _key(path.with_suffix(""))
    return {key, key.removesuffix("_mask")}


def _changed(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return -1
