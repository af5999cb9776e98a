"""Read the samples of a plan: shards are fetched ahead, held while they are needed, and let go."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from .. import native
from ..checksum import crc32c
from ..format.scan import Scan
from ..reading.dataset_folder import open_dataset
from ..reading.options import ReadOptions
from ..reading.prefetch import prefetch
from ..reading.prefix import Prefix
from ..reading.scan_level import ScanLevel
from ..reading.shard import Shard
from .shard_schedule import schedule

Ints = npt.NDArray[np.int64]
Result = TypeVar("Result")


class Place(NamedTuple):
    """Where a sample is."""

    shard: int
    row: int


class ShardSet:
    """The shards of one or several datasets; sample ids run on from shard to shard.

    Args:
        datasets: Folders or their ``pcr.json``, local or any fsspec URLs; one request each.
        options: How shards are read.

    Attributes:
        urls: Of all shards.
        entries: What the dataset indices know of them.
        sizes: Per dataset, samples per shard.
        classes: Names of the first dataset's classes.
    """

    def __init__(self, datasets: Sequence[str], options: ReadOptions) -> None:
        if not datasets:
            raise ValueError("expected one or several datasets, got none")
        self.options = options
        found = [open_dataset(url, storage_options=options.storage_options) for url in datasets]
        self.urls = [url for _, urls in found for url in urls]
        self.entries = [entry for index, _ in found for entry in index.shards]
        self.sizes = [[entry.num_samples for entry in index.shards] for index, _ in found]
        self.classes = found[0][0].classes
        self.starts = np.concatenate(
            ([0], np.cumsum([entry.num_samples for entry in self.entries]))
        )

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return int(self.starts[-1])

    @property
    def fingerprint(self) -> int:
        """A checksum of which shards these are, in which order; another one means other sample ids."""
        return crc32c(
            "\n".join(f"{e.name} {e.num_samples} {e.head_crc32c}" for e in self.entries).encode()
        )

    def place(self, sample: int) -> Place:
        """Where a sample is, by its id in [0, num_samples)."""
        shard = int(np.searchsorted(self.starts, sample, side="right")) - 1
        return Place(shard, int(sample - self.starts[shard]))

    def places(self, samples: Ints) -> Iterator[tuple[int, int, int]]:
        """(sample, shard, row) of each of (samples,) int64 ids."""
        shards = np.searchsorted(self.starts, samples, side="right") - 1
        return zip(
            samples.tolist(), shards.tolist(), (samples - self.starts[shards]).tolist(), strict=True
        )

    def open(self, shard: int) -> Shard:
        """One of the shards."""
        return self.options.open(self.urls[shard], self.entries[shard])


def read_batches(
    shards: ShardSet,
    batches: Sequence[Ints],
    scan: Scan | ScanLevel,
    take: Callable[[list[tuple[int, Prefix, int]]], Result],
) -> Iterator[Result]:
    """Read batches of samples in the order of a plan.

    Args:
        shards: What the ids mean.
        batches: Ids of each batch, (samples,) int64.
        scan: 1..N, ``"full"``, or a level, which is read at each shard.
        take: Makes a batch of (id, prefix, row) of its samples; the prefixes may be gone afterwards.

    Yields:
        What ``take`` gave.

    Raises:
        ScanUnavailable, FormatError, StorageError: A shard cannot be read.
    """
    sizes = [entry.num_samples for entry in shards.entries]
    # What lies unused for longer than four shards take is let go and read again: only padding and mixtures have such shards.
    keep = 64 + 4 * max(sizes) // max(map(len, batches), default=1)
    needed = schedule(batches, sizes, keep=keep)
    requests = list(
        zip(needed.shards.tolist(), needed.first.tolist(), needed.last.tolist(), strict=True)
    )
    options = shards.options

    def level() -> Scan:
        return scan.value if isinstance(scan, ScanLevel) else scan

    def load(request: tuple[int, int, int], cancel: threading.Event) -> Prefix:
        return _checked(shards.open(request[0]).load(level(), cancel=cancel))

    held: dict[int, tuple[Prefix, int]] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [prefix.close() for prefix, _ in held.values()])
        loads = stack.enter_context(
            contextlib.closing(
                prefetch(requests, load, depth=options.prefetch, max_bytes=options.prefetch_bytes)
            )
        )
        begun = 0
        for number, ids in enumerate(batches):
            while begun < len(requests) and requests[begun][1] == number:
                (shard, _, last), future = next(loads)
                prefix = future.result()
                held[shard] = prefix, last  # before anything can fail, so that it is closed
                held[shard] = _checked(prefix.shard.change_scan(prefix, level())), last
                begun += 1
            yield take([(sample, held[shard][0], row) for sample, shard, row in shards.places(ids)])
            for shard in [shard for shard, (_, last) in held.items() if last == number]:
                held.pop(shard)[0].close()


def _checked(prefix: Prefix) -> Prefix:
    """All at once where the native core does it, without the GIL; elsewhere each sample is checked when it is used."""
    if native.available and prefix.check:
        prefix.is_sound()
    return prefix
