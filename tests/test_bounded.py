"""Foreign parsers that loop, crash or ask for the machine's memory: the file is named, and the others go on."""

import os
import signal
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from importlib import import_module
from pathlib import Path
from threading import Event, Thread

import h5py
import numpy as np
import pytest
import torch
from factories import make_slide, write_clam, write_stamp

from gated_srp import bounded
from gated_srp.bounded import ForeignFailure, try_out
from gated_srp.data import BagError, read_bag, read_header
from gated_srp.data.files import arrays


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(bounded, "CPU_SECONDS", 0)
    bounded._known.clear()
    if bounded._helper.process:  # it has the patience of the test before
        os.kill(bounded._helper.process, signal.SIGKILL)
        bounded._helper._ended()


def endless(folder: Path, features: str = "feats") -> Path:
    """STAMP's file with a string whose length, rounded up, comes to nothing: HDF5 walks over it for ever and ignores Ctrl-C."""
    path = write_stamp(folder, "endless", make_slide(columns=3, rows=2, width=2))
    with h5py.File(path, "a") as file:
        if features != "feats":
            file.move("feats", features)
    whole = bytearray(path.read_bytes())
    at = whole.index(b"GCOL") + 24  # the first object's length: behind the heap's head and the object's number
    whole[at : at + 8] = struct.pack("<Q", 2**64 - 16)
    path.write_bytes(whole)
    return path


@pytest.mark.parametrize("read", [read_bag, read_header])
def test_a_file_that_holds_hdf5_in_a_loop_is_named_and_the_next_one_is_read(read, tmp_path):
    path, good = endless(tmp_path), write_clam(tmp_path, "good", make_slide())
    with pytest.raises(BagError, match="did not come to an end") as caught:
        read(path)
    assert (caught.value.kind, caught.value.path) == ("endless", path)
    assert read(good).stride == 512
    started = time.process_time()
    with pytest.raises(BagError, match="did not come to an end"):
        read(path)
    assert time.process_time() - started < 0.5, "it is remembered"


def test_the_founders_file_that_holds_hdf5_in_a_loop_is_refused(shared):
    with pytest.raises(BagError, match="did not come to an end"):
        read_bag(shared / "hostile" / "stamp_hang.h5")


def test_ctrl_c_ends_the_wait_for_such_a_file(tmp_path):
    code = "import signal, sys; from gated_srp.data import read_bag; signal.alarm(1)\n"
    code += "signal.signal(signal.SIGALRM, signal.default_int_handler); read_bag(sys.argv[1])"
    run = [sys.executable, "-c", code, str(endless(tmp_path))]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGINT or "KeyboardInterrupt" in done.stderr


def _crash(path: Path) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _greedy(path: Path) -> None:
    bytearray(bounded.MEMORY + 2**28)


def _leave(path: Path) -> None:
    os._exit(0)


def _fine(path: Path) -> None:
    pass


def test_a_crash_of_the_library_and_a_hunger_for_memory_come_back_as_errors(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ForeignFailure, match="SIGSEGV") as caught:
        try_out(_crash, path)
    assert caught.value.kind == "crash"
    bounded._known.clear()
    with pytest.raises(MemoryError):
        try_out(_greedy, path)
    bounded._known.clear()
    try_out(_fine, path)


def test_a_helper_that_has_left_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(bounded, "_IDLE", 0.0)
    for name in "ab":
        (tmp_path / name).touch()
        try_out(_fine, tmp_path / name)
    assert len(bounded._known) == 2


def test_a_helper_keeps_nothing_of_its_parent_open(tmp_path):
    (tmp_path / "file").touch()
    with open(tmp_path / "held", "w"):
        try_out(_fine, tmp_path / "file")
    held = {
        os.readlink(f"/proc/{bounded._helper.process}/fd/{n}")
        for n in os.listdir(f"/proc/{bounded._helper.process}/fd")
    }
    assert not any("held" in name for name in held) and len(held) <= 4


