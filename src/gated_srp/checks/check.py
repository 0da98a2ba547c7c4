"""Look at a cohort before it is trained on: what was found, what is wrong, what to do. Nothing in a cohort stops it.

report = check_cohort(load_config("cohort.yaml"))
report.findings, report.must_fix, report.quarantine
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gated_srp.checks import findings as found_by
from gated_srp.checks.estimate import Machine, Trunk, run_seconds
from gated_srp.checks.findings import Finding
from gated_srp.checks.survey import FileFacts, survey, workers_for
from gated_srp.config.schema import CohortConfig
from gated_srp.data.cohort import CohortData, find_files, open_cohort
from gated_srp.data.files.siblings import find_bags
from gated_srp.data.prepared import Preparation
from gated_srp.data.splits.rules import PARTS, Split, assign_parts
from gated_srp.data.tables.table import Table
from gated_srp.errors import UserError
from gated_srp.files import write_whole
from gated_srp.models import ARMS

_ORDER = {"error": 0, "warning": 1, "note": 2}
_FULL = 0.9  # share of the memory that a run may take before it is warned of
Progress = Callable[[Sequence[Path]], Callable[[FileFacts], object]]


@dataclass(frozen=True)
class Check:
    """``summary`` is plain data, a section a subject; ``findings`` are sorted, errors first."""

    name: str
    summary: dict[str, Any]
    findings: tuple[Finding, ...]
    files: tuple[FileFacts, ...]

    @property
    def must_fix(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    @property
    def quarantine(self) -> tuple[Path, ...]:
        """Files that a run must leave out."""
        return tuple(file.path for file in self.files if not file.usable)

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        files = [asdict(file) | {"path": str(file.path)} for file in self.files]
        return {
            "name": self.name,
            "must_fix": self.must_fix,
            "summary": self.summary,
            "findings": [asdict(finding) for finding in self.findings],
            "files": files,
        }


def _silent(files: Sequence[Path]) -> Callable[[FileFacts], object]:
    return lambda facts: None


def check_cohort(
    config: CohortConfig, *, deep: bool = False, progress: Progress = _silent, machine: Machine | None = None
) -> Check:
    """Check a cohort's table, files and splits. ``deep`` reads the feature arrays too.

    ``progress`` is told the files, and its answer is called with the facts of each. ``machine``: to estimate for.
    """
    trouble: list[Finding] = []
    data, files = None, list[Path]()
    try:
        files = find_files(config)
        data = open_cohort(config, files)
        files = list(data.matches.found.values())
    except UserError as error:
        trouble.append(found_by.of_error(error, "cohort"))
    settings = Preparation.of(config)
    facts = survey(files, settings, deep=deep, workers=workers_for(len(files)), done=progress(files))
    trouble += _of_facts(facts, settings)
    summary = _about_files(facts, settings, deep=deep)
    if data is not None:
        splits, errors = _splits(data)
        broken = [file.path for file in facts if not file.usable]
        trouble += [*errors, *found_by.of_matches(data.matches), *found_by.of_table(data.table)]
        trouble += found_by.of_balance(data.table)
        trouble += found_by.of_splits(data, splits, broken)
        summary["slides"] = _about_slides(data, facts)
        summary["labels"] = _about_labels(data.table)
        summary["split"] = _about_splits(data, splits)
        if machine is not None and summary["patches"]["total"]:
            cost = _about_cost(data, facts, splits, machine)
            trouble += _of_cost(cost) if cost else ()
            summary |= {"cost": cost} if cost else {}
    return Check(config.name, summary, _sorted(trouble), tuple(facts))


def check_folder(folder: Path, *, deep: bool = False, progress: Progress = _silent) -> Check:
    """Check the feature files of a folder alone: no table, no splits."""
    files, settings = find_bags(folder), Preparation()
    if not files:
        raise UserError(f"{folder}: no feature file in it. Point at the folder of an extraction, or at a cohort.yaml.")
    facts = survey(files, settings, deep=deep, workers=workers_for(len(files)), done=progress(files))
    summary = _about_files(facts, settings, deep=deep)
    return Check(folder.name, summary, _sorted(_of_facts(facts, settings)), tuple(facts))


def write_quarantine(check: Check, path: Path) -> None:
    """One path a line, ready for ``xargs``; written whole or not at all."""
    write_whole(path, "".join(f"{file}\n" for file in check.quarantine))


def _of_facts(facts: Sequence[FileFacts], settings: Preparation) -> Iterator[Finding]:
    yield from found_by.of_files(facts)
    yield from found_by.of_encoders(facts)
    yield from found_by.of_neighbours(facts, window=settings.window, cap=settings.cap)


def _sorted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """By severity, then all with the same cure together, in the order in which the first of them came."""
    found = list(findings)
    first = {(one.kind, one.cure): place for place, one in reversed(list(enumerate(found)))}
    return tuple(sorted(found, key=lambda one: (_ORDER[one.severity], first[one.kind, one.cure])))


def _splits(data: CohortData) -> tuple[dict[str, Split], list[Finding]]:
    """Each split that a comparison would use, by name; those that cannot be made are findings, equal ones once."""
    folds = range(data.config.folds.number if data.config.folds else 1)
    splits: dict[str, Split] = {}
    errors: dict[Finding, None] = {}
    for seed in data.config.seeds:
        for fold in folds:
            try:
                splits[f"seed {seed}" + (f", fold {fold}" if len(folds) > 1 else "")] = data.split(seed, fold)
            except UserError as error:
                errors[found_by.of_error(error, "split")] = None
    return splits, list(errors)


# Summary -------------------------------------------------------------------------------------------------------------


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {"min": float(min(values)), "median": float(np.median(values)), "max": float(max(values))}


def _about_files(facts: Sequence[FileFacts], settings: Preparation, *, deep: bool) -> dict[str, Any]:
    good = [file for file in facts if file.usable]
    whole, weights = [file.neighbours for file in good if file.neighbours], [file.patches for file in good]
    thinned = [(file.neighbours, file.capped) for file in good if file.neighbours and file.capped]
    strides = Counter((f"{file.stride:g} {file.unit}", _unnamed(file)) for file in good)
    return {
        "files": {
            "looked_at": len(facts),
            "usable": len(good),
            "broken": dict(Counter(file.kind for file in facts if file.kind)),
            "bytes": sum(file.bytes for file in good),
            "deep": deep,
        },
        "encoders": dict(Counter(file.encoder or ("none, pixels" if settings.images else "not said") for file in good)),
        "widths": dict(Counter(str(file.width) for file in good)),
        "dtypes": dict(Counter(file.dtype for file in good)),
        "patches": {"total": sum(file.patches for file in good)} | _spread([file.patches for file in good]),
        "strides": [
            {"stride": stride, "source": source, "files": count} for (stride, source), count in strides.most_common()
        ],
        "neighbours": {
            "most": settings.window**2 - 1,
            "mean": _spread([one.mean for one in whole]),
            "alone": float(np.average([one.alone for one in whole], weights=weights)) if whole else None,
        },
        "cap": {
            "cap": settings.cap,
            "files": len(thinned),
            "before": float(np.mean([before.mean for before, _ in thinned])) if thinned else None,
            "after": float(np.mean([after.mean for _, after in thinned])) if thinned else None,
        },
    }


def _unnamed(file: FileFacts) -> str:
    """Where the stride comes from; the slide's name, if it is part of that, as a star, so that equal sources are equal."""
    return re.sub(rf"(?<!\w){re.escape(file.path.stem)}(?=_patches\.|\.)", "*", file.stride_source)


