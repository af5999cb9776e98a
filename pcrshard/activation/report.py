"""Memory savings and cost of compression in the last forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .stored import Row

_LARGEST = 10


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
        peak_bytes: Peak of live compressed bytes in eager code, over all steps.
        live_bytes: Current live compressed bytes.
        device_peak_bytes: Peak of the accelerator's allocator; ``None`` on a CPU, where you can use
            :func:`pcrshard.activation.peak_memory`.
        rows: Every tensor saved in the last forward pass, once, excluding parameters; for compiled
            code, every saved tensor, excluding inputs and outputs.
        layers: The convolutions of the last profiled step.
        notes: Warnings.
    """

    peak_bytes: int
    live_bytes: int
    device_peak_bytes: int | None
    rows: Sequence[Row]
    layers: Sequence[Layer] = ()
    notes: Sequence[str] = ()

    @property
    def raw_bytes(self) -> int:
        """Peak of saved bytes without compression: all saved tensors, each counted once."""
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
        return self.encode_seconds + self.decode_seconds

    @property
    def encode_seconds(self) -> float:
        """Seconds of packing in the forward pass."""
        return sum(row.encode_seconds for row in self.rows)

    @property
    def decode_seconds(self) -> float:
        """Seconds of unpacking in backward passes."""
        return sum(row.decode_seconds for row in self.rows)

    def __str__(self) -> str:
        """Format the figures: memory, the ten largest tensors, then the noise."""
        lines = [f"warning: {note}" for note in self.notes]
        if not self.rows:
            return "\n".join([*lines, "no forward pass with gradients ran inside of `with saver:`"])
        figures = {
            "saved for backward without compression": f"{_mega(self.raw_bytes)} MB",
            "saved for backward": f"{_mega(self.stored_bytes)} MB, {self.ratio:.2f} times less",
            "compressed bytes alive at most": f"{_mega(self.peak_bytes)} MB",
            "time of packing": f"{self.encode_seconds:.3f} s",
            "time of unpacking": f"{self.decode_seconds:.3f} s",
        }
        if self.device_peak_bytes is not None:
            figures["peak of the accelerator's memory"] = f"{_mega(self.device_peak_bytes)} MB"
        lines += [f"{name}: {figure}" for name, figure in figures.items()]
        largest = sorted(self.rows, key=lambda row: -row.raw_bytes)
        rest = largest[_LARGEST:]
        lines.append(_line("tensor", "kind", "MB", "ratio", "bound", "seconds"))
        lines += [_row(row) for row in largest[:_LARGEST]]
        if rest:
            raw = sum(row.raw_bytes for row in rest)
            lines.append(_line(f"{len(rest)} smaller ones", "", _mega(raw), f"{_ratio(rest):.1f}"))
        if self.layers:
            lines += ["", _line("convolution", "", "", "bound", "predicted", "measured")]
            lines += [_layer(layer) for layer in self.layers]
        return "\n".join(lines)


def _ratio(rows: Sequence[Row]) -> float:
    raw = sum(row.raw_bytes for row in rows)
    stored = sum(row.stored_bytes for row in rows)
    return raw / max(stored, 1)


def _mega(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f}"


def _line(name: str, *cells: str) -> str:
    return f"{name:<44}" + "".join(f"{cell:>10}" for cell in cells)


def _row(row: Row) -> str:
    shape = "x".join(map(str, row.shape))
    seconds = row.encode_seconds + row.decode_seconds
    time = "compiled" if row.compiled else f"{seconds:.4f}"
    bound = f"{row.error_bound:.3g}" if row.error_bound > 0 else ""
    cells = (row.kind, _mega(row.raw_bytes), f"{_ratio([row]):.1f}", bound, time)
    return _line(f"{row.label} {shape}", *cells)


def _layer(layer: Layer) -> str:
    measured = "" if layer.measured_sigma is None else f"{layer.measured_sigma:.3g}"
    figures = (f"{layer.error_bound:.3g}", f"{layer.predicted_sigma:.3g}", measured)
    return _line(layer.name, "", "", *figures)
