"""What runs, models and studies say about themselves in files, read strictly: a schema for each, and what does not fit is a `UserError`.

    facts = read_record(run / "metrics.json", Metrics, cure="Train it again.")

Further entries are kept as they are, so that a file of a newer version is read; an entry that is known has its type and its bounds.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gated_srp.errors import UserError, counted
from gated_srp.files import spreadsheet_plain, spreadsheet_safe

if TYPE_CHECKING:
    import pandas as pd

_LARGEST = 2**26  # bytes of a file of facts
_SIZE = 2**20  # of a layer, a window, an image: what is larger was never trained

Number = Annotated[float, Field(allow_inf_nan=False)] | None
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1, le=_SIZE)]
Names = list[str]
Scores = dict[
    str, dict[str, Number] | None
]  # by level, then by metric; None where a level has no truth, or no predictions


class Record(BaseModel):
    """Known entries, each optional, of exactly their type."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


class Environment(Record):
    """environment.json"""

    started: str | None = None
    command: Names = []
    versions: dict[str, str] = {}
    device: str | None = None
    devices: int | str | None = None
    precision: str = "32"
    threads: int = Field(default=1, ge=1, le=1024)
    init: dict[str, Any] | None = None
    slides_hash: str | None = None
    slides: int | None = None


class Ties(Record):
    rule: str
    epochs: int


class Metrics(Record):
    """metrics.json"""

    cohort: str = ""
    arm: str = ""
    seed: int = 0
    fold: int = 0
    score: str = "slide"
    select: str | None = None
    split_hash: str | None = None
    best_epoch: int | None = None
    best_score: Number = None
    temperature: Number = None
    ties: Ties | None = None
    epochs: dict[str, int] | None = None  # of a run with train.patience: trained, of, patience
    remarks: dict[str, dict[str, str]] = {}
    val: Scores | None = None
    test: Scores | None = None


class Settings(Record):
    """config.yaml of a run, as far as it is used again"""

    name: str = ""
    task: str | None = None
    score: str = "slide"
    metric: str | None = None
    arms: Names = []
    seeds: list[int] = []
    model: dict[str, Any] = {}
    train: dict[str, Any] = {}


class Stride(Record):
    value: Positive
    unit: str
    um: Positive | None = None


class Images(Record):
    size: Size
    patch: Size


class Regions(Record):
    only: Names
    exclude: Names
    cover: float = Field(gt=0, le=1)
    unannotated: Literal["refuse", "whole"] = "refuse"


class LowScale(Record):
    ratio: Annotated[list[Positive], Field(min_length=1)]


class Features(Record):
    mean: list[float]
    std: list[float]


class FollowUp(Record):
    time: list[float]
    event: list[int | bool | float]


class SeenIds(Record):
    slides: Names
    patients: Names


class Seen(Record):
    salt: str
    train: SeenIds
    val: SeenIds


class Start(Record):
    sha256: str
    seen: Seen | None = None


class Covariate(Record):
    name: str
    mean: Number = None
    std: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    categories: Names | None = None
    gaps: bool


class Card(Record):
    """The card of a model file"""

    format: int = 0
    settings: dict[str, Any]
    task: str | None = None
    classes: Names | None = None
    bin_edges: list[float] | None = None
    follow_up: FollowUp | None = None
    median_risk: Number = None
    encoder: str | None = None
    stride: list[Stride] = []
    images: Images | None = None
    covariates: list[Covariate] | None = None
    regions: Regions | None = None
    features_low: LowScale | None = None
    features: Features | None = None
    temperature: Positive | None = None
    calibration_slides: int | None = None
    seen: Seen | None = None
    init: Start | None = None
    window: int = Field(default=3, ge=1, le=_SIZE)
    lattice: Literal["floor", "exact"] = "floor"
    order: Literal["file", "raster"] = "file"
    cap: int | None = Field(default=None, ge=1)
    dtype: Literal["float32", "float16", "bfloat16"] | None = None


class Test(Record):
    difference: Number = None
    interval: Annotated[list[Number], Field(min_length=2, max_length=2)] | None = None


class Interval(Record):
    low: Number = None
    high: Number = None


class Difference(Test):
    """A row of comparison.json"""

    cohort: str | None = None
    arm: str = ""
    metric: str = ""
    mean: Number = None
    std: Number = None
    reference_mean: Number = None
    reference_std: Number = None
    p_holm: Number = None
    claimed: bool = False
    verdict: str = ""
    corrected: Test | None = None
    bootstrap: Interval | None = None


class Comparison(Record):
    """comparison.json"""

    reference: str = ""
    cohorts: list[Difference] = []
    across: list[Difference] = []
    notes: Names = []
    runs: dict[str, str] = {}
    quick: str | None = None


class Finding(Record):
    """A remark of `check`"""

    severity: str
    what: str
    cure: str


class Check(Record):
    """What `check --json` wrote"""

    name: str = ""
    must_fix: bool | int = False
    summary: dict[str, Any] = {}
    findings: list[Finding] = []


class Localized(Record):
    """localization.json"""

    classes: Names = []
    reference: str = ""
    table: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    words: Names = []


class Budget(Record):
    """budget.json"""

    run: str = ""
    slides: int = 0
    table: list[dict[str, Any]] = []
    words: Names = []


