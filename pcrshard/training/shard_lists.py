"""Shard lists for WebDataset pipelines: who takes which shards, and in which order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .. import storage
from . import ranks


def shards(
    urls: str | Sequence[str],
    seed: int = 0,
    epoch: int = 0,
) -> list[str]:
    """The shards in the order of an epoch.

    Use it as ``wds.WebDataset(pcrshard.shards(urls, seed, epoch), shardshuffle=False)``.
    WebDataset's own ``shardshuffle`` starts from the same seed in each epoch, so that every epoch
    has the same order. Make the pipeline again for each epoch with this list, with the same seed on
    all ranks.

    Args:
        urls: Brace pattern, or URLs.
        seed: Any number; another one gives other orders.
        epoch: Number of the epoch.

    >>> shards("a{0..3}.tar", seed=1, epoch=0), shards("a{0..3}.tar", seed=1, epoch=1)
    (['a2.tar', 'a3.tar', 'a1.tar', 'a0.tar'], ['a1.tar', 'a0.tar', 'a3.tar', 'a2.tar'])
    """
    expanded = storage.expand(urls)
    random.Random(f"{seed} {epoch}").shuffle(expanded)
    return expanded


class SplitByNode:
    """``nodesplitter=`` for WebDataset, also in spawned workers and under a plain ``srun``.

    A spawned worker knows nothing of its parent's ``torch.distributed``, and ``srun`` sets no RANK:
    WebDataset's own splitter then gives each rank all shards, without a word. This one takes the
    rank along when it is pickled, and knows SLURM's variables.

    Args:
        rank: Rank of this process; by default looked up when the splitter is used or pickled.
    """

    def __init__(self, rank: ranks.Rank | None = None) -> None:
        self.rank = rank

    def __call__(self, source: Iterable[Any], group: Any = None) -> Iterator[Any]:
        """Every ``world``-th item from the ``rank``-th on; WebDataset's ``group`` is not used."""
        rank, world = self.rank or ranks.current()
        yield from itertools.islice(source, rank, None, world)

    def __reduce__(self) -> tuple[Any, ...]:
        return SplitByNode, (self.rank or ranks.current(),)

    def __repr__(self) -> str:
        return "pcrshard.split_by_node"


split_by_node = SplitByNode()
