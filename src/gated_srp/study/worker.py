"""The process that trains cells, ``python -m gated_srp.study.worker``, and `Worker`, the end of it that a study holds.

Without arguments it reads cells (JSON, one per line) from standard input and runs one after the other, so that libraries are
imported once. After each it writes a line to standard output: ``{}``, or ``{"error": {what, where, cure, kind}}``. It ends when
its input is closed; a cell in training then stops with its state saved, so no cell outlives the process that started it.

``measure``: the same for one cell whose speed and memory are measured; ``FILE NUMBER``: run line NUMBER (from 0) of FILE, for Slurm.
"""

from __future__ import annotations

import _thread
import gc
import hashlib
import json
import math
import os
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from gated_srp.errors import Interrupted, UserError, counted
from gated_srp.files import write_whole
from gated_srp.machine import peak_memory

if TYPE_CHECKING:
    from gated_srp.study.cells import Cell

COMMAND = (sys.executable, "-m", "gated_srp.study.worker")
STOPPED = 130  # exit status of a process that saved its state and left
GRACE = 60.0  # seconds that a process has to save its state and leave


# What it does --------------------------------------------------------------------------------------------------------


def run_cell(spec: Mapping[str, Any]) -> Path:
    """Train the cell, resume it, or leave it alone if it is finished."""
    from gated_srp.study.cells import Cell
    from gated_srp.training.train import train

    cell = Cell.from_spec(spec)
    deadline = time.monotonic() + GRACE
    while (cell.key / ".lock").exists():  # the study before this one may have been stopped a moment ago
        try:
            with cell.run.lock():
                break
        except UserError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
    return train(cell.config, arm=cell.arm, seed=cell.seed, fold=cell.fold).path


class _Silent:
    """Callbacks that do nothing."""

    def bag(self, _: object) -> None: ...

    window = epoch = bag


def measure_cell(spec: Mapping[str, Any]) -> dict[str, float]:
    """Train for the cell's epochs without writing anything: peak_reserved_gib, train_wsi_per_second, test_wsi_per_second."""
    import torch

    from gated_srp.data.files.formats import read_header
    from gated_srp.data.loader import BagLoader
    from gated_srp.models import build_model
    from gated_srp.study.cells import Cell
    from gated_srp.training.inputs import load_inputs
    from gated_srp.training.loop import Training, predict_logits, train_epoch
    from gated_srp.training.ranks import Ranks

    cell = Cell.from_spec(spec)
    config, inputs = cell.config, load_inputs(cell.config, cell.seed, cell.fold)
    ranks = Ranks.one(config.train.precision)
    rows = inputs.rows("train")
    width = read_header(inputs.bags.files[rows[0]], **inputs.bags.settings.reading).shape[1]
    sizes: dict[str, Any] = {"in_dim": width, "num_outputs": inputs.task.num_outputs, "seed": cell.seed}
    sizes |= {"covariates": inputs.covariates.width} if inputs.covariates else {}
    model = build_model(cell.arm, **sizes, **config.sizes(cell.arm)).to(ranks.device)
    with BagLoader(inputs.bags, workers=config.train.workers) as loader:
        training = Training(ranks, model, inputs.task, loader, config.train, cell.seed)
        start = time.perf_counter()
        for epoch in range(config.train.epochs):
            training.progress.epoch, training.progress.bags = epoch, 0
            train_epoch(training, rows, _Silent())
        trained = time.perf_counter()
        predict_logits(ranks, model, loader, inputs.rows("test"))
        tested = time.perf_counter()
    cuda = ranks.device.type == "cuda"
    # On a processor the whole process counts, libraries and loaded slides too.
    peak = torch.cuda.max_memory_reserved() if cuda else peak_memory()
    if peak is None:
        raise UserError("this system does not say how much memory a process held", cure="Measure on Linux or macOS.")
    return {
        "peak_reserved_gib": peak / 2**30,
        "train_wsi_per_second": config.train.epochs * len(rows) / (trained - start),
        "test_wsi_per_second": len(inputs.rows("test")) / (tested - trained),
    }


