"""Shard lists for WebDataset pipelines: the order of shards, and their split by rank."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any

from .. import storage
from ..reading.shared_integers import SharedIntegers
from . import ranks

_RECENT = 8
_MAX_WORKERS = 4096
_TAG = 1 << 32


class EpochCounter:
    """Counts the epochs of a pipeline, in this process or in DataLoader workers of any kind.

    Attributes:
        begun: Number of the epoch that this process began last.
    """

    def __init__(self) -> None:
        # The parent process is not notified when an epoch begins, and restarted workers lose their
        # counts. So the count is in shared memory, and the first worker to begin an epoch advances
        # it for all. Lock-free: two workers that begin a new epoch at the same time write the same
        # number. The last few counts of epochs begun, each with its loader in the low 32 bits:
        self._recent = SharedIntegers([0] * _RECENT)
        # The last count that each worker began.
        self._begun_by = SharedIntegers([0] * _MAX_WORKERS)

    @property
    def epoch(self) -> int:
        """Number of the next epoch; to resume, set it between epochs."""
        return int(max(self._recent[:]) // _TAG)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._begun_by[:] = [0] * _MAX_WORKERS
        self._recent[:] = [epoch * _TAG] * _RECENT

    def begin(self) -> int:
        """Begin an epoch, possibly jointly with other workers of the loader; return its number.

        Workers identify their loader by its base seed and number of workers; a persistent worker
        that has already begun this epoch begins the next one.
        """
        from torch.utils.data import get_worker_info  # not for `import pcrshard`

        count = self.epoch + 1
        loader = 0
        if worker := get_worker_info():
            loader = (worker.seed - worker.id + worker.num_workers) % _TAG
            of_loader = [entry // _TAG for entry in self._recent[:] if entry % _TAG == loader]
            if (joined := max(of_loader, default=0)) > self._begun_by[worker.id]:
                count = joined
            self._begun_by[worker.id] = count
        self._recent[count % _RECENT] = count * _TAG + loader
        self.begun = count - 1
        return self.begun


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
