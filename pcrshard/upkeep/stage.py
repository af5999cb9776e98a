"""Copy prefixes of a dataset to fast local disk, and later the difference to a higher scan."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .. import storage
from ..checksum import crc32c
from ..errors import CorruptIndex, EncodeError, FormatError, NotAShard, PCRError, StorageError
from ..format.dataset_index import DATASET_INDEX, DatasetIndex, ShardEntry
from ..format.scan import FULL, Scan, check_scan
from ..format.shard_index import BLOCK, HEAD_STOP, decode_head
from ..reading.dataset_folder import open_dataset
from ..reading.shard import Shard
from ..storage.files import Options
from ..storage.retry import Retry

# Memory of a worker, and the bytes of one request.
_CHUNK_BYTES = 64 << 20
log = logging.getLogger(__name__)


class Staged(NamedTuple):
    """What became of one shard: bytes copied now, and bytes that were there and sound."""

    entry: ShardEntry
    copied_bytes: int
    kept_bytes: int


def stage(
    src: str,
    dst: str,
    scan: Scan,
    *,
    workers: int = 8,
    storage_options: Options | None = None,
    retry: Retry = Retry(),
    on_shard: Callable[[Staged], None] | None = None,
) -> DatasetIndex:
    """Copy the prefixes of a scan to a local folder.

    What is there already, from an earlier or a broken run, is checked and kept, and only what is missing is fetched: after ``scan=2``, ``scan=5``
    moves the difference. Every piece is compared with its checksum, a whole shard also with that of the file, and what came damaged is fetched
    once more. Of several processes with the same ``dst`` one copies at a time. The dataset index is written last; until then, readers of an
    earlier stage go on undisturbed.

    Args:
        src: Dataset folder or its ``pcr.json``, local or any fsspec URL.
        dst: Local folder.
        scan: 1..N; ``"full"`` copies the shards whole.
        workers: Shards that are copied at a time, by threads.
        storage_options: Of the source.
        retry: What to do about a bad network.
        on_shard: Called after each shard.

    Returns:
        The index written to ``dst``: a reader that asks it for more than is there gets :class:`ScanUnavailable`.

    Raises:
        ScanUnavailable: The source has no such scan.
        EncodeError: ``dst`` holds another dataset.
        CorruptPiece, CorruptIndex, TruncatedShard, StorageError: A shard could not be copied; what was is kept for the next run.
    """
    source, urls = open_dataset(src, storage_options=storage_options)
    for entry in source.shards:
        entry.prefix_stop(scan)
    cancel = threading.Event()
    tasks = [
        _Task(url, os.path.join(dst, entry.name), entry, scan, storage_options, retry, cancel)
        for url, entry in zip(urls, source.shards, strict=True)
    ]
    if not storage.is_local(dst):
        raise EncodeError(f"expected a local folder to stage to, got {dst}")
    with _alone_in(dst):
        _check_destination(dst, source)
        storage.remove_temporary_files(dst)
        staged = _stage_all(tasks, workers, on_shard)
        index = dataclasses.replace(
            source, shards=tuple(staged[entry.name] for entry in source.shards)
        )
        with storage.atomic_write(os.path.join(dst, DATASET_INDEX)) as file:
            file.write(index.encode())
    return index


class _Task(NamedTuple):
    url: str
    path: str
    entry: ShardEntry
    scan: Scan
    options: Options | None
    retry: Retry
    cancel: threading.Event


@contextlib.contextmanager
def _alone_in(folder: str) -> Iterator[None]:
    """Wait until no other process stages to a folder, which is made."""
    storage.make_folder(folder)
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # A file system without locks gets none.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _stage_all(
    tasks: list[_Task], workers: int, on_shard: Callable[[Staged], None] | None
) -> dict[str, ShardEntry]:
    """Copy shards by threads; after an error those that run are finished, after Ctrl-C they are not."""
    staged: dict[str, ShardEntry] = {}
    pool = concurrent.futures.ThreadPoolExecutor(workers, "pcrshard-stage")
    try:
        for future in concurrent.futures.as_completed(
            [pool.submit(_stage_shard, task) for task in tasks]
        ):
            result = future.result()
            staged[result.entry.name] = result.entry
            if on_shard:
                on_shard(result)
    except BaseException as error:
        if not isinstance(error, PCRError):
            tasks[0].cancel.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return staged


def _check_destination(dst: str, source: DatasetIndex) -> None:
    if not os.path.exists(os.path.join(dst, DATASET_INDEX)):
        known = {entry.head_crc32c for entry in source.shards}
        foreign = [
            entry.name
            for entry in source.shards
            if _is_foreign(os.path.join(dst, entry.name), known)
        ]
        if foreign:
            raise EncodeError(
                f"{os.path.join(dst, foreign[0])} is not of this dataset: remove it, or stage to another folder"
            )
        return
    there, _ = open_dataset(dst)
    same = {(entry.name, entry.head_crc32c) for entry in source.shards}
    if any((entry.name, entry.head_crc32c) not in same for entry in there.shards):
        raise EncodeError(
            f"{dst} holds another dataset, or an older version of this one: remove it, or stage to another folder"
        )


def _is_foreign(path: str, known: set[int]) -> bool:
    """Whether a file is a sound tar of something else; what is damaged may be what an earlier run left."""
    try:
        with open(path, "rb") as file:
            start = file.read(HEAD_STOP)
        decode_head(start[BLOCK:])
        return int.from_bytes(start[BLOCK + 8 : BLOCK + 12], "little") not in known
    except NotAShard:
        return start[257:262] == b"ustar"
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
    kept_scan, kept = _sound_prefix(task)
    entry, wanted = task.entry, check_scan(task.scan, len(task.entry.prefix_stops) - 1)
    if kept_scan >= wanted:
        return Staged(_held(entry, kept_scan), 0, kept)
    whole = wanted == len(entry.prefix_stops)
    stop = entry.shard_bytes if whole else entry.prefix_stops[wanted - 1]
    copied = stop - kept
    try:
        _fetch(task, kept, stop)
    except FormatError as error:
        # Also what was kept may be at fault: only the checksum of the whole file covers headers and padding.
        log.warning("%s; fetching it once more", error)
        _fetch(task, 0, stop)
        copied, kept = copied + stop, 0
    return Staged(_held(entry, wanted), copied, kept)


def _fetch(task: _Task, kept: int, stop: int) -> None:
    """Bring a file from its first ``kept`` bytes to ``stop``, and check it; a new one appears whole and sound or not at all."""
    if kept:
        with open(task.path, "r+b") as file:
            file.truncate(kept)
            _copy(task, kept, stop, file.fileno())
        _check(task.path, task.entry, task.scan)
        return
    with storage.atomic_write(task.path) as file:
        _copy(task, 0, stop, file.fileno())
        unpublished = f"/proc/self/fd/{file.fileno()}"
        try:
            _check(unpublished, task.entry, task.scan)
        except FormatError as error:
            raise type(error)(str(error).replace(unpublished, task.path)) from error


def _check(path: str, entry: ShardEntry, scan: Scan) -> None:
    """Raise what is wrong with a file, by its key."""
    with Shard(path, entry=entry._replace(scan=None)).load(scan) as prefix:
        for _ in prefix.samples() if not prefix.is_sound() else ():
            pass
        if scan == FULL:
            with storage.open_range(path, len(prefix.view), entry.shard_bytes) as rest:
                if crc32c(rest, crc32c(prefix.view)) != entry.shard_crc32c:
                    raise CorruptIndex(
                        "the checksum of the file is not that of the dataset index", url=path
                    )


def _held(entry: ShardEntry, scan: int) -> ShardEntry:
    return entry._replace(scan=None if scan == len(entry.prefix_stops) else scan)


def _sound_prefix(task: _Task) -> tuple[int, int]:
    """The highest scan that is there and sound, and its bytes; 0 and 0 for none, or for another version of the shard."""
    try:
        size = os.path.getsize(task.path)
    except OSError:
        return 0, 0
    stops = task.entry.prefix_stops
    num_groups = len(stops) - 1
    scan = sum(stop <= size for stop in stops[:-1])
    if size == task.entry.shard_bytes:
        scan = num_groups + 1
    if scan == 0:
        return 0, 0
    try:
        _check(task.path, task.entry, FULL if scan > num_groups else scan)
    except FormatError:
        return 0, 0
    return scan, size if scan > num_groups else stops[scan - 1]


def _copy(task: _Task, start: int, stop: int, handle: int) -> None:
    for position in range(start, stop, _CHUNK_BYTES):
        end = min(position + _CHUNK_BYTES, stop)
        with storage.open_range(
            task.url, position, end, options=task.options, retry=task.retry, cancel=task.cancel
        ) as view:
            storage.write_at(handle, position, view, url=task.path)
    os.fsync(handle)
