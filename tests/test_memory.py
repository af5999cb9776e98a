"""Memory that is used again, and never while somebody still looks at it."""

import gc

import numpy as np
import pytest
import torch

from pcrshard.memory import BufferPool


@pytest.fixture
def pool():
    """A pool without idle memory."""
    return BufferPool()


def test_an_array_gives_its_memory_back(pool):
    """A batch that is gone leaves its memory to the next."""
    first = pool.borrow_array(1000).ctypes.data
    assert pool.borrow_array(900).ctypes.data == first


@pytest.mark.parametrize(
    "look",
    ["tensor", "view of the tensor", "array of the tensor", "view of the array", "memoryview"],
)
def test_memory_that_is_looked_at_is_not_given_away(pool, look):
    """Any live view of a batch keeps its contents valid."""
    array = pool.borrow_array(64)
    array[:] = 7
    tensor = torch.from_numpy(array)
    held = {
        "tensor": tensor,
        "view of the tensor": tensor.view(8, 8)[3],
        "array of the tensor": tensor.numpy()[4:],
        "view of the array": array[8:],
        "memoryview": memoryview(array)[8:],
    }[look]
    del array, tensor
    gc.collect()
    pool.borrow_array(64)[:] = 9
    assert set(np.asarray(held).ravel().tolist()) == {7}
    del held
    assert pool.num_idle == 2


def test_the_smallest_that_is_large_enough_is_taken(pool):
    """A small request does not take the memory that the next large one needs."""
    sizes = [5000, 100, 70000]
    arrays = [pool.borrow_array(size) for size in sizes]
    places = [array.ctypes.data for array in arrays]
    del arrays
    held = [pool.borrow_array(size) for size in (4000, 99, 60000)]
    assert [array.ctypes.data for array in held] == places


def test_the_pool_is_bounded(pool):
    """However many batches were alive at a time, only a few idle ones are kept."""
    arrays = [pool.borrow_array(10 + i) for i in range(3 * pool.max_idle)]
    del arrays
    assert pool.num_idle == pool.max_idle
    held = pool.borrow_array(1 << 20)
    assert pool.num_idle == pool.max_idle - 1
    assert len(held) == 1 << 20


def test_too_much_is_a_memory_error(pool):
    """An impossible claimed size raises ``MemoryError`` up front."""
    with pytest.raises(MemoryError, match="cannot allocate"):
        pool.borrow_array(1 << 62)