def measure(spec: Mapping[str, Any]) -> dict[str, float]:
    """`measure_cell` in a new process, so that the most memory it ever held is this cell's."""
    done = subprocess.run([*COMMAND, "measure"], input=json.dumps(spec), capture_output=True, text=True, check=False)
    error, found = reply(done.stdout) or (last_words(done.stderr, done.returncode), {})
    if error is not None:
        raise error
    return found


# What it says --------------------------------------------------------------------------------------------------------


def reply(lines: str) -> tuple[UserError | None, dict[str, Any]] | None:
    """What the process said of a cell: the error, if any, and other content. None if it has not said anything (yet)."""
    if not lines.endswith("\n"):
        return None
    content = json.loads(lines.splitlines()[-1])
    error = content.pop("error", None)
    return (None if error is None else UserError(**error)), content


def last_words(stderr: str, status: int) -> UserError:
    """For a process that ended without a reply: how it was ended, or the last line that it wrote."""
    if status < 0:
        name = signal.Signals(-status).name
        return UserError(f"ended by {name}" + (", perhaps for lack of memory" * (name == "SIGKILL")), kind="crash")
    lines = [line for line in stderr.splitlines() if line.strip()]
    return UserError(lines[-1] if lines else f"ended with status {status}", kind="crash")


def _told(error: Exception) -> dict[str, Any]:
    if not isinstance(error, UserError):
        error = UserError(f"{type(error).__name__}: {error}", kind="unexpected")
    return {"error": {name: getattr(error, name) for name in ("what", "where", "cure", "kind")}}


# Holding it ---------------------------------------------------------------------------------------------------------


