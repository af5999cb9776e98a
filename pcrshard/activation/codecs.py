"""Lossless coding of one-byte codes, masks, indices, and sparse floats.

Max-pooling saves an int64 index per output, a fifth of all saved bytes in a network without batch
normalization; dropout saves booleans or, on a CPU, floats with two distinct values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from .. import zstd
from . import bits

CodecName = Literal["zstd", "predicted", "bits", "int8", "none"]

# Integer types in order of increasing range, with their minimum values.
_NARROW = ((torch.uint8, 0), (torch.int16, -(2**15)), (torch.int32, -(2**31)))
_SAMPLE = 1024
# Store floats without their zeros if at most this fraction is nonzero.
_MOST_NONZERO = 0.75
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True, eq=False)
class Content:
    """A compressed flat tensor.

    Attributes:
        num_bytes: Size in memory, in bytes.
        decode: Returns the (n,) elements.
    """

    num_bytes: int
    decode: Callable[[], Tensor]


@dataclasses.dataclass(frozen=True)
class Codec:
    """A lossless coder of (n,) int8 codes and of raw bytes.

    Attributes:
        name: ``int8`` stores codes unchanged and ``bits`` packs each block of 64 to its bit width,
            both on any device. ``zstd`` and ``predicted`` compress on the CPU. ``none`` disables
            compression.

    Raises:
        ValueError: The codec name is unknown.
    """

    name: CodecName

    def __post_init__(self) -> None:
        if self.name not in get_args(CodecName):
            raise ValueError(f"expected a codec of {get_args(CodecName)}, got {self.name!r}")

    @property
    def is_zstd(self) -> bool:
        """Whether results are Zstandard frames."""
        return self.name in ("zstd", "predicted")

    def encode(self, codes: Tensor) -> Content:
        """Encode (n,) int8 codes; they are decoded onto their device."""
        count = codes.numel()
        device = codes.device
        if self.is_zstd:
            frame = zstd.compress_codes(codes.cpu().numpy())

            def decompress() -> Tensor:
                # Copied, because a tensor must not share the memory of an immutable object.
                found = np.frombuffer(zstd.decompress(frame, count), np.int8).copy()
                return torch.from_numpy(found).to(device)

            return Content(len(frame), decompress)
        if self.name == "bits":
            planes, head = bits.pack(codes)
            return Content(planes.nbytes + head.nbytes, lambda: bits.unpack(planes, head, count))
        return Content(codes.nbytes, lambda: codes)


def pack_exactly(flat: Tensor, codec: Codec) -> Content | None:
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
    if flat.dtype in _WORDS.values() and flat.numel() > 0:
        return _pack_integers(flat, codec)
    return None


def _pack_booleans(flat: Tensor, codec: Codec) -> Content:
    count = flat.numel()
    packed = codec.encode(bits.pack_booleans(flat).view(torch.int8))
    return Content(
        packed.num_bytes, lambda: bits.unpack_booleans(packed.decode().view(torch.uint8), count)
    )


def _pack_nonzero(flat: Tensor, codec: Codec) -> Content | None:
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
    mask = _pack_booleans(taken, codec)
    num_bytes = mask.num_bytes + values.nbytes
    if num_bytes >= _MOST_NONZERO * flat.nbytes:
        return None

    def decode() -> Tensor:
        places = mask.decode()
        found = values.new_zeros(places.shape)
        found[places] = values
        return found

    return Content(num_bytes, decode)


def _pack_integers(flat: Tensor, codec: Codec) -> Content | None:
    low, high = (int(end) for end in flat.aminmax())
    fitting = (narrow for narrow in _NARROW if high - low < 2 ** (8 * narrow[0].itemsize))
    narrow, least = next(fitting, (flat.dtype, 0))
    width = narrow.itemsize
    if width >= flat.element_size():
        return None
    dtype = flat.dtype
    shift = least - low
    raw = (flat.to(torch.int64) + shift).to(narrow)
    if codec.is_zstd:
        # Neighboring pools have close indices: high bytes of differences are mostly 0 or 255.
        raw[1:] -= raw[:-1].clone()
        raw = raw.view(torch.int8).view(-1, width).t().contiguous().flatten()
    packed = codec.encode(raw.view(torch.int8))

    def decode() -> Tensor:
        found = packed.decode()
        if codec.is_zstd:
            planes = found.view(width, -1).t().contiguous().flatten()
            found = planes.view(narrow).cumsum(0, dtype=narrow)
        return found.view(narrow).to(dtype).sub_(shift)

    return Content(packed.num_bytes, decode)