def test_a_chunk_that_unfolds_beyond_measure_is_refused_and_a_large_one_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(bounded, "CPU_SECONDS", 5)
    monkeypatch.setattr(bounded, "MEMORY", 2**27)
    packer = zlib.compressobj(1)
    bomb = b"".join([*(packer.compress(bytes(2**24)) for _ in range(30)), packer.flush()])
    large = zlib.compress(np.full((1000, 1000), 3.0, "f4").tobytes(), 0)
    for name, chunk in {"bomb.h5": bomb + bytes(2**19), "good.h5": large}.items():
        with h5py.File(tmp_path / name, "w") as file:
            file.create_dataset("features", (1000, 1000), "f4", chunks=(1000, 1000), compression="gzip")
            file["features"].id.write_direct_chunk((0, 0), chunk)
            file["coords"] = np.stack([np.arange(1000) % 50, np.arange(1000) // 50], 1) * 512
    with pytest.raises(BagError, match="cut short or damaged"):
        read_bag(tmp_path / "bomb.h5")
    assert read_bag(tmp_path / "good.h5").features.eq(3).all()


def test_a_pt_file_of_400_bytes_cannot_ask_torch_for_gigabytes(tmp_path):
    torch.save({"features": torch.zeros(1), "coords": torch.zeros(1)}, tmp_path / "good.pt")
    for name, call in {
        "bytearray": b"cbuiltins\nbytearray\n(\x8a\x05" + struct.pack("<Q", 3 * 2**30)[:5] + b"tR",
        "storage": b"ctorch\nFloatTensor\n(\x8a\x05" + struct.pack("<Q", 2**30)[:5] + b"tR",
    }.items():
        path = tmp_path / f"{name}.pt"
        with zipfile.ZipFile(tmp_path / "good.pt") as good, zipfile.ZipFile(path, "w") as bad:
            for entry in good.namelist():
                root = entry.split("/")[0]
                bad.writestr(
                    entry,
                    b"\x80\x02}q\x00X\x08\x00\x00\x00features" + call + b"s."
                    if entry == f"{root}/data.pkl"
                    else good.read(entry),
                )
        with pytest.raises(BagError) as caught:
            read_bag(path)
        assert caught.value.path == path, name
    assert _peak() < 2**31


def _peak() -> int:
    """The most address space that this process ever had beyond what it has."""
    lines = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Vm")
    )
    return (int(lines["VmPeak"].split()[0]) - int(lines["VmSize"].split()[0])) * 1024


def test_a_numpy_header_that_claims_gigabytes_is_not_read_so_far(tmp_path, monkeypatch):
    asked: list[int] = []
    true = np.lib.format.read_array_header_2_0
    monkeypatch.setattr(
        np.lib.format, "read_array_header_2_0", lambda s, **o: asked.append(len(s.getvalue())) or true(s, **o)
    )
    path = tmp_path / "s.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("features", "coords"):
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31) + b"{'descr': '<f4', ")
    with pytest.raises(BagError) as caught:
        read_bag(path)
    assert caught.value.kind == "truncated" and max(asked) < 2**17


# zarr ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path) -> Path:
    zarr = pytest.importorskip("zarr")
    slide = make_slide(columns=4, rows=3, width=6)
    group = zarr.open_group(str(tmp_path / "s.zarr"), mode="w")
    group.create_array("features", data=slide.features, chunks=(4, 6))
    group.create_array("coordinates", data=np.concatenate([slide.cells, slide.cells + 1], 1) * 512, chunks=(100, 4))
    return tmp_path / "s.zarr"


def test_a_missing_chunk_of_zarr_is_an_error_and_not_zeros(folder):
    assert (read_bag(folder).features != 0).all()
    next((folder / "features").glob("c/1/*")).unlink()
    with pytest.raises(BagError, match=r"lacks 1 of its \d chunks") as caught:
        read_bag(folder)
    assert (caught.value.kind, caught.value.path) == ("truncated", folder)


