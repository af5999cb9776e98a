"""Batches in memory that a process shares with its workers: only their places are sent.

torch would take new shared memory for each batch, all of whose pages the system clears, and would
send a descriptor for each of its tensors.
"""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..memory import when_gone
from ..reading.shared_integers import SharedIntegers

# A tensor of so few bytes costs less in the message than in shared memory.
_SMALL_BYTES = 1 << 16
_numbers = itertools.count()
# The rings that this process made, or fills: torch's queue, which pickles batches and unpickles
# them, knows of none.
_rings: weakref.WeakValueDictionary[int, SharedRing] = weakref.WeakValueDictionary()


class SharedRing:
    """Slots of memory that workers fill and their parent uses, each until nothing refers to it.

    The memory is a file without a name, so that it ends with the processes, however they end, and
    takes nothing of ``/dev/shm``.

    Args:
        slot_bytes: Size of a slot.
        slots: How many each worker has; who finds all in use takes other memory.
        workers: How many there are.

    Raises:
        OSError: A limit forbids so much.
    """

    def __init__(
        self,
        slot_bytes: int,
        slots: int,
        workers: int = 1,
    ) -> None:
        sent = SharedIntegers([0] * slots * workers)
        self._number = next(_numbers)
        self._attach(_open_file(), max(slot_bytes, 1), slots, sent)

    def _attach(
        self,
        descriptor: int,
        slot_bytes: int,
        slots: int,
        sent: SharedIntegers,
    ) -> None:
        self._descriptor = descriptor
        when_gone(self, os.close, descriptor)
        size = slot_bytes * len(sent[:])
        os.ftruncate(descriptor, size)
        self._memory = mmap.mmap(descriptor, size)
        self._address = np.frombuffer(self._memory, np.uint8).ctypes.data
        self.slot_bytes = slot_bytes
        self.slots = slots
        # 1 for a slot from when a worker sends it until the parent gives it back.
        self._sent = sent
        # Slots that this worker's own tensors are in.
        self._filled: set[int] = set()
        # What the parent has of the slots that were sent.
        self._opened: weakref.WeakValueDictionary[int, NDArray[np.uint8]] = (
            weakref.WeakValueDictionary()
        )
        self._process = os.getpid()
        _rings[self._number] = self

    def __reduce__(self) -> tuple[Callable[..., SharedRing], tuple[Any, ...]]:
        # Only a child that is being started can be given the memory.
        descriptor = reduction.DupFd(self._descriptor)
        return _attached, (self._number, descriptor, self.slot_bytes, self.slots, self._sent)

    def take(self, count: int, worker: int = 0) -> torch.Tensor | None:
        """A slot for this many bytes, as uint8, for a worker; ``None`` if there is none.

        It is free again when neither the worker nor, if it is sent, the parent has anything of it.
        """
        own = range(worker * self.slots, (worker + 1) * self.slots)
        free = list(filter(self._is_free, own))
        if not free or count > self.slot_bytes:
            return None
        array = self._array(free[0], count)
        self._filled.add(free[0])
        when_gone(array, self._filled.discard, free[0])
        return torch.from_numpy(array)

    def _is_free(self, slot: int) -> bool:
        return slot not in self._filled and not self._sent[slot]

    def place(self, tensor: torch.Tensor, sending: set[tuple[int, int]]) -> _Placed | None:
        """What to send for a tensor in a slot; ``None`` for others.

        Args:
            tensor: Any.
            sending: Ring and slot of what is in the same message, to which its own are added. A
                slot that the parent knows from an earlier message may be free before this one
                comes.
        """
        slot, start = divmod(tensor.data_ptr() - self._address, self.slot_bytes)
        if slot not in self._filled or tensor.dtype != torch.uint8:
            return None
        if (self._number, slot) not in sending:
            if self._sent[slot]:
                return None
            self._sent[slot] = 1
            sending.add((self._number, slot))
        return _Placed(self._number, slot, start, tuple(tensor.shape), tensor.stride())

    def open(self, placed: _Placed) -> torch.Tensor:
        """What a worker has sent; its slot is free again when nothing refers to it any more."""
        array = self._opened.get(placed.slot)
        if array is None:
            array = self._array(placed.slot, self.slot_bytes)
            when_gone(array, self._give_back, placed.slot)
            self._opened[placed.slot] = array
        return torch.from_numpy(array).as_strided(placed.shape, placed.strides, placed.start)

    def _array(self, slot: int, count: int) -> NDArray[np.uint8]:
        return np.ndarray((count,), np.uint8, self._memory, slot * self.slot_bytes)

    def _give_back(self, slot: int) -> None:
        # A forked child drops what its parent may still use.
        if os.getpid() == self._process:
            self._sent[slot] = 0


def _attached(
    number: int,
    descriptor: Any,
    slot_bytes: int,
    slots: int,
    sent: SharedIntegers,
) -> SharedRing:
    ring = SharedRing.__new__(SharedRing)
    ring._number = number
    ring._attach(descriptor.detach(), slot_bytes, slots, sent)
    return ring


def _open_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("pcrshard-batches")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class _Placed(NamedTuple):
    """Where a tensor of uint8 is; the parent gets the tensor."""

    ring: int
    slot: int
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        return _open, tuple(self)


def _open(*place: Any) -> torch.Tensor:
    placed = _Placed(*place)
    return _rings[placed.ring].open(placed)


class _Small(NamedTuple):
    """A tensor as its bytes; the parent gets the tensor."""

    data: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        return _tensor, tuple(self)


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def for_parent(batch: Any) -> Any:
    """A worker's batch as it is to be sent; the parent gets equal tensors.

    Args:
        batch: Tensors, and dicts, tuples and lists of such; anything else is sent as it is.
    """
    return _sent(batch, set())


def _sent(value: Any, sending: set[tuple[int, int]]) -> Any:
    if type(value) is torch.Tensor:
        return _tensor_sent(value, sending)
    if type(value) is dict:
        return {name: _sent(each, sending) for name, each in value.items()}
    return _sequence_sent(value, sending) if isinstance(value, list | tuple) else value


def _sequence_sent(values: Any, sending: set[tuple[int, int]]) -> Any:
    parts = [_sent(each, sending) for each in values]
    if type(values) in (list, tuple):
        return type(values)(parts)
    return type(values)(*parts) if hasattr(values, "_fields") else values


def _tensor_sent(tensor: torch.Tensor, sending: set[tuple[int, int]]) -> Any:
    if not _is_plain(tensor):
        return tensor
    placed = (ring.place(tensor, sending) for ring in list(_rings.values()))
    return next(filter(None, placed), None) or _small(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    is_here = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return is_here and not (tensor.requires_grad or tensor.is_complex() or tensor.is_quantized)


def _small(tensor: torch.Tensor) -> torch.Tensor | _Small:
    """Its bytes, if they are few."""
    if not 0 < tensor.numel() * tensor.element_size() <= _SMALL_BYTES:
        return tensor
    data = tensor.resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return _Small(data, tensor.dtype, tuple(tensor.shape))
