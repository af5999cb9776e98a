"""Door to scattered reads: a range of a local file into many ``bytes`` objects, without a buffer in between.

The compiled module ``pcrshard.native._scatter`` is optional; without it ``available`` is False.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

try:
    from pcrshard.native._scatter import read as _read
except ImportError:  # built without a compiler, or where there is no preadv
    _read = None  # type: ignore[assignment]

available: bool = _read is not None
PIECE = np.dtype([("offset", "i8"), ("size", "i8"), ("item", "i8")], align=True)


def read(
    fd: int,
    start: int,
    stop: int,
    pieces: npt.NDArray[np.void],
    num_items: int,
    *,
    ending: bytes = b"",
    crcs: npt.NDArray[np.uint32] | None = None,
) -> list[bytes | None]:
    """Read the bytes ``[start, stop)`` of a file once, and put each piece into its object; without the GIL.

    Args:
        fd: Descriptor of a file that can be sought in.
        start: Absolute first byte.
        stop: Absolute byte after the last one.
        pieces: (N,) of :data:`PIECE`: where bytes lie in the file and which item they belong to; ordered by offset, apart, not empty, inside the range.
        num_items: Objects to make; each is its pieces in order.
        ending: Bytes to put behind each item.
        crcs: (num_items,) uint32, CRC-32C of each without its ending; by default nothing is checked.

    Returns:
        The items; ``None`` for one that has no pieces or does not have its CRC-32C.

    Raises:
        ValueError: The pieces are not as described.
        EOFError: The file ends before ``stop``.
        OSError: It cannot be read.
    """
    expected = None if crcs is None else np.ascontiguousarray(crcs, np.uint32)
    return _read(fd, start, stop, np.require(pieces, PIECE, ["C", "A"]), num_items, ending, expected)
