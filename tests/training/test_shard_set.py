"""Reading by plan: each shard once, few at a time, gone afterwards."""

import collections
import gc
import itertools
import os
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from support import CountingFS, request_threads, wait_for

from pcrshard import PCRDataset, ReadOptions, ScanLevel, Shard
from pcrshard.errors import ScanUnavailable, StorageError
from pcrshard.reading.prefix import Prefix
from pcrshard.simulation.reads import WorkerReads
from pcrshard.training.order import EpochOrder, Geometry
from pcrshard.training.sequence import Rules
from pcrshard.training.shard_set import RecentPrefixes, ShardSet, read_batches

SHARDS, ROWS = 10, 6


def at_once(take):
    """Begin and finish a batch in one: nothing runs ahead."""
    return lambda rows: lambda: take(rows)


@pytest.fixture(autouse=True)
def held(monkeypatch):
    """The prefixes in memory; after each test there are none, and no thread runs."""
    loaded = Loaded()
    before = request_threads()  # of stores that never answered in other tests
    load = Shard.load
    monkeypatch.setattr(
        Shard, "load", lambda self, *args, **how: loaded.watch(load(self, *args, **how))
    )
    yield loaded
    gc.collect()  # an error that was raised refers to them
    wait_for(lambda: request_threads() <= before, 5)
    assert request_threads() <= before
    assert loaded.buffers == set()


class Loaded:
    """Prefixes in memory, and how many there were at most."""

    def __init__(self):
        self.buffers = set()
        self.most = 0

    def watch(self, prefix):
        """Notice when nothing refers to the memory any more."""
        key = id(prefix.buffer)
        self.buffers.add(key)
        self.most = max(self.most, len(self.buffers))
        weakref.finalize(prefix.buffer, self.buffers.discard, key)
        return prefix


def plan(size=4, workers=1, worker=0, window=3, lanes_per_rank=1):
    """A worker's batches of ids."""
    order = EpochOrder(
        [ROWS] * SHARDS,
        Geometry(size, lanes_per_rank=lanes_per_rank),
        Rules(seed=5, shuffle_shards=window),
    )
    return list(order.batches(worker=worker, workers=workers))


def shard_of(shards, number):
    """The shard of a sample."""
    [(_, shard, _)] = shards.places(np.array([number]))
    return shard


def classes(rows):
    """A take that reads each sample's ``cls``, which must be its id."""
    found = [int(prefix.sample(row)["cls"]) for _, prefix, row in rows]
    assert found == [number for number, _, _ in rows]
    return found


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("workers", [1, 2])
def test_each_worker_reads_its_shards_once(folder, workers, prefetch):
    """A shard is one request per worker that needs it, for exactly its prefix, however many are
    fetched ahead.
    """
    shards = ShardSet([f"counting://{folder}"], ReadOptions())
    for worker in range(workers):
        batches = plan(workers=workers, worker=worker)
        CountingFS.requests.clear()
        assert list(read_batches(shards, batches, 2, at_once(classes), shards_ahead=prefetch)) == [
            ids.tolist() for ids in batches
        ]
        wanted = {
            shards.urls[shard_of(shards, number)].removeprefix("counting://")
            for ids in batches
            for number in ids
        }
        stops = dict(
            zip(shards.urls, (entry.prefix_stop(2) for entry in shards.entries), strict=True)
        )
        assert sorted(CountingFS.requests) == sorted(
            (path, 0, stops[f"counting://{path}"]) for path in wanted
        )


@pytest.mark.parametrize(("prefetch", "size", "window"), [(0, 4, 3), (2, 4, 3), (0, ROWS, 1)])
def test_memory_is_bounded(folder, held, prefetch, size, window):
    """Memory holds at most the plan's peak number of prefixes plus the prefetched ones."""
    batches = plan(size, window=window)
    shards = ShardSet([str(folder)], ReadOptions())
    for _ in read_batches(shards, batches, 1, at_once(classes), shards_ahead=prefetch):
        time.sleep(0.002)
    assert not held.buffers
    peak = WorkerReads.of_batches(batches, [ROWS] * SHARDS).requests.peak()
    assert peak < SHARDS / 2
    # One more: it was fetched ahead when the batch's own were counted.
    assert peak <= held.most <= peak + prefetch + bool(prefetch)


