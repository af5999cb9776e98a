"""Read the samples of a plan: shards are fetched ahead, held while they are needed, and closed."""

from __future__ import annotations

import itertools
import operator
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from functools import partial
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import numpy as np

from ..checksum import crc32c
from ..format.dataset_index import ShardEntry
from ..format.scan import FULL, Scan, check_scan
from ..reading.dataset_folder import Opened, check_claims, open_dataset
from ..reading.options import ReadOptions
from ..reading.prefetch import prefetch
from ..reading.prefix import Prefix
from ..reading.scan_level import ScanChoice, ScanLevel, ScanRange, current_scan
from ..reading.shard import Shard
from ..redaction import redact_url
from ..storage import Urls
from .epoch_sequence import Batches, Ints
from .shard_schedule import Schedule, schedule

# How long the last batch that is decoded waits for a shard with which the next could be begun.
_GRACE_SECONDS = 0.01
Row = tuple[int, Prefix, int]
Result = TypeVar("Result")
Loads = Generator[tuple[tuple[int, int], Future[Prefix]], None, None]
# Finishes what was begun.
Finish = Callable[[], Result]


class Place(NamedTuple):
    """Where a sample is."""

    shard: int
    row: int


class ShardSet:
    """The shards of one or several datasets; sample ids run on from shard to shard.

    Args:
        datasets: Folder or its ``pcr.json``, or several; local or any fsspec URLs. Each costs one
            request.
        options: How shards are read.

    Attributes:
        urls: URL of each shard.
        entries: What the dataset indexes know of each shard.
        sizes: Per dataset, samples per shard.
        starts: (shards + 1,) int64 id of each shard's first sample, then the number of samples.
        classes: Names of the first dataset's classes.
        num_classes: How many classes it has; 0 if nobody knows.
        name: The datasets, in messages.
    """

    def __init__(self, datasets: Urls, options: ReadOptions) -> None:
        if not datasets:
            raise ValueError("expected one or several datasets, got none")
        self.options = options
        urls = [datasets] if isinstance(datasets, str | os.PathLike) else datasets
        found = [_open(url, options) for url in urls]
        self.urls = [url for _, urls in found for url in urls]
        self.entries = [entry for index, _ in found for entry in index.shards]
        self.sizes = [[entry.num_samples for entry in index.shards] for index, _ in found]
        self.starts = np.cumsum([0, *itertools.chain(*self.sizes)])
        self.classes = found[0][0].classes
        self.num_classes = found[0][0].num_classes
        self.name = " and ".join(redact_url(os.fspath(url)) for url in urls)

    def __str__(self) -> str:
        return f"{self.name}: {self.num_samples} samples in {len(self.urls)} shards"

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return int(self.starts[-1])

    @property
    def scans(self) -> ScanRange:
        """The scans that every shard has."""
        num_groups = min(entry.num_groups for entry in self.entries)
        held = [entry.scan for entry in self.entries if entry.scan]
        return ScanRange(num_groups, min(held, default=FULL), self.name)

    @property
    def fingerprint(self) -> int:
        """A checksum of the shards and their order; another one means other sample ids."""
        lines = ["{} {} {}".format(*identity) for identity in _identities(self.entries)]
        return crc32c("\n".join(lines).encode())

    def place(self, sample: int) -> Place:
        """Where a sample is, by its id in [0, num_samples).

        Raises:
            IndexError: There is no such sample.
        """
        sample = operator.index(sample)
        if not 0 <= sample < self.num_samples:
            raise IndexError(f"expected an id below {self.num_samples}, got {sample}")
        [(_, shard, row)] = self.places(np.array([sample]))
        return Place(shard, row)

    def places(self, samples: Ints) -> Iterator[tuple[int, int, int]]:
        """(sample, shard, row) of each of (samples,) int64 ids."""
        shards = np.searchsorted(self.starts, samples, side="right") - 1
        rows = samples - self.starts[shards]
        return zip(samples.tolist(), shards.tolist(), rows.tolist(), strict=True)

    def schedule(self, batches: Batches) -> Schedule:
        """When batches of ids need each shard."""
        sizes = np.diff(self.starts)
        # A shard that lies unused for longer than four shards take is closed and read again: only
        # padding and mixtures have such shards.
        keep = 64 + 4 * sizes.max() // max(map(len, batches), default=1)
        return schedule(batches, sizes, keep)

    def origin(self, url: str) -> ShardSet:
        """The same shards where these were staged from, with all of their scans.

        Raises:
            ValueError: There are other shards.
        """
        found = ShardSet(url, self.options)
        check_same_shards(self.entries, found.entries, url)
        return found

    def check_scan(self, scan: ScanChoice) -> None:
        """Refuse a scan that a shard does not have; a level remembers what it may be set to.

        Raises:
            ScanUnavailable: There is no such scan, or a staged copy does not hold it.
            TypeError: It is neither an integer nor ``"full"``.
        """
        if isinstance(scan, ScanLevel):
            scan.follow(self.scans)
            return
        now = current_scan(scan)
        for entry in self.entries:
            # Scan 0 has no images to train on.
            check_scan(now, entry.num_groups)
            entry.prefix_stop(now)

    def open(self, shard: int) -> Shard:
        """One of the shards."""
        return self.options.open(self.urls[shard], self.entries[shard])


