"""The prefix cache: right bytes or none, within its bound, whoever else uses it and whatever
happens to its files.
"""

import contextlib
import errno
import json
import logging
import math
import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import subprocess
import threading
import time

import fsspec
import pytest
import servers
import webdataset as wds

from pcrshard import open_dataset, shards
from pcrshard.errors import StorageError
from pcrshard.reading import prefix_cache as cache_module
from pcrshard.reading.prefix_cache import PrefixCache
from pcrshard.reading.shard import Shard
from pcrshard.storage.locks import hold_lock
from pcrshard.storage.retry import Retry

# A fork server that has the imports makes a process in milliseconds.
multiprocessing.set_forkserver_preload(
    ["torch", "webdataset", "pcrshard", "pcrshard.upkeep.stage", "fsspec.implementations.http"]
)
SCANS = (1000, 2500, 3000, 7000, 9000)
# That of scan 0 first; it is no bound of extents by itself.
STOPS = (400, *SCANS)
HASTY = Retry(attempts=3, first_delay=0.01, timeout=2)


def content(name, size=STOPS[-1]):
    return random.Random(name).randbytes(size)


class Store:
    """Where prefixes come from: notes what was fetched."""

    def __init__(self, cache, pause=0.0):
        self.cache, self.pause = cache, pause
        self.fetched = []

    def __call__(self, name, stop, identity="1"):
        def fetch(start, view):
            time.sleep(self.pause)
            self.fetched.append((name, start, start + len(view)))
            view[:] = content(name + identity)[start : start + len(view)]

        with self.cache.open_prefix(name, identity, STOPS, stop, fetch) as view:
            assert bytes(view) == content(name + identity)[:stop], (name, stop)


def extents(folder):
    """Of each entry the (start, stop) of its extents, sorted; entries by their URL."""
    found = {}
    for path in pathlib.Path(folder).glob("entries/*/*/*-*-*"):
        if path.suffix != ".tmp":
            start, stop, _ = path.name.split("-")
            url = json.loads((path.parent / "entry.json").read_text()[9:])["url"]
            found.setdefault(url, []).append((int(start), int(stop)))
    return {url: sorted(ranges) for url, ranges in found.items()}


