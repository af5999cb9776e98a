"""Integers shared by a process and its workers."""

import copy
import multiprocessing
import pickle

import pytest

from pcrshard.reading.shared_integers import SharedIntegers


def _double(numbers):
    numbers[:] = [2 * number for number in numbers[:]]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_has_the_same_memory(method):
    """What a worker of any start method writes, the process that started it sees."""
    numbers = SharedIntegers([1, -2, (1 << 63) - 1])
    numbers[2] = 3
    process = multiprocessing.get_context(method).Process(target=_double, args=(numbers,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert numbers[:] == [2, -4, 6]


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
