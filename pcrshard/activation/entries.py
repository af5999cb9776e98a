"""What the graph holds in place of the tensors that operations saved."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from ..memory import when_gone
from .codecs import Content
from .consumers import Norm
from .layout import MemoryLayout
from .pooling import Windows
from .report import Row


class Ledger:
    """A counter of the current and peak bytes of live compressed tensors.

    Finalizers decrease the count, so it returns to 0 however a step ends: with the backward pass,
    an exception, or a graph that is never differentiated.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        # Garbage collection may start while this thread holds the lock.
        self._lock = threading.RLock()

    def add(self, content: Content) -> None:
        """Count a compressed tensor until it is garbage-collected."""
        self._change(content.num_bytes)
        when_gone(content, self._change, -content.num_bytes)

    def _change(self, num_bytes: int) -> None:
        with self._lock:
            self.live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class Entry:
    """The elements that one or more operations saved, exact, compressed, or both for a while.

    Attributes:
        kind: How the elements may be stored: ``lossy``, ``lossless`` or ``exact``.
        tensor: The exact tensor; ``None`` after it was compressed. It is detached, because a result
            that referenced its own graph would never be freed.
        version: Its version when it was saved. A pack hook that returns its argument disables
            autograd's own check for in-place changes, so versions are compared.
        content: The compressed elements.
        waiting: How many of the savers are not known yet.
        is_exact: Whether a saver needs the exact tensor.
        is_wanted: Whether a saver tolerates an inexact one.
        is_gate: Whether it is the result of a gate, which is exact if nothing else is done with it.
        by: The statistics by which an operation normalizes it, or the windows that indices lie in.
        reader: The number of that operation.
        node: The operation that computed the elements, in the same order; ``None`` once compressed.
    """

    def __init__(self, tensor: Tensor, layout: MemoryLayout, row: Row, kind: str = "exact") -> None:
        self.kind = kind
        self.tensor: Tensor | None = tensor.detach()
        self.version = tensor._version
        self.layout = layout
        self.row = row
        self.content: Content | None = None
        self.waiting = 0
        self.is_exact = False
        self.is_wanted = False
        self.is_gate = False
        self.by: Norm | Windows | None = None
        self.reader = -1
        self.node: Any = None

    def exact(self) -> Tensor:
        """Return the tensor, unless it was changed in place after it was saved."""
        assert self.tensor is not None
        found = self.tensor._version
        if found != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {tuple(self.tensor.shape)} is at version "
                f"{found}; expected version {self.version} instead"
            )
        return self.tensor


class Saved:
    """What the graph holds in place of a tensor.

    Attributes:
        entry: The elements.
        layout: Shape and order that the saver's view gives to them.
        strides: Its strides while they are exact.
        own: What only this saver can use in place of them.
        is_waiting: Whether the saver is not known yet.
    """

    def __init__(self, entry: Entry, layout: MemoryLayout, strides: tuple[int, ...]) -> None:
        self.entry = entry
        self.layout = layout
        self.strides = strides
        self.own: Content | None = None
        self.is_waiting = False

    def exact(self) -> Tensor:
        """Return the saver's view of the exact tensor."""
        tensor = self.entry.exact()
        if tensor.layout != torch.strided or tensor.stride() == self.strides:
            return tensor
        return tensor.as_strided(self.layout.shape, self.strides)
