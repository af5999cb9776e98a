"""Which samples an epoch consists of: mixtures with exact shares, and random numbers that stay."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcrshard.training.epoch_order import Geometry, epoch_order
from pcrshard.training.epoch_sequence import ROWS, SHARDS, Rules, mixture, random_words, run_begins

SEED = 20240607


def test_a_mixture_has_exact_shares_and_each_pass_has_every_sample_once():
    """Over any epochs, a dataset's samples come in whole passes, its share of each epoch is exact,
    and epochs join without a seam.
    """
    for number in range(100):
        rng = np.random.default_rng([SEED, 4, number])
        sizes = [
            rng.integers(1, 12, rng.integers(1, 6)).tolist() for _ in range(rng.integers(1, 5))
        ]
        weights, samples, rules = (
            rng.random(len(sizes)) + 0.01,
            int(rng.integers(1, 90)),
            Rules(number),
        )
        bases = np.cumsum([0, *map(sum, sizes)])
        taken = collections.Counter()
        for epoch in range(4):
            ids = mixture(sizes, weights.tolist(), samples, rules, epoch=epoch)
            taken.update(ids.tolist())
            counts = np.histogram(ids, bases)[0]
            assert counts.sum() == samples, number
            assert (np.abs(counts - weights / weights.sum() * samples) < 1).all(), number
            for base, end in itertools.pairwise(bases):
                times = [taken[i] for i in range(base, end)]
                assert max(times) - min(times) <= 1, number


def test_a_mixture_of_one_dataset_is_that_dataset():
    """A mixture adds nothing of its own: with one dataset and its size as the epoch, the order is
    the plain one.
    """
    sizes = [9, 4, 0, 12]
    for epoch in range(3):
        sequence = mixture([sizes], [1], 25, Rules(3), epoch=epoch)
        mixed = epoch_order(sizes, Geometry(5), Rules(3), epoch=epoch, sequence=sequence)
        assert np.array_equal(mixed.ids, epoch_order(sizes, Geometry(5), Rules(3), epoch=epoch).ids)


def test_a_mixture_is_laid_out_and_resumed_like_a_dataset():
    """Ranks share a mixture out, with its repeats.

    And another geometry gets exactly the samples that are left.
    """
    sizes, samples = [[30] * 6, [8] * 3], 200
    sequence = mixture(sizes, [1, 1], samples, Rules(7), epoch=2)
    together, rules = sizes[0] + sizes[1], Rules(7, last="short")
    whole = epoch_order(together, Geometry(8, 4), rules, epoch=2, sequence=sequence)
    assert sorted(whole.ids.tolist()) == sorted(sequence.tolist())
    rest = epoch_order(
        together, Geometry(9, 3), rules, epoch=2, sequence=sequence, history=[(8, 4, 4, 11)]
    )
    assert sorted([*whole.ids[:88].tolist(), *rest.ids.tolist()]) == sorted(sequence.tolist())
    tenths = (whole.ids[:200].reshape(10, -1) >= 180).mean(1)
    assert abs(tenths.mean() - 0.5) < 1e-9
    assert (np.abs(tenths - 0.5) < 0.4).all()


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 2**64 - 1))
def test_a_stretch_of_random_words_is_the_same_wherever_it_begins(start, count, seed):
    """A resumed pass draws what the uninterrupted one drew: words are found by their position."""
    whole = random_words(start + count, Rules(seed), ROWS, (2, 7))
    assert np.array_equal(random_words(count, Rules(seed), ROWS, (2, 7), start), whole[start:])


def test_purposes_and_keys_never_share_random_words():
    """Shards, rows, datasets and epochs are shuffled independently of each other."""
    drawn = [
        random_words(64, Rules(seed), purpose, key).tolist()
        for seed in (0, 1)
        for purpose in (SHARDS, ROWS)
        for key in ((0, 0), (0, 1), (1, 0))
    ]
    assert len(set().union(*drawn)) == 64 * len(drawn)


@pytest.mark.parametrize("values", [[], [4], [1, 1, 2, 2, 2, 1], [3, 2, 1]])
def test_runs_begin_where_the_value_changes(values):
    """A run of one shard is found as itertools finds it."""
    expected = [
        first
        for _, run in itertools.groupby(values)
        for first in (True, *[False] * (len(list(run)) - 1))
    ]
    assert run_begins(np.array(values)).tolist() == expected
