"""Tensors of any strides as flat memory, and back with the strides that they had."""

from __future__ import annotations

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory.

    Attributes:
        shape: Sizes.
        stride: Strides, in elements.
        dense: Whether the elements fill one run of memory, in whatever order of the dimensions.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dense: bool


def layout_of(tensor: Tensor) -> Layout | None:
    """The layout, or ``None`` if two indices may mean the same memory, as after ``expand``.

    >>> import torch
    >>> layout_of(torch.empty(2, 3).t()).dense
    True
    >>> layout_of(torch.empty(2, 4)[:, :3]).dense
    False
    >>> layout_of(torch.empty(3).expand(2, 3)) is None
    True
    """
    shape = tuple(tensor.shape)
    stride = tuple(tensor.stride())
    extent = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True)):
        if size == 1:
            continue
        if step < extent:
            return Layout(shape, stride, dense=True) if tensor.numel() == 0 else None
        extent = step * (size - 1) + extent
    return Layout(shape, stride, dense=extent == tensor.numel())


def flatten(tensor: Tensor, layout: Layout) -> Tensor:
    """(n,) contiguous: the memory itself if it is dense, a copy otherwise."""
    if layout.dense:
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return tensor.reshape(-1).contiguous()


def restore(flat: Tensor, layout: Layout) -> Tensor:
    """The tensor of which ``flat`` is what :func:`flatten` gave."""
    if layout.dense:
        return flat.as_strided(layout.shape, layout.stride)
    whole = flat.new_empty_strided(layout.shape, layout.stride)
    return whole.copy_(flat.view(layout.shape))
