"""``PCRLoader``: batches of a dataset, in an exact order that can resume anywhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

import msgspec
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import pin_memory

from ..arguments import Natural, Positive, checked
from ..cpus import decoding_threads
from ..errors import PCRError
from ..format.scan import FULL, Scan
from ..native.pool import Pool, draw_key, own_pool
from . import ranks
from .bad_samples import BadSamples, report
from .buckets import Buckets
from .collate import Collator
from .dataset import PCRDataset
from .mixture import Weights, drawn_before, mixture, weights_at
from .order import EpochOrder, Geometry, Segment, advance
from .sequence import Ints, Rules
from .shard_set import Row, read_batches

_HOW_TO_GO_ON = (
    "PCRDataset(on_error='replace') replaces samples that cannot be read or decoded; "
    "loader.load_state_dict(loader.state_dict(), skip=1) goes on behind this batch"
)
# torch does not annotate it. It pins what DataLoader's own thread would pin.
_pinned: Callable[[Any], Any] = pin_memory.pin_memory
# JSON values in a loader's state.
State = dict[str, Any]
_VERSION = 1
_LAST: dict[Any, Literal["drop", "short", "pad"]] = {True: "drop", False: "short", "pad": "pad"}
# A state may come from a damaged file. A batch may be laid out in memory; the dataset bounds the
# number of steps.
_Epoch = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
_Batch = Annotated[int, msgspec.Meta(ge=1, le=1 << 26)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
_Shards = Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
_Segment = tuple[_Batch, _Count, _Count, _Count]


@dataclass
class _Cursor:
    """The position of a job. An iteration takes it over or replaces it with the next epoch's.

    Attributes:
        epoch: Number of the epoch.
        segments: Steps of the epoch before this iteration, as in :class:`EpochOrder`'s ``history``.
        given: Batches that this iteration has yielded.
        steps: Steps remaining when the iteration begins, the last of which may be empty on this
            rank; -1 before that.
        ended: Number of the epoch that a loaded state ended, if it did; -1 if not.
        order: The steps after the segments, once they are computed.
        geometry: Geometry of these steps; ``None`` before the iteration begins.
        known: The number of shards of each dataset that the epoch has, if the datasets have grown
            since it began.
    """

    epoch: int = 0
    segments: Sequence[Segment] = ()
    given: int = 0
    steps: int = -1
    ended: int = -1
    order: Any = None
    geometry: Any = None
    known: Sequence[int] | None = None

    def __getstate__(self) -> State:
        return vars(self) | {"order": None}  # a worker computes it


class LoaderStats(NamedTuple):
    """What a loader has done, on its rank.

    Attributes:
        num_replaced: Number of samples replaced, in all epochs.
        replaced: Key of each of them, or URL of the shard, and its error.
    """

    num_replaced: int
    replaced: dict[str, str]


def _unchanged(found: Any) -> Any:
    return found


class PCRLoader:
    """An iterable over batches of a :class:`PCRDataset`, in an order fixed by its arguments.

    A batch is a dict of the fields of the samples, or with ``fields=`` a tuple: images of one size
    a (B, 3, H, W) uint8 tensor, in the decoder's layout and one channel for gray, and per view (B,
    V, 3, H, W); images of their own sizes a list of (3, H, W) tensors, undecoded ones a list of
    bytes; integers such as ``cls`` a (B,) int64 tensor; everything else, also ``__key__``, a list.
    Of a field that only some samples have, the others' values are ``None``. With ``transform=`` a
    batch is what torch's ``default_collate`` makes of the results.

    Each ``for`` loop is the next epoch, even after ``break`` and ``next(iter(loader))``: every
    sample once, with a new order and new crops, and the same number of equal batches on each rank.
    :meth:`state_dict` returns the position of the loop, and :meth:`load_state_dict` continues at
    the exact next batch, even with a different number of threads, workers or ranks. Lightning's
    ``Trainer.fit`` calls both.

    Args:
        dataset: The dataset, or a subset of one.
        batch_size: Samples per rank and batch; with ``Buckets(pixels=...)`` the maximum, and fewer
            where images are large.
        shuffle: Whether to shuffle each epoch. ``True`` mixes the samples of 4 shards at a time, an
            integer those of that many shards; ``False`` keeps the order of the dataset.
        seed: Seed of orders and crops, in [0, 2**64).
        drop_last: What happens to the samples that do not fill a batch on all ranks. ``True``
            leaves them out, different ones in each epoch; ``False`` spreads them over the ranks as
            a smaller last batch, with some of the batch before it if they are fewer than ranks, so
            that every sample comes once and all ranks have the same number of batches; ``"pad"``
            repeats other samples to fill the batch. By default ``True`` with ``shuffle``, otherwise
            ``False``.
        threads: Decoding threads, which release the GIL; 0 decodes in the training loop's thread.
            By default one fewer than the CPUs of this rank, and 0 with workers.
        num_workers: Worker processes, for a ``transform=`` in Python, started by Python's method
            (``multiprocessing.set_start_method``); each has its own ``threads``.
        prefetch: Batches decoded ahead, per worker if there are any.
        pin_memory: Whether to decode into pinned memory, if CUDA is available.
        weights: Fraction of an epoch from each of several datasets, on any scale; by default each
            sample appears once. Weights that change from epoch to epoch are pairs ``[(0, (3, 1)),
            (1_000_000, (1, 1))]`` of the first sample of the run and weights, or a function of the
            epoch's number that gives the same whenever it is called; ``num_samples`` says how long
            an epoch is.
        num_samples: Samples per epoch with ``weights``; by default the size of the datasets.
        buckets: Groups images by aspect ratio, or bounds the pixels of a batch.
        rank: Rank of this process; by default taken, when an iteration begins, from
            ``torch.distributed``, or from ``RANK`` and ``WORLD_SIZE``, or from ``SLURM_PROCID`` and
            ``SLURM_NTASKS``.
        world_size: Number of ranks; given together with ``rank``.
        max_world_size: Largest number of ranks of an elastic job. The order is then the same for
            any number of ranks at the same global batch size.
        lanes_per_rank: Lanes of the epoch that a rank reads in turn; preferably a multiple of
            ``num_workers``, so that workers share no shards. 1 keeps the fewest shards in memory.
            By default 4, and 1 without ``shuffle``.

    Raises:
        ValueError: Arguments conflict, or the dataset does not fill one batch.
        TypeError: An argument is unknown or of another type.
    """

    shards_ahead = 2  # fetched while another is in use

    @checked(
        batch_sampler="buckets, or torch.utils.data.DataLoader(dataset, batch_sampler=...)",
        collate_fn="PCRDataset(transform=), or torch.utils.data.DataLoader(dataset, collate_fn=)",
        generator="seed",
        multiprocessing_context="multiprocessing.set_start_method(...)",
        persistent_workers="threads, which need no start; workers are started for each epoch",
        sampler="weights, or torch.utils.data.DataLoader(dataset, batch_size, sampler=...)",
        timeout="PCRDataset(retry=Retry(deadline=))",
        worker_init_fn="PCRDataset(transform=)",
    )
    def __init__(
        self,
        dataset: PCRDataset,
        batch_size: Positive,
        *,
        shuffle: bool | Natural = True,
        seed: Natural = 0,
        drop_last: bool | Literal["pad"] | None = None,
        threads: Natural | None = None,
        num_workers: Natural = 0,
        prefetch: Positive = 2,
        pin_memory: bool = False,
        weights: Weights | None = None,
        num_samples: Positive | None = None,
        buckets: Buckets | None = None,
        rank: Natural | None = None,
        world_size: Positive | None = None,
        max_world_size: Positive | None = None,
        lanes_per_rank: Positive | None = None,
    ) -> None:
        if num_samples is not None and weights is None:
            raise ValueError(
                "expected weights with num_samples: without them each sample comes once"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        window = 4 if shuffle is True else int(shuffle)
        if drop_last is None:
            drop_last = bool(shuffle)
        self.rules = Rules(
            int(seed), window, "short" if buckets and buckets.pixels else _LAST[drop_last]
        )
        self.threads = (0 if num_workers else decoding_threads()) if threads is None else threads
        self.num_workers = num_workers
        self.prefetch = prefetch
        self.pin_memory = pin_memory and torch.cuda.is_available()
        self.weights = weights
        self.num_samples = num_samples and int(num_samples)
        self.buckets = buckets
        self._given_rank = rank, world_size
        self.max_world_size = max_world_size
        self._lanes = lanes_per_rank or (4 if window else 1)
        self._cursor = self._whole = _Cursor()
        self._replaced: dict[str, str] = {}
        self._num_replaced = 0
        if buckets is not None:
            if max_world_size is not None:
                raise ValueError("expected no max_world_size with buckets")
            buckets.check(dataset, dataset.collator(seed), weights)
        self._order(self._cursor)  # validates the weights and the batch size
        samples, world = self.num_samples or len(dataset), self.rank.world
        if self.rules.last == "short" and samples < world and not buckets:
            raise ValueError(
                f"expected at least one sample for each of {world} ranks, got {samples}: "
                'drop_last="pad" repeats some'
            )

    @property
    def rank(self) -> ranks.Rank:
        """The current (rank, world) of this process."""
        return ranks.current(*self._given_rank)

    @property
    def epoch(self) -> int:
        """Number of the current epoch; before its first batch, of the epoch to read next."""
        return self._cursor.epoch

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """Lightning calls ``batch_sampler.sampler.set_epoch`` before each epoch."""
        return SimpleNamespace(sampler=self)

    @property
    def sampler(self) -> NoReturn:
        """Accelerate's ``skip_first_batches``, and the ``Trainer`` of transformers, ask for it."""
        raise AttributeError(
            "PCRLoader has no sampler, so batches are not skipped from outside: resume by "
            "loader.load_state_dict(state), with Accelerate by register_for_checkpointing(loader), "
            "or skip n batches by loader.load_state_dict(loader.state_dict(), skip=n); a Trainer "
            "needs ignore_data_skip=True"
        )

    def __repr__(self) -> str:
        return (
            f"<PCRLoader: {len(self)} batches of {self.batch_size} per epoch, next epoch "
            f"{self.epoch}, {self.rank}\n {self.dataset!r}>"
        )

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank; the same in every epoch."""
        return self._order(self._whole).num_batches(*self.rank)

    @checked()
    def set_epoch(self, epoch: Natural) -> None:
        """Read this epoch next, from its beginning.

        If a state was loaded and the iteration has not begun, setting the state's epoch keeps its
        position, so that resuming loops may call both. If the state was saved after the last batch
        of this epoch, the next iteration is empty.
        """
        cursor = self._cursor
        if not cursor.geometry and cursor.epoch == epoch:
            return
        self._cursor = _Cursor(int(epoch), ended=-1 if cursor.geometry else cursor.ended)

    def state_dict(self) -> State:
        """Return the position after the batches yielded so far; the same on all ranks.

        The state is a few integers that JSON can store. After the last batch of an epoch it is the
        start of the next epoch.
        """
        cursor = self._cursor
        place: State = {"epoch": cursor.epoch, "segments": list(cursor.segments)}
        if cursor.epoch == cursor.ended or cursor.given == cursor.steps:
            place = {"epoch": cursor.epoch + 1, "segments": []}
        elif cursor.given:
            place["segments"] = advance(cursor.segments, cursor.geometry, cursor.given)
        known = cursor.known if place["segments"] else None
        return self._fixed(place["epoch"], place["segments"], known) | place

    def stats(self) -> LoaderStats:
        """Return which samples this loader has replaced, on this rank; see ``on_error``."""
        return LoaderStats(self._num_replaced, dict(self._replaced))

    def load_state_dict(self, state: State, *, skip: int = 0) -> None:
        """Continue from a position, possibly at another scan or with other workers or ranks.

        If the datasets have more shards now, behind those that the state knew, the rest of its
        epoch is that of the known ones; the new ones come with the next epoch.

        Args:
            state: From :meth:`state_dict`.
            skip: Batches of the epoch to step over, the same on all ranks: 1 for a bad one.

        Raises:
            ValueError: The state belongs to other samples, other options or a newer version, or is
                malformed; the loader is then unchanged.
        """
        given = state if isinstance(state, Mapping) else {}
        try:
            epoch = msgspec.convert(given.get("epoch"), _Epoch)
            segments = msgspec.convert(given.get("segments"), list[_Segment])
        except msgspec.ValidationError as error:
            raise ValueError(f"expected a state with an epoch and its segments: {error}") from None
        known = self._known(given)
        for name, mine in self._fixed(epoch, segments, known).items():
            if given.get(name) != mine:
                raise ValueError(
                    f"expected a state of the same dataset and options, its {name} is "
                    f"{given.get(name)!r} instead of {mine!r}"
                )
        if not segments:
            known = None
        cursor = _Cursor(epoch, list(map(list, segments)), known=known)
        left = self._order(cursor)  # raises if the epoch lacks these steps
        if left.steps <= skip:
            cursor = _Cursor(cursor.epoch + 1)
        elif skip:
            done = advance(cursor.segments, left.geometry, skip)
            cursor = _Cursor(cursor.epoch, done, known=known)
        if not cursor.segments:
            cursor.ended = cursor.epoch - 1
        self._cursor = cursor

    def __iter__(self) -> Iterator[Any]:
        # A generator, because Lightning calls iter() one extra time, which must have no effect.
        cursor = self._cursor
        if cursor.geometry:
            cursor = _Cursor(cursor.epoch + 1)
        order = self._order(cursor)
        cursor.steps = 0 if cursor.ended == cursor.epoch else order.steps
        cursor.geometry = order.geometry
        self._cursor = cursor
        process = os.getpid()
        rank = self.rank
        reading: Any = _Reading(self, cursor, order.geometry, rank, order)
        if not cursor.steps:
            reading = ()
        elif self.num_workers:
            # By default, torch would draw the workers' seed from the generator of the training.
            seed = draw_key(self.rules.seed, cursor.epoch, rank.rank, order.num_batches(*rank))
            reading = DataLoader(
                reading,
                batch_size=None,
                num_workers=self.num_workers,
                prefetch_factor=self.prefetch,
                collate_fn=_unchanged,
                pin_memory=self.pin_memory,
                generator=torch.Generator().manual_seed(seed),
            )
        batches = iter(reading)
        while True:
            try:
                batch, replaced = next(batches)
            except StopIteration:
                break
            except PCRError as error:
                error.add_note(_HOW_TO_GO_ON)
                raise
            cursor.given += 1
            self._num_replaced += len(replaced)
            report(replaced, self._replaced)
            yield batch
            if os.getpid() != process:
                raise RuntimeError(
                    "expected the process in which this iteration was begun, got its child: begin "
                    "the iteration there"
                )
        if self._cursor is cursor:
            self._cursor = _Cursor(cursor.epoch + 1)

    def at_scans(
        self,
        batches: Sequence[Ints],
        scans: Sequence[Scan],
        epoch: int = 0,
    ) -> Iterator[dict[Scan, Any]]:
        """Yield given samples at several scans with the same crops, to compare scans.

        Each shard is read once, at the highest scan.

        Args:
            batches: (samples,) sample numbers of each batch.
            scans: The scans to compare, 1-based or ``"full"``.
            epoch: Epoch whose crops to use; each epoch has different crops.

        Yields:
            The batch at each scan.
        """
        collate = self.dataset.collator(self.rules.seed, epoch)
        highest = FULL if FULL in scans else max(map(int, scans))
        ids = [self.dataset.ids_of(numbers) for numbers in batches]
        for rows in read_batches(
            self.dataset.shards,
            ids,
            highest,
            lambda rows: lambda: rows,
            rows_of=self.dataset.rows_of,
        ):
            found = {}
            for scan in scans:
                at = {prefix: prefix.at(scan) for _, prefix, _ in rows}
                found[scan] = self.begin(
                    collate, own_pool(), [(each, at[prefix], row) for each, prefix, row in rows]
                )()
            yield found

    def begin(
        self, collate: Collator, pool: Pool, rows: list[Row], *, pin: bool = False
    ) -> Callable[[], Any]:
        """Start a batch; see :meth:`Collator.begin`. With buckets, its images get one shape."""
        if self.buckets is not None:
            ids = [sample for sample, _, _ in rows]
            collate = self.buckets.fit(collate, self.dataset.shards.sizes[ids])
        return collate.begin(rows, pool, pin)

    def _order(self, cursor: _Cursor) -> EpochOrder:
        """Return the steps from a cursor's start, computed once."""
        world = self.rank.world
        geometry = Geometry(self.batch_size * world, self.max_world_size or world, self._lanes)
        if cursor.order is None or cursor.order.geometry != geometry:
            cursor.order = self.order(cursor.epoch, cursor.segments, geometry, cursor.known)
        order: EpochOrder = cursor.order
        return order

    def order(
        self,
        epoch: int,
        history: Sequence[Segment],
        geometry: Geometry,
        known: Sequence[int] | None = None,
    ) -> EpochOrder:
        """Return the remaining steps of an epoch, in numbers of the dataset's samples.

        With ``known``, numbers are those of the samples of that many shards of each dataset, see
        :meth:`ids_of`.
        """
        dataset = self.dataset
        sizes = np.split(dataset.shard_sizes, dataset.shards.datasets[1:-1])
        if known is not None:
            sizes = [own[:count] for own, count in zip(sizes, known, strict=True)]
        samples = regroup = None
        if self.weights is not None:
            count = self.num_samples or sum(int(own.sum()) for own in sizes)
            samples = mixture(
                sizes,
                weights_at(self.weights, epoch, count),
                count,
                self.rules,
                epoch=epoch,
                drawn=drawn_before(self.weights, epoch, count),
            )
        if self.buckets is not None:
            numbers = np.arange(sum(int(own.sum()) for own in sizes))
            of_each = dataset.shards.sizes.take(self.ids_of(numbers, known), axis=0)
            regroup = partial(self.buckets.regroup, of_each)
        return EpochOrder(
            np.concatenate(sizes),
            geometry,
            self.rules,
            epoch=epoch,
            history=history,
            samples=samples,
            regroup=regroup,
        )

    def ids_of(self, numbers: Ints, known: Sequence[int] | None) -> Ints:
        """Return the ids of (n,) numbers of :meth:`order`."""
        shards = self.dataset.shards
        if known is None or len(known) == 1:
            return self.dataset.ids_of(numbers)
        first = shards.starts[shards.datasets[:-1]]
        held = shards.starts[np.add(shards.datasets[:-1], known)] - first
        begins = held.cumsum() - held
        of_each = np.searchsorted(begins, numbers, side="right") - 1
        ids: Ints = numbers - begins[of_each] + first[of_each]
        return ids

    def _known(self, state: Mapping[str, Any]) -> Sequence[int] | None:
        """Return the shards that a state knew, if there are more now; ``None`` for the same."""
        shards = self.dataset.shards
        try:
            known = msgspec.convert(state.get("shards"), list[_Shards])
        except msgspec.ValidationError:
            return None
        grew = len(known) == len(shards.counts) and known != shards.counts
        is_part = grew and all(np.less_equal(known, shards.counts))
        is_whole = len(self.dataset) == shards.starts[-1]
        same = is_part and is_whole and shards.fingerprint_of(known) == state.get("dataset")
        return known if same else None

    def _fixed(self, epoch: int, segments: Sequence[Segment], known: Sequence[int] | None) -> State:
        """Return the values that must match for a state to mean the same samples."""
        rules, shards, dataset = self.rules, self.dataset.shards, self.dataset
        weights = drawn = None
        if self.weights is not None:
            samples = self.num_samples or len(dataset)
            if known is not None and not self.num_samples:
                ends = np.add(shards.datasets[:-1], known)
                samples = int((shards.starts[ends] - shards.starts[shards.datasets[:-1]]).sum())
            drawn = drawn_before(self.weights, epoch, samples)
            # Those of an epoch that has not begun may still change.
            weights = weights_at(self.weights, epoch, samples) if segments else None
        return {
            "version": _VERSION,
            "dataset": dataset.fingerprint if known is None else shards.fingerprint_of(known),
            "shards": list(shards.counts if known is None else known),
            "seed": rules.seed,
            "shuffle_shards": rules.shuffle_shards,
            "last": rules.last,
            "weights": weights,
            "drawn": drawn,
            "samples": self.num_samples,
            "buckets": self.buckets and list(astuple(self.buckets)),
        }


