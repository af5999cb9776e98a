"""Copy prefixes of a dataset to fast local disk, and later the difference to a higher scan."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable
from typing import NamedTuple

from . import storage
from .dataset_index import DATASET_INDEX, DatasetIndex, ShardEntry
from .errors import EncodeError, FormatError
from .index import FULL, Scan, check_scan
from .reader import Shard, open_dataset
from .retry import Retry
from .storage import Options

# Memory of a worker, and the bytes of one request.
_CHUNK_BYTES = 64 << 20


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
    moves the difference. Every piece is compared with its checksum. The dataset index is written last; until then, readers of an
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
    _check_destination(dst, source)
    tasks = [
        _Task(url, os.path.join(dst, entry.name), entry, scan, storage_options, retry)
        for url, entry in zip(urls, source.shards, strict=True)
    ]
    for entry in source.shards:
        entry.prefix_stop(scan)
    staged: dict[str, ShardEntry] = {}
    pool = concurrent.futures.ThreadPoolExecutor(workers, "pcrshard-stage")
    try:
        for future in concurrent.futures.as_completed([pool.submit(_stage_shard, task) for task in tasks]):
            result = future.result()
            staged[result.entry.name] = result.entry
            if on_shard:
                on_shard(result)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    index = dataclasses.replace(source, shards=tuple(staged[entry.name] for entry in source.shards))
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


def _check_destination(dst: str, source: DatasetIndex) -> None:
    if not storage.is_local(dst):
        raise EncodeError(f"expected a local folder to stage to, got {dst}")
    if not os.path.exists(os.path.join(dst, DATASET_INDEX)):
        return
    there, _ = open_dataset(dst)
    same = {(entry.name, entry.head_crc32c) for entry in source.shards}
    if any((entry.name, entry.head_crc32c) not in same for entry in there.shards):
        raise EncodeError(f"{dst} holds another dataset, or an older version of this one: remove it, or stage to another folder")


def _stage_shard(task: _Task) -> Staged:
    kept_scan, kept = _sound_prefix(task)
    entry, wanted = task.entry, check_scan(task.scan, len(task.entry.prefix_stops) - 1)
    if kept_scan >= wanted:
        return Staged(_held(entry, kept_scan), 0, kept)
    whole = wanted == len(entry.prefix_stops)
    stop = entry.shard_bytes if whole else entry.prefix_stops[wanted - 1]
    if kept:
        with open(task.path, "r+b") as file:
            file.truncate(kept)
            _copy(task, kept, stop, file.fileno())
    else:
        with storage.atomic_write(task.path) as file:
            _copy(task, 0, stop, file.fileno())
    held = _held(entry, wanted)
    with Shard(task.path, entry=held).load(task.scan) as prefix:
        # Raises what is wrong, by its key.
        for _ in prefix.samples() if not prefix.is_sound() else ():
            pass
    return Staged(held, stop - kept, kept)


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
    asked: Scan = FULL if scan > num_groups else scan
    try:
        with Shard(task.path, entry=task.entry).load(asked) as prefix:
            sound = prefix.is_sound()
    except FormatError:
        sound = False
    if not sound:
        return 0, 0
    return scan, size if scan > num_groups else stops[scan - 1]


def _copy(task: _Task, start: int, stop: int, handle: int) -> None:
    for position in range(start, stop, _CHUNK_BYTES):
        end = min(position + _CHUNK_BYTES, stop)
        with storage.open_range(task.url, position, end, options=task.options, retry=task.retry) as view:
            storage.write_at(handle, position, view, url=task.path)
    os.fsync(handle)
