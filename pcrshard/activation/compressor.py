"""``compress_activations``: train any unmodified model in a fraction of the memory."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from ..errorbound import Absolute, RelativeStd
from .adaptive import FALLBACK, AdaptiveBounds, mean_momentum
from .codecs import Codec, CodecName
from .compiled import CompiledHooks
from .exact import pack_exactly
from .hooks import Hooks
from .layout import Layout
from .noise_bound import GradientNoise, Profile, noise_per_bound
from .options import ActivationOptions
from .quantizer import MAX_CODE, lattice_for, standard_deviation
from .report import Layer, Report
from .stored import Constant, Content, Encoder, Ledger, Row
from .trace import Trace

Bound = RelativeStd | Absolute | GradientNoise
# Warn if at least this many bytes were saved and none were compressed.
_WORTH_A_WARNING = 1 << 20


def compress_activations(
    model: nn.Module,
    bound: Bound | float = 0.05,
    codec: CodecName = "zstd",
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
    the codec ``bits``, in as many bits as the bound requires.

    Args:
        model: Any module, including DDP and FSDP2; its parameters are never compressed.
        bound: A fraction of each tensor's standard deviation, or :class:`RelativeStd`,
            :class:`Absolute` or :class:`GradientNoise`.
        codec: ``zstd`` compresses well, on the CPU. ``predicted`` is smaller and slower: it infers
            the output of a ReLU from tensors saved before it (:mod:`.prediction`); ResNets take a
            fifth less memory, with bit-identical gradients. ``bits`` and ``int8`` work on any
            device. ``none`` only measures and keeps everything unchanged.
        options: All other options; defaults if ``None``.

    Raises:
        ValueError: The bound cannot be met, or two settings conflict.
        TypeError: The bound has an unsupported type.
    """
    return Compressor(
        model, _checked(bound), Codec(codec), ActivationOptions() if options is None else options
    )


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
        rounding: The quantizer's rounding mode.
        profiles: Profiles of the convolutions in the last profiled step.

    Args:
        model: The model.
        bound: The error bound.
        codec: The lossless coder of codes.
        options: Which floats may be changed, and how.
    """

    def __init__(
        self, model: nn.Module, bound: Bound, codec: Codec, options: ActivationOptions
    ) -> None:
        if codec.name == "predicted" and options.rounding != "nearest":
            raise ValueError("expected rounding nearest with the codec predicted, got stochastic")
        self.bound = bound
        self.rounding = options.rounding
        self.ledger = Ledger()
        self.profiles: dict[str, Profile] = {}
        self._model = model
        self._codec = Codec(codec.name, options.offload)
        self._seed = options.seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._encoder = Encoder(self._codec)
        self._compiled = None if codec.name == "none" else _compiled_hooks(bound, codec, options)
        self._hooks = Hooks(self._encode, self.ledger, options, self._compiled)
        self._adaptive = (
            AdaptiveBounds(bound, options.rounding) if isinstance(bound, GradientNoise) else None
        )
        self._context: contextlib.AbstractContextManager[object] | None = None
        self._steps = 0
        self._passes = 0
        self._names: list[str] = []
        self._profiled: list[Row] = []
        self._only: set[int] | None = None
        self._in_trial = False
        self._warned: set[str] = set()

    def __enter__(self) -> Self:
        """Start compressing the tensors that autograd saves in this thread."""
        if self._context is not None:
            raise RuntimeError("expected one with block at a time for each compressor")
        self._hooks.begin(self._model)
        profile = self._in_trial or (self._passes == 0 and self._is_due())
        if profile or not self._names:
            self._hooks.trace = Trace(self._model, measure=profile)
        self._context = torch.autograd.graph.saved_tensors_hooks(*self._hooks.graphs)
        self._context.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop compressing; the graph keeps the compressed tensors."""
        context = self._context
        assert context is not None
        self._context = None
        context.__exit__(kind, error, traceback)
        self._hooks.end()
        self._encoder.forget()
        self._end_trace(complete=kind is None)
        self._passes += 1
        if kind is None:
            self._warn_of_little()

    @contextlib.contextmanager
    def trial(self, positions: set[int]) -> Iterator[None]:
        """Create a context for a profiled pass that is not part of training.

        Args:
            positions: Positions, in the order of saving, of the tensors to compress.
        """
        passes = self._passes
        self._only = positions
        self._in_trial = True
        try:
            with self:
                yield
        finally:
            self._only = None
            self._in_trial = False
            self._passes = passes

    def _end_trace(self, *, complete: bool) -> None:
        trace = self._hooks.trace
        self._hooks.trace = None
        rows = self._hooks.rows
        if trace is not None:
            trace.close()
            if complete:
                self.profiles = trace.profiles
                self._profiled = rows
                self._names = [row.name for row in rows]
        for row, name in zip(rows, self._names, strict=False):
            row.name = name
        for name, profile in self.profiles.items():
            for ordinal in profile.ordinals:
                if ordinal < len(rows):
                    rows[ordinal].read_by += (name,)

    def _warn_of_little(self) -> None:
        """Warn if less is compressed than a user would expect."""
        compiled = self._compiled
        report = self.report()
        if compiled is not None and not self._in_trial:
            if report.raw_bytes > _WORTH_A_WARNING and report.stored_bytes == report.raw_bytes:
                self._warn(
                    f"none of the {len(report.rows)} saved tensors was compressed: expected results"
                    " of differentiable operations, of at least min_bytes and min_dims"
                )
            others = self._codec.is_zstd or self._adaptive is not None
            if compiled.rows and (others or self.rounding != "nearest"):
                self._warn(
                    "torch.compile: compiled code packs codes as int8, rounded to the nearest one, "
                    "with a fraction of the standard deviation as the bound; codec "
                    f"{self._codec.name}, rounding {self.rounding} and {type(self.bound).__name__} "
                    "apply to the parts of the model that run eagerly"
                )

    def _warn(self, message: str) -> None:
        """Log a warning once."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=4)

    def _encode(self, flat: Tensor, layout: Layout, ordinal: int, row: Row) -> Content | None:
        """Encode a flat tensor; return ``None`` to keep the tensor itself."""
        is_left_out = self._only is not None and ordinal not in self._only
        if self._codec.name == "none" or (row.kind == "lossy" and is_left_out):
            return None
        if row.kind == "lossless":
            return pack_exactly(flat, self._codec)
        guard = self.bound.outlier_guard if isinstance(self.bound, RelativeStd) else math.inf
        row.deviation = float(standard_deviation(flat, guard))
        if row.deviation == 0 and bool((flat == flat[0]).all()):
            row.kind = "constant"
            return Constant(flat[:1].clone(), flat.numel())
        row.error_bound = self._error_bound(ordinal, row)
        lattice = lattice_for(row.error_bound, flat.dtype, self.rounding)
        generator = self._generator(flat.device)
        if lattice is None:
            return None
        return self._encoder.encode(flat, lattice, layout, generator)

    def _error_bound(self, ordinal: int, row: Row) -> float:
        if isinstance(self.bound, Absolute):
            return self.bound.error_bound
        if isinstance(self.bound, RelativeStd):
            return self.bound.fraction * row.deviation
        assert self._adaptive is not None
        return self._adaptive.bound(ordinal, row)

    def _generator(self, device: torch.device) -> torch.Generator | None:
        if self.rounding == "nearest":
            return None
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

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
            self._warn("no forward pass ran inside of `with saver:` since the last step")
        if self._adaptive is not None and self._is_due() and self._profiled:
            # Each accumulated backward pass adds its own noise.
            scale = grad_scale / math.sqrt(max(self._passes, 1))
            momentum = mean_momentum(self._model, optimizer)
            self._adaptive.update(self.profiles, self._profiled, momentum, scale)
        self._steps += 1
        self._passes = 0

    def _is_due(self) -> bool:
        return isinstance(self.bound, GradientNoise) and self.bound.is_due(self._steps)

    def report(self) -> Report:
        """Return the figures of the last forward pass, at no cost."""
        compiled = () if self._compiled is None else self._compiled.rows.values()
        return Report(
            self.ledger.peak_bytes,
            self.ledger.live_bytes,
            torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
            (*self._hooks.rows, *compiled),
            self._layers(),
            tuple(self._warned),
        )

    def _layers(self) -> tuple[Layer, ...]:
        layers = []
        for name, profile in self.profiles.items():
            if profile.energy > 0:
                bounds = [self._profiled[ordinal].error_bound for ordinal in profile.ordinals]
                error_bound = max(bounds, default=0.0)
                sigma = error_bound * noise_per_bound(profile, self.rounding)
                layers.append(Layer(name, error_bound, sigma))
        return tuple(layers)


def _compiled_hooks(bound: Bound, codec: Codec, options: ActivationOptions) -> CompiledHooks:
    return CompiledHooks(
        RelativeStd(FALLBACK) if isinstance(bound, GradientNoise) else bound,
        use_bits=codec.name == "bits",
        min_bytes=options.min_bytes,
        min_dims=options.min_dims,
    )
