"""The store of a training run's checkpoints: every version kept, in the space of a few."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from .. import storage
from ..errorbound import Bound, PointwiseRelative, RelativeStd
from ..errors import ConcurrentWriter, CorruptCheckpoint, PCRError, StorageError
from ..redaction import get_logger
from .codec import (
    Exact,
    Precision,
    Quantized,
    Tensor,
    digest_of,
    encode_tensor,
    middle,
    quantized,
    store_leaf,
)
from .frame import check_metrics
from .manifest import Manifest, StoreIO, VersionRecord, number_in
from .reader import Decoded, load_version, problem_of, read_tensors
from .tensors import spec_of, words_of
from .typed_tree import Flattened, Leaf, flatten
from .version_file import Progress, StoredTensor, parallel_map, reported

log = get_logger(__name__)
T = TypeVar("T")
PRESETS = {
    "balanced": Precision(RelativeStd(0.005), RelativeStd(0.3), PointwiseRelative(0.3)),
    "fine": Precision(RelativeStd(0.001), RelativeStd(0.06), PointwiseRelative(0.06)),
    "lossless": Precision(),
}
_READ_ATTEMPTS = 3
_LONG_CHAIN = 10
# Above this fraction of changed words no exact form is compared: it is larger.
_MOST_CHANGED = 0.25


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
        self._last: dict[str, Tensor] | None = None
        # The words in the middle of each lossy tensor, as they were saved.
        self._samples: dict[str, Tensor] = {}

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
            numbers = list(versions or (record.number for record in manifest.versions))
            problems = []
            known: Decoded | None = None
            for number in reported(numbers, progress):
                error, known = problem_of(self.io, manifest, number, known)
                problems += [error] if error is not None else []
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
        for number in reported(kept, progress):
            record, *ancestors = before.chain(number)
            parent = next((each for each in ancestors if each.number in kept), None)
            if record.parent != (None if parent is None else parent.number):
                record = self._moved(before, record, parent)
            records.append(record)
        io.commit(before, before.with_versions(records))

    def _moved(
        self, manifest: Manifest, record: VersionRecord, parent: VersionRecord | None
    ) -> VersionRecord:
        """Write a version again, as a delta to another parent."""
        references: dict[str, Tensor] = {}
        if parent is not None:
            _, references = read_tensors(self.io, manifest, parent.number)
        file, tensors = read_tensors(self.io, manifest, record.number)
        stored = [
            StoredTensor(tensors[path], references.get(path), entry.digest)
            for path, entry in file.entries.items()
        ]
        return self.io.write(
            stored,
            parent,
            number=record.number,
            tree=file.header.tree,
            metrics=record.metrics,
            saved=record.saved,
        )

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
        precision = str(self.precision)
        log.info("saving to %s: %s", self.url, precision)
        if manifest.number == 0:
            left = [name for name in self.io.list() if number_in(name) is not None]
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
            after = manifest.with_versions((*manifest.versions, record))
            try:
                self._manifest = self.io.commit(
                    manifest, after.replace(precision=str(self.precision))
                )
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
        parent = manifest.versions[-1] if manifest.versions else None
        if self._last is None:
            self._last = {}
            if parent is not None:
                _, self._last = read_tensors(self.io, manifest, parent.number)
        before = self._last
        bounds = {leaf.path: self.precision.bound_of(leaf) for leaf in flat.leaves}
        if self._is_exact_smaller(flat.leaves, bounds):
            bounds = dict.fromkeys(bounds)
        found = parallel_map(
            self.io.workers,
            lambda leaf: store_leaf(leaf, bounds[leaf.path], before.get(leaf.path)),
            flat.leaves,
        )
        tensors = {leaf.path: tensor for leaf, (tensor, _) in zip(flat.leaves, found, strict=True)}
        changed_form = is_lossy(tensors.values()) != is_lossy(before.values())
        if changed_form or is_keyframe_due(manifest, self._every):
            parent, before = None, {}
        stored = [
            StoredTensor(tensor, before.get(leaf.path), digest_of(words))
            for leaf, (tensor, words) in zip(flat.leaves, found, strict=True)
        ]
        record = self.io.write(
            stored,
            parent,
            number=manifest.next_version,
            tree=flat.tree,
            metrics=metrics,
            saved=time.time(),
        )
        self._last = tensors
        return record

    def _is_exact_smaller(self, leaves: Sequence[Leaf], bounds: Mapping[str, Bound | None]) -> bool:
        """Whether exact versions would be smaller than quantized ones, by a sample of each tensor.

        What is compared is a keyframe and the deltas that may follow it.
        """
        assert self._last is not None
        # If the store was just opened, exact tensors tell what was saved.
        last = {path: middle(t) for path, t in self._last.items() if isinstance(t, Exact)}
        old = self._samples or last
        self._samples = {}
        pairs = []
        total = changed = 0.0
        for leaf in leaves:
            if (bound := bounds[leaf.path]) is None:
                continue
            words = words_of(leaf.tensor)
            now = middle(Exact(spec_of(leaf.tensor), words))
            self._samples[leaf.path] = now = Exact(now.spec, now.values.copy())
            was = old.get(leaf.path)
            if was is not None and was.spec == now.spec:
                pairs.append((now, was, bound, len(words) / len(now.values)))
                total += len(words)
                changed += len(words) * float((now.values != was.values).mean())
        if not pairs or changed > _MOST_CHANGED * total:
            return False
        sizes = {"exact": 0.0, "quantized": 0.0}
        for now, was, bound, weight in pairs:
            coarse, _ = quantized(now.values, now.spec, bound, None)
            coarse_was, _ = quantized(was.values, was.spec, bound, coarse)
            for form, new, base in (("exact", now, was), ("quantized", coarse, coarse_was)):
                key, delta = (encode_tensor(new, each)[0].num_bytes for each in (None, base))
                sizes[form] += weight * (key + (self._every - 1) * delta)
        return sizes["exact"] < sizes["quantized"]


def is_keyframe_due(manifest: Manifest, keyframe_every: int) -> bool:
    """Whether the next version should not be a delta."""
    if not manifest.versions:
        return True
    *deltas, keyframe = manifest.chain(manifest.versions[-1].number)
    length = 1 + len(deltas)
    outweighed = sum(record.file_bytes for record in deltas) > keyframe.file_bytes
    return length >= keyframe_every or (length >= _LONG_CHAIN and outweighed)


def is_lossy(tensors: Iterable[Tensor]) -> bool:
    """Whether any tensor of a version is quantized."""
    return any(isinstance(tensor, Quantized) for tensor in tensors)


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
