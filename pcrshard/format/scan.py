"""What ``scan=`` may be: a scan of 1..N, or ``"full"``."""

from __future__ import annotations

from typing import Literal

import numpy as np

from ..errors import ScanUnavailable

FULL: Literal["full"] = "full"


_INTEGERS = (int, np.integer)


Scan = int | Literal["full"]


def is_integer(value: object) -> bool:
    """Whether this is an int or a NumPy integer; True and False are not."""
    return isinstance(value, _INTEGERS) and value is not True and value is not False


def check_scan(scan: Scan, num_groups: int) -> int:
    """Turn a scan into a position 1..N, or N + 1 for ``"full"``.

    Raises:
        ScanUnavailable: The scan is not in 1..N.
        TypeError: It is neither an int nor ``"full"``.
    """
    if scan == FULL:
        return num_groups + 1
    if not is_integer(scan):
        raise TypeError(f"expected a scan of 1 to {num_groups} or 'full', got {scan!r}")
    if not 1 <= scan <= num_groups:
        raise ScanUnavailable(f"expected a scan of 1 to {num_groups} or 'full', got {scan}")
    return int(scan)
