"""Copy prefixes of a dataset to fast local disk, and later the difference to a higher scan."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from threading import Event
from typing import NamedTuple

from .. import storage
from ..checksum import crc32c
from ..errors import (
    CorruptIndex,
    EncodeError,
    FormatError,
    NotAShard,
    PCRError,
    StorageError,
)
from ..format.dataset_index import DATASET_INDEX, DatasetIndex, ShardEntry
from ..format.scan import FULL, Scan, check_scan
from ..format.shard_head import BLOCK, HEAD_STOP, decode_head, is_tar
from ..reading.dataset_folder import open_dataset
from ..reading.shard import Shard
from ..redaction import get_logger
from ..storage.locks import hold_lock

# Bytes of one request.
_CHUNK_BYTES = 64 << 20
log = get_logger(__name__)


class Staged(NamedTuple):
    """What became of one shard: bytes copied now, and bytes that were there and sound."""

    entry: ShardEntry
    copied_bytes: int
    kept_bytes: int


OnShard = Callable[[Staged], None]
Futures = list[concurrent.futures.Future[Staged]]
# Entries of shards by their names.
Entries = dict[str, ShardEntry]


def stage(
    src: str,
    dst: str,
    scan: Scan,
    *,
    workers: int = 8,
    storage_options: storage.Options = None,
    retry: storage.Retry = storage.Retry(),
    on_shard: OnShard | None = None,
) -> DatasetIndex:
    """Copy the prefixes of a scan to a local folder.

    What is there already, from an earlier or a broken run, is checked and kept, and only what is
    missing is fetched: after ``scan=2``, ``scan=5`` moves the difference. Every piece of a prefix
    is compared with its checksum, a whole shard with that of the file, and what came damaged is
    fetched once more. Of several processes with the same ``dst`` one copies at a time. The dataset
    index is written last; until then, readers of an earlier stage go on undisturbed.

    Args:
        src: Dataset folder or its ``pcr.json``, local or any fsspec URL.
        dst: Local folder.
        scan: Highest scan to copy, 1..N; ``"full"`` copies the shards whole.
        workers: Shards that are copied at a time, by threads.
        storage_options: fsspec storage options of the source.
        retry: What to do about a bad network.
        on_shard: Called after each shard.

    Returns:
        The index written to ``dst``: a reader that asks it for more than is there gets
        :class:`ScanUnavailable`.

    Raises:
        ScanUnavailable: The source has no such scan.
        EncodeError: ``dst`` holds another dataset.
        CorruptPiece, CorruptIndex, TruncatedShard, StorageError: A shard could not be copied; what
            could be is kept for the next run.
    """
    source, urls = open_dataset(src, storage_options=storage_options, retry=retry)
    if not storage.is_local(dst):
        raise EncodeError(f"expected a local folder to stage to, got {dst}")
    cancel = Event()
    read = partial(
        storage.open_range,
        options=storage_options,
        retry=retry,
        cancel=cancel,
    )
    tasks = [
        _Task(entry, _position(entry, scan), os.path.join(dst, entry.name), partial(read, url))
        for url, entry in zip(urls, source.shards, strict=True)
    ]
    storage.make_folder(dst)
    # Of several processes one at a time.
    with hold_lock(dst):
        _check_destination(dst, source)
        storage.remove_temporary_files(dst)
        entries = _stage_all(tasks, workers, cancel, on_shard, partial(_note_finished, dst))
        index = replace(source, shards=entries)
        _write_index(dst, index)
    return index


def _write_index(dst: str, index: DatasetIndex) -> None:
    with storage.atomic_write(os.path.join(dst, DATASET_INDEX)) as file:
        file.write(index.encode())


class _Task(NamedTuple):
    """One shard to copy up to a scan's position, 1..N, or N + 1 for a whole file."""

    entry: ShardEntry
    position: int
    path: str
    read: Callable[[int, int], AbstractContextManager[memoryview]]

    @property
    def stops(self) -> tuple[int, ...]:
        """Bytes of the file at each position, and 0 at position 0."""
        return (0, *self.entry.prefix_stops[:-1], self.entry.shard_bytes)

    def staged(
        self,
        position: int,
        copied_bytes: int,
        kept_bytes: int,
    ) -> Staged:
        """The result, with the entry of a file at a position."""
        scan = None if position > self.entry.num_groups else position
        return Staged(self.entry._replace(scan=scan), copied_bytes, kept_bytes)


def _position(entry: ShardEntry, scan: Scan) -> int:
    # A staged copy may not have the scan.
    entry.prefix_stop(scan)
    return check_scan(scan, entry.num_groups)


def _stage_all(
    tasks: list[_Task],
    workers: int,
    cancel: Event,
    on_shard: OnShard | None,
    note_finished: Callable[[Entries], None],
) -> tuple[ShardEntry, ...]:
    """Copy shards by threads; those that run are finished after an error, not after Ctrl-C."""
    futures: Futures = []
    pool = concurrent.futures.ThreadPoolExecutor(workers, "pcrshard-stage")
    try:
        futures = [pool.submit(_stage_shard, task) for task in tasks]
        for future in concurrent.futures.as_completed(futures):
            staged = future.result()
            if on_shard:
                on_shard(staged)
    except BaseException as error:
        if not isinstance(error, PCRError):
            cancel.set()
        pool.shutdown(cancel_futures=True)
        note_finished(_finished(futures))
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return tuple(future.result().entry for future in futures)


