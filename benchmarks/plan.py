"""Planning an epoch: time and memory at ImageNet's size for 1,024 ranks, what is read twice, and
how well samples are mixed, compared with WebDataset's shuffle buffer.

Asserts that every order compared is a permutation.
"""

import json
import random
import time

import numpy as np
from webdataset.filters import _shuffle

from pcrshard.training.epoch_order import Geometry, Rules, epoch_order, mixture, rank_batches
from pcrshard.training.shard_schedule import schedule

from .harness import Quartiles, peak_memory

ROUNDS = 5
IMAGENET = [1024] * 1250 + [1167]  # 1,281,167 samples
SHARDS, ROWS, BATCH = 100, 1000, 256
SAMPLES = SHARDS * ROWS
# Ranks, workers and lanes.
JOBS = ((1, 4, 4), (8, 1, 4), (8, 4, 4), (8, 3, 4), (64, 4, 4), (1024, 4, 4), (1024, 1, 1))


def child():
    """Seconds and MB that one rank of 1,024 needs for an epoch, in a fresh process."""
    epoch_order([10], Geometry(1))  # what NumPy loads at first use
    before, begun = peak_memory(), time.perf_counter()
    order = epoch_order(IMAGENET, Geometry(1024 * 32, max_world_size=1024), Rules(1), epoch=5)
    batches = rank_batches(order, 1024, 1023)[3::4]
    found = time.perf_counter() - begun, (peak_memory() - before) / 1e6
    assert len(np.unique(order.ids)) == order.steps * 1024 * 32
    assert len(batches[0]) == 32
    return json.dumps(found)


def _reading():
    """Bytes read, as multiples of the dataset, and shards held, for several jobs over ImageNet."""
    for world, workers, lanes in JOBS:
        order = epoch_order(IMAGENET, Geometry(32 * world, world, lanes), Rules(1))
        read, shared, held = 0, 0, []
        for rank in range(world):
            batches = rank_batches(order, world, rank)
            plans = [schedule(batches[worker::workers], IMAGENET) for worker in range(workers)]
            read += sum(len(plan.shards) for plan in plans)
            shared += len(set().union(*(plan.shards.tolist() for plan in plans)))
            held.append([plan.peak() for plan in plans])
        yield {
            "ranks": world,
            "workers": workers,
            "lanes": lanes,
            "read, x dataset": read / len(IMAGENET),
            "if a rank shares": shared / len(IMAGENET),
            "held by a worker": max(map(max, held)),
            "by a rank": max(map(sum, held)),
        }


def _orders():
    """(name, most samples held, ids in the order of training, ids in that of the stream)."""
    sizes = [ROWS] * SHARDS
    drawn = np.random.default_rng(1)
    yield "full shuffle", SAMPLES, drawn.permutation(SAMPLES), np.arange(SAMPLES)
    for window in (2, 4, 16):
        rules = Rules(1, shuffle_shards=window, last="short")
        order = epoch_order(sizes, Geometry(BATCH, lanes_per_rank=1), rules)
        held = schedule(rank_batches(order), sizes).peak() * ROWS
        yield f"window {window}", held, order.ids, mixture([sizes], [1], SAMPLES, rules)
    for buffer in (1000, 5000):
        shards = drawn.permutation(SHARDS)  # WebDataset's shuffled list of shards
        stream = (shards[:, None] * ROWS + np.arange(ROWS)).ravel()
        ids = _shuffle(iter(stream.tolist()), buffer, rng=random.Random(1))
        yield f"buffer {buffer}", buffer, np.fromiter(ids, np.int64), stream


def _mixing(name, held, ids, stream):
    """Measures of one order."""
    assert np.array_equal(np.sort(ids), np.arange(SAMPLES))
    place = np.argsort(stream)
    moved = np.abs(place[ids] - np.arange(SAMPLES))
    batches = ids[: SAMPLES // BATCH * BATCH].reshape(-1, BATCH) // ROWS
    distinct = [len(set(batch)) for batch in batches.tolist()]
    return {
        "order": name,
        "held": held,
        "rank corr.": float(np.corrcoef(place[ids], np.arange(SAMPLES))[0, 1]),
        "|moved| median": float(np.median(moved)),
        "99 %": float(np.percentile(moved, 99)),
        "shards/batch": float(np.mean(distinct)),
        "worst": min(distinct),
    }


def run(bench):
    found = [bench.worker("child") for _ in range(bench.rounds)]
    seconds, megabytes = (Quartiles(column) for column in zip(*found, strict=True))
    row = {"seconds": seconds, "MB above the interpreter": megabytes}
    bench.show("One epoch, 1,281,167 samples, 1,251 shards, 1,024 ranks", [row])
    bench.target("seconds to plan one epoch for 1,024 ranks", seconds, most=1.0)
    bench.target("MB to plan it", megabytes, most=100)
    bench.show("Shards of ImageNet, window 4", list(_reading()))
    rows = [_mixing(*order) for order in _orders()]
    bench.show("One stream of 100 x 1000 samples, batches of 256", rows, ".4g")
