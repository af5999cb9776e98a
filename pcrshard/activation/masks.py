"""Masks and indices that autograd saves, exactly and in fewer bytes.

Max-pooling saves an int64 index for each output, a fifth of all bytes of a network without batch
normalisation; comparisons and dropout on some devices save booleans.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .bits import pack_part, unpack_part
from .codecs import Codec, Payload, payload_bytes

# Types of integers by what they hold, the smallest first, with their least value.
_NARROW = ((torch.uint8, 0), (torch.int16, -(2**15)), (torch.int32, -(2**31)))
# Floats that are looked at before all of them are.
_SAMPLE = 1024
# Floats are kept without their zeros where at most this share is something else.
_MOST_NONZERO = 0.75
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_INTEGERS = (torch.int16, torch.int32, torch.int64)


@dataclasses.dataclass(frozen=True)
class Packed:
    """A flat tensor of booleans or integers.

    Attributes:
        payload: What is kept.
        count: Number of elements.
        dtype: Their type.
        narrow: The type that they are kept in; ``bool`` for bits.
        shift: What was added to each.
        codec: Zstandard, if the bytes went through it.
        device: Where the tensor was.
    """

    payload: Payload
    count: int
    dtype: torch.dtype
    narrow: torch.dtype
    shift: int
    codec: Codec | None
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that are held."""
        return payload_bytes(self.payload)

    def decode(self) -> Tensor:
        """The (count,) elements."""
        if self.narrow == torch.bool:
            return self._booleans()
        narrow = self._narrow_integers()
        return narrow.to(self.dtype).sub_(self.shift)

    def _booleans(self) -> Tensor:
        raw = self._raw(-(-self.count // 8))
        bits = unpack_part(raw[None], 1)[0]
        return bits[: self.count].bool()

    def _narrow_integers(self) -> Tensor:
        item_bytes = _item_bytes(self.narrow)
        raw = self._raw(self.count * item_bytes)
        if self.codec is None:
            return raw.view(self.narrow)
        planes = raw.view(item_bytes, self.count)
        rows = planes.t().contiguous()
        return _undo_differences(rows.flatten().view(self.narrow))

    def _raw(self, num_bytes: int) -> Tensor:
        if self.codec is not None:
            codes = self.codec.decode(self.payload, num_bytes, self.device)
            return codes.view(torch.uint8)
        (raw,) = self.payload
        assert isinstance(raw, Tensor)
        return raw


@dataclasses.dataclass(frozen=True)
class TwoValues:
    """Floats of two values, such as the mask of dropout: which of them each is.

    Attributes:
        mask: Whether an element is the second one.
        values: (2,), both.
    """

    mask: Packed
    values: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that are held."""
        return self.mask.num_bytes + 2 * self.values.element_size()

    def decode(self) -> Tensor:
        """The (n,) elements."""
        return torch.where(self.mask.decode(), self.values[1], self.values[0])


@dataclasses.dataclass(frozen=True)
class Nonzero:
    """Floats without their zeros.

    Attributes:
        mask: Where the others are.
        values: (k,), those.
    """

    mask: Packed
    values: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that are held."""
        return self.mask.num_bytes + self.values.nbytes

    def decode(self) -> Tensor:
        """The (n,) elements."""
        flat = self.values.new_zeros(self.mask.count)
        flat[self.mask.decode()] = self.values
        return flat


def pack_nonzero(flat: Tensor, codec: Codec) -> Nonzero | None:
    """Floats with the zeros that ReLU and dropout have made as one bit each, exactly.

    Args:
        flat: (n,) contiguous floats.
        codec: If it is Zstandard, the bits go through it.

    Returns:
        ``None`` where a quarter or less are zeros; a sample tells most of those.
    """
    sample = flat[:: max(flat.numel() // _SAMPLE, 1)]
    if int(sample.count_nonzero()) > _MOST_NONZERO * sample.numel():
        return None
    # By bits, because -0.0 is another value than 0.0, and equal to it.
    taken = flat.view(_WORDS[flat.element_size()]) != 0
    values = flat[taken]
    if values.numel() > _MOST_NONZERO * flat.numel():
        return None
    squeeze = codec if codec.name in ("zstd", "predicted") else None
    packed = Nonzero(_pack_booleans(taken, squeeze), values)
    return packed if packed.num_bytes < flat.nbytes else None


def pack_exactly(flat: Tensor, codec: Codec) -> Packed | TwoValues | None:
    """Packs booleans eight to a byte, integers by their range, floats if there are two of them.

    Args:
        flat: (n,) contiguous.
        codec: If it is Zstandard, the bytes go through it, too.

    Returns:
        ``None`` for other types, and where nothing would be saved.
    """
    squeeze = codec if codec.name in ("zstd", "predicted") else None
    if flat.dtype == torch.bool:
        return _pack_booleans(flat, squeeze)
    if flat.dtype.is_floating_point:
        return _pack_two_values(flat, squeeze)
    if flat.dtype in _INTEGERS and flat.numel() > 0:
        return _pack_integers(flat, squeeze)
    return None


def _pack_booleans(flat: Tensor, codec: Codec | None) -> Packed:
    padding = -flat.numel() % 8
    padded = torch.nn.functional.pad(flat.view(torch.uint8), (0, padding))
    bits = pack_part(padded[None], 1)[0]
    return _packed(flat, bits, torch.bool, 0, codec)


def _pack_integers(flat: Tensor, codec: Codec | None) -> Packed | None:
    low = int(flat.min())
    span = int(flat.max()) - low
    for narrow, least in _NARROW:
        item_bytes = _item_bytes(narrow)
        fits = span < 2 ** (8 * item_bytes)
        if not fits or item_bytes >= flat.element_size():
            continue
        shift = least - low
        raw = (flat.to(torch.int64) + shift).to(narrow)
        if codec is not None:
            raw = _planes(_differences(raw), item_bytes)
        return _packed(flat, raw.view(torch.uint8), narrow, shift, codec)
    return None


def _pack_two_values(flat: Tensor, codec: Codec | None) -> TwoValues | None:
    """Floats of two values; a sample tells most others apart."""
    if flat.numel() < _SAMPLE:
        return None
    sample = flat[:: flat.numel() // _SAMPLE]
    if torch.unique(sample).numel() > 2:
        return None
    is_second = flat != flat[0]
    others = flat[is_second]
    if others.numel() == 0 or not bool((others == others[0]).all()):
        return None
    negative_zeros = flat.signbit() & (flat == 0)
    if bool(negative_zeros.any()):
        return None  # equal to 0.0, but other bytes
    values = torch.stack([flat[0], others[0]])
    return TwoValues(_pack_booleans(is_second, codec), values)


def _packed(
    flat: Tensor,
    raw: Tensor,
    narrow: torch.dtype,
    shift: int,
    codec: Codec | None,
) -> Packed:
    payload = (raw,) if codec is None else codec.encode(raw.view(torch.int8))
    return Packed(
        payload,
        flat.numel(),
        flat.dtype,
        narrow,
        shift,
        codec,
        flat.device,
    )


def _item_bytes(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


def _differences(small: Tensor) -> Tensor:
    """Each element minus the one before, modulo the type: neighbours in a pool are close."""
    out = small.clone()
    out[1:] -= small[:-1]
    return out


def _undo_differences(differences: Tensor) -> Tensor:
    return differences.cumsum(0, dtype=differences.dtype)


def _planes(small: Tensor, item_bytes: int) -> Tensor:
    """All first bytes, then all second bytes: high bytes are nearly always 0 or 255."""
    rows = small.view(torch.uint8).view(-1, item_bytes)
    return rows.t().contiguous().flatten()