def used_bytes(folder):
    """What the files take, whatever their names."""
    total = 0
    for path in pathlib.Path(folder).glob("entries/*/*/*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.name != "entry.json" else 0
    return total


@pytest.fixture
def store(tmp_path):
    return Store(PrefixCache(str(tmp_path / "cache")))


# Growth


def test_grows_by_scan_groups(store):
    """A higher scan fetches the difference, a lower one nothing; extents end where scans do."""
    for stop in (2500, 7000, 1000, 7000, 9000, 2500):
        store("a", stop)
    assert store.fetched == [("a", 0, 2500), ("a", 2500, 7000), ("a", 7000, 9000)]
    assert extents(store.cache.folder) == {
        "a": [(0, 1000), (1000, 2500), (2500, 3000), (3000, 7000), (7000, 9000)]
    }
    assert (store.cache.fetched_bytes, store.cache.hit_bytes) == (
        9000,
        2500 + 1000 + 7000 + 7000 + 2500,
    )


def epoch(store, names, number, stop=STOPS[-1]):
    """Read all shards in the order of an epoch; the share of the bytes that was fetched."""
    store.fetched.clear()
    for name in random.Random(number).sample(names, len(names)):
        store(name, stop)
    return sum(stop - start for _, start, stop in store.fetched) / (len(names) * stop)


def test_half_of_a_set_on_disk_saves_half_of_the_bytes(tmp_path):
    """Epochs have orders of their own: what the job has on disk is not dropped for what comes."""
    names = [f"mem://{number}" for number in range(40)]
    half = len(names) * STOPS[-1] // 2
    lately = Store(PrefixCache(str(tmp_path / "cache"), half, time.time()))
    assert epoch(lately, names, 0) == 1
    assert max(epoch(lately, names, number) for number in (1, 2, 3)) <= 0.51
    without = Store(PrefixCache(str(tmp_path / "other"), half, math.inf))
    assert epoch(without, names, 0) == 1
    assert min(epoch(without, names, number) for number in (1, 2, 3)) > 0.7


def test_a_new_job_takes_the_room_of_one_before(tmp_path):
    """What nobody has used since it began goes, least recently used first; what it shares stays."""
    cache = str(tmp_path / "cache")
    names = [f"mem://{number}" for number in range(20)]
    half = 10 * STOPS[-1]
    epoch(Store(PrefixCache(cache, half, time.time())), names[:10], 0)
    second = Store(PrefixCache(cache, half, time.time()))
    assert epoch(second, names[5:15], 0) < 1
    assert epoch(second, names[5:15], 1) == 0
    assert used_bytes(cache) <= half


def test_a_job_that_reads_lower_scans_makes_room_of_higher_ones(tmp_path):
    """Groups that only an earlier job wanted go before anything of this one."""
    cache = str(tmp_path / "cache")
    names = [f"mem://{number}" for number in range(20)]
    room = 10 * STOPS[-1]
    epoch(Store(PrefixCache(cache, room, time.time())), names, 0)
    second = Store(PrefixCache(cache, room, time.time()))
    epoch(second, names, 1, SCANS[2])
    assert epoch(second, names, 2, SCANS[2]) == 0


def test_lists_and_clears(store):
    """``entries`` says what is held of each shard, least recently used first, and ``clear`` frees
    it all.
    """
    store("https://me:secret@host/b?sig=secret", 9000)
    store("a", 3000)
    store("b", 500)
    store("a", 1000)
    listed = store.cache.entries()
    assert [(e.url, e.num_bytes, e.scan) for e in listed] == [
        ("https://host/b?...", 9000, 4),
        ("b", 500, 0),
        ("a", 3000, 3),
    ]
    assert store.cache.clear() == 12500
    assert store.cache.entries() == []
    assert list(pathlib.Path(store.cache.folder).glob("entries/*")) == []


def test_another_version_takes_the_place_of_the_first(store):
    """When a shard was replaced, nothing of the old one is served, and it takes no room."""
    store("a", 7000)
    store("a", 2500, identity="2")
    assert used_bytes(store.cache.folder) == 2500
    store("a", 1000, identity="1")
    assert store.fetched[-1] == ("a", 0, 1000)


# Damage


def files_of(folder):
    return sorted(
        path
        for path in folder.glob("entries/*/*/*-*-*")
        if path.is_file() and not path.is_symlink()
    )


def damage(rng, path):
    """Do something to a file, as disks and people do; what it was."""
    data = path.read_bytes() or b"x"
    what = rng.choice(
        ["flip", "truncate", "empty", "append", "delete", "rename", "swap", "folder", "link"]
    )
    if what == "flip":
        place = rng.randrange(len(data))
        path.write_bytes(
            data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
        )
    elif what in ("truncate", "empty", "append"):
        path.write_bytes(
            {"truncate": data[: rng.randrange(len(data))], "empty": b"", "append": data + b"x"}[
                what
            ]
        )
    elif what == "delete":
        path.unlink()
    elif what == "rename":
        path.rename(
            path.with_name(
                f"{rng.randrange(9000):014d}-{rng.randrange(9999):014d}"
                f"-{rng.randrange(1 << 32):08x}"
            )
        )
    elif what == "swap":
        other = rng.choice(files_of(path.parent.parent.parent.parent))
        theirs = other.read_bytes()
        other.write_bytes(data)
        path.write_bytes(theirs)
    elif what == "folder":
        path.unlink()
        path.mkdir()
        (path / "x").write_bytes(b"x")
    else:
        path.unlink()
        path.symlink_to("/dev/zero")
    return what


@pytest.mark.parametrize("seed", range(25))
def test_whatever_happens_to_files_the_bytes_are_right(tmp_path, seed):
    """Flipped, cut, deleted, renamed, swapped and foreign files, and garbage in the notes, cost a
    fetch and nothing else.
    """
    rng = random.Random(seed)
    store = Store(
        PrefixCache(str(tmp_path), rng.choice([None, 20_000]), rng.choice([None, math.inf]))
    )
    for _ in range(30):
        store(rng.choice("abcd"), rng.choice(SCANS))
        files = files_of(tmp_path)
        if files and rng.random() < 0.4:
            damage(rng, rng.choice(files))
        notes = sorted(tmp_path.glob("entries/*/*/entry.json")) + sorted(
            tmp_path.glob("locks/usage-bytes")
        )
        if notes and rng.random() < 0.2:
            garbage = [
                b"",
                b"\0" * 100,
                b"-5",
                b"9" * 30,
                b"[" * 100_000,
                b'{"url": 1, "stops": [NaN, 1e999]}',
                b"12",
                rng.randbytes(50),
            ]
            rng.choice(notes).write_bytes(rng.choice(garbage))
        if rng.random() < 0.1:
            (rng.choice(files).parent / "extra").write_bytes(b"x" * 10) if files else None
        store.cache.entries()


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"{}",
        b"[" * 200_000,
        b'{"url": "x", "stops": [1, 2, 3]}',
        b'{"url": "x", "stops": [1e999, -1]}',
        b"\xff\xfe",
    ],
    ids=["empty", "no fields", "deep", "wrong stops", "infinite", "not text"],
)
def test_garbage_in_the_notes_does_not_stop_a_reader_without_index(dataset, tmp_path, garbage):
    """Without a dataset index the notes say where a prefix ends: damaged ones are not believed."""
    name = open_dataset(str(dataset))[0].shards[0].name
    expected = list(Shard(f"{dataset}/{name}").samples(5))
    for scan in (2, 5):
        cache = PrefixCache(str(tmp_path))
        assert len(list(Shard(f"{dataset}/{name}", cache=cache).samples(scan))) == len(expected)
        for path in tmp_path.glob("entries/*/*/entry.json"):
            path.write_bytes(garbage)
    assert list(Shard(f"{dataset}/{name}", cache=cache).samples(5)) == expected


