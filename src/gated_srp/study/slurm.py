"""A study for a Slurm cluster: a file of cells and the script of a job array, one task a cell. Nothing is submitted."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from gated_srp.files import write_whole
from gated_srp.study.cells import Cell

_SLACK = 3.0  # of the estimated time; a task that runs out of it goes on when it is submitted again
_NOTICE = 120  # seconds before the end at which Slurm asks a task to save and leave


def write_job_array(
    folder: Path, cells: Sequence[Cell], *, seconds: float, memory: float, gpu: bool, threads: int = 4
) -> Path:
    """``cells.jsonl`` and ``job.sh``; ``seconds`` and ``memory`` (bytes) of the largest cell, roughly. All paths are absolute."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)
    write_whole(folder / "cells.jsonl", "".join(json.dumps(cell.spec()) + "\n" for cell in cells))
    minutes = max(30, math.ceil(_SLACK * seconds / 60))
    gigabytes = max(4, math.ceil(1.5 * memory / 1e9))
    lines = [
        "#!/bin/bash",
        f"# {len(cells)} cells of a gated-srp study. Submit with: sbatch {shlex.quote(str(folder / 'job.sh'))}",
        "# Time and memory are rough; change them to what your cluster wants. A task that was cut short goes on from its last",
        "# state when the script is submitted again; finished ones end at once.",
        "#SBATCH --job-name=gated-srp",
        f"#SBATCH --array=0-{len(cells) - 1}",
        f"#SBATCH --time={minutes}",
        f"#SBATCH --mem={gigabytes}G",
        f"#SBATCH --cpus-per-task={threads}",
        *(["#SBATCH --gres=gpu:1"] if gpu else []),
        f"#SBATCH --signal=B:TERM@{_NOTICE}",
        "#SBATCH --requeue",
        f"#SBATCH --output={str(folder / 'logs' / '%A_%a.txt').replace(' ', chr(92) + ' ')}",
        "",
        'export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK" MKL_NUM_THREADS="$SLURM_CPUS_PER_TASK"',
        # exec: Slurm's notice then reaches the training itself, which saves its state.
        f"exec {shlex.quote(sys.executable)} -m gated_srp.study.cell {shlex.quote(str(folder / 'cells.jsonl'))} "
        '"$SLURM_ARRAY_TASK_ID"',
    ]
    path = folder / "job.sh"
    write_whole(path, "\n".join(lines) + "\n")
    path.chmod(0o755)
    return path
