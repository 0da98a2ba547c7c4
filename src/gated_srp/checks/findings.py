"""What is wrong with a cohort, where, and what to do: facts of files, table, matches and splits in, `Note`s out; facts in words."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from gated_srp.checks.survey import FileFacts
from gated_srp.config.cohort import CohortData
from gated_srp.data.bag import same_stride
from gated_srp.data.files.siblings import is_known, may_be_same
from gated_srp.data.matching import Matches, several_files, tcga_section
from gated_srp.data.prepared import Preparation
from gated_srp.data.splits import PARTS, Split, assign_parts
from gated_srp.data.table import Table, refuse_mixed_truth
from gated_srp.errors import Level, Note, UserError, counted
from gated_srp.models import ARMS, arm_settings, find_arm
from gated_srp.progress import spoken
from gated_srp.tasks import find_task
from gated_srp.tasks.imbalance import sampling_weights

_CROWDED = 0.02  # share of patches hidden in a neighbour's cell from which on another lattice is advised
_FEW = 0.25  # share of the window's neighbours below which a graph is called thin
_STRIDES = 5  # that are listed
_NONE = 0.1  # neighbours per patch below which there is nothing to correct at all
_CURE = "Correct it, then check again."


def of_error(error: UserError, kind: str) -> Note:
    """An exception of the data layer as a finding."""
    return replace(Note.of(error, kind=kind), cure=error.cure or _CURE)


# Files ---------------------------------------------------------------------------------------------------------------


def of_files(facts: Sequence[FileFacts]) -> Iterator[Note]:
    """Each file that cannot be used, then what files that can be used warn of, equal warnings together."""
    for file in facts:
        if file.problem is not None:
            yield file.problem if file.problem.cure else replace(file.problem, cure=_CURE)
    good = [file for file in facts if file.usable]
    said: dict[Note, list[str]] = defaultdict(list)
    for file in good:
        for warning in file.warnings:
            if warning.kind != "duplicates":  # counted below, over all files
                said[warning].append(str(file.path))
    for warning, paths in said.items():
        yield replace(warning, where=tuple(paths), cure=warning.cure or _CURE)
    if twice := {file.path: file.duplicates for file in good if file.duplicates}:
        what = f"{counted(sum(twice.values()), 'patch')} with the coordinates of another"
        cure = "Two extractions were probably written into one file; extract again, or leave it if it is meant."
        yield Note("warning", "duplicates", what, tuple(map(str, twice)), cure)
    if zeros := {file.path: file.zeros for file in good if file.zeros}:
        what = f"{counted(sum(zeros.values()), 'patch')} with features of zeros alone"
        cure = "An interrupted extraction leaves such rows; extract these slides again."
        yield Note("warning", "zero_rows", what, tuple(map(str, zeros)), cure)
    if crowded := [file for file in good if file.shared_cells > _CROWDED * file.patches]:
        share = sum(file.shared_cells for file in crowded) / sum(file.patches for file in crowded)
        what = f"{100 * share:.0f} % of the patches share a lattice cell with another: several lattices in one slide"
        cure = "Set lattice: exact (CLAM and AtlasPatch start a lattice at each piece of tissue)."
        yield Note("warning", "lattice", what, tuple(str(file.path) for file in crowded), cure)


def of_strides(facts: Sequence[FileFacts]) -> Iterator[Note]:
    """Patches of several sizes of tissue: magnifications that were mixed. Level-0 pixels alone say nothing of that."""
    known = [(file.stride_um, file.path) for file in facts if file.usable and file.stride_um]
    sizes = Counter(round(um, 1) for um, _ in known)
    if not sizes or same_stride(max(sizes), min(sizes)):
        return
    listed = ", ".join(f"{um:g} um ({counted(count, 'file')})" for um, count in sorted(sizes.items())[:_STRIDES])
    common = sizes.most_common(1)[0][0]
    odd = tuple(str(path) for um, path in known if not same_stride(um, common))
    what = f"patches lie at several distances, as of several magnifications: {listed}"
    cure = "Extract all slides with one patch size and magnification, or leave some out with `exclude`."
    yield Note("warning", "mixed_magnifications", what, odd, cure)


def of_encoders(facts: Sequence[FileFacts]) -> Iterator[Note]:
    """One model takes one width, and features of two encoders must not be mixed even where their widths agree."""
    good = [file for file in facts if file.usable]
    widths = Counter(file.width for file in good)
    if len(widths) > 1:
        listed = ", ".join(f"{width} ({counted(count, 'file')})" for width, count in widths.most_common())
        common = widths.most_common(1)[0][0]
        cure = "Point `features` at one encoder's folder, name the `encoder`, or extract these files again."
        odd = tuple(str(file.path) for file in good if file.width != common)
        yield Note("error", "mixed_widths", f"features have several widths: {listed}", odd, cure)
    names = Counter(file.encoder for file in good if file.encoder)
    if len(names) > 1:
        listed = ", ".join(f"{name} ({counted(count, 'file')})" for name, count in names.most_common())
        known = [name for name in names if is_known(name)]  # an unknown name may be another spelling
        sure = not all(may_be_same(one, other) for one, other in combinations(known, 2))
        common_name = names.most_common(1)[0][0]
        odd = tuple(str(file.path) for file in good if file.encoder not in (None, common_name))
        cure = "Name one `encoder`, or point `features` at one encoder's folder; features of two must not be mixed."
        level: Level = "error" if sure else "warning"
        yield Note(level, "mixed_encoders", f"features of several encoders: {listed}", odd, cure)
    if good and not names:
        cure = "Name it with `encoder`, so that reports and later predictions can check it."
        yield Note("note", "encoder", "no file says which encoder made it", ("encoder",), cure)


def of_neighbours(facts: Sequence[FileFacts], *, window: int, cap: int | None) -> Iterator[Note]:
    """Thin graphs, and what the cap does to the lattice."""
    good = [file for file in facts if file.usable and file.neighbours]
    most = window**2 - 1
    thin = [file for file in good if file.neighbours and file.patches > most and file.neighbours.mean < _FEW * most]
    if thin:
        what = f"patches have fewer than {_FEW * most:g} of {most} neighbours on average, so there is little to correct"
        cure = "Look at the stride of these files; try lattice: exact, or set stride."
        yield Note("warning", "thin_lattice", what, tuple(str(file.path) for file in thin), cure)
    if capped := [file for file in good if file.capped]:
        before = sum(file.neighbours.mean for file in capped if file.neighbours) / len(capped)
        after = sum(file.capped.mean for file in capped if file.capped) / len(capped)
        what = f"the cap of {cap:,} patches thins the lattice: {before:.1f} -> {after:.1f} neighbours per patch"
        cure = "Raise `cap` if memory allows; the published numbers were made with their cap."
        lost = sum(file.capped.mean < _NONE for file in capped if file.capped)
        level: Level = "error" if lost else "warning" if after < _FEW * most else "note"
        if lost:
            what += f"; almost none stay on {counted(lost, 'slide')}, so Gated SRP would do nothing there"
        yield Note(level, "cap", what, tuple(str(file.path) for file in capped), cure)


def of_regions(facts: Sequence[FileFacts], settings: Preparation) -> Iterator[Note]:
    """How many patches the regions keep; classes that nobody has drawn."""
    good = [file for file in facts if file.usable]
    if settings.regions is None or not good:
        return
    kept, outside = (sum(getattr(file, name) for file in good) for name in ("patches", "outside"))
    fewest = min(good, key=lambda file: file.patches)
    what = f"regions keep {kept:,} of {kept + outside:,} patches on {counted(len(good), 'slide')}: {settings.regions}"
    least = f"; fewest on {fewest.path.name}, {fewest.patches} of {fewest.patches + fewest.outside}"
    yield Note("note", "regions", what + least, ("regions",))
    try:
        settings.regions.refuse_unknown_classes({name for file in good for name in file.classes})
    except UserError as error:
        yield of_error(error, "regions")


def of_scales(facts: Sequence[FileFacts], settings: Preparation) -> Iterator[Note]:
    """How many coarse patches there are, and fine ones without a parent."""
    good = [file for file in facts if file.usable]
    if settings.features_low is None or not good:
        return
    from gated_srp.data.two_scales import lone_notes  # not above: rarely so

    coarse = counted(sum(file.coarse for file in good), "coarse patch")
    what = f"features_low: {coarse} beside {sum(file.patches for file in good):,} fine ones, for the arms that see both"
    taking = ", ".join(name for name, arm in ARMS.items() if arm.scales > 1)
    yield Note("note", "scales", what, cure=f"These are {taking}; all others see the fine ones alone.")
    yield from lone_notes([(file.lone, file.patches) for file in good])


# Table, matches, splits ----------------------------------------------------------------------------------------------


def of_matches(matches: Matches, column: str | None = None) -> Iterator[Note]:
    """Slides without a file, with several, and files that several slides claim. ``column``: of the slides, if it was named."""
    slides = len(matches.found) + len(matches.missing) + len(matches.several)
    if matches.missing:
        level: Level = "error" if len(matches.missing) > slides / 2 else "warning"
        what = f"{counted(len(matches.missing), 'slide')} of the table without a feature file; runs leave {'it' if len(matches.missing) == 1 else 'them'} out"
        cure = "Extract them, correct their names in the table, or add their folder to `features`."
        yield Note(level, "missing", what, matches.missing, cure)
    yield from several_files(matches, column)
    if more := matches.longer:
        usual = len(set(more.values())) == 1 < len(more)  # all files have the same words after the id
        some = ", ".join(f"{slide}: {matches.found[slide].name}" for slide in list(more)[:3])
        what = f"{counted(len(more), 'slide')} without a file of exactly this name; one that begins so is used ({some})"
        cure = (
            "Nothing to do, if these are their files; else correct the names, or leave the slides out with `exclude`."
        )
        yield Note("note" if usual else "warning", "longer_names", what, tuple(more), cure)
    for file, names in matches.shared.items():
        what = f"one file fits {len(names)} slides ({', '.join(names[:5])}), so none of them is used"
        yield Note("error", "shared_file", what, (str(file),), "Correct the slides' names in the table.")
    if matches.unused:
        what = f"{counted(len(matches.unused), 'feature file')} of no slide of the table, not looked at"
        cure = "Nothing to do, unless their slides should be in the table."
        yield Note("note", "unused", what, tuple(map(str, matches.unused)), cure)


def of_table(table: Table) -> Iterator[Note]:
    """What the reading of the table warned of, and rows that were dropped."""
    for note in table.notes:
        if note.level == "warning":
            yield replace(note, where=("table",), cure=note.cure or "Look at the table.")
    if table.dropped:
        what = (
            f"{counted(len(table.dropped), 'row')} of the table {'was' if len(table.dropped) == 1 else 'were'} dropped"
        )
        yield Note("warning", "dropped_rows", what, table.dropped, "Fill in what they lack, or leave them out.")


def of_tcga(table: Table, *, by_site: bool) -> Iterator[Note]:
    """Slides that a TCGA barcode calls frozen or normal, and the sites that a split mixes. ``by_site``: it does not."""
    kinds = {str(slide): found for slide in table.frame["slide"] if (found := tcga_section(slide))}
    if frozen := {slide: kind for slide, (_, kind) in kinds.items() if kind != "DX"}:
        tally = ", ".join(f"{kind} {number}" for kind, number in sorted(Counter(frozen.values()).items()))
        what = f"not diagnostic but frozen sections: {len(frozen)} of {counted(len(kinds), 'TCGA slide')} ({tally}; DX is diagnostic)"
        cure = "Leave them out with `exclude`, unless frozen tissue is meant; the two look different."
        yield Note("warning", "not_diagnostic", what, tuple(frozen), cure)
    if normal := [slide for slide, (sample, _) in kinds.items() if 10 <= int(sample) < 20]:
        what = f"normal tissue by the barcode (sample types 10 to 19): {len(normal)} of {counted(len(kinds), 'TCGA slide')}"
        yield Note(
            "warning", "normal_tissue", what, tuple(normal), "Leave them out with `exclude`, unless they are meant."
        )
    sites = table.frame["site"].nunique() if "site" in table.frame else 1
    if kinds and sites > 1 and not by_site:
        what = f"the slides come from {counted(sites, 'tissue source site')}, and splits mix them: a model may recognise the site"
        cure = "`folds: {number: 5, by: site}` keeps each site in one part; without it say so beside the result."
        yield Note("note", "site", what, ("site",), cure)


def of_splits(data: CohortData, splits: Mapping[str, Split], broken: Sequence[Path]) -> Iterator[Note]:
    """Slides in no part, parts that are empty or lack a class or an event; on the slides that can be used."""
    usable = {slide for slide, path in data.matches.found.items() if path not in set(broken)}
    frame = data.table.frame
    lacking: dict[tuple[Level, str], list[str]] = defaultdict(list)
    said: dict[Note, list[str]] = defaultdict(list)
    for name, split in splits.items():
        for note in split.notes:
            if note.level == "note":  # which fold of a file is used; what is lacking is found below
                said[note].append(name)
        parts = assign_parts(split, data.table)
        if outside := int(parts.isna().sum()):
            lacking["warning", f"{counted(outside, 'slide')} of the table in no part of the split"].append(name)
        rows = frame.assign(part=parts)[frame["slide"].isin(usable)]
        for part in PARTS:
            inside = rows[rows["part"] == part]
            if inside.empty:
                lacking["error", f"no usable slide in {part}"].append(name)
                continue
            for note in data.table.kind.lacks(inside, data.table.classes, part):
                lacking[note.level, note.what].append(name)
    cure = "Use more slides, other seeds or fewer folds, or bring a split of your own with `split`."
    for (level, what), names in lacking.items():
        yield Note(level, "split", what, tuple(names), cure)
    for note, names in said.items():
        yield replace(note, where=tuple(names), cure=note.cure or "Nothing to do, if this is what you want.")


def of_settings(data: CohortData, split: Split | None) -> Iterator[Note]:
    """What `train` and `compare` would refuse at once: arms, and metric, loss, weights and score on the training part of a split."""
    config, kind, classes = data.config, data.table.kind, data.table.classes
    for row in config.arms:
        try:
            find_arm(arm_settings(row)[0])
        except UserError as error:
            yield replace(of_error(error, "arms"), where=("arms",))
    try:
        if problem := kind.window_problem(config.train.accumulation * config.train.batch_size):
            raise problem
        slides = data.table.frame.assign(part="train") if split is None else data.with_parts(split)
        training = slides[slides["part"] == "train"]
        said = (*kind.scarce(slides, classes), *kind.lacks(training, classes, "train"))
        if training.empty or any(note.level == "error" for note in said):  # of the table or the split
            return
        task = kind.fit(training, classes, config.metric)
        task = task.with_loss(training, loss=config.train.loss, class_weights=config.train.class_weights)
        if config.train.sampling:
            sampling_weights(task, training)
        if config.score == "case" and config.bag == "slide":
            refuse_mixed_truth(slides, task.truth)
    except UserError as error:
        yield of_error(error, "settings")


# Facts in words ------------------------------------------------------------------------------------------------------


def facts_in_words(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and text of each fact of `Check.facts`, for a screen or a page; also of those read from check.json."""
    files, slides = summary["files"], summary.get("slides")
    if slides:
        files_of = {"found": "with a file", "missing": "without one", "unclear": "unclear", "broken": "broken"}
        found = _words({words: slides.get(key, 0) for key, words in (files_of | {"excluded": "excluded"}).items()})
        yield (
            "slides",
            f"{counted(slides['slides'], 'slide')}{_of_patients(summary, slides['patients'])} in the table; {found}",
        )
    if not files["looked_at"]:
        return
    kinds = f" ({_words(files['broken'])})" if files["broken"] else ""
    broken = files["looked_at"] - files["usable"]
    yield "files", f"{files['usable']:,} usable, {broken:,} broken{kinds}; {_size(files['bytes'])}"
    if not files["usable"]:
        return
    yield "encoder", f"{_tally(summary['encoders'])}; width {_tally(summary['widths'])}; {_tally(summary['dtypes'])}"
    patches = summary["patches"]
    yield (
        "patches",
        (f"{patches['min']:,.0f} to " if patches["min"] < patches["max"] else "")
        + f"{patches['max']:,.0f} per slide, median {patches['median']:,.0f}; "
        f"{patches['total']:,} in all",
    )
    for place, one in enumerate(summary["strides"][:_STRIDES]):
        yield "" if place else "stride", f"{one['stride']}: {one['source']} ({counted(one['files'], 'file')})"
    if len(summary["strides"]) > _STRIDES:
        yield "", f"... and {len(summary['strides']) - _STRIDES} more"
    yield from _neighbours(summary["neighbours"], summary["cap"])
    if "labels" in summary:
        yield from _labels(summary["labels"])
    if summary.get("split"):
        yield "split", f"{_split(summary['split'])}; {_CROSSING[summary.get('patients', 'column')]}"
    if "cost" in summary:
        yield from _cost(summary["cost"])


