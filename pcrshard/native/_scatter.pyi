from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

def read(
    source: int | memoryview,
    start: int,
    stop: int,
    num_items: int,
    num_ended: int,
    sizes: npt.NDArray[np.uint32],
    starts: npt.NDArray[np.int64],
    base: int,
    offsets: npt.NDArray[np.uint64] | None,
    header_sizes: npt.NDArray[np.uint16] | None,
    headers: bytes,
    ending: bytes,
    crcs: npt.NDArray[np.uint32] | None,
    seeds: npt.NDArray[np.uint32] | None,
    ahead: bytes | bytearray,
    /,
) -> tuple[list[bytes | None], list[int]]: ...
def rows(
    names: tuple[str, ...], columns: tuple[Sequence[Any], ...], count: int, /
) -> list[dict[str, Any]]: ...
