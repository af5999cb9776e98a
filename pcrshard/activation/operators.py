"""Packing and unpacking as operators that compilers do not look into.

Each has a size that depends on shapes only. A compiler that saw the operations inside of them, some
fifty for each tensor, would take several times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errorbound import Absolute, RelativeStd
from .bits import pack_booleans, unpack_booleans
from .blocks import fused
from .fixed_size import Width, pack, pack_normalized, sizes_of, unpack, unpack_normalized
from .layout import flatten, unflatten
from .pooling import Windows, index_of, num_bytes_of, places_of

# Keeps constant rows finite.
_LEAST_DEVIATION = 1e-20
_Ints = Sequence[int]


def _operator(schema: str, like: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make an operator of a function.

    Args:
        schema: Its arguments and results.
        like: Takes the same arguments, and returns tensors like the results.
    """

    def wrap(function: Callable[..., Any]) -> Any:
        name = f"pcrshard::{function.__name__.lstrip('_')}"
        made = torch.library.custom_op(name, function, mutates_args=(), schema=schema)
        made.register_fake(like)
        return made

    return wrap


def _empty(like: Tensor, shape: _Ints, order: _Ints, dtype: torch.dtype) -> Tensor:
    flat = like.new_empty(math.prod(shape), dtype=dtype)
    return unflatten(flat, shape, tuple(order))


def pack_floats(
    values: Tensor,
    order: tuple[int, ...],
    dims: Sequence[int],
    width: Width,
    bound: RelativeStd | Absolute,
) -> tuple[Tensor, ...]:
    """Pack floats, the inputs of normalizations by statistics of their channels or rows.

    Args:
        values: float32, bfloat16 or float16.
        order: Dimensions by decreasing stride.
        dims: The dimensions over which an operation normalizes them; none if it does not.
        width: The width of the codes.
        bound: Largest absolute error, in standard deviations of what is normalized.

    Returns:
        What :func:`.fixed_size.pack` returns; or what :func:`.fixed_size.pack_normalized` does, and
        mean and deviation of what is normalized.
    """
    is_relative = isinstance(bound, RelativeStd)
    limit = bound.fraction if isinstance(bound, RelativeStd) else bound.error_bound
    guard = bound.outlier_guard if is_relative else 0.0
    return tuple(_pack_floats(values, order, list(dims), *width, limit, guard))


def _like_packed_floats(
    values: Tensor, _: _Ints, dims: _Ints, bits: int, is_signed: bool, *_others: float
) -> list[Tensor]:
    sizes = sizes_of(values.numel(), Width(bits, is_signed))
    shape = [1 if dim in dims else size for dim, size in enumerate(values.shape)]
    sizes += [(shape, torch.float32)] * 2 if dims else [([4], torch.float32)]
    return [values.new_empty(size, dtype=kind) for size, kind in sizes]


@_operator(
    "(Tensor values, int[] order, int[] dims, int bits, bool is_signed, float limit, float guard)"
    " -> Tensor[]",
    _like_packed_floats,
)
def _pack_floats(
    values: Tensor,
    order: _Ints,
    dims: _Ints,
    bits: int,
    is_signed: bool,
    limit: float,
    guard: float,
) -> list[Tensor]:
    width = Width(bits, is_signed)
    if not dims:
        bound = RelativeStd(limit, guard) if guard else Absolute(limit)
        return list(fused(pack, values.device, width, bound)(flatten(values, tuple(order))))
    variance, mean = torch.var_mean(values.float(), list(dims), correction=0, keepdim=True)
    deviation = variance.sqrt().clamp(min=_LEAST_DEVIATION)
    lines = mean.permute(*order), (1 / deviation).permute(*order)
    how = fused(pack_normalized, values.device, width, limit)
    return [*how(values.permute(*order), *lines), mean, deviation]