def _neighbours(neighbours: dict[str, Any], cap: dict[str, Any]) -> Iterator[tuple[str, str]]:
    mean = neighbours["mean"]
    yield (
        "neighbours",
        f"{mean['median']:.1f} of {neighbours['most']} per patch (median of slides; {mean['min']:.1f} to "
        f"{mean['max']:.1f}); {100 * neighbours['alone']:.1f} % of patches have none",
    )
    if cap["files"]:
        yield (
            "after the cap",
            f"{counted(cap['files'], 'slide')} with more than {cap['cap']:,} patches; there "
            f"{cap['before']:.1f} -> {cap['after']:.1f} neighbours per patch",
        )
    elif cap["cap"]:
        yield "after the cap", f"unchanged: no slide has more than {cap['cap']:,} patches"


def _labels(labels: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for note in labels["notes"]:
        yield "labels", note  # how the table was read; with the balance of classes
    with suppress(UserError):  # a task of a package that is not installed here
        yield from find_task(labels["task"]).tally_lines(labels)


def _split(splits: dict[str, Any]) -> str:
    name, first = next(iter(splits.items()))
    different = len({one["hash"] for one in splits.values()})
    which = f"{name}, one of {different} splits" if different > 1 else name
    if len(splits) > different == 1:
        which = f"the same split for {'both' if len(splits) == 2 else f'all {len(splits)}'} seeds"
    return f"slides: {_words(first['slides'])} ({which})"


_CROSSING = {
    "column": "no patient is in two parts",
    "barcode": "no patient (by TCGA barcode) is in two parts",
    "partly": "no patient that the table names is in two parts",
    "slide": "each slide counts as its own patient, as chosen",
    "unknown": "the patients are not known, so one may be in two parts",
}  # by `Table.patients`


def _of_patients(summary: Mapping[str, Any], count: int) -> str:
    return f" of {counted(count, 'patient')}" if summary.get("patients", "column") in ("column", "barcode") else ""


def _cost(cost: dict[str, Any]) -> Iterator[tuple[str, str]]:
    machine = cost["machine"]
    yield (
        "one run",
        f"roughly {spoken(cost['run_seconds'])} ({counted(cost['epochs'], 'epoch')}) and {_size(cost['run_bytes'])} of memory",
    )
    yield (
        "comparison",
        f"{counted(cost['runs'], 'run')} one after another: roughly {spoken(cost['comparison_seconds'])}; from the number of "
        f"patches and {machine['rate'] / 1e9:,.0f} billion operations per second, measured on {machine['name']}",
    )


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count) or "none"


def _tally(counts: dict[str, int]) -> str:
    return (
        next(iter(counts)) if len(counts) == 1 else ", ".join(f"{name} ({count:,})" for name, count in counts.items())
    )


def _size(count: float) -> str:
    for unit, power in (("GB", 1e9), ("MB", 1e6)):
        if count >= power:
            return f"{count / power:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"
