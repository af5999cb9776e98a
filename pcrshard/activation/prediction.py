"""Code quantized floats, and predict those of a ReLU from the tensors that it was computed from.

Autograd saves the input of a normalization and the output of the ReLU after it, which is
``max(0, a x + b)`` with a and b per channel, or ``max(0, a x + c y + b)`` if a shortcut is added.
Given the input, little more than the rounding of the output remains to be stored: 1 bit per value
instead of 3.5. The codes themselves, and so the bound, signs, and zeros, do not change.

Predictions are computed on the CPU, which compresses the codes.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errorbound import Quantized
from ..native import fused_quantizer as native
from .blocks import has_core
from .codecs import CodecName, Content, encode_codes
from .layout import Layout
from .quantizer import SignExactLattice, quantize, restore

# Number of recently coded tensors to remember: the input of a block with a shortcut is saved up to
# seven tensors before its output.
REMEMBERED = 8
# With fewer values per channel, the table of 256 entries costs more than it saves.
_WORTH_A_TABLE = 1024
# Maximum number of tensors that must be decoded before a predicted one.
_MAX_DEPTH = 2
# Size of the sample for fitting a channel's line.
_PLACES = 256
# Maximum residual relative to the codes' size. Typical values are a tenth after a normalization, a
# quarter with a shortcut, and two thirds for unrelated tensors.
_WORTH = 0.5
# Predictions have this many steps per code, so that the sum of two fits into 16 bits.
_PARTS = 32
_LIMIT = 16_000
# Keeps the fit of a constant channel finite.
_RIDGE = 1e-9

_Grid = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Coded(Content):
    """Quantized and coded floats, from which others can be predicted.

    Attributes:
        codes: Returns the (n,) codes.
        lattice: The values that codes represent.
        depth: Number of tensors that must be decoded in sequence before this one.
    """

    codes: Callable[[], Tensor]
    lattice: SignExactLattice
    depth: int


class Known(NamedTuple):
    """A previously coded tensor, a :func:`_sample` of its codes, and its layout."""

    coded: Coded
    sample: Tensor
    layout: Layout


@dataclasses.dataclass(frozen=True)
class _Lines:
    """A linear prediction of one tensor's codes from one or two others, per channel.

    Attributes:
        sources: The other tensors.
        lattice: What the predicted codes represent.
        slopes: (sources, channels) float32.
        offset: (channels,) float32.
        most: The largest code, for clipped activations such as ReLU6.
    """

    sources: Sequence[Coded]
    lattice: SignExactLattice
    slopes: Tensor
    offset: Tensor
    most: int

    def source_codes(self) -> list[Tensor]:
        """Return the (n,) codes of each source."""
        return [source.codes() for source in self.sources]

    def shift(self, codes: Tensor, sources: Sequence[Tensor], grid: Any, sign: int) -> None:
        """Add ``sign`` times the prediction to (n,) int8 codes, in place and modulo 256.

        Args:
            codes: Contiguous codes, changed in place.
            sources: Contiguous codes of each source.
            grid: The position of the channels in all of them.
            sign: 1 or -1.
        """
        # What each code of a source contributes, in each channel.
        meanings = torch.stack([_meaning(source) for source in self.sources])
        parts = self.slopes.t()[:, :, None] * meanings
        parts[:, 0] += self.offset[:, None]
        scaled = (parts * (_PARTS / (2 * self.lattice.step))).round_().clamp_(-_LIMIT, _LIMIT)
        tables = scaled.to(torch.int16).contiguous()
        native.shift(
            codes.data_ptr(),
            [source.data_ptr() for source in sources],
            tables.data_ptr(),
            grid,
            self.most,
            sign,
        )


def encode(
    rows: Tensor,
    lattice: SignExactLattice,
    layout: Layout,
    codec: CodecName,
    memory: deque[Known],
) -> Coded | None:
    """Quantize and code floats; return ``None`` if this would save nothing.

    Args:
        rows: (rows, run) floats; see :func:`.layout.rows_of`.
        lattice: The values that codes represent.
        layout: The memory layout of the floats.
        codec: The lossless coder of codes.
        memory: Recently coded tensors, from which ``predicted`` predicts; changed in place.
    """
    quantized = quantize(rows, lattice)
    if quantized is None:
        return None
    codes, index, words = quantized.codes, quantized.escape_index, quantized.escape_words
    num_bytes = index.nbytes + words.nbytes
    lines = None
    is_predicted = codec == "predicted" and has_core(codes.device)
    grid = _grid_of(layout) if is_predicted else None
    if grid is not None:
        sample = _sample(codes, grid)
        values = _sample(rows.reshape(-1), grid).float()
        alike = [known for known in reversed(memory) if known.layout == layout]
        lines = _predict(values, sample, lattice, alike)
    if lines is not None:
        lines.shift(codes, lines.source_codes(), grid, -1)
        num_bytes += lines.slopes.nbytes + lines.offset.nbytes
    packed = encode_codes(codes, codec)
    num_bytes += packed.num_bytes
    if num_bytes >= rows.nbytes:
        return None

    def decode_codes() -> Tensor:
        found = packed.decode()
        if lines is not None:
            lines.shift(found, lines.source_codes(), grid, 1)
        return found

    def decode() -> Tensor:
        return restore(Quantized(decode_codes(), index, words), lattice)

    depth = 0 if lines is None else 1 + max(source.depth for source in lines.sources)
    coded = Coded(num_bytes, decode, decode_codes, lattice, depth)
    if grid is not None and depth <= _MAX_DEPTH:
        memory.append(Known(coded, sample, layout))
    return coded


def _predict(
    values: Tensor, codes: Tensor, lattice: SignExactLattice, alike: Sequence[Known]
) -> _Lines | None:
    """Predict from the last tensor, alone or with an earlier one; ``None`` if this is poor."""
    if not alike or bool((values < 0).any()):
        return None
    last, *others = alike
    for sources in ((last,), *((last, other) for other in others)):
        meant = [
            _meaning(source.coded)[source.sample.view(torch.uint8).long()]
            for source in sources
        ]
        slopes, offset = _fit(torch.stack(meant), values)
        coded = tuple(source.coded for source in sources)
        lines = _Lines(coded, lattice, slopes, offset, int(codes.max()))
        rest = codes.clone()
        grid = (*codes.shape, 1)
        lines.shift(rest, [source.sample for source in sources], grid, -1)
        if float(rest.float().abs().mean()) < _WORTH * float(codes.float().abs().mean()):
            return lines
    return None


def _meaning(coded: Coded) -> Tensor:
    """Return the (256,) float32 values of codes as unsigned bytes."""
    return coded.lattice.table().float().roll(128)


def _grid_of(layout: Layout) -> _Grid | None:
    """Return the position of the channels in a flat tensor: (outer, channels, inner).

    They are dimension 1, the second or the last in memory. ``None`` for other tensors, and if a
    channel has too few values.

    >>> _grid_of(Layout((20, 3, 40, 50), (0, 1, 2, 3), ()))
    (20, 3, 2000)
    >>> _grid_of(Layout((20, 3, 40, 50), (0, 2, 3, 1), ()))
    (40000, 3, 1)
    """
    if len(layout.shape) < 3:
        return None
    images, channels, *places = layout.shape
    inner = torch.Size(places).numel()
    if images * inner < _WORTH_A_TABLE:
        return None
    others = range(2, len(layout.shape))
    grids = {
        (0, 1, *others): (images, channels, inner),
        (0, *others, 1): (images * inner, channels, 1),
    }
    return grids.get(layout.order)


def _sample(flat: Tensor, grid: _Grid) -> Tensor:
    """Return a contiguous (n, channels) sample of random places, the same ones for equal grids.

    A fixed stride would often hit only the left edge of each row, which is padding or a frame.
    """
    outer, _, inner = grid
    generator = torch.Generator().manual_seed(0)
    rows, places = (
        torch.randint(count, (_PLACES,), generator=generator) for count in (outer, inner)
    )
    found: Tensor = flat.view(grid)[rows, :, places]
    return found.contiguous()


def _fit(meant: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Fit slopes (sources, channels) and offset by least squares to values above 0.

    Args:
        meant: (sources, n, channels) values of the sources.
        values: (n, channels) values to predict.
    """
    known = torch.cat([meant, torch.ones_like(meant[:1])]) * (values > 0)
    rows = known.permute(2, 0, 1).double()  # not rounded by autocast
    products = rows @ rows.mT
    ridge = torch.diag_embed(_RIDGE * (1 + products.diagonal(dim1=1, dim2=2)))
    wanted = rows @ values.t().double()[:, :, None]
    solved = torch.linalg.solve_ex(products + ridge, wanted).result
    # NaN predicts nothing.
    lines = solved[:, :, 0].t().float().nan_to_num(0, 0, 0).contiguous()
    return lines[:-1], lines[-1]
