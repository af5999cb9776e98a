"""Values of ``scan=``: 1..N, 0 for labels without pixels, or ``"full"``."""

from __future__ import annotations

from typing import Literal, TypeGuard

from ..arguments import is_integer
from ..errors import ScanUnavailable

FULL: Literal["full"] = "full"
Scan = int | Literal["full"]


def is_fraction(value: object) -> TypeGuard[float]:
    """Return whether this is a fraction of the full bytes: a float in (0, 1)."""
    return isinstance(value, float) and 0 < value < 1


def only_full(scan: object) -> ScanUnavailable:
    """Return the error of another scan of a plain tar, which has no scan groups."""
    return ScanUnavailable(
        f"expected scan 'full', the only one of plain tars, got {scan}; encode these tars to read "
        "less (`pcrshard encode`)"
    )


def check_scan(
    scan: Scan,
    num_groups: int,
    lowest: int = 1,
) -> int:
    """Turn a scan into a position 1..N, or N + 1 for ``"full"``.

    Args:
        scan: The requested scan.
        num_groups: Scan groups N.
        lowest: 0 if scan 0, labels and metadata without pixels, is allowed.

    Raises:
        ScanUnavailable: The scan is not in 1..N.
        TypeError: It is neither an integer nor ``"full"``.
    """
    if scan == FULL:
        return num_groups + 1
    if not is_integer(scan):
        raise TypeError(f"expected a scan of {lowest} to {num_groups} or 'full', got {scan!r}")
    if not num_groups and (scan or lowest):
        raise only_full(scan)
    if not lowest <= scan <= num_groups:
        raise ScanUnavailable(f"expected a scan of {lowest} to {num_groups} or 'full', got {scan}")
    return int(scan)
