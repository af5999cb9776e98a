"""Codes that are predicted from those of other tensors: what a ReLU gives, from what it is made of.

Autograd saves what a normalization reads, and what the ReLU behind it gives: ``max(0, a x + b)``,
with an a and a b for each channel, or ``max(0, a x + c y + b)`` where a shortcut is added. Of the
second one's codes little is left to be said but how each was rounded: 1 bit a value instead of
3.5. The codes themselves, and so bound, signs and zeros, stay what they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from ..native import fused_quantizer as native
from .layout import Layout
from .quantizer import SignExactLattice

# Positions that a channel's line is fitted to: at most so many images, and places in each.
_IMAGES = 8
_PLACES = 32
# What must be left of the codes' size at most: a tenth behind a normalization, a quarter with a
# shortcut, two thirds of what has nothing to do with each other.
_WORTH = 0.5
# What is predicted is told in parts of a code, and sums of two fit into 16 bits.
_PARTS = 32
_LIMIT = 16_000
# Keeps the fit of a channel that never changes finite.
_RIDGE = 1e-6


@dataclasses.dataclass(frozen=True)
class Grid:
    """How the channels of a flat tensor lie: (outer, channels, inner)."""

    outer: int
    channels: int
    inner: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The three."""
        return (self.outer, self.channels, self.inner)


def grid_of(layout: Layout) -> Grid | None:
    """The grid of a dense tensor whose second dimension are channels, first or last in memory.

    >>> grid_of(Layout((2, 3, 4, 5), (60, 20, 5, 1), dense=True)).sizes
    (2, 3, 20)
    >>> grid_of(Layout((2, 3, 4, 5), (60, 1, 15, 3), dense=True)).sizes
    (40, 3, 1)
    """
    if not layout.dense or len(layout.shape) < 3:
        return None
    images, channels, *places = layout.shape
    inner = torch.Size(places).numel()
    if layout.stride == _strides(layout.shape):
        return Grid(images, channels, inner)
    last = _strides((images, *places, channels))
    if layout.stride == (last[0], last[-1], *last[1:-1]):
        return Grid(images * inner, channels, 1)
    return None


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


@dataclasses.dataclass(frozen=True)
class Lines:
    """What one or two tensors say of another: a line for each channel.

    Attributes:
        grid: How the channels of all lie.
        slopes: (sources, channels) float32.
        offset: (channels,) float32.
        most: The largest code, as of ReLU6.
    """

    grid: Grid
    slopes: Tensor
    offset: Tensor
    most: int

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that are held."""
        return self.slopes.nbytes + self.offset.nbytes

    def tables(self, sources: Sequence[SignExactLattice], target: SignExactLattice) -> Tensor:
        """(channels, sources, 256) int16: what each code of a source, as a byte, adds to a code."""
        scale = _PARTS / (2 * target.step)
        device = self.slopes.device
        meanings = torch.stack([source.table(device).to(self.slopes) for source in sources])
        parts = self.slopes.t()[:, :, None] * meanings
        parts[:, 0] += self.offset[:, None]
        told = (parts * scale).round_().clamp_(-_LIMIT, _LIMIT)
        return told.to(torch.int16).contiguous()

    def shift(
        self,
        codes: Tensor,
        sources: Sequence[Tensor],
        tables: Tensor,
        sign: int,
    ) -> None:
        """Adds to codes, in place and modulo 256, ``sign`` times what is predicted.

        Args:
            codes: (n,) contiguous int8, changed.
            sources: (n,) contiguous int8 codes of each.
            tables: Of :meth:`tables`.
            sign: 1 or -1.
        """
        if native.available and codes.device.type == "cpu":
            places = [source.data_ptr() for source in sources]
            native.shift(
                codes.data_ptr(), places, tables.data_ptr(), self.grid.sizes, self.most, sign
            )
            return
        channels = torch.arange(self.grid.channels, device=codes.device)[:, None]
        parts = torch.full((), _PARTS - 1, dtype=torch.int32, device=codes.device)
        for number, source in enumerate(sources):
            rows = source.view(self.grid.sizes).view(torch.uint8).long()
            parts = parts + tables[channels, number, rows]
        told = (parts >> 5).clamp_(0, self.most).to(torch.int8)
        codes.view(self.grid.sizes).add_(told, alpha=sign)


def sample(flat: Tensor, grid: Grid) -> Tensor:
    """(images, channels, places) of (n,): some of each channel, from all over it; contiguous."""
    whole = flat.view(grid.sizes)
    images = _IMAGES * _PLACES if grid.inner == 1 else _IMAGES
    outer = _spread(grid.outer, images).to(flat.device)
    inner = _spread(grid.inner, _PLACES).to(flat.device)
    found: Tensor = whole[outer[:, None], :, inner]
    return found.movedim(2, 1).contiguous()


def _spread(count: int, most: int) -> Tensor:
    """At most so many of ``count`` positions, one from each part, and always the same.

    Not every so many-th, which would often be the left edge of each row: padding, or a frame.
    """
    if count <= most:
        return torch.arange(count)
    generator = torch.Generator().manual_seed(0)
    within = torch.rand(most, generator=generator, dtype=torch.float64)
    return (within.add_(torch.arange(most)) * (count / most)).long()


@dataclasses.dataclass(frozen=True)
class Sampled:
    """:func:`sample` of a tensor's codes, and their lattice."""

    codes: Tensor
    lattice: SignExactLattice


def predict(
    values: Tensor,
    target: Sampled,
    sources: Sequence[Sampled],
    grid: Grid,
) -> Lines | None:
    """The lines from what codes of sources mean to a tensor's values; ``None`` if they say little.

    Args:
        values: :func:`sample` of the tensor.
        target: The same sample of its codes.
        sources: The same of the codes of one or two tensors.
        grid: How all three lie in memory.
    """
    meant = [
        source.lattice.table(values.device).to(values)[source.codes.view(torch.uint8).long()]
        for source in sources
    ]
    slopes, offset = _fit(torch.stack(meant), values)
    codes = target.codes
    few = Lines(Grid(*codes.shape), slopes, offset, int(codes.max()))
    rest = codes.clone()
    tables = few.tables([source.lattice for source in sources], target.lattice)
    few.shift(rest, [source.codes for source in sources], tables, -1)
    left = float(rest.float().abs().mean())
    if left >= _WORTH * float(codes.float().abs().mean()):
        return None
    return dataclasses.replace(few, grid=grid)


def _fit(meant: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Slopes (sources, channels) and offset by least squares, where values are above 0."""
    above = (values > 0).to(values)
    count = above.sum((0, 2)).clamp_(min=1)
    means = (meant * above).sum((1, 3)) / count
    mean = (values * above).sum((0, 2)) / count
    apart = (meant - means[:, None, :, None]) * above
    # No matrix products: autocast would round them.
    products = (apart[:, None] * apart).sum((2, 4)).movedim(-1, 0)
    both = (apart * (values - mean[:, None])).sum((1, 3)).t()
    slopes = _solve(products, both)
    # What is no number predicts nothing.
    offset = mean - (slopes * means).sum(0)
    return slopes, offset.nan_to_num(0, 0, 0)


def _solve(products: Tensor, both: Tensor) -> Tensor:
    """Slopes (sources, channels) of (channels, sources, sources) normal equations."""
    ridge = _RIDGE * (1 + products.diagonal(dim1=1, dim2=2).amax(1))
    diagonal = torch.diag_embed(ridge[:, None].expand_as(both))
    solved = torch.linalg.solve_ex(products + diagonal, both).result
    slopes: Tensor = solved.t().nan_to_num(0, 0, 0).contiguous()
    return slopes