def unpack_floats(
    parts: Sequence[Tensor],
    shape: _Ints,
    order: tuple[int, ...],
    dtype: torch.dtype,
    width: Width,
    bound: RelativeStd | Absolute,
) -> Tensor:
    """Invert :func:`pack_floats`."""
    limit = bound.absolute(1.0)
    found: Tensor = _unpack_floats(list(parts), shape, order, dtype, *width, limit)
    return found


@_operator(
    "(Tensor[] parts, SymInt[] shape, int[] order, ScalarType dtype, int bits, bool is_signed,"
    " float limit) -> Tensor",
    lambda parts, shape, order, dtype, *_: _empty(parts[0], shape, order, dtype),
)
def _unpack_floats(
    parts: list[Tensor],
    shape: _Ints,
    order: _Ints,
    dtype: torch.dtype,
    bits: int,
    is_signed: bool,
    limit: float,
) -> Tensor:
    width, device = Width(bits, is_signed), parts[0].device
    if len(parts) == 3:
        flat = fused(unpack, device, width, dtype)(*parts)[: math.prod(shape)]
    else:
        codes, doublings, mean, deviation = parts
        lines = deviation.permute(*order), mean.permute(*order)
        how = fused(unpack_normalized, device, width, limit, dtype, False)
        flat = how(codes, doublings, *lines, [shape[dim] for dim in order]).flatten()
    return unflatten(flat, shape, tuple(order))


def pack_mask(mask: Tensor, order: tuple[int, ...]) -> Tensor:
    """Pack booleans eight to a byte, in the order of memory."""
    found: Tensor = _pack_mask(mask, order)
    return found


@_operator(
    "(Tensor mask, int[] order) -> Tensor",
    lambda mask, _: mask.new_empty((mask.numel() + 7) // 8, dtype=torch.uint8),
)
def _pack_mask(mask: Tensor, order: _Ints) -> Tensor:
    return pack_booleans(flatten(mask, tuple(order)))


def unpack_mask(packed: Tensor, shape: _Ints, order: tuple[int, ...]) -> Tensor:
    """Invert :func:`pack_mask`."""
    found: Tensor = _unpack_mask(packed, shape, order)
    return found


@_operator(
    "(Tensor packed, SymInt[] shape, int[] order) -> Tensor",
    lambda packed, shape, order: _empty(packed, shape, order, torch.bool),
)
def _unpack_mask(packed: Tensor, shape: _Ints, order: _Ints) -> Tensor:
    return unflatten(unpack_booleans(packed)[: math.prod(shape)], shape, tuple(order))


def pack_index(index: Tensor, order: tuple[int, ...], windows: Windows) -> Tensor:
    """Pack the indices of a max-pooling as places in its windows."""
    found: Tensor = _pack_index(index, order, *windows)
    return found


@_operator(
    "(Tensor index, int[] order, SymInt[] sizes, int[] kernel, int[] stride, int[] padding,"
    " int[] dilation) -> Tensor",
    lambda index, _, *windows: index.new_empty(
        num_bytes_of(index.numel(), Windows(*windows)), dtype=torch.uint8
    ),
)
def _pack_index(index: Tensor, order: _Ints, *windows: tuple[int, ...]) -> Tensor:
    return places_of(index, tuple(order), Windows(*windows))


def unpack_index(places: Tensor, shape: _Ints, order: tuple[int, ...], windows: Windows) -> Tensor:
    """Invert :func:`pack_index`."""
    found: Tensor = _unpack_index(places, shape, order, *windows)
    return found


@_operator(
    "(Tensor places, SymInt[] shape, int[] order, SymInt[] sizes, int[] kernel, int[] stride,"
    " int[] padding, int[] dilation) -> Tensor",
    lambda places, shape, order, *_: _empty(places, shape, order, torch.int64),
)
def _unpack_index(places: Tensor, shape: _Ints, order: _Ints, *windows: tuple[int, ...]) -> Tensor:
    return index_of(places, shape, tuple(order), Windows(*windows))