def test_flipped_stops_in_the_notes_are_noticed(dataset, tmp_path):
    """Notes that are well-formed but wrong do not lead to an error for ever."""
    name = open_dataset(str(dataset))[0].shards[0].name
    expected = list(Shard(f"{dataset}/{name}").samples(5))
    cache = PrefixCache(str(tmp_path))
    list(Shard(f"{dataset}/{name}", cache=cache).samples(5))
    (path,) = tmp_path.glob("entries/*/*/entry.json")
    for old, new in [(b"[", b"[1"), (b", ", b",  "), (b"]", b", 99999]")]:
        good = path.read_bytes()
        path.write_bytes(good.replace(old, new, 1))
        assert list(Shard(f"{dataset}/{name}", cache=cache).samples(5)) == expected
        path.write_bytes(good)


def test_damaged_cache_is_refetched_over_the_wire_once(dataset, tmp_path):
    """A flipped byte on the cache's disk costs one request for what stands from there on; samples
    are right.
    """
    index = open_dataset(str(dataset))[0]
    entry = index.shards[0]
    expected = list(Shard(f"{dataset}/{entry.name}").samples(5))
    with servers.faulty(dataset) as server:
        shard = Shard(
            server.url(entry.name), entry=entry, cache=PrefixCache(str(tmp_path)), retry=HASTY
        )
        assert list(shard.samples(5)) == expected
        files = sorted(path for path in tmp_path.glob("entries/*/*/*-*-*"))
        data = bytearray(files[2].read_bytes())
        data[3] ^= 1
        files[2].write_bytes(data)
        assert list(shard.samples(5)) == expected
        assert [r.range for r in server.requests()] == [
            (0, entry.prefix_stop(5)),
            (entry.prefix_stop(2), entry.prefix_stop(5)),
        ]
        assert list(shard.samples(5)) == expected
        assert len(server.requests()) == 2


def test_damage_that_came_over_the_wire_does_not_stay(dataset, tmp_path):
    """What was damaged before it was cached is fetched again, and the cache heals."""
    entry = open_dataset(str(dataset))[0].shards[0]
    expected = list(Shard(f"{dataset}/{entry.name}").samples(5))
    with servers.faulty(dataset, [servers.Fault(flip=-1600)]) as server:
        for _ in range(2):
            shard = Shard(
                server.url(entry.name), entry=entry, cache=PrefixCache(str(tmp_path)), retry=HASTY
            )
            assert list(shard.samples(5)) == expected
        assert len(server.requests()) == 2


# Disks


