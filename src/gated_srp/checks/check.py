"""Look at a cohort before it is trained on: what was found, what is wrong, what to do. Nothing in a cohort stops it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gated_srp.checks import findings as found_by
from gated_srp.checks.survey import FileFacts, reading_seconds, survey, workers_for
from gated_srp.config.cohort import CohortConfig, CohortData, find_files, open_cohort, preparation
from gated_srp.config.load import load_config
from gated_srp.config.reach import REMOVAL, gate_reach, trunk_of, unnamed_encoder
from gated_srp.data.files.siblings import embeddings_left_out, look_into, nothing_found
from gated_srp.data.files.stride import unnamed_source
from gated_srp.data.prepared import Preparation
from gated_srp.data.splits import PARTS, Split, assign_parts
from gated_srp.data.table import Table
from gated_srp.errors import Note, UserError, counted, joined
from gated_srp.files import as_stored, write_whole
from gated_srp.machine import Machine, run_seconds, this_machine
from gated_srp.models import ARMS, arm_settings
from gated_srp.progress import Progress, silent

_ORDER = {"error": 0, "warning": 1, "note": 2}
_ABOUT_FILES = ("mixed_widths", "mixed_encoders", "several_files", "shared_file")  # errors that name files which open
_NOTICED = 1.0  # seconds of reading per epoch from which on a cache is worth a word
_FULL = 0.9  # share of the memory from which on a run is warned of


@dataclass(frozen=True)
class Check:
    """What `check` found: ``facts`` are plain data, one section per subject; ``notes`` are sorted, errors first."""

    name: str
    facts: dict[str, Any]
    notes: tuple[Note, ...]
    files: tuple[FileFacts, ...]

    @property
    def ok(self) -> bool:
        """Whether a run can be trusted: no errors."""
        return not self.errors

    @property
    def errors(self) -> tuple[Note, ...]:
        """What must be fixed."""
        return tuple(note for note in self.notes if note.level == "error")

    @property
    def warnings(self) -> tuple[Note, ...]:
        """What should be looked at."""
        return tuple(note for note in self.notes if note.level == "warning")

    @property
    def quarantine(self) -> tuple[Path, ...]:
        """Files that a run must leave out: all that an error is about."""
        known = {str(file.path): None for file in self.files}
        named = [place for note in self.errors if note.kind in _ABOUT_FILES for place in note.where]
        broken = [str(file.path) for file in self.files if not file.usable]
        return tuple(
            map(Path, dict.fromkeys([*broken, *(one for one in named if one in known or Path(one).is_file())]))
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per note: level, kind, what, where, cure."""
        rows = [asdict(note) | {"where": ", ".join(note.where)} for note in self.notes]
        return pd.DataFrame(rows, columns=["level", "kind", "what", "where", "cure"])

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "name": self.name,
            "must_fix": not self.ok,
            "summary": self.facts,
            # With the names that check.json has had since version 0.1.
            "findings": [
                {"severity": note.level, "kind": note.kind, "what": note.what, "where": note.where, "cure": note.cure}
                for note in self.notes
            ],
            "files": [_file_json(file) for file in self.files],
        }

    def _repr_html_(self) -> str:
        verdict = "ready" if self.ok else f"not ready, {len(self.errors)} to fix"
        notes = self.to_frame().to_html(index=False) if self.notes else "<p>No issues found.</p>"
        return f"<p><b>check of {escape(self.name)}</b>: {verdict}</p>{notes}"


def _file_json(file: FileFacts) -> dict[str, Any]:
    problem, plain = file.problem, asdict(file)
    del plain["problem"]
    plain |= {"path": str(file.path), "warnings": [f"{note.kind}: {note}" for note in file.warnings]}
    message = joined(problem.what, cure=problem.cure) if problem else ""
    return plain | {"kind": problem and problem.kind, "message": message}