def check_same_shards(
    entries: Sequence[ShardEntry],
    others: Sequence[ShardEntry],
    url: str,
) -> None:
    """Raise ``ValueError`` if ``url`` has other shards than a staged copy of it would have."""
    if _identities(entries) != _identities(others):
        raise ValueError(
            f"expected the dataset that the staged copy comes from, got {redact_url(url)}"
        )


def _identities(entries: Sequence[ShardEntry]) -> list[tuple[Any, ...]]:
    """What tells shards from others."""
    return [(entry.name, entry.num_samples, entry.head_crc32c) for entry in entries]


def _open(url: str, options: ReadOptions) -> Opened:
    how: Any = {
        "storage_options": options.storage_options,
        "retry": options.retry,
    }
    index, urls = open_dataset(url, **how)
    check_claims(index, urls, **how)
    return index, urls


class HeldPrefixes:
    """Prefixes in memory by shard, each until the last batch that needs it."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Prefix, int]] = {}

    def add(
        self,
        shard: int,
        last: int,
        prefix: Prefix,
        scan: Scan,
    ) -> None:
        """Hold a prefix, changed to a scan, until batch ``last`` is released."""
        self._held[shard] = (prefix, last)  # first, so that it is closed if the change fails
        self._held[shard] = (prefix.shard.change_scan(prefix, scan), last)

    def rows(self, places: Iterable[tuple[int, int, int]]) -> list[Row]:
        """(id, prefix, row) of each (id, shard, row)."""
        return [(sample, self._held[shard][0], row) for sample, shard, row in places]

    def release(self, batch: int) -> None:
        """Close what no later batch needs."""
        for shard, (prefix, last) in list(self._held.items()):
            if last <= batch:
                prefix.close()
                del self._held[shard]

    def close(self) -> None:
        """Close all."""
        for prefix, _ in self._held.values():
            prefix.close()


class _Turns(Generic[Result]):
    """Batches whose turn to be begun has come.

    Attributes:
        scans: Of those that are not begun, because their shards are late: the scan of that moment,
            so that a job that is run again changes it at the same batch.
        begun: The others, until they are finished.
    """

    def __init__(self) -> None:
        self.scans: deque[Scan] = deque()
        self.begun: deque[Finish[Result]] = deque()

    def begin(
        self,
        coming: Iterator[Finish[Result] | None],
        count: int,
        scan: ScanChoice,
    ) -> None:
        """Begin what can be begun, until there are so many."""
        missing = count - len(self.begun)
        self.scans.extend([current_scan(scan)] * (missing - len(self.scans)))
        while len(self.begun) < count and (finish := next(coming, None)) is not None:
            self.begun.append(finish)


def read_batches(
    shards: ShardSet,
    batches: Batches,
    scan: ScanChoice,
    begin: Callable[[list[Row]], Finish[Result]],
    ahead: int = 0,
) -> Iterator[Result]:
    """Read batches of samples in the order of a plan.

    What goes wrong with a batch is raised when it is its turn.

    Args:
        shards: What the ids mean.
        batches: Ids of each batch, (samples,) int64.
        scan: Highest scan to read, 1-based, or ``"full"``, or a level, which is read when a shard
            is fetched, and again when it is a batch's turn to be begun.
        begin: Begins a batch of the (id, prefix, row) of its samples; what it returns finishes it.
            The prefixes may be closed after that.
        ahead: Batches that are begun before the one before them is finished, if their shards are
            there, at the scan of the moment. There are none before the first batch, which nothing
            shall delay, and one more with each batch.

    Yields:
        The finished batches.

    Raises:
        RuntimeError: This is a forked child, which has none of the threads that read ahead.
        ScanUnavailable, FormatError, StorageError: A shard cannot be read.
    """
    process = os.getpid()
    needed = shards.schedule(batches)
    starting = np.bincount(needed.first, minlength=len(batches)).tolist()
    loads = _load_ahead(shards, needed, scan)
    held = HeldPrefixes()
    with closing(held), closing(loads):
        scheduled = zip(batches, starting, strict=True)
        turns: _Turns[Result] = _Turns()
        coming = _begin_batches(shards, scheduled, begin, loads, held, turns)
        for number in range(len(batches)):
            check_process(process)
            turns.begin(coming, min(number, ahead) + 1, scan)
            yield turns.begun.popleft()()
            held.release(number)


def check_process(process: int) -> None:
    """Raise ``RuntimeError`` in a child of the process that began to read batches."""
    if os.getpid() != process:
        raise RuntimeError(
            f"expected the process {process}, in which this iteration was begun, got its child "
            f"{os.getpid()}: begin the iteration there"
        )


def _load_ahead(
    shards: ShardSet,
    needed: Schedule,
    scan: ScanChoice,
) -> Loads:
    """Load the shards of a schedule in its order; with each, the last batch that needs it."""
    requests = zip(needed.shards.tolist(), needed.last.tolist(), strict=True)
    load = partial(_load, shards, scan)
    options = shards.options
    return prefetch(requests, load, depth=options.prefetch, max_bytes=options.prefetch_bytes)


def _begin_batches(
    shards: ShardSet,
    scheduled: Iterable[tuple[Ints, int]],
    begin: Callable[[list[Row]], Finish[Result]],
    loads: Loads,
    held: HeldPrefixes,
    turns: _Turns[Result],
) -> Iterator[Finish[Result] | None]:
    """Begin batches of (ids, shards that they are the first to need).

    ``None`` while a shard is not there, and others are begun that can be finished meanwhile.
    """
    try:
        for ids, starting in scheduled:
            for (shard, last), future in itertools.islice(loads, starting):
                while turns.begun and not _comes(future, len(turns.begun)):
                    yield None
                held.add(shard, last, future.result(), turns.scans[0])
            turns.scans.popleft()
            yield begin(held.rows(shards.places(ids)))
    except Exception as error:  # whatever it is, the batches before this one come first
        yield partial(_fail, error)


def _comes(future: Future[Prefix], begun: int) -> bool:
    """Whether a shard is there; while nothing else would be decoded, some milliseconds later."""
    if begun == 1:
        wait((future,), _GRACE_SECONDS)
    return future.done()


def _fail(error: Exception) -> NoReturn:
    raise error


def _load(
    shards: ShardSet,
    scan: ScanChoice,
    request: tuple[int, int],
    cancel: threading.Event,
) -> Prefix:
    return shards.open(request[0]).load(current_scan(scan), cancel=cancel)
