"""Lossless packing of masks, indices, and sparse floats.

Max-pooling saves an int64 index per output, a fifth of all saved bytes in a network without batch
normalization; dropout saves booleans or, on a CPU, floats with two distinct values.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .bits import pack_booleans, unpack_booleans
from .codecs import Codec, Payload, payload_bytes

# Integer types in order of increasing range, with their minimum values.
_NARROW = ((torch.uint8, 0), (torch.int16, -(2**15)), (torch.int32, -(2**31)))
_SAMPLE = 1024
# Store floats without their zeros if at most this fraction is nonzero.
_MOST_NONZERO = 0.75
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_INTEGERS = (torch.int16, torch.int32, torch.int64)


@dataclasses.dataclass(frozen=True)
class Packed:
    """A flat tensor of booleans or integers.

    Attributes:
        payload: The stored bytes, encoded by ``codec``.
        count: Number of elements.
        dtype: Original type of the elements.
        narrow: Type in which they are stored; ``bool`` for bits.
        shift: The number that was added to each element.
        codec: The coder of the bytes.
        device: Where the tensor was.
    """

    payload: Payload
    count: int
    dtype: torch.dtype
    narrow: torch.dtype
    shift: int
    codec: Codec
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Size in memory, in bytes."""
        return payload_bytes(self.payload)

    def decode(self) -> Tensor:
        """Return the (count,) elements."""
        is_bits = self.narrow == torch.bool
        num_bytes = -(-self.count // 8) if is_bits else self.count * self.narrow.itemsize
        raw = self.codec.decode(self.payload, num_bytes, self.device).view(torch.uint8)
        if is_bits:
            return unpack_booleans(raw, self.count)
        narrow = raw.view(self.narrow)
        if self.codec.is_zstd:
            planes = raw.view(self.narrow.itemsize, self.count)
            differences = planes.t().contiguous().flatten().view(self.narrow)
            narrow = differences.cumsum(0, dtype=self.narrow)
        return narrow.to(self.dtype).sub_(self.shift)


@dataclasses.dataclass(frozen=True)
class Nonzero:
    """A flat tensor of floats, stored without its zeros.

    Attributes:
        mask: Positions of the nonzero values.
        values: (k,) nonzero values, or (1,) if all are equal, as in a dropout mask.
    """

    mask: Packed
    values: Tensor

    @property
    def num_bytes(self) -> int:
        """Size in memory, in bytes."""
        return self.mask.num_bytes + self.values.nbytes

    def decode(self) -> Tensor:
        """Return the (n,) elements."""
        flat = self.values.new_zeros(self.mask.count)
        flat[self.mask.decode()] = self.values
        return flat


def pack_exactly(flat: Tensor, codec: Codec) -> Packed | Nonzero | None:
    """Pack booleans eight to a byte, integers by their range, floats without their zeros.

    Args:
        flat: (n,) contiguous elements.
        codec: If this is Zstandard, the bytes are also compressed with it.

    Returns:
        The packed tensor; ``None`` for other types or if packing would save nothing.
    """
    if not codec.is_zstd:
        codec = dataclasses.replace(codec, name="int8")
    if flat.dtype == torch.bool:
        return _pack_booleans(flat, codec)
    if flat.dtype.is_floating_point:
        return _pack_nonzero(flat, codec)
    if flat.dtype in _INTEGERS and flat.numel() > 0:
        return _pack_integers(flat, codec)
    return None


def _pack_nonzero(flat: Tensor, codec: Codec) -> Nonzero | None:
    # Compare bits, because -0.0 equals 0.0 but is a different value.
    words = flat.view(_WORDS[flat.element_size()])
    sample = words[:: max(flat.numel() // _SAMPLE, 1)]
    dense = int(sample.count_nonzero()) > _MOST_NONZERO * sample.numel()
    if dense and torch.unique(sample).numel() > 2:
        return None
    taken = words != 0
    values = flat[taken]
    if values.numel() and bool((values == values[0]).all()):
        values = values[:1].clone()
    packed = Nonzero(_pack_booleans(taken, codec), values)
    return packed if packed.num_bytes < _MOST_NONZERO * flat.nbytes else None


def _pack_booleans(flat: Tensor, codec: Codec) -> Packed:
    return _packed(flat, pack_booleans(flat), torch.bool, 0, codec)


def _pack_integers(flat: Tensor, codec: Codec) -> Packed | None:
    low = int(flat.min())
    span = int(flat.max()) - low
    fitting = (narrow for narrow in _NARROW if span < 2 ** (8 * narrow[0].itemsize))
    narrow, least = next(fitting, (flat.dtype, 0))
    if narrow.itemsize >= flat.element_size():
        return None
    shift = least - low
    raw = (flat.to(torch.int64) + shift).to(narrow)
    if codec.is_zstd:
        # Neighboring pools have close indices: high bytes of differences are mostly 0 or 255.
        differences = raw.clone()
        differences[1:] -= raw[:-1]
        raw = differences.view(torch.uint8).view(-1, narrow.itemsize).t().contiguous().flatten()
    return _packed(flat, raw, narrow, shift, codec)


def _packed(flat: Tensor, raw: Tensor, narrow: torch.dtype, shift: int, codec: Codec) -> Packed:
    payload = codec.encode(raw.view(torch.int8))
    return Packed(payload, flat.numel(), flat.dtype, narrow, shift, codec, flat.device)
