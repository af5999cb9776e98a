"""The lowest number that any rank of a job says, without waiting for the others."""

from __future__ import annotations

import sys
from typing import Any


class Agreement:
    """All ranks learn the lowest of their latest numbers, a few calls later.

    An ``all_reduce`` runs in the background, in a group of its own on the processor; its result is
    taken when it is there, and then the next one is begun. A rank that makes fewer calls than the
    others, or none any more, holds nobody up: the others keep to what was last agreed, or to their
    own number if that is lower, and when it has left, to their own.

    Without an initialized ``torch.distributed``, the number of this process is what is agreed.
    Otherwise make it on every rank.
    """

    def __init__(self) -> None:
        self._group = _new_group()
        self._agreed: int | None = None
        # What is under way, and where its result will be.
        self._exchange: tuple[Any, Any] | None = None

    def lowest(self, number: int) -> int:
        """Say this rank's number, and get the lowest that is known of all ranks; at most it."""
        try:
            self._advance(number)
        except (RuntimeError, ValueError):
            # Another rank has left, or this one has left the job.
            self._group = None
            self._agreed = None
        return number if self._agreed is None else min(number, self._agreed)

    def _advance(self, number: int) -> None:
        """Take a result that is there, and begin the next exchange."""
        if self._group is None:
            return
        if self._exchange is not None:
            work, numbers = self._exchange
            if not work.is_completed():
                return
            work.wait()  # raises what went wrong
            self._agreed = int(numbers)
        self._exchange = _exchange(number, self._group)


def _exchange(number: int, group: Any) -> tuple[Any, Any]:
    """Begin to look for the lowest number of all ranks: the work, and the tensor of its result."""
    import torch
    import torch.distributed as dist

    numbers = torch.tensor(number)
    return dist.all_reduce(numbers, dist.ReduceOp.MIN, group=group, async_op=True), numbers


def _new_group() -> Any:
    """A group of all ranks that needs no GPU; ``None`` for a single process."""
    # Looked up, not imported: a job that uses torch.distributed has imported it.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
