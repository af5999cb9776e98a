"""Memory that is used again, and never while somebody still looks at it."""

import gc

import numpy as np
import pytest
import torch

from pcrshard import memory


@pytest.fixture(autouse=True)
def empty_pool(monkeypatch):
    """Each test starts without idle memory."""
    monkeypatch.setattr(memory, "_idle", [])


def test_an_array_gives_its_memory_back():
    """A batch that is gone leaves its memory to the next."""
    first = memory.borrow_array(1000).ctypes.data
    assert memory.borrow_array(900).ctypes.data == first


@pytest.mark.parametrize(
    "look",
    ["tensor", "view of the tensor", "array of the tensor", "view of the array", "memoryview"],
)
def test_memory_that_is_looked_at_is_not_given_away(look):
    """Whoever holds any view of a batch keeps what it shows."""
    array = memory.borrow_array(64)
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
    memory.borrow_array(64)[:] = 9
    assert set(np.asarray(held).ravel().tolist()) == {7}
    del held
    assert len(memory._idle) == 2


def test_the_smallest_that_is_large_enough_is_taken():
    """A small request does not take the memory that the next large one needs."""
    sizes = [5000, 100, 70000]
    arrays = [memory.borrow_array(size) for size in sizes]
    places = [array.ctypes.data for array in arrays]
    del arrays
    held = [memory.borrow_array(size) for size in (4000, 99, 60000)]
    assert [array.ctypes.data for array in held] == places


def test_the_pool_is_bounded():
    """However many batches were alive at a time, only a few idle ones are kept."""
    arrays = [memory.borrow_array(10 + i) for i in range(3 * memory._MAX_IDLE)]
    del arrays
    assert len(memory._idle) == memory._MAX_IDLE
    with memory.borrow(1 << 20):
        assert len(memory._idle) == memory._MAX_IDLE - 1


def test_too_much_is_a_memory_error():
    """A claimed size that nobody has is refused by name."""
    with pytest.raises(MemoryError, match="cannot take"):
        memory.borrow_array(1 << 62)
