"""Planning an epoch: time and memory at ImageNet's size for one of 1,024 ranks.

Asserts that the plan has every sample once, in whole batches.
"""

import time

import numpy as np

from pcrshard.training.order import EpochOrder, Geometry
from pcrshard.training.sequence import Rules

from .harness import Quartiles, peak_memory

ROUNDS = 5
IMAGENET = [1024] * 1250 + [1167]  # 1,281,167 samples


def child():
    """Seconds and MB that one rank of 1,024 needs for an epoch, in a fresh process."""
    for _ in EpochOrder([10], Geometry(1)).batches():
        pass  # what NumPy loads at first use
    before, begun = peak_memory(), time.perf_counter()
    order = EpochOrder(IMAGENET, Geometry(1024 * 32, max_world_size=1024), Rules(1), epoch=5)
    batches = list(order.batches(1023, 1024, worker=3, workers=4))
    found = time.perf_counter() - begun, (peak_memory() - before) / 1e6
    assert len(np.unique(np.concatenate(batches))) == 32 * len(batches)
    assert len(batches) == len(range(3, order.steps, 4))
    return found


def run(bench):
    found = [bench.worker("child") for _ in range(bench.rounds)]
    seconds, megabytes = (Quartiles(column) for column in zip(*found, strict=True))
    row = {"seconds": seconds, "MB above the interpreter": megabytes}
    bench.show("One epoch, 1,281,167 samples, 1,251 shards, 1,024 ranks", [row])
    bench.target("seconds to plan one epoch for 1,024 ranks", seconds, most=1.0)
    bench.target("MB to plan it", megabytes, most=100)
