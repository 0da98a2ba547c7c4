"""`gated_srp.readers`: pairs of maps for people to compare without knowing whose they are, and `score_readers`: what they preferred.

The page has neither names of runs nor of slides, and the sides are drawn at random. What was on which side stands in a key file beside
it, which the readers do not get.
"""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image
from pydantic import BaseModel, ConfigDict, ValidationError

from gated_srp.data.matching import slide_stem
from gated_srp.errors import UserError, counted
from gated_srp.files import write_json, write_whole
from gated_srp.progress import Event, Progress, silent
from gated_srp.reports.draw import find_image, overview, place_of_images, scaled_map
from gated_srp.reports.heatmap import feature_files
from gated_srp.reports.maps import VALUES, maps_of, view_slide
from gated_srp.reports.pictures import draw_maps
from gated_srp.training.trained import TrainedRun

if TYPE_CHECKING:
    import pandas as pd

_WIDEST = 900  # pixels of a picture on the page


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Pair(_File):
    slide: str
    left: int  # which run is on the left, 0 or 1


class _Key(_File):
    sheet: str
    runs: list[str]
    value: str
    pairs: list[_Pair]


class _Answer(_File):
    pair: int
    choice: Literal["left", "right", "none"]
    remark: str = ""


class _Answers(_File):
    sheet: str
    reader: str
    answers: list[_Answer]


@dataclass(frozen=True)
class ReaderSheet:
    """The page for the readers, and the key that they must not see."""

    page: Path
    key: Path
    pairs: int

    @property
    def written(self) -> list[Path]:
        return [self.page, self.key]


@dataclass(frozen=True, eq=False)
class ReaderScore:
    """What the readers preferred.

    ``table``: per reader, and for all of them by the majority on each slide: slides, how often each run was preferred, the share that
    preferred the second among those with a preference, its exact 95 % interval (Clopper and Pearson), and the two-sided p of an even chance.
    ``kappa``: agreement beyond chance, the mean of Cohen's kappa over pairs of readers; not a number with one reader.
    """

    table: pd.DataFrame
    kappa: float
    runs: tuple[str, str]
    verdict: str

    def _repr_html_(self) -> str:
        return f"<p>{self.verdict}</p>{self.table.to_html()}"


def readers(
    runs: Sequence[str | Path],
    features: str | Path,
    *,
    value: str = "attention",
    wsi: str | Path | None = None,
    seed: int = 0,
    force: bool = False,
    out: str | Path = "readers",
    progress: Progress = silent,
) -> ReaderSheet:
    """Write a blinded page with a pair of maps per slide, for readers to say which they prefer.

    Args:
        runs: the two runs, folders or model files.
        features: a folder of feature files, or one.
        value: what the maps show: attention, homogeneity, beta, correction or change.
        wsi: the slide image, or the folder with the images: maps are drawn on tissue. A slide without an image there is refused.
        seed: of the order of slides and sides.
        force: as in `predict`.
        out: folder for ``readers.html`` and ``key.json``.
        progress: called after each slide.

    Returns:
        The page, and the key to keep to yourself.

    Example:
        >>> gated_srp.readers(["runs/na/seed42", "runs/gated_srp/seed42"], "feats/").page  # doctest: +SKIP
        PosixPath('readers/readers.html')
    """
    paths = [Path(run) for run in runs]
    if len(paths) != 2:
        raise UserError(counted(len(paths), "run"), where="readers", cure="Name the two runs to compare.")
    if value not in VALUES:
        raise UserError(f"expected one of {', '.join(VALUES)}.", where=f"--value {value}")
    for run in map(TrainedRun.open, paths):
        if run.patients or run.covariates is not None:
            what = f"sees {'all slides of a patient' if run.patients else 'clinical covariates'}; readers are shown single slides alone"
            raise UserError(what, where=run.path, cure="Draw its maps with `gated-srp heatmap --table`.")
    files = feature_files(Path(features), paths)
    images = place_of_images(wsi, len(files))
    draw = np.random.default_rng(seed)
    order, left = draw.permutation(len(files)), draw.integers(0, 2, len(files))
    pictures, pairs = [], []
    for number, (place, first) in enumerate(zip(order.tolist(), left.tolist(), strict=True), 1):
        both = _pictures(paths, files[place], value=value, wsi=images, force=force)
        pictures.append((both[first], both[1 - first]))
        pairs.append(_Pair(slide=slide_stem(files[place]), left=first))
        progress(Event("slides", number, len(files)))
    key = _Key(sheet=uuid.uuid4().hex, runs=[str(path) for path in paths], value=value, pairs=pairs)
    page, kept = Path(out) / "readers.html", Path(out) / "key.json"
    write_whole(page, _page(key.sheet, pictures, value))
    write_json(kept, key.model_dump())
    return ReaderSheet(page, kept, len(pairs))


