"""Thousands of damaged files for every reader, in worker processes that a watchdog ends: `make fuzz`, or

    python tests/fuzz/fuzz_harness.py --cases 20000 --findings build/fuzz

A case is good where the file is read, or refused with a `UserError` that names it and says what to do. Counted are tracebacks (any
other exception), refusals without file or cure, hangs (over 10 s), allocations (over 2 GB), crashes of the process, and code: anything
that a file made Python start, write or connect to. The files of the cases found stay in the findings folder.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

HANG = 10.0  # seconds of the processor, which do not grow when a machine has other work
ALLOCATION = 2 * 2**30  # bytes
BAD = ("traceback", "unnamed", "hang", "allocation", "crash", "code")
_CHUNK = 1500  # cases of one worker's life: a library that leaks does not count as one that allocates
_HERE = Path(__file__).resolve().parent
_RUNS_CODE = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.Popen",
    "socket.connect",
    "ctypes.dlopen",
)
_WRITES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.chmod", "shutil.rmtree")


# Worker --------------------------------------------------------------------------------------------------------------


class Watch:
    """What the present case made Python do, by audit events; armed only while a reader runs."""

    def __init__(self, home: str) -> None:
        from gated_srp.bounded import SECOND_OPINION

        self.armed, self.seen, self.home, self.own = False, [], home, SECOND_OPINION
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event == "subprocess.Popen" and args[1][1:] == ["-c", self.own]:
            return  # bounded.py asks a second process: code of ours, about the file
        if event in _WRITES and not os.path.isabs(os.fsdecode(args[0])) and args[-1] not in (-1, None):
            return  # below a folder that is open: how a temporary one is removed
        if event in _RUNS_CODE or (event in _WRITES and not self._inside(args[0])):
            self.seen.append(f"{event} {args!r:.200}")
        elif event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+") and not self._inside(args[0]):
            self.seen.append(f"open {args!r:.200}")

    def _inside(self, path: Any) -> bool:
        return isinstance(path, int) or os.fsdecode(path).startswith((self.home, "/dev/null", "/dev/shm", "/proc/self"))


def _memory() -> tuple[int, int]:
    """Bytes of address space, and the most there ever were."""
    with open("/proc/self/status") as file:
        found = dict(line.split(":", 1) for line in file if line.startswith("Vm"))
    return int(found["VmSize"].split()[0]) * 1024, int(found["VmPeak"].split()[0]) * 1024


def work(plan: dict[str, int], seed: int, home: Path) -> None:
    """Try so many cases of each target and print one JSON line for each."""
    watch = Watch(str(home))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not mix with the lines
    for name, cases in plan.items():
        _work(name, cases, seed, home / name, out=out, watch=watch)


def _work(name: str, cases: int, seed: int, home: Path, *, out: TextIO, watch: Watch) -> None:
    import warnings

    import hypothesis
    from fuzz_damage import Files, Seed, damaged
    from fuzz_targets import TARGETS, corpus, unpacked
    from hypothesis import given, settings

    from gated_srp import bounded
    from gated_srp.errors import UserError

    warnings.simplefilter("ignore")
    sys.setrecursionlimit(1000)
    bounded.CPU_SECONDS = 0  # that is one or two: a file without end costs the more, the longer it is waited for
    target = TARGETS[name]
    seeds = target.good(home / "seeds")
    for number, (main, files) in enumerate(seeds):  # libraries are imported, and good files are good
        unpacked(files, home / "good" / str(number))
        try:
            target.read(home / "good" / str(number) / main)
        except UserError as error:
            raise RuntimeError(f"{name}: no good file to begin from") from error
    print(json.dumps({"kind": "ready", "target": name}), file=out, flush=True)

    def one(main: str, files: Files) -> dict[str, Any]:
        case = home / "case"
        shutil.rmtree(case, ignore_errors=True)
        unpacked(files, case)
        size, peak = _memory()
        started, found = time.process_time(), {"kind": "read"}
        watch.armed, watch.seen = True, []
        try:
            target.read(case / main)
        except UserError as error:
            text = str(error)
            named = str(case) in text or ("." in main and Path(main).name in text)  # the folder is the user's own
            found = {"kind": "refused" if named and _has_cure(error) else "unnamed", "what": text[:500]}
        except BaseException:
            found = {"kind": "traceback", "what": traceback.format_exc()[-3000:]}
        finally:
            watch.armed = False
        if (now := _memory()[1]) > max(peak, size + ALLOCATION):
            found = {"kind": "allocation", "what": f"{(now - size) / 2**30:.1f} GB; {found}"}
        if (took := time.process_time() - started) > HANG:
            found = {"kind": "hang", "what": f"{took:.0f} s; {found}"}
        if watch.seen:
            found = {"kind": "code", "what": f"{watch.seen}; {found}"}
        if found["kind"] in BAD:
            case.rename(kept := home / f"kept{time.monotonic_ns()}")
            found["kept"] = str(kept)
        return found | {"seconds": took, "target": name}

    @hypothesis.seed(seed)
    @settings(
        max_examples=cases, database=None, deadline=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck), derandomize=False,
    )  # fmt: skip
    @given(damaged(seeds, corpus(name)))
    def run(case: Seed) -> None:
        print(json.dumps(one(*case)), file=out, flush=True)

    for case in corpus(name):  # as they are
        print(json.dumps(one(*case)), file=out, flush=True)
    run()


def _has_cure(error: Any) -> bool:
    """Or says what was expected, which is as good."""
    return bool(error.cure) or any(words in str(error) for words in (". ", "\n", "should be", "expected"))


# Watchdog ------------------------------------------------------------------------------------------------------------


def fuzz(
    cases: int, findings: Path | None = None, *, only: list[str] | None = None, seed: int = 0
) -> dict[str, Counter]:
    """Outcomes by target, in shares of about so many cases. Few cases share one worker, since its imports take seconds."""
    from fuzz_targets import TARGETS

    names = only or list(TARGETS)
    total = sum(TARGETS[name].share for name in names)
    todo = {name: max(4, round(cases * TARGETS[name].share / total)) for name in names}
    counts: dict[str, Counter] = {name: Counter() for name in names}
    while todo := {name: n for name, n in todo.items() if n > 0}:
        first = next(iter(todo))
        plan = todo if sum(todo.values()) <= _CHUNK else {first: min(todo[first], _CHUNK)}
        for name, done in _life(dict(plan), seed, counts, findings).items():
            todo[name] -= done
            if todo[name] <= 0:
                print(f"{name:16} {dict(counts[name])}", flush=True)
        seed += 1
    return counts


def _life(plan: dict[str, int], seed: int, counts: dict[str, Counter], findings: Path | None) -> Counter:
    """A worker's life, and how many cases of each target it tried; a case that hangs or crashes ends it and is counted."""
    command = [sys.executable, str(_HERE / "fuzz_harness.py"), "--work", json.dumps(plan), str(seed)]
    done: Counter = Counter()
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "stderr", "w+", errors="replace") as errors:
        Path(folder, "tmp").mkdir()
        places = os.environ | {"TMPDIR": f"{folder}/tmp"}  # what a report draws before it is inlined
        worker = subprocess.Popen([*command, folder], stdout=subprocess.PIPE, stderr=errors, env=places)
        name, ended = next(iter(plan)), "hang"
        try:
            for line in _lines(worker):
                name = line["target"]
                if line["kind"] != "ready":
                    done[name] += 1
                    counts[name][line["kind"]] += 1
                    counts[name]["slowest"] = max(counts[name]["slowest"], round(line["seconds"], 1))
                    if line["kind"] in BAD:
                        _keep(findings, name, line, Path(line["kept"]), f"{seed}-{done[name]}")
            ended = "" if worker.returncode == 0 else "crash"
        except TimeoutError:
            pass
        finally:
            worker.kill()
            worker.wait()
            worker.stdout.close()
        if ended:
            errors.seek(0)
            said = errors.read()
            if ended == "crash" and worker.returncode > 0:  # an exception of the harness itself
                raise RuntimeError(f"{name}: {said[:3000]} ... {said[-1000:]}")
            done[name] += 1
            counts[name][ended] += 1
            what = {"kind": ended, "what": f"exit {worker.returncode}\n{said[-3000:]}"}
            _keep(findings, name, what, Path(folder) / name / "case", f"{seed}-{done[name]}")
            return done
    return Counter(plan)  # hypothesis may find that there are no more cases