def read_record(path: Path, record: type[Record], *, cure: str) -> dict[str, Any]:
    """The content of a JSON file that fits the schema; FileNotFoundError where there is none."""
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"{path.stat().st_size:,} bytes, which is more than such a file can have")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, error, cure) from None
    return checked(content, record, where=path, cure=cure)


def checked(content: Any, record: type[Record], *, where: str | Path, cure: str) -> dict[str, Any]:
    """The content as it is, if it fits."""
    if not isinstance(content, dict):
        raise unreadable(where, f"expected entries with names, found {_short(content)}", cure)
    try:
        record.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        said = first["msg"].removeprefix("Value error, ")
        name = ".".join(map(str, first["loc"]))
        raise unreadable(where, f"{name}: {said[:1].lower()}{said[1:]}, found {_short(first['input'])}", cure) from None
    return content


def unreadable(where: str | Path, error: object, cure: str) -> UserError:
    return UserError(f"cannot be read ({' '.join(str(error).split())[:300]})", where=where, cure=cure, kind="damaged")


@contextmanager
def naming(where: str | Path) -> Iterator[None]:
    """What files that are each readable say together may still make no sense: that is an error that names them."""
    try:
        yield
    except (KeyError, ValueError, TypeError, AttributeError, ArithmeticError, IndexError) as error:
        if isinstance(error, UserError):
            raise
        what = f"its files do not fit together ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        raise UserError(what, where=where, cure="Make them again, or leave them out.", kind="damaged") from error


def _short(value: Any) -> str:
    return repr(value) if len(repr(value)) < 60 else f"{repr(value)[:56]} ..."


# Tables ---------------------------------------------------------------------------------------------------------------


def read_rows(
    path: Path, *, cure: str, texts: Sequence[str] | None = (), numbers: Sequence[str] = (), needed: Sequence[str] = ()
) -> "pd.DataFrame":
    """A CSV that this package wrote: whole lines of equally many cells, ``texts`` (None: all) as they are spelled.

    ``numbers`` are numbers, ``needed`` columns are there. Other columns are numbers where all of their cells are, and text where
    none is; what was cut short or overwritten is refused.
    """
    import pandas as pd

    try:
        text = path.read_bytes().decode("utf-8")
        if text and not text.endswith("\n"):
            raise ValueError("its last line is cut short")
        lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
        if not lines:
            return pd.DataFrame(columns=list(needed))
        if len(set(lines[0])) < len(lines[0]):
            raise ValueError("a column is there twice")
        if odd := next((i for i, line in enumerate(lines, 1) if len(line) != len(lines[0])), None):
            raise ValueError(f"line {odd} has {counted(len(lines[odd - 1]), 'cell')}, the header {len(lines[0])}")
        if lacking := [name for name in needed if name not in lines[0]]:
            raise ValueError(f"no column {lacking[0]!r}")
        options: dict[str, Any] = {"keep_default_na": False, "float_precision": "round_trip", "skip_blank_lines": False}
        kinds = str if texts is None else dict.fromkeys(texts, str)
        frame: pd.DataFrame = pd.read_csv(io.StringIO(text), dtype=kinds, **options)
        for name in frame.columns if texts is None else frame.columns.intersection(list(texts)):
            frame[name] = frame[name].map(spreadsheet_plain)
        frame.columns = pd.Index([spreadsheet_plain(name) for name in frame.columns])
        return frame if texts is None or frame.empty else frame.assign(**_as_numbers(frame, texts, numbers))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, csv.Error, OverflowError) as error:
        raise unreadable(path, error, cure) from None


def parse_numbers(cells: "pd.Series[Any]") -> "pd.Series[Any]":
    """Numbers of text cells, NaN where a cell is none; so are those with exponents of five digits, near some of which pandas crashes.

    >>> import pandas as pd
    >>> parse_numbers(pd.Series(["1e3", "x", "1e2147483648"])).tolist()
    [1000.0, nan, nan]
    """
    import pandas as pd

    beyond = cells.astype(str).str.contains(r"[eE][+-]?0*[1-9]\d{4,}")
    return pd.to_numeric(cells.where(~beyond, None), errors="coerce")


def csv_text(frame: "pd.DataFrame", **options: Any) -> str:
    """A table as CSV; text that a spreadsheet would take for a formula (``=1+1``, ``@SUM``) gets an apostrophe in front, as they do it."""
    texts = frame.select_dtypes(exclude="number").columns
    safe = frame.apply(lambda column: column.map(spreadsheet_safe) if column.name in texts else column)
    safe.columns = [spreadsheet_safe(name) for name in frame.columns]
    text: str = safe.to_csv(index=False, lineterminator="\n", **options)
    return text


def _as_numbers(frame: "pd.DataFrame", texts: Sequence[str], numbers: Sequence[str]) -> Mapping[str, Any]:
    import pandas as pd

    found = {}
    for name in frame.columns.difference(list(texts)):
        column = frame[name]
        if pd.api.types.is_bool_dtype(column) or not pd.api.types.is_numeric_dtype(column):
            values = parse_numbers(column.astype(str).where(column.astype(str) != "", None))
            wrong = values.isna() & ~column.astype(str).str.lower().isin(["", "nan"])
            if wrong.any() and (name in numbers or not wrong.all()):
                row = wrong.tolist().index(True)
                raise ValueError(f"row {row + 2}: {name} is {_short(column.tolist()[row])}, no number")
            if not wrong.any():
                found[name] = values.astype(float)
    return found
