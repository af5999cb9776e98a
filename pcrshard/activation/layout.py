"""Flatten tensors with any strides in memory order, and restore their strides."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Layout:
    """The memory layout of a tensor.

    Attributes:
        shape: The tensor's shape.
        stride: Strides, in elements.
        dense: Whether the elements fill one contiguous range, with dimensions in any order.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dense: bool


def layout_of(tensor: Tensor) -> Layout | None:
    """Return the layout, or ``None`` if elements share memory, as after ``expand``.

    >>> layout_of(torch.empty(2, 3).t()).dense
    True
    >>> layout_of(torch.empty(2, 4)[:, :3]).dense
    False
    >>> layout_of(torch.empty(3).expand(2, 3)) is None
    True
    """
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    if any(step == 0 and size > 1 for step, size in strides):
        return None
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return Layout(tuple(tensor.shape), tensor.stride(), dense)


def flatten(tensor: Tensor, layout: Layout) -> Tensor:
    """Return a contiguous (n,) tensor: a view of the memory if it is dense, otherwise a copy."""
    if layout.dense:
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return tensor.reshape(-1).contiguous()


def restore(flat: Tensor, layout: Layout) -> Tensor:
    """Return the tensor from the result of :func:`flatten`."""
    if layout.dense:
        return flat.as_strided(layout.shape, layout.stride)
    whole = flat.new_empty_strided(layout.shape, layout.stride)
    return whole.copy_(flat.view(layout.shape))
