"""The order and assignment of samples: partitions, resumes, windows, and accounting."""

import collections
import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_jobs import SEED, Case, cases, shards_of

from pcrshard.training.epoch_order import (
    Geometry,
    Rules,
    advance,
    epoch_order,
    mixture,
    worker_batches,
)
from pcrshard.training.shard_schedule import schedule

GOLDEN_ORDER = [6, 7, 17, 15, 14, 0, 9, 10, 2, 5, 12, 16, 1, 4, 11, 13, 3, 8]
GOLDEN_REST = [3, 16, 1, 0, 2, 4, 2, 13, 3, 11, 12, 8]
GOLDEN_MIXTURE = [21, 0, 4, 14, 15, 16, 17, 19, 18, 19, 8, 12]


def delivered(order, world, workers):
    """Per step and rank what a DataLoader hands out: its workers' batches in turn."""
    ranks = []
    for rank in range(world):
        queues = [
            collections.deque(worker_batches(order, world, rank, workers, worker))
            for worker in range(workers)
        ]
        batches = []
        while queues[len(batches) % workers]:
            batches.append(queues[len(batches) % workers].popleft())
        assert not any(queues)
        ranks.append(batches)
    return ranks


def joined(ranks):
    """The ranks' batches, step after step."""
    steps = max(len(batches) for batches in ranks)
    parts = [batches[step] for step in range(steps) for batches in ranks if step < len(batches)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def check_multiset(order, case):
    """Drop: less than a batch is left out; pad: less than a batch more than whole rounds.

    Short: each exactly once.
    """
    size, times = case.geometry.global_batch, np.bincount(order.ids, minlength=case.total)
    if case.rules.last == "drop":
        assert times.max() == 1
        assert len(order.ids) == case.total - case.total % size
    elif case.rules.last == "pad":
        assert times.min() >= 1
        assert times.max() - times.min() <= 1
        assert len(order.ids) == -(-case.total // size) * size
    else:
        assert (times == 1).all()


def check_partition(count):
    for case, number in cases(count):
        order = case.order()
        check_multiset(order, case)
        ranks = delivered(order, case.world, case.workers)
        assert np.array_equal(joined(ranks), order.ids), number
        lengths = {len(batch) for batches in ranks for batch in batches}
        if case.rules.last == "short":
            assert max(map(len, ranks)) - min(map(len, ranks)) <= 1, number
            ends = [len(batches[-1]) if len(batches) == order.steps else 0 for batches in ranks]
            assert max(ends) - min(ends) <= 1, number
        else:
            assert lengths == {case.geometry.global_batch // case.world}, number
            assert {len(batches) for batches in ranks} == {order.steps}, number


def test_ranks_and_workers_share_out_the_epoch_exactly():
    """Whatever the world and the workers, each sample is delivered as often as the last-batch rule
    says, in the planned order.
    """
    check_partition(1500)


@pytest.mark.long
def test_ranks_and_workers_share_out_the_epoch_exactly_at_length():
    """The same for ten thousand jobs."""
    check_partition(10_000)


def test_the_world_does_not_change_an_elastic_order():
    """With fixed slots, 1 to 16 ranks with any workers consume the same samples in each step."""
    order = epoch_order([97] * 11, Geometry(48, max_world_size=8), Rules(5))
    for world in (1, 2, 3, 4, 6, 8, 16):
        for workers in (1, 3, 4):
            assert np.array_equal(joined(delivered(order, world, workers)), order.ids)


def test_an_elastic_job_resumes_with_the_exact_sequence():
    """Stopped twice at random steps, the rest of the epoch is the rest of the same rows."""
    for case, number in cases(300):
        whole, rng = case.order(), np.random.default_rng([SEED, 1, number])
        first = int(rng.integers(0, whole.steps + 1))
        second = int(rng.integers(0, whole.steps - first + 1))
        size = case.geometry.global_batch
        once = advance([], case.geometry, first)
        twice = advance(json.loads(json.dumps(once)), case.geometry, second)
        assert len(twice) == 1
        assert np.array_equal(case.order(history=once).ids, whole.ids[first * size :]), number
        assert np.array_equal(
            case.order(history=twice).ids, whole.ids[(first + second) * size :]
        ), number
        unjoined = [*once, [*once[0][:3], second]]
        assert np.array_equal(case.order(history=unjoined).ids, case.order(history=twice).ids), (
            number
        )


def test_another_geometry_delivers_exactly_what_is_left():
    """Resumed twice with other ranks, batches or lanes, no sample is lost or comes again, but for
    the rule of the last batch.
    """
    for case, number in cases(400):
        rng, history, seen = np.random.default_rng([SEED, 2, number]), [], []
        for geometry in (case.geometry, *(Case.draw(rng).geometry for _ in range(2))):
            order = case.order(geometry, history)
            steps = int(rng.integers(0, order.steps + 1))
            seen.append(order.ids[: steps * geometry.global_batch])
            history = advance(history, geometry, steps)
        times = np.bincount(
            np.concatenate([*seen, order.ids[steps * geometry.global_batch :]]),
            minlength=case.total,
        )
        extra, size = int(times.sum()) - case.total, geometry.global_batch
        if case.rules.last == "short":
            assert (times == 1).all(), number
        elif case.rules.last == "drop":
            assert times.max() <= 1, number
            assert 0 <= -extra < size, number
        else:
            assert times.min() >= 1, number


def test_a_resumed_epoch_repeats_only_what_padding_adds():
    """With padding, a change of geometry gives just the samples not yet seen, filled up by less
    than a batch of repeats.
    """
    for case, number in cases(200, last="pad"):
        rng = np.random.default_rng([SEED, 3, number])
        whole, other = case.order(), Case.draw(rng).geometry
        if other == case.geometry:
            continue  # no change: the row goes on, with the repeats that it had
        steps = int(rng.integers(0, whole.steps))
        rest = case.order(other, advance([], case.geometry, steps))
        unseen = np.setdiff1d(whole.ids, whole.ids[: steps * case.geometry.global_batch])
        assert np.array_equal(np.unique(rest.ids), unseen), number
        assert len(rest.ids) - len(unseen) < other.global_batch, number


def test_a_window_keeps_few_shards_open():
    """At no sample does a lane have more than ``shuffle_shards`` shards open, with shards of any
    size.
    """
    for case, number in cases(300):
        sizes = case.sizes
        _, slots, turns = dataclasses.astuple(case.geometry)
        lanes = dataclasses.replace(case.rules, last="drop")
        order = epoch_order(sizes, case.geometry, lanes, epoch=case.epoch)
        grid = order.ids.reshape(order.steps, slots, -1)
        for turn in range(turns):
            for slot in range(slots):
                lane = grid[turn::turns, slot].ravel()
                peak = schedule([lane[i : i + 1] for i in range(len(lane))], sizes).peak()
                assert peak <= max(1, case.rules.shuffle_shards), number


def test_a_wide_window_shuffles_a_lane_completely():
    """With a window of twice the lane, a sample's place says nothing about its shard."""
    order = epoch_order([500] * 40, Geometry(100, lanes_per_rank=1), Rules(3, shuffle_shards=80))
    shards = shards_of(order.ids, [500] * 40)
    assert shards.reshape(20, -1).mean(1) == pytest.approx(
        19.5, abs=1.8
    )  # five standard errors of 1000 samples
    wider = epoch_order([500] * 40, Geometry(100, lanes_per_rank=1), Rules(3, shuffle_shards=10**9))
    assert np.array_equal(order.ids, wider.ids)


def test_the_first_and_last_batches_are_mixed_too():
    """An epoch does not begin or end with one shard at a time: half the window is open from the
    first sample on.
    """
    sizes = [1000] * 32
    order = epoch_order(sizes, Geometry(100, lanes_per_rank=1), Rules(0, shuffle_shards=8))
    opened = [len(set(shards_of(order.step(step), sizes))) for step in range(order.steps)]
    assert min(opened) >= 4
    assert max(opened) <= 9


def test_no_shuffle_is_the_order_of_the_dataset():
    """For evaluation, one lane without shuffling gives 0, 1, 2 and so on, each exactly once."""
    for lanes in (1, 2):
        order = epoch_order(
            [5, 0, 7, 1], Geometry(4, 2, lanes), Rules(shuffle_shards=0, last="short")
        )
        assert sorted(order.ids.tolist()) == list(range(13))
    order = epoch_order(
        [5, 0, 7, 1], Geometry(4, lanes_per_rank=1), Rules(shuffle_shards=0, last="short")
    )
    assert order.ids.tolist() == list(range(13))
    assert order.step(3).tolist() == [12]


def test_epochs_and_seeds_differ():
    """Each epoch and each seed has its own order of shards, of rows.

    And its own left-out samples.
    """
    sizes = [50] * 20 + [7]
    orders = {
        (seed, epoch): epoch_order(sizes, Geometry(16), Rules(seed), epoch=epoch)
        for seed in range(3)
        for epoch in range(3)
    }
    assert len({order.ids.tobytes() for order in orders.values()}) == 9
    assert len({tuple(np.setdiff1d(np.arange(1007), order.ids)) for order in orders.values()}) == 9
    for one in orders.values():
        assert sum(np.array_equal(one.ids, other.ids) for other in orders.values()) == 1
    assert abs(np.corrcoef(orders[0, 0].ids, orders[0, 1].ids)[0, 1]) < 0.2


def test_every_place_in_an_epoch_is_equally_likely():
    """Over many epochs, a sample of a small dataset comes equally often at each place.

    Also with a narrow window.
    """
    places = np.zeros((8, 8))
    for epoch in range(4000):
        places[
            np.arange(8),
            epoch_order([2] * 4, Geometry(2, lanes_per_rank=2), Rules(1, 2), epoch=epoch).ids,
        ] += 1
    chi_square = ((places - 500) ** 2 / 500).sum()
    assert chi_square < 95  # 49 degrees of freedom: mean 49, one in ten thousand above 95


def test_the_order_never_changes():
    """A new version of pcrshard or NumPy does not silently reorder a running job."""
    sizes = [5, 3, 0, 6, 4]
    order = epoch_order(
        sizes,
        Geometry(4, max_world_size=2, lanes_per_rank=2),
        Rules(42, shuffle_shards=2, last="short"),
        epoch=1,
    )
    assert order.ids.tolist() == GOLDEN_ORDER
    rest = epoch_order(
        sizes,
        Geometry(6, max_world_size=1),
        Rules(42, shuffle_shards=2, last="pad"),
        epoch=1,
        history=[(4, 2, 2, 2)],
    )
    assert rest.ids.tolist() == GOLDEN_REST
    assert mixture([sizes, [2, 3]], [2, 1], 12, Rules(42), epoch=3).tolist() == GOLDEN_MIXTURE


def test_an_epoch_does_not_depend_on_the_process():
    """Another process with another hash seed plans the same epoch, so ranks agree without
    talking.
    """
    code = (
        "from pcrshard.training.epoch_order import *\n"
        "print(epoch_order([9] * 9, Geometry(6, 3), Rules(8), epoch=2).ids.tolist())"
    )
    text = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(text) == epoch_order([9] * 9, Geometry(6, 3), Rules(8), epoch=2).ids.tolist()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 2000), min_size=1, max_size=40).filter(sum),
    st.integers(1, 64),
    st.integers(0, 2**64 - 1),
    st.integers(0, 500),
)
def test_shards_of_very_different_sizes_work(sizes, batch, seed, window):
    """Empty shards, single samples and giants mix without loss."""
    order = epoch_order(sizes, Geometry(batch), Rules(seed, window, "short"))
    assert np.array_equal(np.sort(order.ids), np.arange(sum(sizes)))


