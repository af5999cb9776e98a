"""A non-blocking minimum over all ranks of a job."""

from __future__ import annotations

import sys
from typing import Any


class Agreement:
    """A minimum over the latest numbers of all ranks, available a few calls later.

    An ``all_reduce`` runs in the background in its own CPU process group; once it completes, its
    result is used and the next one starts. A rank that makes fewer calls than the others, or stops
    calling, does not block them: they use the lower of the last agreed number and their own, or
    only their own once that rank has left.

    Without an initialized ``torch.distributed``, the result is this process's own number.
    Otherwise construct it on every rank.
    """

    def __init__(self) -> None:
        self._group = _new_group()
        self._agreed: int | None = None
        # The exchange in flight, and the tensor that will hold its result.
        self._exchange: tuple[Any, Any] | None = None

    def lowest(self, number: int) -> int:
        """Submit this rank's number, and return the lowest known number, at most ``number``."""
        try:
            self._advance(number)
        except (RuntimeError, ValueError):
            # Another rank, or this one, has left the job.
            self._group = None
            self._agreed = None
        return number if self._agreed is None else min(number, self._agreed)

    def _advance(self, number: int) -> None:
        """Take the result if it is available, and start the next exchange."""
        if self._group is None:
            return
        if self._exchange is not None:
            work, numbers = self._exchange
            if not work.is_completed():
                return
            work.wait()  # raises the error of a failed exchange
            self._agreed = int(numbers)
        import torch
        import torch.distributed as dist

        number_of_all = torch.tensor(number)
        minimum = dist.ReduceOp.MIN
        work = dist.all_reduce(number_of_all, minimum, group=self._group, async_op=True)
        self._exchange = (work, number_of_all)


def _new_group() -> Any:
    """Create a CPU process group of all ranks; return ``None`` for a single process."""
    # Looked up rather than imported: a job that uses torch.distributed has already imported it.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
