"""Every file operation of a command as a place where it is killed, or where the disk is full; then it is started again.

    python tests/crash_points.py FOLDER train:kill:1 extract:fail:3      # every operation; every third

A process counts the opens, writes, syncs, renames and removals below FOLDER of one undisturbed run. Then, for each of them, a fork of
itself is killed there (a write is cut in half first), or is told there that the disk is full; another fork starts the same command
again, and must end with the bytes of the undisturbed run and leave nothing beside them.
"""

import builtins
import errno
import io
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SKIPPED = ("log.txt", "environment.json", "features.csv", ".lock")  # times, commands, and times of files


class Operations:
    """Counts file operations below a folder; at number ``stop`` the process is killed, or the operation fails."""

    def __init__(self, folder: Path, how: str = "kill", stop: int = -1) -> None:
        self.folder, self.how, self.stop = str(folder.resolve()), how, stop
        self.seen: list[str] = []

    def at(self, name: str, path: Any, half: Callable[[], None] = lambda: None) -> None:
        try:
            place = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.path.abspath(os.fspath(path))
        except (OSError, TypeError):
            return
        if not place.startswith(self.folder) or isinstance(place, bytes):
            return
        self.seen.append(name)
        if len(self.seen) - 1 == self.stop:
            half()
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)

    def watch(self) -> None:
        """From now on, in this process."""
        plain = {name: getattr(os, name) for name in ("open", "fsync", "replace", "unlink", "remove", "mkdir")}
        opened = io.open

        def os_open(path, flags, *more, **options):
            if flags & os.O_CREAT:
                self.at("open", path)
            return plain["open"](path, flags, *more, **options)

        def called(name):
            def run(path, *more, **options):
                self.at(name, path)
                return plain[name](path, *more, **options)

            return run

        def any_open(file, mode="r", *more, **options):
            if isinstance(file, int) or not set(mode) & set("wax+"):
                return opened(file, mode, *more, **options)
            self.at("open", file)
            return Torn(opened(file, mode, *more, **options), file, self)

        os.open = os_open
        for name in ("fsync", "replace", "unlink", "remove", "mkdir"):
            setattr(os, name, called(name))
        builtins.open = io.open = any_open
        from gated_srp.data import cache

        saved = cache.save_file

        def save_file(tensors, path, **options):  # written outside Python
            def half():
                saved(tensors, path, **options)
                os.truncate(path, os.path.getsize(path) // 2)

            self.at("write", path, half)
            return saved(tensors, path, **options)

        cache.save_file = save_file


class Torn:
    """An open file of which a write may be cut in half."""

    def __init__(self, file: Any, path: Any, operations: Operations) -> None:
        self._file, self._path, self._operations = file, path, operations

    def write(self, data: Any) -> Any:
        def half() -> None:
            self._file.write(data[: len(data) // 2])
            self._file.flush()

        self._operations.at("write", self._path, half)
        return self._file.write(data)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __enter__(self) -> "Torn":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __iter__(self) -> Any:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


# What is run ----------------------------------------------------------------------------------------------------------


def train(inputs: Path, out: Path) -> None:
    from gated_srp.config import load_config
    from gated_srp.training.train import train

    train(load_config(inputs / "cohort.yaml", {"out": str(out)}), arm="gated_srp", seed=42, save_every=0.0)


def compare(inputs: Path, out: Path) -> None:
    import gated_srp
    from gated_srp.reports import figures
    from gated_srp.study import engine
    from gated_srp.study.worker import run_cell

    def here(board, slots, **options):
        """The cells in this process, which is the one that is watched."""
        for cell in board.of("waiting"):
            run_cell(cell.spec())
            board.set(cell, "finished")

    engine.run_local = here
    figures.draw_comparison = lambda *given, **options: []  # seconds of matplotlib, and the same `whole`
    gated_srp.compare(inputs / "cohort.yaml", arms=["na", "gated_srp"], seeds=[42], out=out, jobs=1, bootstrap=0)


def extract(inputs: Path, out: Path) -> None:
    from images import mean_colour

    from gated_srp.slides.extract import Extraction, extract_slides
    from gated_srp.slides.store import AtlasPatch
    from gated_srp.slides.tiles import Tiling

    slides = sorted((inputs / "slides").glob("*.tif"))
    layout = AtlasPatch(out)
    extract_slides(slides, Extraction(encoder=mean_colour(), tiling=Tiling(size=64), layout=layout, workers=0, batch=5))


def cache(inputs: Path, out: Path) -> None:
    from safetensors.torch import load_file

    from gated_srp.data.cache import BagCache
    from gated_srp.data.prepared import Preparation

    kept = BagCache(out)
    for file in sorted((inputs / "feats").rglob("*.h5"))[:4]:
        bag = kept.read(file, Preparation())
        assert bag.features.equal(load_file(inputs / f"{file.stem}.safetensors")["features"])


def write_inputs(folder: Path) -> None:
    sys.path[:0] = [str(HERE), str(HERE / "slides")]
    from images import picture, write_slide
    from safetensors.torch import save_file
    from training.toy_cohorts import write_cohort

    from gated_srp.data.prepared import Preparation, prepare

    write_cohort(folder, slides=10, train={"epochs": 2, "accumulation": 3})
    for number, name in enumerate("ab"):
        write_slide(folder / "slides" / f"{name}.tif", picture((400, 320), [(64, 64, 256, 192)], seed=number))
    for file in sorted((folder / "feats").rglob("*.h5"))[:4]:
        save_file({"features": prepare(file, Preparation()).features}, folder / f"{file.stem}.safetensors")


COMMANDS = {"train": train, "compare": compare, "extract": extract, "cache": cache}


# The harness ----------------------------------------------------------------------------------------------------------


def in_fork(work: Callable[[], None], log: Path) -> int:
    """How it ended: 0, 3 for an error that a user can mend, 4 for any other, or the signal, below 0."""
    child = os.fork()
    if child == 0:
        status = 0
        try:
            work()
        except BaseException as error:
            from gated_srp.errors import UserError

            status = 3 if isinstance(error, UserError) else 4
            log.write_text("".join(traceback.format_exception(error)))
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def contents(folder: Path) -> dict[str, bytes]:
    """What a command leaves, by name; files that hold times are compared by their names alone."""
    return {
        str(path.relative_to(folder)): b"" if path.name in SKIPPED else _plain(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _plain(path: Path) -> bytes:
    if path.suffix == ".safetensors" and "-" in path.stem:  # of the cache: its metadata are in no order
        from safetensors.torch import load_file, save

        return save(load_file(path))
    return path.read_bytes()


def check(command: str, folder: Path, *, every: int = 1, how: str = "kill") -> dict[str, Any]:
    """Try every so-many-th operation; the counts, and what went wrong."""
    inputs, out, log = folder / "inputs", folder / "out", folder / "log.txt"
    if not inputs.exists():
        write_inputs(inputs)
    work = COMMANDS[command]

    def counted() -> None:
        operations = Operations(out)
        operations.watch()
        work(inputs, out)
        (folder / "seen.json").write_text(json.dumps(operations.seen))

    def disturbed(number: int) -> None:
        Operations(out, how, number).watch()
        work(inputs, out)

    shutil.rmtree(out, ignore_errors=True)
    assert in_fork(counted, log) == 0, log.read_text()
    seen, expected = json.loads((folder / "seen.json").read_text()), contents(out)
    found: dict[str, Any] = {"command": command, "how": how, "operations": len(seen), "tried": 0, "wrong": []}
    kinds: Counter[str] = Counter()
    began = time.monotonic()
    for number in range(every // 2, len(seen), every):
        shutil.rmtree(out, ignore_errors=True)
        status = in_fork(lambda n=number: disturbed(n), log)
        allowed = (-signal.SIGKILL,) if how == "kill" else (0, 3)
        place = f"{seen[number]} {number} of {len(seen)}"
        found["tried"] += 1
        kinds[seen[number]] += 1
        if status not in allowed:
            found["wrong"].append(f"{place}: ended with {status}: {log.read_text()[-1500:] if log.exists() else ''}")
            continue
        if (status := in_fork(lambda: work(inputs, out), log)) != 0:
            found["wrong"].append(f"{place}: started again, it ended with {status}: {log.read_text()[-1500:]}")
            continue
        after = contents(out)
        if after != expected:
            names = sorted(name for name in {*after, *expected} if after.get(name) != expected.get(name))
            found["wrong"].append(f"{place}: differs in {names}")
    return found | {"kinds": dict(kinds), "seconds": round(time.monotonic() - began, 1)}


def main(folder: Path, tasks: list[str]) -> int:
    sys.path[:0] = [str(HERE), str(HERE / "slides")]
    import torch

    import gated_srp.reports.figures
    import gated_srp.slides.extract
    import gated_srp.study.comparison
    import gated_srp.training.train  # noqa: F401 - imports are paid once, not by every fork

    torch.set_num_threads(1)
    wrong = 0
    for task in tasks:
        command, how, every = task.split(":")
        result = check(command, folder, every=int(every), how=how)
        wrong += len(result["wrong"])
        print(json.dumps(result), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
