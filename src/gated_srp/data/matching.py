"""Which feature file belongs to which slide of the table.

Ids are compared with the listing of files that were found and never joined to a folder: an id such as ``../x`` can
name nothing outside that listing.
"""

import os
import re
import unicodedata
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from gated_srp.data.files.containers import CONTAINERS
from gated_srp.data.files.formats import is_slide_embedding
from gated_srp.data.files.siblings import SLIDE_IMAGES, embeddings_left_out, encoder_of_folder
from gated_srp.errors import Note, UserError, counted

SLIDE_ENDINGS = (*SLIDE_IMAGES, ".png", ".jpg", ".jpeg")
_LONGER = 5  # files of longer names that a report lists
_NUMBERS = {2: "two", 3: "three"}
_BARCODE = re.compile(r"TCGA-[A-Z0-9]{2}-[A-Z0-9]{4}(?![A-Z0-9])", re.IGNORECASE)
_SECTION = re.compile(_BARCODE.pattern + r"-(\d\d)[A-Z]-\d\d-(DX|TS|BS|MS)", re.IGNORECASE)
Claims = dict[str, tuple[Path, ...]]  # slides and the files that fit


@dataclass(frozen=True)
class Matches:
    """Every slide is in exactly one of ``found``, ``missing``, ``several``, ``excluded`` and the values of ``shared``."""

    found: dict[str, Path]
    missing: tuple[str, ...]
    several: dict[str, tuple[Path, ...]]  # one slide, several files
    shared: dict[Path, tuple[str, ...]]  # one file, several slides
    unused: tuple[Path, ...]
    excluded: tuple[str, ...] = ()  # left out by the user
    by_prefix: tuple[
        str, ...
    ] = ()  # slides whose id is only how a file's name begins; a TCGA barcode before its UUID is the whole id

    @property
    def longer(self) -> dict[str, str]:
        """Slides that are used with a file of a longer name, and what the name has more."""
        return {
            slide: slide_stem(path)[len(slide_stem(slide)) :]
            for slide, path in self.found.items()
            if slide in set(self.by_prefix)
        }

    def report(self) -> tuple[str, ...]:
        """Every slide that cannot be used, one line each, after a line of counts."""
        bad = len(self.missing) + len(self.several) + sum(map(len, self.shared.values()))
        left_out = f", {len(self.excluded)} left out by `exclude`" if self.excluded else ""
        lines = [
            f"{counted(len(self.found), 'slide')} matched to files, {bad} not{left_out}; {counted(len(self.unused), 'file')} unused"
        ]
        lines += [f"{slide}: no file of this name" for slide in self.missing]
        longer = [f"{slide}: taken from {self.found[slide].name}, whose name begins so" for slide in self.longer]
        lines += longer if len(longer) <= _LONGER else [*longer[:_LONGER], f"... and {len(longer) - _LONGER} more so"]
        lines += [
            f"{slide}: {counted(len(files), 'file')} fit ({', '.join(map(str, files))}), so none is used"
            for slide, files in self.several.items()
        ]
        for file, slides in self.shared.items():
            lines.append(f"{', '.join(slides)}: all fit one file, {file}; correct the table")
        return tuple(lines)


def slide_stem(name: str | Path) -> str:
    """The name without folders and without the endings of feature and slide files; dots inside a name stay.

    Its characters are composed (NFC): macOS writes an umlaut into a file's name as two, a spreadsheet as one.

    >>> slide_stem("feats/TCGA-3Z-A93Z-01Z-00-DX1.79F4D1A6.svs.h5")
    'TCGA-3Z-A93Z-01Z-00-DX1.79F4D1A6'
    """
    stem = unicodedata.normalize("NFC", _parts(name)[-1])
    for endings in (tuple(CONTAINERS), SLIDE_ENDINGS):
        stem = next((stem[: -len(end)] for end in endings if stem.lower().endswith(end) and stem[: -len(end)]), stem)
    return stem


def tcga_patient(name: str | Path) -> str | None:
    """The patient in a TCGA barcode, if the name begins with one.

    >>> tcga_patient("tcga-3Z-A93Z-01Z-00-DX1.svs")
    'TCGA-3Z-A93Z'
    """
    stem = slide_stem(name)
    return stem[:12].upper() if _BARCODE.match(stem) else None


def tcga_section(name: str | Path) -> tuple[str, str] | None:
    """Sample type and section that a TCGA barcode names: DX is diagnostic (paraffin), TS, BS and MS are frozen; samples 10 to 19 are normal.

    >>> tcga_section("TCGA-3Z-A93Z-01Z-00-DX1.79F4D1A6.svs"), tcga_section("TCGA-3Z-A93Z-11A-01-TS1")
    (('01', 'DX'), ('11', 'TS'))
    """
    found = _SECTION.match(slide_stem(name))
    return (found[1], found[2].upper()) if found else None


