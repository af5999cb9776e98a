"""What ``scan=`` may be: a scan of 1..N, or ``"full"``."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from ..errors import ScanUnavailable

FULL: Literal["full"] = "full"
Scan = int | Literal["full"]


def is_integer(value: object) -> bool:
    """Whether this is an int or a NumPy integer; True and False are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_scan_type(scan: Any) -> None:
    """Refuse what is no scan of any shard, before one is opened.

    Raises:
        TypeError: It is neither an integer nor ``"full"``.
        ValueError: It is below 1.
    """
    if scan == FULL:
        return
    if not is_integer(scan):
        raise TypeError(f"expected a scan number or 'full', got {scan!r}")
    if scan < 1:
        raise ValueError(f"expected a scan of 1 or more, or 'full', got {scan}")


def check_scan(scan: Scan, num_groups: int) -> int:
    """Turn a scan into a position 1..N, or N + 1 for ``"full"``.

    Raises:
        ScanUnavailable: The scan is not in 1..N.
        TypeError: It is neither an integer nor ``"full"``.
    """
    if scan == FULL:
        return num_groups + 1
    if not is_integer(scan):
        raise TypeError(f"expected a scan of 1 to {num_groups} or 'full', got {scan!r}")
    if not 1 <= scan <= num_groups:
        raise ScanUnavailable(f"expected a scan of 1 to {num_groups} or 'full', got {scan}")
    return int(scan)
