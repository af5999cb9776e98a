"""Memory savings and cost of compression in the last forward pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Self

import torch

from .layout import size_hint
from .quantizer import MARGIN

_LARGEST = 10


@dataclasses.dataclass
class Row:
    """The report row of one saved tensor.

    Attributes:
        name: The innermost module that ran when it was first saved; ``""`` outside modules.
        function: The operation that computed it; ``""`` for inputs and parameters.
        kind: ``lossy``, ``lossless``, ``exact`` (kept by reference), ``derived`` or ``recomputed``
            (from other tensors).
        shape: The tensor's shape.
        dtype: The tensor's type.
        raw_bytes: Size of the elements in bytes.
        stored_bytes: Size of the stored form in bytes.
        error_bound: Largest absolute error of an element; 0 if exact, derived or recomputed, NaN if
            determined inside compiled code. For the input of a normalization, that of the channel
            or row with the largest deviation. On an accelerator, it is larger in a block of 64
            values of which some are beyond the codes.
        deviation: Standard deviation of its elements, estimated from a sample.
        seconds: Time of packing and unpacking.
        position: Its position in the order of saving.
        read_by: The convolutions that read it as their input.
        compiled: Whether it is packed in compiled code.
        figures: Step, standard deviation, and extremes, while they are on an accelerator.
    """

    name: str
    function: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    raw_bytes: int
    stored_bytes: int
    error_bound: float = 0.0
    deviation: float = 0.0
    seconds: float = 0.0
    position: int = 0
    read_by: tuple[str, ...] = ()
    compiled: bool = False
    figures: torch.Tensor | None = None

    @classmethod
    def of(cls, name: str, function: str, tensor: torch.Tensor) -> Self:
        """Return the row of a tensor, real or traced, that is kept by reference."""
        shape = tuple(map(size_hint, tensor.shape))
        num_bytes = math.prod(shape) * tensor.dtype.itemsize
        return cls(name, function, "exact", shape, tensor.dtype, num_bytes, num_bytes)

    def settle(self) -> None:
        """Fetch the figures from the accelerator."""
        if self.figures is not None:
            step, self.deviation, *_ = self.figures.tolist()
            self.error_bound = step / (1 - MARGIN)
            self.figures = None

    @property
    def label(self) -> str:
        """The module's name, or the function's if no module saved the tensor."""
        return self.name or self.function or "input"

    @property
    def identity(self) -> object:
        """What distinguishes the tensors of one step; independent of the batch size."""
        return self.position, self.dtype, self.shape[1:]


@dataclasses.dataclass(frozen=True)
class Layer:
    """The noise in one convolution's weight gradient.

    Attributes:
        name: Name of the convolution.
        error_bound: Bound for its input in the last forward pass.
        predicted_sigma: Standard deviation of its weight gradient's error, by the formula.
        measured_sigma: The same, measured on demand; ``None`` if not measured.
    """

    name: str
    error_bound: float
    predicted_sigma: float
    measured_sigma: float | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """The figures of a compressor.

    Attributes:
        peak_bytes: Peak of live compressed bytes in eager code, over all steps; see also
            :func:`pcrshard.activation.peak_memory`.
        rows: Every tensor saved in the last forward pass, once, excluding parameters; for compiled
            code, every saved tensor, excluding inputs and outputs.
        layers: The convolutions of the last profiled step.
        notes: Warnings.
    """

    peak_bytes: int
    rows: Sequence[Row]
    layers: Sequence[Layer] = ()
    notes: Sequence[str] = ()

    @property
    def raw_bytes(self) -> int:
        """Bytes of all tensors that the last forward pass saved, each counted once.

        They are the peak without compression if all of them wait for one backward pass.
        """
        return sum(row.raw_bytes for row in self.rows)

    @property
    def stored_bytes(self) -> int:
        """The same with compression, exact tensors included."""
        return sum(row.stored_bytes for row in self.rows)

    @property
    def ratio(self) -> float:
        """Raw divided by stored bytes, over all tensors."""
        return _ratio(self.rows)

    @property
    def ratio_of_conv_inputs(self) -> float:
        """The ratio over inputs of convolutions only, as in the paper; 0 if there are none."""
        return _ratio([row for row in self.rows if row.read_by])

    @property
    def seconds(self) -> float:
        """Seconds of packing and unpacking; on an accelerator, only the time to launch the work."""
        return sum(row.seconds for row in self.rows)

    def __str__(self) -> str:
        """Format the figures: memory, the ten largest tensors, then the noise."""
        lines = [f"warning: {note}" for note in self.notes]
        if not self.rows:
            return "\n".join([*lines, "no forward pass with gradients ran inside of `with saver:`"])
        lines += [
            f"saved for backward without compression: {_mega(self.raw_bytes)} MB",
            f"saved for backward: {_mega(self.stored_bytes)} MB, {self.ratio:.2f} times less",
            f"compressed bytes alive at most: {_mega(self.peak_bytes)} MB",
            f"time of packing and unpacking: {self.seconds:.3f} s",
        ]
        largest = sorted(self.rows, key=lambda row: -row.raw_bytes)[:_LARGEST]
        lines.append(_line("tensor", "kind", "MB", "ratio", "bound", "seconds"))
        for row in largest:
            lines.append(
                _line(
                    f"{row.label} {'x'.join(map(str, row.shape))}",
                    row.kind,
                    _mega(row.raw_bytes),
                    f"{_ratio([row]):.1f}" if row.stored_bytes else "",
                    f"{row.error_bound:.3g}" if row.error_bound > 0 else "",
                    "compiled" if row.compiled else f"{row.seconds:.4f}",
                )
            )
        if self.layers:
            lines += ["", _line("convolution", "bound", "predicted")]
        for layer in self.layers:
            figures = (layer.error_bound, layer.predicted_sigma)
            lines.append(_line(layer.name, *(f"{figure:.3g}" for figure in figures)))
        return "\n".join(lines)


def _ratio(rows: Sequence[Row]) -> float:
    raw = sum(row.raw_bytes for row in rows)
    stored = sum(row.stored_bytes for row in rows)
    return raw / max(stored, 1)


def _mega(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f}"


def _line(name: str, *cells: str) -> str:
    return f"{name:<44}" + "".join(f"{cell:>10}" for cell in cells)
