"""The shards of a dataset, and batches of their samples, with read-ahead of prefixes."""

from __future__ import annotations

import bisect
import itertools
import os
import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import storage
from ..checksum import crc32c
from ..errors import FormatError, ScanUnavailable, StorageError
from ..format.sample_columns import SampleColumns
from ..format.scan import FULL, Scan
from ..format.schema import Schema
from ..lazy import Chain, PerProcess, lazy
from ..reading.dataset_folder import (
    check_claims,
    index_folder,
    is_shard,
    map_shards,
    open_lazily,
    read_column,
)
from ..reading.options import ReadOptions
from ..reading.prefetch import prefetch
from ..reading.prefix import OnError, Prefix
from ..reading.scan_level import (
    ScanChoice,
    ScanOrFraction,
    ScanPerDataset,
    current_scan,
    resolve_choice,
)
from ..reading.shard import Shard
from ..redaction import get_logger, redact_url
from .schedule import schedule
from .sequence import Ints

_KEEP_BATCHES = 64
log = get_logger(__name__)
Row = tuple[int, Prefix, int]
Result = TypeVar("Result")
# Finishes a started batch.
Finish = Callable[[], Result]


class Metadata(NamedTuple):
    """What the indexes of all shards say of their samples: keys, ``cls`` or ``None``, columns."""

    keys: list[str]
    labels: list[bytes | None]
    columns: SampleColumns


