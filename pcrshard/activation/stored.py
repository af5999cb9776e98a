"""Stored forms of saved tensors, and accounting of their live bytes."""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections import deque
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..errorbound import Quantized
from .codecs import Codec, Payload, payload_bytes
from .layout import Layout, restore
from .prediction import Grid, Lines, Sampled, grid_of, predict, sample
from .quantizer import SignExactLattice, quantize
from .quantizer import restore as restore_values

# Number of recently coded tensors to remember: the input of a block with a shortcut is saved up to
# seven tensors before its output.
_REMEMBERED = 8
# With fewer values per channel, the table of 256 entries costs more than it saves.
_WORTH_A_TABLE = 1024
# Maximum number of tensors that must be decoded before a predicted one.
_MAX_DEPTH = 2


@dataclasses.dataclass
class Row:
    """The report row of one saved tensor.

    Attributes:
        name: The innermost module that ran when it was first saved; ``""`` outside modules.
        function: The operation that computed it; ``""`` for inputs and parameters.
        kind: ``lossy``, ``lossless``, ``constant`` or ``exact`` (kept by reference).
        shape: The tensor's shape.
        dtype: The tensor's type.
        raw_bytes: Size of the elements in bytes.
        stored_bytes: Size of the stored form in bytes.
        error_bound: Largest absolute error of an element; 0 if exact, NaN if determined inside
            compiled code.
        deviation: Standard deviation of its elements, estimated from a sample.
        encode_seconds: Packing time in this thread.
        decode_seconds: Total unpacking time.
        read_by: The convolutions that read it as their input.
        compiled: Whether it is packed in compiled code.
    """

    name: str
    function: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    raw_bytes: int
    stored_bytes: int
    error_bound: float = 0.0
    deviation: float = 0.0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    read_by: tuple[str, ...] = ()
    compiled: bool = False

    @property
    def label(self) -> str:
        """The module's name, or the function's if no module saved the tensor."""
        return self.name or self.function or "input"


class Content(Protocol):
    """A compressed flat tensor."""

    @property
    def num_bytes(self) -> int:
        """Size in memory, in bytes."""
        ...

    def decode(self) -> Tensor:
        """The (n,) elements."""
        ...


@dataclasses.dataclass(frozen=True)
class Coded:
    """Quantized and losslessly coded floats.

    Attributes:
        escapes: The values that have no code, with empty ``codes``.
        lattice: The values that codes represent.
        payload: The codes, encoded by ``codec``.
        codec: The lossless coder of codes.
        count: Number of elements.
        device: Where the tensor was.
        predicted: The prediction that was subtracted from the codes, if any.
    """

    escapes: Quantized[Tensor]
    lattice: SignExactLattice
    payload: Payload
    codec: Codec
    count: int
    device: torch.device
    predicted: Predicted | None = None

    @property
    def num_bytes(self) -> int:
        """Size in memory, in bytes, excluding the tensors that it is predicted from."""
        escaped = self.escapes.escape_index.nbytes + self.escapes.escape_words.nbytes
        lines = 0 if self.predicted is None else self.predicted.lines.num_bytes
        return payload_bytes(self.payload) + escaped + lines

    def decode(self) -> Tensor:
        """Return the values, within the error bound."""
        return restore_values(dataclasses.replace(self.escapes, codes=self.codes()), self.lattice)

    def codes(self) -> Tensor:
        """Return the (n,) codes."""
        codes = self.codec.decode(self.payload, self.count, self.device)
        if self.predicted is not None:
            self.predicted.shift(codes, self.lattice, 1)
        return codes

    @property
    def depth(self) -> int:
        """Number of tensors that must be decoded in sequence before this one."""
        if self.predicted is None:
            return 0
        return 1 + max(source.depth for source in self.predicted.sources)


class Predicted(NamedTuple):
    """The tensors from which codes are predicted, and their lines."""

    sources: tuple[Coded, ...]
    lines: Lines

    def shift(self, codes: Tensor, lattice: SignExactLattice, sign: int) -> None:
        """Add the prediction to (n,) codes, in place, or subtract it."""
        tables = self.lines.tables([source.lattice for source in self.sources], lattice)
        self.lines.shift(codes, [source.codes() for source in self.sources], tables, sign)


class _Known(NamedTuple):
    """A previously coded tensor: a sample of its codes, and its layout."""

    coded: Coded
    some: Sampled
    layout: Layout


