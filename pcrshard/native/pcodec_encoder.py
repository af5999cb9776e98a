"""A fast encoder of pcodec files; the call releases the GIL."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..memory import borrow_array
from ._core import ffi, lib


def encode(values: NDArray[np.int32]) -> bytes | None:
    """Encode values (N,), at least one, as a standalone pcodec file.

    Returns:
        The file; ``None`` if values that are close together range over more than 2^16.
    """
    out = borrow_array(lib.pcr_pcodec_bound(len(values)))
    scratch = borrow_array(lib.pcr_pcodec_scratch())
    used = lib.pcr_pcodec_encode(
        _address(values, "int32_t[]"), len(values), _address(out), _address(scratch)
    )
    return out[:used].tobytes() if used else None


def _address(array: NDArray[Any], kind: str = "uint8_t[]") -> Any:
    return ffi.from_buffer(kind, array)
