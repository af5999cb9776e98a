"""``compress_activations``: any model, unmodified, trained in a fraction of the memory."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from .adaptive import AdaptiveBounds, mean_momentum
from .codecs import Codec, CodecName, make_codec
from .hooks import Hooks, Limits, is_compiled, parameter_storages
from .layout import Layout
from .masks import pack_exactly, pack_nonzero
from .noise_bound import (
    Absolute,
    Bound,
    GradientNoise,
    Profile,
    RelativeStd,
    deviation,
    noise_per_bound,
)
from .report import Layer, Report
from .sign_exact import Rounding
from .stored import Constant, Content, Ledger, Predictor, Row, encode_floats
from .trace import Trace

_COMPILED = (
    "torch.compile: compiled code asks for all saved tensors at the start of its backward pass, so "
    "that what it saves is not compressed; only parts of the model that run eagerly are"
)


def compress_activations(
    model: nn.Module,
    bound: Bound | float = 0.05,
    codec: CodecName = "zstd",
    *,
    min_bytes: int = 16_384,
    min_dims: int = 3,
    rounding: Rounding = "nearest",
    seed: int = 0,
    timeline: bool = False,
    offload: bool = False,
    inputs: bool = False,
) -> Compressor:
    """A context manager for forward passes: what autograd saves in it is kept compressed.

    ::

        saver = compress_activations(model)
        for images, labels in loader:
            with saver:
                loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            saver.step(optimizer)
        print(saver.report())

    Floats that are results of differentiable operations are changed by at most the error bound;
    zeros and signs never. Integers and booleans are packed exactly. Everything else is kept as it
    is: parameters and buffers, views and casts of them, tensors without gradient, small ones, those
    of few dimensions, results of softmax and the like, and tensors of other kinds.

    Args:
        model: Any module; its parameters are found through it, also under DDP and FSDP2.
        bound: A share of each tensor's standard deviation, or :class:`RelativeStd`,
            :class:`Absolute` or :class:`GradientNoise`.
        codec: ``zstd`` is small, on the CPU. ``predicted`` is smaller, and slower: it predicts
            what a ReLU gives from what was saved before it (:mod:`.prediction`); ResNets take a
            fifth less, for bit for bit the same gradients. ``bits`` and ``int8`` work on any
            device. ``none`` keeps everything as it is, and counts.
        min_bytes: Smaller tensors are exact.
        min_dims: Floats of fewer dimensions are exact.
        rounding: ``nearest``, or ``stochastic``, which is unbiased, and slower on a CPU.
        seed: Of stochastic rounding, which leaves the global generators alone.
        timeline: Whether to note live bytes over time, in ``ledger.timeline``.
        inputs: Whether floats without gradient may be changed, too. The paper does so with images;
            memory is saved only where nobody else holds them.
        offload: Whether what is compressed waits in the host's memory; for accelerators.

    Raises:
        ValueError: A setting that means nothing.
    """
    if isinstance(bound, int | float):
        bound = RelativeStd(float(bound))
    if codec == "predicted" and rounding != "nearest":
        raise ValueError(f"expected rounding nearest with the codec predicted, got {rounding!r}")
    limits = Limits(min_bytes, min_dims, inputs)
    coder = make_codec(codec, offload=offload)
    return Compressor(
        model,
        bound,
        coder,
        limits,
        rounding,
        seed,
        Ledger(timeline=timeline),
        Predictor(remembers=codec == "predicted"),
    )


class Compressor:
    """See :func:`compress_activations`, which makes it.

    Attributes:
        ledger: Bytes that are alive.
        bound: How large errors may be.
        rounding: Of the quantiser.
        profiles: Of the convolutions, in the last step that was profiled.

    Args:
        model: The model.
        bound: How large errors may be.
        codec: What makes codes smaller; ``None`` to count only.
        limits: Which floats may be changed.
        rounding: How.
        seed: Of stochastic rounding.
        ledger: Counts bytes.
        predictor: Codes what is left of codes.
    """

    def __init__(
        self,
        model: nn.Module,
        bound: Bound,
        codec: Codec | None,
        limits: Limits,
        rounding: Rounding,
        seed: int,
        ledger: Ledger,
        predictor: Predictor,
    ) -> None:
        if rounding not in ("nearest", "stochastic"):
            raise ValueError(f"expected rounding nearest or stochastic, got {rounding!r}")
        self.bound = bound
        self.ledger = ledger
        self._model = model
        self._codec = codec
        self.rounding = rounding
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._hooks = Hooks(self._encode, ledger, limits)
        self._predictor = predictor
        self._adaptive = _adaptive(bound, rounding)
        self._context: contextlib.AbstractContextManager[object] | None = None
        self._steps = 0
        self._passes = 0
        self._names: list[str] = []
        self._profiled: list[Row] = []
        self.profiles: dict[str, Profile] = {}
        self._only: set[int] | None = None
        self._in_trial = False
        self._warned = False

    def __enter__(self) -> Self:
        """Starts to compress what this thread's autograd saves."""
        if self._context is not None:
            raise RuntimeError("expected one with block at a time for each compressor")
        self._hooks.forget()
        self._hooks.begin(parameter_storages(self._model))
        profile = self._is_profile()
        if profile or not self._names:
            self._hooks.trace = Trace(self._model, measure=profile)
        self._context = torch.autograd.graph.saved_tensors_hooks(
            self._hooks.pack, self._hooks.unpack
        )
        self._context.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends it; the graph goes on to hold what was compressed."""
        context = self._context
        assert context is not None
        self._context = None
        context.__exit__(kind, error, traceback)
        self._hooks.end()
        self._predictor.forget()
        self._end_trace(complete=kind is None)
        self._passes += 1
        self._state_compiled()

    @contextlib.contextmanager
    def trial(self, positions: set[int]) -> Iterator[None]:
        """A profiled pass that is no part of training.

        Args:
            positions: Of the tensors that are compressed, in the order in which they are saved.
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

    def _is_profile(self) -> bool:
        """Whether this pass is measured: the first of a step for which the bound wants it."""
        return self._in_trial or (self._passes == 0 and self._is_due())

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

    def _state_compiled(self) -> None:
        if not self._warned and (self._hooks.saw_compiled or is_compiled(self._model)):
            self._warned = True
            warnings.warn(_COMPILED, stacklevel=3)

    def _encode(self, flat: Tensor, layout: Layout, ordinal: int, row: Row) -> Content | None:
        """What is kept of a flat tensor; ``None`` for the tensor itself."""
        if self._codec is None:
            return None
        if row.kind != "lossy":
            pack = pack_exactly if row.kind == "lossless" else pack_nonzero
            return pack(flat, self._codec)
        if self._only is not None and ordinal not in self._only:
            return None
        row.deviation = deviation(flat)
        if row.deviation == 0:
            row.kind = "constant"
            return _constant(flat)
        row.error_bound = self._error_bound(ordinal, flat, row)
        if not (row.error_bound > 0 and math.isfinite(row.error_bound)):
            return None
        return encode_floats(
            flat,
            row.error_bound,
            self._codec,
            self.rounding,
            self._generator(flat.device),
            self._predictor,
            layout,
        )

    def _error_bound(self, ordinal: int, flat: Tensor, row: Row) -> float:
        bound = self.bound
        if isinstance(bound, Absolute):
            return bound.error_bound
        if isinstance(bound, RelativeStd):
            return bound.share * row.deviation
        assert self._adaptive is not None
        return self._adaptive.bound(ordinal, row, row.deviation)

    def _generator(self, device: torch.device) -> torch.Generator | None:
        if self.rounding == "nearest":
            return None
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    def step(
        self, optimizer: torch.optim.Optimizer | None = None, *, grad_scale: float = 1.0
    ) -> None:
        """Tells that the weights have changed; after ``optimizer.step()``.

        Only the adaptive bound needs it. It reads momentum and gradients, so that the gradients
        must still be there if the optimiser has no momentum.

        Args:
            optimizer: Its momentum is what noise is compared with.
            grad_scale: The gradient scaler's factor, if there is one.
        """
        if self._adaptive is not None and self._is_due() and self._profiled:
            # Each of several accumulated passes adds its own noise.
            scale = grad_scale / math.sqrt(max(self._passes, 1))
            momentum = mean_momentum(self._model, optimizer)
            self._adaptive.update(self.profiles, self._profiled, momentum, scale)
        self._steps += 1
        self._passes = 0

    def _is_due(self) -> bool:
        return isinstance(self.bound, GradientNoise) and self.bound.is_due(self._steps)

    def report(self) -> Report:
        """What was done to the tensors of the last forward pass; costs nothing."""
        return Report(
            self.ledger.peak_bytes,
            self.ledger.live_bytes,
            _device_peak(),
            tuple(self._hooks.rows),
            self._layers(),
            _COMPILED if self._warned else "",
        )

    def _layers(self) -> tuple[Layer, ...]:
        layers = []
        for name, profile in self.profiles.items():
            if profile.energy == 0:
                continue
            bounds = [self._profiled[ordinal].error_bound for ordinal in profile.ordinals]
            error_bound = max(bounds, default=0.0)
            sigma = error_bound * noise_per_bound(profile, self.rounding)
            layers.append(Layer(name, error_bound, sigma))
        return tuple(layers)


def _adaptive(bound: Bound, rounding: Rounding) -> AdaptiveBounds | None:
    return AdaptiveBounds(bound, rounding) if isinstance(bound, GradientNoise) else None


def _constant(flat: Tensor) -> Constant | None:
    """All elements are the same and finite, or there is no such thing."""
    first = flat[:1].clone()
    return Constant(first, flat.numel()) if bool((flat == first).all()) else None


def _device_peak() -> int | None:
    """The most bytes that were allocated on the accelerator, if there is one."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
