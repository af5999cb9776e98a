"""Measure peak memory, gradient noise, and the largest batch that fits."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from .compressor import Compressor
from .noise_bound import noise_per_bound
from .report import Layer
from .trace import convolutions


@dataclasses.dataclass
class Peak:
    """Peak bytes above the start; ``None`` if the system does not report them."""

    num_bytes: int | None = None


@contextlib.contextmanager
def peak_memory(device: torch.device | str = "cpu") -> Iterator[Peak]:
    """Measure the peak memory of a ``with`` block.

    On a CPU, measures the process's resident set by Linux's high-water mark, which is reset first.
    Memory freed earlier is returned to the system, so that its reuse by the block counts. The C
    library may keep memory that the block itself frees: for comparable figures, start the process
    with ``MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536``. On CUDA, measures the bytes
    allocated by PyTorch's allocator.
    """
    peak = Peak()
    gc.collect()
    _give_back()
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.num_bytes = torch.cuda.max_memory_allocated(device) - before
        return
    resident = _reset_high_water()
    yield peak
    high = _status("VmHWM")
    if resident is not None and high is not None:
        peak.num_bytes = high - resident


def _give_back() -> None:
    """Return freed memory to the system, if the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _reset_high_water() -> int | None:
    """Reset the high-water mark and return the bytes that are resident now."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return None
    return _status("VmRSS")


def _status(name: str) -> int | None:
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith(name + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def gradient_noise(
    saver: Compressor, model: nn.Module, loss: Callable[[], Tensor]
) -> tuple[Layer, ...]:
    """Predict and measure the noise of each convolution's weight gradient.

    Runs two passes: one exact, and one that compresses only the inputs of convolutions, so that
    layers do not affect each other's error. Gradients, buffers, and random states are restored.

    Args:
        saver: The compressor whose bounds and quantizer are used.
        model: The compressor's model.
        loss: Runs the forward pass; called twice, on the same batch.

    Returns:
        The convolutions whose input can be compressed; the first one is excluded because its input
        has no gradient.
    """
    modules = convolutions(model)
    with _undone(model):
        exact = _weight_gradients(saver, modules, loss, set())
    profiles = dict(saver.profiles)
    positions = {ordinal for profile in profiles.values() for ordinal in profile.ordinals}
    with _undone(model):
        inexact = _weight_gradients(saver, modules, loss, positions)
    rows = saver.report().rows
    layers = []
    for name, profile in profiles.items():
        bounds = [rows[ordinal].error_bound for ordinal in profile.ordinals]
        error_bound = max(bounds, default=0.0)
        if error_bound > 0 and name in exact:
            predicted = error_bound * noise_per_bound(profile, saver.rounding)
            measured = _root_mean_square(inexact[name] - exact[name])
            layers.append(Layer(name, error_bound, predicted, measured))
    return tuple(layers)


def _root_mean_square(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


@contextlib.contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """Restore buffers and the random states of all devices, so that passes are identical."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    accelerator = torch.accelerator.current_accelerator()
    kind = "cuda" if accelerator is None else accelerator.type
    devices = range(0 if accelerator is None else torch.accelerator.device_count())
    with torch.random.fork_rng(devices, device_type=kind):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in zip(model.buffers(), buffers, strict=True):
                    buffer.copy_(before)


def _weight_gradients(
    saver: Compressor,
    modules: dict[str, nn.Module],
    loss: Callable[[], Tensor],
    positions: set[int],
) -> dict[str, Tensor]:
    with saver.trial(positions):
        value = loss()
    used = {}
    for name, module in modules.items():
        weight = module.weight
        if isinstance(weight, Tensor) and weight.requires_grad:
            used[name] = weight
    gradients = torch.autograd.grad(value, list(used.values()), allow_unused=True)
    return {
        name: gradient
        for name, gradient in zip(used, gradients, strict=True)
        if gradient is not None
    }


@dataclasses.dataclass(frozen=True)
class Fit:
    """The largest batch that fits.

    Attributes:
        batch_size: Number of samples; 0 if not even one fits.
        peak_bytes: Peak memory of a step with this batch size.
        samples_per_second: Throughput of a step with this batch size.
    """

    batch_size: int
    peak_bytes: int
    samples_per_second: float


def find_batch_size(
    step: Callable[[int], None],
    budget_bytes: int,
    *,
    device: torch.device | str = "cpu",
    most: int = 4096,
    multiple: int = 1,
) -> Fit:
    """Find the largest batch whose step stays within a budget, by doubling and then bisecting.

    Each size runs twice, because the first step allocates memory that later steps reuse. A step
    that runs out of memory does not fit.

    Args:
        step: Runs one training step with the given batch size, on synthetic or real data. To
            compare with and without compression, run two searches.
        budget_bytes: Memory that a step may take above that in use before it.
        device: The device whose memory is measured.
        most: Largest batch size to try.
        multiple: Sizes are multiples of this.

    Raises:
        RuntimeError: The system does not report the memory use of a process.
    """
    fit = Fit(0, 0, 0.0)
    low = 0
    high = most // multiple + 1
    size = 1
    while low + 1 < high:
        tried = _try(step, size * multiple, budget_bytes, device)
        if tried is None:
            high = size
        else:
            fit = tried
            low = size
        middle = (low + high) // 2
        size = min(2 * low, middle) if low else middle
    return fit


def _try(
    step: Callable[[int], None], size: int, budget: int, device: torch.device | str
) -> Fit | None:
    try:
        with peak_memory(device) as peak:
            step(size)
            begun = time.perf_counter()
            step(size)
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - begun
    except (MemoryError, torch.OutOfMemoryError):
        return None
    if peak.num_bytes is None:
        raise RuntimeError("expected Linux's /proc or CUDA, to measure memory; there is neither")
    if peak.num_bytes > budget:
        return None
    return Fit(size, peak.num_bytes, size / seconds)