class ShardSet:
    """The shards of one or several datasets, with consecutive sample ids.

    Args:
        datasets: Folder or its ``pcr.json``, or several; local paths or any fsspec URLs. Each costs
            one request. Or shards by name, see :func:`open_lazily`.
        options: Read options.

    Attributes:
        indexes: Index of each dataset.
        urls: URL of each shard.
        entries: Entry of each shard in its dataset index.
        starts: (shards + 1,) int64 id of each shard's first sample, then the number of samples.
        datasets: (datasets + 1,) position of each dataset's first shard, then their number.
        schemas: Schema of each dataset.
        classes: Names of the classes, the same in all datasets that have names.
        num_classes: The largest number of classes; 0 if no index says.
        name: Name of the datasets in messages.
    """

    def __init__(self, datasets: storage.Urls, options: ReadOptions) -> None:
        if not datasets:
            raise ValueError("expected one or several datasets, got none")
        self.options = options
        named = [datasets] if isinstance(datasets, str | os.PathLike) else datasets
        # Shards of a folder are one dataset; an object is unlike that of any other URL.
        groups = itertools.groupby(
            storage.expand(named), lambda url: storage.parent(url) if is_shard(url) else object()
        )
        store = options.store
        found = [
            open_lazily(list(urls), storage_options=store, cache=options.cache)
            for _, urls in groups
        ]
        for opened in found:
            check_claims(*opened, storage_options=store)
        self.indexes = [index for index, _ in found]
        self.urls = Chain([urls for _, urls in found])
        self.entries = Chain([index.shards for index in self.indexes])
        counts = [index.shards.num_samples for index in self.indexes]
        self.starts = np.append(0, np.concatenate(counts).cumsum())
        self.datasets = [0, *itertools.accumulate(map(len, counts))]
        # A shard of each list of names.
        named_by = {index.classes: urls[0] for index, urls in found if index.classes}
        if len(named_by) > 1:
            raise ValueError(
                "expected datasets of the same classes, got other ones in "
                + " and ".join(map(redact_url, named_by.values()))
            )
        self.schemas = [index.schema for index in self.indexes]
        _check_alike(self.schemas, [redact_url(urls[0]) for _, urls in found])
        self.classes = next(iter(named_by), ())
        _compare_classes(self.classes, redact_url(self.urls[0]))
        self.num_classes = max(index.num_classes for index, _ in found)
        self.name = " and ".join(redact_url(os.fspath(url)) for url in named)

    def __str__(self) -> str:
        return f"{self.name}: {self.starts[-1]} samples in {len(self.urls)} shards"

    @lazy
    def counts(self) -> list[int]:
        """The number of shards of each dataset."""
        return np.diff(self.datasets).tolist()

    @lazy
    def fingerprint(self) -> int:
        """A checksum of the shards and their order; if it differs, so do sample ids."""
        return self.fingerprint_of(self.counts)

    def fingerprint_of(self, counts: Sequence[int]) -> int:
        """Return the checksum of the first shards of each dataset."""
        rows = [
            index.shards.rows[:count, :2].astype("<u4")
            for index, count in zip(self.indexes, counts, strict=True)
        ]
        return crc32c(np.concatenate(rows), crc32c(np.array(counts, "<i8")))

    @lazy
    def metadata(self) -> Metadata:
        """Read the keys, labels and columns of all samples: one request per shard, for its index.

        Raises:
            FormatError, StorageError: A shard cannot be read.
        """

        def read(shard: int) -> Metadata:
            index = self.open(shard).index
            labels = index.fields.get("cls", [None] * index.num_samples)
            return Metadata(list(index.keys), list(labels), SampleColumns.of(index))

        keys, labels, columns = zip(*map_shards(read, range(len(self.urls))), strict=True)
        chained = itertools.chain.from_iterable
        return Metadata(list(chained(keys)), list(chained(labels)), SampleColumns.join(columns))

    @lazy
    def labels(self) -> NDArray[np.int32]:
        """The labels of all samples, -1 for none; see :meth:`_column`."""
        return self._column("labels")

    @lazy
    def sizes(self) -> NDArray[np.uint16]:
        """The sizes of all samples' first images; see :meth:`_column`."""
        return self._column("sizes")

    @lazy
    def flags(self) -> NDArray[np.uint8]:
        """The flags of all samples; see :meth:`_column`."""
        return self._column("flags")

    def _column(self, name: str) -> NDArray[Any]:
        """Read a column of all samples: one request per dataset.

        If one has no ``pcr.columns``, or a cache may be all there is, one per shard, for its index.
        """
        found = []
        if "metadata" not in vars(self):
            for index, urls in zip(self.indexes, self.urls.parts, strict=True):
                folder = index_folder(index, urls)
                try:
                    own = read_column(index, folder, name, storage_options=self.options.store)
                except StorageError as error:
                    if self.options.cache is None:
                        raise
                    log.warning("%s; reading the index of each shard from the cache", error)
                    own = None
                if own is None:
                    break
                found.append(own)
            else:
                return np.concatenate(found)
        column: NDArray[Any] = getattr(self.metadata.columns, name)
        return column

    def places(self, samples: Ints) -> Iterator[tuple[int, int, int]]:
        """Return the (sample, shard, row) of each of (samples,) int64 ids."""
        shards = np.searchsorted(self.starts, samples, side="right") - 1
        rows = samples - self.starts[shards]
        return zip(samples.tolist(), shards.tolist(), rows.tolist(), strict=True)

    def check_scan(
        self,
        scan: ScanOrFraction,
        fields: Sequence[str] | None = None,
        quality: float | None = None,
    ) -> ScanChoice:
        """Check that every shard has a scan, and return it; convert a fraction of the full bytes.

        A level records its allowed values.

        Args:
            scan: The requested scan; ``"full"`` with a quality.
            fields: Fields that every sample must have at it.
            quality: Least mean MS-SSIM, in place of a scan: the lowest scan of each dataset that
                has it.

        Raises:
            ScanUnavailable: The scan does not exist, a staged copy does not hold it, a field begins
                at a higher one, or a number means something else in each dataset.
            TypeError: The scan is neither an integer, nor a fraction, nor ``"full"``.
            ValueError: A scan and a quality are given.
        """
        known = (schema.by_name.items() for schema in self.schemas)
        firsts = {name: each.scan for name, each in itertools.chain.from_iterable(known)}
        wanted = {name: firsts[name] for name in fields or () if name in firsts}
        if quality is None:
            alike = len({schema.groups for schema in self.schemas}) == 1
            if not alike and scan not in (0, FULL):
                raise ScanUnavailable(
                    f"expected quality=, such as 0.95, or 'full': scan {scan} is not the same "
                    f"fidelity in datasets that are encoded differently ({self.name})"
                )
            return resolve_choice(self.entries, scan, self.name, wanted)
        if scan != FULL:
            raise ValueError(f"expected a scan or a quality, got {scan!r} and {quality}")
        scans = tuple(index.scan_of_quality(quality) for index in self.indexes)
        for own, index in zip(scans, self.indexes, strict=True):
            resolve_choice(index.shards, own, self.name, wanted)
        return scans[0] if len({*scans}) == 1 else ScanPerDataset(scans)

    def scan_at(self, scan: Scan | ScanPerDataset, shard: int) -> Scan:
        """Return the scan of a shard."""
        if isinstance(scan, ScanPerDataset):
            return scan.scans[bisect.bisect_right(self.datasets, shard) - 1]
        return scan

    def open(self, shard: int) -> Shard:
        """Open a shard."""
        schema = self.schemas[bisect.bisect_right(self.datasets, shard) - 1]
        return self.options.open(self.urls[shard], self.entries[shard], schema)

    def neighbor(
        self, shard: int, load: Callable[[int], Prefix], error: FormatError | StorageError
    ) -> Prefix:
        """Return the prefix of the next shard that can be read, in place of one that cannot.

        Raises:
            FormatError, StorageError: The given error: there is none.
        """
        count = len(self.urls)
        for other in range(shard + 1, shard + count):
            with suppress(FormatError, StorageError):
                return load(other % count)
        raise error