def _lines(worker: subprocess.Popen) -> Any:
    """Its lines as they come; TimeoutError where none comes in time. The first, after all imports, may take long.

    Time is that of the processor, since a machine with other work to do makes everything slow; one who only waits has ten minutes.
    """
    patience, rest, silent, used = 300.0, b"", time.monotonic(), 0.0
    while True:
        ready, _, _ = select.select([worker.stdout], [], [], 1.0)
        if not ready:
            if _used(worker.pid) - used > patience or time.monotonic() - silent > 600:
                raise TimeoutError
            continue
        silent, used = time.monotonic(), _used(worker.pid)
        part = os.read(worker.stdout.fileno(), 2**16)
        if not part:
            worker.wait()
            return
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield json.loads(line)
        patience = 2 * HANG


def _used(process: int) -> float:
    """Seconds of the processor that a process and its ended children have used."""
    with open(f"/proc/{process}/stat") as file:
        found = file.read().rsplit(")", 1)[1].split()
    return sum(map(int, found[11:15])) / os.sysconf("SC_CLK_TCK")


def _keep(findings: Path | None, name: str, line: dict[str, Any], case: Path, number: str) -> None:
    if findings is not None:
        home = findings / line["kind"] / f"{name}-{number}"
        shutil.rmtree(home, ignore_errors=True)
        if case.exists():
            shutil.copytree(case, home)
        home.mkdir(parents=True, exist_ok=True)
        (home / "finding.txt").write_text(line["what"], errors="surrogateescape")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--findings", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path[:0] = [str(_HERE.parent), str(_HERE), str(_HERE.parent / "slides")]
    if options.work:
        plan, seed, home = options.work
        work(json.loads(plan), int(seed), Path(home))
        return
    started = time.monotonic()
    counts = fuzz(options.cases, options.findings, only=options.only, seed=options.seed)
    total = Counter()
    for found in counts.values():
        total.update({kind: n for kind, n in found.items() if kind != "slowest"})
    print(
        f"{total.total()} cases in {time.monotonic() - started:.0f} s: "
        + ", ".join(f"{total[k]} {k}" for k in ("read", "refused", *BAD))
    )
    sys.exit(any(total[kind] for kind in BAD))


if __name__ == "__main__":
    main()
