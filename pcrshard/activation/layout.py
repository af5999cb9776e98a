"""Flatten tensors with any strides in memory order, and restore them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

# Shorter runs are copied together first.
_WORTH_A_ROW = 64


class MemoryLayout(NamedTuple):
    """The memory layout of a tensor.

    Attributes:
        shape: The tensor's shape.
        order: Dimensions by decreasing stride; the last one is contiguous.
        spans: Sizes and strides in memory, contiguous elements first, with dimensions merged.
            Tensors at the same address with the same spans have the same elements.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


@functools.lru_cache(1024)
def layout_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> MemoryLayout:
    """Return the layout of a tensor.

    >>> layout_of((2, 2, 4, 5), (60, 20, 5, 1)).spans
    ((40, 1), (2, 60))
    """
    order = order_of(strides)
    merged = [(1, 1)]
    for dim in reversed(order):
        last, step = merged[-1]
        if strides[dim] == last * step:
            merged[-1] = (last * shape[dim], step)
        elif shape[dim] > 1:
            merged.append((shape[dim], strides[dim]))
    return MemoryLayout(shape, order, tuple(merged))


def order_of(strides: Sequence[Any]) -> tuple[int, ...]:
    """Return the dimensions by decreasing stride, which may be symbolic.

    >>> order_of((12, 1, 4))
    (0, 2, 1)
    """
    hints = tuple(map(size_hint, strides))
    return tuple(sorted(range(len(hints)), key=lambda dim: -hints[dim]))


def rows_of(tensor: Tensor, layout: MemoryLayout) -> Tensor:
    """Return the elements in the order of memory as (rows, run), in contiguous runs.

    This is a view if the elements fill one range (a single row), or equally long runs at equal
    distances, as the queries in the product of a projection do; otherwise a copy.
    """
    run, _ = layout.spans[0]
    if run < _WORTH_A_ROW:
        # Of every other element, flattening makes a view.
        return flatten(tensor, layout.order).contiguous().view(1, -1)
    return tensor.permute(layout.order).reshape(-1, run)


def flatten(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return an (n,) tensor: a view if the elements are at equal distances, otherwise a copy."""
    return tensor.permute(order).reshape(-1)


def unflatten(flat: Tensor, shape: Sequence[int], order: tuple[int, ...]) -> Tensor:
    """Return the tensor from its (n,) elements, without gaps between them in memory."""
    inverse = [order.index(dim) for dim in range(len(order))]
    return flat.view([shape[dim] for dim in order]).permute(inverse)


def size_hint(size: Any) -> int:
    """Return a size as a number, using the example's for symbolic sizes, without adding a guard."""
    return size if isinstance(size, int) else int(size.node.hint or 0)
