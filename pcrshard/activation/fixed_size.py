"""Pack floats in a size that depends only on their number: in compiled graphs, on accelerators.

A compiled graph has fixed shapes, and an accelerator would have to wait for the host to learn how
many values have no code. So each block of 64 values doubles its step until all of them have one.
What a normalization reads has a step that is known before: PyTorch's compiler makes one kernel of
its packing, and one of whatever is computed from the codes.
"""

from __future__ import annotations

import math
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
# Of the number of blocks in the sample for the standard deviation.
_LOG_SAMPLED = 9
# Range of the codes of ``bits``, in standard deviations.
_REACH = 6.0
# Smaller steps would round values to 0, and so change their signs.
_LEAST = {torch.float16: 2.0**-23}
_LEAST_OF_OTHERS = 2.0**-120
# How often a block's step is doubled, if it has a NaN: all of its values become NaN.
_HAS_NAN = 255
# So that the quotient of a logarithm's rounding error still has a code.
_ROUNDING = 2.0**-16
NONNEGATIVE = {"relu", "sigmoid"}


class Width(NamedTuple):
    """The number of bits per code, and whether one of them is the sign."""

    bits: int
    is_signed: bool

    @property
    def largest(self) -> int:
        """The largest code."""
        return min(EXTREME, (1 << self.bits - self.is_signed) - 1)


BYTE = Width(8, True)


def width_of(bound: RelativeStd | Absolute, function: str) -> Width:
    """Return the width that codes of a function's results need, for the codec ``bits``."""
    if isinstance(bound, Absolute):
        return BYTE
    is_signed = function not in NONNEGATIVE
    codes = int(_REACH / (2 * bound.fraction)) + 2
    bits = codes.bit_length() + is_signed
    return Width(bits, is_signed) if bits < BYTE.bits else BYTE


