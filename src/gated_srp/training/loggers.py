"""Where an epoch's numbers go besides the run's own files: TensorBoard, Weights & Biases, MLflow, if installed and asked for."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gated_srp.errors import UserError


class Logger(Protocol):
    """Takes the numbers of an epoch, named ``val/macro_f1`` and the like; numbering starts at 1."""

    def log(self, epoch: int, values: Mapping[str, float]) -> None:
        """One epoch."""

    def close(self) -> None:
        """The training ends, or is left."""


class TensorBoard:
    """Event files in the run's folder ``tensorboard``."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, epoch: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, epoch)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run named COHORT/ARM/seed42; an interrupted training goes on in the same one."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        import wandb  # type: ignore[import-not-found, unused-ignore]

        digest = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        self._run = wandb.init(
            project="gated-srp",
            name=run_name(folder),
            id=digest,
            resume="allow",
            dir=str(folder),
            config=dict(settings),
        )

    def log(self, epoch: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=epoch)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of the experiment gated-srp, where MLflow is set up to keep them."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        import mlflow  # type: ignore[import-not-found, unused-ignore]

        self._mlflow = mlflow
        mlflow.set_experiment("gated-srp")
        mlflow.start_run(run_name=run_name(folder))
        mlflow.log_params({key: str(value)[:500] for key, value in settings.items()})

    def log(self, epoch: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({name.replace("@", "_"): value for name, value in values.items()}, step=epoch)

    def close(self) -> None:
        self._mlflow.end_run()


LOGGERS: dict[str, Callable[[Path, Mapping[str, Any]], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def open_loggers(names: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> list[Logger]:
    """The loggers of ``train.log``."""
    opened: list[Logger] = []
    for name in names:
        try:
            opened.append(LOGGERS[name](folder, settings))
        except ImportError as error:
            raise UserError(
                f"train.log names {name!r}, but the package {error.name or name!r} is not installed. Install it: pip install {name}; "
                "or take it out of train.log (history.csv and gates.csv are written anyway)."
            ) from None
    return opened


def run_name(folder: Path) -> str:
    """COHORT/ARM/seed42.

    >>> run_name(Path("runs/BRACS/gated_srp/seed42"))
    'BRACS/gated_srp/seed42'
    """
    return "/".join(folder.parts[-3:])
