"""Shard lists for WebDataset pipelines: the order of shards, and their split by rank."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

from .. import storage
from ..reading.shared_integers import SharedIntegers
from . import ranks

# Epochs begun last: more than loaders that start their workers at the same time.
_RECENT = 64
_BITS = 16


class EpochCounter:
    """Counts the epochs of a pipeline, in this process or in DataLoader workers of any kind.

    Each iteration of each loader is one epoch, also if several loaders share the pipeline.

    Attributes:
        begun: Number of the epoch that this process began last.
    """

    def __init__(self) -> None:
        # The parent process is not notified when an epoch begins, and restarted workers lose their
        # counts. So the counts are in shared memory: of each recent epoch the count of epochs begun
        # with it, and in the low bits the iteration of a loader that began it. The first worker to
        # begin an epoch enters it by one atomic operation, and the other workers of the same
        # iteration join it. The last number counts the times that the epoch was set.
        self._recent = SharedIntegers([0] * (_RECENT + 1))
        # The count that this process began last, and the times that the epoch was set before it.
        self._joined = (0, 0)

    @property
    def epoch(self) -> int:
        """Number of the next epoch; to resume, set it between epochs."""
        return int(max(self._recent[:_RECENT]) >> 2 * _BITS)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._recent[:] = [epoch << 2 * _BITS] * _RECENT + [self._recent[_RECENT] + 1]

    def begin(self) -> int:
        """Begin an epoch, possibly jointly with other workers of the loader; return its number.

        A persistent worker that has already begun this epoch begins the next one.
        """
        from torch.utils.data import get_worker_info  # not for `import pcrshard`

        worker = get_worker_info()
        seed = start = 0
        if worker:
            # An iteration draws a base seed, and starts its workers one after another. Without the
            # process number, an iteration could join the one before it if both have the same seed.
            number = int(re.split("[-:]", multiprocessing.current_process().name)[-1])
            seed, start = (worker.seed - worker.id) % ((1 << _BITS) - 1) + 1, number - worker.id
        while True:
            *recent, times_set = self._recent[:]
            last = self._joined[0] if self._joined[1] == times_set else 0
            of_loader = [
                count >> 2 * _BITS
                for count in recent
                if worker
                and (count >> _BITS) % (1 << _BITS) == seed
                # Other processes may have been started between these workers.
                and _distance(count, start) < worker.num_workers
            ]
            if (count := max(of_loader, default=0)) > last:
                break
            count = (max(recent) >> 2 * _BITS) + 1
            entry = count << 2 * _BITS | seed << _BITS | start % (1 << _BITS)
            place = count % _RECENT
            if self._recent.replace(place, recent[place], entry):
                break
        self._joined = count, times_set
        self.begun = count - 1
        return self.begun


def _distance(one: int, other: int) -> int:
    """Return how far two numbers are apart, of which the low bits are known."""
    apart = (one - other) % (1 << _BITS)
    return min(apart, (1 << _BITS) - apart)


class ShardOrder(EpochCounter):
    """Shards in an order that changes every epoch, as WebDataset's first stage.

    ``wds.WebDataset(pcrshard.shards(urls), shardshuffle=False).pcr_scan(5)`` has a new order in
    each epoch automatically: in this process, in DataLoader workers restarted for each epoch, and
    in persistent ones. WebDataset's own ``shardshuffle`` restarts from the same seed in each epoch,
    and ``detshuffle=True`` in each new worker, so all epochs have the same order.

    Use it wherever WebDataset takes URLs, if ``.pcr_scan()`` follows, or as the first stage of a
    ``wds.DataPipeline``; each pass advances the epoch. Iterating over it gives the shards of the
    next epoch and does not advance it. Each rank counts its own epochs: start the same number on
    all ranks, or set :attr:`epoch`.

    >>> order = shards("a{0..3}.tar")
    >>> [item["url"] for item in order()], order.epoch
    (['a3.tar', 'a0.tar', 'a1.tar', 'a2.tar'], 1)
    >>> order.of_epoch(1)
    ['a3.tar', 'a0.tar', 'a2.tar', 'a1.tar']

    Args:
        urls: Brace pattern, or URLs.
        seed: Any integer, the same on all ranks; it selects the orders.
    """

    def __init__(self, urls: storage.Urls, seed: int = 0) -> None:
        super().__init__()
        self.urls = storage.expand(urls)
        self.seed = seed

    def of_epoch(self, epoch: int) -> list[str]:
        """Return the shards in the order of an epoch."""
        shuffled = list(self.urls)
        random.Random(f"{self.seed} {epoch}").shuffle(shuffled)
        return shuffled

    def __call__(self) -> Iterator[dict[str, str]]:
        """Begin the next epoch: yield ``{"url": ...}`` for each shard, as WebDataset expects."""
        for url in self.of_epoch(self.begin()):
            yield {"url": url}

    def __iter__(self) -> Iterator[str]:
        for name in self.of_epoch(self.epoch):
            url = OrderedUrl(name)
            url.order = self
            yield url


shards = ShardOrder


class OrderedUrl(str):
    """A URL with a reference to its order, which ``.pcr_scan()`` follows.

    ``wds.WebDataset`` stores only a list of the URLs.
    """

    __slots__ = ("order",)
    order: ShardOrder


class SplitByNode:
    """A ``nodesplitter=`` for WebDataset that works in spawned workers and under plain ``srun``.

    A spawned worker does not inherit ``torch.distributed``, and ``srun`` sets no RANK; WebDataset's
    own splitter then silently gives all shards to each rank. This one stores the rank when pickled
    and reads SLURM's variables.

    Args:
        rank: Rank of this process; by default looked up when the splitter is used or pickled.
    """

    def __init__(self, rank: ranks.Rank | None = None) -> None:
        self.rank = rank

    def __call__(self, source: Iterable[Any], group: Any = None) -> Iterator[Any]:
        """Yield every ``world``-th item, starting at ``rank``; WebDataset's ``group`` is unused."""
        rank, world = self.rank or ranks.current()
        yield from itertools.islice(source, rank, None, world)

    def __reduce__(self) -> tuple[Any, ...]:
        return SplitByNode, (self.rank or ranks.current(),)


split_by_node = SplitByNode()