def _about_slides(data: CohortData, facts: Sequence[FileFacts]) -> dict[str, int]:
    frame, matches = data.table.frame, data.matches
    return {
        "slides": len(frame),
        "patients": int(frame["case"].nunique()),
        "found": len(matches.found),
        "missing": len(matches.missing),
        "unclear": len(matches.several) + sum(map(len, matches.shared.values())),
        "broken": sum(not file.usable for file in facts),
        "unused_files": len(matches.unused),
    }


def _about_labels(table: Table) -> dict[str, Any]:
    return {"task": table.task, "notes": list(table.notes)} | table.kind.tally(table.frame, table.classes)


def _about_splits(data: CohortData, splits: dict[str, Split]) -> dict[str, Any]:
    about: dict[str, Any] = {}
    for name, split in splits.items():
        try:
            parts = assign_parts(split, data.table).value_counts()
        except UserError as error:
            about[name] = {"source": split.source, "hash": split.hash, "error": str(error)}
            continue
        slides = {part: int(parts.get(part, 0)) for part in PARTS}
        about[name] = {"source": split.source, "hash": split.hash, "slides": slides}
    return about


def _about_cost(
    data: CohortData, facts: Sequence[FileFacts], splits: dict[str, Split], machine: Machine
) -> dict[str, Any]:
    """Of one run and of the whole comparison, for the first split that works; nothing where none does."""
    config = data.config
    good = {file.path: min(file.patches, config.cap or file.patches) for file in facts if file.usable}
    width = Counter(file.width for file in facts if file.usable).most_common(1)[0][0]
    slides: dict[str, list[int]] = {}
    for split in splits.values():
        try:
            frame = data.with_parts(split)
        except UserError:
            continue
        slides = {
            part: [good[path] for path in frame.loc[frame["part"] == part, "file"] if path in good] for part in PARTS
        }
        break
    if not slides:
        return {}
    model = config.model
    trunks = [Trunk(width, model.dim, model.depth, dense=arm in ARMS and ARMS[arm].dense) for arm in config.arms]
    seconds = [run_seconds(trunk, slides, epochs=config.train.epochs, rate=machine.rate) for trunk in trunks]
    repeats = max(1, len(splits))
    return {
        "machine": asdict(machine),
        "epochs": config.train.epochs,
        "run_seconds": max(seconds),
        "run_bytes": max(trunk.memory(max(good.values()) * config.at_once) for trunk in trunks),
        "at_once": config.at_once,
        "runs": len(trunks) * repeats,
        "comparison_seconds": sum(seconds) * repeats,
    }


def _of_cost(cost: dict[str, Any]) -> Iterator[Finding]:
    need, have = cost["run_bytes"], cost["machine"]["memory"]
    if need > _FULL * have:
        images = cost["at_once"] > 1
        which = f"a batch of {cost['at_once']} images" if images else "the largest slide"
        what = f"{which} needs about {need / 1e9:.1f} GB to train on; {cost['machine']['name']} has {have / 1e9:.1f}"
        first = (
            "Lower train.batch_size and raise train.accumulation as much: the same updates" if images else "Set `cap`"
        )
        cure = f"{first}; or train.checkpointing: true, or a larger machine."
        yield Finding("warning", "memory", what, ("train.batch_size" if images else "cap",), cure)