def test_samples_that_come_twice_are_read_again_not_held(folder):
    """A sequence that needs a shard at both ends of a long epoch lets go of it in between."""
    ids = np.concatenate(
        [np.arange(ROWS), np.tile(np.arange(ROWS, 2 * ROWS), 200), np.arange(ROWS)]
    )
    shards = ShardSet([f"counting://{folder}"], ReadOptions())
    CountingFS.requests.clear()
    batches = np.split(ids, len(ids) // ROWS)
    assert sum(
        1 for _ in read_batches(shards, batches, 1, at_once(classes), shards_ahead=0)
    ) == len(batches)
    assert collections.Counter(os.path.basename(path) for path, _, _ in CountingFS.requests) == {
        "data-000000.tar": 2,
        "data-000001.tar": 1,
    }


def test_a_higher_level_fetches_the_difference(folder):
    """What was fetched ahead at a lower scan is not fetched again."""
    level, shards = ScanLevel(1), ShardSet([f"counting://{folder}"], ReadOptions())
    batches = [np.array([0]), np.array([ROWS])]
    CountingFS.requests.clear()
    batch = read_batches(
        shards, batches, level, at_once(lambda rows: rows[0][1].scan), shards_ahead=4
    )
    assert next(batch) == 1
    wait_for(lambda: len(CountingFS.requests) == 2, 5)
    level.value = 5
    assert list(batch) == [5]
    entry, path = shards.entries[1], shards.urls[1].removeprefix("counting://")
    assert [request for request in CountingFS.requests if request[0] == path] == [
        (path, 0, entry.prefix_stop(1)),
        (path, entry.prefix_stop(1), entry.prefix_stop(5)),
    ]


@pytest.fixture
def late(folder, monkeypatch):
    """An event; the second shard comes when it is set, or ``fails`` then."""
    arrives = threading.Event()
    arrives.fails = False
    load = Shard.load
    url = ShardSet([str(folder)], ReadOptions()).urls[1]

    def stalled(self, *args, **options):
        if self.url == url:
            assert arrives.wait(10)
            if arrives.fails:
                raise StorageError("expected a shard, got nothing")
        return load(self, *args, **options)

    monkeypatch.setattr(Shard, "load", stalled)
    return arrives


def read_singly(folder, take, scan=1, begun=None):
    """Batches of one sample, four of which are begun ahead; shards follow each other."""

    def begin(rows):
        if begun is not None:
            begun.append(rows)
        return lambda: take(rows)

    ids = [np.array([number]) for number in range(3 * ROWS)]
    return read_batches(ShardSet([str(folder)], ReadOptions()), ids, scan, begin, ahead=4)


def test_a_late_shard_holds_no_ready_batch_back(folder, late):
    """While one shard does not come, the loop gets what was begun before; then the rest, in order,
    no more of it begun at a time than else.

    The first five batches need the first shard alone.
    """
    begun = []
    reading = read_singly(folder, classes, begun=begun)
    given = list(itertools.islice(reading, ROWS))
    assert given == [[number] for number in range(ROWS)]
    assert not late.is_set()
    late.set()
    given.append(next(reading))
    assert len(begun) == ROWS + 1 + 4
    assert [*given, *reading] == [[number] for number in range(3 * ROWS)]


def test_a_late_shard_has_the_scan_of_its_turn(folder, late):
    """A job that is run again changes the scan at the same batch, whichever shard was late."""
    seen = []
    for is_late in (True, False):
        if not is_late:
            late.set()
        level = ScanLevel(1)
        scans = []
        for scan in read_singly(folder, lambda rows: rows[0][1].scan, level):
            scans.append(scan)
            if len(scans) == 4:
                level.value = 5
            if len(scans) == ROWS:
                late.set()
        late.clear()
        seen.append(scans)
    assert seen[0] == seen[1] == [1] * (2 * ROWS) + [5] * ROWS


def test_a_late_shard_that_fails_does_so_at_its_turn(folder, late):
    """The batches before it come first, then the error."""
    reading = read_singly(folder, classes)
    assert len(list(itertools.islice(reading, 3))) == 3
    late.fails = True
    late.set()
    given = []
    with pytest.raises(StorageError, match="got nothing"):
        given.extend(reading)
    assert given == [[3], [4], [5]]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("leave", ["close", "collect", "throw", "take fails", "before"])
def test_leaving_early_leaves_nothing(folder, prefetch, leave):
    """An epoch may end anywhere: threads end and memory is given back."""

    def take(rows):
        if leave == "take fails" and rows[0][0] == batches[2][0]:
            raise RuntimeError("stop")
        return classes(rows)

    batches = plan()
    reading = read_batches(
        ShardSet([str(folder)], ReadOptions()), batches, 3, at_once(take), shards_ahead=prefetch
    )
    if leave == "take fails":
        with pytest.raises(RuntimeError, match="stop"):
            list(reading)
        return
    if leave != "before":
        list(itertools.islice(reading, 3))
    if leave == "throw":
        with pytest.raises(RuntimeError, match="stop"):
            reading.throw(RuntimeError("stop"))
    elif leave == "collect":
        del reading
    else:
        reading.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_level_that_goes_too_high(folder, prefetch):
    """What was fetched ahead at a good level is dropped when the level it should go to does not
    exist.
    """
    level = ScanLevel(2)
    reading = read_batches(
        ShardSet([str(folder)], ReadOptions()),
        plan(window=1),
        level,
        at_once(classes),
        shards_ahead=prefetch,
    )
    next(reading)
    time.sleep(0.1)
    level.value = 11
    with pytest.raises(ScanUnavailable, match=r"data-\d+\.tar"):
        list(reading)


def test_random_access_costs_the_same_however_much_is_held(folder, monkeypatch):
    """A hit looks at its own prefix only, not at all that are in memory."""
    recent = RecentPrefixes(ShardSet(folder, ReadOptions()), 1 << 30)
    for shard in range(SHARDS):
        recent.get(shard, 1, 0)
    looked = []
    size = Prefix.num_bytes.fget
    monkeypatch.setattr(
        Prefix, "num_bytes", property(lambda self: looked.append(id(self)) or size(self))
    )
    first = recent.get(3, 1, 0)
    assert set(looked) <= {id(first)}


def test_held_bytes_bounds_the_memory_and_not_the_files(folder):
    """What is parsed from a prefix, and a buffer that is longer than it, count as well."""
    shards = ShardSet(folder, ReadOptions())
    prefix = shards.open(0).load(1)
    assert prefix.memory_bytes >= prefix.num_bytes + sum(map(sys.getsizeof, prefix.index.keys))
    recent = RecentPrefixes(shards, 3 * prefix.memory_bytes)
    held = [weakref.ref(recent.get(shard, 1, 0)) for shard in range(SHARDS)]
    gc.collect()
    assert 1 <= sum(ref() is not None for ref in held) <= 4


def test_random_access_fetches_only_the_rest_when_a_level_rises(folder):
    """What is in memory is not fetched again; samples are those of the higher scan, and a lower
    level costs nothing.
    """
    level = ScanLevel(1)
    dataset = PCRDataset(f"counting://{folder}", scan=level)
    dataset[0]
    entry = dataset.shards.entries[0]
    CountingFS.requests.clear()
    level.value = 5
    assert dataset[0]["jpg"] == PCRDataset(str(folder), scan=5)[0]["jpg"]
    [(_, start, stop)] = CountingFS.requests
    assert (start, stop) == (entry.prefix_stop(1), entry.prefix_stop(5))
    level.value = 2
    assert dataset[1]["jpg"] == PCRDataset(str(folder), scan=2)[1]["jpg"]
    level.value = "full"
    assert dataset[1]["jpg"] == PCRDataset(str(folder))[1]["jpg"]
    assert CountingFS.requests[1:] == [
        (CountingFS.requests[0][0], entry.prefix_stop(5), entry.prefix_stop("full"))
    ]
