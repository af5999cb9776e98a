"""Delta-DNN's equations 1 and 2 and its coder as the paper prints them, for comparison only.

The bound of these equations is ``log(1 + epsilon)`` absolute, whatever the scale of the weights,
and a chain of them drifts; see docs/checkpoints.md. Stores use :mod:`pcrshard.errorbound`.
"""

import lzma
import math

import numpy as np

from pcrshard.errorbound import compress

CODERS = ("rle+lzma", "rle+zstd", "lzma", "zstd")
_ZSTD_LEVEL = 19


def quantization_factors(target, reference, epsilon):
    """Equation 1: ``M = floor((A - B) / (2 log(1 + epsilon)) + 0.5)``, (N,) int32.

    Args:
        target: A, (N,) of the network that is stored.
        reference: B, (N,) of the network that both sides have.
        epsilon: The paper's relative error bound, 0.01 to 0.1.
    """
    step = 2 * math.log(1 + epsilon)
    difference = target.astype(np.float64) - reference.astype(np.float64)
    return np.floor(difference / step + 0.5).astype(np.int32)


def recover(factors, reference, epsilon):
    """Equation 2: ``A' = 2 M log(1 + epsilon) + B``, in the reference's type."""
    step = 2 * math.log(1 + epsilon)
    return (factors * step + reference.astype(np.float64)).astype(reference.dtype)


def encode_factors(factors, coder="rle+lzma"):
    """The bytes of factors (N,) by one of :data:`CODERS` (the paper's Figure 5)."""
    largest = int(np.abs(factors).max(initial=0))
    kind = np.min_scalar_type(-1 - largest)
    data = factors.astype(kind.newbyteorder("<")).tobytes()
    runs = run_lengths(data) if coder.startswith("rle") else data
    packed = lzma.compress(runs) if coder.endswith("lzma") else compress(runs, _ZSTD_LEVEL)
    return bytes([kind.itemsize]) + len(runs).to_bytes(8, "little") + packed


def run_lengths(data):
    """Runs of equal bytes as all their values, then all their lengths (1 to 255)."""
    values = np.frombuffer(data, np.uint8)
    starts = np.flatnonzero(np.diff(values, prepend=-1 if len(values) else []))
    lengths = np.diff(starts, append=len(values))
    # A run of more than 255 bytes becomes several, all of 255 except the last.
    pieces = -(-lengths // 255)
    sizes = np.full(int(pieces.sum()), 255, np.uint8)
    sizes[np.cumsum(pieces) - 1] = lengths - 255 * (pieces - 1)
    return np.repeat(values[starts], pieces).tobytes() + sizes.tobytes()
