"""The paper's eleven cohorts as data: labels, classes, inventories, splits, training settings and gate widths.

table = COHORTS["CAMELYON17"].read_labels("labels")
split = COHORTS["CAMELYON17"].read_split("labels", 42)
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from gated_srp.data.splits import published as published_splits
from gated_srp.data.splits.rules import Split
from gated_srp.data.tables import published as cohort_labels
from gated_srp.data.tables.published import LabelFile
from gated_srp.data.tables.table import Table
from gated_srp.errors import Note, UserError
from gated_srp.tasks import Recipe

SEEDS = (42, 43, 44, 45, 46)


@dataclass(frozen=True)
class Gate:
    """Signed range and hidden width; ``note`` says where they come from if the paper gives none for this use."""

    delta: float
    hidden_dim: int
    note: str = ""


@dataclass(frozen=True)
class Inventory:
    """What the paper counts; slides by class in the order of the classes."""

    slides: int
    cases: int | None = None
    events: int | None = None
    by_class: tuple[int, ...] = ()


@dataclass(frozen=True)
class Cohort:
    """One cohort of the paper; ``note`` tells where the public table and the paper differ."""

    name: str
    task: str
    classes: tuple[str, ...]
    labels: LabelFile
    reader: Callable[[Path, "Cohort"], Table]
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
        table = self.reader(path, self)
        about = (Note("note", "table", self.note),) if self.note else ()
        return replace(table, notes=(*table.notes, *about, *self.labels.differences(path)))

    def read_split(self, folder: str | Path, seed: int, *, table: Table | None = None) -> Split:
        """The published split of this seed; ``table`` if it was read before."""
        table = table or self.read_labels(folder)
        if self.rule is None:
            split = published_splits.from_row_files(table, self.labels.find(folder).parent)
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
            base, told = self.trunks[trunk], encoder == "uni_v2"
        else:
            told = trunk in ("nystrom", "peer") and encoder in self.gates
            base = self.gates[encoder if told else "uni_v2"]
        note = f"the paper has no gate for {self.name} with {encoder} on the {trunk} trunk; UNI-v2's is used"
        return base if told else replace(base, note=note)


def find_cohort(name: str) -> Cohort:
    """By name, whatever its case and signs; a TCGA cohort also by its short name.

    >>> find_cohort("tcga_kirc").name, find_cohort("KIRC").name
    ('TCGA-KIRC', 'TCGA-KIRC')
    """
    plain = name.upper().replace("_", "-")
    for key in (plain, f"TCGA-{plain}", plain.replace("-", "")):
        if key in COHORTS:
            return COHORTS[key]
    near = difflib.get_close_matches(plain, list(COHORTS), n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise UserError(f"no cohort {name!r} in the paper.{hint} There are: {', '.join(COHORTS)}.")


# The data ------------------------------------------------------------------------------------------------------------

_CLASSIFY = Recipe(epochs=15, lr=2e-4, weight_decay=0.05, accumulation=16)
_SURVIVE = Recipe(epochs=20, lr=1e-4, weight_decay=1e-5, accumulation=1)
_ADP_LABELS = tuple(
    "E E.M E.M.S E.M.C E.T E.T.S E.T.C E.T.X C C.D C.D.I C.D.R C.L C.X H H.E H.K H.Y H.X S S.M S.C S.R "  # noqa: SIM905
    "A A.W A.M M N N.P N.R N.G N.G.M N.G.X G G.O G.N G.X T".split()
)
_TCGA_FILE = LabelFile(
    folder="tcga_survival",
    name="all_matched_survival_labels_long.csv",
    sha256="dc549233fc48368b53e3af122ab6ad1e784313a083c0c51e011efe3a56b60196",
    source="TCGA-CDR survival outcomes (Liu et al. 2018) matched to diagnostic slides, released beside the paper; "
    "slides: https://portal.gdc.cancer.gov",
)


def _tcga(name: str, inventory: Inventory, **gates: Gate) -> Cohort:
    return Cohort(
        name=f"TCGA-{name}",
        task="survival",
        classes=(),
        labels=_TCGA_FILE,
        reader=cohort_labels.tcga,
        rule=published_splits.by_event_and_time,
        inventory=inventory,
        recipe=_SURVIVE,
        metric="c_index",
        score="case",
        cap=49_152,
        patients="case barcode",
        gates=gates,
    )


_ALL = (
    Cohort(
        name="CAMELYON16",
        task="classification",
        classes=("normal", "tumor"),
        labels=LabelFile(
            folder="camelyon16",
            name="slides.csv",
            sha256="e4deff956d1d77803c53ccf9f6d1cb27edbaa52ae2ffde5e6dc6436fb6f205c0",
            source="the 270 labelled training slides of https://camelyon16.grand-challenge.org",
        ),
        reader=cohort_labels.camelyon16,
        rule=published_splits.by_class,
        inventory=Inventory(270, by_class=(159, 111)),
        recipe=_CLASSIFY,
        metric="macro_f1",
        score="slide",
        cap=16_384,
        patients="none published: a slide is its own patient",
        gates={"uni_v2": Gate(1.0, 16)},
    ),
    Cohort(
        name="CAMELYON17",
        task="classification",
        classes=("negative", "itc", "micro", "macro"),
        labels=LabelFile(
            folder="camelyon17",
            name="stages.csv",
            sha256="1bf47c5c3b205891210f25cdfd167fb53649f5ae807379e734a50a8ca654b247",
            source="https://camelyon17.grand-challenge.org (training labels)",
        ),
        reader=cohort_labels.camelyon17,
        rule=published_splits.by_centre,
        inventory=Inventory(499, cases=100, by_class=(318, 36, 59, 86)),
        recipe=_CLASSIFY,
        metric="macro_f1",
        score="slide",
        cap=49_152,
        patients="patient_NNN of the slide's name",
        gates={"uni_v2": Gate(2.0, 64)},
        note="CAMELYON17: the public table has 500 slides, the paper used 499 (one macro fewer)",
    ),
    Cohort(
        name="KGH",
        task="classification",
        classes=("CP_HP", "CP_SSL", "CP_TA", "CP_TVA"),
        labels=LabelFile(
            folder="kgh", name="slides.csv", sha256=None, source="private; a table slide_id,label of your own"
        ),
        reader=cohort_labels.kgh,
        rule=published_splits.by_class,
        inventory=Inventory(837, by_class=(212, 201, 207, 217)),
        recipe=_CLASSIFY,
        metric="macro_f1",
        score="slide",
        cap=32_768,
        patients="none published: a slide is its own patient",
        gates={"uni_v2": Gate(1.0, 64), "vit_b16": Gate(1.0, 64), "medsiglip_448": Gate(1.0, 64)},
    ),
    Cohort(
        name="PANDA",
        task="classification",
        classes=("0", "1", "2", "3", "4", "5"),
        labels=LabelFile(
            folder="panda",
            name="train.csv",
            sha256="f67935796d8da5ff9dcb27865968e51f24d297fe7f17e69f4af3ca1b3737f45a",
            source="https://www.kaggle.com/c/prostate-cancer-grade-assessment/data",
        ),
        reader=cohort_labels.panda,
        rule=published_splits.by_provider_and_grade,
        inventory=Inventory(10_615, by_class=(2891, 2666, 1343, 1242, 1249, 1224)),
        recipe=replace(_CLASSIFY, epochs=20),
        metric="quadratic_kappa",
        score="slide",
        cap=None,
        patients="none published: a slide is its own patient",
        gates={"uni_v2": Gate(0.5, 16), "vit_b16": Gate(0.5, 16), "medsiglip_448": Gate(0.5, 16)},
        trunks={"vit4": Gate(2.0, 32)},
        note="PANDA: the public table has 10,616 slides, the paper used 10,615 (one of grade 0 fewer)",
    ),
    Cohort(
        name="BRACS",
        task="classification",
        classes=("N", "PB", "UDH", "FEA", "ADH", "DCIS", "IC"),
        labels=LabelFile(
            folder="bracs",
            name="BRACS.xlsx",
            sha256="9622108cf2bbf05b997e03611587ef35e29a658b13afc22f248240c5eb854edf",
            source="https://www.bracs.icar.cnr.it (summary file BRACS.xlsx)",
        ),
        reader=cohort_labels.bracs,
        rule=published_splits.by_label_vector,
        inventory=Inventory(546, cases=189, by_class=(44, 147, 73, 41, 48, 61, 132)),
        recipe=_CLASSIFY,
        metric="macro_f1",
        score="slide",
        cap=32_768,
        patients="column 'Patient Id'",
        gates={"uni_v2": Gate(0.5, 128), "vit_b16": Gate(2.0, 128), "medsiglip_448": Gate(0.5, 32)},
        note="BRACS: the public table has 547 slides, the paper used 546 (one UDH fewer)",
    ),
    _tcga("KIRC", Inventory(517, 511, 171), uni_v2=Gate(1.5, 128)),
    _tcga("KIRP", Inventory(296, 272, 42), uni_v2=Gate(2.0, 32), vit_b16=Gate(0.5, 64), medsiglip_448=Gate(2.0, 32)),
    _tcga("LUAD", Inventory(528, 465, 163), uni_v2=Gate(1.0, 128), vit_b16=Gate(2.0, 32), medsiglip_448=Gate(1.0, 128)),
    _tcga(
        "STAD", Inventory(409, 383, 156), uni_v2=Gate(0.5, 128), vit_b16=Gate(0.5, 128), medsiglip_448=Gate(0.5, 128)
    ),
    _tcga("UCEC", Inventory(275, 249, 34), uni_v2=Gate(1.5, 32)),
    Cohort(
        name="ADP",
        task="multilabel",
        classes=_ADP_LABELS,
        labels=LabelFile(
            folder="adp",
            name="ADP_EncodedLabels_Release1_Flat.csv",
            sha256="b39711573ac3fd0ecd5910074394e64c882653d42c5e25ef5f19e4cad20b58e0",
            source="https://www.dsp.utoronto.ca/projects/ADP (Release 1, with train.npy, valid.npy, test.npy)",
        ),
        reader=cohort_labels.adp,
        rule=None,
        inventory=Inventory(17_668),
        recipe=Recipe(epochs=20, lr=5e-4, weight_decay=0.05, accumulation=1, batch_size=256),
        metric="macro_map",
        score="slide",
        cap=None,
        patients="none: patches, by the release's own row files",
        gates={"vit_s16": Gate(0.5, 128)},
        images=True,
        note="ADP: 38 of the 43 labels; N.G.A, N.G.E, N.G.O, N.G.R and N.G.T have no positive in the table",
    ),
)

COHORTS: dict[str, Cohort] = {cohort.name: cohort for cohort in _ALL}
