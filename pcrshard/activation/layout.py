"""Flatten tensors with any strides in memory order, and restore them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

# Shorter runs are copied together first.
_WORTH_A_ROW = 64


class Layout(NamedTuple):
    """The memory layout of a tensor.

    Attributes:
        shape: The tensor's shape.
        order: Dimensions by decreasing stride; the last one is contiguous.
    """

    shape: Sequence[int]
    order: tuple[int, ...]


def layout_of(tensor: Tensor) -> Layout:
    """Return the layout of a tensor, of real or symbolic sizes.

    >>> import torch
    >>> layout_of(torch.empty(2, 3, 4).movedim(0, 2)).order
    (2, 0, 1)
    """
    strides = tuple(map(size_hint, tensor.stride()))
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return Layout(tuple(tensor.shape), tuple(order))


def spans(tensor: Tensor, layout: Layout) -> list[tuple[int, int]]:
    """Return sizes and strides in memory, contiguous elements first, with dimensions merged.

    Tensors at the same address with the same spans have the same elements in the same order.

    >>> import torch
    >>> batch = torch.empty(2, 3, 4, 5)
    >>> part = batch[:, :2].transpose(1, 2)
    >>> spans(part, layout_of(part))
    [(40, 1), (2, 60)]
    """
    merged = [(1, 1)]
    for dim in reversed(layout.order):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        last, step = merged[-1]
        if stride == last * step:
            merged[-1] = (last * size, step)
        elif size > 1:
            merged.append((size, stride))
    return merged


def rows_of(tensor: Tensor, layout: Layout) -> Tensor:
    """Return the elements in the order of memory as (rows, run), in contiguous runs.

    This is a view if the elements fill one range (a single row), or equally long runs at equal
    distances, as the queries in the product of a projection do; otherwise a copy.
    """
    run, _ = spans(tensor, layout)[0]
    run = run if run >= _WORTH_A_ROW else tensor.numel()
    return tensor.permute(layout.order).reshape(-1, run)


def flatten(tensor: Tensor, layout: Layout) -> Tensor:
    """Return a contiguous (n,) tensor: a view if the elements fill one range, otherwise a copy."""
    return tensor.permute(layout.order).reshape(-1)


def restore(flat: Tensor, layout: Layout) -> Tensor:
    """Return the tensor from its (n,) elements, without gaps between them in memory."""
    sizes = [layout.shape[dim] for dim in layout.order]
    inverse = [layout.order.index(dim) for dim in range(len(sizes))]
    return flat[: math.prod(sizes)].view(sizes).permute(inverse)


def size_hint(size: Any) -> int:
    """Return a size as a number, using the example's for symbolic sizes, without adding a guard."""
    return size if isinstance(size, int) else int(size.node.hint or 0)
