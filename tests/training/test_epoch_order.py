"""The order of an epoch: partitions, resumes, windows, mixtures, and when shards are needed."""

import collections
import dataclasses
import itertools
import math

import numpy as np
import pytest

from pcrshard.training.epoch_order import (
    Geometry,
    Rules,
    advance,
    epoch_order,
    mixture,
    rank_batches,
    schedule,
)

SEED = 20240607
GOLDEN_ORDER = [6, 7, 17, 15, 14, 0, 9, 10, 2, 5, 12, 16, 1, 4, 11, 13, 3, 8]
GOLDEN_REST = [3, 16, 1, 0, 2, 4, 2, 13, 3, 11, 12, 8]
GOLDEN_MIXTURE = [21, 0, 4, 14, 15, 16, 17, 19, 18, 19, 8, 12]


@dataclasses.dataclass
class Job:
    """A random job."""

    sizes: list[int]
    geometry: Geometry
    rules: Rules
    epoch: int
    world: int

    @classmethod
    def draw(cls, rng):
        world, slots = (int(n) for n in rng.integers(1, 7, 2))
        if rng.random() < 0.5:
            slots = world
        batch = math.lcm(world, slots) * int(rng.integers(1, 5))
        geometry = Geometry(batch, slots, int(rng.integers(1, 6)))
        sizes = rng.integers(0, 31, rng.integers(1, 13)).tolist()
        sizes[0] += max(batch - sum(sizes) + 1, 0)
        last = rng.choice(["drop", "pad", "short"]).item()
        rules = Rules(int(rng.integers(2**63)), int(rng.integers(0, 8)), last)
        return cls(sizes, geometry, rules, int(rng.integers(0, 1000)), world)

    def order(self, geometry=None, history=()):
        chosen = geometry or self.geometry
        return epoch_order(self.sizes, chosen, self.rules, epoch=self.epoch, history=history)


def jobs(count):
    """Random jobs, each with a generator; a failure shows its seed."""
    for number in range(count):
        print(f"{SEED = }, {number = }")
        rng = np.random.default_rng([SEED, number])
        yield Job.draw(rng), rng


def shards_of(ids, sizes):
    return np.repeat(np.arange(len(sizes)), sizes)[ids]


def joined(order, world):
    """The ranks' batches, step after step."""
    ranks = [rank_batches(order, rank, world) for rank in range(world)]
    steps = itertools.zip_longest(*ranks, fillvalue=np.zeros(0, np.int64))
    return np.concatenate([batch for step in steps for batch in step])


