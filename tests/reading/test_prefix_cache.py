"""The prefix cache: right bytes or none, within its limit, whichever processes share it and
whatever happens to its files.
"""

import contextlib
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
from support import damage, pieces, run_encode, wait_for, write_files, write_shard

from pcrshard import PrefixCache, Shard, open_dataset, shards
from pcrshard.cli.main import main
from pcrshard.encoding.shard_writer import encode_sample
from pcrshard.errors import CorruptPiece, StorageError
from pcrshard.format.shard_format import ShardFormat
from pcrshard.format.shard_head import HEAD_STOP
from pcrshard.reading import prefix_cache
from pcrshard.storage import Retry
from pcrshard.storage.locks import hold_lock
from pcrshard.testing import make_jpeg

HASTY = Retry(attempts=3, first_delay=0.01, timeout=2)
SCANS = (1, 2, 5, 8, 10)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The bytes of eight shards by their name, and their prefix stops."""
    files = {f"{number:02d}.jpg": make_jpeg(number, 60, 80) for number in range(24)}
    folder = write_files(tmp_path_factory.mktemp("cached") / "source", files)
    run_encode(folder, folder.with_name("pcr"), samples_per_shard=3)
    index, urls = open_dataset(folder.with_name("pcr"))
    assert len(urls) == 8
    return {
        entry.name: (pathlib.Path(url).read_bytes(), entry.stops)
        for entry, url in zip(index.shards, urls, strict=True)
    }


def room(size):
    """Memory for a prefix."""
    return memoryview(bytearray(size))


class Store:
    """Where prefixes come from: notes what was fetched."""

    def __init__(self, source, folder, *limits):
        self.source, self.cache, self.pause = source, PrefixCache(str(folder), *limits), 0
        self.fetched = []

    def __call__(self, number, scan, identity="1", cancel=None):
        """Read a prefix and compare it; how many bytes were fetched."""
        name = sorted(self.source)[number]
        data, stops = self.source[name]
        content = data if identity == "1" else data[::-1]
        stop = stops[scan]
        before = len(self.fetched)

        def fetch(start, view):
            time.sleep(self.pause)
            self.fetched.append((number, start, start + len(view)))
            view[:] = content[start : start + len(view)]

        view = room(stop)
        self.cache.read(f"mem://{name}", identity, view, fetch, cancel=cancel)
        assert view == content[:stop], (name, stop)
        return sum(stop - start for _, start, stop in self.fetched[before:])

    def stop(self, number, scan):
        """A prefix stop."""
        return self.source[sorted(self.source)[number]][1][scan]


def name_of(path):
    """The name of the shard in a file of a cache."""
    return path.name[50:]


def held(folder):
    """The files of shards: their names and bytes."""
    found = {}
    for path in sorted(pathlib.Path(folder).rglob("*.tar")):
        with contextlib.suppress(FileNotFoundError):  # a shard may be forgotten at any time
            if not path.is_symlink():
                found[name_of(path)] = path.stat().st_size
    return found


def used(folder):
    return sum(held(folder).values())


@pytest.fixture
def store(source, tmp_path):
    return Store(source, tmp_path / "cache")


# Growth


def test_grows_by_what_is_missing(store):
    """A higher scan fetches the difference, a lower one nothing; what is held is a partial shard
    that any reader of shards can read.
    """
    for scan in (2, 5, 1, 5, 10, 2):
        store(0, scan)
    stops = [store.stop(0, scan) for scan in (2, 5, 10)]
    assert store.fetched == [(0, 0, stops[0]), (0, stops[0], stops[1]), (0, stops[1], stops[2])]
    ((_name, size),) = held(store.cache.folder).items()
    assert size == stops[2]
    (path,) = pathlib.Path(store.cache.folder).rglob("*.tar")
    assert len(list(Shard(path).samples(10))) == 3
    hits = stops[0] + stops[1] + store.stop(0, 1) + stops[1] + stops[0]
    assert store.cache.stats == (hits, stops[2])


def epoch(store, numbers, seed, scan=10):
    """Read shards in the order of an epoch; the share of the bytes that was fetched."""
    order = random.Random(seed).sample(numbers, len(numbers))
    return sum(store(n, scan) for n in order) / sum(store.stop(n, scan) for n in numbers)


def test_half_of_a_set_on_disk_saves_half_of_the_bytes(source, tmp_path):
    """Epochs have orders of their own: what the job has on disk is not dropped for what comes."""
    numbers = range(8)
    half = sum(len(data) for data, _ in source.values()) // 2
    job = Store(source, tmp_path / "cache", half, time.time())
    assert epoch(job, numbers, 0) == 1
    assert max(epoch(job, numbers, seed) for seed in (1, 2, 3)) <= 0.6
    plain = Store(source, tmp_path / "other", half, math.inf)
    assert epoch(plain, numbers, 0) == 1
    assert min(epoch(plain, numbers, seed) for seed in range(1, 6)) > 0.1


def test_a_new_job_takes_the_room_of_one_before(source, tmp_path):
    """What was not used since the job began is evicted first; what both jobs read stays."""
    cache = str(tmp_path / "cache")
    room = sum(len(source[name][0]) for name in sorted(source)[2:6]) + 2000
    epoch(Store(source, cache, room, time.time()), range(4), 0)
    time.sleep(0.05)
    second = Store(source, cache, room, time.time())
    assert epoch(second, range(2, 6), 0) < 1
    assert epoch(second, range(2, 6), 1) == 0
    assert used(cache) <= room


def test_a_job_that_reads_lower_scans_makes_room_of_higher_ones(source, tmp_path, monkeypatch):
    """Groups that only an earlier job or epoch wanted are cut before any shard is dropped."""
    cache = str(tmp_path / "cache")
    room = sum(len(data) for data, _ in source.values()) * 2 // 3
    epoch(Store(source, cache, room, time.time()), range(8), 0)
    time.sleep(0.05)
    second = Store(source, cache, room, time.time())
    epoch(second, range(8), 1, 2)
    assert epoch(second, range(8), 2, 2) == 0
    monkeypatch.setattr(prefix_cache, "_PAUSE", 0)  # as if reads were slow
    job = Store(source, tmp_path / "job", room, time.time())
    epoch(job, range(8), 0)
    epoch(job, range(8), 1, 2)
    assert epoch(job, range(8), 2, 2) == 0


def test_lists_and_clears(store, capsys):
    """``cache ls`` says what is held of each shard and since when; ``clear`` frees it all."""
    store(1, 10)
    store(0, 5)
    folder = os.path.dirname(store.cache.folder)
    expected = [
        (sorted(store.source)[n], store.stop(n, scan), scan) for n, scan in [(1, 10), (0, 5)]
    ]
    listed = store.cache.entries()
    assert [(e.name, e.num_bytes, e.scan) for e in listed] == expected
    assert time.time() - listed[0].last_use < 60
    assert main(["cache", "ls", folder, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["num_bytes"], row["scan"]) for row in told["shards"]] == expected
    assert store.cache.clear() == told["num_bytes"] == sum(size for _, size, _ in expected)
    assert store.cache.entries() == []
    assert {path.name for path in pathlib.Path(store.cache.folder).iterdir()} <= {
        ".pcrshard", "CACHEDIR.TAG", "room",
    }  # fmt: skip


def test_a_path_that_is_no_utf8_is_cached(dataset, tmp_path):
    """A cache serves a dataset in a folder of any name."""
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.symlink_to(dataset)
    cache = PrefixCache(str(tmp_path / "cache"))
    for _ in range(2):
        Shard(folder / "data-000000.tar", cache=cache).load(1)
    assert cache.stats.hit_bytes > 0


def test_another_version_is_another_shard(store):
    """After a shard was replaced, nothing of the old version is served."""
    store(0, 8)
    assert store(0, 2, identity="2") == store.stop(0, 2)
    assert store(0, 8) == 0


# Damage


@pytest.mark.parametrize("what", ["folder", "link", "count"])
def test_foreign_things_in_the_folder_cost_a_fetch(source, tmp_path, what):
    """A folder or link in place of a shard, or garbage in the count, does not end a job."""
    limit = sum(len(data) for data, _ in source.values()) // 2
    store = Store(source, tmp_path, limit, math.inf)
    store(0, 5)
    (path,) = tmp_path.rglob("*.tar")
    if what == "count":
        pathlib.Path(store.cache.folder, "room").write_bytes(b"\xff" * 24)
    else:
        path.unlink()
        path.mkdir() if what == "folder" else path.symlink_to("/dev/zero")
    assert store(0, 5) == (0 if what == "count" else store.stop(0, 5))
    assert epoch(store, range(8), 0) > 0
    folder = path.stat().st_size if path.is_dir() else 0
    assert used(tmp_path) - folder <= limit


@pytest.mark.parametrize("is_raised", [False, True])
@pytest.mark.parametrize("what", ["head", "index", "table", "piece"])
def test_damage_on_the_disk_is_fetched_again_once(dataset, tmp_path, what, is_raised):
    """A flipped byte of a cached shard, wherever it is, costs one fetch; samples are right, also
    for a job that raises its scan.
    """
    entry = open_dataset(dataset)[0].shards[0]
    local = Shard(f"{dataset}/{entry.name}")
    expected = list(local.samples(5))
    place = {
        "head": 600,
        "index": 1030,
        "table": local.prefix_stop(1) + 512 + 4,
        "piece": int(pieces(local).starts[2, 0, 0]),
    }[what]
    with servers.faulty(dataset) as server:
        how = {"entry": entry, "cache": PrefixCache(str(tmp_path)), "retry": HASTY}
        shard = Shard(server.url(entry.name), **how)
        assert list(shard.samples(5)) == expected
        (path,) = tmp_path.rglob("*.tar")
        damage(path, place)
        raised = shard.change_scan(shard.load(1), 5) if is_raised else shard.load(5)
        assert list(raised.samples()) == list(shard.samples(5)) == expected
        # Damage that scan 1 meets is fetched before the rest.
        assert len(server.requests()) == (3 if is_raised and what in ("head", "index") else 2)


def test_damage_that_comes_twice_is_not_kept(dataset, tmp_path):
    """The next epoch fetches the shard, twice if need be."""
    entry = open_dataset(dataset)[0].shards[0]
    local = Shard(f"{dataset}/{entry.name}")
    place = int(pieces(local).starts[2, 0, 0])
    with servers.faulty(dataset, [servers.Fault(flip=place)] * 3) as server:
        cache = PrefixCache(str(tmp_path))
        shard = Shard(server.url(entry.name), entry=entry, cache=cache, retry=HASTY)
        with pytest.raises(CorruptPiece):
            list(shard.samples(5))
        assert list(shard.samples(5)) == list(local.samples(5))


def test_a_cached_shard_without_an_index(dataset, tmp_path):
    """Without a dataset index, the head says what the content is: a second job reads it alone."""
    name = open_dataset(dataset)[0].shards[0].name
    expected = list(Shard(f"{dataset}/{name}").samples(5))
    with servers.faulty(dataset) as server:
        for _ in range(2):
            cache = PrefixCache(str(tmp_path))
            assert list(Shard(server.url(name), cache=cache).samples(5)) == expected
        got = [request.range for request in server.requests() if request.method == "GET"]
        stop = Shard(f"{dataset}/{name}").prefix_stop(5)
        assert got == [(0, 1024), (1024, stop), (0, 1024)]


@pytest.mark.parametrize("is_named", [False, True])
def test_a_replaced_shard_without_an_index_is_read_anew(tmp_path, is_named):
    """Metadata of the same size may change without the head, which is all that is known of a shard
    that is named instead of its dataset.
    """
    path = tmp_path / "served" / "a-000000.tar"
    path.parent.mkdir()
    with servers.nginx(path.parent) as server:
        for time_written, text in enumerate((b"old", b"new")):
            jpeg = make_jpeg(0, 16, 24, exif=b"Exif\0\0" + text)
            write_shard(
                str(path), [encode_sample({"__key__": "a", "jpg": jpeg})], ShardFormat("standard")
            )
            os.utime(path, (1, time_written))
            url = server.url(path.name)
            entry = open_dataset([url])[0].shards[0] if is_named else None
            cache = PrefixCache(str(tmp_path / "cache"))
            assert text in Shard(url, entry=entry, cache=cache)[0]["jpg"]


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


@pytest.mark.parametrize("options", ["size=32k", "size=1m,nr_inodes=2"])
def test_full_disk_costs_the_caching_and_not_the_epoch(source, tmp_path, caplog, options):
    """When the disk or its inodes run out, reads go on, right, and a warning is logged."""
    with small_disk(tmp_path / "disk", options):
        store = Store(source, tmp_path / "disk" / "cache")
        for _ in range(2):
            epoch(store, range(8), 0)
        assert "continuing without" in caplog.text
        shutil.rmtree(store.cache.folder, ignore_errors=True)


def test_read_only_folder_serves_what_it_has(source, tmp_path, caplog):
    """A cache on a disk that is mounted read-only is read, and what it lacks comes from the
    store.
    """
    with small_disk(tmp_path / "disk", "size=1m"):
        store = Store(source, tmp_path / "disk" / "cache")
        store(0, 5)
        subprocess.run(["mount", "-o", "remount,ro", tmp_path / "disk"], check=True)
        assert store(0, 2) == 0
        assert store(0, 8) == store.stop(0, 8) - store.stop(0, 5)
        assert store(1, 1) == store.stop(1, 1)
        assert "continuing without" in caplog.text


def test_a_cache_that_cannot_be_made_fails_nothing(source, tmp_path, caplog):
    """A cache folder that cannot be made does not end the epoch; that is said once."""
    (tmp_path / "file").write_bytes(b"")
    for number in range(6):
        store = Store(source, tmp_path / "file")
        assert store(number, 8) == store.stop(number, 8)
    warned = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(set(warned)) == len(warned) <= 2


# The limit


@pytest.mark.parametrize("seed", range(3))
def test_never_over_the_limit_and_always_prefixes(source, tmp_path, seed, monkeypatch):
    """Whatever is read in which order, files are prefixes of their shards, end where scans end,
    and take no more than the limit; what was just read is held, if it fits.
    """
    # After a slow listing of a full cache, prefixes pass through it for a while.
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    rng = random.Random(seed)
    limit = rng.choice([9000, 25_000, 60_000])
    store = Store(source, tmp_path, limit, math.inf)
    for _ in range(60):
        number, scan = rng.randrange(8), rng.choice(SCANS)
        fetched = store(number, scan)
        sizes = held(tmp_path)
        assert sum(sizes.values()) <= limit
        name = sorted(source)[number]
        if store.stop(number, scan) <= limit // 2:
            assert sizes[name] >= store.stop(number, scan), fetched
        for path in tmp_path.rglob("*.tar"):
            data, stops = source[name_of(path)]
            content = path.read_bytes()
            assert content == data[: len(content)]
            assert len(content) in stops


def test_larger_than_the_limit_is_read_and_not_kept(source, tmp_path, caplog):
    """A prefix that does not fit at all passes through, and evicts nothing; that is said once,
    because a cache that is too small would otherwise only be slow.
    """
    store = Store(source, tmp_path, 0)
    store.cache.max_bytes = store.stop(0, 1)
    store(0, 1)
    store(1, 10)
    store(2, 10)
    warned = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert [message.count("cache_bytes") for message in warned] == [1]
    assert held(tmp_path) == {min(source): store.stop(0, 1)}


def test_waiting_for_another_fetch_can_be_canceled(store):
    """Leaving an epoch does not wait for what another thread or process fetches."""
    entered, release, cancel = threading.Event(), threading.Event(), threading.Event()

    def slow(start, view):
        entered.set()
        release.wait(60)

    thread = threading.Thread(target=store.cache.read, args=("a", "1", room(1000), slow))
    thread.start()
    entered.wait(5)
    threading.Timer(0.2, cancel.set).start()
    begin = time.monotonic()
    with pytest.raises(StorageError, match="canceled"):
        store.cache.read("a", "1", room(1000), slow, cancel=cancel)
    assert time.monotonic() - begin < 20  # of 60
    release.set()
    thread.join()


def test_a_failed_fetch_leaves_no_lock_and_no_bytes(store):
    """A store that fails fails the read, and the next one tries again."""

    def fail(start, view):
        raise StorageError("no network")

    name = min(store.source)
    for _ in range(2):
        with pytest.raises(StorageError, match="no network"):
            store.cache.read(f"mem://{name}", "1", room(1000), fail)
    assert used(store.cache.folder) == 0
    store(0, 1)


# Processes


def spawn(target, *args):
    process = multiprocessing.get_context("forkserver").Process(target=target, args=args)
    process.start()
    return process


def _read_at_random(source, folder, limit, seed, seconds):
    logging.disable()
    rng = random.Random(seed)
    since = rng.choice([math.inf, time.time()])
    store = Store(source, folder, limit, since)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        store.pause = rng.choice([0, 0, 0.002])
        store(rng.randrange(8), rng.choice(SCANS))
        if rng.random() < 0.01:
            name = sorted(source)[rng.randrange(8)]
            store.cache.forget(f"mem://{name}", "1")


def torture(source, folder, limit, seconds):
    """Four processes that share a cache and are killed at random; the most bytes ever held, how
    many were killed, and how many looks there were.
    """
    rng = random.Random(5)
    workers = [
        spawn(_read_at_random, source, folder, limit, number, seconds * 3) for number in range(4)
    ]
    wait_for(lambda: used(folder), 60)  # a busy machine starts slowly
    end = time.monotonic() + seconds
    most = kills = looks = 0
    while time.monotonic() < end:
        number = rng.randrange(4)
        if rng.random() < 0.1:
            workers[number].kill()
            workers[number].join()
            assert workers[number].exitcode == -signal.SIGKILL  # no wrong byte before
            workers[number] = spawn(
                _read_at_random, source, folder, limit, rng.random(), seconds * 3
            )
            kills += 1
        # Without the lock, files that grow while others shrink would be counted twice.
        with hold_lock(os.path.join(PrefixCache(folder).folder, "room")):
            most = max(most, used(folder))
            looks += 1
        for path in pathlib.Path(folder).rglob("*.tar"):
            with hold_lock(str(path), shared=True, create=False, wait=False) as handle:
                if handle is not None:
                    content = os.pread(handle, os.fstat(handle).st_size, 0)
                    assert content == source[name_of(path)][0][: len(content)]
        time.sleep(0.01)
    for worker in workers:
        worker.kill()
        worker.join()
        assert worker.exitcode == -signal.SIGKILL
    return most, kills, looks


@pytest.mark.parametrize(
    ("share", "seconds"),
    [
        (1 / 3, 2),
        *(pytest.param(share, 150, marks=pytest.mark.long) for share in (0.1, 0.3, 0.6, 2.0)),
    ],
)
def test_kills_at_random_leave_no_wrong_byte(source, tmp_path, share, seconds):
    """kill -9 of processes that read, grow and evict leaves nothing that is read wrong, locked, or
    over the limit, and the next process finds the cache usable.
    """
    total = sum(len(data) for data, _ in source.values())
    limit = int(share * total)
    most, kills, looks = torture(source, str(tmp_path), limit, seconds)
    assert kills
    assert looks > 10
    assert min(limit, total) / 2 < most <= limit
    _read_at_random(source, str(tmp_path), limit, 99, 0.3)
    logging.disable(logging.NOTSET)


def test_a_stage_of_webdataset_keeps_its_half_over_epochs(dataset, tmp_path):
    """A pipeline that creates its options in each epoch and worker still counts as one job."""
    index, urls = open_dataset(dataset)
    memory = fsspec.filesystem("memory")
    memory.put(str(dataset), "/half-on-disk", recursive=True)
    room = index.prefix_bytes(5) // 2
    order = shards([f"memory://half-on-disk/{os.path.basename(url)}" for url in urls])
    stock = wds.WebDataset(order, shardshuffle=False)
    options = {"index": "memory://half-on-disk", "cache_dir": str(tmp_path), "cache_bytes": room}
    samples = stock.pcr_scan(5, **options)
    list(samples)
    before = held(tmp_path)
    assert before
    for _ in range(3):
        list(samples)
        assert held(tmp_path) == before


def _read_all(cache, started):
    started.wait(30)
    for number in range(20):
        view = room(10)
        cache.read(f"{number}", "1", view, _fetch_slowly)
        assert bytes(view) == b"0123456789"


def _fetch_slowly(start, view):
    time.sleep(0.01)
    view[:] = b"0123456789"[start : start + len(view)]


def test_processes_that_want_the_same_shards_fetch_them_once(tmp_path):
    """The workers of a node do not multiply the traffic, and ``stats`` of the dataset's cache adds
    what all of them read.
    """
    cache = PrefixCache(str(tmp_path))
    context = multiprocessing.get_context("fork")
    started = context.Barrier(3)
    processes = [context.Process(target=_read_all, args=(cache, started)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 3
    assert cache.stats == (2 * 20 * 10, 20 * 10)


def test_reading_a_head_cuts_nothing(dataset, tmp_path):
    """Without a dataset index, a full cache keeps the shards whose heads are read."""
    first, second = open_dataset(dataset)[0].shards[:2]
    size = first.prefix_stop(5)
    cache = PrefixCache(str(tmp_path), size + 2000)
    for name in (first.name, second.name, first.name):
        Shard(f"{dataset}/{name}", cache=cache).load(5)
    assert held(tmp_path)[first.name] == size
    assert cache.stats.hit_bytes >= size - HEAD_STOP


@pytest.mark.parametrize("since", [0, math.inf])
def test_many_small_shards_at_the_limit(tmp_path, since):
    """At the limit, the files are listed once for many reads, and a read costs no more than with
    few shards.
    """
    jpeg = make_jpeg(0, 16, 16)
    path = tmp_path / "a-000000.tar"
    entry = write_shard(
        str(path), [encode_sample({"__key__": "a", "jpg": jpeg})], ShardFormat("standard")
    )
    data = path.read_bytes()[: entry.prefix_stop(5)]

    def fetch(start, view):
        view[:] = data[start:]

    cache = PrefixCache(str(tmp_path / "cache"), 300 * len(data), since)
    listings = []
    entries = PrefixCache.entries
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefixCache, "entries", lambda self: listings.append(1) or entries(self))
        for number in range(1200):
            cache.read(f"mem://{number}.tar", "1", room(len(data)), fetch)
    assert used(tmp_path / "cache") <= 300 * len(data)
    assert len(listings) <= (10 if since else 60), len(listings)
