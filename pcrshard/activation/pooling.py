"""Indices of max-pooling as places in their windows: 4 bits each instead of 64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from .codecs import CodecName, Content, encode_codes
from .layout import MemoryLayout, flatten, unflatten

# Of a byte, and of half of one.
_MOST, _FEW = 256, 16


class Windows(NamedTuple):
    """What a max-pooling reads, by dimension. Sizes are those of its input, and may be symbolic."""

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(cls, setting: Callable[[str], Any], sizes: Sequence[int]) -> Self | None:
        """Return the windows of an operation; ``None`` if a place in them takes more than a byte.

        Args:
            setting: Returns an argument of the operation by its name: a sequence of ints.
            sizes: The shape of its input.
        """
        kernel = tuple(setting("kernel_size"))
        others = (tuple(setting(name)) for name in ("stride", "padding", "dilation"))
        stride, *rest = (each * len(kernel) if len(each) == 1 else each for each in others)
        if len(kernel) < 2 or math.prod(kernel) > _MOST:
            return None
        return cls(tuple(sizes[-len(kernel) :]), kernel, stride or kernel, *rest)


def encode_index(
    index: Tensor, layout: MemoryLayout, windows: Windows, codec: CodecName
) -> Content | None:
    """Encode indices of the windows that lie side by side in their last dimensions."""
    packed = encode_codes(places_of(index, layout.order, windows).view(torch.int8), codec)

    def decode() -> Tensor:
        places = packed.decode().view(torch.uint8)
        return flatten(index_of(places, layout.shape, layout.order, windows), layout.order)

    return Content(packed.num_bytes, decode)


def places_of(index: Tensor, order: tuple[int, ...], windows: Windows) -> Tensor:
    """Return the place of each index in its window, in the order of memory, two to a byte if few.

    >>> windows = Windows((4, 4), (2, 2), (2, 2), (0, 0), (1, 1))
    >>> places_of(torch.tensor([[5, 2], [12, 15]]), (0, 1), windows)
    tensor([ 3, 50], dtype=torch.uint8)
    """
    rest, place, radix = index.int(), torch.zeros((), dtype=torch.int32, device=index.device), 1
    for dim in reversed(range(len(windows.kernel))):
        above = torch.div(rest, windows.sizes[dim], rounding_mode="trunc")
        ahead = rest - above * windows.sizes[dim] - _first(windows, dim, index.shape, index.device)
        if windows.dilation[dim] > 1:
            ahead = torch.div(ahead, windows.dilation[dim], rounding_mode="trunc")
        place = place + ahead * radix
        rest = above
        radix *= windows.kernel[dim]
    flat = flatten(place.to(torch.uint8), order)
    if radix > _FEW:
        return flat
    pairs = functional.pad(flat, (0, flat.shape[0] % 2)).view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


def num_bytes_of(count: int, windows: Windows) -> int:
    """Return the size of the places in bytes."""
    return (count + 1) // 2 if math.prod(windows.kernel) <= _FEW else count


def index_of(
    places: Tensor, shape: Sequence[int], order: tuple[int, ...], windows: Windows
) -> Tensor:
    """Invert :func:`places_of`: the indices (shape) int64."""
    if math.prod(windows.kernel) <= _FEW:
        places = torch.stack([places & 15, places >> 4], 1).flatten()
    rest = unflatten(places[: math.prod(shape)], shape, order).int()
    index, size = torch.zeros((), dtype=torch.int32, device=places.device), 1
    for dim in reversed(range(len(windows.kernel))):
        above = torch.div(rest, windows.kernel[dim], rounding_mode="trunc")
        ahead = (rest - above * windows.kernel[dim]) * windows.dilation[dim]
        index = index + (_first(windows, dim, shape, places.device) + ahead) * size
        rest = above
        size *= windows.sizes[dim]
    return index.long()


def _first(windows: Windows, dim: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return where each window begins, in the shape that broadcasts to the indices."""
    behind = len(windows.kernel) - 1 - dim
    count = shape[len(shape) - 1 - behind]
    starts = torch.arange(count, dtype=torch.int32, device=device) * windows.stride[dim]
    return (starts - windows.padding[dim]).view(-1, *(1,) * behind)
