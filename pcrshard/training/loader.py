"""A ``DataLoader`` that knows how many batches it has given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from .cpus import decoding_threads
from .epoch_progress import State

if TYPE_CHECKING:
    from .dataset import PCRDataset


def refuse_batching(caller: FrameType) -> None:
    """Raise ``TypeError`` where a ``DataLoader`` is about to make batches of batches.

    It tells a dataset nothing; what iterates the dataset, in its process or in a worker, knows.

    Args:
        caller: The frame that asks the dataset for its iterator.
    """
    if getattr(caller.f_locals.get("self"), "auto_collation", False):
        raise TypeError(
            "PCRDataset gives batches already: expected DataLoader(dataset, batch_size=None), or "
            "dataset.loader(num_workers)"
        )


@dataclass(frozen=True)
class Ahead:
    """How batches are decoded in the process that uses them.

    Attributes:
        threads: Threads that decode; 0 for the one that asks.
        batches: Batches that are decoded ahead.
        pin: Whether batches are in pinned memory.
    """

    threads: int = 0
    batches: int = 0
    pin: bool = False


def run_ahead(
    num_workers: int,
    threads: int | None,
    batches: int,
    *,
    pin: bool,
) -> Ahead:
    """What the arguments of :meth:`PCRDataset.loader` mean.

    Raises:
        ValueError: They do not fit together.
    """
    if threads is None:
        threads = 0 if num_workers else decoding_threads()
    if threads and num_workers:
        raise ValueError(
            f"expected threads or workers, got threads={threads} and num_workers={num_workers}"
        )
    if threads < 0 or batches < 1:
        raise ValueError(
            "expected threads of at least 0 and prefetch_batches of at least 1, "
            f"got {threads} and {batches}"
        )
    return Ahead(threads, batches if threads else 0, pin and torch.cuda.is_available())


class PCRLoader(DataLoader[Any]):
    """A ``DataLoader`` that counts the batches it has given; from :meth:`PCRDataset.loader`."""

    dataset: PCRDataset

    def __init__(
        self,
        dataset: PCRDataset,
        ahead: Ahead,
        *,
        pin_memory: bool = False,
        **options: Any,
    ) -> None:
        if not options.get("in_order", True):
            raise ValueError(
                "expected in_order=True: batches that come as they are ready cannot be resumed "
                "exactly"
            )
        pin = ahead.pin or pin_memory
        super().__init__(dataset, batch_size=None, pin_memory=pin, **options)
        self.ahead = ahead

    def __len__(self) -> int:
        # DataLoader's own remembers the length of one epoch, and warns when the next one has more.
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its own class
        return self.dataset.hand_out(super().__iter__, self.ahead)

    def state_dict(self) -> State:
        """Where the training loop is: after the last batch that it got."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Continue after that batch; see :meth:`PCRDataset.load_state_dict`."""
        self.dataset.load_state_dict(state)
