"""Speed and memory of one arm over a few epochs: ``python -m gated_srp.study.runtime``, a cell on standard input, JSON out.

A process of its own, so that the most memory it ever held is this arm's.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gated_srp.errors import UserError

if TYPE_CHECKING:
    from gated_srp.study.cells import Cell


def measure(cell: Cell) -> dict[str, float]:
    """In a fresh process: peak_reserved_gib, train_wsi_per_second, test_wsi_per_second."""
    command = [sys.executable, "-m", "gated_srp.study.runtime"]
    done = subprocess.run(command, input=json.dumps(cell.spec()), capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
        raise UserError(f"{cell}: could not be measured ({said.removeprefix('error: ')}).")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


class _Silent:
    """A `Watch` that only looks on."""

    def bag(self, bag: object) -> None: ...

    def window(self, training: object) -> None: ...

    def epoch(self, training: object) -> None: ...


def _measure_here(spec: Mapping[str, Any]) -> dict[str, float]:
    import torch
    from lightning.fabric import Fabric

    from gated_srp.data.files.formats import read_header
    from gated_srp.data.loader import BagLoader
    from gated_srp.models import build_model
    from gated_srp.study.cells import Cell
    from gated_srp.training.inputs import gather
    from gated_srp.training.loop import Training, predict_logits, train_epoch
    from gated_srp.training.start import accelerator, choose_precision

    cell = Cell.from_spec(spec)
    config, material, kind = cell.config, gather(cell.config, cell.seed, cell.fold), accelerator()
    bf16 = choose_precision(config.train.precision, kind) == "bf16"
    fabric = Fabric(accelerator=kind, devices=1, precision="bf16-mixed" if bf16 else "32-true")
    rows = material.rows("train")
    width = read_header(material.bags.files[rows[0]], **material.bags.settings.reading).shape[1]
    sizes = {"in_dim": width, "num_outputs": material.task.num_outputs, "seed": cell.seed}
    model = build_model(cell.arm, **sizes, **config.sizes(cell.arm)).to(fabric.device)
    with BagLoader(material.bags, workers=config.train.workers) as loader:
        training = Training(fabric, model, material.task, loader, config.train, cell.seed)
        start = time.perf_counter()
        for epoch in range(config.train.epochs):
            training.progress.epoch, training.progress.bags = epoch, 0
            train_epoch(training, rows, _Silent())
        trained = time.perf_counter()
        predict_logits(fabric, model, loader, material.rows("test"))
        tested = time.perf_counter()
    cuda = fabric.device.type == "cuda"
    # Kilobytes on Linux. On a processor the whole process counts, libraries and loaded slides too.
    peak = torch.cuda.max_memory_reserved() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "peak_reserved_gib": peak / 2**30,
        "train_wsi_per_second": config.train.epochs * len(rows) / (trained - start),
        "test_wsi_per_second": len(material.rows("test")) / (tested - trained),
    }


if __name__ == "__main__":
    try:
        print(json.dumps(_measure_here(json.loads(sys.stdin.readline()))))
    except UserError as error:
        sys.exit(f"error: {error}")