def check(
    cohort: str | Path | CohortConfig,
    *,
    deep: bool = False,
    seeds: Sequence[int] | None = None,
    quarantine: str | Path | None = None,
    machine: Machine | None = None,
    progress: Progress = silent,
) -> Check:
    """Check a cohort's table, files and splits, or the feature files of a folder alone.

    Args:
        cohort: a cohort's YAML or its config, or a folder of feature files.
        deep: read the feature values too: NaN, infinity, damage.
        seeds: whose splits are looked at; those of the cohort.
        quarantine: where to write the list of files to leave out, one path per line, ready for ``xargs``.
        machine: where a run would take place, for the estimate of time and memory; this one.
        progress: called after each file.

    Returns:
        A `Check`: ``ok``, ``notes`` (``errors``, ``warnings``), ``facts``, ``quarantine``. Nothing in a file or a table raises.

    Example:
        >>> found = gated_srp.check("cohort.yaml")  # doctest: +SKIP
        >>> found.ok, [str(note) for note in found.errors]  # doctest: +SKIP
        (False, ['feats/s17.h5: the file has 0 bytes: its writing was interrupted. Delete it and extract the slide again.'])
    """
    if not isinstance(cohort, CohortConfig) and as_stored(cohort).is_dir():
        found = _check_folder(as_stored(cohort), deep=deep, progress=progress)
    else:
        config = cohort if isinstance(cohort, CohortConfig) else load_config(cohort)
        found = _check_cohort(config, deep=deep, seeds=seeds or config.seeds, machine=machine, progress=progress)
    if quarantine is not None:
        write_whole(Path(quarantine), "".join(f"{file}\n" for file in found.quarantine))
    return found


def _check_cohort(
    config: CohortConfig, *, deep: bool, seeds: Sequence[int], machine: Machine | None, progress: Progress
) -> Check:
    trouble: list[Note] = []
    data, files = None, list[Path]()
    try:
        found = find_files(config)
        files, notes = found
        trouble += notes
        data = open_cohort(config, found)
        files = list(data.matches.found.values())
    except UserError as error:
        undecided = error.kind == "several_files"  # which of them to look at is the question
        trouble.append(found_by.of_error(error, error.kind if undecided else "cohort"))
        files = [] if undecided else files
    facts, summary, of_files = _look(files, preparation(config), deep=deep, progress=progress)
    trouble += of_files
    if data is not None:
        splits, errors = _splits(data, seeds)
        broken = [file.path for file in facts if not file.usable]
        trouble += [*errors, *found_by.of_matches(data.matches, config.slide), *found_by.of_table(data.table)]
        trouble += [note for note in data.left_out if note not in trouble]
        trouble += found_by.of_tcga(data.table, by_site=bool(config.folds and config.folds.by == "site"))
        usable = [slide for slide, path in data.matches.found.items() if path not in set(broken)]
        if usable:
            used = data.table.frame[data.table.frame["slide"].isin(usable)]
            trouble += data.table.kind.scarce(used, data.table.classes)
            trouble += found_by.of_splits(data, splits, broken)
            trouble += found_by.of_settings(data, next(iter(splits.values()), None))
        summary["slides"] = _about_slides(data, facts)
        summary["patients"] = data.table.patients
        summary["labels"] = _about_labels(data.table)
        summary["split"] = _about_splits(data, splits)
        encoders = {file.encoder for file in facts if file.usable and file.encoder}
        trouble += [*_of_gates(data, splits), *unnamed_encoder(config, encoders)]
        trouble += _of_patients(data, splits, summary)
        if summary["patches"]["total"]:
            cost = _about_cost(data, facts, splits, machine or this_machine())
            trouble += [*_of_cost(cost), *_of_reading(data, facts, splits, cost)] if cost else []
            summary |= {"cost": cost} if cost else {}
    return Check(config.name, summary, _sorted(trouble), tuple(facts))


def _check_folder(folder: Path, *, deep: bool, progress: Progress) -> Check:
    """The feature files of a folder alone: no table, no splits."""
    files, embeddings = look_into(folder)
    if not files:
        raise nothing_found(folder)
    facts, summary, found = _look(files, Preparation(), deep=deep, progress=progress)
    return Check(folder.name, summary, _sorted([*found, *embeddings_left_out(embeddings)]), tuple(facts))


def _look(
    files: Sequence[Path], settings: Preparation, *, deep: bool, progress: Progress
) -> tuple[list[FileFacts], dict[str, Any], list[Note]]:
    """The facts of each file, their summary, and what is wrong with them."""
    facts = survey(files, settings, deep=deep, workers=workers_for(len(files)), progress=progress)
    thin = found_by.of_neighbours(facts, window=settings.window, cap=settings.cap)
    trouble = [*found_by.of_files(facts), *found_by.of_encoders(facts), *thin, *found_by.of_regions(facts, settings)]
    trouble += [*found_by.of_strides(facts), *found_by.of_scales(facts, settings)]
    return facts, _about_files(facts, settings, deep=deep), trouble


