"""Tables that go with slides: microns per pixel by slide, and lists of slides."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from gated_srp.errors import UserError, counted
from gated_srp.files import as_stored
from gated_srp.slides.reader import find_slides, slide_name

_LARGEST = 2**24  # bytes of a list


def read_mpp(given: float | str | Path | Mapping[str, float] | None) -> tuple[float | None, dict[str, float]]:
    """For every slide, and by slide name: of a number, of a mapping, or of a CSV with the columns wsi and mpp.

    >>> read_mpp("0.25"), read_mpp({"a.svs": 0.5}), read_mpp(None)
    ((0.25, {}), (None, {'a.svs': 0.5}), (None, {}))
    """
    if given is None:
        return None, {}
    numbers: Mapping[str, object]
    if isinstance(given, Mapping):
        numbers = given
    else:
        try:
            numbers = {"": float(given)}  # type: ignore[arg-type] # a path is no number
        except (TypeError, ValueError):
            numbers = _read_mpp_table(Path(str(given)))
    found = {}
    for name, text in numbers.items():
        try:
            value = float(str(text))
        except ValueError:
            value = -1.0
        if not 0.01 < value < 100:
            what = f"{name or 'the number'} is {str(text)!r}, expected microns per pixel, e.g. 0.25."
            raise UserError(what, where=f"--mpp {given}")
        found[name] = value
    return found.pop("", None), found


def _read_mpp_table(path: Path) -> dict[str, str]:
    from gated_srp.data.spreadsheet import read_frame  # and with it pandas

    if not path.is_file():
        raise UserError("neither a number nor a file", where=f"--mpp {path}", cure="Expected 0.25, or a CSV.")
    rows, _ = read_frame(path)
    if not {"wsi", "mpp"} <= set(rows):
        what = f"expected a CSV with the columns wsi and mpp (found: {', '.join(map(str, rows))})"
        raise UserError(what, where=f"--mpp {path}", cure="Name the columns so.")
    rows = rows[rows["mpp"].notna()]  # else the slide says it
    return {Path(str(wsi)).name: str(mpp) for wsi, mpp in zip(rows["wsi"], rows["mpp"], strict=True)}


def chosen_slides(slides: str | Path | Sequence[str | Path], only: str | Path | None) -> tuple[list[Path], Path | None]:
    """The slides that are meant by a slide, a folder or a list of them, and by `read_list` of ``only``."""
    if only is None:
        return find_slides(Path(slides)) if isinstance(slides, str | Path) else [Path(one) for one in slides], None
    if not isinstance(slides, str | Path):
        what = "names slides of a folder, but a list of slides was given"
        raise UserError(what, where=f"only {only}", cure="Name the folder, or leave `only` out.")
    return read_list(Path(only), Path(slides))


def read_list(path: Path, folder: Path) -> tuple[list[Path], Path | None]:
    """The slides that a file lists, in its order, each below ``folder`` or a whole path; and the file again where it has a column mpp.

    One name per line, or TRIDENT's CSV with the columns wsi and, where slides do not say it, mpp.
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise OSError("larger than any list of slides")
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        cure = "Expected one slide per line, or a CSV with the column wsi."
        raise UserError(f"cannot be read ({error})", where=f"--list {path}", cure=cure) from None
    columns, names = [name.strip() for name in lines[0].split(",")] if lines else [], lines
    if "wsi" in columns:
        from gated_srp.data.spreadsheet import read_frame

        names = [str(name).strip() for name in read_frame(path)[0]["wsi"].dropna()]
    if not names:
        raise UserError("lists no slide", where=f"--list {path}")
    slides = [as_stored(folder / name) for name in names]
    if lacking := [name for name, slide in zip(names, slides, strict=True) if not slide.exists()]:
        what = f"{counted(len(lacking), 'slide')} of {len(names)} not found below {folder}: {', '.join(lacking[:3])}"
        raise UserError(what, where=f"--list {path}", cure="Names are relative to SLIDES and have their endings.")
    if len(set(slides)) < len(slides):
        twice = next(name for number, name in enumerate(names) if slides[number] in slides[:number])
        raise UserError(f"names {twice} twice", where=f"--list {path}")
    return slides, path if "wsi" in columns and "mpp" in columns else None


def refuse_same_names(slides: Sequence[Path]) -> None:
    named: dict[str, Path] = {}
    for slide in slides:
        name = slide_name(slide)
        if name in named:
            raise UserError(
                "two slides of one name would write one file",
                where=f"{named[name]} and {slide}",
                cure="Rename one, or extract into two folders.",
            )
        named[name] = slide
