"""When a worker needs each shard: from numbers only."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from .sequence import Ints


class Step(NamedTuple):
    """What a worker needs for a batch.

    Attributes:
        ids: (samples,) int64 ids.
        begin: The shards that this batch is the first to need, in the order of their first use.
        end: The shards that no batch needs within the next ``keep``.
    """

    ids: Ints
    begin: list[int]
    end: list[int]


def schedule(batches: Iterable[Ints], starts: Ints, keep: float = math.inf) -> Iterator[Step]:
    """Yield what each batch of a worker needs, with which shards to begin and which to release.

    Args:
        batches: Sample ids of each batch.
        starts: (shards + 1,) id of each shard's first sample, then the number of samples.
        keep: Batches for which a shard may go unused before it is released, to be read again later;
            by default each shard is read once. As many batches are drawn ahead.
    """
    last: dict[int, int] = {}
    drawn: deque[tuple[Step, list[int]]] = deque()
    due = 0

    def take() -> Step:
        nonlocal due
        step, used = drawn.popleft()
        step.end.extend(shard for shard in used if last[shard] == due)
        for shard in step.end:
            del last[shard]
        due += 1
        return step

    for number, ids in enumerate(batches):
        shards = np.searchsorted(starts, ids, side="right") - 1
        used = list(dict.fromkeys(shards.tolist()))
        drawn.append((Step(ids, [each for each in used if each not in last], []), used))
        last.update(dict.fromkeys(used, number))
        if len(drawn) > keep + 1:
            yield take()
    while drawn:
        yield take()
