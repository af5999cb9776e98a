"""The sign- and zero-exact quantizer from floats of any type to one-byte codes, error-bounded.

``q = sign(x) * ceil(|x| / (2 step))`` and ``x' = sign(q) * (2 |q| - 1) * step``: q is 0 if and only
if x is 0, signs are preserved, and ``|x - x'|`` is at most the error bound. Autograd derives a
ReLU's backward mask from the sign of the saved tensor, so any other treatment of zeros would give
wrong gradients. For the same reason, no value leaves the range of its tensor: the extremes have
codes of their own and are restored exactly, and all other values strictly between them. A sigmoid
stays below 1, and the mask of a ReLU6 is exact. Values that do not fit into a code (NaN, infinity,
large values) are stored exactly, in a list.

Stochastic rounding has the points 0, +-tiny, +-step, +-2 step, ... and chooses between the two
nearest to x so that the mean of x' is x. For the same bound, it has half the variance and its codes
are one bit longer.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from ..errorbound import MEDIAN_OF_NORMAL, Quantized
from ..native import fused_quantizer as native
from .blocks import empty_floats, has_core, team

ESCAPE = -128
MAX_CODE = 126
# The code of the largest value of a tensor; its negative is that of the least.
EXTREME = 127
# Ratio of step to bound: float32 arithmetic in both directions has an error of up to 4.5e-5 of a
# step at code 127.
MARGIN = 2.0**-13
_INDEX_BYTES = 8
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
NATIVE_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# The sample for standard_deviation: this many runs of this many neighbors.
_RUN = 64
_RUNS = 512
# Stride at which the sample is subsampled for the median.
_MEDIAN_STRIDE = 8


Extremes = tuple[float, float]
NO_EXTREMES = (-math.inf, math.inf)


@dataclasses.dataclass(frozen=True)
class SignExactLattice:
    """The values that codes represent.

    Attributes:
        step: Half the width of a bin; for stochastic rounding, its full width.
        dtype: Type of the values.
        seed: Seed of stochastic rounding; ``None`` rounds to the nearest value.
        extremes: The least and the largest value of the tensor.
    """

    step: float
    dtype: torch.dtype
    seed: int | None = None
    extremes: Extremes = NO_EXTREMES

    def table(self) -> Tensor:
        """Return the (256,) values of the codes -128 to 127."""
        code = torch.arange(-128, 128, dtype=_exact_type(self.dtype))
        magnitude = code.abs()
        if self.seed is None:
            values = (magnitude * 2 - 1) * self.step
        else:
            values = ((magnitude - 1) * self.step).clamp(min=_least(self.dtype))
        values = (values.clamp_(min=0) * code.sign()).to(self.dtype)
        low, high = torch.tensor(self.extremes, dtype=self.dtype)
        least, most = inner(low, 1), inner(high, -1)
        values = torch.minimum(torch.maximum(values, least), most)
        values[128] = 0
        values[128 - EXTREME], values[128 + EXTREME] = low, high
        return values


def inner(extreme: Tensor, direction: int) -> Tensor:
    """Return the value next to an extreme (), in the direction 1 or -1; 0 for 0.

    By its bits, because compilers and accelerators lack ``nextafter`` for some types.
    """
    word = extreme.view(_WORDS[extreme.element_size()])
    step = direction * extreme.sign().to(word.dtype)
    return (word + step).view(extreme.dtype)


def lattice_for(
    error_bound: float,
    dtype: torch.dtype,
    seed: int | None = None,
    extremes: Extremes = NO_EXTREMES,
) -> SignExactLattice | None:
    """Return the lattice for a bound, or ``None`` if the type cannot represent its values."""
    step = error_bound * (1 - MARGIN)
    fits = 2 * _least(dtype) <= step <= torch.finfo(dtype).max / (2 * (EXTREME + 1))
    return SignExactLattice(step, dtype, seed, extremes) if fits else None


def _least(dtype: torch.dtype) -> float:
    """Return the least positive value: float16 may be subnormal, other types are not."""
    return 2.0**-24 if dtype == torch.float16 else torch.finfo(dtype).tiny


def extremes_of(rows: Tensor) -> Extremes:
    """Return the least and the largest finite value of floats (rows, run)."""
    name = NATIVE_TYPES.get(rows.dtype)
    if name is None or not has_core(rows.device):
        is_finite = rows.isfinite()
        low = rows.where(is_finite, math.inf).amin()
        return float(low), float(rows.where(is_finite, -math.inf).amax())
    layout = (rows.shape[1], rows.stride(0))
    return native.extremes(rows.data_ptr(), rows.numel(), name, layout, team=team())


def standard_deviation(rows: Tensor, outlier_guard: float) -> float:
    """Estimate the standard deviation of the finite values of floats (rows, run).

    Samples 512 to 1023 runs of 64 neighbors at an odd stride, to avoid aliasing with power-of-two
    channel sizes: accurate to a percent with a hundredth of the reads of a large tensor. NaN if no
    value is finite.

    Args:
        rows: The floats.
        outlier_guard: See :class:`pcrshard.errorbound.RelativeStd`.
    """
    name = NATIVE_TYPES.get(rows.dtype)
    if name is None or not has_core(rows.device):
        return float(_estimated_deviation(rows.reshape(-1), outlier_guard))
    layout = (rows.shape[1], rows.stride(0))
    guard = outlier_guard / MEDIAN_OF_NORMAL
    return native.deviation(rows.data_ptr(), rows.numel(), name, layout, guard)


def _estimated_deviation(flat: Tensor, outlier_guard: float) -> Tensor:
    """Return the same of (n,) floats in PyTorch operations."""
    sample = flat
    if flat.shape[0] > 2 * _RUN * _RUNS:
        runs = flat[: flat.shape[0] // _RUN * _RUN].view(-1, _RUN)
        sample = runs[:: (runs.shape[0] // _RUNS) | 1].reshape(-1)
    exact = sample.to(_exact_type(flat.dtype))
    exact = torch.where(exact.isfinite(), exact, torch.nan)
    std = (exact - exact.nanmean()).square().nanmean().sqrt()
    some = exact[::_MEDIAN_STRIDE].abs()
    typical = torch.where(some > 0, some, torch.nan).nanmedian()
    # fmin ignores the NaN that results from an all-zero sample.
    return torch.fmin(std, typical * (outlier_guard / MEDIAN_OF_NORMAL))


def quantize(rows: Tensor, lattice: SignExactLattice) -> Quantized | None:
    """Quantize a tensor; return ``None`` if the codes would take more memory than the tensor.

    On a CPU, the native core computes nearest codes in one pass. Otherwise PyTorch operations do,
    on any device, synchronizing once to count the escapes.

    Args:
        rows: (rows, run) floats; the elements of a run are contiguous.
        lattice: The values that codes represent.
    """
    if _is_native(rows.device, lattice):
        codes, escapes = _quantize_native(rows, lattice)
    else:
        codes = _quantize_torch(rows.reshape(-1), lattice)
        escapes = int((codes == ESCAPE).sum())
    return with_escapes(codes, escapes, rows)


def with_escapes(codes: Tensor, escapes: int, rows: Tensor) -> Quantized | None:
    """Return (n,) codes with the exact values of those that escaped; ``None`` if they are many."""
    if escapes == 0:
        return Quantized(codes, torch.empty(0, dtype=torch.int64), rows[0, :0])
    if len(codes) + escapes * (_INDEX_BYTES + rows.element_size()) >= rows.nbytes:
        return None
    index = (codes == ESCAPE).nonzero().flatten()
    # Escaped values are in the list; nonzero codes would only widen their blocks.
    codes[index] = 0
    return Quantized(codes, index, rows[index // rows.shape[1], index % rows.shape[1]])


def _quantize_native(rows: Tensor, lattice: SignExactLattice) -> tuple[Tensor, int]:
    """Return the codes and the number of escapes."""
    source = rows.float() if rows.dtype == torch.float16 else rows
    codes = torch.empty(rows.numel(), dtype=torch.int8)
    return codes, native.quantize(
        source.data_ptr(),
        rows.numel(),
        NATIVE_TYPES[source.dtype],
        lattice.step,
        codes.data_ptr(),
        rows=(rows.shape[1], source.stride(0)),
        extremes=lattice.extremes,
        team=team(),
    )


def _is_native(device: torch.device, lattice: SignExactLattice) -> bool:
    """Return whether to use the native core, whose float32 is too coarse for float64."""
    is_coarse = lattice.seed is None and lattice.dtype != torch.float64
    return is_coarse and has_core(device)


def _quantize_torch(flat: Tensor, lattice: SignExactLattice) -> Tensor:
    values = flat.to(_exact_type(flat.dtype))
    if lattice.seed is None:
        code = nearest_codes(values, lattice.step)
    else:
        generator = torch.Generator(flat.device).manual_seed(lattice.seed)
        draw = torch.rand(flat.shape, dtype=values.dtype, device=flat.device, generator=generator)
        code = (values.abs() / lattice.step + draw).floor_().add_(1).mul_(values != 0)
    escapes = ~(code <= MAX_CODE)
    code = code.masked_fill_(escapes, 0).copysign_(values).masked_fill_(escapes, ESCAPE)
    for extreme, own in zip(lattice.extremes, (-EXTREME, EXTREME), strict=True):
        if extreme not in (0, -math.inf, math.inf):
            code.masked_fill_(values == extreme, own)
    return code.to(torch.int8)


def nearest_codes(values: Tensor, step: float | Tensor) -> Tensor:
    """Return ``ceil(|x| / (2 step))``, at least 1 for nonzero values, even if that underflows."""
    magnitude = values.abs()
    return torch.maximum((magnitude * (0.5 / step)).ceil(), (magnitude > 0).to(values.dtype))


def _exact_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type to compute in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dequantize(quantized: Quantized, lattice: SignExactLattice) -> Tensor:
    """Return the (n,) values on the device of the codes."""
    codes, table = quantized.codes, lattice.table()
    if has_core(codes.device) and lattice.dtype != torch.float64:
        name = NATIVE_TYPES.get(lattice.dtype, "float32")
        values = empty_floats(len(codes), torch.bfloat16 if name == "bfloat16" else torch.float32)
        wide = table.float()
        native.dequantize(
            codes.data_ptr(), len(codes), wide.data_ptr(), name, values.data_ptr(), team=team()
        )
        values = values.to(lattice.dtype)
    else:
        values = table.to(codes.device)[codes.int() + 128]
    if len(quantized.escape_words):
        values[quantized.escape_index] = quantized.escape_words
    return values
