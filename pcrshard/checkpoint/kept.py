"""The version that the next delta refers to, in a file instead of memory."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping

import numpy as np

from .. import storage
from ..memory import borrow_array, when_gone
from ..redaction import get_logger
from .codec import Tensor

log = get_logger(__name__)


class KeptTensors(Mapping[str, Tensor]):
    """Tensors in a file without a name, which the system removes however this process ends.

    The system caches the file while there is free memory. Each look-up reads the tensor, and the
    result belongs to the caller.

    Args:
        folder: Where there is room for the tensors; the folder for temporary files if it cannot
            be written to.
    """

    def __init__(self, folder: str) -> None:
        place = folder if os.access(folder, os.W_OK) else None
        with tempfile.TemporaryFile(dir=place) as file:
            self._file = os.dup(file.fileno())
        when_gone(self, os.close, self._file)
        self._size, self._is_full = 0, False
        # The place of each tensor, the number of its values, and the tensor without them.
        self._places: dict[str, tuple[int, int, Tensor]] = {}

    def add(self, path: str, tensor: Tensor) -> None:
        """Keep a tensor, unless the disk is full: the next version then stores it whole."""
        if self._is_full:
            return
        data, start = tensor.values.view(np.uint8).data, self._size
        try:
            while len(data):
                done = os.pwrite(self._file, data, self._size)
                data, self._size = data[done:], self._size + done
        except OSError as error:
            self._is_full = True
            log.warning("no room for a copy of %s, so the next version is larger: %s", path, error)
            return
        bare = dataclasses.replace(tensor, values=np.empty(0, tensor.values.dtype))
        self._places[path] = start, len(tensor.values), bare

    def __getitem__(self, path: str) -> Tensor:
        start, count, bare = self._places[path]
        data = borrow_array(count * bare.values.itemsize)
        storage.read_local(self._file, start, data.data)
        return dataclasses.replace(bare, values=data.view(bare.values.dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
