"""The order of an epoch: partitions, resumes, windows, mixtures, and when shards are needed."""

import collections
import dataclasses
import itertools
import math
import time
import tracemalloc

import epoch_oracle
import numpy as np
import pytest

from pcrshard.simulation.reads import WorkerReads
from pcrshard.training.mixture import mixture
from pcrshard.training.order import EpochOrder, Geometry, advance
from pcrshard.training.sequence import Rules

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
        return EpochOrder(self.sizes, chosen, self.rules, epoch=self.epoch, history=history)


def jobs(count):
    """Random jobs, each with a generator; a failure shows its seed."""
    for number in range(count):
        print(f"{SEED = }, {number = }")
        rng = np.random.default_rng([SEED, number])
        yield Job.draw(rng), rng


def reads(batches, sizes):
    """The requests of a worker with these batches."""
    return WorkerReads.of_batches(batches, sizes).requests


def shards_of(ids, sizes):
    return np.repeat(np.arange(len(sizes)), sizes)[ids]


def rows(order):
    """The ids of each step."""
    return list(order.batches())


def flat_ids(order):
    return np.concatenate([*rows(order), np.zeros(0, np.int64)])


def joined(order, world):
    """The ranks' batches, step after step."""
    ranks = [list(order.batches(rank, world)) for rank in range(world)]
    steps = itertools.zip_longest(*ranks, fillvalue=np.zeros(0, np.int64))
    return np.concatenate([batch for step in steps for batch in step])


def oracle(sizes, geometry, rules, sequence=None, **how):
    """The order as arrays."""
    rules = epoch_oracle.Rules(**dataclasses.asdict(rules))
    geometry = epoch_oracle.Geometry(**dataclasses.asdict(geometry))
    return epoch_oracle.epoch_order(sizes, geometry, rules, sequence=sequence, **how)


@pytest.mark.parametrize("count", [100, pytest.param(400, marks=pytest.mark.long)])
def test_the_order_equals_the_one_laid_out_in_arrays(count):
    """Any rank and worker of any job, resumed in the middle, any number of times with other
    geometries, and of any mixture, gets exactly the batches of the order laid out in memory.
    """
    compared = 0
    for job, rng in jobs(count):
        sizes, sequence, samples = job.sizes, None, None
        if rng.random() < 0.4:
            of = [sizes, *(rng.integers(0, 20, rng.integers(1, 6)).tolist() for _ in range(2))]
            weights = (rng.random(3) * [1, *(sum(each) > 0 for each in of[1:])]).tolist()
            how = {"samples": int(rng.integers(job.geometry.global_batch, 400))}
            rules = epoch_oracle.Rules(**dataclasses.asdict(job.rules))
            sequence = epoch_oracle.mixture(of, weights, **how, rules=rules, epoch=job.epoch)
            samples = mixture(of, weights, **how, rules=job.rules, epoch=job.epoch)
            assert np.array_equal(samples.ids(np.arange(len(samples))), sequence)
            sizes = list(itertools.chain(*of))
        history, geometry = [], job.geometry
        for _ in range(int(rng.integers(1, 5))):
            how = {"epoch": job.epoch, "history": history}
            expected = oracle(sizes, geometry, job.rules, sequence, **how)
            order = EpochOrder(sizes, geometry, job.rules, samples=samples, **how)
            assert order.steps == expected.steps
            batch = geometry.global_batch
            world = int(rng.choice([n for n in range(1, batch + 1) if batch % n == 0]))
            rank, workers = int(rng.integers(world)), int(rng.integers(1, 4))
            batches = epoch_oracle.rank_batches(expected, rank, world)
            assert order.num_batches(rank, world) == len(batches)
            for worker in range(workers):
                own = list(order.batches(rank, world, worker=worker, workers=workers))
                assert list(map(list, own)) == list(map(list, batches[worker::workers]))
            compared += 1
            history = advance(history, geometry, int(rng.integers(order.steps + 1)))
            geometry = Job.draw(rng).geometry
    assert compared > 2 * count