class Worker:
    """A process that runs one cell at a time: started when first needed, and anew after an error."""

    cell: Cell | None = None
    began = 0.0
    process: subprocess.Popen[str] | None = None

    def __init__(self, environment: Mapping[str, str], command: Sequence[str] = COMMAND) -> None:
        self._environment, self._command = environment, command

    def start(self, cell: Cell) -> None:
        if self.process is not None and self.process.poll() is not None:
            self.end()
        process = self.process = self.process or self._launch()
        assert process.stdin is not None
        self.cell, self.began = cell, time.monotonic()
        self._read = os.fstat(self._replies.fileno()).st_size
        with suppress(BrokenPipeError):  # ended at once: its status says why
            process.stdin.write(json.dumps(cell.spec()) + "\n")
            process.stdin.flush()

    @property
    def ended(self) -> bool:
        """Whether the cell is: the process has replied, or is gone."""
        assert self.process is not None
        return self.process.poll() is not None or reply(self._said()) is not None

    def result(self) -> UserError | None:
        """Why the cell failed, None if it did not; the worker is then free, with a new process if it failed."""
        assert self.cell is not None and self.process is not None
        cell, self.cell = self.cell, None
        found, status = reply(self._said()), self.process.poll()
        if found is not None:
            error = found[0]
        elif status == 0 and cell.run.finished:
            return None
        else:
            self._output.seek(0)
            error = last_words(self._output.read(), status or 0)
        if error is None and not cell.run.finished:
            error = UserError("ended without a result", kind="crash")
        if error is not None:
            self.end()
        return error

    def close(self) -> None:
        """Close its input: a cell in training saves its state, and the process ends."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()

    def end(self, patience: float = GRACE) -> None:
        """Close it, wait until it is gone, and kill it if it does not go."""
        self.close()
        if self.process is not None:
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self._replies.close()
            self._output.close()
        self.process = None

    def _launch(self) -> subprocess.Popen[str]:
        # Files, not pipes: a worker that prints much is not blocked, and one that is killed leaves no reader waiting.
        self._replies, self._output = _temporary(), _temporary()
        pipe, said, printed = subprocess.PIPE, self._replies, self._output
        return subprocess.Popen(
            self._command, stdin=pipe, stdout=said, stderr=printed, text=True, env=self._environment
        )

    def _said(self) -> str:
        return os.pread(self._replies.fileno(), 1 << 20, self._read).decode(errors="replace")


def _temporary() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def thread_limit() -> int | None:
    """The most threads that the user's environment allows a process; None where it says nothing."""
    said = [os.environ.get(name, "").split(",")[0].strip() for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")]
    return min((int(number) for number in said if number.isdigit() and int(number)), default=None)


# Slurm ---------------------------------------------------------------------------------------------------------------

_SLACK = 3.0  # of the estimated time; a task that runs out of it continues when it is submitted again
_NOTICE = 120  # seconds before the end at which Slurm asks a task to save and leave


def write_job_array(
    folder: Path, cells: Sequence[Cell], *, seconds: float, memory: float, gpu: bool, threads: int = 4
) -> Path:
    """``cells.jsonl`` and ``job.sh``; ``seconds`` and ``memory`` (bytes) of the largest cell, roughly. All paths are absolute.

    They are in a subfolder named after the cells: an array reads its file when it starts, so a later study must not change it.
    """
    content = "".join(json.dumps(cell.spec()) + "\n" for cell in cells)
    folder = folder.absolute() / hashlib.sha256(content.encode()).hexdigest()[:12]
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    write_whole(folder / "cells.jsonl", content)
    threads = min(threads, thread_limit() or threads)
    minutes = max(30, math.ceil(_SLACK * seconds / 60))
    gigabytes = max(4, math.ceil(1.5 * memory / 1e9))
    lines = [
        "#!/bin/bash",
        f"# {counted(len(cells), 'cell')} of a gated-srp study. Submit with: sbatch {shlex.quote(str(folder / 'job.sh'))}",
        "# Time and memory are rough; change them to what your cluster wants. A task that was cut short continues from its last",
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
        f'exec {shlex.join((*COMMAND, str(folder / "cells.jsonl")))} "$SLURM_ARRAY_TASK_ID"',
    ]
    write_whole(path := folder / "job.sh", "\n".join(lines) + "\n")
    path.chmod(0o755)
    return path


# The process ---------------------------------------------------------------------------------------------------------


def _serve(replies: IO[str]) -> int:
    """Run what comes in until the input is closed. After an error the process ends: another cell gets a clean one."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_listen, args=(lines, busy), daemon=True).start()
    import torch

    import gated_srp.training.train  # noqa: F401 - all that cells need

    gc.freeze()  # libraries need not be searched for garbage after each cell
    threads = torch.get_num_threads()
    while line := lines.get():
        try:
            run_cell(json.loads(line))
            said: dict[str, Any] = {}
        except Interrupted as stopped:
            print(stopped, file=sys.stderr)
            return STOPPED
        except Exception as error:
            traceback.print_exc()
            said = _told(error)
        busy.clear()
        print(json.dumps(said), file=replies, flush=True)
        if said:
            return 2
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with suppress(OSError):  # Linux: forget the peak of the resident memory
            Path("/proc/self/clear_refs").write_text("5")
        torch.set_num_threads(threads)  # a resumed run takes the number that it was started with
    return 0


def _listen(lines: queue.SimpleQueue[str], busy: threading.Event) -> None:
    """Not through sys.stdin, whose lock would hold up the end of this process."""
    rest = b""
    while found := os.read(0, 1 << 16):
        *whole, rest = (rest + found).split(b"\n")
        for line in whole:
            busy.set()
            lines.put(line.decode())
    if busy.is_set():
        if os.name == "nt":  # where a signal ends the process before it has saved its state
            _thread.interrupt_main(signal.SIGTERM)
        else:
            os.kill(os.getpid(), signal.SIGTERM)
    lines.put("")


def main(arguments: list[str]) -> int:
    """0 finished, 2 a user's mistake, 130 stopped with its state saved."""
    if len(arguments) == 2:
        try:
            run_cell(json.loads(Path(arguments[0]).read_text(encoding="utf-8").splitlines()[int(arguments[1])]))
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except Interrupted as stopped:
            print(stopped, file=sys.stderr)
            return STOPPED
        return 0
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not a reply
    if arguments == ["measure"]:
        try:
            said: dict[str, Any] = measure_cell(json.loads(sys.stdin.readline()))
        except UserError as error:
            said = _told(error)
        print(json.dumps(said), file=replies, flush=True)
        return 2 if "error" in said else 0
    status = _serve(replies)
    sys.stderr.flush()
    os._exit(status)  # all is on disk; taking the libraries down would keep the study waiting for seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
