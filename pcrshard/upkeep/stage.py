"""Copy prefixes of a dataset to fast local disk, and later the difference to a higher scan.

A staged shard is a file like that of a prefix cache: the first bytes of the shard, which grow by
appending. The dataset index is written last.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Event
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import storage
from ..checksum import crc32c
from ..errors import CorruptIndex, EncodeError, FormatError, NotAShard, PCRError, StorageError
from ..format.dataset_index import DATASET_INDEX, DatasetIndex, ShardEntry, resolve_scan
from ..format.scan import FULL, Scan, check_scan
from ..format.shard_head import BLOCK, HEAD_STOP, decode_head, is_tar
from ..reading.dataset_folder import open_dataset
from ..reading.shard import Shard
from ..redaction import get_logger
from ..storage.locks import hold_lock

# What is read into memory at once.
_CHUNK_BYTES = 16 << 20
log = get_logger(__name__)
Read = Callable[[int, int], NDArray[np.uint8]]


class Staged(NamedTuple):
    """The result for one shard: its entry, bytes copied now, and bytes that were there."""

    entry: ShardEntry
    copied_bytes: int
    kept_bytes: int


class _Task(NamedTuple):
    """One shard to copy up to a position: scan 1..N, or N + 1 for a whole file."""

    entry: ShardEntry
    position: int
    url: str
    path: str

    @property
    def stops(self) -> tuple[int, ...]:
        """Bytes of the file at each position, and 0 at position 0."""
        return (0, *self.entry.prefix_stops[:-1], self.entry.shard_bytes)


def stage(
    src: str,
    dst: str,
    scan: Scan | float,
    *,
    workers: int = 8,
    storage_options: storage.Options = None,
    retry: storage.Retry = storage.Retry(),
    on_shard: Callable[[Staged], None] | None = None,
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
        scan: Highest scan to copy, 1..N; ``"full"`` copies the shards whole, and a fraction in
            (0, 1) the highest scan that takes at most that fraction of the full bytes.
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
    dst = storage.plain_path(dst)
    highest: Scan = resolve_scan(source.shards, scan)
    tasks = []
    for url, entry in zip(urls, source.shards, strict=True):
        entry.prefix_stop(highest)  # a staged copy may not have the scan
        position = check_scan(highest, entry.num_groups)
        tasks.append(_Task(entry, position, url, os.path.join(dst, entry.name)))
    cancel = Event()
    read = partial(storage.read, options=storage_options, retry=retry, cancel=cancel)
    storage.make_folder(dst)
    with hold_lock(dst):
        _check_destination(dst, source)
        storage.remove_temporary_files(dst)
        pool = concurrent.futures.ThreadPoolExecutor(workers, "pcrshard-stage")
        futures = [pool.submit(_stage_shard, task, read) for task in tasks]
        try:
            for future in concurrent.futures.as_completed(futures):
                staged = future.result()
                if on_shard:
                    on_shard(staged)
        except BaseException as error:
            # Shards under way are finished after an error, not after Ctrl-C.
            if not isinstance(error, PCRError):
                cancel.set()
            pool.shutdown(cancel_futures=True)
            _note_finished(dst, futures)
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        index = replace(source, shards=tuple(future.result().entry for future in futures))
        _write_index(dst, index)
    return index


def _write_index(dst: str, index: DatasetIndex) -> None:
    with storage.atomic_write(os.path.join(dst, DATASET_INDEX)) as file:
        file.write(index.encode())


def _note_finished(dst: str, futures: list[concurrent.futures.Future[Staged]]) -> None:
    """Let the index of an earlier stage, if there is one, say how far its shards have grown."""
    done = [f.result().entry for f in futures if not (f.cancelled() or f.exception())]
    grown = {entry.name: entry for entry in done}
    # A disk that is full or gone must not hide why the copy ended.
    with suppress(PCRError):
        if grown and os.path.exists(os.path.join(dst, DATASET_INDEX)):
            there, _ = open_dataset(dst)
            entries = tuple(grown.get(entry.name, entry) for entry in there.shards)
            _write_index(dst, replace(there, shards=entries))


def _check_destination(dst: str, source: DatasetIndex) -> None:
    known = {(entry.name, entry.head_crc32c) for entry in source.shards}
    if os.path.exists(os.path.join(dst, DATASET_INDEX)):
        there, _ = open_dataset(dst)
        if not known.issuperset((entry.name, entry.head_crc32c) for entry in there.shards):
            raise EncodeError(
                f"{dst} holds another dataset, or an older version of this one: "
                "remove it, or stage to another folder"
            )
        return
    heads = {head for _, head in known}
    for entry in source.shards:
        path = os.path.join(dst, entry.name)
        if _is_foreign(path, heads):
            raise EncodeError(
                f"{path} is not of this dataset: remove it, or stage to another folder"
            )


def _is_foreign(path: str, heads: set[int]) -> bool:
    """Return whether a file is a sound tar of something else; earlier runs leave damaged ones."""
    try:
        with open(path, "rb") as file:
            start = file.read(HEAD_STOP)
        return decode_head(start[BLOCK:]).crc32c not in heads
    except NotAShard:
        return is_tar(start)
    except (OSError, PCRError):
        return False


def _stage_shard(task: _Task, read: Callable[..., NDArray[np.uint8]]) -> Staged:
    entry, position, url, path = task
    try:
        held = _sound_position(task)
        kept = task.stops[held]
        copied = max(task.stops[position] - kept, 0)
        if copied:
            try:
                _grow(task, kept, partial(read, url))
            except FormatError as error:
                # What was kept may be at fault, too: only the checksum of the whole file covers
                # headers and padding.
                log.warning("%s; fetching it once more", error)
                copied += task.stops[position]
                kept = 0
                _grow(task, kept, partial(read, url))
    except PCRError:
        raise
    except OSError as error:
        message = f"cannot write: {type(error).__name__}: {error}"
        raise StorageError(message, url=path) from error
    reached = max(held, position)
    scan = None if reached > entry.num_groups else reached
    return Staged(entry._replace(scan=scan), copied, kept)


def _sound_position(task: _Task) -> int:
    """Return the highest position that is there and sound; 0 for none, or for another version."""
    size = os.path.getsize(task.path) if os.path.isfile(task.path) else 0
    *prefixes, whole = task.stops
    position = len(prefixes) if size == whole else sum(stop <= size for stop in prefixes) - 1
    try:
        if position:
            _check(task.path, task.entry, position)
    except FormatError:
        return 0
    return position


def _grow(task: _Task, kept: int, read: Read) -> None:
    """Bring a file from its first ``kept`` bytes to what is wanted, and check it.

    A file is appended to, and cut again where that fails. A new one appears whole and sound or not
    at all, and so does one that has another name, or is a link: the other name keeps its content.
    """
    entry, position, _, path = task
    stop = task.stops[position]
    if kept and not (os.path.islink(path) or os.stat(path).st_nlink > 1):
        with open(path, "r+b") as file:
            file.truncate(kept)
            try:
                _copy(read, kept, stop, file.fileno(), path)
            except BaseException:
                file.truncate(kept)
                raise
        _check(path, entry, position)
        return
    with storage.atomic_write(path) as new:
        _copy(partial(storage.read, path), 0, kept, new.fileno(), path)
        _copy(read, kept, stop, new.fileno(), path)
        try:
            _check(new.name, entry, position)
        except FormatError as error:
            raise type(error)(str(error).replace(new.name, path)) from error


def _copy(read: Read, start: int, stop: int, handle: int, path: str) -> None:
    for begin in range(start, stop, _CHUNK_BYTES):
        part = read(begin, min(begin + _CHUNK_BYTES, stop))
        storage.write_at(handle, begin, part.data, url=path)
    os.fsync(handle)


def _check(path: str, entry: ShardEntry, position: int) -> None:
    """Raise what is wrong with a file, by its key.

    A whole file is read once; its pieces are looked at only where its checksum is wrong.
    """
    is_whole = position > entry.num_groups
    if is_whole and crc32c(storage.read(path, 0, entry.shard_bytes)) == entry.shard_crc32c:
        return
    with Shard(path, entry=entry._replace(scan=None)).load(FULL if is_whole else position) as found:
        for _ in found.samples():
            pass
    if is_whole:
        raise CorruptIndex("the checksum of the file is not that of the dataset index", url=path)
