"""Convert between tensors or arrays and unsigned words with a type and a shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errorbound import Words
from ..errors import UnsupportedState
from ..memory import BufferPool
from .frame import Record, Shape

# Alignment of each tensor in a snapshot: one cache line.
_ALIGNMENT = 64
_TYPES = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float8_e4m3fn float8_e5m2 "
    "float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 float16 bfloat16 float32 "
    "float64 complex64 complex128"
)
# Size of an element. Types without an entry are rejected.
ITEM_BYTES: dict[str, int] = {name: getattr(torch, name).itemsize for name in _TYPES.split()}
# The types that numpy also supports.
NUMPY_TYPES = {
    name: np.dtype(name)
    for name in ITEM_BYTES
    if not name.startswith(("bfloat", "float8", "float4"))
}


class TensorSpec(Record, frozen=True, array_like=True):
    """Type and shape of a tensor.

    Attributes:
        dtype: A key of :data:`ITEM_BYTES`.
        shape: The tensor's shape; ``()`` for a scalar.
    """

    dtype: str
    shape: Shape

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"expected a tensor's type, got {self.dtype!r}")

    @property
    def num_bytes(self) -> int:
        """Size of all elements in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def word(self) -> np.dtype[Any]:
        """Unsigned integer type of an element's word; ``complex128`` takes two words."""
        return np.dtype(f"u{min(ITEM_BYTES[self.dtype], 8)}")

    @property
    def num_words(self) -> int:
        """Number of words of all elements."""
        return self.num_bytes // self.word.itemsize


def check_storable(tensor: torch.Tensor, path: str) -> None:
    """Check that a tensor is dense and of a supported type.

    Raises:
        UnsupportedState: The tensor has no dense local values (meta, sparse, nested, quantized,
            sharded, or another subclass).
    """
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedState(f"expected a tensor, got a {type(tensor).__name__}", key=path)
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    name = str(tensor.dtype).removeprefix("torch.")
    is_dense = tensor.layout == torch.strided and not tensor.is_nested
    if not (plain and is_dense) or tensor.is_quantized or tensor.is_meta:
        what = f"{type(tensor).__name__}, {tensor.layout}, {tensor.device}, {name}"
        if hasattr(tensor, "full_tensor"):  # a DTensor, whose class takes long to import
            what += ": gather it on all ranks by full_tensor()"
        elif not plain:
            what += ": store its values as a torch.Tensor"
        raise UnsupportedState(f"expected a dense tensor with values, got {what}", key=path)
    if name not in ITEM_BYTES:
        raise UnsupportedState(f"cannot store tensors of type {name}", key=path)


def snapshot(tensors: Sequence[torch.Tensor], buffers: BufferPool) -> list[torch.Tensor]:
    """Copy tensors to contiguous CPU memory, so that training may continue.

    The copies share one buffer, which is reused once nothing refers to any of them: allocating
    fresh memory takes several times as long as the copy itself.
    """
    specs = [spec_of(tensor) for tensor in tensors]
    sizes = [-(-spec.num_bytes // _ALIGNMENT) * _ALIGNMENT for spec in specs]
    parts = np.split(buffers.borrow_array(sum(sizes)), np.cumsum(sizes, dtype=np.int64))
    return [
        tensor_from(part[: spec.num_bytes], spec).copy_(tensor.detach())
        for tensor, spec, part in zip(tensors, specs, parts, strict=False)
    ]


def words_of(tensor: torch.Tensor) -> Words:
    """Return the words (N,) of a contiguous tensor on the CPU, without a copy."""
    if not tensor.numel():  # torch gives empty arrays a stride of 0, which it does not view
        return np.empty(0, spec_of(tensor).word)
    return tensor.reshape(-1).view(torch.uint8).numpy().view(spec_of(tensor).word)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Return the type and shape of a tensor."""
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def tensor_from(words: Words, spec: TensorSpec) -> torch.Tensor:
    """Return a tensor that shares the memory of words (N,)."""
    data = torch.from_numpy(words.view(np.uint8))
    return data.view(getattr(torch, spec.dtype)).reshape(spec.shape)


def array_tensor(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    """Copy a numpy array into a tensor.

    Raises:
        UnsupportedState: The array holds objects, text, dates, or structured fields.
    """
    if array.dtype.name not in NUMPY_TYPES:
        raise UnsupportedState(f"cannot store arrays of type {array.dtype}", key=path)
    native = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    return torch.from_numpy(native)