# The class names of the datasets that this process has opened, each with a shard of one.
_OPENED: PerProcess[dict[tuple[str, ...], str]] = PerProcess(dict)


def _compare_classes(classes: tuple[str, ...], shard: str) -> None:
    """Warn if another dataset of this process numbers the same classes differently."""
    opened = _OPENED.here
    if not classes or classes in opened:
        return
    for other, its_shard in list(opened.items()):
        # Of another task, most names are others.
        alike = 2 * len({*classes} & {*other}) >= min(len(classes), len(other))
        pairs = enumerate(zip(classes, other, strict=False))
        number = next((number for number, (name, its) in pairs if name != its), None)
        if alike and number is not None:
            warnings.warn(
                f"two datasets number their classes differently: class {number} is "
                f"{classes[number]!r} in {shard} and {other[number]!r} in {its_shard}; if you "
                "train on one and validate on the other, encode one with --classes-of the other",
                stacklevel=5,
            )
            break
    opened[classes] = shard


def _check_alike(schemas: Sequence[Schema], names: Sequence[str]) -> None:
    """Refuse datasets in which a field of the same name holds something else."""
    known: dict[str, tuple[str, str]] = {}
    for schema, name in zip(schemas, names, strict=True):
        for field in schema.fields:
            kind, other = known.setdefault(field.name, (field.kind, name))
            if kind != field.kind:
                raise ValueError(
                    f"expected field {field.name!r} to hold the same in all datasets, got {kind} "
                    f"in {other} and {field.kind} in {name}"
                )


class _Held:
    """The recently used prefixes of a process, and the locks of its threads."""

    def __init__(self) -> None:
        self.prefixes: OrderedDict[int, Prefix] = OrderedDict()
        self.bytes = 0
        self.lock = threading.Lock()
        # By shard.
        self.gates: dict[int, threading.Lock] = {}

    def keep(self, shard: int, prefix: Prefix, max_bytes: int) -> None:
        """Keep a prefix as the last one used, and as many others as there is room for."""
        with self.lock:
            before = self.prefixes.get(shard)
            if before is not prefix:
                self.bytes += prefix.memory_bytes - (before.memory_bytes if before else 0)
                self.prefixes[shard] = prefix
            self.prefixes.move_to_end(shard)
            while len(self.prefixes) > 1 and self.bytes > max_bytes:
                self.bytes -= self.prefixes.popitem(last=False)[1].memory_bytes


class RecentPrefixes:
    """A cache of recently used prefixes, for random access.

    Threads that need the same shard read it once. Another process starts with an empty one.

    Args:
        shards: The shards.
        max_bytes: Upper bound of the memory that they take; the last prefix is always kept.
    """

    def __init__(self, shards: ShardSet, max_bytes: int) -> None:
        self._shards = shards
        self._max_bytes = max_bytes
        self._held = PerProcess(_Held)

    def get(self, shard: int, scan: Scan | ScanPerDataset, row: int) -> Prefix:
        """Return the prefix of a shard at a scan; of a plain tar, what a sample needs of it."""
        scan = self._shards.scan_at(scan, shard)
        held = self._held.here
        # Tars may be large, and sampling at random needs little of each; a cache keeps all of them.
        is_tar = bool(self._shards.entries[shard].index_url) and not self._shards.options.cache
        with held.gates.setdefault(shard, threading.Lock()):
            prefix = held.prefixes.get(shard)
            if prefix is None:
                prefix = self._shards.open(shard).load(0 if is_tar else scan)
            elif not (is_tar or prefix.holds(scan)):
                prefix = prefix.shard.change_scan(prefix, scan)
            held.keep(shard, prefix, self._max_bytes)
        if is_tar and scan == FULL:
            return prefix.shard.load_rows(prefix, np.array([row]))
        return prefix.at(scan)


