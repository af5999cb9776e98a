"""Planning an epoch: time and memory at ImageNet's size for one of 1,024 ranks.

Asserts that the plan has every sample once, in whole batches.
"""

import time

import numpy as np

from pcrshard.training.epoch_order import Geometry, Rules, epoch_order, rank_batches

from .harness import Quartiles, peak_memory

ROUNDS = 5
IMAGENET = [1024] * 1250 + [1167]  # 1,281,167 samples


def child():
    """Seconds and MB that one rank of 1,024 needs for an epoch, in a fresh process."""
    epoch_order([10], Geometry(1))  # what NumPy loads at first use
    before, begun = peak_memory(), time.perf_counter()
    order = epoch_order(IMAGENET, Geometry(1024 * 32, max_world_size=1024), Rules(1), epoch=5)
    batches = rank_batches(order, 1023, 1024)[3::4]
    found = time.perf_counter() - begun, (peak_memory() - before) / 1e6
    assert len(np.unique(order.ids)) == order.steps * 1024 * 32
    assert len(batches[0]) == 32
    return found


def run(bench):
    found = [bench.worker("child") for _ in range(bench.rounds)]
    seconds, megabytes = (Quartiles(column) for column in zip(*found, strict=True))
    row = {"seconds": seconds, "MB above the interpreter": megabytes}
    bench.show("One epoch, 1,281,167 samples, 1,251 shards, 1,024 ranks", [row])
    bench.target("seconds to plan one epoch for 1,024 ranks", seconds, most=1.0)
    bench.target("MB to plan it", megabytes, most=100)