def test_ranks_share_out_the_epoch_exactly():
    """For any world, the ranks together get the planned order, and each sample as often as the rule
    for the last batch says.
    """
    for job, _ in jobs(200):
        order = job.order()
        assert np.array_equal(joined(order, job.world), order.ids)
        size = job.geometry.global_batch
        total = sum(job.sizes)
        times = np.bincount(order.ids, minlength=total)
        ranks = [rank_batches(order, rank, job.world) for rank in range(job.world)]
        if job.rules.last == "short":
            assert (times == 1).all()
            ends = [sum(map(len, batches)) for batches in ranks]
            assert max(ends) - min(ends) <= 1
            continue
        lengths = {len(batch) for batches in ranks for batch in batches}
        assert lengths == {size // job.world}
        assert {len(batches) for batches in ranks} == {order.steps}
        assert times.max() - times.min() <= 1
        is_drop = job.rules.last == "drop"
        assert order.steps == (total // size if is_drop else -(-total // size))


def test_another_geometry_delivers_exactly_what_is_left():
    """Resumed twice with other ranks, batches or lanes, no sample is lost or repeated, except by
    the rule for the last batch.
    """
    for job, rng in jobs(200):
        history, seen, most = [], [], job.geometry.global_batch
        for geometry in (job.geometry, *(Job.draw(rng).geometry for _ in range(2))):
            order = job.order(geometry, history)
            steps = int(rng.integers(0, order.steps + 1))
            seen.append(order.ids[: steps * geometry.global_batch])
            history = advance(history, geometry, steps)
            most = max(most, geometry.global_batch)
        rest = order.ids[steps * geometry.global_batch :]
        times = np.bincount(np.concatenate([*seen, rest]), minlength=sum(job.sizes))
        if job.rules.last == "short":
            assert (times == 1).all()
        elif job.rules.last == "drop":
            assert times.max() <= 1
            assert (times == 0).sum() < geometry.global_batch
        else:
            assert times.min() >= 1
            assert (times - 1).sum() < most


def test_a_window_keeps_few_shards_open():
    """At no sample does a lane have more than ``shuffle_shards`` shards open, whatever their
    sizes.
    """
    for job, _ in jobs(100):
        _, slots, turns = dataclasses.astuple(job.geometry)
        rules = dataclasses.replace(job.rules, last="drop")
        order = epoch_order(job.sizes, job.geometry, rules, epoch=job.epoch)
        grid = order.ids.reshape(order.steps, slots, -1)
        for turn, slot in itertools.product(range(turns), range(slots)):
            lane = grid[turn::turns, slot].reshape(-1, 1)
            assert schedule(list(lane), job.sizes).peak() <= max(1, rules.shuffle_shards)


def test_the_first_and_last_batches_are_mixed_too():
    """An epoch begins and ends with half a window of shards, not with one."""
    sizes = [1000] * 32
    order = epoch_order(sizes, Geometry(100, lanes_per_rank=1), Rules(0, shuffle_shards=8))
    opened = [len(set(shards_of(ids, sizes))) for ids in rank_batches(order)]
    assert min(opened) >= 4
    assert max(opened) <= 9


def test_no_shuffle_is_the_order_of_the_dataset():
    """For evaluation, one lane without shuffling gives 0, 1, 2 and so on, each exactly once."""
    sizes, rules = [5, 0, 7, 1], Rules(shuffle_shards=0, last="short")
    order = epoch_order(sizes, Geometry(4, lanes_per_rank=1), rules)
    assert order.ids.tolist() == list(range(13))
    assert rank_batches(order)[3].tolist() == [12]


def test_every_place_in_an_epoch_is_equally_likely():
    """Over many epochs, a sample of a small dataset appears equally often at each position."""
    places = np.zeros((8, 8))
    for epoch in range(1600):
        order = epoch_order([2] * 4, Geometry(2, lanes_per_rank=2), Rules(1, 2), epoch=epoch)
        places[np.arange(8), order.ids] += 1
    chi_square = ((places - 200) ** 2 / 200).sum()
    assert chi_square < 95  # 49 degrees of freedom: mean 49, one in ten thousand above 95


def test_the_order_never_changes():
    """A new version of pcrshard or NumPy does not silently reorder a running job; all processes
    plan the same epoch.
    """
    sizes = [5, 3, 0, 6, 4]
    short, pad = (Rules(42, shuffle_shards=2, last=last) for last in ("short", "pad"))
    order = epoch_order(sizes, Geometry(4, max_world_size=2, lanes_per_rank=2), short, epoch=1)
    assert order.ids.tolist() == GOLDEN_ORDER
    rest = epoch_order(sizes, Geometry(6), pad, epoch=1, history=[(4, 2, 2, 2)])
    assert rest.ids.tolist() == GOLDEN_REST
    assert mixture([sizes, [2, 3]], [2, 1], 12, Rules(42), epoch=3).tolist() == GOLDEN_MIXTURE


WRONG = {
    "one global batch of 8 samples, got 7": lambda: epoch_order([7], Geometry(8)),
    "at most 4 steps of": lambda: epoch_order([8], Geometry(4), history=[(2, 1, 4, 5)]),
    "at most 2 steps of": lambda: epoch_order([8], Geometry(4), history=[(4, 1, 4, 3)]),
    "last to be 'drop' or 'pad' or 'short', got 'wrap'": lambda: Rules(last="wrap"),
    "seed to be below": lambda: Rules(1 << 64),
    "multiple of max_world_size, got 4 and 3": lambda: rank_batches(
        epoch_order([8], Geometry(4)), 0, 3
    ),
    "samples in dataset 1, got none": lambda: mixture([[4], [0]], [1, 1], 4, epoch=0),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    """A wrong argument raises an error at once, with the expected and the actual value."""
    with pytest.raises(ValueError, match=f"expected .*{message}"):
        WRONG[message]()


# Mixtures


def test_a_mixture_has_exact_shares_and_each_pass_has_every_sample_once():
    """Over any epochs, a dataset's samples come in whole passes, its share of each epoch is exact,
    or rounded by the largest remainders, and each epoch continues where the one before it stopped.
    """
    for number in range(50):
        rng = np.random.default_rng([SEED, 4, number])
        sizes = [
            rng.integers(1, 12, rng.integers(1, 6)).tolist() for _ in range(rng.integers(1, 5))
        ]
        weights = rng.random(len(sizes)) + 0.01
        samples = int(rng.integers(1, 90))
        bases = np.cumsum([0, *map(sum, sizes)])
        taken = np.zeros(bases[-1], int)
        for epoch in range(4):
            ids = mixture(sizes, weights.tolist(), samples, Rules(number), epoch=epoch)
            np.add.at(taken, ids, 1)
            counts = np.histogram(ids, bases)[0]
            assert counts.sum() == samples
            exact = weights / weights.sum() * samples
            assert (np.abs(counts - exact) < 1).all()
            is_up = counts > exact
            assert (exact % 1)[is_up].min(initial=1) >= (exact % 1)[~is_up].max(initial=0)
            for own in np.split(taken, bases[1:-1]):
                assert np.ptp(own) <= 1


# When shards are needed


@pytest.mark.parametrize(("keep", "shards", "peak"), [(2, [0, 1], 6), (1, [0, 1, 0], 5)])
def test_a_shard_that_goes_unused_is_released(keep, shards, peak):
    """A shard stays in memory if it goes unused for at most ``keep`` batches; the peak counts bytes
    if it is given them.
    """
    plan = schedule([np.array([shard]) for shard in (0, 1, 1, 0)], [1, 1], keep)
    assert plan.shards.tolist() == shards
    assert plan.peak([5, 1]) == peak


@pytest.mark.parametrize(("workers", "most"), [(1, 1), (2, 3), (4, 7), (3, 80)])
def test_workers_that_divide_the_lanes_share_only_split_shards(workers, most):
    """Workers whose number divides the lanes read a shard twice only if it is split; three workers
    of two ranks over four lanes each read them all.
    """
    sizes, readers = [64] * 40, collections.Counter()
    order = epoch_order(sizes, Geometry(8, max_world_size=2), Rules(1))
    for rank, worker in itertools.product(range(2), range(workers)):
        batches = rank_batches(order, rank, 2)[worker::workers]
        readers.update(set(schedule(batches, sizes).shards.tolist()))
    assert set(readers) == set(range(40))
    repeated = readers.total() - 40
    assert repeated <= most if workers != 3 else repeated >= most