@contextlib.contextmanager
def small_disk(folder, options):
    if os.geteuid():
        pytest.skip("NOT ROOT: cannot mount a small disk")
    folder.mkdir(exist_ok=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"NO SMALL DISK: {made.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("options", ["size=64k", "size=1m,nr_inodes=9", "size=1m,nr_inodes=2"])
def test_full_disk_costs_the_caching_and_not_the_epoch(tmp_path, caplog, options):
    """When the disk or its inodes run out, reads go on, right, and one is warned."""
    with small_disk(tmp_path / "disk", options):
        store = Store(PrefixCache(str(tmp_path / "disk" / "cache")))
        for _ in range(2):
            for name in "abcdefghijklmnop":
                store(name, 9000)
        assert "going on without" in caplog.text
        shutil.rmtree(store.cache.folder, ignore_errors=True)


def test_read_only_folder_serves_what_it_has(tmp_path, caplog):
    """A cache on a disk that is mounted read-only is read, and what it lacks comes from the
    store.
    """
    with small_disk(tmp_path / "disk", "size=1m"):
        store = Store(PrefixCache(str(tmp_path / "disk" / "cache")))
        store("a", 3000)
        subprocess.run(["mount", "-o", "remount,ro", tmp_path / "disk"], check=True)
        store.fetched.clear()
        store("a", 2500)
        store("a", 7000)
        store("b", 1000)
        assert store.fetched == [("a", 3000, 7000), ("b", 0, 1000)]
        assert "going on without" in caplog.text


def test_read_only_empty_folder_serves_nothing_and_fails_nothing(tmp_path):
    """A cache folder that cannot even be made does not end the epoch."""
    with small_disk(tmp_path / "disk", "size=1m,ro"):
        store = Store(PrefixCache(str(tmp_path / "disk" / "cache")))
        store("a", 7000)
        store("a", 7000)
        assert len(store.fetched) == 2
    (tmp_path / "file").write_bytes(b"")
    Store(PrefixCache(str(tmp_path / "file")))("a", 7000)


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EPERM, errno.ENAMETOOLONG]
)
def test_any_error_of_the_disk_costs_the_caching_only(store, monkeypatch, caplog, number):
    """Whatever the disk says to a write, the epoch goes on."""

    def fail(path, *_):
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(cache_module, "write_file", fail)
    store("a", 7000)
    assert os.strerror(number) in caplog.text
    monkeypatch.undo()
    store("a", 7000)
    store("a", 7000)
    assert len(store.fetched) == 2


# The bound


@pytest.mark.parametrize("seed", range(12))
def test_never_over_the_bound_and_evicts_in_the_promised_order(tmp_path, seed, monkeypatch):
    """Against a model: tails go before first groups, least recently used first, the highest first;
    never more than ``cache_bytes``.
    """
    rng = random.Random(seed)
    clock = iter(range(10**18, 10**19, 10**10))
    monkeypatch.setattr(cache_module.time, "time_ns", lambda: next(clock))
    limit = rng.choice([9000, 15_000, 30_000])
    store = Store(PrefixCache(str(tmp_path), limit, math.inf))
    held, used = {}, {}
    for step in range(60):
        name, scan = rng.choice("abcdefg"), rng.randrange(len(SCANS))
        bounds = list(zip((0, *SCANS), SCANS, strict=False))
        ranges = bounds[: scan + 1]
        mine = held.setdefault(name, [])
        there = [r for r in mine if r in ranges]
        missing = sum(b - a for a, b in ranges) - sum(b - a for a, b in there)
        expected_fetch = (
            [(name, SCANS[len(there) - 1] if there else 0, SCANS[scan])] if missing else []
        )
        store.fetched.clear()
        store(name, SCANS[scan])
        for r in there:
            used[name, r] = 3 * step
        if missing:
            _evict_in_the_model(held, used, limit - missing, (name, SCANS[scan]))
            if sum(b - a for ranges_ in held.values() for a, b in ranges_) + missing <= limit:
                new = [r for r in ranges if r not in there]
                mine += new
                for r in new:
                    used[name, r] = 3 * step + 1
        assert store.fetched == expected_fetch, step
        assert extents(tmp_path) == {
            url: sorted(ranges_) for url, ranges_ in held.items() if ranges_
        }, step
        assert used_bytes(tmp_path) <= limit


def _evict_in_the_model(held, used, limit, own):
    def last_use(url, extent):
        return max(used[url, r] for r in held[url] if r[0] >= extent[0])

    everything = [(r, url) for url, ranges in held.items() for r in ranges]
    everything.sort(key=lambda item: (item[0][0] == 0, last_use(item[1], item[0]), -item[0][0]))
    for extent, url in everything:
        if sum(b - a for ranges in held.values() for a, b in ranges) <= limit:
            return
        if url != own[0] or extent[0] >= own[1]:
            held[url].remove(extent)


def test_a_shard_that_was_just_stored_loses_its_highest_scans_first(tmp_path):
    """Under pressure a shard becomes a lower scan, not a heap of pieces that no read can use."""
    store = Store(PrefixCache(str(tmp_path), 12_000, math.inf))
    store("a", 9000)
    store("b", 3000)
    store("c", 3000)
    for ranges in extents(tmp_path).values():
        assert [a for a, _ in ranges] == [0, *(b for _, b in ranges[:-1])]


