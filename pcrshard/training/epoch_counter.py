"""A count of epochs, shared by the workers of a loader."""

from __future__ import annotations

import sys
import zlib
from typing import Any

from ..reading.shared_integers import SharedIntegers

_RECENT = 8
_MAX_WORKERS = 4096
_TAG = 1 << 32


class EpochCounter:
    """A counter of epochs for a pipeline that only its DataLoader workers iterate.

    The parent process is not notified when an epoch begins, and restarted workers lose their
    counts. The count is therefore in shared memory, and the first worker to begin an epoch advances
    it for all. Workers identify their loader by its base seed and number of workers; a persistent
    worker that has already begun this epoch begins the next one.

    Lock-free: two workers that begin a new epoch at the same time write the same number. Shared
    memory holds the last few counts of epochs begun, each with its loader in the low 32 bits, and
    for each worker the last count that it began.
    """

    def __init__(self) -> None:
        self._recent = SharedIntegers([0] * _RECENT)
        self._begun_by = SharedIntegers([0] * _MAX_WORKERS)

    @property
    def next_epoch(self) -> int:
        """Number of the next epoch, from 0."""
        return int(max(self._recent[:]) // _TAG)

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        self._begun_by[:] = [0] * _MAX_WORKERS
        self._recent[:] = [epoch * _TAG] * _RECENT

    def begin(self) -> int:
        """Begin an epoch, possibly jointly with other workers of the loader; return its number."""
        count = self.next_epoch + 1
        loader = 0
        worker = _worker()
        if worker is not None:
            loader = zlib.crc32(f"{worker.seed - worker.id} {worker.num_workers}".encode())
            of_loader = [entry // _TAG for entry in self._recent[:] if entry % _TAG == loader]
            joined = max(of_loader, default=0)
            if joined > self._begun_by[worker.id]:
                count = joined
            self._begun_by[worker.id] = count
        self._recent[count % _RECENT] = count * _TAG + loader
        return count - 1


def _worker() -> Any:
    """Return torch's description of this DataLoader worker; ``None`` in any other process."""
    # Looked up, not imported: workers have imported it, and `import pcrshard` must not.
    data = sys.modules.get("torch.utils.data")
    return None if data is None else data.get_worker_info()
