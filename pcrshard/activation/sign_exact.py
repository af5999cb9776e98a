"""The sign- and zero-exact quantiser: floats of any type to one-byte codes within an error bound.

``q = sign(x) * ceil(|x| / (2 step))`` and ``x' = sign(q) * (2 |q| - 1) * step``: q is 0 if and only
if x is 0, signs stay, and ``|x - x'|`` is at most the error bound. Autograd takes a ReLU's backward
mask from the sign of what it saved, so that any other treatment of zeros gives wrong gradients.
What does not fit into a code (NaN, infinity, large values) is kept exactly, in a list.

Stochastic rounding has the points 0, +-tiny, +-step, +-2 step, ... and chooses between the two
next to x so that the mean of x' is x. Within the same bound its variance is half, and its codes
are one bit longer.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from ..native import fused_quantiser as native

Rounding = Literal["nearest", "stochastic"]

ESCAPE = -128
MAX_CODE = 127
# The step is this much smaller than the bound, because the float32 arithmetic on both sides is
# off by up to 4.5e-5 of a step at code 127.
MARGIN = 2.0**-13
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INDEX_BYTES = 4
_MAX_COUNT = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Quantised:
    """A flat tensor as codes.

    Attributes:
        codes: (n,) int8; -128 marks an escape.
        step: Half the width of a bin, or its width under stochastic rounding.
        rounding: How values became codes.
        dtype: Type of the values.
        index: (k,) int32, where the escapes are; ``None`` if there are none.
        values: (k,) exact values there.
    """

    codes: Tensor
    step: float
    rounding: Rounding
    dtype: torch.dtype
    index: Tensor | None = None
    values: Tensor | None = None


def step_of(error_bound: float, dtype: torch.dtype) -> float | None:
    """The step for a bound, or ``None`` where the type cannot hold what the codes would mean."""
    step = error_bound * (1 - MARGIN)
    info = torch.finfo(dtype)
    # float16 reaches below its normal numbers often enough; for the others nobody asks.
    least = 2.0**-23 if dtype == torch.float16 else 2 * info.tiny
    if dtype == torch.bfloat16:
        least = 2 * torch.finfo(torch.float32).tiny
    if least <= step and 2 * (MAX_CODE + 1) * step <= info.max:
        return step
    return None


def bound_after_cast(error_bound: float, decoded: Tensor) -> Tensor:
    """What ``|x - x'|`` is at most, element by element, in float64.

    float32 and float64 keep to the bound itself; the rounding of x' to a 16-bit type adds at most
    half a unit in its last place.
    """
    bound = torch.full(decoded.shape, error_bound, dtype=torch.float64)
    if decoded.dtype in (torch.float16, torch.bfloat16):
        half_unit = torch.finfo(decoded.dtype).eps / 2
        least = 2.0**-25 if decoded.dtype == torch.float16 else 0.0
        bound += (decoded.double().abs() * half_unit).clamp(min=least)
    return bound


def quantise(
    flat: Tensor,
    error_bound: float,
    rounding: Rounding = "nearest",
    generator: torch.Generator | None = None,
) -> Quantised | None:
    """Codes of a tensor, or ``None`` where they would take more than the tensor.

    On a CPU the nearest code is found by the native core where it was built, in one pass; otherwise
    by PyTorch operations, on any device, which wait for the device once to count the escapes.

    Args:
        flat: (n,) contiguous floats.
        error_bound: Largest absolute error of an element, above 0.
        rounding: ``nearest`` or ``stochastic``.
        generator: Where stochastic rounding draws from; on the tensor's device.
    """
    step = step_of(error_bound, flat.dtype)
    if step is None or flat.numel() > _MAX_COUNT:
        return None
    if _is_fused(flat, rounding):
        codes, escapes = _quantise_native(flat, step)
    else:
        codes = _quantise_torch(flat, step, rounding, generator)
        escapes = int((codes == ESCAPE).sum())
    if escapes == 0:
        return Quantised(codes, step, rounding, flat.dtype)
    list_bytes = escapes * (_INDEX_BYTES + flat.element_size())
    if flat.numel() + list_bytes >= flat.nbytes:
        return None
    index = (codes == ESCAPE).nonzero().flatten()
    return Quantised(
        codes,
        step,
        rounding,
        flat.dtype,
        index=index.int(),
        values=flat[index],
    )


def _is_fused(flat: Tensor, rounding: Rounding) -> bool:
    """Whether the native core does it; it computes in float32, which float64 is too fine for."""
    on_cpu = native.available and flat.device.type == "cpu"
    return on_cpu and rounding == "nearest" and flat.dtype != torch.float64


def _quantise_native(flat: Tensor, step: float) -> tuple[Tensor, int]:
    source = flat.float() if flat.dtype == torch.float16 else flat
    name = "bfloat16" if flat.dtype == torch.bfloat16 else "float32"
    count = flat.numel()
    codes = torch.empty(count, dtype=torch.int8)
    escapes = native.quantise(source.data_ptr(), count, name, step, codes.data_ptr())
    return codes, escapes


def _quantise_torch(
    flat: Tensor,
    step: float,
    rounding: Rounding,
    generator: torch.Generator | None,
) -> Tensor:
    exact = _exact_type(flat.dtype)
    values = flat.to(exact)
    magnitude = values.abs()
    positive = magnitude > 0
    if rounding == "nearest":
        code = magnitude.mul_(1 / (2 * step)).ceil_()
    else:
        draw = torch.rand(flat.shape, dtype=exact, device=flat.device, generator=generator)
        code = magnitude.mul_(1 / step).add_(draw).floor_()
        code = code.add_(1).mul_(positive)
    # Every value but 0 has a code other than 0, also where the product underflows.
    code = torch.maximum(code, positive.to(exact))
    escapes = ~(code <= MAX_CODE)
    code = code.masked_fill_(escapes, 0).copysign_(values)
    return code.to(torch.int8).masked_fill_(escapes, ESCAPE)


def _exact_type(dtype: torch.dtype) -> torch.dtype:
    """What to compute in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _meaning(codes: Tensor, step: float, rounding: Rounding, dtype: torch.dtype) -> Tensor:
    """What codes stand for, by PyTorch operations."""
    code = codes.to(_exact_type(dtype))
    sign = code.sign()
    if rounding == "nearest":
        return code.mul_(2).sub_(sign).mul_(step).to(dtype)
    tiny = 2.0**-24 if dtype == torch.float16 else torch.finfo(dtype).tiny
    return code.abs_().sub_(1).mul_(step).clamp_(min=tiny).mul_(sign).to(dtype)


