"""``PCRDataset``: exact, resumable epochs for ``torch.utils.data.DataLoader``."""

from __future__ import annotations

import dataclasses
import operator
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from torch.utils.data import IterableDataset, get_worker_info

from ..format.scan import FULL, Scan, check_scan
from ..jpeg.image_decoder import ImageDecoder
from ..reading.options import ReadOptions
from ..reading.prefix import Sample
from ..reading.scan_level import ScanLevel
from ..reading.shared_integers import SharedIntegers
from . import ranks
from .collate import Collator, Row
from .epoch_order import Geometry, Order, Rules, advance, epoch_order, mixture, worker_batches
from .loader import PCRLoader
from .shard_set import ShardSet, read_batches

_VERSION = 1
_MAX_SEGMENTS = 64
_MAX_WORKERS = 1024


@dataclasses.dataclass(frozen=True)
class EpochOptions:
    """What an epoch consists of, and how it is cut up; see ``docs/plan.md``.

    Attributes:
        seed: Of orders and crops.
        shuffle_shards: Shards that are mixed at a time in a lane; 0 keeps the order of the dataset.
        last: ``drop``, ``pad`` or ``short``: what becomes of samples that fill no global batch.
        phases: Lanes per slot; best a multiple of the number of DataLoader workers.
        slots: Of an elastic job: the largest number of ranks that it will have. The order is then the same for any world size at
            the same global batch. By default the world size.
        weights: Share of each dataset in an epoch; by default each sample comes once.
        samples: In an epoch, with ``weights``; by default as many as there are.
    """

    seed: int = 0
    shuffle_shards: int = 4
    last: Literal["drop", "pad", "short"] = "drop"
    phases: int = 4
    slots: int | None = None
    weights: tuple[float, ...] | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        if self.samples is not None and self.weights is None:
            raise ValueError(
                f"expected weights with samples={self.samples}: without them each sample comes once"
            )

    @property
    def rules(self) -> Rules:
        """Those that hold for a whole epoch."""
        return Rules(self.seed, self.shuffle_shards, self.last)


