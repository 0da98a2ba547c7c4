"""The cache: the same numbers warm and cold, nothing stale, nothing broken, whatever happens to its writers."""

import multiprocessing
import os
import signal
import time
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
import torch
from factories import LAYOUTS, make_slide, write_clam_pt, write_trident
from gated_srp_bench.loading import measure_loading

from gated_srp.data import BagCache, Preparation, PreparedBag, prepare
from gated_srp.data import cache as cache_module
from gated_srp.errors import Note, UserError
from gated_srp.files import whole

PLAIN = Preparation()


def assert_same(one: PreparedBag, other: PreparedBag) -> None:
    for field in fields(PreparedBag):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name == "graph":
            assert (a.window, a.lengths, a.before) == (b.window, b.lengths, b.before)
            for part in ("neighbours", "offsets", "homogeneity", "places"):
                assert_bits(getattr(a, part), getattr(b, part))
        elif isinstance(a, torch.Tensor):
            assert_bits(a, b)
        else:
            assert a == b, field.name


def assert_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.contiguous().flatten().view(torch.uint8).equal(b.contiguous().flatten().view(torch.uint8))


@pytest.fixture
def cache(tmp_path):
    return BagCache(tmp_path / "deep" / "warm")


@pytest.fixture
def file(tmp_path):
    return write_trident(tmp_path / "job", "s1", make_slide(0))


@pytest.fixture
def counted(monkeypatch):
    """How often a bag was prepared rather than found."""
    calls = []

    def counting(path, settings):
        calls.append(path)
        return prepare(path, settings)

    monkeypatch.setattr(cache_module, "prepare", counting)
    return calls


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "settings",
    [PLAIN, Preparation(cap=20, order="raster", window=5, dtype="bfloat16"), Preparation(dtype="float16")],
    ids=["plain", "capped", "half"],
)
def test_a_hit_equals_a_miss_equals_no_cache_bit_for_bit(tmp_path, cache, counted, layout, settings):
    path = LAYOUTS[layout](tmp_path / "job", "s1", make_slide(3))
    cold, warm = cache.read(path, settings), cache.read(path, settings)
    assert len(counted) == 1
    assert_same(cold, warm)
    assert_same(cold, prepare(path, settings))


@pytest.mark.parametrize(
    "change",
    [
        {"cap": 20},
        {"order": "raster"},
        {"window": 5},
        {"lattice": "exact"},
        {"dtype": "float16"},
        {"stride": 1024.0},
        {"features_key": "features"},
        {"coords_key": "coords"},
        {"encoder": "uni_v2"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_setting_is_another_entry(cache, file, counted, change):
    cache.read(file, PLAIN)
    other = cache.read(file, replace(PLAIN, **change))
    assert len(counted) == 2
    assert_same(other, prepare(file, replace(PLAIN, **change)))
    assert len(list(cache.folder.iterdir())) == 2


def test_a_changed_file_replaces_its_entry(tmp_path, cache, file, counted):
    cache.read(file, PLAIN)
    info = file.stat()
    write_trident(tmp_path / "job", "s1", make_slide(1))
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns + 1))
    assert_same(cache.read(file, PLAIN), prepare(file, PLAIN))
    assert len(counted) == 2
    assert len(list(cache.folder.iterdir())) == 1


def test_changed_positions_beside_the_file_are_noticed(tmp_path, cache, counted):
    path = write_clam_pt(tmp_path, "s1", make_slide(0), downsample=2.0)
    info = path.stat()
    assert cache.read(path, PLAIN).stride == 512
    write_clam_pt(tmp_path, "s1", make_slide(0), downsample=4.0)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))  # the features look untouched
    assert cache.read(path, PLAIN).stride == 1024


def test_another_format_version_is_another_entry(cache, file, counted, monkeypatch):
    cache.read(file, PLAIN)
    monkeypatch.setattr(cache_module, "FORMAT", cache_module.FORMAT + 1)
    cache.read(file, PLAIN)
    assert len(counted) == 2


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, 0.999])
def test_a_damaged_entry_is_made_again(cache, file, counted, kept):
    cache.read(file, PLAIN)
    entry = cache.entry(file, PLAIN)
    whole = entry.read_bytes()
    entry.write_bytes(whole[: kept if isinstance(kept, int) else int(len(whole) * kept)])
    assert_same(cache.read(file, PLAIN), prepare(file, PLAIN))
    assert_same(cache.read(file, PLAIN), prepare(file, PLAIN))
    assert len(counted) == 2


@pytest.mark.parametrize("place", [0.3, 0.6, 0.999])
def test_a_flipped_bit_is_found_by_the_next_process(cache, file, counted, place):
    cache.read(file, PLAIN)
    entry = cache.entry(file, PLAIN)
    whole = bytearray(entry.read_bytes())
    whole[int(place * len(whole))] ^= 1
    entry.write_bytes(whole)
    for reader in (BagCache(cache.folder), BagCache(cache.folder)):
        assert_same(reader.read(file, PLAIN), prepare(file, PLAIN))
    assert len(counted) == 2


def test_noise_in_place_of_an_entry_is_made_again(cache, file, counted):
    entry = cache.entry(file, PLAIN)
    entry.write_bytes(np.random.default_rng(0).bytes(5000))
    assert_same(cache.read(file, PLAIN), prepare(file, PLAIN))