def test_ranks_share_out_the_epoch_exactly():
    """For any world, the ranks together get the planned order, and each sample as often as the rule
    for the last batch says; all have the same number of batches, if there are as many samples.
    """
    for job, _ in jobs(200):
        order = job.order()
        ids = flat_ids(order)
        assert np.array_equal(joined(order, job.world), ids)
        size, slots = job.geometry.global_batch, job.geometry.max_world_size
        total = sum(job.sizes)
        times = np.bincount(ids, minlength=total)
        ranks = [list(order.batches(rank, job.world)) for rank in range(job.world)]
        counts = {len(batches) for batches in ranks}
        assert counts == {order.num_batches(rank, job.world) for rank in range(job.world)}
        lengths = {len(batch) for batches in ranks for batch in batches}
        if job.rules.last == "short":
            assert (times == 1).all()
            if job.world <= max(slots, total % size or size):
                assert counts == {order.steps}
            assert max(lengths) <= size // job.world + (size < 2 * slots)
            short = [len(row) for row in rows(order) if len(row) < size]
            assert len(short) <= 2
            continue
        assert lengths == {size // job.world}
        assert counts == {order.steps}
        assert times.max() - times.min() <= 1
        is_drop = job.rules.last == "drop"
        assert order.steps == (total // size if is_drop else -(-total // size))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("batch", range(1, 6))
def test_validation_has_equal_steps(world, batch):
    """With the last samples kept, 2 and 3 ranks have the same number of batches for any number of
    samples, each once, and only the last two are smaller; with batches of one, the last is larger.
    """
    for samples in range(world, 41):
        rules = Rules(shuffle_shards=0, last="short")
        order = EpochOrder([samples], Geometry(batch * world, world, 1), rules)
        ranks = [list(order.batches(rank, world)) for rank in range(world)]
        assert {len(batches) for batches in ranks} == {order.steps}
        full, rest = divmod(samples, batch * world)
        assert order.steps == full + (rest > 0) - (batch == 1 and rest > 0)
        assert sorted(np.concatenate([*itertools.chain(*ranks)])) == list(range(samples))
        sizes = [len(ids) for batches in ranks for ids in batches[:-2]]
        assert set(sizes) <= {batch}


def test_another_geometry_delivers_exactly_what_is_left():
    """Resumed twice with other ranks, batches or lanes, no sample is lost or repeated, except by
    the rule for the last batch.
    """
    for job, rng in jobs(200):
        history, seen, most = [], [], job.geometry.global_batch
        for geometry in (job.geometry, *(Job.draw(rng).geometry for _ in range(2))):
            order = job.order(geometry, history)
            steps = int(rng.integers(0, order.steps + 1))
            seen += rows(order)[:steps]
            history = advance(history, geometry, steps)
            most = max(most, geometry.global_batch)
        rest = rows(order)[steps:]
        times = np.bincount(np.concatenate([*seen, *rest]), minlength=sum(job.sizes))
        if job.rules.last == "short":
            # Repeated only if fewer samples than slots were left, so that each slot has one.
            assert times.min() == 1
            assert times.sum() - len(times) < 2 * 6  # twice, of at most six slots
            world = geometry.max_world_size
            counts = {len(list(order.batches(rank, world))) for rank in range(world)}
            assert counts == {order.steps}
        elif job.rules.last == "drop":
            assert times.max() <= 1
            assert (times == 0).sum() < geometry.global_batch
        else:
            assert times.min() >= 1
            assert (times - 1).sum() < most


def test_a_billion_samples_need_no_array():
    """The first batch of an epoch, of its middle, and after a change of the geometry comes at once
    and takes little memory, however many samples there are.
    """
    sizes = np.full(100_000, 10_000)
    geometry, rules = Geometry(2048, 8), Rules(1)
    tracemalloc.start()
    begun = time.process_time()
    steps = EpochOrder(sizes, geometry, rules).steps
    for history in ([], [(2048, 8, 4, steps // 2)], [(512, 4, 4, steps)]):
        order = EpochOrder(sizes, geometry, rules, epoch=3, history=history)
        assert len(next(order.batches(5, 8))) == 256
        assert order.num_batches(5, 8) == order.steps
    spent, (_, peak) = time.process_time() - begun, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert spent < 3  # about 0.5 without tracing
    assert peak < 100e6


def test_a_window_keeps_few_shards_open():
    """At no sample does a lane have more than ``shuffle_shards`` shards open, whatever their
    sizes.
    """
    for job, _ in jobs(100):
        _, slots, turns = dataclasses.astuple(job.geometry)
        rules = dataclasses.replace(job.rules, last="drop")
        order = EpochOrder(job.sizes, job.geometry, rules, epoch=job.epoch)
        grid = flat_ids(order).reshape(order.steps, slots, -1)
        for turn, slot in itertools.product(range(turns), range(slots)):
            lane = grid[turn::turns, slot].reshape(-1, 1)
            assert reads(lane, job.sizes).peak() <= max(1, rules.shuffle_shards)


def test_the_first_and_last_batches_are_mixed_too():
    """An epoch begins and ends with half a window of shards, not with one."""
    sizes = [1000] * 32
    order = EpochOrder(sizes, Geometry(100, lanes_per_rank=1), Rules(0, shuffle_shards=8))
    opened = [len(set(shards_of(ids, sizes))) for ids in rows(order)]
    assert min(opened) >= 4
    assert max(opened) <= 9


def test_no_shuffle_is_the_order_of_the_dataset():
    """For evaluation, one lane without shuffling gives 0, 1, 2 and so on, each exactly once."""
    sizes, rules = [5, 0, 7, 1], Rules(shuffle_shards=0, last="short")
    order = EpochOrder(sizes, Geometry(4, lanes_per_rank=1), rules)
    assert flat_ids(order).tolist() == list(range(13))
    assert rows(order)[3].tolist() == [12]


def test_every_place_in_an_epoch_is_equally_likely():
    """Over many epochs, a sample of a small dataset appears equally often at each position."""
    places = np.zeros((8, 8))
    for epoch in range(1600):
        order = EpochOrder([2] * 4, Geometry(2, lanes_per_rank=2), Rules(1, 2), epoch=epoch)
        places[np.arange(8), flat_ids(order)] += 1
    chi_square = ((places - 200) ** 2 / 200).sum()
    assert chi_square < 95  # 49 degrees of freedom: mean 49, one in ten thousand above 95


def test_the_order_never_changes():
    """A new version of pcrshard or NumPy does not silently reorder a running job; all processes
    plan the same epoch.
    """
    sizes = [5, 3, 0, 6, 4]
    short, pad = (Rules(42, shuffle_shards=2, last=last) for last in ("short", "pad"))
    order = EpochOrder(sizes, Geometry(4, max_world_size=2, lanes_per_rank=2), short, epoch=1)
    assert flat_ids(order).tolist() == GOLDEN_ORDER
    rest = EpochOrder(sizes, Geometry(6), pad, epoch=1, history=[(4, 2, 2, 2)])
    assert flat_ids(rest).tolist() == GOLDEN_REST
    drawn = mixture([sizes, [2, 3]], [2, 1], 12, Rules(42), epoch=3)
    assert drawn.ids(np.arange(12)).tolist() == GOLDEN_MIXTURE


WRONG = {
    "one global batch of 8 samples, got 7": lambda: EpochOrder([7], Geometry(8)),
    "at most 4 steps of": lambda: EpochOrder([8], Geometry(4), history=[(2, 1, 4, 5)]),
    "at most 2 steps of": lambda: EpochOrder([8], Geometry(4), history=[(4, 1, 4, 3)]),
    "last to be 'drop' or 'pad' or 'short', got 'wrap'": lambda: Rules(last="wrap"),
    "seed to be below": lambda: Rules(1 << 64),
    "multiple of max_world_size, got 4 and 3": lambda: next(
        EpochOrder([8], Geometry(4)).batches(0, 3)
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
            drawn = mixture(sizes, weights.tolist(), samples, Rules(number), epoch=epoch)
            ids = drawn.ids(np.arange(samples))
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
    batches = [np.array([shard]) for shard in (0, 1, 1, 0)]
    plan = WorkerReads.of_batches(batches, [1, 1], keep).requests
    assert plan.shards.tolist() == shards
    assert plan.peak([5, 1]) == peak


@pytest.mark.parametrize(("workers", "most"), [(1, 1), (2, 3), (4, 7), (3, 80)])
def test_workers_that_divide_the_lanes_share_only_split_shards(workers, most):
    """Workers whose number divides the lanes read a shard twice only if it is split; three workers
    of two ranks over four lanes each read them all.
    """
    sizes, readers = [64] * 40, collections.Counter()
    order = EpochOrder(sizes, Geometry(8, max_world_size=2), Rules(1))
    for rank, worker in itertools.product(range(2), range(workers)):
        batches = order.batches(rank, 2, worker=worker, workers=workers)
        readers.update(set(reads(batches, sizes).shards.tolist()))
    assert set(readers) == set(range(40))
    repeated = readers.total() - 40
    assert repeated <= most if workers != 3 else repeated >= most
