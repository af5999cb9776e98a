"""Tensors and arrays as words of bits with a type and a shape: the room's edge to torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errorbound import Words
from ..errors import CorruptCheckpoint, UnsupportedState
from ..memory import BufferPool

MAX_DIMENSIONS = 64
# A tensor begins at a line of the processor's cache.
_ALIGNMENT = 64
# One snapshot is written while the next one is taken.
_snapshots = BufferPool(max_idle=2)
# Bytes of an element. Types without an entry are refused.
ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
# Those that numpy has too.
NUMPY_TYPES = {
    name: size for name, size in ITEM_BYTES.items() if not name.startswith(("bfloat", "float8"))
}


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Type and shape of a tensor.

    Attributes:
        dtype: A name of :data:`ITEM_BYTES`.
        shape: Elements along each dimension; ``()`` for one element.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def word(self) -> np.dtype[Any]:
        """The unsigned integer that an element is handled as; two for ``complex128``."""
        return np.dtype(f"u{min(ITEM_BYTES[self.dtype], 8)}")

    @property
    def num_words(self) -> int:
        """Words of all elements."""
        return self.num_bytes // self.word.itemsize


def spec_from(dtype: Any, shape: Any) -> TensorSpec:
    """Type and shape that a file states.

    Raises:
        CorruptCheckpoint: There is no such type, or it is no shape.
    """
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CorruptCheckpoint(f"expected a tensor's type, got {dtype!r}")
    sizes = shape if isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS else [-1]
    if not all(type(size) is int and 0 <= size < 1 << 48 for size in sizes):
        raise CorruptCheckpoint(f"expected a tensor's shape, got {shape!r}")
    return TensorSpec(dtype, tuple(sizes))


def check_storable(tensor: torch.Tensor, path: str) -> None:
    """Check that a tensor is a dense one of a known type.

    Raises:
        UnsupportedState: The tensor has no values of its own here: meta, sparse, quantised,
            sharded or another subclass.
    """
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    name = str(tensor.dtype).removeprefix("torch.")
    if not plain or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        what = f"{type(tensor).__name__}, {tensor.layout}, {tensor.device}, {name}"
        raise UnsupportedState(f"expected a dense tensor with values, got {what}", key=path)
    if name not in ITEM_BYTES:
        raise UnsupportedState(f"cannot store tensors of type {name}", key=path)


def snapshot(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous copies in the memory of the CPU, which later training does not change.

    They lie in one buffer that is used again when nothing refers to any of them: fresh memory
    takes several times as long as the copy itself.
    """
    sizes = [_aligned(spec_of(tensor).num_bytes) for tensor in tensors]
    buffer = _snapshots.borrow_array(sum(sizes))
    copies = []
    start = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        spec = spec_of(tensor)
        copy = tensor_from(buffer[start : start + spec.num_bytes], spec)
        copies.append(copy.copy_(tensor.detach()))
        start += size
    return copies


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def words_of(tensor: torch.Tensor) -> Words:
    """The words (N,) of a contiguous tensor on the CPU, without a copy."""
    spec = spec_of(tensor)
    if spec.num_bytes == 0:
        return np.empty(0, spec.word)
    return tensor.reshape(-1).view(torch.uint8).numpy().view(spec.word)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Type and shape of a tensor."""
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def tensor_from(words: Words, spec: TensorSpec) -> torch.Tensor:
    """The tensor of words (N,); it shares their memory."""
    dtype = getattr(torch, spec.dtype)
    if spec.num_bytes == 0:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.from_numpy(words.view(np.uint8)).view(dtype).reshape(spec.shape)


def array_tensor(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    """A copy of a numpy array as a tensor.

    Raises:
        UnsupportedState: It holds objects, text, dates or fields.
    """
    if array.dtype.name not in NUMPY_TYPES:
        raise UnsupportedState(f"cannot store arrays of type {array.dtype}", key=path)
    native = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    return torch.from_numpy(native)