def _pictures(runs: Sequence[Path], file: Path, *, value: str, wsi: Path | None, force: bool) -> list[str]:
    """One JPEG per run as base64, without a name on it."""
    views, found = [view_slide(run, file, force=force) for run in runs], []
    which = -1 if value == "attention" else 0  # of a signed one the positive part
    shown = [maps_of(view, value)[which] for view in views]
    first, second = (scaled_map(one) for one in shown)
    if (first.label, first.ticks, first.colours) != (second.label, second.ticks, second.colours):
        what = f"the maps of {value} have one scale in the first run and another in the second, which tells them apart"
        raise UserError(what, where=file, cure="Choose another --value.")
    image = find_image(views[0].patches, wsi)
    if wsi is not None and image is None:
        cure = "Name the folder that has it, or leave this feature file out."
        raise UserError(f"no slide image of it below {wsi}", where=file, cure=cure)
    with TemporaryDirectory() as folder:
        for view, one in zip(views, shown, strict=True):
            patches, slide = view.patches, None
            if image is not None:
                patches, picture, canvas = overview(view.patches, image)
                slide = picture, canvas
            drawn = Path(folder) / "map.png"
            draw_maps([("", patches, one)], drawn, title="", slide=slide)
            with Image.open(drawn) as picture_of:
                small = picture_of.convert("RGB")
                small.thumbnail((_WIDEST, _WIDEST))
            buffer = BytesIO()
            small.save(buffer, "JPEG", quality=88)
            found.append(base64.b64encode(buffer.getvalue()).decode())
    return found


def _page(sheet: str, pictures: Sequence[tuple[str, str]], value: str) -> str:
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("gated_srp.reports")
    page = Environment(loader=loader, autoescape=True, trim_blocks=True).get_template("readers.html.j2")
    script = Environment(loader=loader, autoescape=False).get_template("readers.js.j2").render(sheet=json.dumps(sheet))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return page.render(script=script, digest=digest, pictures=pictures, value=value)


# Scores ---------------------------------------------------------------------------------------------------------------


def score_readers(answers: Sequence[str | Path], *, key: str | Path = "readers/key.json") -> ReaderScore:
    """What readers preferred, once their files are back.

    Args:
        answers: the files that readers saved.
        key: the file that `readers` wrote beside the page.

    Returns:
        Preferences per reader and together, agreement between readers, and a verdict in words.

    Example:
        >>> gated_srp.score_readers(["answers/ana.json", "answers/ben.json"]).verdict  # doctest: +SKIP
    """
    import pandas as pd

    known: _Key = _read(Path(key), _Key)
    chosen: dict[str, dict[int, int]] = {}  # reader -> pair -> 0, 1, or -1 for neither
    for path in map(Path, answers):
        found: _Answers = _read(path, _Answers)
        if found.sheet != known.sheet:
            raise UserError(
                "answers to another sheet", where=path, cure=f"Name the key of that sheet instead of {key}."
            )
        if found.reader in chosen:
            raise UserError(f"a second file of the reader {found.reader!r}", where=path, cure="Keep one of the two.")
        chosen[found.reader] = _chosen(path, found, known)
    if not chosen:
        raise UserError("no file of answers is named", cure="gated-srp readers --score answers/*.json")
    each = {name: list(one.values()) for name, one in chosen.items()}
    majority = [_majority([one[p] for one in chosen.values() if p in one]) for p in range(len(known.pairs))]
    rows = [_preference(name, votes) for name, votes in each.items()]
    together = _preference("all, by majority", [vote for vote in majority if vote is not None])
    kappas = [_kappa(chosen[a], chosen[b]) for a, b in combinations(chosen, 2)]
    kappa = float(np.mean(kappas)) if kappas else float("nan")
    table = pd.DataFrame([*rows, together]).set_index("reader")
    first, second = known.runs
    return ReaderScore(table, kappa, (first, second), _verdict(together, known, len(chosen), kappa))


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=path, cure="Check the path.") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = f"not a file of this kind ({where or 'the file'}: {first['msg']})"
        raise UserError(what, where=path, cure="Use the file as the page or `gated-srp readers` saved it.") from None


