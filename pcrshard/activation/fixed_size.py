"""Pack floats in a size that depends only on their number: in compiled graphs, on accelerators.

A compiled graph has fixed shapes, and an accelerator would have to wait for the host to learn how
many values have no code. So a fixed fraction of the blocks is stored exactly: those with values
beyond the codes' range. If more blocks need it, the tensor's step grows until they fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..errorbound import MEDIAN_OF_NORMAL, Absolute, RelativeStd
from .bits import from_bits, to_bits
from .noise import LARGEST_FRACTION
from .quantizer import EXTREME, MARGIN, inner, nearest_codes

BLOCK = 64
_ROW = 64
# Of the number of blocks in the sample for the standard deviation.
_LOG_SAMPLED = 9
# One block in this many is stored exactly.
_BLOCKS_PER_EXACT = 128
# Range of the codes of ``bits``, in standard deviations.
_REACH = 6.0
# Smaller steps would round values to 0, and so change their signs.
_LEAST = {torch.float16: 2.0**-23}
_LEAST_OF_OTHERS = 2.0**-120
# The number of factors by which the step may have to grow.
_LEVELS = 96
NONNEGATIVE = {"relu", "sigmoid"}


class Width(NamedTuple):
    """The number of bits per code, and whether one of them is the sign."""

    bits: int
    is_signed: bool


BYTE = Width(8, True)


def width_of(bound: RelativeStd | Absolute, function: str) -> Width:
    """Return the width that codes of a function's results need, for the codec ``bits``."""
    if isinstance(bound, Absolute):
        return BYTE
    is_signed = function not in NONNEGATIVE
    codes = int(_REACH / (2 * bound.fraction)) + 2
    bits = codes.bit_length() + is_signed
    return Width(bits, is_signed) if bits < BYTE.bits else BYTE


def _own_code(width: Width) -> int:
    """Return the code of the largest value, the largest that there is."""
    return min(EXTREME, (1 << width.bits - width.is_signed) - 1)


def in_blocks(flat: Tensor) -> Tensor:
    """Return (n,) values as (blocks, 64), a copy padded by zeros."""
    return functional.pad(flat, (0, -flat.shape[0] % BLOCK)).view(-1, BLOCK)