def match_slides(slides: Sequence[str], files: Iterable[str | Path]) -> Matches:
    """Match by stem, then by stem without TRIDENT's ``_patches``, then by unique prefix; case only breaks ties.

    A file that one slide names in full is out of reach of another slide's prefix.
    """
    paths = sorted(Path(file) for file in files)
    slides = list(dict.fromkeys(slides))
    claims: Claims = {}
    loose: list[str] = []
    for look_up in (_by_stem, _by_trimmed_stem, _by_prefix, _by_tcga_name):
        taken = {path for claimed in claims.values() for path in claimed}
        open_slides = [slide for slide in slides if slide not in claims]
        found = look_up(open_slides, [path for path in paths if path not in taken])
        claims |= found
        if look_up is _by_prefix:
            loose += [slide for slide, fit in found.items() if not all(_is_uuid_after(slide, path) for path in fit)]

    owners: dict[Path, list[str]] = defaultdict(list)
    for slide in slides:
        if len(claims.get(slide, ())) == 1:
            owners[claims[slide][0]].append(slide)
    taken = {path for claimed in claims.values() for path in claimed}
    return Matches(
        found={names[0]: path for path, names in owners.items() if len(names) == 1},
        missing=tuple(slide for slide in slides if slide not in claims),
        several={slide: claimed for slide, claimed in claims.items() if len(claimed) > 1},
        shared={path: tuple(names) for path, names in owners.items() if len(names) > 1},
        unused=tuple(path for path in paths if path not in taken),
        by_prefix=tuple(loose),
    )


def leave_out(matches: Matches, entries: Iterable[str]) -> tuple[Matches, list[str]]:
    """The matches without the slides that the entries name, by id or by a feature file; and the entries that name none."""
    files: dict[str, list[str | Path]] = defaultdict(list)
    for slide, paths in [*((one, (path,)) for one, path in matches.found.items()), *matches.several.items()]:
        files[slide] += [slide, *paths]
    for path, names in matches.shared.items():
        for slide in names:
            files[slide] += [slide, path]
    by_stem: dict[str, list[tuple[str, str | Path]]] = defaultdict(list)
    for slide in matches.missing:
        files[slide].append(slide)
    for slide, known in files.items():
        for name in known:
            by_stem[_key(name)].append((slide, name))
    excluded: dict[str, None] = {}
    unknown = []
    for entry in entries:
        tail = tail_of(entry)  # with folders they must agree too: a quarantined file is one file
        named = [slide for slide, name in by_stem[_key(entry)] if tail_of(name)[-len(tail) :] == tail]
        excluded |= dict.fromkeys(named)
        unknown += [] if named else [entry]
    kept = replace(
        matches,
        found={slide: path for slide, path in matches.found.items() if slide not in excluded},
        missing=tuple(slide for slide in matches.missing if slide not in excluded),
        several={slide: paths for slide, paths in matches.several.items() if slide not in excluded},
        shared={path: names for path, names in matches.shared.items() if not excluded.keys() >= set(names)},
        excluded=tuple(excluded),
    )
    return kept, unknown


def tail_of(name: str | Path) -> list[str]:
    """Folders and stem of an id, folded."""
    return [*map(_folded, _parts(name)[:-1]), _key(name)]


def match_features(
    slides: Sequence[str], files: Sequence[Path], exclude: Path | tuple[str, ...] | None = None
) -> tuple[Matches, tuple[Note, ...]]:
    """Each slide's file, without slide embeddings beside the features and without what the user leaves out; and what to say of it."""
    notes: tuple[Note, ...] = ()
    matches = match_slides(slides, files)
    first = {path.parent: path for paths in matches.several.values() for path in reversed(paths)}
    if homes := {home for home, path in first.items() if is_slide_embedding(path)}:
        notes += embeddings_left_out([path for path in files if path.parent in homes])
        matches = match_slides(slides, [path for path in files if path.parent not in homes])
    if exclude is not None:
        matches, unknown = leave_out(matches, _excluded(exclude))
        if unknown:
            what = f"{counted(len(unknown), 'entry')} of `exclude` name{'s' if len(unknown) == 1 else ''} no slide and no feature file"
            named = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
            notes += (Note("warning", "exclude", f"{what}: {named}", ("exclude",), "Correct or remove them."),)
    return matches, notes