def test_a_bag_without_any_neighbours_is_kept_too(tmp_path, cache, counted):
    file = write_trident(tmp_path, "s", make_slide(0, columns=1, rows=1, kept=1.0))
    assert_same(cache.read(file, PLAIN), BagCache(cache.folder).read(file, PLAIN))
    assert len(counted) == 1
    assert cache.read(file, PLAIN).graph.neighbours.tolist() == []


def test_equal_names_in_different_folders_do_not_meet(tmp_path, cache):
    one = write_trident(tmp_path / "a", "s1", make_slide(0))
    two = write_trident(tmp_path / "b", "s1", make_slide(1))
    assert_same(cache.read(one, PLAIN), prepare(one, PLAIN))
    assert_same(cache.read(two, PLAIN), prepare(two, PLAIN))
    assert_same(cache.read(one, PLAIN), prepare(one, PLAIN))


def test_entries_are_mapped_and_writing_to_them_does_not_reach_the_disk(cache, file):
    cache.read(file, PLAIN)
    bag = cache.read(file, PLAIN)
    bag.features.zero_()
    assert_same(cache.read(file, PLAIN), prepare(file, PLAIN))


def _read_often(folder, files, settings, times, answers):
    torch.set_num_threads(1)
    cache = BagCache(folder)
    total = 0.0
    for _ in range(times):
        for file in files:
            total += float(cache.read(file, settings).graph.homogeneity.double().sum())
            cache.entry(file, settings).unlink(missing_ok=True)  # so that they keep writing
    answers.put(total)


@pytest.mark.slow
def test_two_processes_may_share_a_folder(tmp_path, cache):
    files = [write_trident(tmp_path / "job", f"s{i}", make_slide(i)) for i in range(3)]
    context = multiprocessing.get_context("spawn")  # a fork would inherit the locks of torch's threads
    answers = context.Queue()
    pair = [
        context.Process(target=_read_often, args=(cache.folder, files, PLAIN, 10, answers), daemon=True)
        for _ in range(2)
    ]
    for process in pair:
        process.start()
    totals = [answers.get(timeout=240) for _ in pair]
    for process in pair:
        process.join(60)
        assert process.exitcode == 0
    once = sum(float(prepare(file, PLAIN).graph.homogeneity.double().sum()) for file in files)
    assert totals == pytest.approx([10 * once] * 2, abs=1e-9)
    assert not list(cache.folder.glob(".*"))


def _write_forever(folder, file):
    torch.set_num_threads(1)
    cache = BagCache(folder)
    while True:
        cache.read(file, PLAIN)
        cache.entry(file, PLAIN).unlink(missing_ok=True)


def test_a_killed_writer_leaves_no_broken_entry(tmp_path, cache):
    file = write_trident(tmp_path / "job", "s1", make_slide(0, columns=40, rows=40, width=256))
    expected = prepare(file, PLAIN)
    context = multiprocessing.get_context("fork")
    for delay in np.linspace(0.02, 0.15, int(os.environ.get("GATED_SRP_KILLS", "6"))):
        process = context.Process(target=_write_forever, args=(cache.folder, file), daemon=True)
        process.start()
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        entry = cache.entry(file, PLAIN)
        if entry.exists():  # whole or not at all
            found = cache_module._load(entry, file, cache_module.identify(file, PLAIN), PLAIN.lattice, check=True)
            assert found is not None
            assert_same(found, expected)
        assert_same(cache.read(file, PLAIN), expected)


def test_what_killed_writers_left_is_swept_when_nobody_can_be_writing_it(cache):
    left = cache.folder / ".a.safetensors.0.part"
    left.write_bytes(b"x")
    with whole(cache.folder / "b.safetensors", sync=False) as held:
        held.write_bytes(b"x")
        BagCache(cache.folder)
        assert (left.exists(), held.exists()) == (False, True)


def test_a_full_disk_costs_the_cache_and_nothing_else(cache, file, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module, "save_file", full)
    bag = cache.read(file, PLAIN)
    assert "No space left on device" in bag.warnings[-1].what
    assert_same(replace(bag, warnings=()), replace(prepare(file, PLAIN), warnings=()))
    assert list(cache.folder.iterdir()) == []
    assert cache.touch(file, PLAIN) is False


def test_warnings_come_back_with_their_parts_also_from_entries_of_version_0_1(cache, tmp_path, monkeypatch):
    file = write_trident(tmp_path / "job", "s1", make_slide(0))
    capped = Preparation(cap=8)
    made, found = (cache.read(file, capped) for _ in range(2))
    assert made.warnings == found.warnings
    assert [note.kind for note in found.warnings][-1] == "cap"
    text = replace(made, warnings=("stride: 512 was given. Leave it out.",))
    monkeypatch.setattr(cache_module, "asdict", lambda value: value if isinstance(value, str) else asdict(value))
    cache_module._store(cache.entry(file, capped), text, cache_module.identify(file, capped))
    assert cache.read(file, capped).warnings == (Note("warning", "stride", "512 was given. Leave it out."),)


def test_a_cache_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="the cache cannot be made"):
        BagCache(tmp_path / "file" / "warm")


def test_the_measurement_answers_in_plain_rows_and_leaves_nothing(tmp_path):
    rows = measure_loading(tmp_path, bags=2, patches=400, width=32, repeats=1)
    assert [row["what"] for row in rows] == [
        "opened and prepared anew",
        "first epoch with a cache",
        "second epoch from the cache",
        "raw read of the same bytes",
    ]
    assert rows[2]["ratio"] == 1.0
    assert all(row["ratio"] == pytest.approx(row["seconds"] / rows[2]["seconds"]) for row in rows)
    assert list(tmp_path.iterdir()) == []
