"""``PCRDataset``: exact, resumable epochs for ``torch.utils.data.DataLoader``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from ..format.scan import FULL, Scan
from ..reading.options import ReadOptions
from ..reading.prefix import Sample
from ..reading.scan_level import ScanChoice, current_scan
from ..reading.shared_integers import SharedIntegers
from . import ranks
from .collate import ImageChoice, make_collator
from .epoch_order import EpochOptions, Order, epoch_order, mixture, num_batches, worker_batches
from .epoch_progress import MAX_SEGMENTS, EpochProgress, State, check_batches
from .epoch_sequence import Batches, Ints
from .loader import Ahead, PCRLoader, refuse_batching, run_ahead
from .shard_set import ShardSet, read_batches

_VERSION = 1
_NO_EPOCH = -1


class PCRDataset(IterableDataset[Any]):
    """Batches of a PCR dataset, in an order that is a pure function of seed, epoch and geometry.

    Every rank gets the same number of equal batches, every sample comes once in an epoch, and a job
    that stops continues at the exact next batch, with other numbers of workers and, if
    ``epoch.slots`` is set, of ranks. Use it through :meth:`loader`, or give it to a ``DataLoader``
    with ``batch_size=None``.

    Args:
        url: Dataset folder or its ``pcr.json``, or several of them; local or any fsspec URLs. One
            request each.
        batch_size: Samples per rank and batch.
        scan: Highest scan to read, 1-based, or ``"full"``, or a :class:`ScanLevel`, which is read
            at each shard.
        image: Decodes image fields; the draws of its crops depend on seed, epoch and sample only.
            Without it they stay JPEG bytes. A size, such as 224 or (height, width), stands for
            ``ImageDecoder(size)``: the whole image at that size, without crop or flip. A function
            of the epoch's number gives one of these for each epoch, such as smaller images first.
        fields: Fields of a batch, which is then a tuple; by default a batch is a dict of all.
        transform: Called with each sample, a dict, in place of the conversions listed under
            "Yields"; what it returns is collated by torch.
        epoch: Seed, order and mixture.
        read: Cache, prefetch and network.
        rank: (rank, world); by default that of ``torch.distributed``, or else of ``RANK`` and
            ``WORLD_SIZE``, or else of ``SLURM_PROCID`` and ``SLURM_NTASKS``.

    Yields:
        Image fields as uint8 tensors (N, 3, H, W), or as the decoder's layout says; ``cls`` as
        int64 (N,); ``json`` parsed and ``txt`` as str in lists; other fields, and ``__key__``, in
        lists.

    Raises:
        ScanUnavailable: The dataset has no such scan.
        TypeError: ``image`` or ``fields`` is none of these.
        ValueError: The numbers do not fit together.
    """

    _ahead = Ahead()  # of the iteration that a loader begins, and in a worker of its own
    _known_order: tuple[Any, Order] | None = None

    def __init__(
        self,
        url: str | Sequence[str],
        batch_size: int,
        *,
        scan: ScanChoice = FULL,
        image: ImageChoice = None,
        fields: Sequence[str] | None = None,
        transform: Callable[[Sample], Any] | None = None,
        epoch: EpochOptions = EpochOptions(),
        read: ReadOptions = ReadOptions(),
        rank: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.shards = ShardSet(url, read)
        self.batch_size = batch_size
        self.scan = scan
        self.shards.check_scan(scan)
        self.options = epoch
        self.collate = make_collator(image, fields, transform, epoch.seed)
        self._given_rank = rank
        self.rank = ranks.current(rank)
        self.geometry = epoch.geometry(batch_size, self.rank.world)
        # The start of the iteration, and the epoch that was last read to its end. Both are shared
        # with workers of any start method: a persistent worker learns of set_epoch through them.
        self._start = SharedIntegers([0] * (2 + 4 * MAX_SEGMENTS))
        self._finished = SharedIntegers([_NO_EPOCH])
        self._progress = EpochProgress()
        self._order(self._progress)  # raises if there is not one global batch

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, by ``cls``."""
        return self.shards.classes

    @property
    def num_classes(self) -> int:
        """How many classes ``cls`` counts; 0 if the dataset does not say."""
        return self.shards.num_classes

    @property
    def max_scan(self) -> Scan:
        """The highest scan that can be read: ``"full"``, or of a staged copy what it holds."""
        return self.shards.scans.highest

    @property
    def num_samples(self) -> int:
        """Samples in the dataset."""
        return self.shards.num_samples

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads; :meth:`set_epoch` changes it."""
        return self.progress.epoch

    @property
    def progress(self) -> EpochProgress:
        """How far this process is, in the epoch that was last set in any process of this rank."""
        return self._progress.with_start(self._start[:])

    def __repr__(self) -> str:
        rank, world = self.rank
        scans = self.shards.scans
        return (
            f"<PCRDataset {self.shards}, {self.num_classes or 'unnumbered'} classes\n"
            f" reads scan {self.scan!r}, has up to {scans.highest!r} of {scans.num_groups} scans\n"
            f" {len(self)} batches of {self.batch_size} in epoch {self.epoch} on rank {rank} of "
            f"{world}>"
        )

    def __len__(self) -> int:
        """Batches that the next iteration gives this rank."""
        return num_batches(self._order(self.progress), self.rank.world, self.rank.rank)

    def set_epoch(self, epoch: int) -> None:
        """Read this epoch next; call it before each iteration, on all ranks.

        It is read from its beginning, or, if a state of this epoch was loaded just now, from where
        that state was: loops that resume may call both.
        """
        self._restart(self.progress.set_epoch(epoch))

    def loader(
        self,
        num_workers: int = 0,
        *,
        threads: int | None = None,
        prefetch_batches: int = 2,
        isolate: bool = False,
        pin: bool = False,
        **options: Any,
    ) -> PCRLoader:
        """A ``DataLoader`` of these batches that counts them, and goes on to the next epoch itself.

        Args:
            num_workers: Worker processes, in place of threads.
            threads: Threads that decode in this process, without the GIL; 0 decodes in the training
                loop's own thread, when it asks for a batch. By default one less than the CPUs of
                this rank, and 0 with workers. Pixels, order and state are the same for any number.
            prefetch_batches: Batches that threads decode ahead.
            isolate: Read and decode in one child process with these threads, for a training loop
                whose Python keeps the GIL. Batches lie in memory that both processes see.
            pin: Make batches in pinned memory, if CUDA is there.
            options: Other arguments of ``DataLoader``: ``prefetch_factor``,
                ``persistent_workers``, ``multiprocessing_context``...
        """
        ahead = run_ahead(num_workers, threads, prefetch_batches, isolate=isolate, pin=pin)
        return PCRLoader(self, ahead, num_workers=num_workers, **options)

    def hand_out(
        self,
        batches: Callable[[], Iterable[Any]],
        ahead: Callable[[int], Ahead],
    ) -> Iterator[Any]:
        """Count the batches that a loader gives, and set the next epoch after the last one.

        Args:
            batches: Begins the loader's iteration; called after the epoch is set, because it may
                start workers.
            ahead: How batches whose images take so many bytes are read and decoded.
        """
        self._check_rank()  # here, too: a spawned worker does not know its parent's process group
        # A loop that stops after len() batches, as Lightning's does, never sees the end of the
        # iteration.
        if self._progress.all_given:
            self.set_epoch(self.epoch + 1)
        epoch = self.epoch
        self._progress = self._progress.begun(len(self))
        chosen = ahead(self.collate.of_epoch(epoch).batch_bytes(self.batch_size))
        self._ahead = chosen
        try:
            coming = iter(batches())
        finally:
            self._ahead = Ahead()
        try:
            for given, batch in enumerate(coming, 1):
                self._progress = self._progress.gave(given)
                yield batch
        finally:
            del coming  # workers, and who receives from them, end before the memory of ``chosen``
        self.set_epoch(epoch + 1)

    def state_dict(self, batches: int | None = None) -> State:
        """Where this job is, in a few integers that JSON can hold; the same on all ranks.

        Args:
            batches: Batches that this rank has had of the present iteration; by default those that
                :class:`PCRLoader`, or without workers this object itself, gave.
        """
        progress = self.progress
        info = get_worker_info()
        if info is None:
            place = progress.state(self.geometry, batches)
        else:  # torchdata's StatefulDataLoader asks each worker for its own state
            place = progress.worker_state(info.id, info.num_workers)
        return self._fixed() | place

    def load_state_dict(self, state: State) -> None:
        """Continue where a job was: at another scan, with other workers or ranks, too.

        Raises:
            ValueError: The state is of other shards, other options or a newer version, or was never
                one of this job's; nothing changes then.
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
        progress = self.progress.loaded(state)
        samples = self.options.samples or self.shards.num_samples
        check_batches(progress.segments, samples, self.geometry.global_batch)
        order = self._order(progress)  # raises if the epoch has no such steps
        info = get_worker_info()
        if info is not None:  # another worker's state is refused before anything changes
            worker = (info.id, info.num_workers)
            part = worker_batches(order, self.rank.world, self.rank.rank, *reversed(worker))
            progress.begun(len(part), *worker)
        self._restart(progress)

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
            batches: Sample ids of each batch, (samples,) int64.
            scans: The scans to compare, 1-based or ``"full"``.
            epoch: Number that the crops are drawn for; another one draws other crops.
            shards: The same shards at another place, where there are more scans.

        Yields:
            The batch at each scan.
        """
        highest = FULL if FULL in scans else max(map(int, scans))
        collate = self.collate.of_epoch(epoch)
        with collate.open_pool(0) as pool:
            begin = partial(collate.begin_scans, scans=scans, epoch=epoch, pool=pool)
            yield from read_batches(shards or self.shards, batches, highest, begin)

    def sample(self, key: int | str, scan: Scan | None = None) -> Sample:
        """One sample by id or key, as stored.

        Reads one prefix, and to find a key the indexes of the shards before it.

        Raises:
            IndexError, KeyError: There is no such sample.
        """
        scan = current_scan(self.scan if scan is None else scan)
        if not isinstance(key, str):
            place = self.shards.place(key)
            return self.shards.open(place.shard).sample(place.row, scan)
        for shard in map(self.shards.open, range(len(self.shards.urls))):
            if key in shard.index.keys:
                return shard.sample(key, scan)
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: a worker's state is asked for before its first batch.
        refuse_batching(sys._getframe(1))
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        self._check_rank()
        batches = self._batches(worker, workers)
        progress = self.progress.begun(len(batches), worker, workers)
        self._progress = progress
        # A worker that had given all of its batches gives none; the epoch that was set since then
        # is not meant for it.
        if progress.stage == "ended":
            return iter(())

        epoch = progress.epoch
        # Only one worker says so; others may begin this epoch after it has ended for the first.
        if worker == 0 and self.options.shuffle_shards and self._finished[0] == epoch:
            warnings.warn(
                f"epoch {epoch} is read again, in the same order: call set_epoch({epoch + 1})",
                stacklevel=2,
            )
        return self._read(batches[progress.done :], epoch, worker, self._ahead)

    def _read(
        self,
        batches: Batches,
        epoch: int,
        worker: int,
        ahead: Ahead,
    ) -> Iterator[Any]:
        # The threads are started with the first batch, and end with this generator.
        collate = self.collate.of_epoch(epoch)
        with collate.open_pool(ahead.threads) as pool:
            begin = partial(collate.begin, epoch=epoch, pool=pool, target=ahead.memory)
            coming = read_batches(self.shards, batches, self.scan, begin, ahead.batches)
            for batch in coming:
                self._progress = self._progress.gave(self._progress.done + 1)
                yield batch
        self._progress = self._progress.ended()
        if worker == 0:
            self._finished[0] = epoch

    def _restart(self, progress: EpochProgress) -> None:
        """Take over a new start, here and in the workers."""
        numbers = progress.start_numbers()
        self._start[: len(numbers)] = numbers
        self._finished[0] = _NO_EPOCH
        self._progress = progress

    def _fixed(self) -> State:
        """What must be the same for a state to mean the same samples; phases and slots need not."""
        options = self.options
        return {
            "version": _VERSION,
            "shards": self.shards.fingerprint,
            "seed": options.seed,
            "shuffle_shards": options.shuffle_shards,
            "last": options.last,
            "weights": options.weights and list(options.weights),  # as JSON has them
            "samples": options.samples,
        }

    def _check_rank(self) -> None:
        """Raise in a process whose environment says another rank than the dataset has.

        It would read other samples than it should.
        """
        found = ranks.current(self._given_rank)
        if found.world > 1 and found != self.rank:
            raise ValueError(
                f"expected the rank that the dataset was made with, {self.rank}, got {found}: "
                "make it after init_process_group"
            )

    def _batches(self, worker: int = 0, workers: int = 1) -> list[Ints]:
        rank, world = self.rank
        return worker_batches(self._order(self.progress), world, rank, workers, worker)

    def _order(self, start: EpochProgress) -> Order:
        """The steps from a start on; the last one is kept, because several ask for it."""
        place = (start.epoch, str(start.segments))
        if self._known_order is None or self._known_order[0] != place:
            order = epoch_order(
                np.diff(self.shards.starts),
                self.geometry,
                self.options,
                epoch=start.epoch,
                history=start.segments,
                sequence=self._mixture(start.epoch),
            )
            self._known_order = (place, order)
        return self._known_order[1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known_order": None}  # spawned workers make their own

    def _mixture(self, epoch: int) -> Ints | None:
        """What an epoch consists of, if the datasets have weights."""
        options = self.options
        if options.weights is None:
            return None
        samples = self.shards.num_samples if options.samples is None else options.samples
        return mixture(self.shards.sizes, options.weights, samples, options, epoch=epoch)