class PCRDataset(IterableDataset[Any]):
    """Batches of a PCR dataset, in an order that is a pure function of seed, epoch and batch geometry.

    Every rank gets the same number of equal batches, every sample comes once in an epoch, and a job that stops goes on at the exact next batch,
    with other numbers of workers and, if ``epoch.slots`` is set, of ranks. Give it to :meth:`loader`, or to a ``DataLoader`` with
    ``batch_size=None``.

    Args:
        url: Dataset folder or its ``pcr.json``, or several; local or any fsspec URLs. One request each.
        batch_size: Samples per rank and batch.
        scan: 1..N, ``"full"``, or a :class:`ScanLevel`, which is read at each shard.
        image: Decodes image fields; the draws of its crops depend on seed, epoch and sample only. Without it they stay JPEG bytes.
        fields: Makes batches tuples of these fields; by default they are dicts of all fields.
        transform: Called with each sample, a dict, in place of the collation's own conversions; what it returns is collated by torch.
        epoch: Seed, order, mixture.
        read: Cache, prefetch, network.
        rank: (rank, world); by default ``torch.distributed``'s, else by ``RANK``/``WORLD_SIZE``, else by ``SLURM_PROCID``/``SLURM_NTASKS``.

    Yields:
        Image fields as uint8 tensors (N, 3, H, W), or as the decoder's layout says; ``cls`` as int64 (N,); ``json`` parsed and ``txt`` as
        str in lists; other fields, and ``__key__``, in lists.

    Raises:
        ScanUnavailable: The dataset has no such scan.
        ValueError: The numbers do not fit together.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        batch_size: int,
        *,
        scan: Scan | ScanLevel = FULL,
        image: ImageDecoder | None = None,
        fields: Sequence[str] | None = None,
        transform: Callable[[Sample], Any] | None = None,
        epoch: EpochOptions = EpochOptions(),
        read: ReadOptions = ReadOptions(),
        rank: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.shards = ShardSet(
            [os.fspath(url)] if isinstance(url, str | os.PathLike) else list(url), read
        )
        self.batch_size, self.scan, self.options = batch_size, scan, epoch
        if isinstance(fields, str):
            raise TypeError(
                f"expected a sequence of field names, got {fields!r}; write ({fields!r},)"
            )
        self.collate = Collator(
            image, None if fields is None else tuple(fields), transform, epoch.seed
        )
        if not isinstance(scan, ScanLevel):
            for entry in self.shards.entries:
                check_scan(scan, entry.num_groups)
                entry.prefix_stop(scan)
        self.rank, self._rank_given = ranks.current(rank), rank is not None
        self.geometry = Geometry(
            batch_size * self.rank.world,
            self.rank.world if epoch.slots is None else epoch.slots,
            epoch.phases,
        )
        # Shared with workers of any start method: a persistent worker learns of set_epoch through it.
        self._start = SharedIntegers([0] * (2 + 4 * _MAX_SEGMENTS))
        self._finished = SharedIntegers([-1] * _MAX_WORKERS)
        self._done = 0
        self._own: list[int] | None = None
        self._count, self._ended, self._loaded, self._all_given = 0, False, False, False
        if not self._order().steps:
            raise ValueError(
                f"expected at least one global batch of {self.geometry.global_batch}, got {self.num_samples} samples"
            )

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, by ``cls``."""
        return self.shards.classes

    @property
    def num_samples(self) -> int:
        """Samples in the dataset."""
        return self.shards.num_samples

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads; :meth:`set_epoch` changes it."""
        return int(self._start[0])

    def __len__(self) -> int:
        """Batches that the next iteration gives this rank."""
        order = self._order()
        return len(worker_batches(order, self.rank.world, self.rank.rank))

    def set_epoch(self, epoch: int) -> None:
        """Read this epoch next; call it before each iteration, on all ranks.

        From its beginning, or, if it is the epoch of a state that was loaded just now, from where that was: loops that resume say both.
        """
        if self._loaded and epoch == self.epoch:
            self._loaded = False
        else:
            self._set_start(epoch, [])

    def loader(self, num_workers: int = 0, **options: Any) -> PCRLoader:
        """A ``DataLoader`` of these batches that counts them, and goes on to the next epoch by itself.

        Args:
            num_workers: Worker processes.
            options: For ``DataLoader``: ``pin_memory``, ``prefetch_factor``, ``persistent_workers``, ``multiprocessing_context``...
        """
        if not options.get("in_order", True):
            raise ValueError(
                "expected in_order=True: batches that come as they are ready cannot be resumed exactly"
            )
        return PCRLoader(self, batch_size=None, num_workers=num_workers, **options)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Where this job is, in a few integers that JSON can hold; the same on all ranks.

        Args:
            batches: Batches that this rank has had of the present iteration; by default those that :class:`PCRLoader`, or without workers this object
                itself, gave.
        """
        state = {"version": _VERSION, "epoch": self.epoch} | self._fixed()
        info = get_worker_info()
        # Inside a worker (torchdata's StatefulDataLoader) the state is the worker's own.
        if info is not None:
            return state | {
                "segments": self._segments(),
                "worker": [info.id, info.num_workers],
                "done": self._done,
                "ended": self._ended or self._done >= self._count,
            }
        if self._ended and batches is None:
            return state | {"epoch": self.epoch + 1, "segments": advance([], self.geometry, 0)}
        return state | {
            "segments": advance(
                self._segments(), self.geometry, self._done if batches is None else batches
            )
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a job was: at another scan, with other workers or ranks, too.

        Raises:
            ValueError: The state is of other shards, other options or a newer version, or was never one of this job's; nothing changes then.
        """
        if state.get("version") != _VERSION:
            raise ValueError(
                f"expected a state of version {_VERSION}, got {state.get('version')!r}"
            )
        for name, mine in self._fixed().items():
            if state.get(name) != mine:
                raise ValueError(
                    f"expected a state of the same dataset and options, its {name} is {state.get(name)!r} instead of {mine!r}"
                )
        if not state.get("ended"):
            kept = self.epoch, self._segments()
            self._set_start(state.get("epoch"), state.get("segments"))
            try:
                self._order()
            except ValueError:
                self._set_start(*kept)
                raise
            self._loaded = True
        if "worker" in state:
            self._own, self._done, self._ended = (
                list(state["worker"]),
                state["done"],
                state["ended"],
            )

    def views(
        self, batches: Sequence[Any], scans: Sequence[Scan], epoch: int = 0
    ) -> Iterator[dict[Scan, Any]]:
        """Given samples at several scans, with the same crops: what a comparison of scans needs. Each shard is read once, at the highest scan.

        Args:
            batches: Sample ids of each batch, (samples,) int64.
            scans: Which.
            epoch: Another one draws other crops.

        Yields:
            The batch at each scan.
        """
        highest: Scan = FULL if FULL in scans else max(int(scan) for scan in scans)

        def take(rows: list[Row]) -> dict[Scan, Any]:
            return {
                scan: self.collate(
                    [(number, prefix.at(scan), row) for number, prefix, row in rows], epoch
                )
                for scan in scans
            }

        return read_batches(self.shards, batches, highest, take)

    def sample(self, key: int | str, scan: Scan | None = None) -> Sample:
        """One sample by id or key, as stored; reads one prefix, and to find a key the indexes of the shards before it.

        Raises:
            IndexError, KeyError: There is no such sample.
        """
        mine = self.scan.value if isinstance(self.scan, ScanLevel) else self.scan
        level = mine if scan is None else scan
        if not isinstance(key, str):
            key = operator.index(key)
            if not 0 <= key < self.num_samples:
                raise IndexError(f"expected an id below {self.num_samples}, got {key}")
            shard, row = self.shards.place(key)
            return self.shards.open(shard).sample(row, level)
        for number in range(len(self.shards.urls)):
            shard_of_key = self.shards.open(number)
            if key in shard_of_key.index.keys:
                return shard_of_key.sample(key, level)
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: a worker's state is asked for before its first batch.
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        self._check_rank()
        if self.options.shuffle_shards and self._finished[worker] == self.epoch:
            warnings.warn(
                f"epoch {self.epoch} is read again, in the same order: call set_epoch({self.epoch + 1})",
                stacklevel=2,
            )
        if self._own is None:
            self._done = 0
        elif self._own != [worker, workers]:
            raise ValueError(
                f"expected the state of worker {worker} of {workers}, got that of worker {self._own[0]} of {self._own[1]}"
            )
        # A worker that had given all its batches gives none; the epoch that was set meanwhile is not for it.
        if self._own is not None and self._ended:
            self._own = None
            return iter(())
        self._own, self._ended, self._loaded = None, False, False
        batches = worker_batches(self._order(), self.rank.world, self.rank.rank, workers, worker)
        self._count = len(batches)
        return self._read(batches[self._done :], self.epoch, worker)

    def _read(self, batches: Sequence[Any], epoch: int, worker: int) -> Iterator[Any]:
        for batch in read_batches(
            self.shards, batches, self.scan, lambda rows: self.collate(rows, epoch)
        ):
            self._done += 1
            yield batch
        self._finished[worker], self._ended = epoch, True

    def _fixed(self) -> dict[str, Any]:
        """What must be the same for a state to mean the same samples."""
        fixed = dataclasses.asdict(self.options) | {"shards": self.shards.fingerprint}
        del fixed["slots"], fixed["phases"]  # a state has those of its segments
        return fixed | {
            "weights": None if self.options.weights is None else list(self.options.weights)
        }

    def _check_rank(self) -> None:
        """A worker whose environment says another rank than its parent's would read other samples than it should."""
        found = ranks.current()
        if not self._rank_given and found.world > 1 and found != self.rank:
            raise ValueError(
                f"expected the rank that the dataset was made with, {self.rank}, got {found}: make it after init_process_group"
            )

    def _segments(self) -> list[list[int]]:
        count = int(self._start[1])
        return [[int(self._start[2 + 4 * i + j]) for j in range(4)] for i in range(count)]

    def _set_start(self, epoch: Any, segments: Any) -> None:
        whole = (
            isinstance(epoch, int)
            and isinstance(segments, list)
            and all(isinstance(s, list | tuple) for s in segments)
        )
        flat = [number for segment in segments for number in segment] if whole else []
        if (
            not whole
            or len(segments) > _MAX_SEGMENTS
            or any(len(s) != 4 for s in segments)
            or not all(map(_fits, [epoch, *flat]))
        ):
            raise ValueError(
                f"expected an epoch from 0 and at most {_MAX_SEGMENTS} segments of 4 numbers, got {epoch!r} and {segments!r}"
            )
        self._start[: 2 + len(flat)] = [epoch, len(segments), *flat]
        self._finished[:] = [-1] * _MAX_WORKERS
        self._done, self._own, self._ended, self._loaded, self._all_given = (
            0,
            None,
            False,
            False,
            False,
        )

    def _order(self) -> Order:
        """The steps from the start on."""
        options, sizes = self.options, self.shards.sizes
        sequence = None
        if options.weights is not None:
            samples = self.num_samples if options.samples is None else options.samples
            sequence = mixture(sizes, options.weights, samples, options.rules, epoch=self.epoch)
        flat = [size for dataset in sizes for size in dataset]
        return epoch_order(
            flat,
            self.geometry,
            options.rules,
            epoch=self.epoch,
            history=self._segments(),
            sequence=sequence,
        )


def _fits(number: Any) -> bool:
    return isinstance(number, int) and 0 <= number < 1 << 63