def test_a_shard_may_be_smaller_than_its_share_of_ranks():
    """Fewer shards than lanes: every rank still gets its batches."""
    order = epoch_order([5000], Geometry(64, max_world_size=64), Rules(last="pad"))
    assert len(worker_batches(order, 64, 63, 4, 3)) == order.steps // 4
    assert set(order.ids.tolist()) == set(range(5000))


WRONG = {
    "global_batch to be a whole number": lambda: Geometry(0),
    "global_batch to be a multiple of max_world_size, got 7 and 2": lambda: Geometry(7, 2),
    "lanes_per_rank to be a whole number of at least 1, got 0": lambda: Geometry(4, 2, 0),
    "seed to be a whole number": lambda: Rules(-1),
    "seed to be below": lambda: Rules(1 << 64),
    "shuffle_shards to be": lambda: Rules(shuffle_shards=-1),
    "last to be 'drop' or 'pad' or 'short', got 'wrap'": lambda: Rules(last="wrap"),
    "one global batch of 8 samples, got 7": lambda: epoch_order([7], Geometry(8)),
    "at most 2 steps of": lambda: epoch_order([8], Geometry(4), history=[(4, 1, 4, 3)]),
    "at most 4 steps of": lambda: epoch_order([8], Geometry(4), history=[(2, 1, 4, 5)]),
    "world to divide global_batch=4, got 3": lambda: worker_batches(
        epoch_order([8], Geometry(4)), 3
    ),
    "as many weights as datasets, got 2 and 1": lambda: mixture([[4]], [1, 2], 3),
    "weights of at least 0": lambda: mixture([[4], [4]], [1, -1], 3),
    "samples in dataset 1, got none": lambda: mixture([[4], [0]], [1, 1], 4),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    """A wrong argument is an error at once, which says what was expected and what came."""
    with pytest.raises(ValueError, match=f"expected .*{message}"):
        WRONG[message]()


def test_a_finished_epoch_has_nothing_left():
    """Resuming at the very end gives no steps, in the same and in another geometry."""
    for geometry in (Geometry(4), Geometry(8, 2)):
        assert epoch_order([8], geometry, history=[(4, 1, 4, 2)]).steps == 0
