"""Checkpoint stores: every version of a training run in the space of a few."""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch

from .. import storage, zstd
from ..errorbound import Bound, PointwiseRelative, RelativeStd, Words
from ..errors import ConcurrentWriter, PCRError, UnsupportedState
from ..memory import BufferPool, trim, trim_thread
from ..redaction import get_logger
from .chains import StoreIO
from .codec import Entry, Precision, Tensor, encode_tensor, largest_entry, store_leaf
from .frame import plain_metrics
from .manifest import VERSION_NAME, Manifest, VersionRecord
from .roles import assign_roles, find_roles
from .tensors import spec_of
from .typed_tree import Leaf, Tree, flatten
from .version_file import Progress, parallel_map, reported

log = get_logger(__name__)
PRESETS = {
    "balanced": Precision(RelativeStd(0.005), RelativeStd(0.3), PointwiseRelative(0.3)),
    "fine": Precision(RelativeStd(0.001), RelativeStd(0.06), PointwiseRelative(0.06)),
    "lossless": Precision(),
}
_LONG_CHAIN = 10
# Up to this fraction of changed words, versions in bfloat16 are smaller exactly than quantized,
# estimated from every 61st word.
_FEW_CHANGED = 0.25
_STRIDE = 61


class DeltaStore:
    """Checkpoints in a folder: every version of a training state, as deltas, bit for bit.

    With a lossy ``precision``, weights and the moments of torch's Adam, AdamW, and SGD are stored
    within error bounds. Every tensor that is not recognized as one of these, including every tensor
    of other optimizers, is stored bit for bit; the first save logs which tensors are lossy. While
    few words of weights in bfloat16 change between versions, the exact form is smaller, and is
    stored.

    A background thread encodes and writes a copy of the state. Loading never executes anything
    from the store. Version files are immutable, so any web server can serve the folder as a
    release: see :func:`pull`.

    Args:
        url: The folder, local or at any fsspec URL.
        precision: ``"lossless"``; ``"balanced"``: weights within 0.5 % of a tensor's standard
            deviation, first moments within 30 %, second moments within 30 % of each value;
            ``"fine"``: 0.1 %, 6 %, and 6 %; or a :class:`Precision`.
        keyframe_every: Maximum number of versions per chain, including the keyframe. A chain of ten
            or more versions also ends once its deltas are larger than its keyframe.
        options: fsspec storage options.
        workers: Number of threads that encode and decode.

    Raises:
        ValueError: An option is invalid.
        TypeError: ``precision`` has another type.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        precision: str | Precision = "lossless",
        *,
        keyframe_every: int = 10,
        options: storage.Options = None,
        workers: int = 1,
    ) -> None:
        if isinstance(precision, str):
            if precision not in PRESETS:
                raise ValueError(f"expected a precision of {sorted(PRESETS)}, got {precision!r}")
            precision = PRESETS[precision]
        if not isinstance(precision, Precision):
            raise TypeError(f"expected a Precision or a preset's name, got {precision!r}")
        if keyframe_every < 1:
            raise ValueError(f"expected keyframe_every to be at least 1, got {keyframe_every}")
        self.url = os.fspath(url)
        self.precision = precision
        self._every = keyframe_every
        self.io = StoreIO(self.url, options, workers)
        self._pending: concurrent.futures.Future[None] | None = None
        # The newest manifest, while this writer knows it; None before the first save.
        self._manifest: Manifest | None = None
        # For the next snapshot.
        self._buffers = BufferPool(max_idle=1)
        # The number that the last save returned.
        self._number = 0
        # Some words, before quantization, of each tensor with a bound, as last saved.
        self._sample: list[Words] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(
        self,
        state: Any,
        *,
        metrics: dict[str, Any] | None = None,
        blocking: bool = False,
        on_saved: Callable[[int], None] | None = None,
    ) -> int:
        """Save a nested state: model, optimizer, scheduler, random generators, counters.

        Returns once the tensors are copied; encoding and writing continue in the background. If the
        previous save is still running, waits for it first. If it failed, raises its error after it
        has started to save this state: only the failed version is missing.

        Memory holds this copy and the tensors that are being encoded. The previous version is in an
        unnamed temporary file: in the store's folder, or in that for temporary files if the store
        is not local.

        Args:
            state: dict, OrderedDict, list, tuple, int, float, str, bytes, BytesIO, bool, None,
                tensors, numpy arrays and scalars. Tensors that share memory share it again when
                loaded.
            metrics: Numbers and strings to record with the version; scalars of numpy and torch
                are recorded as numbers.
            blocking: Return once the version is in the store, without a copy of the state.
            on_saved: Called with the version number in the background thread, once it is stored;
                it must not use the store.

        Returns:
            The version's number.

        Raises:
            UnsupportedState: The state holds a value of another type; the message names its path.
            ConcurrentWriter: Another process has written to the store; its versions are kept, and
                the next call appends to them. (May be raised by a later call.)
            StorageError: The disk is full, or the storage rejected the write. (May be raised by a
                later call.)
            CorruptCheckpoint, UnsupportedVersion: The manifest is damaged or of another format
                version.
            ValueError: ``metrics`` has values that are neither numbers nor strings.
        """
        noted = plain_metrics(metrics or {})
        self._join()  # before there is another copy
        tree, leaves = flatten(state, None if blocking else self._buffers)
        if self.precision.is_lossy:
            assign_roles(leaves, find_roles(state))
        return self.save_flat(tree, leaves, noted, blocking=blocking, on_saved=on_saved)

    def save_flat(
        self,
        tree: Tree,
        leaves: Sequence[Leaf],
        metrics: dict[str, Any],
        *,
        blocking: bool = False,
        on_saved: Callable[[int], None] | None = None,
    ) -> int:
        """Save a state whose tensors have roles, and are copied unless ``blocking``."""

        def start() -> int:
            manifest = self._manifest or self._open(leaves)
            # Not the number that a failed save returned: it would mean two states.
            number = max(manifest.next_version, self._number + 1)
            job = (manifest, number, tree, leaves, metrics, on_saved)
            if blocking:
                self._append(*job)
            else:
                # One for each save, because a forked process has no others; the interpreter waits.
                self._thread = concurrent.futures.ThreadPoolExecutor(1, "pcrshard-checkpoint")
                self._pending = self._thread.submit(self._append, *job)
            self._number = number
            return number

        try:
            self._wait()
        except Exception:  # of the previous save, which must not take this one with it
            start()
            raise
        return start()

    def load(
        self,
        version: int = -1,
        *,
        names: Collection[str] | None = None,
        map_location: Any = None,
    ) -> Any:
        """Load a version, verifying the checksum of every tensor.

        Args:
            version: The version number; -1 for the newest, -2 for the one before it.
            names: Paths of tensors (``"model.conv1.weight"``) or subtrees (``"model"``) to load;
                only the required bytes are read.
            map_location: The torch device for tensors; default: the CPU.

        Returns:
            The saved state, or with ``names`` a dict that maps each name to its part.

        Raises:
            VersionUnavailable: The version or a name does not exist, or a name is not unique.
            BrokenChain: A reference is missing or is a different version.
            CorruptCheckpoint: The data does not match its checksums; nothing is returned.
            UnsupportedVersion: The store has another format version.
            TypeError: ``names`` is a single string.
            StorageError: A file cannot be read.
        """
        self._wait()
        _, state = self.io.load(version, names, map_location)
        return state

    def versions(self) -> list[VersionRecord]:
        """Return the records of all versions, oldest first.

        Raises:
            CorruptCheckpoint, UnsupportedVersion: The manifest is damaged or of another format
                version.
            StorageError: The folder cannot be read.
        """
        self._wait()
        return list(self.io.newest().versions)

    def verify(self, *, progress: Progress | None = None) -> list[PCRError]:
        """Verify all versions: read every byte of them, and restore them.

        Args:
            progress: Called with the number of versions checked and the total.

        Returns:
            The problems found, in the order of the versions; empty if there are none.

        Raises:
            PCRError: The manifest cannot be read.
        """
        self._wait()
        manifest = self.io.existing()
        return list(self.io.problems(manifest, reported(manifest.versions, progress)))

    def delete(self, *, keep: Collection[int], progress: Progress | None = None) -> None:
        """Delete all versions except some; deltas to deleted versions become keyframes, losslessly.

        Args:
            keep: Numbers of the versions to keep; negative ones count back from the newest.
            progress: Called with the number of versions finished and the total to keep.

        Raises:
            VersionUnavailable: A version to keep does not exist; nothing was changed.
            ConcurrentWriter: Another process has written to the store; nothing was changed.
            BrokenChain, CorruptCheckpoint: A version to keep cannot be restored; nothing was
                changed.
            StorageError: A file cannot be read or written.
        """
        io = self.settled()
        before = io.existing()
        kept = sorted({before.record(number).number for number in keep})
        records = []
        for number in reported(kept, progress):
            record = before.record(number)
            if record.parent not in (None, *kept):
                file = io.open(record)
                tensors = io.read_whole(before, file)
                record = io.write(
                    ((path, each, *encode_tensor(each, None)) for path, each in tensors.items()),
                    [
                        largest_entry(each.spec, is_lossy=each.lattice is not None)
                        for each in tensors.values()
                    ],
                    number=number,
                    tree=file.header.tree,
                    metrics=record.metrics,
                    saved=record.saved,
                )
            records.append(record)
        io.commit(before, before.replace(versions=tuple(records)))

    def close(self) -> None:
        """Wait until all versions are stored, and free the memory that is kept for the next one.

        The store can still be used: the next save reads the newest version from its file.

        Raises:
            PCRError: A version could not be saved.
        """
        try:
            self._wait()
        finally:
            self.io.forget()
            self._buffers.clear()
            zstd.clear()
            trim()

    def _wait(self) -> None:
        """Wait for the current save; raise its error once."""
        self._join()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _join(self) -> None:
        """Wait for the current save, whether it fails or not."""
        if self._pending is not None:
            concurrent.futures.wait([self._pending])  # which Ctrl-C can interrupt
            self._thread.shutdown()  # it holds the snapshot until it ends

    def settled(self) -> StoreIO:
        """Wait for pending saves and return the store's I/O; the next save rereads the manifest."""
        self._wait()
        self._manifest = None
        return self.io

    def _open(self, leaves: Sequence[Leaf]) -> Manifest:
        """Read the state that a writer needs, creating the store if it does not exist."""
        precision = str(self.precision)
        if self.precision.is_lossy:
            lossy = self.precision.lossy_part(leaves)
            log.info("saving to %s: %s; lossy: %s", self.url, precision, lossy)
        else:
            log.info("saving to %s: %s", self.url, precision)
        manifest = self.io.opened(precision)
        if manifest.precision not in ("", precision):
            log.warning("the store was written with: %s; now: %s", manifest.precision, precision)
        self.io.clean(self.io.numbered(VERSION_NAME).keys() - manifest.files)
        return manifest

    def _append(
        self,
        manifest: Manifest,
        number: int,
        tree: Tree,
        leaves: Sequence[Leaf],
        metrics: dict[str, Any],
        on_saved: Callable[[int], None] | None,
    ) -> None:
        """Write the next version, one tensor after the other; see :meth:`save_flat`."""
        problem = "version %s was not saved"
        try:
            parent = self._parent(manifest)
            before = self.io.decoded[1]
            self.io.forget()
            bounds = self._bounds(leaves, before)
            if _is_keyframe_due(manifest, self._every):
                parent = None

            def work(leaf: Leaf) -> tuple[str, Tensor, Entry, list[bytes]]:
                reference = before.get(leaf.path)
                tensor = store_leaf(leaf, bounds[leaf.path], reference)
                parts = encode_tensor(tensor, None if parent is None else reference)
                return leaf.path, tensor, *parts

            record = self.io.write(
                parallel_map(self.io.workers, work, leaves),
                [
                    largest_entry(spec_of(leaf.tensor), is_lossy=bounds[leaf.path] is not None)
                    for leaf in leaves
                ],
                parent,
                number=number,
                tree=tree,
                metrics=metrics,
                saved=time.time(),
            )
            after = manifest.plus(record).replace(precision=str(self.precision))
            try:
                self._manifest = self.io.commit(manifest, after)
            except (ConcurrentWriter, UnsupportedState):
                self.io.remove([record.file])
                raise
            problem = "version %s is saved, but on_saved failed"
            if on_saved is not None:
                on_saved(number)
        except BaseException:
            self._manifest = None
            log.exception(problem, number)
            raise
        finally:
            trim_thread()

    def _parent(self, manifest: Manifest) -> VersionRecord | None:
        """Return the version that a delta can refer to, and read its tensors if necessary."""
        if not manifest.versions:
            return None
        newest = manifest.versions[-1]
        try:
            if self.io.decoded[0] != newest.file:
                self.io.read_whole(manifest, self.io.open(newest))
        except PCRError as error:
            log.warning("version %s cannot be read: %s; saving a keyframe", newest.number, error)
            return None
        return newest

    def _bounds(
        self, leaves: Sequence[Leaf], before: Mapping[str, Tensor]
    ) -> dict[str, Bound | None]:
        """Return the bound of each tensor: none if exact versions are smaller."""
        bounds = {leaf.path: self.precision.bound_of(leaf) for leaf in leaves}
        lossy = [leaf for leaf in leaves if bounds[leaf.path] is not None]
        if {leaf.tensor.dtype for leaf in lossy} != {torch.bfloat16}:
            return bounds
        known = (before[leaf.path].values for leaf in lossy if leaf.path in before)
        was = self._sample or [values[::_STRIDE].copy() for values in known]
        now = [leaf.words()[::_STRIDE].copy() for leaf in lossy]
        self._sample = now
        if list(map(len, was)) == list(map(len, now)):
            changed = np.concatenate(was) != np.concatenate(now)
            if changed.mean() <= _FEW_CHANGED:
                return dict.fromkeys(bounds)
        return bounds


def _is_keyframe_due(manifest: Manifest, keyframe_every: int) -> bool:
    """Return whether the next version should be a keyframe."""
    if not manifest.versions:
        return True
    *deltas, keyframe = manifest.chain(manifest.versions[-1].number)
    length = 1 + len(deltas)
    outweighed = sum(record.file_bytes for record in deltas) > keyframe.file_bytes
    return length >= keyframe_every or (length >= _LONG_CHAIN and outweighed)
