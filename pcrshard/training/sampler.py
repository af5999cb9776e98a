"""``EpochSampler``: the exact, elastic order for any map-style dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from torch.utils.data import Sampler

from ..arguments import Natural, Positive, checked
from ..checksum import crc32c
from . import ranks
from .order import EpochOrder, Geometry, Segment, advance
from .sequence import Rules

_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_LAST: dict[Any, Literal["drop", "short", "pad"]] = {True: "drop", False: "short", "pad": "pad"}


@dataclass
class _Iteration:
    """An iteration over an epoch, or over the rest of one; ``done`` batches were taken from it."""

    epoch: int
    segments: Sequence[Segment]
    order: EpochOrder
    done: int = 0


class EpochSampler(Sampler[list[int]]):
    """A ``batch_sampler`` for any map-style dataset, in the order of :class:`PCRLoader`.

    Each iteration is the next epoch: every sample once, in a new order, and the same number of
    batches on each rank. A job that stops goes on at the exact next batch, on another number of
    ranks, too. torchdata's ``StatefulDataLoader`` and ``nodes.SamplerWrapper`` save and load its
    state by themselves. A ``DataLoader`` asks for batches ahead of training, so the loop says how
    many of an epoch it has used:

    >>> sampler = EpochSampler(10, 4, rank=0, world_size=1)
    >>> first, *_ = sampler
    >>> state = sampler.state_dict(1)
    >>> resumed = EpochSampler(10, 4, rank=0, world_size=1)
    >>> resumed.load_state_dict(state)
    >>> len(list(resumed)), resumed.epoch
    (1, 1)

    Args:
        sizes: Number of samples, or (shards,) samples of each shard or file, so that samples of a
            shard are read near each other.
        batch_size: Samples per rank and batch.
        shuffle: Whether to shuffle each epoch; ``True`` mixes the samples of 4 shards at a time, an
            integer those of that many.
        seed: Seed of the orders, in [0, 2**64).
        drop_last: What happens to the samples that do not fill a batch on all ranks, as for
            :class:`PCRLoader`.
        rank: Rank of this process; by default as for :class:`PCRLoader`.
        world_size: Number of ranks; given together with ``rank``.
        max_world_size: Largest number of ranks of an elastic job. The order is then the same for
            any number of ranks at the same global batch size.

    Attributes:
        epoch: Number of the epoch that the next iteration reads.

    Raises:
        ValueError: Arguments conflict, or the samples do not fill one batch.
        TypeError: An argument is unknown or of another type.
    """

    @checked()
    def __init__(
        self,
        sizes: int | Sequence[int] | np.ndarray,
        batch_size: Positive,
        *,
        shuffle: bool | Natural = True,
        seed: Natural = 0,
        drop_last: bool | Literal["pad"] = True,
        rank: Natural | None = None,
        world_size: Positive | None = None,
        max_world_size: Positive | None = None,
    ) -> None:
        self._sizes = np.atleast_1d(np.asarray(sizes, np.int64))
        window = 4 if shuffle is True else int(shuffle)
        self._rules = Rules(int(seed), window, _LAST[drop_last])
        self._batch_size = batch_size
        self._given_rank = rank, world_size
        self._max_world_size = max_world_size
        self.epoch = 0
        self._segments: Sequence[Segment] = ()
        # That began last.
        self._current: _Iteration | None = None
        self._order(0, ())  # validates the sizes

    def _order(self, epoch: int, segments: Sequence[Segment]) -> EpochOrder:
        world = ranks.current(*self._given_rank).world
        geometry = Geometry(self._batch_size * world, self._max_world_size or world, 1)
        return EpochOrder(self._sizes, geometry, self._rules, epoch=epoch, history=segments)

    def __len__(self) -> int:
        """Return the number of batches of the next iteration on this rank."""
        rank = ranks.current(*self._given_rank)
        return self._order(self.epoch, self._segments).num_batches(*rank)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order(self.epoch, self._segments)
        current = self._current = _Iteration(self.epoch, self._segments, order)
        self.epoch, self._segments = self.epoch + 1, ()
        for ids in order.batches(*ranks.current(*self._given_rank)):
            current.done += 1
            yield ids.tolist()
        current.done = order.steps

    @checked()
    def set_epoch(self, epoch: Natural) -> None:
        """Read this epoch next, from its beginning, or from where a state of it goes on."""
        if epoch != self.epoch:
            self.epoch, self._segments = int(epoch), ()

    def state_dict(self, done: int | None = None) -> dict[str, Any]:
        """Return the position after the first batches of the iteration that began last.

        Args:
            done: Batches of that iteration that training has used; 0 before it begins. Default: the
                number of batches that the iterator has returned.

        Raises:
            ValueError: The iteration has fewer.
        """
        current = self._current
        if current is None:
            if done:
                raise ValueError(f"expected no batches before an iteration, got {done}")
            place = self.epoch, self._segments
        else:
            epoch, segments, order = current.epoch, current.segments, current.order
            done = current.done if done is None else done
            if not 0 <= done <= order.steps:
                raise ValueError(f"expected 0 to {order.steps} batches, got {done}")
            steps = advance(segments, order.geometry, done) if done else segments
            place = (epoch, steps) if done < order.steps else (epoch + 1, ())
        return self._fixed() | {"epoch": place[0], "segments": list(map(list, place[1]))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position, possibly on another number of ranks.

        Raises:
            ValueError: The state is of other samples or options, or malformed.
        """
        for name, mine in self._fixed().items():
            if state.get(name) != mine:
                raise ValueError(
                    f"expected a state of the same samples and options, its {name} is "
                    f"{state.get(name)!r} instead of {mine!r}"
                )
        try:
            epoch = msgspec.convert(state.get("epoch"), _Number)
            segments = msgspec.convert(state.get("segments"), list[list[_Number]])
        except msgspec.ValidationError as error:
            raise ValueError(f"expected an epoch and its segments in a state: {error}") from None
        self._order(epoch, segments)  # raises if the epoch lacks these steps
        self.epoch, self._segments, self._current = epoch, segments, None

    def _fixed(self) -> dict[str, Any]:
        """Return the values that must match for a state to mean the same samples."""
        rules = self._rules
        return {
            "samples": crc32c(self._sizes),
            "seed": rules.seed,
            "shuffle_shards": rules.shuffle_shards,
            "last": rules.last,
        }
