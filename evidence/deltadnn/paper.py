"""Delta-DNN's equations 1 and 2 and its coder as the paper prints them, for comparison only.

The bound of these equations is ``log(1 + epsilon)`` absolute, whatever the scale of the weights,
and a chain of them drifts; see docs/checkpoints.md. Stores use :mod:`pcrshard.errorbound`.
"""

from __future__ import annotations

import lzma
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pcrshard.errorbound import compress, decompress
from pcrshard.errors import CorruptCheckpoint

Factors = NDArray[np.int32]
Weights = NDArray[Any]
Index = NDArray[np.int64]
CODERS = ("rle+lzma", "rle+zstd", "lzma", "zstd")
_ZSTD_LEVEL = 19


def quantization_factors(
    target: Weights,
    reference: Weights,
    epsilon: float,
) -> Factors:
    """Equation 1: ``M = floor((A - B) / (2 log(1 + epsilon)) + 0.5)``, (N,) int32.

    Args:
        target: A, (N,) of the network that is stored.
        reference: B, (N,) of the network that both sides have.
        epsilon: The paper's relative error bound, 0.01 to 0.1.
    """
    step = 2 * math.log(1 + epsilon)
    difference = target.astype(np.float64) - reference.astype(np.float64)
    return np.floor(difference / step + 0.5).astype(np.int32)


def recover(
    factors: Factors,
    reference: Weights,
    epsilon: float,
) -> Weights:
    """Equation 2: ``A' = 2 M log(1 + epsilon) + B``, in the reference's type."""
    step = 2 * math.log(1 + epsilon)
    return (factors * step + reference.astype(np.float64)).astype(reference.dtype)


def encode_factors(factors: Factors, coder: str = "rle+lzma") -> bytes:
    """The bytes of factors (N,) by one of :data:`CODERS` (the paper's Figure 5)."""
    _check(coder)
    data = _narrowest(factors).tobytes()
    width = len(data) // max(len(factors), 1)
    runs = run_lengths(data) if coder.startswith("rle") else data
    packed = lzma.compress(runs) if coder.endswith("lzma") else compress(runs, _ZSTD_LEVEL)
    return bytes([width]) + len(runs).to_bytes(8, "little") + packed


def decode_factors(
    payload: bytes,
    count: int,
    coder: str = "rle+lzma",
) -> Factors:
    """The ``count`` factors of :func:`encode_factors`.

    Raises:
        CorruptCheckpoint: The payload is damaged.
    """
    _check(coder)
    width = payload[0]
    size = int.from_bytes(payload[1:9], "little")
    body = payload[9:]
    runs = lzma.decompress(body) if coder.endswith("lzma") else decompress(body, size)
    data = expand_runs(runs) if coder.startswith("rle") else runs
    if len(runs) != size or len(data) != count * width:
        raise CorruptCheckpoint(f"expected {count} factors, got {len(data)} bytes")
    return np.frombuffer(data, f"<i{width}").astype(np.int32)


def run_lengths(data: bytes) -> bytes:
    """Runs of equal bytes as all their values, then all their lengths (1 to 255).

    >>> run_lengths(b"aaab").hex()
    '61620301'
    """
    values = np.frombuffer(data, np.uint8)
    starts = np.flatnonzero(np.diff(values, prepend=-1 if len(values) else []))
    lengths = np.diff(starts, append=len(values))
    # A run of more than 255 bytes becomes several.
    pieces = -(-lengths // 255)
    run_values = np.repeat(values[starts], pieces)
    return run_values.tobytes() + _cut_lengths(lengths, pieces).tobytes()


def _cut_lengths(lengths: Index, pieces: Index) -> NDArray[np.uint8]:
    """Split each length into pieces, all of 255 except the last."""
    sizes = np.full(int(pieces.sum()), 255, np.uint8)
    last = np.cumsum(pieces) - 1
    sizes[last] = lengths - 255 * (pieces - 1)
    return sizes


def expand_runs(runs: bytes) -> bytes:
    """The inverse of :func:`run_lengths`."""
    both = np.frombuffer(runs, np.uint8).reshape(2, -1)
    return np.repeat(both[0], both[1]).tobytes()


def _narrowest(factors: Factors) -> Weights:
    largest = int(np.abs(factors).max(initial=0))
    kind = np.min_scalar_type(-1 - largest)
    return factors.astype(kind.newbyteorder("<"))


def _check(coder: str) -> None:
    if coder not in CODERS:
        raise ValueError(f"expected a coder of {CODERS}, got {coder!r}")
