"""The store of a training run's checkpoints: every version kept, as deltas within a bound."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any, Self

from .. import storage
from ..errorbound import Bound, PointwiseRelative, RelativeStd, describe_bound
from ..redaction import get_logger
from . import rewrite
from .choose_bound import CANDIDATES, Budget, Choice, Evaluate, choose
from .file_frame import pack_plain
from .held_version import (
    Bounds,
    HeldVersion,
    Progress,
    one_delta,
)
from .manifest import (
    ORDERS,
    Manifest,
    check_settings,
    read_manifest,
)
from .reader import StoreReader
from .typed_tree import Flattened, flatten
from .version_file import VersionFile
from .writer import Place, Writer

log = get_logger(__name__)
_DEFAULT_ORDER = "backward"
# Ten deltas are added in a fraction of the time of reading one keyframe.
_DEFAULT_KEYFRAME_EVERY = 10


class DeltaStore(StoreReader):
    """Checkpoints of one run in a folder, local or at any fsspec URL.

    Tensors of two and more dimensions are kept within a stated error, all others bit for bit, and
    everything bit for bit with ``bound=None``. Saving works in a background thread on a copy: the
    training waits for the copy only. Nothing in a store is executed when it is loaded.

    Args:
        url: The folder.
        bound: The error of weights; the default has kept accuracy within 0.2 points.
        optimizer_bound: The error of the state of optimizers.
        second_moment_bound: The error of ``exp_avg_sq`` and its like.
        exact: Patterns of paths of tensors that are kept bit for bit (``"model.embedding.*"``).
        order: ``"backward"``: the newest version needs no reference; ``"forward"``: files are
            never rewritten; ``"hop"``: each version needs one reference. Default: the store's own
            order; backward for a new store.
        keyframe_every: At most so many versions hang on one keyframe. Default: the store's own
            number; 10 for a new store.
        options: fsspec storage options.
        workers: Threads that encode and decode.

    Raises:
        ValueError: An option is wrong, or differs from those of the store; see :meth:`rebase`.
    """

    def __init__(
        self,
        url: str,
        *,
        bound: Bound | None = RelativeStd(0.005),
        optimizer_bound: Bound | None = RelativeStd(0.3),
        second_moment_bound: Bound | None = PointwiseRelative(0.3),
        exact: Sequence[str] = (),
        order: str | None = None,
        keyframe_every: int | None = None,
        options: storage.Options | None = None,
        workers: int = 1,
    ) -> None:
        if order is not None and order not in ORDERS:
            raise ValueError(f"expected an order of {ORDERS}, got {order!r}")
        if keyframe_every is not None and keyframe_every < 1:
            raise ValueError(f"expected keyframe_every to be at least 1, got {keyframe_every}")
        self.bounds = Bounds(bound, optimizer_bound, second_moment_bound, tuple(exact))
        super().__init__(Place(url, options, workers))
        self._background = Background()
        current = read_manifest(url, options)
        self._manifest = current or self._empty(order, keyframe_every)
        check_settings(self._manifest, order, keyframe_every)
        # None after a failure: then the manifest tells what is in the store.
        self._next_number: int | None = self._manifest.next_number
        self._writer = Writer(self._place, self.bounds, self._manifest)

    def _empty(
        self,
        order: str | None,
        keyframe_every: int | None,
    ) -> Manifest:
        described = {
            "weights": describe_bound(self.bounds.weights),
            "optimizer": describe_bound(self.bounds.optimizer),
            "second_moment": describe_bound(self.bounds.second_moment),
        }
        return Manifest(
            order or _DEFAULT_ORDER, keyframe_every or _DEFAULT_KEYFRAME_EVERY, described
        )

    @staticmethod
    def recover(
        url: str,
        *,
        allow_loss: bool = False,
        options: storage.Options | None = None,
        progress: Progress | None = None,
    ) -> rewrite.Recovered:
        """Write a lost or damaged manifest again, from the files of the versions.

        Args:
            url: The folder.
            allow_loss: Go on if a version cannot be restored; the next writer removes its files.
            options: fsspec storage options.
            progress: Called with the versions that are checked, and those that are to be.

        Returns:
            The versions that are in the store now, and why other files are not used.

        Raises:
            ValueError: The manifest is sound.
            CorruptCheckpoint: A version is lost; nothing is written.
            VersionUnavailable: There are no versions.
        """
        return rewrite.recover(Place(url, options), allow_loss=allow_loss, progress=progress)

    @property
    def order(self) -> str:
        """How versions refer to each other."""
        return self._manifest.order

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
                numpy arrays and scalars.
            metrics: Plain numbers and strings to note with the version.
            blocking: Wait until the version is in the store.
            on_saved: Called with the number when the version is in the store, in the background.

        Returns:
            The version's number.

        Raises:
            UnsupportedState: The state holds something else; its path is named.
            ConcurrentWriter: Another process has written to the store (also by a later call).
            StorageError: The disk is full, or the store refuses (also by a later call).
        """
        noted = dict(metrics or {})
        _check_metrics(noted)
        flat = flatten(state)
        self.wait()
        number = self._next_number or self._read_next_number()
        self._background.submit(lambda: self._append(flat, number, noted, on_saved))
        self._next_number = number + 1
        if blocking:
            self.wait()
        return number

    def _append(
        self,
        flat: Flattened,
        number: int,
        metrics: dict[str, Any],
        on_saved: Callable[[int], None] | None,
    ) -> None:
        self._writer.append(flat, number, metrics)
        if on_saved is not None:
            on_saved(number)

    def wait(self) -> None:
        """Wait until all versions are in the store.

        Raises:
            PCRError: One could not be saved. Its number is given to the next one.
        """
        try:
            self._background.wait()
        except BaseException:
            self._next_number = None
            raise

    def _read_next_number(self) -> int:
        current = read_manifest(self.url, self._place.options)
        return 1 if current is None else current.next_number

    def close(self) -> None:
        """Wait until all versions are in the store, and end the background thread."""
        self._background.close()

    def compact(
        self,
        keep: Collection[int],
        *,
        progress: Progress | None = None,
    ) -> None:
        """Remove all versions but some; deltas to removed versions are written again, exactly.

        Args:
            keep: Numbers of the versions that stay.
            progress: Called with the versions that are done, and those that are to be.

        Raises:
            VersionUnavailable: One is not there.
            ConcurrentWriter: Another process is writing.
        """
        self._rewrite(lambda manifest: rewrite.plan(manifest, keep=keep), progress)

    def rebase(
        self,
        *,
        order: str | None = None,
        keyframe_every: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Write the deltas again in another order, exactly: no version changes by a bit.

        Args:
            order: The new one; default: as it is.
            keyframe_every: The new number; default: as it is.
            progress: Called with the versions that are done, and those that are to be.

        Raises:
            ConcurrentWriter: Another process is writing.
            ValueError: There is no such order.
        """

        def plan(manifest: Manifest) -> rewrite.Plan:
            return rewrite.plan(manifest, order=order, keyframe_every=keyframe_every)

        self._rewrite(plan, progress)

    def _rewrite(
        self,
        plan: Callable[[Manifest], rewrite.Plan],
        progress: Progress | None,
    ) -> None:
        self.wait()
        self._manifest = rewrite.apply(self._place, plan, progress)
        self._writer.forget()
        self._next_number = self._manifest.next_number

    def choose_bound(
        self,
        target: Any,
        reference: Any,
        evaluate: Evaluate,
        *,
        candidates: Sequence[Bound] = CANDIDATES,
        budget: Budget = Budget(),
        workers: int = 1,
    ) -> Choice:
        """Find the coarsest bound of weights whose loss of accuracy is within a budget.

        Nothing is written; give the result to a new store as ``bound``.

        Args:
            target: The state of a network.
            reference: The state of an earlier version, as the delta's reference.
            evaluate: Gives the accuracy, 0 to 1, of a state like ``target``.
            candidates: The bounds to try.
            budget: What may be lost, and how sure one has to be.
            workers: Candidates that are evaluated at a time.
        """
        states = (flatten(target), flatten(reference))

        def compress(bound: Bound) -> tuple[float, Any]:
            return one_delta(*states, dataclasses.replace(self.bounds, weights=bound))

        return choose(target, compress, evaluate, candidates, budget=budget, workers=workers)

    def append(self, version: HeldVersion) -> int:
        """Add a version that was read from another store, exactly, under the next number here.

        Raises:
            ConcurrentWriter: Another process has written to the store.
            StorageError: The disk is full, or the store refuses.
        """
        self.wait()
        added = self._writer.append_version(version)
        self._next_number = added.number + 1
        return added.number

    def append_file(self, file: VersionFile) -> HeldVersion:
        """Add the version that a file makes: a patch, or a version of another store.

        Args:
            file: It refers to a version that is in this store under any number, or to none.

        Returns:
            The version, with its number in this store.

        Raises:
            BrokenChain: The store does not hold the version that the file was made from; both
                sides are named.
            CorruptCheckpoint: The file is damaged, or does not make what it promises.
            ConcurrentWriter: Another process has written to the store.
            StorageError: The disk is full, or the store refuses.
        """
        self.wait()
        version = self._writer.append_file(file)
        self._next_number = version.number + 1
        return version


def _check_metrics(metrics: dict[str, Any]) -> None:
    try:
        pack_plain(metrics)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"expected metrics of plain numbers and strings: {error}") from error


class Background:
    """Work behind the caller's back, one piece at a time, with errors that are not lost.

    An error is logged at once, and raised by the next call.
    """

    def __init__(self) -> None:
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._pending: concurrent.futures.Future[object] | None = None

    def submit(self, work: Callable[[], object]) -> None:
        """Start work as soon as the piece before has ended, which is waited for.

        One piece at a time bounds the memory of snapshots.

        Raises:
            Exception: The piece before has failed.
        """
        self.wait()
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(1, "pcrshard-checkpoint")
        self._pending = self._pool.submit(_logged, work)

    def wait(self) -> None:
        """Wait for all work.

        Raises:
            Exception: It has failed; it is raised once.
        """
        pending = self._pending
        if pending is not None:
            concurrent.futures.wait([pending])
            self._pending = None
            pending.result()

    def close(self) -> None:
        """Wait for all work, and end the thread."""
        try:
            self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None


def _logged(work: Callable[[], object]) -> object:
    try:
        return work()
    except Exception:
        log.exception("a checkpoint was not saved")
        raise
