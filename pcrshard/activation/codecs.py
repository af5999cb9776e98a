"""Lossless coding of one-byte codes, masks, indices, and sparse floats.

Max-pooling saves an int64 index per output, a fifth of all saved bytes in a network without batch
normalization; dropout saves booleans or, on a CPU, floats with two distinct values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .. import zstd
from . import bits
from .blocks import blocks_of, fused, has_core, share

# ``int8`` stores codes unchanged, and ``bits`` each block of 64 in its bit width, on any device.
# ``zstd`` compresses on the CPU. ``none`` disables compression.
# ``auto`` is ``zstd`` on a CPU and ``bits`` elsewhere.
CodecName = Literal["auto", "zstd", "bits", "int8", "none"]

# In order of increasing range.
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
_LOWEST = -128
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


def encode_codes(codes: Tensor, codec: CodecName) -> Content:
    """Encode (n,) int8 codes; they are decoded onto their device."""
    if codec == "zstd":
        return _compress(codes)
    if codec == "bits":
        planes, head = bits.pack_planes(codes)
        count = codes.numel()
        return Content(planes.nbytes + head.nbytes, lambda: bits.unpack_planes(planes, head, count))
    return Content(codes.nbytes, lambda: codes)


def _compress(codes: Tensor) -> Content:
    device = codes.device
    raw = codes.cpu().numpy()
    parts = blocks_of(len(raw))
    frames = share(lambda part: zstd.compress(raw[part], zstd.CODES), parts)
    count = len(raw)

    def decompress() -> Tensor:
        found = np.empty(count, np.int8)

        def work(item: tuple[slice, bytes]) -> None:
            part, frame = item
            found[part] = np.frombuffer(zstd.decompress(frame, len(found[part])), np.int8)

        share(work, list(zip(parts, frames, strict=True)))
        return torch.from_numpy(found).to(device)

    return Content(sum(map(len, frames)), decompress)


def pack_exactly(flat: Tensor, codec: CodecName) -> Content | None:
    """Pack booleans eight to a byte, integers by their range, floats without their zeros.

    Args:
        flat: (n,) elements.
        codec: If this is Zstandard, the bytes are also compressed with it.

    Returns:
        The packed tensor; ``None`` for other types or if packing would save nothing.
    """
    if codec == "bits":
        codec = "int8"
    if flat.dtype == torch.bool:
        return _pack_booleans(flat, codec)
    if flat.dtype.is_floating_point:
        # On an accelerator, counting would wait for it, and dropout saves booleans.
        return _pack_nonzero(flat, codec) if has_core(flat.device) else None
    if flat.dtype in _WORDS.values() and flat.numel() > 0:
        return _pack_integers(flat, codec)
    return None


def _pack_booleans(flat: Tensor, codec: CodecName) -> Content:
    count, device = flat.numel(), flat.device
    packed = encode_codes(fused(bits.pack_booleans, device)(flat).view(torch.int8), codec)

    def decode() -> Tensor:
        return fused(bits.unpack_booleans, device)(packed.decode().view(torch.uint8))[:count]

    return Content(packed.num_bytes, decode)


def _pack_nonzero(flat: Tensor, codec: CodecName) -> Content | None:
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


def _pack_integers(flat: Tensor, codec: CodecName) -> Content | None:
    low, high = (int(end) for end in flat.aminmax())
    narrow = next(each for each in _INTEGERS if high - low < 2 ** (8 * each.itemsize))
    width = narrow.itemsize
    if width >= flat.element_size():
        return None
    dtype = flat.dtype
    shift = torch.iinfo(narrow).min - low
    raw = (flat.to(torch.int64) + shift).to(narrow)
    if codec == "zstd":
        # Neighboring pools have close indices: nearly all differences are in the range of one byte.
        # Shifted to begin at 0, they leave all other bytes 0.
        raw[1:] -= raw[:-1].clone()
        raw = raw.sub_(_LOWEST).view(torch.int8).view(-1, width).t().contiguous()
    packed = encode_codes(raw.view(torch.int8).flatten(), codec)

    def decode() -> Tensor:
        found = packed.decode()
        if codec == "zstd":
            steps = found.view(width, -1).t().contiguous().view(narrow)
            found = steps.flatten().add_(_LOWEST).cumsum(0, dtype=narrow)
        return found.view(narrow).to(dtype).sub_(shift)

    return Content(packed.num_bytes, decode)
