"""Predict the codes of a ReLU's output from those of the tensors that it was computed from.

Autograd saves the input of a normalization and the output of the ReLU after it, which is
``max(0, a x + b)`` with a and b per channel, or ``max(0, a x + c y + b)`` if a shortcut is added.
Given the input, little more than the rounding of the output remains to be stored: 1 bit per value
instead of 3.5. The codes themselves, and so the bound, signs, and zeros, do not change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from ..native import fused_quantizer as native
from .layout import Layout
from .quantizer import SignExactLattice

# Sample for fitting a channel's line: at most this many images, and places in each.
_IMAGES = 8
_PLACES = 32
# Maximum residual relative to the codes' size. Typical values are a tenth after a normalization, a
# quarter with a shortcut, and two thirds for unrelated tensors.
_WORTH = 0.5
# Predictions have this many steps per code, so that the sum of two fits into 16 bits.
_PARTS = 32
_LIMIT = 16_000
# Keeps the fit of a constant channel finite.
_RIDGE = 1e-6


@dataclasses.dataclass(frozen=True)
class Grid:
    """The position of the channels in a flat tensor: (outer, channels, inner)."""

    outer: int
    channels: int
    inner: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The three sizes as a tuple."""
        return (self.outer, self.channels, self.inner)


def grid_of(layout: Layout) -> Grid | None:
    """Return the grid of a dense tensor with channels as dimension 1, first or last in memory.

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
    """Return the strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


@dataclasses.dataclass(frozen=True)
class Lines:
    """A linear prediction of one tensor from one or two others, per channel.

    Attributes:
        grid: The grid of all the tensors.
        slopes: (sources, channels) float32.
        offset: (channels,) float32.
        most: The largest code, for clipped activations such as ReLU6.
    """

    grid: Grid
    slopes: Tensor
    offset: Tensor
    most: int

    @property
    def num_bytes(self) -> int:
        """Size in memory, in bytes."""
        return self.slopes.nbytes + self.offset.nbytes

    def tables(self, sources: Sequence[SignExactLattice], target: SignExactLattice) -> Tensor:
        """Return (channels, sources, 256) int16: the contribution of each source code byte."""
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
        """Add ``sign`` times the prediction to codes, in place and modulo 256.

        Args:
            codes: (n,) contiguous int8 codes, changed in place.
            sources: (n,) contiguous int8 codes of each source.
            tables: The result of :meth:`tables`.
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
    """Return a contiguous (images, channels, places) sample, spread over each channel."""
    whole = flat.view(grid.sizes)
    images = _IMAGES * _PLACES if grid.inner == 1 else _IMAGES
    outer = _spread(grid.outer, images).to(flat.device)
    inner = _spread(grid.inner, _PLACES).to(flat.device)
    found: Tensor = whole[outer[:, None], :, inner]
    return found.movedim(2, 1).contiguous()


def _spread(count: int, most: int) -> Tensor:
    """Return at most a given number of ``count`` positions, one per interval, deterministically.

    A fixed stride would often hit only the left edge of each row, which is padding or a frame.
    """
    if count <= most:
        return torch.arange(count)
    generator = torch.Generator().manual_seed(0)
    within = torch.rand(most, generator=generator, dtype=torch.float64)
    return (within.add_(torch.arange(most)) * (count / most)).long()


@dataclasses.dataclass(frozen=True)
class Sampled:
    """A :func:`sample` of a tensor's codes, and their lattice."""

    codes: Tensor
    lattice: SignExactLattice


def predict(
    values: Tensor,
    target: Sampled,
    sources: Sequence[Sampled],
    grid: Grid,
) -> Lines | None:
    """Fit the lines from the sources to a tensor's values; ``None`` if they predict it poorly.

    Args:
        values: :func:`sample` of the tensor's values.
        target: The same sample of its codes.
        sources: The same sample of the codes of one or two tensors.
        grid: The grid of all the tensors.
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
    """Fit slopes (sources, channels) and offset by least squares to values above 0."""
    above = (values > 0).to(values)
    count = above.sum((0, 2)).clamp_(min=1)
    means = (meant * above).sum((1, 3)) / count
    mean = (values * above).sum((0, 2)) / count
    apart = (meant - means[:, None, :, None]) * above
    # No matrix products: autocast would round them.
    products = (apart[:, None] * apart).sum((2, 4)).movedim(-1, 0)
    both = (apart * (values - mean[:, None])).sum((1, 3)).t()
    slopes = _solve(products, both)
    # NaN predicts nothing.
    offset = mean - (slopes * means).sum(0)
    return slopes, offset.nan_to_num(0, 0, 0)


def _solve(products: Tensor, both: Tensor) -> Tensor:
    """Solve (channels, sources, sources) normal equations for slopes (sources, channels)."""
    ridge = _RIDGE * (1 + products.diagonal(dim1=1, dim2=2).amax(1))
    diagonal = torch.diag_embed(ridge[:, None].expand_as(both))
    solved = torch.linalg.solve_ex(products + diagonal, both).result
    slopes: Tensor = solved.t().nan_to_num(0, 0, 0).contiguous()
    return slopes