class _OpenShards:
    """The prefixes that batches to come need; those that have begun keep their own."""

    def __init__(self, shards: ShardSet, on_error: OnError | None) -> None:
        self._shards = shards
        self._on_error = on_error
        self._held: dict[int, Prefix] = {}
        self._lost: dict[int, FormatError | StorageError] = {}

    def add(self, shard: int, future: Future[Prefix], scan: Scan | ScanPerDataset) -> None:
        """Add a prefix once it has been fetched, or that of the next shard that can be read."""
        shards = self._shards
        try:
            loaded = future.result()
            self._held[shard] = loaded.shard.change_scan(loaded, shards.scan_at(scan, shard))
        except (FormatError, StorageError) as error:
            if self._on_error is None:
                raise
            self._lost[shard] = error
            self._held[shard] = shards.neighbor(
                shard, lambda n: shards.open(n).load(shards.scan_at(scan, n)), error
            )

    def rows(self, ids: Ints) -> list[Row]:
        """Return the rows of some samples; for those of lost shards, rows of another one."""
        rows = []
        for sample, shard, place in self._shards.places(ids):
            prefix, row = self._held[shard], place
            if shard in self._lost:
                if self._on_error is None or not self._on_error(self._lost[shard]):
                    raise self._lost[shard]
                row %= prefix.index.num_samples
            rows.append((sample, prefix, row))
        return rows

    def release(self, shards: Iterable[int]) -> None:
        """Drop prefixes."""
        for shard in shards:
            del self._held[shard]


def read_batches(
    shards: ShardSet,
    batches: Iterable[Ints],
    scan: ScanChoice,
    begin: Callable[[list[Row]], Finish[Result]],
    *,
    ahead: int = 0,
    shards_ahead: int = 2,
    on_error: OnError | None = None,
    rows_of: Callable[[int], Ints | None] = lambda _: None,
) -> Iterator[Result]:
    """Read batches of samples in a planned order.

    If a batch fails, its error is raised after the batches before it.

    Args:
        shards: The shards that the ids refer to.
        batches: Ids of each batch, (samples,) int64.
        scan: Highest scan to read, 1-based, or ``"full"``, or a level, which is consulted when a
            shard is fetched, and again when a batch is due to start.
        begin: Starts a batch from the (id, prefix, row) of its samples and returns a function that
            finishes it.
        ahead: Batches to start before the preceding one is finished, if their shards are available,
            at the scan of that moment. It starts at zero to keep the first batch fast, and grows by
            one per batch.
        shards_ahead: Shards to fetch while another is in use; 0 fetches a shard when it is needed.
        on_error: Called with the error of each sample of a shard that cannot be read; if it returns
            True, the sample is replaced by one of the next shard.
        rows_of: Returns the positions in a shard of the samples that the batches may need; ``None``
            for all. Others of a plain tar are not read.

    Yields:
        The finished batches.

    Raises:
        ScanUnavailable, FormatError, StorageError: A shard cannot be read.
    """
    # Only padding, mixtures and buckets leave a shard unused for longer than four shards take. Such
    # a shard is dropped and read again later.
    longest = np.diff(shards.starts).max()
    stream = iter(batches)
    first = list(itertools.islice(stream, 1))
    keep = _KEEP_BATCHES + 4 * longest // max(map(len, first), default=1)
    steps, planned = itertools.tee(schedule(itertools.chain(first, stream), shards.starts, keep))
    loads = prefetch(
        (shard for step in planned for shard in step.begin),
        lambda shard, cancel: shards.open(shard).load(
            shards.scan_at(current_scan(scan), shard), cancel=cancel, rows=rows_of(shard)
        ),
        depth=shards_ahead,
    )
    held = _OpenShards(shards, on_error)
    # For each batch that is due but waits for its shards, the scan when it was due, so that a
    # repeated run changes the scan at the same batch.
    due: deque[Scan | ScanPerDataset] = deque()
    begun: deque[Finish[Result]] = deque()

    def begin_due() -> Iterator[None]:
        """Start due batches; pause if none is left, or a shard is missing and others can finish."""
        try:
            for step in steps:
                while not due:
                    yield
                for shard, future in itertools.islice(loads, len(step.begin)):
                    while begun and not future.done():
                        yield
                    held.add(shard, future, due[0])
                    del future  # only ``held`` keeps the prefix in memory
                due.popleft()
                begun.append(begin(held.rows(step.ids)))
                held.release(step.end)
        except Exception as error:  # any error waits for the batches before this one
            begun.append(partial(_fail, error))

    coming = begin_due()
    try:
        for number in itertools.count():
            missing = min(number, ahead) + 1 - len(begun) - len(due)
            due.extend([current_scan(scan)] * missing)
            next(coming, None)
            if not begun:
                return
            yield begun.popleft()()
    finally:
        loads.close()


def _fail(error: Exception) -> NoReturn:
    raise error
