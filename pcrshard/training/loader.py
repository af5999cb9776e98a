"""``PCRLoader``: batches of a dataset, in an exact order that can be resumed anywhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any, Literal, TypeGuard

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..arguments import Natural, Positive, checked
from ..format.scan import FULL, Scan
from . import ranks
from .batch_images import BatchMemory
from .buckets import Buckets
from .collate import Collator
from .cpus import decoding_threads
from .dataset import PCRDataset
from .epoch_order import (
    Geometry,
    Order,
    Rules,
    advance,
    epoch_order,
    last_share,
    mixture,
    worker_batches,
)
from .epoch_sequence import MAX_EPOCH, Batches, check_whole
from .shard_set import Row, ShardSet, read_batches, sample_sizes

# What JSON can hold of a job.
State = dict[str, Any]
_VERSION = 1
_SHUFFLE_SHARDS = 4
_LANES = 4
_MAX_SEGMENTS = 64
# Batches of a state may be larger than those of this job, but not so large that an order of a
# small dataset takes gigabytes.
_MAX_STATE_BATCH = 1 << 20
_MAX_STATE_LANES = 1 << 31
_LAST: dict[Any, Literal["drop", "short", "pad"]] = {True: "drop", False: "short", "pad": "pad"}


@dataclass
class _Cursor:
    """The position of a job. An iteration takes it over, or replaces it by that of the next epoch.

    Attributes:
        epoch: Number of the epoch.
        segments: Steps of it before this iteration, as in ``epoch_order``'s ``history``.
        given: Batches that this iteration has handed to the loop.
        steps: Steps that are left when it begins, of which this rank may not have the last one;
            ``None`` before.
        is_loaded: Whether this position was loaded from a state.
        is_over: Whether nothing is left of the epoch.
    """

    epoch: int = 0
    segments: list[list[int]] = field(default_factory=list)
    given: int = 0
    steps: int | None = None
    is_loaded: bool = False
    is_over: bool = False


# Annotated, so that a wrong argument is refused in these words.
Dataset = Annotated[
    PCRDataset, "a PCRDataset: PCRDataset(url), and of some samples dataset.subset(numbers)"
]
Shuffle = Annotated[bool | Natural, "True, False or a number of shards"]
BucketChoice = Annotated[Buckets | None, "pcrshard.Buckets(area=...), Buckets(pixels=...) or None"]


class PCRLoader:
    """Batches of a :class:`PCRDataset`, in an order that is a pure function of its arguments.

    Each ``for`` loop over it is the next epoch, also after ``break``: every sample once, in another
    order with other crops, and the same number of equal batches on each rank. :meth:`state_dict`
    returns the position of the loop, and :meth:`load_state_dict` continues at the exact next batch,
    also with other numbers of threads, workers and ranks. Lightning's ``Trainer.fit`` calls both.

    Args:
        dataset: The samples; an epoch of a view has the samples of the view.
        batch_size: Samples per rank and batch; with ``Buckets(pixels=...)`` their maximum.
        shuffle: Whether each epoch has another order. ``True`` mixes the samples of 4 shards at a
            time, a number those of that many shards; ``False`` keeps the order of the dataset.
        seed: Seed of orders and crops, in [0, 2**64).
        drop_last: What happens to the samples that do not fill a batch on all ranks. ``True``
            leaves them out, different ones in each epoch; ``False`` spreads them over the ranks as
            a smaller last batch, which some ranks may not get; ``"pad"`` repeats other samples to
            fill the batch.
        threads: Threads that decode in this process, without the GIL; 0 decodes in the training
            loop's own thread. By default one fewer than the CPUs of this rank.
        num_workers: Worker processes in place of threads, for a ``transform=`` in Python.
        prefetch: Batches that are decoded ahead, per worker if there are any.
        pin_memory: Whether batches are made in pinned memory, if CUDA is there.
        weights: Fraction of an epoch from each of several datasets, on any scale; by default each
            sample comes once.
        num_samples: Samples per epoch with ``weights``; by default as many as the datasets have.
        buckets: Groups images by aspect ratio, or bounds the pixels of a batch.
        rank: Number of this rank; by default that of ``torch.distributed`` when an iteration
            begins, or of ``RANK`` and ``WORLD_SIZE``, or of ``SLURM_PROCID`` and ``SLURM_NTASKS``.
        world_size: Number of ranks; given together with ``rank``.
        max_world_size: Largest number of ranks of an elastic job. The order is then the same for
            any number of ranks at the same global batch size.
        lanes_per_rank: Positions of an epoch that a rank reads in turn; best a multiple of
            ``num_workers``, which then share no shard. 1 holds the fewest shards in memory. By
            default 4, and 1 without ``shuffle``.
        shards_ahead: Shards that are fetched while another is used.
        multiprocessing_context: How workers are started: ``fork``, ``spawn`` or ``forkserver``.

    Raises:
        ValueError: The numbers do not fit together, or the dataset does not fill one batch.
        TypeError: An argument is unknown or of another type.
    """

    @checked(
        batch_sampler="buckets, or torch.utils.data.DataLoader(dataset, batch_sampler=...)",
        collate_fn="PCRDataset(transform=), or torch.utils.data.DataLoader(dataset, collate_fn=)",
        generator="seed",
        last="drop_last",
        persistent_workers="threads, which need no start; workers are started for each epoch",
        phases="lanes_per_rank",
        pin="pin_memory",
        prefetch_batches="prefetch",
        prefetch_factor="prefetch",
        sampler="weights, or torch.utils.data.DataLoader(dataset, batch_size, sampler=...)",
        samples="num_samples",
        shuffle_shards="shuffle",
        slots="max_world_size",
        timeout="PCRDataset(retry=Retry(deadline=))",
        worker_init_fn="PCRDataset(transform=)",
    )
    def __init__(
        self,
        dataset: Dataset,
        batch_size: Positive,
        *,
        shuffle: Shuffle = True,
        seed: Natural = 0,
        drop_last: bool | Literal["pad"] = True,
        threads: Natural | None = None,
        num_workers: Natural = 0,
        prefetch: Positive = 2,
        pin_memory: bool = False,
        weights: Sequence[float] | None = None,
        num_samples: Positive | None = None,
        buckets: BucketChoice = None,
        rank: Natural | None = None,
        world_size: Positive | None = None,
        max_world_size: Positive | None = None,
        lanes_per_rank: Positive | None = None,
        shards_ahead: Natural = 2,
        multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = None,
    ) -> None:
        if num_samples is not None and weights is None:
            raise ValueError(
                f"expected weights with num_samples={num_samples}: without them each sample comes "
                "once"
            )
        if num_workers and threads:
            raise ValueError(
                f"expected threads or workers, got threads={threads} and num_workers={num_workers}"
            )
        if multiprocessing_context and not num_workers:
            raise ValueError(
                f"expected num_workers with multiprocessing_context={multiprocessing_context!r}"
            )
        if (rank is None) != (world_size is None):
            raise ValueError(f"expected rank and world_size together, got {rank} and {world_size}")
        self.dataset = dataset
        self.batch_size = batch_size
        window = _SHUFFLE_SHARDS if shuffle is True else int(shuffle)
        self.rules = Rules(
            int(seed), window, "short" if buckets and buckets.pixels else _LAST[drop_last]
        )
        self.threads = (0 if num_workers else decoding_threads()) if threads is None else threads
        self.num_workers = num_workers
        self.prefetch = prefetch
        self.pin_memory = pin_memory and torch.cuda.is_available()
        self.weights = weights
        self.num_samples = None if num_samples is None else int(num_samples)
        self.buckets = buckets
        self._given_rank = None if rank is None or world_size is None else (rank, world_size)
        self.max_world_size = max_world_size
        self._lanes = (_LANES if window else 1) if lanes_per_rank is None else lanes_per_rank
        self.shards_ahead = shards_ahead
        self._context = multiprocessing_context
        self._cursor = _Cursor()
        geometry = self._geometry
        if buckets is not None:
            if max_world_size is not None:
                raise ValueError("expected no max_world_size with buckets")
            buckets.check(dataset, self.collator, geometry, weights)
        if weights is not None:
            self._order(self._cursor)  # raises if the weights make no sense
        elif not len(self) and self.rules.last == "drop":
            raise ValueError(
                f"expected at least one global batch of {geometry.global_batch} samples, "
                f"got {len(dataset)}"
            )

    @property
    def collator(self) -> Collator:
        """What makes batches, by the decoder and the fields that the dataset has now."""
        return self.dataset.collator(self.rules.seed)

    @property
    def rank(self) -> ranks.Rank:
        """(rank, world): of this process, as it is now."""
        return ranks.current(self._given_rank)

    @property
    def epoch(self) -> int:
        """Number of the epoch that is being read; before its first batch, the one to read next."""
        return self._cursor.epoch

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """Lightning calls ``batch_sampler.sampler.set_epoch`` before each epoch."""
        return SimpleNamespace(sampler=self)

    def __repr__(self) -> str:
        rank, world = self.rank
        return (
            f"<PCRLoader: {len(self)} batches of {self.batch_size} per epoch, next epoch "
            f"{self.epoch}, rank {rank} of {world}\n {self.dataset!r}>"
        )

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank; the same in every epoch."""
        rank, world = self.rank
        if self.buckets is not None and self.buckets.pixels is not None:
            return self.buckets.num_batches(self.dataset.sizes, self._geometry)
        samples = self.dataset.num_samples if self.num_samples is None else self.num_samples
        full, rest = divmod(samples, self.batch_size * world)
        if self.rules.last == "short":
            return full + bool(last_share(rest, world, rank))
        return full + (self.rules.last == "pad" and rest > 0)

    @checked()
    def set_epoch(self, epoch: Natural) -> None:
        """Read this epoch next, from its beginning.

        If a state was loaded and the iteration has not begun, the epoch of the state keeps its
        place: loops that resume may call both. If the state was saved after the last batch of this
        epoch, nothing is left of it, and the next iteration is empty.
        """
        cursor = self._cursor
        if cursor.steps is None and cursor.epoch == epoch:
            return
        ended = cursor.is_loaded and not cursor.segments and cursor.steps is None
        self._cursor = _Cursor(epoch, is_over=ended and epoch == cursor.epoch - 1)

    def state_dict(self) -> State:
        """Return the position after the batches that the loop got; the same on all ranks.

        A few integers that JSON can hold. After the last batch of an epoch it is the start of the
        next one.
        """
        cursor = self._cursor
        place: State = {"epoch": cursor.epoch, "segments": cursor.segments}
        if cursor.is_over or (cursor.given and cursor.given == cursor.steps):
            place = {"epoch": cursor.epoch + 1, "segments": []}
        elif cursor.given:
            place["segments"] = advance(cursor.segments, self._geometry, cursor.given)
        return self._fixed() | place

    def load_state_dict(self, state: State) -> None:
        """Continue from a position, also at another scan, or with other workers or ranks.

        Raises:
            ValueError: The state is of other samples, other options or a newer version, or is
                malformed; nothing changes then.
        """
        if not isinstance(state, Mapping):
            kind = type(state).__name__
            raise ValueError(f"expected a state, a dict, got {kind}")  # noqa: TRY004  # documented
        for name, mine in self._fixed().items():
            if state.get(name) != mine:
                raise ValueError(
                    f"expected a state of the same dataset and options, its {name} is "
                    f"{state.get(name)!r} instead of {mine!r}"
                )
        segments = state.get("segments")
        if not _are_segments(segments):
            raise ValueError(
                f"expected up to {_MAX_SEGMENTS} segments of 4 numbers, got {repr(segments)[:200]}"
            )
        most = max(len(self.dataset), self.num_samples or 0, self._geometry.global_batch)
        for size, _, lanes, _ in segments:
            check_whole("batches of a state", size, 1, max(most, _MAX_STATE_BATCH))
            check_whole("lanes of a state", lanes, 1, _MAX_STATE_LANES)
        epoch = check_whole("epoch", state.get("epoch", -1), 0, MAX_EPOCH)
        cursor = _Cursor(epoch, list(map(list, segments)), is_loaded=True)
        if not self._order(cursor).steps:  # raises if the epoch has no such steps
            cursor = _Cursor(cursor.epoch + 1, is_loaded=True)
        self._cursor = cursor

    def __iter__(self) -> Iterator[Any]:
        # A generator: Lightning calls iter() once more than it reads, which must change nothing.
        cursor = self._cursor
        if cursor.steps is not None:
            cursor = _Cursor(cursor.epoch + 1)
        rank, world = self.rank
        order = self._order(cursor)
        cursor.steps = 0 if cursor.is_over else order.steps
        batches = worker_batches(order, world, rank)[: cursor.steps]
        self._cursor = cursor
        process = os.getpid()
        with closing(self._read(batches, cursor.epoch)) as coming:
            for batch in coming:
                cursor.given += 1
                yield batch
                if os.getpid() != process:
                    raise RuntimeError(
                        f"expected the process {process}, in which this iteration was begun, got "
                        f"its child {os.getpid()}: begin the iteration there"
                    )
        if self._cursor is cursor:
            self._cursor = _Cursor(cursor.epoch + 1)

    def views(
        self,
        batches: Batches,
        scans: Sequence[Scan],
        epoch: int = 0,
        shards: ShardSet | None = None,
    ) -> Iterator[dict[Scan, Any]]:
        """Given samples at several scans with the same crops, for comparisons of scans.

        Each shard is read once, at the highest scan.

        Args:
            batches: (samples,) sample numbers of each batch.
            scans: The scans to compare, 1-based or ``"full"``.
            epoch: Number that the crops are drawn for; another one draws other crops.
            shards: The same shards at another place, where there are more scans.

        Yields:
            The batch at each scan.
        """
        highest = FULL if FULL in scans else max(map(int, scans))
        collate = self.collator.of_epoch(epoch)
        ids = [self.dataset.sample_ids(numbers) for numbers in batches]
        with collate.open_pool(0) as pool:
            begin = partial(collate.begin_scans, scans=scans, epoch=epoch, pool=pool)
            yield from read_batches(shards or self.dataset.shards, ids, highest, begin)

    @property
    def _geometry(self) -> Geometry:
        world = self.rank.world
        return Geometry(self.batch_size * world, self.max_world_size or world, self._lanes)

    def _order(self, cursor: _Cursor) -> Order:
        """The steps from a cursor's start on."""
        dataset = self.dataset
        sizes = dataset.shard_sizes
        sequence = None
        if self.weights is not None:
            parts = np.split(sizes, dataset.shards.datasets[1:-1])
            samples = len(dataset) if self.num_samples is None else self.num_samples
            sequence = mixture(parts, self.weights, samples, self.rules, epoch=cursor.epoch)
        regroup = None
        if self.buckets is not None:
            regroup = self.buckets.regroup(dataset.sizes, self.rules)
        return epoch_order(
            sizes,
            self._geometry,
            self.rules,
            epoch=cursor.epoch,
            history=cursor.segments,
            sequence=sequence,
            regroup=regroup,
        )

    def _read(self, batches: Batches, epoch: int) -> Generator[Any]:
        """The batches of sample numbers, read and decoded here or by workers."""
        reading = _Reading(self, batches, epoch)
        if not self.num_workers:
            yield from reading
            return
        yield from DataLoader(
            reading,
            batch_size=None,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch,
            pin_memory=self.pin_memory,
            multiprocessing_context=self._context,
        )

    def _fixed(self) -> State:
        """What must be the same for a state to mean the same samples; lanes and ranks need not."""
        rules = self.rules
        shards, view = self.dataset.fingerprint
        return {
            "version": _VERSION,
            "shards": shards,
            "seed": rules.seed,
            "shuffle_shards": rules.shuffle_shards,
            "last": rules.last,
            "weights": None if self.weights is None else list(map(float, self.weights)),
            "samples": self.num_samples,
            "view": view,
            "buckets": self.buckets and self.buckets.numbers,
        }


