"""Codes of a normalization's input, by the statistics that the normalization saves anyway.

They are those of ``d = (x - mean) * rstd - threshold``, with a step that is the same for each
channel or row: each keeps as many digits as the others, however small its deviation. A bound for
the whole tensor would erase rows of a small deviation, such as the class token of a new
transformer, and their gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..native import fused_quantizer as native
from .blocks import empty_floats, fused, team
from .codecs import CodecName, Content, encode_codes
from .consumers import Norm
from .fixed_size import Width, pack_normalized, unpack_normalized
from .layout import MemoryLayout, unflatten
from .quantizer import MARGIN, NATIVE_TYPES, SignExactLattice, with_escapes


class Lines(NamedTuple):
    """How statistics apply to a tensor in memory.

    Attributes:
        order: The order of dimensions in which rows are contiguous.
        run: Elements of a row.
        period: Row r has line r % period; 0 for a line for each element of a row.
    """

    order: tuple[int, ...]
    run: int
    period: int


def lines_of(layout: MemoryLayout, varies: tuple[bool, ...]) -> Lines:
    """Return how statistics that vary along some dimensions apply to a tensor.

    >>> lines_of(MemoryLayout((20, 3, 4, 5), (0, 1, 2, 3), ()), (False, True, False, False))
    Lines(order=(0, 1, 2, 3), run=20, period=3)
    >>> lines_of(MemoryLayout((20, 3, 4, 5), (0, 2, 3, 1), ()), (False, True, False, False))
    Lines(order=(0, 2, 3, 1), run=3, period=0)
    >>> lines_of(MemoryLayout((20, 3, 4, 5), (0, 2, 3, 1), ()), (True, True, False, False))
    Lines(order=(0, 1, 2, 3), run=20, period=60)
    """
    dims = [dim for dim in layout.order if layout.shape[dim] > 1]
    flags = [varies[dim] for dim in dims]
    sizes = [layout.shape[dim] for dim in dims]
    if not any(flags):
        return Lines(layout.order, max(math.prod(sizes), 1), 1)
    first, last = flags.index(True), len(flags) - flags[::-1].index(True)
    if not all(flags[first:last]):
        order = tuple(range(len(layout.shape)))
        return lines_of(MemoryLayout(layout.shape, order, ()), varies)
    if last < len(flags):
        return Lines(layout.order, math.prod(sizes[last:]), math.prod(sizes[first:last]))
    return Lines(layout.order, math.prod(sizes[first:]), 0)


@dataclasses.dataclass(frozen=True, eq=False)
class Normalized(Content):
    """A coded tensor, and what can be derived from its codes.

    Attributes:
        derive: Returns the (n,) values of ``d * gain + offset`` as a type, without negative ones if
            asked. Gain and offset have the same shape, which broadcasts to the tensor's.
        norm: The statistics.
        layout: The layout of the tensor, and the order of the values.
    """

    derive: Callable[[Tensor, Tensor, torch.dtype, bool], Tensor]
    norm: Norm
    layout: MemoryLayout


def encode(
    tensor: Tensor, layout: MemoryLayout, norm: Norm, fraction: float, codec: CodecName
) -> Normalized | None:
    """Code a tensor on a CPU; return ``None`` if this would save nothing.

    Args:
        tensor: float32, bfloat16 or float16.
        layout: Its memory layout.
        norm: Its statistics.
        fraction: The bound, in standard deviations.
        codec: The lossless coder of codes.
    """
    rstd, center = norm.rstd.float(), norm.center()
    lattice = SignExactLattice(fraction * (1 - MARGIN), torch.float32)
    lines = lines_of(layout, _varies(rstd))
    source = tensor.float() if tensor.dtype == torch.float16 else tensor
    rows = source.permute(lines.order).reshape(-1, lines.run).contiguous()
    codes = torch.empty(rows.numel(), dtype=torch.int8)
    gains, offsets = _lines(lines, rstd, -center * rstd)
    affine = native.Affine(gains.data_ptr(), offsets.data_ptr(), lines.period)
    escapes = native.quantize(
        rows.data_ptr(), rows.numel(), NATIVE_TYPES[rows.dtype], lattice.step, codes.data_ptr(),
        rows=(lines.run, lines.run), affine=affine, team=team(),
    )  # fmt: skip
    quantized = with_escapes(codes, escapes, rows)
    if quantized is None:
        return None
    index, words = quantized.escape_index, quantized.escape_words
    packed = encode_codes(quantized.codes, codec)
    num_bytes = packed.num_bytes + index.nbytes + words.nbytes
    if num_bytes >= tensor.nbytes:
        return None
    sizes, order, dtype = layout.shape, lines.order, tensor.dtype
    table = lattice.table()

    def of_escapes(line: Tensor) -> Tensor:
        """Return what broadcasts to the tensor, where values are exact."""
        places = torch.unravel_index(index, [sizes[dim] for dim in order])
        return line.float().expand(sizes).permute(order)[places]

    def values(gain: Tensor, offset: Tensor, kind: torch.dtype, is_relu: bool) -> Tensor:
        found = packed.decode()
        there = lines_of(MemoryLayout(sizes, order, ()), _varies(gain))
        wide = torch.bfloat16 if kind == torch.bfloat16 else torch.float32
        out = empty_floats(len(found), wide)
        gains, offsets = _lines(there, gain.float(), offset.float())
        affine = native.Affine(gains.data_ptr(), offsets.data_ptr(), there.period, is_relu)
        native.dequantize(
            found.data_ptr(), len(found), table.data_ptr(), NATIVE_TYPES[wide], out.data_ptr(),
            run=there.run, affine=affine, team=team(),
        )  # fmt: skip
        return out.to(kind)

    def in_order(flat: Tensor) -> Tensor:
        if order == layout.order:
            return flat
        return unflatten(flat, sizes, order).permute(layout.order).reshape(-1)

    def decode() -> Tensor:
        out = values(1 / norm.rstd.float(), norm.center(), dtype, False)
        out[index] = words.to(dtype)
        return in_order(out)

    def derive(gain: Tensor, offset: Tensor, kind: torch.dtype, is_relu: bool) -> Tensor:
        out = values(gain, offset, kind, is_relu)
        d = (words.float() - of_escapes(norm.center())) * of_escapes(norm.rstd)
        exact = d * of_escapes(gain) + of_escapes(offset)
        out[index] = (exact.clamp(min=0) if is_relu else exact).to(kind)
        return in_order(out)

    return Normalized(num_bytes, decode, derive, norm, layout)


def encode_in_fixed_size(
    tensor: Tensor, layout: MemoryLayout, norm: Norm, fraction: float, width: Width
) -> Normalized:
    """Code a tensor on any device, without waiting for it."""
    order, device, dtype = layout.order, tensor.device, tensor.dtype
    lines = norm.center().permute(order), norm.rstd.float().permute(order)
    parts = fused(pack_normalized, device, width, fraction)(tensor.permute(order), *lines)
    shape = [layout.shape[dim] for dim in order]

    def derive(gain: Tensor, offset: Tensor, kind: torch.dtype, is_relu: bool) -> Tensor:
        lines = gain.float().permute(order), offset.float().permute(order)
        restored = fused(unpack_normalized, device, width, fraction, kind, is_relu)
        return restored(*parts, *lines, shape).flatten()

    def decode() -> Tensor:
        return derive(1 / norm.rstd.float(), norm.center(), dtype, False)

    return Normalized(sum(part.nbytes for part in parts), decode, derive, norm, layout)


def _varies(line: Tensor) -> tuple[bool, ...]:
    return tuple(size > 1 for size in line.shape)


def _lines(lines: Lines, gain: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Return contiguous gains and offsets in the order of memory."""
    first, second = (x.permute(lines.order).reshape(-1).contiguous() for x in (gain, offset))
    return first, second