@dataclass(eq=False)
class _Reading(IterableDataset[Any]):
    """The batches of one iteration; a ``DataLoader`` worker makes its part of them.

    Attributes:
        loader: The loader, with its options.
        cursor: Where the iteration begins.
        geometry: Geometry of this iteration.
        rank: The rank of the loader, which a spawned worker cannot look up.
        order: The steps, or ``None`` to compute them.
    """

    loader: PCRLoader
    cursor: _Cursor
    geometry: Geometry
    rank: ranks.Rank
    order: EpochOrder | None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"order": None}

    def __iter__(self) -> Iterator[Any]:
        loader, cursor = self.loader, self.cursor
        info = get_worker_info()
        part = {"worker": info.id, "workers": info.num_workers} if info else {}
        order = self.order or loader.order(
            cursor.epoch, cursor.segments, self.geometry, cursor.known
        )
        dataset = loader.dataset
        bad = BadSamples(dataset.on_error, loader.num_samples or len(dataset))
        collate = dataset.collator(loader.rules.seed, cursor.epoch, bad)
        # torch's own thread pins the batches of workers.
        pin = loader.pin_memory and not info
        # The threads start with the first batch and end with this generator.
        with Pool(loader.threads) as pool:
            for batch in read_batches(
                dataset.shards,
                (loader.ids_of(each, cursor.known) for each in order.batches(*self.rank, **part)),
                dataset.scan,
                partial(loader.begin, collate, pool, pin=pin),
                ahead=loader.prefetch if loader.threads else 0,
                shards_ahead=loader.shards_ahead,
                on_error=bad,
                rows_of=dataset.rows_of,
            ):
                yield _pinned(batch) if pin else batch, bad.take()
