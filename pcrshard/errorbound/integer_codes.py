"""Encode integers to within a few percent of their entropy; the only user of pcodec.

Temporal and spatial prediction gain nothing on the codes of networks (measured ratios: 11.02
against 11.01), so pcodec's own prediction is disabled, which also makes it faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, standalone

from ..errors import CorruptCheckpoint
from ..memory import Buffer
from ..native import pcodec_encoder

Integers = NDArray[Any]
_CONFIG = ChunkConfig(
    compression_level=8, mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op()
)


def encode_integers(integers: Integers) -> bytes:
    """Encode integers (N,) of 16, 32, or 64 bits; return no bytes for an empty array."""
    if len(integers) == 0:
        return b""
    plain = np.ascontiguousarray(integers)
    encoded = pcodec_encoder.encode(plain) if plain.dtype == np.int32 else None
    return encoded or bytes(standalone.simple_compress(plain, _CONFIG))


def decode_integers(
    payload: Buffer,
    count: int,
    kind: Any,
) -> Integers:
    """Decode the ``count`` integers of a payload; the caller must have limited ``count``.

    Args:
        payload: The result of :func:`encode_integers`.
        count: The number of integers.
        kind: The numpy type of the integers.

    Raises:
        CorruptCheckpoint: The payload is damaged, or holds a different number or type of integers.
    """
    integers: Integers = np.empty(count, kind)
    if count == 0:
        if len(payload):
            raise CorruptCheckpoint(f"expected no integers, got {len(payload)} bytes")
        return integers
    try:
        progress = standalone.simple_decompress_into(bytes(payload), integers)
    except BaseException as error:
        # A Rust panic is not a subclass of Exception, but must not end the job.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise CorruptCheckpoint(f"integer codes are damaged: {error}") from error
        raise
    if progress.n_processed != count or not progress.finished:
        raise CorruptCheckpoint(f"expected {count} integers, got {progress.n_processed}")
    return integers