@dataclass(eq=False)
class _Reading(IterableDataset[Any]):
    """The batches of one iteration; a worker of a ``DataLoader`` makes its share of them.

    Attributes:
        loader: How they are read.
        batches: Sample numbers of each.
        epoch: Number of the epoch.
    """

    loader: PCRLoader
    batches: Batches
    epoch: int

    def __iter__(self) -> Iterator[Any]:
        loader = self.loader
        dataset = loader.dataset
        info = get_worker_info()
        batches = self.batches[info.id :: info.num_workers] if info else self.batches
        collate = loader.collator.of_epoch(self.epoch)
        target = BatchMemory(loader.pin_memory)
        # The threads are started with the first batch, and end with this generator.
        with collate.open_pool(loader.threads) as pool:

            def begin(rows: list[Row]) -> Callable[[], Any]:
                shaped = collate
                if loader.buckets is not None and loader.buckets.area is not None:
                    upright = collate.is_upright
                    prefixes = {row[1] for row in rows}
                    sizes = {each: sample_sizes(each.index, upright) for each in prefixes}
                    own = np.array([sizes[prefix][row] for _, prefix, row in rows])
                    shaped = collate.of_size(loader.buckets.size_of(own))
                return shaped.begin(rows, self.epoch, pool, target)

            yield from read_batches(
                dataset.shards,
                [dataset.sample_ids(numbers) for numbers in batches],
                dataset.scan,
                begin,
                ahead=loader.prefetch if loader.threads else 0,
                shards_ahead=loader.shards_ahead,
            )


def _are_segments(value: Any) -> TypeGuard[Sequence[Sequence[Any]]]:
    """Whether a value, which may come from outside, has the form of a state's segments."""
    is_list = isinstance(value, list | tuple) and len(value) <= _MAX_SEGMENTS
    return is_list and all(isinstance(each, list | tuple) and len(each) == 4 for each in value)