def every_meaning(quantised: Quantised) -> Tensor:
    """(256,) what each code, taken as an unsigned byte, stands for; on the codes' device."""
    device = quantised.codes.device
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(torch.int8)
    return _meaning(codes, quantised.step, quantised.rounding, quantised.dtype)


def dequantise(quantised: Quantised) -> Tensor:
    """The values, (n,) of the type and on the device that they had.

    On a CPU with the native core: one pass, by arithmetic for float32, by a table of 256 otherwise.
    """
    codes = quantised.codes
    if native.available and codes.device.type == "cpu":
        values = _dequantise_native(quantised)
    else:
        values = _meaning(codes, quantised.step, quantised.rounding, quantised.dtype)
    if quantised.index is not None and quantised.values is not None:
        values[quantised.index.long()] = quantised.values
    return values


def _dequantise_native(quantised: Quantised) -> Tensor:
    codes = quantised.codes
    count = codes.numel()
    values = torch.empty(count, dtype=quantised.dtype)
    if quantised.dtype == torch.float32 and quantised.rounding == "nearest":
        native.dequantise(codes.data_ptr(), count, quantised.step, values.data_ptr())
        return values
    table = every_meaning(quantised)
    size = values.element_size()
    native.look_up(codes.data_ptr(), count, size, table.data_ptr(), values.data_ptr())
    return values