@pytest.mark.parametrize("place", ["end", "start"])
def test_a_chunk_that_a_shard_of_zarr_lacks_is_an_error_and_not_zeros(folder, place):
    """As a writer leaves it that was killed in the middle of a shard."""
    zarr = pytest.importorskip("zarr")
    del (group := zarr.open_group(str(folder), mode="a"))["features"]
    shards = {"shape": (6, 6), "index_location": place}
    array = group.create_array("features", shape=(8, 6), dtype="f4", chunks=(2, 6), shards=shards)
    array[:2] = array[6:] = 1.0
    with pytest.raises(BagError, match="lacks 2 of its 4 chunks"):
        read_bag(folder)
    array[2:6] = 2.0
    assert read_bag(folder).features[:, 0].tolist() == [1, 1, 2, 2, 2, 2, 1, 1]
    next((folder / "features").glob("c/1/*")).write_bytes(b"cut")
    with pytest.raises(BagError, match="cut short"):
        read_bag(folder)


@pytest.mark.parametrize("name", ["features", "coordinates"])
def test_a_zarr_of_a_million_million_rows_is_refused_at_once(folder, name):
    note = folder / name / "zarr.json"
    note.write_text(
        note.read_text().replace('"shape": [\n    ', '"shape": [\n    1000000000000').replace("\n  ],", "\n  ],", 1)
    )
    started = time.process_time()
    with pytest.raises(BagError, match="claims"):
        read_bag(folder)
    assert time.process_time() - started < 2


def test_a_zarr_whose_notes_are_something_else_is_refused(folder):
    (folder / "zarr.json").write_text("3")
    with pytest.raises(BagError, match="damaged"):
        read_bag(folder)


def test_files_that_passed_are_tried_once_and_again_when_they_change(tmp_path, monkeypatch):
    path = write_clam(tmp_path, "s", make_slide())
    asked: list[Path] = []
    true = bounded._helper.ask
    monkeypatch.setattr(
        bounded._helper, "ask", lambda look, path, seconds: asked.append(path) or true(look, path, seconds)
    )
    read_bag(path), read_bag(path), read_header(path)
    assert asked == [path]
    with h5py.File(path, "a") as file:
        file.attrs["more"] = "x" * 1000
    read_bag(path)
    assert asked == [path, path]


@pytest.mark.parametrize("does", ["pass", "time.sleep(9)"])
def test_a_healthy_file_at_which_a_forked_helper_spins_or_waits_is_read_all_the_same(does, tmp_path, monkeypatch):
    """A fork may spin on, or wait for, a lock of a thread that it left behind: a fresh interpreter then has the last word."""
    monkeypatch.setattr(bounded, "_STUCK", 0.2)
    name = f"looks_of_a_fork_{len(does)}"
    code = f"import sys, time\ndef look(path):\n    while 'pytest' in sys.modules:  # only in a fork of the tests\n        {does}\n"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    try_out(import_module(name).look, write_clam(tmp_path, "good", make_slide()))


def test_a_file_that_another_thread_is_loading_holds_up_no_helper(tmp_path, monkeypatch):
    """Torch's allow-list has a lock, which a fork copies as it is: held by a thread that the fork does not have."""
    opinions: list[bytes] = []
    monkeypatch.setattr(bounded, "_STUCK", 0.2)
    monkeypatch.setattr(bounded, "_second_opinion", lambda request: opinions.append(request) or (0, None))
    torch.save(
        {"features": torch.ones(6, 2), "coords": torch.tensor([[x * 512, 0] for x in range(6)])}, tmp_path / "s.pt"
    )
    let_go, held = Event(), Event()

    def hold() -> None:
        with arrays._LOADING:
            held.set()
            let_go.wait()

    (thread := Thread(target=hold)).start()
    held.wait()
    try:
        try_out(arrays._load_torch, tmp_path / "s.pt")
    finally:
        let_go.set()
        thread.join()
    assert not opinions and read_bag(tmp_path / "s.pt").features.eq(1).all()
