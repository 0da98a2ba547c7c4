"""Options that several commands have, defined once."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

Cohort = Annotated[Path, Argument(help="The cohort's YAML.")]
Run = Annotated[Path, Argument(help="A run's folder, or its model file.")]
Seeds = Annotated[str | None, Option(help="E.g. 42,43,44 or 42-46, instead of the usual ones.")]
Out = Annotated[Path | None, Option(help="Where runs are written, instead of the YAML's `out`.")]
Fold = Annotated[int, Option(min=0, help="Which one, where the YAML sets `folds` or its split has several.")]
Devices = Annotated[int, Option(min=1, help="Processes that share the bags of an update.")]
Seconds = Annotated[float, Option(min=0, metavar="SECONDS", help="Between states that are saved within an epoch.")]
Deep = Annotated[bool, Option("--deep", help="Know feature files again by all of their bytes, not by a sample.")]
Change = Annotated[list[str] | None, Option("--set", help="A setting, e.g. --set train.workers=4.")]
Repeats = Annotated[int, Option(min=1, help="How often patients are resampled.")]
Stride = Annotated[float | None, Option(help="Distance between patches, where the file's is wrong.")]
Coords = Annotated[Path | None, Option(help="Folder of the positions, where it is not beside the features.")]
Whose = Annotated[
    Path | None,
    Option(
        help="A spreadsheet of slides, patients and the run's covariates, or a cohort's YAML: whose slides these are."
    ),
]
Drawn = Annotated[
    Path | None,
    Option("--annotations", help="Folder of what was drawn on the slides, or one file: outlines are shown."),
]
Within = Annotated[
    Path | None,
    Option("--annotations", help="Folder of what was drawn on the slides, for models that were trained on `regions`."),
]
Low = Annotated[
    Path | None,
    Option("--features-low", help="Folder of the slides' lower magnification, for models that were trained on two."),
]
Force = Annotated[
    bool,
    Option("--force", help="Go on with another stride, or an encoder's name that we do not know, than in training."),
]
Size = Annotated[int | None, Option(min=8, help="Pixels of a patch; the encoder's own if not set.")]
Magnification = Annotated[float, Option("--magnification", "-m", help="Of the patches.")]
