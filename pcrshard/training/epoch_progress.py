"""How far an epoch is: one frozen value, and what may happen to it. Pure; nothing is read here."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from .epoch_order import Geometry, advance

# What JSON can hold of a job.
State = dict[str, Any]
Segments = Sequence[Sequence[int]]

MAX_SEGMENTS = 64
# Batches of a state may be larger than those of this job, but not so large that an order of a
# small dataset takes gigabytes.
MAX_STATE_BATCH = 1 << 20


@dataclass(frozen=True)
class EpochProgress:
    """What one process knows of an epoch; every transition returns the next value.

    Attributes:
        epoch: The epoch that is read now or next.
        segments: What of it was done before this iteration, as in ``epoch_order``'s ``history``.
        stage: ``loaded`` after a state was loaded, ``ended`` after the end of an iteration,
            otherwise ``reading``.
        done: Batches that this iteration has given.
        count: Batches that it gives in all; 0 before it begins.
        worker: [worker, workers] if the state of one DataLoader worker was loaded and not yet used.
    """

    epoch: int = 0
    segments: list[list[int]] = field(default_factory=list)
    stage: Literal["reading", "loaded", "ended"] = "reading"
    done: int = 0
    count: int = 0
    worker: list[int] | None = None

    @property
    def all_given(self) -> bool:
        """Whether the last batch was given and the end of the iteration was not yet asked for."""
        return self.stage == "reading" and self.done == self.count > 0

    def set_epoch(self, epoch: int) -> EpochProgress:
        """An epoch from its beginning; that of a state just loaded keeps its place once."""
        if self.stage == "loaded" and epoch == self.epoch:
            return replace(self, stage="reading")
        return _start(epoch, [])

    def loaded(self, state: Mapping[str, Any]) -> EpochProgress:
        """The place of a state: that of a job, or of one worker.

        A worker that had given all of its batches keeps the epoch that is set now.

        Raises:
            ValueError: Epoch or segments are not what a state holds.
        """
        ended = state.get("ended", False)
        worker = state.get("worker")
        done = state.get("done", 0)
        if not (isinstance(ended, bool) and _is_whole(done) and _is_worker(worker)):
            raise ValueError(
                "expected a worker's state: [worker, workers], batches done and whether it ended, "
                f"got {worker!r}, {done!r} and {ended!r}"
            )
        if ended:
            place = replace(self, stage="ended")
        else:
            place = replace(_start(state.get("epoch"), state.get("segments")), stage="loaded")
        return replace(place, worker=worker and list(worker), done=done)

    def begun(
        self,
        count: int,
        worker: int = 0,
        workers: int = 1,
    ) -> EpochProgress:
        """An iteration of so many batches begins; it is still ``ended`` if its state was.

        Raises:
            ValueError: The state that was loaded is another worker's, or has more batches.
        """
        if self.worker is None:
            return replace(
                self,
                stage="reading",
                done=0,
                count=count,
            )
        if self.worker != [worker, workers]:
            raise ValueError(
                f"expected the state of worker {worker} of {workers}, "
                "got that of worker {} of {}".format(*self.worker)
            )
        if self.stage != "ended" and self.done > count:
            raise ValueError(f"expected a state of at most {count} batches, got {self.done}")
        begun = replace(self, count=count, worker=None)
        return begun if self.stage == "ended" else replace(begun, stage="reading")

    def gave(self, batches: int) -> EpochProgress:
        """So many batches were given, by this process or by a loader's workers."""
        return replace(self, done=batches)

    def ended(self) -> EpochProgress:
        """The iteration came to its end."""
        return replace(self, stage="ended")

    def state(self, geometry: Geometry, batches: int | None = None) -> State:
        """Where a job is after some batches of this iteration, by default after ``done``."""
        if batches is None and self.stage == "ended":
            return {
                "epoch": self.epoch + 1,
                "segments": advance([], geometry, 0),
            }
        done = self.done if batches is None else batches
        return {
            "epoch": self.epoch,
            "segments": advance(self.segments, geometry, done),
        }

    def worker_state(self, worker: int, workers: int) -> State:
        """Where one DataLoader worker is."""
        return {
            "epoch": self.epoch,
            "segments": self.segments,
            "worker": [worker, workers],
            "done": self.done,
            "ended": self.stage == "ended" or self.done >= self.count,
        }

    def start_numbers(self) -> list[int]:
        """Epoch and segments as integers, for memory that processes share."""
        return [self.epoch, len(self.segments), *itertools.chain(*self.segments)]

    def with_start(self, numbers: Sequence[int]) -> EpochProgress:
        """With the epoch and the segments that another process may have set."""
        epoch, count, *rest = numbers
        segments = np.reshape(rest[: 4 * count], (-1, 4))
        return replace(self, epoch=epoch, segments=segments.tolist())


def check_batches(
    segments: Segments,
    num_samples: int,
    global_batch: int,
) -> None:
    """Refuse batches of which a state could not have been made, before an order takes memory.

    Args:
        segments: Of a state, as in ``epoch_order``'s ``history``.
        num_samples: Samples of an epoch.
        global_batch: Samples of a step of this job.

    Raises:
        ValueError: A batch is larger than any could have been.
    """
    most = max(num_samples, global_batch, MAX_STATE_BATCH)
    for size, *_ in segments:
        if size > most:
            raise ValueError(f"expected steps of at most {most} samples in a state, got {size}")


def _is_whole(number: Any, most: int = 1 << 63) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < most


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == length


def _is_worker(worker: Any) -> bool:
    if worker is None:
        return True
    is_pair = _is_list(worker, 2) and all(map(_is_whole, worker))
    return is_pair and bool(worker[0] < worker[1])


def _is_segment(segment: Any) -> bool:
    """Whether these may be (global_batch, slots, phases, steps)."""
    if not _is_list(segment, 4):
        return False
    *geometry, steps = segment
    # Lanes are counted by a product of two.
    return _is_whole(steps) and all(_is_whole(number, 1 << 31) for number in geometry)


def _start(epoch: Any, segments: Any) -> EpochProgress:
    """The start of an iteration, from values that may come from outside."""
    listed = isinstance(segments, list | tuple) and len(segments) <= MAX_SEGMENTS
    if _is_whole(epoch) and listed and all(map(_is_segment, segments)):
        return EpochProgress(epoch, [list(segment) for segment in segments])
    shown = repr(segments)[:200]
    raise ValueError(
        f"expected an epoch from 0 and at most {MAX_SEGMENTS} segments of 4 numbers, "
        f"got {epoch!r} and {shown}"
    )
