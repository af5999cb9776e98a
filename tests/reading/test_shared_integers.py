"""Integers shared by a process and its workers."""

import copy
import pickle

import pytest

from pcrshard.reading.shared_integers import SharedIntegers


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda numbers: pickle.loads(pickle.dumps(numbers))]
)
def test_another_copy_has_its_own(duplicate):
    """A copied or pickled object keeps the values of that moment, and neither follows the other."""
    numbers = SharedIntegers([5, 6])
    other = duplicate(numbers)
    numbers[0] = 1
    other[1] = 2
    assert (numbers[:], other[:]) == ([1, 6], [5, 2])
