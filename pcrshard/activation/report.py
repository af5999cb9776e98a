"""What compression has done to the last forward pass, for people and programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .stored import Row


@dataclasses.dataclass(frozen=True)
class Layer:
    """What one convolution's gradient was promised.

    Attributes:
        name: The convolution.
        error_bound: Of its input, in the last forward pass.
        predicted_sigma: Standard deviation of its weight gradient's error, by the formula.
        measured_sigma: The same, measured on demand; ``None`` if it was not.
    """

    name: str
    error_bound: float
    predicted_sigma: float
    measured_sigma: float | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """Figures of a compressor.

    Attributes:
        peak_bytes: Most compressed bytes that were alive at a time, over all steps.
        live_bytes: Compressed bytes that are alive now.
        device_peak_bytes: What the accelerator's allocator says; ``None`` on a CPU, where
            :func:`pcrshard.activation.peak.peak_memory` measures.
        rows: Every tensor that the last forward pass saved, once, without parameters.
        layers: The convolutions of the last profiled step.
        note: What a user must know, such as that compiled code saves nothing.
    """

    peak_bytes: int
    live_bytes: int
    device_peak_bytes: int | None
    rows: Sequence[Row]
    layers: Sequence[Layer] = ()
    note: str = ""

    @property
    def raw_bytes(self) -> int:
        """Bytes of all saved tensors, each counted once."""
        return sum(row.raw_bytes for row in self.rows)

    @property
    def stored_bytes(self) -> int:
        """Bytes that are kept in place of them, those of exact tensors included."""
        return sum(row.stored_bytes for row in self.rows)

    @property
    def ratio(self) -> float:
        """Raw over stored bytes, of everything."""
        return _ratio(self.rows)

    @property
    def ratio_of_conv_inputs(self) -> float:
        """The same over inputs of convolutions only, which is what the paper counts; 0 if none."""
        return _ratio([row for row in self.rows if row.read_by])

    @property
    def seconds(self) -> float:
        """Time of encoding and decoding; on an accelerator that of starting the work."""
        return sum(row.encode_seconds + row.decode_seconds for row in self.rows)

    def __str__(self) -> str:
        """The figures as a text: memory first, then each tensor that was made smaller."""
        lines = [self.note] if self.note else []
        if self.device_peak_bytes is not None:
            lines.append(f"peak of the accelerator's memory: {_mega(self.device_peak_bytes)} MB")
        lines.append(f"peak of compressed bytes: {_mega(self.peak_bytes)} MB")
        lines.append(
            f"saved for backward: {_mega(self.raw_bytes)} MB in {_mega(self.stored_bytes)} MB, "
            f"{self.ratio:.2f} times less, {self.seconds:.3f} s"
        )
        lines.append(_line("tensor", "kind", "MB", "ratio", "bound", "seconds"))
        lines.extend(_row(row) for row in self.rows if row.kind != "exact")
        if self.layers:
            lines.append("")
            lines.append(_line("convolution", "", "", "bound", "predicted", "measured"))
            lines.extend(_layer(layer) for layer in self.layers)
        return "\n".join(lines)


def _ratio(rows: Sequence[Row]) -> float:
    raw = sum(row.raw_bytes for row in rows)
    stored = sum(row.stored_bytes for row in rows)
    return raw / max(stored, 1)


def _short(value: float) -> str:
    return f"{value:.3g}"


def _mega(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f}"


def _line(name: str, *cells: str) -> str:
    return f"{name:<32}" + "".join(f"{cell:>12}" for cell in cells)


def _row(row: Row) -> str:
    shape = "x".join(map(str, row.shape))
    ratio = _ratio([row])
    seconds = row.encode_seconds + row.decode_seconds
    bound = _short(row.error_bound) if row.error_bound else "exact"
    cells = (row.kind, _mega(row.raw_bytes), f"{ratio:.1f}", bound, f"{seconds:.4f}")
    return _line(f"{row.name or '?'} {shape}", *cells)


def _layer(layer: Layer) -> str:
    measured = "" if layer.measured_sigma is None else _short(layer.measured_sigma)
    figures = (_short(layer.error_bound), _short(layer.predicted_sigma), measured)
    return _line(layer.name, "", "", *figures)
