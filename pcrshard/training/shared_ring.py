"""Batches in memory that a process shares with its child: only their places are sent."""

from __future__ import annotations

import itertools
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..reading.shared_integers import SharedIntegers


@dataclass(frozen=True)
class RingPixels:
    """Pixels in a ring: what is sent in their place."""

    slot: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RingViews:
    """Several views in one slot, one after the other."""

    pixels: RingPixels
    shapes: list[tuple[int, ...]]


class SharedRing:
    """Slots of memory that a child fills and its parent uses, each until nothing refers to it.

    The memory is a file without a name, so that it ends with the processes, however they end, and
    takes nothing of ``/dev/shm``.

    Args:
        slot_bytes: Size of a slot.
        slots: How many; who finds all in use takes other memory.
    """

    def __init__(self, slot_bytes: int, slots: int) -> None:
        size = max(slot_bytes, 1) * slots
        descriptor = _open_file()
        os.ftruncate(descriptor, size)
        self._attach(descriptor, slot_bytes, SharedIntegers([0] * slots))

    def _attach(
        self,
        descriptor: int,
        slot_bytes: int,
        used: SharedIntegers,
    ) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, 0)
        weakref.finalize(self, os.close, descriptor).atexit = False
        self.slot_bytes = slot_bytes
        # 1 for a slot from when the child takes it until the parent gives it back.
        self._used = used

    def __reduce__(self) -> tuple[Callable[..., SharedRing], tuple[Any, ...]]:
        # Only a child that is being started can be given the memory.
        return _attached, (reduction.DupFd(self._descriptor), self.slot_bytes, self._used)

    def take(self, shape: tuple[int, ...]) -> tuple[torch.Tensor, RingPixels] | None:
        """A free slot as uint8 of this shape, for the child, and what to send in its place.

        ``None`` if all slots are in use or too small.
        """
        used = self._used[:]
        if 0 not in used or np.prod(shape) > self.slot_bytes:
            return None
        slot = used.index(0)
        self._used[slot] = 1
        return torch.from_numpy(self._array(slot, shape)), RingPixels(slot, shape)

    def open(self, pixels: RingPixels) -> torch.Tensor:
        """What the child has sent; its slot is used again when nothing refers to it any more."""
        array = self._array(pixels.slot, pixels.shape)
        weakref.finalize(array, self._give_back, pixels.slot).atexit = False
        return torch.from_numpy(array)

    def _array(self, slot: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        start = slot * self.slot_bytes
        return np.ndarray(shape, np.uint8, self._memory, start)

    def _give_back(self, slot: int) -> None:
        self._used[slot] = 0


def _attached(
    descriptor: Any,
    slot_bytes: int,
    used: SharedIntegers,
) -> SharedRing:
    ring = SharedRing.__new__(SharedRing)
    ring._attach(descriptor.detach(), slot_bytes, used)
    return ring


def _open_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("pcrshard-batches")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def open_pixels(batch: Any, ring: SharedRing | None) -> Any:
    """A batch, a dict or a list as a ``DataLoader`` gives it, with what its ring holds put in."""
    if ring is None:
        return batch
    if isinstance(batch, dict):
        return {name: _open(value, ring) for name, value in batch.items()}
    return [_open(value, ring) for value in batch] if isinstance(batch, list) else batch


def _open(value: Any, ring: SharedRing) -> Any:
    if isinstance(value, RingViews):
        return carve(ring.open(value.pixels), value.shapes)
    return ring.open(value) if isinstance(value, RingPixels) else value


def carve(whole: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Tensors of these shapes, one after the other in the memory of a flat one."""
    stops = itertools.accumulate(map(math.prod, shapes), initial=0)
    places = itertools.pairwise(stops)
    return [
        whole[start:stop].view(shape) for (start, stop), shape in zip(places, shapes, strict=True)
    ]
