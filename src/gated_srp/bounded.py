"""A foreign parser, tried out in a process of its own: what makes it run for ever, ask for too much memory or crash ends that process.

    try_out(look_through, path)          # once per file; then the file is opened here, as fast as ever

Libraries such as HDF5 cannot be interrupted: a damaged file may hold them in a loop that ignores Ctrl-C. One helper is forked when it
is first needed, serves one file after another, is limited by the kernel, and leaves when it has nothing to do. What came of a
file is remembered by its size and time. Where a process cannot be forked safely (other systems than Linux) files are opened as they are.
"""

import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

from gated_srp.errors import UserError

CPU_SECONDS = 3  # for one file, twice at most; waiting for a slow disk does not count
_PER_SECOND = 2**25  # bytes of a large file that are looked through at the least
MEMORY = 2**30  # bytes beyond those of the process and twice the file's
_IDLE = 5.0  # seconds without work after which the helper leaves
_STUCK = 5.0  # seconds between two looks at a helper that does not answer
_LENGTH = struct.Struct("<I")
SECOND_OPINION = "from gated_srp.bounded import _alone; _alone()"
_known: dict[tuple[bytes, int, int], Exception | None] = {}  # what came of a file, by look and path, size and time
_FORKS = sys.platform == "linux" and hasattr(os, "fork") and hasattr(os, "register_at_fork")


class ForeignFailure(UserError):
    """The library did not survive the file. Kinds: endless, crash."""


def try_out(look: Callable[[Path], Any], path: Path, *, seconds: int | None = None) -> None:
    """Raise what ``look(path)`` raises in the helper, or `ForeignFailure` where it does not come back.

    ``seconds`` of the processor are its bound; where it is not named `CPU_SECONDS`, and more for large files. Called again inside the helper, or where a
    process cannot be forked, it does nothing.
    """
    if not _FORKS or os.getpid() == _helper.inside:
        return
    info = path.stat()
    bound = CPU_SECONDS + info.st_size // _PER_SECOND if seconds is None else seconds
    request = pickle.dumps((look, os.path.abspath(path), bound))
    identity = (request, info.st_size, info.st_mtime_ns)
    if identity not in _known:
        with _helper.lock:
            _known[identity] = _helper.ask(request, path, bound)
    if (error := _known[identity]) is not None:
        raise error


class _Helper:
    """The forked process, from the side of the one that asks."""

    def __init__(self) -> None:
        self.forget()
        self.inside = 0  # the helper's own process number, in the helper

    def forget(self) -> None:
        """In a forked child: the helper belongs to the parent."""
        self.lock = Lock()
        self.process = 0

    def ask(self, request: bytes, path: Path, seconds: int) -> Exception | None:
        for _ in range(2):
            if not self.process:
                self._start()
            try:
                os.write(self.requests, _LENGTH.pack(len(request)) + request)
                self._wait()
                answer: Exception | None = _received(self.replies)
                return answer
            except (BrokenPipeError, EOFError):
                status = self._ended()
            except BaseException:  # Ctrl-C while it works: its answer belongs to nobody
                os.kill(self.process, signal.SIGKILL)
                self._ended()
                raise
            if status:  # else it had left, and is started again
                break
        kind, what = "endless", f"its reading did not come to an end within {seconds} s"
        if status in (-signal.SIGXCPU, -signal.SIGKILL):
            # A forked process may also spin on, or wait for, what its parent's threads left behind: a fresh one has the last word.
            status, answer = _second_opinion(request)
            if status == 0:
                return answer
        if status != -signal.SIGXCPU:
            how = signal.Signals(-status).name if status < 0 else f"exit {status}"
            kind, what = "crash", f"its reading crashed the library that reads it ({how})"
        return ForeignFailure(what, where=path, cure="It is damaged: copy, download or make it again.", kind=kind)

    def _wait(self) -> None:
        """For its answer. One that sleeps waits for a lock of a thread that it does not have, or for a slow disk: it is ended."""
        before: list[str] = []
        while not select.select([self.replies], [], [], _STUCK)[0]:
            with open(f"/proc/{self.process}/stat", encoding="ascii", errors="replace") as file:
                now = file.read().rsplit(")", 1)[1].split()
            if (
                now[0] == "S" and before[:1] == now[:1] and before[11:13] == now[11:13]
            ):  # asleep, and no time of the processor
                os.kill(self.process, signal.SIGKILL)
            before = now

    def _ended(self) -> int:
        os.close(self.requests)
        os.close(self.replies)
        try:
            status = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        except ChildProcessError:  # somebody waits for all children
            status = 0
        self.process = 0
        return status

    def _start(self) -> None:
        read_request, self.requests = os.pipe()
        self.replies, write_reply = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads: the helper takes none of their locks
            self.process = os.fork()
        if not self.process:
            _serve(read_request, write_reply)
        os.close(read_request)
        os.close(write_reply)


def _second_opinion(request: bytes) -> tuple[int, Exception | None]:
    """Exit status and answer of a new interpreter that tries the same file."""
    done = subprocess.run([sys.executable, "-c", SECOND_OPINION], input=request, capture_output=True)
    return done.returncode, pickle.loads(done.stdout) if done.returncode == 0 else None


_helper = _Helper()
if _FORKS:
    os.register_at_fork(after_in_child=_helper.forget)


def _received(source: int) -> Any:
    (length,) = _LENGTH.unpack(_exactly(source, _LENGTH.size))
    return pickle.loads(_exactly(source, length))


def _exactly(source: int, length: int) -> bytes:
    found = b""
    while len(found) < length:
        part = os.read(source, length - len(found))
        if not part:
            raise EOFError
        found += part
    return found


# In the helper -------------------------------------------------------------------------------------------------------


def _serve(requests: int, replies: int) -> NoReturn:
    """Answer until nobody asks any more. Nothing of the parent's stays open, and nothing of the parent's runs at the end."""
    import resource  # Unix alone has it

    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGXCPU, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        requests, replies = os.dup2(requests, 500), os.dup2(replies, 501)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.closerange(3, 500)
        os.closerange(502, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 503))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)  # the threads of the parent's pool are not here
        _helper.inside = os.getpid()
        patience = None  # a new helper waits for its first file, however slow the machine
        while select.select([requests], [], [], patience)[0]:
            patience = _IDLE
            look, path, seconds = _received(requests)
            answer = pickle.dumps(_bounded_answer(look, Path(path), seconds))
            os.write(replies, _LENGTH.pack(len(answer)) + answer)
    except EOFError:
        pass
    finally:
        os._exit(0)


def _alone() -> None:
    """`_second_opinion`, in the new interpreter."""
    import resource

    look, path, seconds = pickle.loads(sys.stdin.buffer.read())  # which imports what it needs
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _helper.inside = os.getpid()
    sys.stdout.buffer.write(pickle.dumps(_bounded_answer(look, Path(path), seconds)))
    sys.stdout.flush()


def _bounded_answer(look: Callable[[Path], Any], path: Path, seconds: int) -> Exception | None:
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + seconds + 1)
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY + 2 * os.path.getsize(path))
    try:
        look(path)
    except UserError as error:
        return error
    except Exception as error:
        if type(error).__module__ == "builtins":  # others may not survive the way
            return error
        return OSError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return None


def _limit(what: int, most: int) -> None:
    import resource

    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
