import numpy as np
import numpy.typing as npt

def read(
    fd: int,
    start: int,
    stop: int,
    pieces: npt.NDArray[np.void],
    num_items: int,
    ending: bytes,
    crcs: npt.NDArray[np.uint32] | None,
    /,
) -> list[bytes | None]: ...
