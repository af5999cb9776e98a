"""What is kept in place of a saved tensor, and how many bytes of that are alive."""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections import deque
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .codecs import Codec, Payload, payload_bytes
from .layout import Layout, restore
from .prediction import Grid, Lines, grid_of, predict, sample
from .sign_exact import Quantised, Rounding, dequantise, quantise

# How many of the tensors that were coded last are remembered: the input of a block with a shortcut
# is saved up to seven tensors before its output.
_REMEMBERED = 8
# Values of a channel below which its table of 256 costs more than it brings.
_WORTH_A_TABLE = 1024
# Of what others are predicted from, the most tensors that must be decoded one after the other.
_MAX_DEPTH = 2


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
        predicted: What was taken from the codes, if anything was.
    """

    quantised: Quantised
    payload: Payload
    codec: Codec
    count: int
    device: torch.device
    predicted: Predicted | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that are held, without those of what it is predicted from."""
        escapes = (self.quantised.index, self.quantised.values)
        escaped = sum(part.nbytes for part in escapes if part is not None)
        lines = 0 if self.predicted is None else self.predicted.lines.num_bytes
        return payload_bytes(self.payload) + escaped + lines

    def decode(self) -> Tensor:
        """The values, within the error bound."""
        return dequantise(dataclasses.replace(self.quantised, codes=self._codes()))

    def _codes(self) -> Tensor:
        codes = self.codec.decode(self.payload, self.count, self.device)
        if self.predicted is not None:
            self.predicted.shift(codes, self.quantised, 1)
        return codes

    @property
    def depth(self) -> int:
        """How many tensors must be decoded one after the other before this one."""
        if self.predicted is None:
            return 0
        return 1 + max(source.depth for source in self.predicted.sources)


class Predicted(NamedTuple):
    """Where codes are predicted from, and how."""

    sources: tuple[Coded, ...]
    lines: Lines

    def shift(self, codes: Tensor, quantised: Quantised, sign: int) -> None:
        """Adds to (n,) codes, in place, or takes from them what is predicted."""
        tables = self.lines.tables([source.quantised for source in self.sources], quantised)
        self.lines.shift(codes, [source._codes() for source in self.sources], tables, sign)


class _Known(NamedTuple):
    """A tensor that was coded before: some of its codes, and how it lies in memory."""

    coded: Coded
    some: Quantised
    layout: Layout


class Predictor:
    """Remembers the tensors that were coded last: codes of the next are predicted from them.

    Args:
        remembers: Whether it does; otherwise nothing is predicted.
    """

    def __init__(self, *, remembers: bool) -> None:
        self._known: deque[_Known] = deque(maxlen=_REMEMBERED if remembers else 0)

    def forget(self) -> None:
        """Lets go of them."""
        self._known.clear()

    def encode(
        self,
        flat: Tensor,
        quantised: Quantised,
        layout: Layout,
        codec: Codec,
    ) -> Coded:
        """Codes what earlier tensors do not say of (n,) codes, which are changed in place."""
        grid = grid_of(layout) if self._known.maxlen else None
        if grid is None or grid.outer * grid.inner < _WORTH_A_TABLE:
            return _code(quantised, codec)
        some = dataclasses.replace(quantised, codes=sample(quantised.codes, grid))
        predicted = self._ask(sample(flat, grid).float(), some, layout, grid)
        if predicted is not None:
            predicted.shift(quantised.codes, quantised, -1)
        coded = _code(quantised, codec, predicted)
        # What is not smaller than the tensor is not kept.
        if coded.depth <= _MAX_DEPTH and coded.num_bytes < flat.nbytes:
            self._known.append(_Known(coded, some, layout))
        return coded

    def _ask(
        self,
        values: Tensor,
        some: Quantised,
        layout: Layout,
        grid: Grid,
    ) -> Predicted | None:
        """What the last tensor says, alone or with one before; ``None`` if it is little."""
        alike = [known for known in reversed(self._known) if _is_alike(known, values, layout)]
        if not alike or bool((values < 0).any()):
            return None
        last, *others = alike
        for known in ((last,), *((last, other) for other in others)):
            lines = predict(values, some, [each.some for each in known], grid)
            if lines is not None:
                return Predicted(tuple(each.coded for each in known), lines)
        return None


def _is_alike(known: _Known, values: Tensor, layout: Layout) -> bool:
    """Whether both lie alike, and on one device: a model may be spread over several."""
    return known.layout == layout and known.coded.device == values.device


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
    predictor: Predictor | None = None,
    layout: Layout | None = None,
) -> Coded | None:
    """Quantises and codes (n,) floats; ``None`` where nothing would be saved.

    Args:
        flat: The floats.
        error_bound: Largest absolute error of an element.
        codec: What makes codes smaller.
        rounding: How values become codes; only the nearest ones can be predicted.
        generator: Where stochastic rounding draws from.
        predictor: Knows the tensor before; with it the layout is needed.
        layout: How the floats lie.
    """
    quantised = quantise(flat, error_bound, rounding, generator)
    if quantised is None:
        return None
    codes = quantised.codes
    if quantised.index is not None:
        # The list has them; here they would only widen the bits of their blocks.
        codes[quantised.index.long()] = 0
    if predictor is None or layout is None:
        coded = _code(quantised, codec)
    else:
        coded = predictor.encode(flat, quantised, layout, codec)
    return coded if coded.num_bytes < flat.nbytes else None


def _code(quantised: Quantised, codec: Codec, predicted: Predicted | None = None) -> Coded:
    """What is left of a tensor's codes, coded."""
    codes = quantised.codes
    without = dataclasses.replace(quantised, codes=codes.new_empty(0))
    payload = codec.encode(codes)
    return Coded(without, payload, codec, codes.numel(), codes.device, predicted)


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

    def add(self, owner: object, num_bytes: int) -> None:
        """Counts bytes until their owner is collected."""
        self._change(num_bytes)
        weakref.finalize(owner, self._change, -num_bytes).atexit = False

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
        # Another thread may forget it meanwhile.
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