def _excluded(exclude: Path | tuple[str, ...]) -> Sequence[str]:
    if isinstance(exclude, tuple):
        return exclude
    try:
        lines = exclude.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        what = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read as text ({error})"
        cure = "`exclude` is a list of slides, [s1, s2], or a text file with one slide or feature file per line."
        raise UserError(what, where=exclude, cure=cure, kind="setting") from None
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def several_files(matches: Matches, column: str | None = None) -> Iterator[Note]:
    """Slides that more than one file fits, and how to choose; those of most slides, which lie in the same folders, together.

    ``column``: of the slides, if it was named.
    """
    groups: dict[tuple[Path, ...], list[str]] = defaultdict(list)
    for slide, files in matches.several.items():
        groups[tuple(file.parent for file in files)].append(slide)
    total = len(matches.found) + len(matches.several)
    for folders, slides in groups.items():
        number = _NUMBERS.get(len(folders), str(len(folders)))
        if len(set(folders)) < len(folders) or len(slides) <= total / 2:
            for slide in slides:
                what = f"slide {slide} has {number} feature files, so none is used"
                places = tuple(map(str, matches.several[slide]))
                kind, cure = "several_files", "Keep one, or name the folder more exactly."
                if len({_key(file) for file in matches.several[slide]}) > 1:  # the id begins several names
                    instead = (
                        f"write `case: {column}` instead of `slide: {column}`"
                        if column
                        else "name its column with `case`"
                    )
                    kind, cure = (
                        "several_slides",
                        f"If each row is a patient with several slides, {instead} in the YAML.",
                    )
                yield Note("error", kind, what, places, cure)
            continue
        above = Path(os.path.commonpath(folders))
        names = " and ".join(str(folder.relative_to(above)) for folder in folders)
        what = f"{counted(len(slides), 'slide')} {'has' if len(slides) == 1 else 'have'} {number} feature files each, in {names} (below {above})"
        encoders = [encoder_of_folder(matches.several[slides[0]][place]) for place in range(len(folders))]
        cure = "Point `features` at one of the folders."
        if None not in encoders and len(set(encoders)) == len(encoders):
            chosen = " or ".join(f"`encoder: {name}`" for name in encoders)
            cure = f"Set {chosen}, or point `features` at one of the folders."
        yield Note("error", "several_files", what, tuple(map(str, folders)), cure)


def files_of_cases(cases: Iterable[str], files: Iterable[str | Path]) -> dict[str, tuple[Path, ...]]:
    """For each patient the files whose name starts with the patient's id; a file goes to the longest id that fits.

    >>> files_of_cases(["P1", "P10"], ["P1_a.h5", "P10_a.h5"])["P1"]
    (PosixPath('P1_a.h5'),)
    """
    ids = {_key(case): case for case in cases}
    owned: dict[str, list[Path]] = {case: [] for case in ids.values()}
    for path in sorted(Path(file) for file in files):
        stem = _key(path)
        heads = [stem] + [stem[: cut.start()] for cut in reversed(list(re.finditer(r"[\W_]", stem)))]
        owner = next((ids[head] for head in heads if head in ids), None)
        if owner is not None:
            owned[owner].append(path)
    return {case: tuple(paths) for case, paths in owned.items()}


def _parts(name: str | Path) -> list[str]:
    """Components of a path written on any system; never empty."""
    return [part for part in re.split(r"[\\/]", str(name)) if part] or [str(name)]


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _key(name: str | Path) -> str:
    return slide_stem(name).casefold()


def _nearest(slide: str, paths: Sequence[Path]) -> tuple[Path, ...]:
    """Of several fitting files, those that also agree in the folders that the id names, and in case."""
    folders = [_folded(part) for part in _parts(slide)[:-1]]
    if folders:
        same = [path for path in paths if [_folded(p) for p in path.parts[:-1]][-len(folders) :] == folders]
        paths = same or paths
    same_case = [path for path in paths if slide_stem(path) == slide_stem(slide)]
    return tuple(same_case or paths)


def _by_key(slides: Sequence[str], paths: Sequence[Path], key: Callable[[str | Path], str]) -> Claims:
    index: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        index[key(path)].append(path)
    return {slide: _nearest(slide, index[key(slide)]) for slide in slides if key(slide) in index}


def _by_stem(slides: Sequence[str], paths: Sequence[Path]) -> Claims:
    return _by_key(slides, paths, _key)


def _by_trimmed_stem(slides: Sequence[str], paths: Sequence[Path]) -> Claims:
    return _by_key(slides, paths, lambda name: _key(name).removesuffix("_patches"))


def _by_prefix(slides: Sequence[str], paths: Sequence[Path]) -> Claims:
    """The file's stem continues after the id with a character that is no letter or digit: ``s_1`` is not ``s_10``."""
    keyed = sorted((_key(path), path) for path in paths)
    keys = [key for key, _ in keyed]
    claims: Claims = {}
    for slide in slides:
        key = _key(slide)
        first = bisect_left(keys, key)
        run = takewhile(lambda i, key=key: keys[i].startswith(key), range(first, len(keys)))  # type: ignore[misc]
        fitting = tuple(keyed[i][1] for i in run if not keys[i][len(key) :][:1].isalnum())
        if fitting:
            claims[slide] = fitting
    return claims


def _is_uuid_after(slide: str, path: Path) -> bool:
    return tcga_patient(slide) is not None and _key(path)[len(_key(slide)) :].startswith(".")


def _by_tcga_name(slides: Sequence[str], paths: Sequence[Path]) -> Claims:
    """A TCGA id with its UUID, files named without it."""
    tcga = [slide for slide in slides if _key(slide).startswith("tcga-")]
    short = [path for path in paths if "." not in _key(path)]  # another UUID is another slide
    return _by_key(tcga, short, lambda name: _key(name).removesuffix("_patches").split(".")[0])