def pack(
    width: Width, bound: RelativeStd | Absolute, blocks: Tensor, target: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pack float32, bfloat16 or float16 values without a transfer to the host.

    Args:
        width: The width of the codes.
        bound: Largest absolute error, unless the step has to grow.
        blocks: (blocks, 64) values.
        target: An error bound that replaces it, at most a quarter of the standard deviation.

    Returns:
        The codes or their bit planes; the step, the standard deviation, the least and the largest
        value; indices of exact blocks; and these blocks.
    """
    own = _own_code(width)
    most = own - 1
    std, least = _deviation(blocks, bound.outlier_guard)
    limit = torch.zeros_like(std) + bound.absolute(std)
    if target is not None:
        limit = torch.minimum(target, LARGEST_FRACTION * std)
    # The step that restores equal values exactly.
    least = torch.where(limit > 0, limit * (1 - MARGIN), least / (2 * most - 1))
    least = least.clamp(min=_LEAST.get(blocks.dtype, _LEAST_OF_OTHERS))
    low, high = blocks.amin(1).float(), blocks.amax(1).float()
    largest = torch.maximum(-low, high)
    low = torch.where(largest.isfinite(), low, torch.inf).amin()
    high = torch.where(largest.isfinite(), high, -torch.inf).amax()
    needed = _level_of(largest.log2() - (2 * most * least).log2()).ceil().clamp(0, _LEVELS - 1)
    needed = torch.where(largest.isfinite(), needed, _LEVELS).to(torch.int32)
    count = blocks.shape[0] // _BLOCKS_PER_EXACT + 1
    # Sums and scans in two stages, the first of them in parallel.
    rows = functional.pad(needed, (0, -needed.shape[0] % _ROW)).view(-1, _ROW)
    levels = torch.arange(_LEVELS, device=blocks.device, dtype=torch.int32)
    beyond = (rows[:, :, None] > levels).sum(1, dtype=torch.int32).sum(0)
    level = (beyond > count).sum()
    root = (_exponent_of(level) / 2).exp2()
    # If more blocks contain NaN or infinity than can be exact, the whole tensor becomes NaN.
    step = torch.where(level < _LEVELS, least * root * root, torch.nan)
    in_row = (rows > level).cumsum(1, dtype=torch.int32)
    totals = in_row[:, -1]
    before = totals.cumsum(0, dtype=torch.int32) - totals
    # Not a view: PyTorch 2.11 cannot search one.
    seen = in_row.flatten() + before[torch.arange(rows.numel(), device=blocks.device) // _ROW]
    ordinals = torch.arange(1, count + 1, dtype=torch.int32, device=blocks.device)
    exact = torch.searchsorted(seen, ordinals).clamp(max=blocks.shape[0] - 1)
    values = blocks.float()
    code = nearest_codes(values, step).clamp(max=most).copysign(values)
    code = torch.where((values == high) & (high != 0), own, code)
    if width.is_signed:
        code = torch.where((values == low) & (low != 0), -own, code)
    # NaN has no integer value; its block is exact.
    codes = code.nan_to_num(0).to(torch.int8).flatten()
    if width.bits < BYTE.bits:
        # Byte 0 of eight holds the signs.
        codes = to_bits(codes)[:, 1 - width.is_signed :][:, : width.bits].clone()
    figures = torch.stack([step, std, low, high])
    return codes, figures, exact.to(torch.int32), blocks[exact]


def sizes_of(
    count: int, width: Width, dtype: torch.dtype
) -> list[tuple[Sequence[int], torch.dtype]]:
    """Return shape and type of each tensor that :func:`pack` makes of some values of a type."""
    blocks = (count + BLOCK - 1) // BLOCK
    exact = blocks // _BLOCKS_PER_EXACT + 1
    is_byte = width.bits == BYTE.bits
    codes = ((blocks * BLOCK,), torch.int8) if is_byte else ((8 * blocks, width.bits), torch.uint8)
    return [codes, ((4,), torch.float32), ((exact,), torch.int32), ((exact, BLOCK), dtype)]


def unpack(width: Width, codes: Tensor, figures: Tensor, exact: Tensor, kept: Tensor) -> Tensor:
    """Return the values, followed by zeros up to a multiple of a block."""
    if width.bits < BYTE.bits:
        bits = (1 - width.is_signed, 7 + width.is_signed - width.bits)
        codes = from_bits(functional.pad(codes, bits).flatten())
    code = codes.view(-1, BLOCK).float()
    values = ((2 * code - code.sign()) * figures[0]).to(kept.dtype)
    low, high = figures[2].to(kept.dtype), figures[3].to(kept.dtype)
    # All others lie between the extremes; 0 is only where it was.
    values = torch.minimum(torch.maximum(values, inner(low, 1)), inner(high, -1))
    values = torch.where(code == 0, torch.zeros_like(values), values)
    own = _own_code(width)
    values = torch.where(code == own, high, values)
    if width.is_signed:
        values = torch.where(code == -own, low, values)
    return values.index_copy(0, exact.long(), kept).flatten()


def _exponent_of(level: Tensor) -> Tensor:
    """Return the logarithm of a factor by its number: factors are dense up to 4, to 2**34, beyond.

    >>> _exponent_of(torch.tensor([0, 8, 16, 17, 48, 49, 95])).tolist()
    [0.0, 1.0, 2.0, 3.0, 34.0, 38.0, 222.0]
    """
    return torch.maximum(level / 8, torch.maximum(level - 14, 4 * level - 158))


def _level_of(exponent: Tensor) -> Tensor:
    """Invert :func:`_exponent_of`."""
    return torch.minimum(8 * exponent, torch.minimum(exponent + 14, (exponent + 158) / 4))


def _deviation(blocks: Tensor, outlier_guard: float) -> tuple[Tensor, Tensor]:
    """Estimate as :func:`.quantizer.standard_deviation` does, in a pass over a sample.

    Samples 512 blocks, not quite evenly spaced, to avoid aliasing with sizes of the tensor. Instead
    of the median of magnitudes, which needs sorting, uses the square of the mean root, which is
    also robust, and the same for a normal distribution.

    Returns:
        The standard deviation, 0 if no value is finite; and the largest magnitude in the sample.
    """
    number = blocks.shape[0]
    order = torch.arange(1 << _LOG_SAMPLED, device=blocks.device)
    jitter = (order & 63).clamp(max=number >> _LOG_SAMPLED)
    sample = blocks[((order * number >> _LOG_SAMPLED) + jitter).clamp(max=number - 1)]
    is_finite = sample.isfinite()
    # One pass over squares needs the precision, and they may overflow; Apple's GPUs lack it.
    wide = torch.float32 if blocks.device.type == "mps" else torch.float64
    values = torch.where(is_finite, sample, 0).to(wide)
    flags = is_finite.to(wide), (values != 0).to(wide)
    sums = values, values.square(), values.abs().sqrt(), *flags
    total, squares, roots, count, nonzero = (each.sum(1).sum() for each in sums)
    count = count.clamp(min=1)
    std = (squares / count - (total / count).square()).clamp(min=0).sqrt()
    typical = (roots / nonzero.clamp(min=1)).square()
    std = torch.minimum(std, typical * (outlier_guard / MEDIAN_OF_NORMAL))
    return std.float(), values.abs().amax(1).amax().float()