def _sorted(notes: Iterable[Note]) -> tuple[Note, ...]:
    """By level, then all with the same cure together, in the order in which the first of them came."""
    found = list(notes)
    first = {(one.kind, one.cure): place for place, one in reversed(list(enumerate(found)))}
    return tuple(sorted(found, key=lambda one: (_ORDER[one.level], first[one.kind, one.cure])))


def _splits(data: CohortData, seeds: Sequence[int]) -> tuple[dict[str, Split], list[Note]]:
    """Each split that a comparison would use, by name; those that cannot be used are findings, equal ones once."""
    folds = range(data.config.folds.number if data.config.folds else 1)
    splits: dict[str, Split] = {}
    errors: dict[Note, None] = {}
    for seed in seeds:
        for fold in folds:
            try:
                split = data.split(seed, fold)
                assign_parts(split, data.table)  # no patient may be in two parts
            except UserError as error:
                errors[found_by.of_error(error, "split")] = None
            else:
                splits[f"seed {seed}" + (f", fold {fold}" if len(folds) > 1 else "")] = split
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
    strides = Counter((f"{file.stride:g} {file.unit}", unnamed_source(file.path, file.stride_source)) for file in good)
    return {
        "files": {
            "looked_at": len(facts),
            "usable": len(good),
            "broken": dict(Counter(file.problem.kind for file in facts if file.problem)),
            "bytes": sum(file.bytes for file in good),
            "deep": deep,
        },
        "encoders": dict(Counter(file.encoder or ("none, pixels" if settings.images else "not said") for file in good)),
        "widths": dict(Counter(str(file.width) for file in good)),
        "dtypes": dict(Counter(file.dtype for file in good)),
        "patches": {"total": sum(weights)} | _spread(weights),
        "strides": [{"stride": name, "source": of, "files": count} for (name, of), count in strides.most_common()],
        **({"regions": {"kept": sum(weights), "outside": sum(f.outside for f in good)}} if settings.regions else {}),
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


def _about_slides(data: CohortData, facts: Sequence[FileFacts]) -> dict[str, int]:
    frame, matches = data.table.frame, data.matches
    return {
        "slides": len(frame),
        "patients": int(frame["case"].nunique()),
        "found": len(matches.found),
        "missing": len(matches.missing),
        "unclear": len(matches.several) + sum(map(len, matches.shared.values())),
        "excluded": len(matches.excluded),
        "broken": sum(not file.usable for file in facts),
        "unused_files": len(matches.unused),
    }


def _about_labels(table: Table) -> dict[str, Any]:
    notes = [str(note) for note in table.notes if note.level == "note"]  # warnings are findings
    return {"task": table.task, "notes": notes} | table.kind.tally(table.frame, table.classes)


def _about_splits(data: CohortData, splits: dict[str, Split]) -> dict[str, Any]:
    about: dict[str, Any] = {}
    for name, split in splits.items():
        tally = Counter(assign_parts(split, data.table))
        about[name] = {"source": split.source, "hash": split.hash, "slides": {part: tally[part] for part in PARTS}}
    return about


def _about_cost(
    data: CohortData, facts: Sequence[FileFacts], splits: dict[str, Split], machine: Machine
) -> dict[str, Any]:
    """Of one run and of the whole comparison, for the first split; nothing where there is none."""
    if not splits:
        return {}
    config = data.config
    good = {f.path: min(f.patches, config.cap or f.patches) + f.coarse for f in facts if f.usable}
    width = Counter(file.width for file in facts if file.usable).most_common(1)[0][0]
    frame = data.with_parts(next(iter(splits.values())))
    bags = frame.assign(size=frame["file"].map(good)).dropna(subset="size")
    if config.bag == "patient":
        bags = bags.groupby("case", as_index=False).agg({"part": "first", "size": "sum"})
    bags["size"] = bags["size"].clip(upper=None if config.features_low else config.cap).astype(int)
    slides = {part: bags.loc[bags["part"] == part, "size"].tolist() for part in PARTS}
    trunks = [trunk_of(config, arm_settings(name)[0], width) for name in config.arms]
    how = {"epochs": config.train.epochs, "at_once": config.at_once}
    seconds = [run_seconds(trunk, slides, rate=machine.rate, **how) for trunk in trunks]
    return {
        "machine": asdict(machine),
        "epochs": config.train.epochs,
        "run_seconds": max(seconds),
        "run_bytes": max(trunk.memory(config.together(max([*bags["size"], 1]))) for trunk in trunks),
        "at_once": config.at_once,
        "runs": len(trunks) * len(splits),
        "comparison_seconds": sum(seconds) * len(splits),
    }


def _of_gates(data: CohortData, splits: dict[str, Split]) -> Iterator[Note]:
    """How far the gates of the cohort's own arm can move, in the first split, and what else the evidence advises to compare."""
    config = data.config
    if splits and config.main_arm in ARMS:
        frame = data.with_parts(next(iter(splits.values())))
        bags = int(frame.loc[frame["part"] == "train", config.unit].nunique())
        if bags and (reach := gate_reach(config, bags, config.main_arm)):
            yield reach.note(config.main_arm)
            if not config.images:
                ask = "gated-srp compare cohort.yaml --arms na,gated_srp,features_gated_srp_from_1"
                yield Note("note", "evidence", REMOVAL, cure=f"`{ask}` asks it of your slides; see docs/evidence.md.")


def _of_patients(data: CohortData, splits: dict[str, Split], summary: dict[str, Any]) -> Iterator[Note]:
    """Where bags are patients: how many slides they have, and why some cannot be one."""
    if data.config.bag != "patient" or not splits:
        return
    from gated_srp.data.patients import patient_table

    try:
        counts = patient_table(data.table, data.with_parts(next(iter(splits.values()))), where="table")["slides"]
    except UserError as error:
        yield found_by.of_error(error, error.kind or "patients")
        return
    summary["bags"] = {"patients": len(counts), "fewest": int(counts.min()), "most": int(counts.max())}
    said = f"a bag is a patient: {counted(len(counts), 'patient')} with {counts.min()} to {counts.max()} slides"
    yield Note("note", "bags", said)


def _of_cost(cost: dict[str, Any]) -> Iterator[Note]:
    need, have = cost["run_bytes"], cost["machine"]["memory"]
    if need > _FULL * have:
        images = cost["at_once"] > 1
        which = f"a batch of {cost['at_once']} images" if images else "the largest bag"
        what = f"{which} needs about {need / 1e9:.1f} GB to train on; {cost['machine']['name']} has {have / 1e9:.1f}"
        batch = "Lower train.batch_size and raise train.accumulation as much: the same updates"
        cure = f"{batch if images else 'Set `cap`'}; or train.checkpointing: true, or a larger machine."
        yield Note("warning", "memory", what, ("train.batch_size" if images else "cap",), cure)


def _of_reading(
    data: CohortData, facts: Sequence[FileFacts], splits: dict[str, Split], cost: dict[str, Any]
) -> Iterator[Note]:
    """What reading the slides anew in every epoch costs, where they are compressed or steps would wait for them, and what `cache` saves."""
    config, good = data.config, {file.path: file for file in facts if file.usable}
    frame = data.with_parts(next(iter(splits.values())))
    read = [good[path] for path in frame.loc[frame["part"] != "test", "file"] if path in good]
    if config.cache.folder or preparation(config).images or not read:
        return
    try:
        reading, copying = reading_seconds(read, preparation(config))
    except UserError:  # said elsewhere, or by `check --deep`
        return
    patches = sum(file.patches for file in read)
    seconds, saved = patches * reading, patches * (reading - copying)
    epoch, workers = cost["run_seconds"] / cost["epochs"], max(config.train.workers, 1)
    waits = seconds / workers > epoch
    packed = sum(file.compressed for file in read)
    if saved < _NOTICED or not (packed or waits):
        return
    why = f"{packed} of {len(read)} files are compressed" if packed else "steps are faster than that"
    what = f"reading the slides takes about {seconds:.0f} s per epoch with one process ({why}), its steps about {epoch:.0f} s"
    if waits:
        what += f": with train.workers: {workers} the steps wait"
    stored = sum(min(f.patches, config.cap or f.patches) * f.width for f in read) * (
        2 if read[0].dtype != "float32" else 4
    )
    cure = f"Set `cache: DIR`: it saves about {saved:.0f} s per epoch after the first and takes {stored / 1e9:.1f} GB."
    yield Note("warning" if waits else "note", "reading", what, ("cache",), cure)
