"""Staging: copy prefixes of a dataset to fast local disk, and extend them to a higher scan later.

A staged shard has the same form as a prefix cache file: the first bytes of the shard. It appears
complete and verified, or not at all. The dataset index is written last.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Event
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import storage
from ..checksum import crc32c
from ..errors import CorruptIndex, EncodeError, FormatError
from ..format.dataset_index import DATASET_INDEX, DatasetIndex, ShardEntry, resolve_scan
from ..format.scan import Scan, check_scan
from ..format.shard_head import HEAD_STOP, read_head
from ..reading.dataset_folder import open_dataset
from ..reading.shard import Shard
from ..redaction import get_logger
from ..storage.locks import hold_lock

# Bytes read into memory at once.
_CHUNK_BYTES = 16 << 20
log = get_logger(__name__)


class Staged(NamedTuple):
    """A copied shard: its entry, bytes copied now, and bytes already present."""

    entry: ShardEntry
    copied_bytes: int
    kept_bytes: int


def stage(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    scan: Scan | float,
    *,
    workers: int = 8,
    storage_options: storage.Options = None,
    retry: storage.Retry = storage.Retry(),
    on_shard: Callable[[Staged], None] | None = None,
) -> DatasetIndex:
    """Copy the prefixes of a scan to a local folder.

    Intact bytes of an earlier or interrupted run are kept, and only the rest is fetched. Every
    piece of a prefix is verified against its checksum, a whole shard against the file's; damaged
    bytes are fetched once more. Processes with the same ``dst`` copy one at a time. The dataset
    index is written last, so readers of an earlier stage are not disturbed.

    Args:
        src: Dataset folder or its ``pcr.json``, local or any fsspec URL.
        dst: Local folder.
        scan: Highest scan to copy, 1..N; ``"full"`` copies whole shards, and a fraction in (0, 1)
            selects the highest scan that takes at most that fraction of the full bytes.
        workers: Number of threads, each of which copies one shard at a time.
        storage_options: fsspec storage options of the source.
        retry: When to retry failed requests and when to give up.
        on_shard: Called after each shard.

    Returns:
        The index written to ``dst``; reading a higher scan through it raises
        :class:`ScanUnavailable`.

    Raises:
        ScanUnavailable: The source has no such scan.
        EncodeError: ``dst`` is not local or holds another dataset.
        CorruptPiece, CorruptIndex, TruncatedShard, StorageError: A shard could not be copied; the
            copies completed before are kept for the next run.
    """
    source, urls = open_dataset(src, storage_options=storage_options, retry=retry)
    highest: Scan = resolve_scan(source.shards, scan)
    dst = os.fspath(dst)
    if not storage.is_local(dst):
        raise EncodeError(f"expected a local folder to stage to, got {dst}")
    dst = storage.plain_path(dst)
    cancel = Event()
    read = partial(storage.read, options=storage_options, retry=retry, cancel=cancel)
    storage.make_folder(dst)
    with hold_lock(dst), ThreadPoolExecutor(workers, "pcrshard-stage") as pool:
        _check_destination(dst, source)
        storage.remove_temporary_files(dst)
        copies = []
        for url, entry in zip(urls, source.shards, strict=True):
            entry.prefix_stop(highest)  # a staged copy may not have the scan
            position = check_scan(highest, entry.num_groups)
            copies.append(_Copy(entry, position, os.path.join(dst, entry.name), partial(read, url)))
        futures = [pool.submit(copy.run) for copy in copies]
        try:
            for future in as_completed(futures):
                staged = future.result()
                if on_shard:
                    on_shard(staged)
        except BaseException:
            cancel.set()
            pool.shutdown(cancel_futures=True)
            raise
        index = replace(source, shards=tuple(future.result().entry for future in futures))
        with storage.atomic_write(os.path.join(dst, DATASET_INDEX)) as file:
            file.write(index.encode())
    return index


def _check_destination(dst: str, source: DatasetIndex) -> None:
    """Raise an error if the folder has other data than an earlier run left."""
    heads = {entry.name: entry.head_crc32c for entry in source.shards}
    if os.path.exists(os.path.join(dst, DATASET_INDEX)):
        earlier, _ = open_dataset(dst)
        if any(heads.get(entry.name) != entry.head_crc32c for entry in earlier.shards):
            raise EncodeError(
                f"{dst} holds another dataset, or an older version of this one: "
                "remove it, or stage to another folder"
            )
        return
    for path in filter(os.path.isfile, (os.path.join(dst, name) for name in heads)):
        with open(path, "rb") as file, suppress(FormatError):
            if read_head(file.read(HEAD_STOP)).crc32c in heads.values():
                continue
        raise EncodeError(f"{path} is not of this dataset: remove it, or stage to another folder")


class _Copy(NamedTuple):
    """A shard to copy up to a position: scan 1..N, or N + 1 for the whole file."""

    entry: ShardEntry
    position: int
    path: str
    read: Callable[[int, int], NDArray[np.uint8]]

    def run(self) -> Staged:
        """Copy until the file has reached its position."""
        entry = self.entry
        # Bytes of the file at each position, and 0 at position 0.
        stops = (0, *entry.prefix_stops[:-1], entry.shard_bytes)
        stop = stops[self.position]
        size = os.path.getsize(self.path) if os.path.isfile(self.path) else 0
        held = sum(each <= size for each in stops[1:-1]) + (size == entry.shard_bytes)
        try:
            if held:
                self._check(self.path, held)
        except FormatError:
            held = 0
        kept = stops[held]
        copied = max(stop - kept, 0)
        if copied:
            try:
                self._write(kept, stop)
            except FormatError as error:
                # Kept bytes may be damaged, too: headers and padding are covered only by the
                # checksum of the whole file.
                log.warning("%s; fetching it once more", error)
                kept = 0
                copied += stop
                self._write(kept, stop)
        reached = max(held, self.position)
        return Staged(entry.staged(None if reached > entry.num_groups else reached), copied, kept)

    def _write(self, kept: int, stop: int) -> None:
        """Replace the file by its first ``kept`` bytes and those up to ``stop``, verified."""
        with storage.atomic_write(self.path) as new:
            if kept:
                shutil.copyfile(self.path, new.name)
                new.truncate(kept)
                new.seek(kept)
            for start in range(kept, stop, _CHUNK_BYTES):
                new.write(self.read(start, min(start + _CHUNK_BYTES, stop)).data)
            new.flush()
            try:
                self._check(new.name, self.position)
            except FormatError as error:
                raise type(error)(str(error).replace(new.name, self.path)) from error

    def _check(self, path: str, position: int) -> None:
        """Raise an error if a prefix, or the whole file, does not match its checksums."""
        if position <= self.entry.num_groups:
            for _ in Shard(path, entry=self.entry.staged(None)).samples(position):
                pass
        elif crc32c(storage.read(path, 0, self.entry.shard_bytes)) != self.entry.shard_crc32c:
            raise CorruptIndex(
                "the checksum of the file is not that of the dataset index", url=path
            )
