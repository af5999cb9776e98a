"""The store of a training run's checkpoints: every version kept, in the space of a few."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Self, TypeVar

from .. import storage
from ..errorbound import PointwiseRelative, RelativeStd
from ..errors import ConcurrentWriter, CorruptCheckpoint, PCRError, StorageError
from ..redaction import get_logger
from .codec import Exact, Precision, describe
from .manifest import Manifest, StoreIO, VersionRecord, is_version_file
from .reader import Decoded, load_version, problem_of, read_tensors
from .typed_tree import Flattened, Leaf, flatten
from .version_file import Progress, check_metrics, content_id, parallel_map
from .writer import (
    Stored,
    is_exact_smaller,
    is_keyframe_due,
    is_lossy,
    sample,
    store_leaf,
    write_record,
)

log = get_logger(__name__)
T = TypeVar("T")
PRESETS = {
    "balanced": Precision(RelativeStd(0.005), RelativeStd(0.3), PointwiseRelative(0.3)),
    "fine": Precision(RelativeStd(0.001), RelativeStd(0.06), PointwiseRelative(0.06)),
    "lossless": Precision(),
}
_READ_ATTEMPTS = 3


class DeltaStore:
    """Checkpoints in a folder, **lossy by default**: weights within 0.5 % of a std, momentum 30 %.

    Lossy are parameters of two or more dimensions, and ``exp_avg``, ``momentum_buffer``,
    ``exp_avg_sq`` and ``max_exp_avg_sq`` of torch's Adam, AdamW and SGD. Everything else, and every
    tensor of other optimizers, is kept bit for bit; :meth:`lossless` keeps everything. Where few
    words change between versions, the exact form is smaller, and is taken.

    Saving works in a background thread on a copy. Nothing in a store is executed when it is loaded.
    Files are never changed, so a folder behind a web server is a release: see :func:`pull`.

    Args:
        url: The folder, local or at any fsspec URL.
        precision: ``"balanced"`` (0.5 % of a tensor's standard deviation for weights, 30 % for
            first moments, 30 % of each value for second moments), ``"fine"`` (0.1 %, 6 % and 6 %),
            ``"lossless"``, or a :class:`Precision`.
        keyframe_every: The longest chain of versions that one keyframe begins. In chains of more
            than ten a keyframe is also written once the deltas since the last one outweigh it.
        options: fsspec storage options.
        workers: Threads that encode and decode.

    Raises:
        ValueError: An option is wrong.
    """

    def __init__(
        self,
        url: str,
        precision: str | Precision = "balanced",
        *,
        keyframe_every: int = 10,
        options: storage.Options | None = None,
        workers: int = 1,
    ) -> None:
        if isinstance(precision, str) and precision not in PRESETS:
            raise ValueError(f"expected a precision of {sorted(PRESETS)}, got {precision!r}")
        if keyframe_every < 1:
            raise ValueError(f"expected keyframe_every to be at least 1, got {keyframe_every}")
        self.url = url
        self.precision = PRESETS[precision] if isinstance(precision, str) else precision
        self._every = keyframe_every
        self.io = StoreIO(url, options, workers)
        self._background = _Background()
        # Of the store, as long as this writer knows it: None before the first save.
        self._manifest: Manifest | None = None
        self._last: Decoded | None = None
        # The words in the middle of each lossy tensor, as they were saved.
        self._samples: dict[str, Exact] = {}

    @classmethod
    def lossless(cls, url: str, **how: Any) -> Self:
        """Open a store that keeps every tensor bit for bit."""
        return cls(url, "lossless", **how)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def save(
        self,
        state: Any,
        *,
        metrics: dict[str, Any] | None = None,
        blocking: bool = False,
        on_saved: Callable[[int], None] | None = None,
    ) -> int:
        """Save a state: model, optimizer, scheduler, generators, counters, nested as it comes.

        The tensors are copied before this returns; encoding and writing happen in the background.
        A save waits for the one before.

        Args:
            state: dict, OrderedDict, list, tuple, int, float, str, bytes, bool, None, tensors,
                numpy arrays and scalars. Tensors that share memory share it again when loaded.
            metrics: Plain numbers and strings to note with the version.
            blocking: Wait until the version is in the store.
            on_saved: Called with the number, in the background, once the version is in the store.

        Returns:
            The version's number.

        Raises:
            UnsupportedState: The state holds something else; its path is named.
            ConcurrentWriter: Another process has written to the store; its versions are kept, and
                the next call saves after them. (Also raised by a later call.)
            StorageError: The disk is full, or the store refuses. (Also raised by a later call.)
        """
        noted = dict(metrics or {})
        check_metrics(noted)
        flat = flatten(state)
        self._background.wait()
        manifest = self._manifest or self._open()
        number = manifest.next_version
        self._background.submit(lambda: self._append(manifest, flat, noted, on_saved))
        if blocking:
            self._background.wait()
        return number

    def load(
        self,
        version: int = -1,
        *,
        names: Collection[str] | None = None,
        map_location: Any = None,
    ) -> Any:
        """Load a version; every tensor is compared with its checksum.

        Args:
            version: Its number; -1 for the newest, -2 for the one before.
            names: Paths of tensors (``"model.conv1.weight"``) or of anything above them
                (``"model"``); only what they need is read.
            map_location: The torch device of tensors; the CPU by default.

        Returns:
            The state as it was saved; with ``names`` a dict of the parts by name.

        Raises:
            VersionUnavailable: The version or a name is not there.
            BrokenChain: A reference is missing or is another version.
            CorruptCheckpoint: Something does not match its checksum; nothing is returned.
            StorageError: It cannot be read.
        """
        return self.read(
            lambda manifest: load_version(
                self.io, manifest, version, names=names, map_location=map_location
            )
        )

    def versions(self) -> list[VersionRecord]:
        """List the versions, oldest first."""
        self._background.wait()
        return list(self.io.newest().versions)

    def verify(
        self, versions: Collection[int] | None = None, *, progress: Progress | None = None
    ) -> list[PCRError]:
        """Read every byte of versions and of what they need, and restore them.

        Args:
            versions: Their numbers; default: all.
            progress: Called with the number of checked versions, and of all to check.

        Returns:
            What is wrong, in the order of the versions; empty if all is well.

        Raises:
            PCRError: The manifest cannot be read.
        """

        def work(manifest: Manifest) -> list[PCRError]:
            numbers = [record.number for record in manifest.versions]
            problems = []
            known: Decoded | None = None
            for done, number in enumerate(versions or numbers, 1):
                error, known = problem_of(self.io, manifest, number, known)
                problems += [error] if error is not None else []
                if progress is not None:
                    progress(done, len(versions or numbers))
            return problems

        return self.read(work)

    def delete(self, *, keep: Collection[int], progress: Progress | None = None) -> None:
        """Delete all versions but some; deltas to deleted versions are rewritten, exactly.

        Args:
            keep: Numbers of the versions to keep; negative ones count from the newest.
            progress: Called with the number of finished versions, and of all to keep.

        Raises:
            VersionUnavailable: One is not there; nothing has changed.
            ConcurrentWriter: Another process has written to the store; nothing has changed.
        """
        io = self.settled()
        before = io.existing()
        kept = sorted({before.record(number).number for number in keep})
        records = []
        for done, number in enumerate(kept, 1):
            record = before.record(number)
            ancestors = [each.number for each in before.chain(number)[1:]]
            parent = next((each for each in ancestors if each in kept), None)
            records.append(
                record if parent == record.parent else self._moved(before, record, parent)
            )
            if progress is not None:
                progress(done, len(kept))
        io.commit(before, dataclasses.replace(before, versions=tuple(records)))
        files = {record.file for record in records}
        io.remove(record.file for record in before.versions if record.file not in files)

    def _moved(
        self, manifest: Manifest, record: VersionRecord, parent: int | None
    ) -> VersionRecord:
        """Write a version again, as a delta to another parent."""
        reference = None
        if parent is not None:
            file, tensors = read_tensors(self.io, manifest, parent)
            reference = Decoded(parent, file.id, tensors)
        file, tensors = read_tensors(self.io, manifest, record.number)
        checksums = {entry.path: entry.content_crc for entry in file.entries}
        return write_record(self.io, record, file.tree, tensors, checksums, reference)

    def close(self) -> None:
        """Wait until all versions are in the store, and end the background thread.

        Raises:
            PCRError: A version could not be saved.
        """
        self._background.close()

    def read(self, work: Callable[[Manifest], T]) -> T:
        """Apply a function to the newest manifest; again if files it names were just deleted."""
        self._background.wait()
        manifest = self.io.existing()
        for _ in range(_READ_ATTEMPTS):
            try:
                return work(manifest)
            except StorageError:
                current = self.io.existing()
                if current.number == manifest.number:
                    raise
                manifest = current
        return work(manifest)

    def settled(self) -> StoreIO:
        """Wait for saves, and return access to the files; the next save reads the store again."""
        self._background.wait()
        self._forget()
        return self.io

    def _forget(self) -> None:
        self._manifest = self._last = None
        self._samples = {}

    def _open(self) -> Manifest:
        """Read what a writer has to know of the store, which is made if it is not there."""
        manifest = self.io.newest()
        precision = describe(self.precision)
        log.info("saving to %s: %s", self.url, precision)
        if manifest.number == 0:
            left = [name for name in self.io.list() if is_version_file(name)]
            if left:
                raise CorruptCheckpoint(
                    f"expected a manifest beside the files of {len(left)} versions, there is "
                    "none: see `pcrshard checkpoint recover`",
                    url=self.url,
                )
            # Before any version, so that a lost manifest is noticed.
            manifest = self.io.commit(manifest, Manifest(precision=precision))
        elif manifest.precision not in ("", precision):
            log.warning("the store was written with: %s; now: %s", manifest.precision, precision)
        self.io.clean(manifest)
        self._manifest = manifest
        return manifest

    def _append(
        self,
        manifest: Manifest,
        flat: Flattened,
        metrics: dict[str, Any],
        on_saved: Callable[[int], None] | None,
    ) -> None:
        """Write the next version, in the background."""
        number = manifest.next_version
        try:
            record = self._write_next(manifest, flat, metrics)
            versions = (*manifest.versions, record)
            after = Manifest(0, number + 1, describe(self.precision), versions)
            try:
                self._manifest = self.io.commit(manifest, after)
            except ConcurrentWriter:
                self.io.remove([record.file])
                raise
        except Exception:
            self._forget()
            log.exception("version %s was not saved", number)
            raise
        try:
            if on_saved is not None:
                on_saved(number)
        except Exception:
            log.exception("version %s is saved, but on_saved failed", number)
            raise

    def _write_next(
        self, manifest: Manifest, flat: Flattened, metrics: dict[str, Any]
    ) -> VersionRecord:
        if self._last is None and manifest.versions:
            last = manifest.versions[-1]
            _, tensors = read_tensors(self.io, manifest, last.number)
            self._last = Decoded(last.number, last.id, tensors)
        before = {} if self._last is None else self._last.tensors
        is_due = is_keyframe_due(manifest, self._every)
        bounds = {leaf.path: self.precision.bound_of(leaf) for leaf in flat.leaves}
        pairs = [(leaf, bounds[leaf.path]) for leaf in flat.leaves]
        samples = {leaf.path: sample(leaf, bound) for leaf, bound in pairs if bound is not None}
        exact = is_exact_smaller(samples, self._samples, before, self._every, is_due)
        self._samples = {path: each.part for path, each in samples.items()}

        def work(leaf: Leaf) -> Stored:
            return store_leaf(leaf, None if exact else bounds[leaf.path], before.get(leaf.path))

        found = parallel_map(self.io.workers, work, flat.leaves)
        tensors = {stored.path: stored.tensor for stored in found}
        changed_form = self._last is not None and is_lossy(tensors) != is_lossy(before)
        reference = None if is_due or changed_form else self._last
        record = VersionRecord(
            number=manifest.next_version,
            id=content_id(flat.tree, ((s.path, s.tensor.spec, s.digest) for s in found)),
            parent=None,
            file="",
            file_bytes=0,
            header_bytes=0,
            raw_bytes=sum(tensor.spec.num_bytes for tensor in tensors.values()),
            metrics=metrics,
            saved=time.time(),
        )
        checksums = {stored.path: stored.checksum for stored in found}
        record = write_record(self.io, record, flat.tree, tensors, checksums, reference)
        self._last = Decoded(record.number, record.id, tensors)
        return record


class _Background:
    """One piece of work at a time, whose error is raised by the next call."""

    def __init__(self) -> None:
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._pending: concurrent.futures.Future[object] | None = None

    def submit(self, work: Callable[[], object]) -> None:
        """Start work; the piece before must have been waited for."""
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(1, "pcrshard-checkpoint")
        self._pending = self._pool.submit(work)

    def wait(self) -> None:
        """Wait for all work; raise its error, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for all work, and end the thread."""
        try:
            self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None