def test_larger_than_the_bound_is_read_and_not_kept(tmp_path, caplog):
    """A prefix that does not fit at all passes through, and throws nothing out; that is said once,
    because a cache that is too small would otherwise only be slow.
    """
    store = Store(PrefixCache(str(tmp_path), 5000))
    store("a", 3000)
    store("b", 7000)
    store("c", 7000)
    assert [r.message.count("cache_bytes") for r in caplog.records if r.levelname == "WARNING"] == [
        1
    ]
    assert extents(tmp_path) == {"a": [(0, 1000), (1000, 2500), (2500, 3000)]}


def test_half_a_dataset_holds_all_of_scan_five(dataset, tmp_path):
    """A cache of half the bytes of the whole shards gives only hits at scan 5 from the second epoch
    on.
    """
    index = open_dataset(str(dataset))[0]
    half = sum(entry.shard_bytes for entry in index.shards) // 2
    scan = max(k for k in range(1, 6) if index.prefix_bytes(k) <= half)
    with servers.faulty(dataset) as server:
        for epoch in range(3):
            cache = PrefixCache(str(tmp_path), half)
            server.reset()
            for entry in index.shards:
                assert list(Shard(server.url(entry.name), entry=entry, cache=cache).samples(scan))
            if epoch:
                assert (server.requests(), cache.fetched_bytes, cache.hit_bytes) == (
                    [],
                    0,
                    index.prefix_bytes(scan),
                )
    assert scan >= 3


def test_what_is_open_stays_right(store):
    """Bytes that a reader holds do not change when the cache is cleared, filled and its files are
    damaged.
    """
    with contextlib.ExitStack() as stack:
        views = []
        for name in "abc":

            def fetch(start, view, name=name):
                return view.__setitem__(slice(None), content(name + "1")[start : start + len(view)])

            views.append(
                (name, stack.enter_context(store.cache.open_prefix(name, "1", STOPS, 7000, fetch)))
            )
        store.cache.clear()
        for name in "defg":
            store(name, 9000)
        for name, view in views:
            assert bytes(view) == content(name + "1")[:7000]


def test_waiting_for_another_fetch_can_be_cancelled(store):
    """Leaving an epoch does not wait for what another process fetches."""
    entered, release, cancel = threading.Event(), threading.Event(), threading.Event()

    def slow(start, view):
        entered.set()
        release.wait(60)

    thread = threading.Thread(
        target=lambda: store.cache.open_prefix("a", "1", STOPS, 1000, slow).__enter__()
    )
    thread.start()
    entered.wait(5)
    threading.Timer(0.2, cancel.set).start()
    begin = time.monotonic()
    with pytest.raises(StorageError, match="cancelled"):
        with store.cache.open_prefix("a", "1", STOPS, 1000, slow, cancel):
            pass
    assert time.monotonic() - begin < 20  # of 60
    release.set()
    thread.join()


def test_a_failed_fetch_leaves_no_lock_and_no_file(store):
    """A store that fails fails the read, and the next one tries again."""

    def fail(start, view):
        raise StorageError("no network")

    for _ in range(2):
        with pytest.raises(StorageError, match="no network"):
            with store.cache.open_prefix("a", "1", STOPS, 1000, fail):
                pass
    assert used_bytes(store.cache.folder) == 0
    store("a", 1000)


# Processes


def spawn(target, *args):
    process = multiprocessing.get_context("forkserver").Process(target=target, args=args)
    process.start()
    return process


def _read_at_random(folder, limit, seed, seconds, pause=0.0):
    logging.disable()
    rng = random.Random(seed)
    store = Store(PrefixCache(folder, limit, math.inf), pause)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        store(rng.choice("abcdefgh"), rng.choice(SCANS))


def test_several_processes_stay_within_the_bound(tmp_path):
    """Four processes that fill one cache at once never take more than ``cache_bytes``, and each
    reads right bytes.
    """
    limit = 30_000
    processes = [spawn(_read_at_random, str(tmp_path), limit, seed, 2.0) for seed in range(4)]
    most = samples = 0
    while any(process.is_alive() for process in processes):
        # Every writer holds this lock; without it files that come and go would be counted twice.
        (tmp_path / "locks").mkdir(exist_ok=True)
        with hold_lock(str(tmp_path / "locks" / "usage")):
            most = max(most, used_bytes(tmp_path))
            samples += 1
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert samples > 10
    assert limit * 0.7 < most <= limit