def _chosen(path: Path, found: _Answers, key: _Key) -> dict[int, int]:
    votes: dict[int, int] = {}
    for one in found.answers:
        if not 0 <= one.pair < len(key.pairs) or one.pair in votes:
            what = f"pair {one.pair} is unknown or answered twice"
            raise UserError(what, where=path, cure="Use the file as the page saved it, with the key of that page.")
        left = key.pairs[one.pair].left
        votes[one.pair] = {"left": left, "right": 1 - left, "none": -1}[one.choice]
    if not votes:
        raise UserError("no pair is answered", where=path, cure="Leave it out, or have its reader answer.")
    return votes


def _majority(votes: Sequence[int]) -> int | None:
    """0, 1, or -1 where as many preferred one as the other; None where nobody answered."""
    if not votes:
        return None
    lead = sum((vote == 1) - (vote == 0) for vote in votes)
    return -1 if lead == 0 else int(lead > 0)


def _preference(name: str, votes: Sequence[int]) -> dict[str, Any]:
    from scipy.stats import binomtest

    first, second = votes.count(0), votes.count(1)
    decided = first + second
    test = binomtest(second, decided) if decided else None
    low, high = test.proportion_ci(method="exact") if test else (float("nan"),) * 2
    return {
        "reader": name,
        "slides": len(votes),
        "first": first,
        "second": second,
        "no_preference": len(votes) - decided,
        "share_second": second / decided if decided else float("nan"),
        "low": float(low),
        "high": float(high),
        "p": float(test.pvalue) if test else float("nan"),
    }


def _kappa(mine: dict[int, int], other: dict[int, int]) -> float:
    """Cohen's kappa of two readers over first, second and neither, on the pairs that both answered.

    >>> _kappa({0: 0, 1: 1, 2: 1, 3: 0}, {0: 0, 1: 1, 2: 0, 3: 0})
    0.5
    """
    both = sorted(mine.keys() & other.keys())
    if not both:
        return float("nan")
    a, b = (np.array([one[pair] for pair in both]) for one in (mine, other))
    agreed = float((a == b).mean())
    chance = sum(float((a == k).mean() * (b == k).mean()) for k in (-1, 0, 1))
    return float("nan") if chance == 1 else (agreed - chance) / (1 - chance)


def _verdict(found: dict[str, Any], key: _Key, count: int, kappa: float) -> str:
    decided = found["first"] + found["second"]
    who = "1 reader" if count == 1 else f"{count} readers, by the majority on each slide,"
    if not decided:
        return f"{who} preferred neither run on any of {found['slides']} slides."
    better = key.runs[1] if found["second"] >= found["first"] else key.runs[0]
    share = f"{found['share_second']:.0%} of {decided} slides with a preference went to {key.runs[1]} (95 % interval {found['low']:.0%} to {found['high']:.0%})"
    sure = f"{better} was preferred" if found["p"] < 0.05 else "No preference can be told from chance"
    agree = "" if count == 1 else f" Agreement between readers: kappa {kappa:.2f}."
    return f"{who}: {share}. {sure} (p = {found['p']:.2g}).{agree}".replace("%", " %").replace("  %", " %")
