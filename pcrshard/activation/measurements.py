"""Measure peak memory and gradient noise."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from .compressor import Compressor
from .noise import convolutions
from .report import Layer


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
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.num_bytes = torch.cuda.max_memory_allocated(device) - before
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
    resident = None
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
        resident = _status("VmRSS")
    yield peak
    if resident is not None:
        peak.num_bytes = _status("VmHWM") - resident


def _status(name: str) -> int:
    """Return a figure of this process, in bytes."""
    figures = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text()))
    return int(figures[name]) * 1024


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
    weights = {
        name: module.weight
        for name, module in convolutions(model).items()
        if module.weight.requires_grad
    }

    def gradients(positions: set[int]) -> dict[str, Tensor]:
        with _undone(model):
            with saver.trial(positions):
                value = loss()
            found = torch.autograd.grad(value, list(weights.values()), allow_unused=True)
        return dict(zip(weights, found, strict=True))

    exact = gradients(set())
    rows = saver.report().rows
    inexact = gradients({position for position, row in enumerate(rows) if row.read_by})
    layers = []
    for layer in saver.report().layers:
        if layer.error_bound > 0 and layer.name in exact:
            errors = (inexact[layer.name] - exact[layer.name]).double()
            sigma = float(errors.square().mean().sqrt())
            layers.append(dataclasses.replace(layer, measured_sigma=sigma))
    return tuple(layers)


@contextlib.contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """Restore buffers and the random states of all devices, so that passes are identical."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    kind = (torch.accelerator.current_accelerator() or torch.device("cuda")).type
    devices = range(torch.accelerator.device_count())
    with torch.random.fork_rng(devices, device_type=kind):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in zip(model.buffers(), buffers, strict=True):
                    buffer.copy_(before)
