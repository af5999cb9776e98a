"""Which epoch begins now: a number that the workers of a loader find out together."""

from __future__ import annotations

import sys
import zlib
from typing import Any

from ..reading.shared_integers import SharedIntegers

_RECENT = 8
_MAX_WORKERS = 4096
_TAG = 1 << 32


class EpochCounter:
    """Counts epochs for a pipeline that only its DataLoader workers iterate.

    Nothing in the parent process is called when an epoch begins, and workers that are started anew
    forget what they counted. So the count lies in shared memory, and the first worker that begins
    an epoch advances it for all. Workers of one loader know each other by its base seed and size;
    one that has begun this epoch already, as a persistent worker, begins the next.

    Two workers that find an epoch new at the same time write the same number, so there is no lock.
    The shared numbers are the last few epochs that were begun, each with its loader in the low 32
    bits, and for each worker the one that it began last.
    """

    def __init__(self) -> None:
        self._recent = SharedIntegers([0] * _RECENT)
        self._begun_by = SharedIntegers([0] * _MAX_WORKERS)
        # What to add to the count, since the next epoch may be set.
        self._offset = SharedIntegers([0])

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that begins next, from 0."""
        return int(self._offset[0] + self._count())

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        self._offset[0] = epoch - self._count()

    def begin(self) -> int:
        """Begin an epoch, in this process or together with the other workers of its loader."""
        worker = _worker()
        count = self._count() + 1
        if worker is None:
            self._note(count, 0)
        else:
            loader = zlib.crc32(f"{worker.seed - worker.id} {worker.num_workers}".encode())
            of_loader = [entry // _TAG for entry in self._recent[:] if entry % _TAG == loader]
            joined = max(of_loader, default=0)
            if joined > self._begun_by[worker.id]:
                count = joined
            else:
                self._note(count, loader)
            self._begun_by[worker.id] = count
        return int(self._offset[0] + count - 1)

    def _count(self) -> int:
        """Epochs that have begun."""
        return int(max(self._recent[:]) // _TAG)

    def _note(self, count: int, loader: int) -> None:
        self._recent[count % _RECENT] = count * _TAG + loader


def _worker() -> Any:
    """What torch says of this DataLoader worker; ``None`` in any other process."""
    # Looked up, not imported: a worker has imported it, and `import pcrshard` shall not.
    data = sys.modules.get("torch.utils.data")
    return None if data is None else data.get_worker_info()
