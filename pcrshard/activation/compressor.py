"""``compress_activations``: train any unmodified model in a fraction of the memory."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import sys
import warnings
from collections.abc import Iterator
from typing import Self, get_args

import torch
from torch import Tensor, nn

from ..arguments import checked
from ..errorbound import Absolute, Quantized, RelativeStd
from . import normalized
from .blocks import fused, has_core
from .codecs import CodecName, Content, encode_codes, pack_exactly
from .compiled import CompiledHooks
from .consumers import Norm
from .fixed_size import BYTE, pack, unpack, width_of
from .hooks import Hooks
from .layout import MemoryLayout, flatten, rows_of
from .noise import (
    LARGEST_FRACTION,
    GradientNoise,
    Profile,
    layers,
    mean_momentum,
    profile_convolutions,
)
from .options import ActivationOptions
from .pooling import Windows, encode_index
from .quantizer import (
    MARGIN,
    MAX_CODE,
    dequantize,
    extremes_of,
    lattice_for,
    quantize,
    standard_deviation,
)
from .report import Report, Row

Bound = RelativeStd | Absolute | GradientNoise
# The bound of tensors without an adaptive one, as a fraction of the standard deviation.
_FALLBACK = 0.05
# Warn if at least this many bytes were saved and none were compressed.
_WORTH_A_WARNING = 1 << 20


@checked(
    **{
        each.name: f"options=ActivationOptions({each.name}=...)"
        for each in dataclasses.fields(ActivationOptions)
    }
)
def compress_activations(
    model: nn.Module,
    bound: Bound | float = 0.05,
    codec: CodecName = "auto",
    options: ActivationOptions | None = None,
) -> Compressor:
    """Create a context manager for forward passes that compresses what autograd saves.

    ::

        saver = compress_activations(model)
        for images, labels in loader:
            with saver:
                loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            saver.step(optimizer)
        print(saver.report())

    Floats that result from differentiable operations change by at most the error bound; zeros and
    signs never change. Integers and booleans are packed losslessly. Everything else is kept
    unchanged: parameters and buffers, views and casts of them, tensors without gradient, small
    tensors, tensors of few dimensions, results of softmax and similar, and other tensor types.

    In code compiled by ``torch.compile``, codes are packed inside the graph, as ``int8`` or, with
    the codecs ``auto`` and ``bits``, in as many bits as the bound requires. There and on an
    accelerator, the bound of a block of 64 values is doubled until each has a code, and a block
    with a NaN becomes NaN.

    Args:
        model: Any module, including DDP and FSDP2; its parameters are never compressed.
        bound: A fraction of each tensor's standard deviation, or :class:`RelativeStd`,
            :class:`Absolute` or :class:`GradientNoise`.
        codec: ``zstd`` compresses well, on the CPU. ``bits`` and ``int8`` work on any device.
            ``auto`` is ``zstd`` for tensors on a CPU and ``bits`` for those on an accelerator.
            ``none`` only measures and keeps everything unchanged.
        options: All other options; defaults if ``None``.

    Raises:
        ValueError: The bound cannot be met, the codec is unknown, or two settings conflict.
        TypeError: The bound has an unsupported type.
    """
    return Compressor(model, _checked(bound), codec, options or ActivationOptions())


def _checked(bound: Bound | float) -> Bound:
    if isinstance(bound, int | float):
        bound = RelativeStd(bound)
    if not isinstance(bound, RelativeStd | Absolute | GradientNoise):
        raise TypeError(
            "expected a fraction of the standard deviation, RelativeStd, Absolute or GradientNoise,"
            f" got {bound!r}"
        )
    least = 1 / (2 * MAX_CODE)
    if isinstance(bound, RelativeStd) and bound.fraction < least:
        raise ValueError(
            f"expected a fraction of at least {least:.4f}, got {bound.fraction!r}: codes have one "
            f"byte and reach {2 * MAX_CODE} bounds, which must be the standard deviation or more"
        )
    return bound


class Compressor:
    """The context manager that :func:`compress_activations` returns.

    Attributes:
        ledger: Counter of live compressed bytes.
        bound: The error bound.
        profiles: Profiles of the convolutions in the last profiled step.

    Args:
        model: The model.
        bound: The error bound.
        codec: The lossless coder of codes.
        options: Which floats may be changed, and how.
    """

    def __init__(
        self, model: nn.Module, bound: Bound, codec: CodecName, options: ActivationOptions
    ) -> None:
        if codec not in get_args(CodecName):
            raise ValueError(f"expected a codec of {get_args(CodecName)}, got {codec!r}")
        self.bound = bound
        self.profiles: dict[str, Profile] = {}
        self._model = model
        self._codec = codec
        self._options = options
        self._seeds = itertools.count()
        if codec == "none":  # every tensor is too small
            options = dataclasses.replace(options, min_bytes=sys.maxsize)
        self._fixed = RelativeStd(_FALLBACK) if isinstance(bound, GradientNoise) else bound
        self._compiled = CompiledHooks(self._fixed, options, use_bits=codec in ("auto", "bits"))
        self._hooks = Hooks(self._encode, options, self._compiled)
        self.ledger = self._hooks.ledger
        self._context = contextlib.ExitStack()
        self._is_open = False
        self._steps = 0
        self._passes = 0
        # The rows of the last profiled step, and its adaptive bounds.
        self._profiled: dict[object, Row] = {}
        self._bounds: dict[object, float] = {}
        # In a trial, the positions of the tensors to compress.
        self._only: set[int] | None = None
        self._warned: set[str] = set()

    def __enter__(self) -> Self:
        """Start compressing the tensors that autograd saves in this thread.

        Raises:
            RuntimeError: This context manager is already in use.
        """
        if self._is_open:
            raise RuntimeError("expected one with block at a time for each compressor")
        self._hooks.begin(self._model)
        # A bound for the input of a convolution holds for what is stored only.
        self._hooks.is_deriving = self._only is None and not isinstance(self.bound, GradientNoise)
        if self._only is not None or (self._passes == 0 and self._is_due()):
            self.profiles = {}
            # Within the same bound, stochastic rounding has half the variance.
            variance = 1 / 3 if self._options.rounding == "nearest" else 1 / 6
            self._context.enter_context(profile_convolutions(self._model, self.profiles, variance))
            self._profiled = self._hooks.rows
        self._context.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._hooks.graphs))
        self._is_open = True
        return self

    def __exit__(self, *error: object) -> None:
        """Stop compressing; the graph keeps the compressed tensors."""
        self._is_open = False
        self._context.close()
        self._hooks.end(sys._getframe(1))
        if self._only is None:
            self._passes += 1
            if error[0] is None and self._codec != "none":
                self._warn_of_little()

    @contextlib.contextmanager
    def trial(self, positions: set[int]) -> Iterator[None]:
        """Create a context for a profiled pass that is not part of training.

        Args:
            positions: Positions, in the order of saving, of the tensors to compress.
        """
        self._only = positions
        try:
            with self:
                yield
        finally:
            self._only = None

    def _warn_of_little(self) -> None:
        """Warn if less is compressed than a user would expect."""
        report = self._report()
        if report.raw_bytes > _WORTH_A_WARNING and report.stored_bytes == report.raw_bytes:
            self._warn(
                f"none of the {len(report.rows)} saved tensors was compressed: expected results of "
                "differentiable operations, of at least min_bytes and min_dims",
                stacklevel=4,
            )
        is_other = isinstance(self.bound, GradientNoise) or self._options.rounding != "nearest"
        if self._compiled.rows and (self._codec == "zstd" or is_other):
            self._warn(
                "torch.compile: compiled code packs codes as int8, rounded to the nearest one, "
                "with a fraction of the standard deviation as the bound; another codec, rounding, "
                "or bound applies to the parts of the model that run eagerly",
                stacklevel=4,
            )

    def _warn(self, message: str, stacklevel: int) -> None:
        """Warn once, whatever other code does to the filters of warnings."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=stacklevel)

    def _encode(
        self, tensor: Tensor, layout: MemoryLayout, row: Row, by: Norm | Windows | None
    ) -> Content | None:
        """Encode a tensor; return ``None`` to keep the tensor itself."""
        codec = self._codec
        if codec == "auto":
            codec = "zstd" if has_core(tensor.device) else "bits"
        if isinstance(by, Windows):
            return encode_index(tensor, layout, by, codec)
        if row.kind == "lossless" or tensor.dtype == torch.bool:
            return pack_exactly(flatten(tensor, layout.order), codec)
        if self._only is not None and row.position not in self._only:
            return None
        is_native = has_core(tensor.device)
        is_simple = self._options.rounding == "nearest" and tensor.dtype != torch.float64
        is_fixed = is_simple and codec in ("int8", "bits") and not is_native
        is_own = row.identity in self._bounds or isinstance(self._fixed, Absolute)
        if by is not None and not is_own and is_simple and (is_native or is_fixed):
            return self._encode_by(by, tensor, layout, row, codec)
        rows = rows_of(tensor, layout)
        if is_fixed:
            return self._encode_in_fixed_size(rows.reshape(-1), row, use_bits=codec == "bits")
        return self._encode_rows(rows, row, codec)

    def _encode_rows(self, rows: Tensor, row: Row, codec: CodecName) -> Content | None:
        """Encode with one bound for the whole tensor."""
        row.deviation = standard_deviation(rows, self._fixed.outlier_guard)
        if row.deviation == 0 and bool((rows == rows[0, 0]).all()):
            row.kind = "lossless"
            return pack_exactly(rows.reshape(-1), codec)
        row.error_bound = self._fixed.absolute(row.deviation)
        if row.identity in self._bounds:
            row.error_bound = min(self._bounds[row.identity], LARGEST_FRACTION * row.deviation)
        seed = None if self._options.rounding == "nearest" else next(self._seeds)
        lattice = lattice_for(row.error_bound, rows.dtype, seed, extremes_of(rows))
        quantized = None if lattice is None else quantize(rows, lattice)
        if lattice is None or quantized is None:
            return None
        codes, index, words = quantized
        packed = encode_codes(codes, codec)
        num_bytes = packed.num_bytes + index.nbytes + words.nbytes

        def decode() -> Tensor:
            return dequantize(Quantized(packed.decode(), index, words), lattice)

        return Content(num_bytes, decode) if num_bytes < rows.nbytes else None

    def _encode_by(
        self, norm: Norm, tensor: Tensor, layout: MemoryLayout, row: Row, codec: CodecName
    ) -> Content | None:
        """Encode the input of a normalization by its statistics."""
        fraction = self._fixed.absolute(1.0)
        largest = 1 / norm.rstd.min().float()
        row.figures = torch.stack([fraction * (1 - MARGIN) * largest, largest])
        if has_core(tensor.device):
            return normalized.encode(tensor, layout, norm, fraction, codec)
        width = width_of(self._fixed, "") if codec == "bits" else BYTE
        return normalized.encode_in_fixed_size(tensor, layout, norm, fraction, width)

    def _encode_in_fixed_size(self, flat: Tensor, row: Row, *, use_bits: bool) -> Content:
        target: list[Tensor] = []
        width = BYTE
        if row.identity in self._bounds:
            target.append(flat.new_full((), self._bounds[row.identity], dtype=torch.float32))
        elif use_bits:
            width = width_of(self._fixed, row.function)
        count, device, dtype = len(flat), flat.device, flat.dtype
        parts = fused(pack, device, width, self._fixed)(flat, *target)
        row.figures = parts[-1]
        num_bytes = sum(part.nbytes for part in parts)
        return Content(num_bytes, lambda: fused(unpack, device, width, dtype)(*parts)[:count])

    def step(
        self, optimizer: torch.optim.Optimizer | None = None, *, grad_scale: float = 1.0
    ) -> None:
        """Record an optimizer step; call after ``optimizer.step()``.

        The adaptive bound reads momentum and gradients here, so do not clear the gradients before
        this call if the optimizer has no momentum. Warns once if no forward pass ran inside a
        ``with`` block since the last step.

        Args:
            optimizer: The optimizer whose momentum the noise is relative to.
            grad_scale: The gradient scaler's factor, if any.
        """
        if self._passes == 0:
            self._warn(
                "no forward pass ran inside of `with saver:` since the last step", stacklevel=3
            )
        if isinstance(self.bound, GradientNoise) and self._is_due():
            # Each accumulated backward pass adds its own noise.
            scale = grad_scale / math.sqrt(max(self._passes, 1))
            momentum = mean_momentum(self._model, optimizer, scale)
            self._bounds = self.bound.bounds(self.profiles, self._profiled.values(), momentum)
        self._steps += 1
        self._passes = 0

    def _is_due(self) -> bool:
        return isinstance(self.bound, GradientNoise) and self.bound.is_due(self._steps)

    def report(self) -> Report:
        """Return the figures of the last forward pass; waits for work on an accelerator."""
        for row in (*self._hooks.rows.values(), *self._profiled.values()):
            row.settle()
        return self._report()

    def _report(self) -> Report:
        return Report(
            self.ledger.peak_bytes,
            (*self._hooks.rows.values(), *self._compiled.rows.values()),
            layers(self.profiles, self._profiled.values()),
            tuple(self._warned),
        )