class Encoder:
    """The quantizer and coder of floats; with ``predicted`` it remembers previous tensors.

    Args:
        codec: The lossless coder of codes.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        remembers = codec.name == "predicted"
        self._known: deque[_Known] = deque(maxlen=_REMEMBERED if remembers else 0)

    def forget(self) -> None:
        """Release the remembered tensors."""
        self._known.clear()

    def encode(
        self,
        flat: Tensor,
        lattice: SignExactLattice,
        layout: Layout,
        generator: torch.Generator | None = None,
    ) -> Coded | None:
        """Quantize and code (n,) floats; return ``None`` if this would save nothing.

        Args:
            flat: The floats.
            lattice: The values that codes represent.
            layout: The memory layout of the floats.
            generator: Random generator for stochastic rounding.
        """
        quantized = quantize(flat, lattice, generator)
        if quantized is None:
            return None
        grid = grid_of(layout) if self._known.maxlen else None
        if grid is None or grid.outer * grid.inner < _WORTH_A_TABLE:
            coded = self._code(quantized, lattice)
            return coded if coded.num_bytes < flat.nbytes else None
        some = Sampled(sample(quantized.codes, grid), lattice)
        predicted = self._ask(sample(flat, grid).float(), some, layout, grid)
        if predicted is not None:
            predicted.shift(quantized.codes, lattice, -1)
        coded = self._code(quantized, lattice, predicted)
        if coded.num_bytes >= flat.nbytes:
            return None
        if coded.depth <= _MAX_DEPTH:
            self._known.append(_Known(coded, some, layout))
        return coded

    def _code(
        self,
        quantized: Quantized[Tensor],
        lattice: SignExactLattice,
        predicted: Predicted | None = None,
    ) -> Coded:
        codes = quantized.codes
        escapes = dataclasses.replace(quantized, codes=codes.new_empty(0))
        payload = self._codec.encode(codes)
        count = codes.numel()
        return Coded(escapes, lattice, payload, self._codec, count, codes.device, predicted)

    def _ask(self, values: Tensor, some: Sampled, layout: Layout, grid: Grid) -> Predicted | None:
        """Predict from the last tensor, alone or with an earlier one; ``None`` if this is poor."""
        alike = [
            known
            for known in reversed(self._known)
            if known.layout == layout and known.coded.device == values.device
        ]
        if not alike or bool((values < 0).any()):
            return None
        last, *others = alike
        for known in ((last,), *((last, other) for other in others)):
            lines = predict(values, some, [each.some for each in known], grid)
            if lines is not None:
                return Predicted(tuple(each.coded for each in known), lines)
        return None


@dataclasses.dataclass(frozen=True)
class Constant:
    """A tensor with one repeated value, such as an all-zero output of ReLU."""

    value: Tensor
    count: int

    @property
    def num_bytes(self) -> int:
        """Size of one element in bytes."""
        return self.value.element_size()

    def decode(self) -> Tensor:
        """Return the value, repeated."""
        return self.value.expand(self.count).contiguous()


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

    def add(self, owner: object, num_bytes: int) -> None:
        """Add bytes until their owner is garbage-collected."""
        self._change(num_bytes)
        weakref.finalize(owner, self._change, -num_bytes).atexit = False

    def _change(self, num_bytes: int) -> None:
        with self._lock:
            self.live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class Blob:
    """A compressed tensor that the graph holds in place of the original.

    A decoded tensor may be needed again immediately (by a convolution, then by the ReLU before it),
    so it is cached until another blob is decoded or this one is freed.
    """

    __slots__ = ("__weakref__", "_content", "_decoded", "_layout", "_version", "row")

    def __init__(self, content: Content, layout: Layout, row: Row) -> None:
        self.row = row
        self._content = content
        self._layout = layout
        self._decoded: Tensor | None = None
        self._version = 0

    def tensor(self) -> Tensor:
        """Return the tensor with its original shape, strides, type, and device."""
        # Another thread may release it at the same time.
        if (known := self._decoded) is not None and known._version == self._version:
            return known
        begun = time.perf_counter()
        with torch.no_grad():
            decoded = restore(self._content.decode(), self._layout)
        self.row.decode_seconds += time.perf_counter() - begun
        self._decoded = decoded
        self._version = decoded._version
        return decoded

    def forget(self) -> None:
        """Release the decoded tensor."""
        self._decoded = None


class Kept:
    """A tensor kept by reference, as autograd does without hooks.

    A pack hook that returns its argument disables autograd's own check for in-place changes, so
    this class compares versions. The tensor is detached, because a result that referenced its own
    graph would never be freed.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version

    def tensor(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: The tensor was changed in place after it was saved.
        """
        if self._tensor._version != self._version:
            shape = tuple(self._tensor.shape)
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {shape} is at version "
                f"{self._tensor._version}; expected version {self._version} instead"
            )
        return self._tensor