def _fetch_once(folder, started, log):
    def fetch(start, view):
        with open(log, "a") as file:
            file.write(f"{start}-{start + len(view)}\n")
        time.sleep(0.3)
        view[:] = content("x")[start : start + len(view)]

    started.wait(30)
    with PrefixCache(folder).open_prefix("x", "1", STOPS, 7000, fetch) as view:
        assert bytes(view) == content("x")[:7000]


def test_processes_that_want_the_same_shard_fetch_it_once(tmp_path):
    """The workers of a node do not multiply the traffic."""
    context = multiprocessing.get_context("forkserver")
    started, log = context.Barrier(4), tmp_path / "log"
    processes = [spawn(_fetch_once, str(tmp_path / "cache"), started, str(log)) for _ in range(4)]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert log.read_text() == "0-7000\n"


def test_kill_at_random_moments_leaves_no_wrong_byte(tmp_path):
    """kill -9 of processes that read and evict leaves nothing that is read wrong, locked, or over
    the bound for long.
    """
    seed = 5
    rng = random.Random(seed)
    limit = 30_000
    for trial in range(8):
        process = spawn(_read_at_random, str(tmp_path), limit, trial, 30.0)
        time.sleep(rng.uniform(0.05, 0.35))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    _read_at_random(str(tmp_path), limit, 99, 0.5)
    logging.disable(logging.NOTSET)
    assert used_bytes(tmp_path) <= limit
    assert not list(tmp_path.rglob("*.tmp"))


def test_what_killed_writers_left_is_swept(tmp_path):
    """Unfinished files do not pile up on the disk."""
    store = Store(PrefixCache(str(tmp_path), 10_000, math.inf))
    store("a", 9000)
    (entry,) = tmp_path.glob("entries/*/*")
    for i in range(5):
        (entry / f"00000000000000-00000000001000-00000000.{i}.tmp").write_bytes(bytes(1000))
    store("b", 9000)
    assert extents(tmp_path) == {
        "a": [(0, 1000)],
        "b": [(0, 1000), (1000, 2500), (2500, 3000), (3000, 7000), (7000, 9000)],
    }
    assert not list(tmp_path.rglob("*.tmp"))


def test_an_error_is_told_once_and_not_at_every_shard(tmp_path, caplog):
    """A cache on a read-only disk says so once in a process."""
    with small_disk(tmp_path / "disk", "size=1m,ro"):
        for name in "abcdef":
            Store(PrefixCache(str(tmp_path / "disk" / "cache")))(name, 7000)
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 1 <= len(warned) <= 2
    assert len({record.message for record in warned}) == len(warned)


def test_an_entry_is_not_believed_elsewhere(dataset, tmp_path):
    """The notes of one shard, moved to another, do not say where that one's prefixes end."""
    index = open_dataset(str(dataset))[0]
    cache = PrefixCache(str(tmp_path))
    shards = [Shard(f"{dataset}/{entry.name}", cache=cache) for entry in index.shards[:2]]
    for shard in shards:
        shard.load(2).close()
    notes = {path.parent: path.read_bytes() for path in tmp_path.glob("entries/*/*/entry.json")}
    (first, data), (second, _) = notes.items()
    assert {cached.url for cached in cache.entries()} == {shard.url for shard in shards}
    (second / "entry.json").write_bytes(data)
    assert "?" in {cached.url for cached in cache.entries()}
    assert first != second


def test_a_stage_of_webdataset_keeps_its_half_over_epochs(dataset, tmp_path):
    """A pipeline makes its options anew in each epoch and worker; it is one job all the same."""
    index, urls = open_dataset(str(dataset))
    memory = fsspec.filesystem("memory")
    memory.put(str(dataset), "/half-on-disk", recursive=True)
    room = index.prefix_bytes(5) // 2
    order = shards([f"memory://half-on-disk/{os.path.basename(url)}" for url in urls])
    stock = wds.WebDataset(order, shardshuffle=False)
    options = {"index": "memory://half-on-disk", "cache_dir": str(tmp_path), "cache_bytes": room}
    samples = stock.pcr_scan(5, **options)
    list(samples)
    held = extents(tmp_path)
    assert held
    for _ in range(3):
        list(samples)
        assert extents(tmp_path) == held