def pack(
    width: Width, bound: RelativeStd | Absolute, flat: Tensor, target: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Pack float32, bfloat16 or float16 values without a transfer to the host.

    Args:
        width: The width of the codes.
        bound: Largest absolute error in blocks without values beyond the codes.
        flat: (n,) values.
        target: An error bound that replaces it, at most a quarter of the standard deviation.

    Returns:
        The codes or their bit planes; how often each block's step is doubled; and the step, the
        standard deviation, the least and the largest value.
    """
    blocks = _in_blocks(flat)
    most = width.largest - 1
    std, least = _deviation(blocks, bound.outlier_guard)
    limit = torch.zeros_like(std) + bound.absolute(std)
    if target is not None:
        limit = torch.minimum(target, LARGEST_FRACTION * std)
    # The step that restores equal values exactly.
    step = torch.where(limit > 0, limit * (1 - MARGIN), least / (2 * most - 1))
    step = step.clamp(min=_LEAST.get(blocks.dtype, _LEAST_OF_OTHERS))
    values = blocks.float()
    low = torch.where(values.isnan(), torch.inf, values).amin()
    high = torch.where(values.isnan(), -torch.inf, values).amax()
    # The extremes, which may be infinite, have codes of their own.
    is_high = (values == high) & (high != 0)
    is_low = (values == low) & (low != 0) & width.is_signed
    codes, doublings = _to_codes(most, step, torch.where(is_high | is_low, 0, values))
    codes = torch.where(is_high, width.largest, codes)
    codes = torch.where(is_low, -width.largest, codes)
    return _planes(width, codes), doublings, torch.stack([step, std, low, high])


def unpack(
    width: Width, dtype: torch.dtype, codes: Tensor, doublings: Tensor, figures: Tensor
) -> Tensor:
    """Return the values, followed by zeros up to a multiple of a block."""
    code = _codes(width, codes)
    values = _from_codes(code, doublings, figures[0]).to(dtype)
    low, high = figures[2].to(dtype), figures[3].to(dtype)
    # All others lie between the extremes; 0 is only where it was.
    values = torch.minimum(torch.maximum(values, inner(low, 1)), inner(high, -1))
    values = torch.where(code == 0, torch.where(values.isnan(), values, 0), values)
    values = torch.where(code == width.largest, high, values)
    if width.is_signed:
        values = torch.where(code == -width.largest, low, values)
    return values.flatten()


def pack_normalized(
    width: Width, fraction: float, values: Tensor, center: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Pack the input of a normalization: ``(values - center) * rstd`` with a constant step.

    Args:
        width: The width of the codes.
        fraction: The bound, in standard deviations of what is normalized.
        values: The input, with its dimensions in the order of memory.
        center: What has code 0; broadcasts to it, as the next.
        rstd: The reciprocal of the standard deviation.

    Returns:
        The codes or their bit planes; and how often each block's step is doubled.
    """
    flat = ((values.float() - center) * rstd).flatten()
    codes, doublings = _to_codes(width.largest, fraction * (1 - MARGIN), _in_blocks(flat))
    return _planes(width, codes), doublings


def unpack_normalized(
    width: Width,
    fraction: float,
    dtype: torch.dtype,
    is_relu: bool,
    codes: Tensor,
    doublings: Tensor,
    gain: Tensor,
    offset: Tensor,
    shape: Sequence[int],
) -> Tensor:
    """Return ``d * gain + offset`` of the normalized values d.

    Args:
        width: The width of the codes.
        fraction: The bound.
        dtype: Type of the results.
        is_relu: Whether negative ones become 0.
        codes: The codes or their bit planes.
        doublings: How often each block's step is doubled.
        gain: Broadcasts to the results, as the next.
        offset: What d = 0 becomes.
        shape: That of the results, in the order of memory.
    """
    blocks = _from_codes(_codes(width, codes), doublings, fraction * (1 - MARGIN))
    values = blocks.flatten()[: math.prod(shape)].view(shape) * gain + offset
    return (values.relu() if is_relu else values).to(dtype)


def sizes_of(count: int, width: Width) -> list[tuple[Sequence[int], torch.dtype]]:
    """Return shape and type of what :func:`pack_normalized` makes of some number of values."""
    blocks = (count + BLOCK - 1) // BLOCK
    if width.bits == BYTE.bits:
        return [((blocks * BLOCK,), torch.int8), ((blocks,), torch.uint8)]
    return [((8 * blocks, width.bits), torch.uint8), ((blocks,), torch.uint8)]


def _in_blocks(flat: Tensor) -> Tensor:
    """Return (n,) values as (blocks, 64), padded by zeros."""
    return functional.pad(flat, (0, -flat.shape[0] % BLOCK)).view(-1, BLOCK)


def _to_codes(most: int, step: Tensor | float, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return (blocks, 64) codes from -most to most; and how often each block's step is doubled."""
    largest = blocks.abs().amax(1)
    needed = (largest.log2() - _log2(2 * most * step) + _ROUNDING).ceil().clamp(min=0)
    doublings = torch.where(largest.isfinite(), needed, _HAS_NAN).to(torch.uint8)
    code = nearest_codes(blocks, _doubled(step, doublings)).clamp(max=most).copysign(blocks)
    return code.nan_to_num(0).to(torch.int8), doublings


def _from_codes(code: Tensor, doublings: Tensor, step: Tensor | float) -> Tensor:
    """Return the (blocks, 64) values of codes, NaN in blocks that had one."""
    values = (2 * code - code.sign()) * _doubled(step, doublings)
    return torch.where((doublings == _HAS_NAN)[:, None], torch.nan, values)


def _doubled(step: Tensor | float, doublings: Tensor) -> Tensor:
    """Return the (blocks, 1) steps of blocks; in two factors, because one would overflow."""
    half = doublings.float()[:, None].clamp(max=254) / 2
    return step * half.floor().exp2() * half.ceil().exp2()


def _log2(number: Tensor | float) -> Tensor | float:
    return number.log2() if isinstance(number, Tensor) else math.log2(number)


def _planes(width: Width, codes: Tensor) -> Tensor:
    """Return codes as they are stored."""
    if width.bits == BYTE.bits:
        return codes.flatten()
    # Byte 0 of eight holds the signs.
    return to_bits(codes.flatten())[:, 1 - width.is_signed :][:, : width.bits].clone()


def _codes(width: Width, stored: Tensor) -> Tensor:
    """Return (blocks, 64) codes as floats."""
    if width.bits < BYTE.bits:
        bits = (1 - width.is_signed, 7 + width.is_signed - width.bits)
        stored = from_bits(functional.pad(stored, bits).flatten())
    return stored.view(-1, BLOCK).float()


def _deviation(blocks: Tensor, outlier_guard: float) -> tuple[Tensor, Tensor]:
    """Estimate as :func:`.quantizer.standard_deviation` does, in a pass over a sample.

    Samples 512 blocks, not quite evenly spaced, to avoid aliasing with sizes of the tensor. Instead
    of the median of magnitudes, which needs sorting, uses the square of the mean root, which is
    the same for a normal distribution; geometrically over the blocks, so that a value near
    the end of the type's range in some does not hide all others.

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
    totals, squares, roots, counts, nonzero = (each.sum(1) for each in sums)
    count = counts.sum().clamp(min=1)
    std = (squares.sum() / count - (totals.sum() / count).square()).clamp(min=0).sqrt()
    has_any = nonzero > 0
    logs = torch.where(has_any, roots / nonzero.clamp(min=1), 1).log()
    typical = (2 * logs.sum() / has_any.sum().clamp(min=1)).exp()
    std = torch.minimum(std, typical * (outlier_guard / MEDIAN_OF_NORMAL))
    return std.float(), values.abs().amax(1).amax().float()
