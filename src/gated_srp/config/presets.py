"""The paper's eleven cohorts, read from presets.yaml: labels, classes, inventories, splits, training settings and gate widths.

table = COHORTS["CAMELYON17"].read_labels("labels")
split = COHORTS["CAMELYON17"].read_split("labels", 42)
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import yaml

from gated_srp.config.cohort import SEEDS, Gate
from gated_srp.data import published
from gated_srp.data.columns import Columns
from gated_srp.data.files.siblings import may_be_same
from gated_srp.data.published import LabelFile
from gated_srp.data.splits import Split
from gated_srp.data.spreadsheet import read_frame
from gated_srp.data.table import Table, tidy_table
from gated_srp.errors import Note, UserError
from gated_srp.tasks import Recipe, find_task

__all__ = ["COHORTS", "SEEDS", "Cohort", "Gate", "Inventory", "find_cohort"]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast


@dataclass(frozen=True)
class Inventory:
    """What the paper counts; slides by class in the order of the classes."""

    slides: int
    cases: int | None = None
    events: int | None = None
    by_class: tuple[int, ...] = ()


@dataclass(frozen=True)
class Cohort:
    """One cohort of the paper; ``note`` says where the public table and the paper differ."""

    name: str
    task: str
    classes: tuple[str, ...]
    labels: LabelFile
    columns: Columns
    sheet: str | None
    rows: (
        Callable[[pd.DataFrame, Path, str], pd.DataFrame] | None
    )  # chooses those of a table, its path, the cohort's name
    rule: Callable[[Table, int], Split] | None  # None: row files beside the labels
    inventory: Inventory
    recipe: Recipe
    metric: str
    score: Literal["slide", "case"]
    cap: int | None
    patients: str
    gates: dict[str, Gate]  # by encoder, on the Nystrom trunk; peers take them too
    trunks: Mapping[str, Gate] = field(default_factory=dict)  # with UNI-v2 on another trunk
    images: bool = False  # of images, not of slides
    seeds: tuple[int, ...] = SEEDS
    note: str = ""

    def read_labels(self, folder: str | Path) -> Table:
        """The table of slides; the public file is in ``folder``, in the cohort's own folder there, or given itself."""
        path = self.labels.find(folder)
        frame, notes = read_frame(path, sheet=self.sheet)
        frame = self.rows(frame, path, self.name) if self.rows else frame
        table = tidy_table(frame, self.columns, where=path, task=self.task, classes=self.classes or None, notes=notes)
        about = (Note("note", "table", self.note),) if self.note else ()
        return replace(table, notes=(*table.notes, *about, *self.labels.differences(path)))

    def read_split(self, folder: str | Path, seed: int, *, table: Table | None = None) -> Split:
        """The published split of this seed; ``table`` if it was read before."""
        table = table or self.read_labels(folder)
        if self.rule is None:
            split = published.from_row_files(table, self.labels.find(folder).parent)
        else:
            split = self.rule(table, seed)
        return replace(split, source=f"{self.name}: {split.source}")

    def gate(self, encoder: str = "uni_v2", *, trunk: str = "nystrom") -> Gate:
        """The paper's gate for this encoder and trunk (`Arm.trunk`); where it has none, UNI-v2's with a note.

        >>> COHORTS["BRACS"].gate("vit_b16")
        Gate(delta=2.0, hidden_dim=128, note='')
        """
        if self.images:  # one trunk, no encoder
            return self.gates["vit_s16"]
        if trunk in self.trunks:
            base, published_gate = self.trunks[trunk], encoder == "uni_v2"
        else:
            names = [name for name in self.gates if may_be_same(name, encoder)] if trunk in ("nystrom", "peer") else []
            published_gate = bool(names)
            base = self.gates[names[0] if names else "uni_v2"]
        note = f"the paper has no gate for {self.name} with {encoder} on the {trunk} trunk; UNI-v2's is used"
        return base if published_gate else replace(base, note=note)


def find_cohort(name: str) -> Cohort:
    """By name, whatever its case and punctuation; a TCGA cohort also by its short name.

    >>> find_cohort("tcga_kirc").name, find_cohort("KIRC").name
    ('TCGA-KIRC', 'TCGA-KIRC')
    """
    plain = name.upper().replace("_", "-")
    for key in (plain, f"TCGA-{plain}", plain.replace("-", "")):
        if key in COHORTS:
            return COHORTS[key]
    near = difflib.get_close_matches(plain, list(COHORTS), n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise UserError(f"no cohort {name!r} in the paper", cure=f"{hint}There are: {', '.join(COHORTS)}.", kind="cohort")


def _gates(stored: Mapping[str, tuple[float, int]]) -> dict[str, Gate]:
    return {name: Gate(delta, hidden_dim) for name, (delta, hidden_dim) in stored.items()}


def _function(name: str | None) -> Any:
    return getattr(published, name) if name else None


def _cohort(name: str, stored: dict[str, Any]) -> Cohort:
    """An entry of presets.yaml; what it leaves out is the task's own."""
    task = find_task(stored["task"])
    counts, columns = stored["inventory"], dict(stored["columns"])
    if isinstance(columns.get("target"), list):
        columns["target"] = tuple(columns["target"])
    return Cohort(
        name=name,
        task=stored["task"],
        classes=tuple(stored.get("classes", ())),
        labels=LabelFile(**stored["labels"]),
        columns=Columns(**columns),
        sheet=stored.get("sheet"),
        rows=_function(stored.get("rows")),
        rule=_function(stored["rule"]),
        inventory=Inventory(**counts | {"by_class": tuple(counts.get("by_class", ()))}),
        recipe=replace(task.recipe, **stored.get("recipe", {})),
        metric=stored.get("metric", task.selects[0]),
        score=stored.get("score", task.score),
        cap=stored["cap"],
        patients=stored["patients"],
        gates=_gates(stored["gates"]),
        trunks=_gates(stored.get("trunks", {})),
        images=stored.get("images", False),
        note=stored.get("note", ""),
    )


_STORED = yaml.load(files(__package__).joinpath("presets.yaml").read_text("utf-8"), _LOADER)
COHORTS: dict[str, Cohort] = {name: _cohort(name, stored) for name, stored in _STORED.items()}
