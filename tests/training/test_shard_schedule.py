"""What a worker reads and holds, and when: accounts of random jobs, and schedules by hand."""

import collections

import numpy as np
import pytest
from random_jobs import cases, shards_of

from pcrshard.training.epoch_order import Geometry, Rules, epoch_order, worker_batches
from pcrshard.training.shard_schedule import account, schedule


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_that_divide_the_lanes_share_only_split_shards(workers):
    """A shard is read by one worker of one rank, but for at most one split shard per cut between
    lanes.
    """
    sizes, world = [64] * 40, 2
    order = epoch_order(sizes, Geometry(8, max_world_size=world), Rules(1))
    readers = collections.Counter()
    for rank in range(world):
        for worker in range(workers):
            readers.update(
                set(
                    schedule(
                        worker_batches(order, world, rank, workers, worker), sizes
                    ).shards.tolist()
                )
            )
    assert set(readers) == set(range(40))
    assert sum(readers.values()) - 40 <= world * workers - 1


def test_the_account_adds_up():
    """What ``pcrshard plan`` reports is what the batches need: shards, requests, bytes.

    And bytes read twice.
    """
    for case, number in cases(60):
        order, world, workers = case.order(), case.world, case.workers
        prefix = np.arange(1, len(case.sizes) + 1) * 100
        report = account(order, case.sizes, prefix, world, workers)
        read = 0
        for rank in range(world):
            union = set()
            for worker in range(workers):
                batches = worker_batches(order, world, rank, workers, worker)
                need = {int(shard) for ids in batches for shard in shards_of(ids, case.sizes)}
                union |= need
                read += sum(int(prefix[shard]) for shard in need)
                assert report.requests[rank, worker] == len(need), number
                held = [
                    {
                        s
                        for s in need
                        if first(batches, s, case.sizes) <= b <= final(batches, s, case.sizes)
                    }
                    for b in range(len(batches))
                ]
                assert report.open_shards[rank, worker] == max(map(len, held), default=0), number
                assert report.open_bytes[rank, worker] == max(
                    (int(prefix[list(s)].sum()) for s in held), default=0
                ), number
            assert report.rank_bytes[rank] == sum(int(prefix[shard]) for shard in union), number
        once = prefix[np.unique(shards_of(order.ids, case.sizes))].sum()
        assert report.repeated_bytes == read - once, number


def first(batches, shard, sizes):
    return next(i for i, ids in enumerate(batches) if shard in shards_of(ids, sizes))


def final(batches, shard, sizes):
    return max(i for i, ids in enumerate(batches) if shard in shards_of(ids, sizes))


def test_workers_that_do_not_divide_the_lanes_read_more_and_it_shows():
    """Three workers over four lanes deliver the same samples, and the account states the price."""
    sizes = [64] * 40
    order = epoch_order(sizes, Geometry(8), Rules(1))
    four, three = (account(order, sizes, [1000] * 40, workers=workers) for workers in (4, 3))
    assert four.repeated_bytes <= 3 * 1000
    assert three.repeated_bytes == 2 * 40 * 1000
    assert three.rank_bytes.tolist() == four.rank_bytes.tolist() == [40_000]


def test_split_shards_cost_a_single_worker_nothing():
    """One worker that has all lanes reads each shard once.

    And holds no split shard from one end of the epoch to the other.
    """
    sizes = [100] * 50
    order = epoch_order(sizes, Geometry(10, max_world_size=2), Rules(2, shuffle_shards=3))
    plan = schedule(worker_batches(order), sizes)
    assert sorted(plan.shards.tolist()) == list(range(50))
    assert plan.peak() <= 8 * (3 + 1)
    assert (plan.last - plan.first).max() < order.steps / 2


def test_a_schedule_says_when_each_shard_is_first_and_last_needed():
    """A loader that follows the schedule has every shard of a batch open.

    And asks for them in the order of use.
    """
    batches = [np.array(ids) for ids in ([0, 4], [5, 1], [9, 8], [2, 9])]
    plan = schedule(batches, [3, 4, 5])
    assert (plan.shards.tolist(), plan.first.tolist(), plan.last.tolist()) == (
        [0, 1, 2],
        [0, 0, 2],
        [3, 1, 3],
    )
    assert (plan.peak(), plan.peak([100, 10, 1])) == (2, 110)
    again = schedule(batches, [3, 4, 5], keep=0)
    assert (again.shards.tolist(), again.first.tolist(), again.last.tolist()) == (
        [0, 1, 2, 0],
        [0, 0, 2, 3],
        [1, 1, 3, 3],
    )
    assert schedule(batches, [3, 4, 5], keep=1).shards.tolist() == [0, 1, 2]
    assert schedule([], [3]).peak() == 0
