"""What is kept in place of a saved tensor, and how many bytes of that are alive."""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from typing import Protocol

import torch
from torch import Tensor

from .codecs import Codec, Payload, payload_bytes
from .layout import Layout, restore
from .sign_exact import Quantised, Rounding, dequantise, quantise


@dataclasses.dataclass
class Row:
    """What became of one saved tensor; one line of the report.

    Attributes:
        name: Module that saved it first, ``""`` outside of modules or when that is not known.
        kind: ``lossy``, ``lossless``, ``sparse`` (exact, without its zeros), ``constant`` or
            ``exact`` (kept by reference).
        shape: Its shape.
        dtype: Its type.
        raw_bytes: Bytes of its elements.
        stored_bytes: Bytes that are kept.
        error_bound: Largest absolute error of an element; 0 if it is exact.
        deviation: Standard deviation of its elements, estimated from a sample.
        encode_seconds: Time of this thread to make it small.
        decode_seconds: Time of all unpackings.
        read_by: The convolutions whose input it is.
    """

    name: str
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


class Content(Protocol):
    """A flat tensor in fewer bytes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that are held."""
        ...

    def decode(self) -> Tensor:
        """The (n,) elements."""
        ...


@dataclasses.dataclass(frozen=True)
class Coded:
    """Quantised floats, coded.

    Attributes:
        quantised: Without its codes.
        payload: The codes, coded by ``codec``.
        codec: How.
        count: Number of elements.
        device: Where the tensor was.
    """

    quantised: Quantised
    payload: Payload
    codec: Codec
    count: int
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that are held."""
        escapes = (self.quantised.index, self.quantised.values)
        escaped = sum(part.nbytes for part in escapes if part is not None)
        return payload_bytes(self.payload) + escaped

    def decode(self) -> Tensor:
        """The values, within the error bound."""
        codes = self.codec.decode(self.payload, self.count, self.device)
        return dequantise(dataclasses.replace(self.quantised, codes=codes))


@dataclasses.dataclass(frozen=True)
class Constant:
    """A tensor of one value, such as an output of ReLU that is all zeros."""

    value: Tensor
    count: int

    @property
    def num_bytes(self) -> int:
        """One element."""
        return self.value.element_size()

    def decode(self) -> Tensor:
        """The value, so many times."""
        return self.value.expand(self.count).contiguous()


def encode_floats(
    flat: Tensor,
    error_bound: float,
    codec: Codec,
    rounding: Rounding = "nearest",
    generator: torch.Generator | None = None,
) -> Coded | None:
    """Quantises and codes (n,) floats; ``None`` where nothing would be saved."""
    quantised = quantise(flat, error_bound, rounding, generator)
    if quantised is None:
        return None
    codes = quantised.codes
    if quantised.index is not None:
        # The list has them; here they would only widen the bits of their blocks.
        codes[quantised.index.long()] = 0
    payload = codec.encode(codes)
    without = dataclasses.replace(quantised, codes=codes.new_empty(0))
    coded = Coded(without, payload, codec, flat.numel(), flat.device)
    return coded if coded.num_bytes < flat.nbytes else None


class Ledger:
    """Bytes of compressed tensors that are alive now, and the most that ever were.

    It is told by the garbage collector, so that it returns to 0 whatever ends a step: the backward
    pass, an exception, or a graph that nobody differentiates.
    """

    def __init__(self, *, timeline: bool = False) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self.timeline: list[tuple[float, int]] | None = [] if timeline else None
        # A collection may start while this thread adds.
        self._lock = threading.RLock()

    def add(self, blob: Blob, num_bytes: int) -> None:
        """Counts the bytes of a blob until it is collected."""
        self._change(num_bytes)
        weakref.finalize(blob, self._change, -num_bytes).atexit = False

    def _change(self, num_bytes: int) -> None:
        with self._lock:
            self.live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            if self.timeline is not None:
                self.timeline.append((time.monotonic(), self.live_bytes))


class Blob:
    """A compressed tensor: what the graph holds in place of it.

    A tensor that was decoded may be asked for again at once (by a convolution, then by the ReLU
    before it), so that it is kept until another blob is decoded or this one goes.
    """

    __slots__ = ("__weakref__", "_content", "_decoded", "_layout", "_version", "row")

    def __init__(self, content: Content, layout: Layout, row: Row) -> None:
        self.row = row
        self._content = content
        self._layout = layout
        self._decoded: Tensor | None = None
        self._version = 0

    def tensor(self) -> Tensor:
        """The tensor, with the shape, strides, type and device that it had."""
        if self._decoded is not None and self._decoded._version == self._version:
            return self._decoded
        begun = time.perf_counter()
        with torch.no_grad():
            decoded = restore(self._content.decode(), self._layout)
        self.row.decode_seconds += time.perf_counter() - begun
        self._decoded = decoded
        self._version = decoded._version
        return decoded

    def forget(self) -> None:
        """Lets go of the decoded tensor."""
        self._decoded = None


class Kept:
    """A tensor that is kept by reference, as autograd keeps it.

    A pack hook that returns its argument switches autograd's own check for in-place changes off;
    so this one compares versions. Detached, because a result that held its own graph would never
    be freed.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version

    def tensor(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: It was changed in place since it was saved.
        """
        if self._tensor._version != self._version:
            shape = tuple(self._tensor.shape)
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {shape} is at version "
                f"{self._tensor._version}; expected version {self._version} instead"
            )
        return self._tensor
