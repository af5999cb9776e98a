"""A ``DataLoader`` that knows how many batches it has given."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, default_convert, get_worker_info

from .batch_images import BatchMemory
from .cpus import decoding_threads
from .epoch_progress import State
from .shard_set import check_process
from .shared_ring import SharedRing, for_parent

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
    """How the process that reads batches decodes them.

    Attributes:
        threads: Threads that decode; 0 for the one that asks.
        batches: Batches that are decoded ahead.
        isolate: Whether a child process reads and decodes.
        memory: Where batches go.
    """

    threads: int = 0
    batches: int = 0
    isolate: bool = False
    memory: BatchMemory = field(default_factory=BatchMemory)


def run_ahead(
    num_workers: int,
    threads: int | None,
    batches: int,
    *,
    isolate: bool,
    pin: bool,
) -> Ahead:
    """What the arguments of :meth:`PCRDataset.loader` mean.

    Raises:
        ValueError: They do not fit together.
    """
    if threads is None:
        threads = 0 if num_workers else decoding_threads()
    if num_workers and (threads or isolate):
        raise ValueError(
            f"expected threads or workers, got threads={threads}, isolate={isolate} and "
            f"num_workers={num_workers}"
        )
    if threads < 0 or batches < 1:
        raise ValueError(
            "expected threads of at least 0 and prefetch_batches of at least 1, "
            f"got {threads} and {batches}"
        )
    memory = BatchMemory(pin and torch.cuda.is_available())
    return Ahead(threads, batches if threads else 0, isolate, memory)


class PCRLoader(DataLoader[Any]):
    """A ``DataLoader`` that counts the batches it has given; from :meth:`PCRDataset.loader`."""

    dataset: PCRDataset

    def __init__(
        self,
        dataset: PCRDataset,
        ahead: Ahead,
        *,
        num_workers: int,
        pin_memory: bool = False,
        **options: Any,
    ) -> None:
        if not options.get("in_order", True):
            raise ValueError(
                "expected in_order=True: batches that come as they are ready cannot be resumed "
                "exactly"
            )
        if ahead.isolate:
            if options.get("persistent_workers"):
                raise ValueError("expected no persistent_workers with isolate=True")
            num_workers = 1
            options.setdefault("prefetch_factor", max(ahead.batches, 1))
        if num_workers:
            convert = options.get("collate_fn") or default_convert
            options["collate_fn"] = partial(_collate_in_worker, convert)
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            pin_memory=ahead.memory.pin or pin_memory,
            **options,
        )
        self.ahead = ahead
        self._ring: SharedRing | None = None

    def __len__(self) -> int:
        # DataLoader's own remembers the length of one epoch, and warns when the next one has more.
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its own class
        return self.dataset.hand_out(partial(_in_one_process, super().__iter__), self._with_ring)

    def _with_ring(self, slot_bytes: int) -> Ahead:
        """With memory that workers fill, if they fill any.

        Workers that stay keep what they were given first.
        """
        ring = self._ring
        if ring is None and self.num_workers and slot_bytes:
            # What is decoded ahead, what waits for its turn, and what the training loop has.
            slots = self.ahead.batches + (self.prefetch_factor or 0) + 3
            # Without one, where a limit forbids so much, batches go torch's way.
            with suppress(OSError):
                ring = SharedRing(slot_bytes, slots, self.num_workers)
        if self.persistent_workers:
            self._ring = ring
        return replace(self.ahead, memory=replace(self.ahead.memory, ring=ring))

    def state_dict(self) -> State:
        """Where the training loop is: after the last batch that it got."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Continue after that batch; see :meth:`PCRDataset.load_state_dict`."""
        self.dataset.load_state_dict(state)


def _collate_in_worker(convert: Callable[[Any], Any], batch: Any) -> Any:
    """What a worker sends for a batch."""
    found = convert(batch)
    return found if get_worker_info() is None else for_parent(found)


def _in_one_process(begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Begin batches for this process; a child of it would take its workers' batches away."""
    return _checked(begin(), os.getpid())


def _checked(batches: Iterator[Any], process: int) -> Iterator[Any]:
    for batch in batches:
        yield batch
        check_process(process)