def _finished(futures: Futures) -> Entries:
    """The entries of the shards that were copied, by name; all futures have ended."""
    entries = [
        future.result().entry
        for future in futures
        if not (future.cancelled() or future.exception())
    ]
    return {entry.name: entry for entry in entries}


def _note_finished(dst: str, finished: Entries) -> None:
    """Let the index of an earlier stage say how far its shards have grown, if there is one."""
    # A disk that is full or gone must not hide why the copy ended.
    with suppress(PCRError):
        if finished and os.path.exists(os.path.join(dst, DATASET_INDEX)):
            _write_index(dst, _grown(dst, finished))


def _grown(dst: str, finished: Entries) -> DatasetIndex:
    there, _ = open_dataset(dst)
    entries = [finished.get(entry.name, entry) for entry in there.shards]
    return replace(there, shards=tuple(entries))


def _check_destination(dst: str, source: DatasetIndex) -> None:
    if os.path.exists(os.path.join(dst, DATASET_INDEX)):
        there, _ = open_dataset(dst)
        same = {(entry.name, entry.head_crc32c) for entry in source.shards}
        if not same.issuperset((entry.name, entry.head_crc32c) for entry in there.shards):
            raise EncodeError(
                f"{dst} holds another dataset, or an older version of this one: "
                "remove it, or stage to another folder"
            )
        return
    known = {entry.head_crc32c for entry in source.shards}
    for entry in source.shards:
        path = os.path.join(dst, entry.name)
        if _is_foreign(path, known):
            raise EncodeError(
                f"{path} is not of this dataset: remove it, or stage to another folder"
            )


def _is_foreign(path: str, known: set[int]) -> bool:
    """Whether a file is a sound tar of something else; an earlier run may leave damaged ones."""
    try:
        with open(path, "rb") as file:
            start = file.read(HEAD_STOP)
        return decode_head(start[BLOCK:]).crc32c not in known
    except NotAShard:
        return is_tar(start)
    except (OSError, PCRError):
        return False


def _stage_shard(task: _Task) -> Staged:
    try:
        return _complete(task)
    except PCRError:
        raise
    except OSError as error:
        raise StorageError(
            f"cannot write: {type(error).__name__}: {error}", url=task.path
        ) from error


def _complete(task: _Task) -> Staged:
    position = _sound_position(task)
    kept = task.stops[position]
    if position >= task.position:
        return task.staged(position, 0, kept)
    stop = task.stops[task.position]
    copied = stop - kept
    try:
        _fetch(task, kept, stop)
    except FormatError as error:
        # Also what was kept may be at fault: only the checksum of the whole file covers headers
        # and padding.
        log.warning("%s; fetching it once more", error)
        _fetch(task, 0, stop)
        copied += stop
        kept = 0
    return task.staged(task.position, copied, kept)


def _sound_position(task: _Task) -> int:
    """The highest position that is there and sound; 0 for none, or another version of the shard."""
    size = os.path.getsize(task.path) if os.path.isfile(task.path) else 0
    *prefixes, whole = task.stops
    position = sum(stop <= size for stop in prefixes) - 1
    if size == whole:
        position = len(prefixes)
    try:
        if position:
            _check(task.path, task.entry, position)
    except FormatError:
        return 0
    return position


def _fetch(
    task: _Task,
    kept: int,
    stop: int,
) -> None:
    """Bring a file from its first ``kept`` bytes to ``stop``, and check it.

    A new file appears whole and sound or not at all, and so does one that has another name, or is a
    link: what is under the other name stays as it is.
    """
    if kept and not _has_other_names(task.path):
        _grow(task, kept, stop)
        return
    with storage.atomic_write(task.path) as new:
        if kept:
            with storage.open_range(task.path, 0, kept) as view:
                storage.write_at(new.fileno(), 0, view, url=task.path)
        _copy(task, kept, stop, new.fileno())
        try:
            _check(new.name, task.entry, task.position)
        except FormatError as error:
            raise type(error)(str(error).replace(new.name, task.path)) from error


def _has_other_names(path: str) -> bool:
    return os.path.islink(path) or os.stat(path).st_nlink > 1


def _grow(
    task: _Task,
    kept: int,
    stop: int,
) -> None:
    """Append to a file; where that fails it is again what the dataset index beside it says."""
    with open(task.path, "r+b") as file:
        file.truncate(kept)
        try:
            _copy(task, kept, stop, file.fileno())
        except BaseException:
            file.truncate(kept)
            raise
    _check(task.path, task.entry, task.position)


def _copy(
    task: _Task,
    start: int,
    stop: int,
    handle: int,
) -> None:
    for begin in range(start, stop, _CHUNK_BYTES):
        with task.read(begin, min(begin + _CHUNK_BYTES, stop)) as view:
            storage.write_at(handle, begin, view, url=task.path)
    os.fsync(handle)


def _check(
    path: str,
    entry: ShardEntry,
    position: int,
) -> None:
    """Raise what is wrong with a file, by its key.

    A whole file is read once; its pieces are looked at only where its checksum is wrong.
    """
    is_whole = position > entry.num_groups
    if is_whole and _has_checksum(path, entry):
        return
    scan = FULL if is_whole else position
    with Shard(path, entry=entry._replace(scan=None)).load(scan) as prefix:
        for _ in prefix.samples():
            pass
    if is_whole:
        raise CorruptIndex("the checksum of the file is not that of the dataset index", url=path)


def _has_checksum(path: str, entry: ShardEntry) -> bool:
    with storage.open_range(path, 0, entry.shard_bytes) as view:
        return crc32c(view) == entry.shard_crc32c
