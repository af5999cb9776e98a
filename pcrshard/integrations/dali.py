"""NVIDIA DALI integration: batches for ``fn.external_source``.

A :class:`PCRLoader` provides the order, ranks and workers; DALI decodes and augments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Arrays = list[NDArray[Any]]


class DaliSource:
    """One epoch of batches per iteration, each field a list with one array per sample.

    ``fn.external_source(DaliSource(loader), num_outputs=2, batch=True, cycle="raise")``: at the end
    of an epoch DALI raises ``StopIteration``, and continues with the next epoch after
    ``pipeline.reset()``.

    Args:
        loader: A loader of a ``PCRDataset`` with ``fields=`` and without ``decoder=``, so that
            images stay JPEG bytes, for ``fn.decoders.image``. DALI prefetches batches, which the
            loader's state counts as read.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[tuple[Arrays, ...]]:
        for batch in self.loader:
            if not isinstance(batch, tuple | list):
                raise TypeError(
                    "expected batches that are tuples, got "
                    f"{type(batch).__name__}: give PCRDataset fields=('jpg', 'cls')"
                )
            yield tuple(map(_arrays, batch))


def _arrays(column: Any) -> Arrays:
    """Convert the values of a field: bytes to (size,) uint8, numbers to (1,)."""
    if isinstance(column, torch.Tensor):
        numbers: NDArray[Any] = column.numpy()
        return list(numbers[:, None] if numbers.ndim == 1 else numbers)
    texts_or_bytes = (value.encode() if isinstance(value, str) else value for value in column)
    return [np.frombuffer(value, np.uint8) for value in texts_or_bytes]
