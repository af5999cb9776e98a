"""Staging: copy prefixes of a dataset to fast local disk, and extend them to a higher scan later.

A staged shard has the same form as a prefix cache file: the first bytes of the shard. It appears
complete and verified, or not at all. The dataset index is written last.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from threading import Event
from typing import NamedTuple

from msgspec import structs

from .. import storage
from ..errors import CorruptIndex, EncodeError, FormatError
from ..format.dataset_index import (
    DATASET_INDEX,
    Column,
    DatasetIndex,
    ShardEntry,
    ShardTable,
    resolve_scan,
)
from ..format.names import are_distinct
from ..format.sample_columns import COLUMNS
from ..format.scan import FULL, Scan, check_scan
from ..format.shard_head import HEAD_STOP, TRAILER, read_head
from ..memory import Buffer
from ..reading.dataset_folder import index_folder, open_dataset, read_column
from ..reading.shard import Shard
from ..storage.locks import hold_lock
from .verify import check_layout


class Staged(NamedTuple):
    """A copied shard: its entry, bytes copied now, and bytes already present."""

    entry: ShardEntry
    copied_bytes: int
    kept_bytes: int


def stage(
    src: storage.Urls,
    dst: str | os.PathLike[str],
    scan: Scan | float,
    *,
    workers: int = 8,
    storage_options: storage.Options = None,
    retry: storage.Retry = storage.Retry(),
    on_shard: Callable[[Staged], None] | None = None,
) -> DatasetIndex:
    """Copy the prefixes of a scan to a local folder.

    Of plain tars, the copy of each part has its index in it.

    Intact bytes of an earlier or interrupted run are kept, and only the rest is fetched. Every
    piece of a prefix is verified against its checksum, which the shard's identity covers; damaged
    bytes are fetched once more. Processes with the same ``dst`` copy one at a time. The dataset
    index is written last, so readers of an earlier stage are not disturbed.

    Args:
        src: Dataset folder, its ``pcr.json``, or shards by name, local or any fsspec URL.
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
    storage.make_folder(dst)
    with hold_lock(dst), ThreadPoolExecutor(workers, "pcrshard-stage") as pool:
        names = _staged_names(source)
        _check_destination(dst, source, names)
        storage.remove_temporary_files(dst)
        copies = []
        for url, name, entry in zip(urls, names, source.shards, strict=True):
            entry.prefix_stop(highest)  # a staged copy may not have the scan
            shard = Shard(url, entry=entry, storage_options=storage_options, retry=retry)
            own = structs.replace(entry, name=name, index_url="")
            copies.append(_Copy(shard, own, highest, os.path.join(dst, name), cancel))
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
        entries = (future.result().entry for future in futures)
        columns = _copy_columns(source, index_folder(source, urls), dst, storage_options, retry)
        index = replace(source, shards=ShardTable.of(entries), columns=columns, tars="")
        with storage.atomic_write(os.path.join(dst, DATASET_INDEX)) as file:
            file.write(index.encode())
    return index


def _copy_columns(
    source: DatasetIndex,
    folder: str,
    dst: str,
    options: storage.Options,
    retry: storage.Retry,
) -> tuple[Column, ...]:
    """Copy ``pcr.columns``, and return what is in the copy: nothing if it is not of the shards."""
    store = storage.Store.of(options, retry)
    found = [
        read_column(source, folder, each.name, storage_options=store) for each in source.columns
    ]
    held = [column for column in found if column is not None]
    if not held or len(held) < len(found):
        return ()
    with storage.atomic_write(os.path.join(dst, COLUMNS)) as file:
        file.writelines(column.tobytes() for column in held)
    return source.columns


def _staged_names(source: DatasetIndex) -> list[str]:
    """Return the name of each copy; that of a part of a plain tar has the number of the part."""
    if not source.tars:
        return list(source.shards.names)
    parts: collections.Counter[str] = collections.Counter()
    found = []
    for name in source.shards.names:
        stem = name.rpartition(".t")[0]
        found.append(f"{stem}.{parts[name]}.tar" if parts[name] else f"{stem}.tar")
        parts[name] += 1
    if not are_distinct(found):
        raise EncodeError(f"expected distinct names of copies, got {found}")
    return found


def _check_destination(dst: str, source: DatasetIndex, names: Sequence[str]) -> None:
    """Raise an error if the folder has other data than an earlier run left."""
    heads = dict(zip(names, source.shards.rows[:, 1].tolist(), strict=True))
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
    """A shard to copy up to a scan."""

    source: Shard
    entry: ShardEntry
    scan: Scan
    path: str
    cancel: Event

    def run(self) -> Staged:
        """Copy the bytes that an earlier copy lacks."""
        held, known = self._find_held()
        reached = check_scan(self.scan, self.entry.num_groups)
        copied = 0
        if held < reached:
            data = self._load(known)
            copied = len(data) - len(known)
            with storage.atomic_write(self.path) as new:
                new.write(data)
                if self.scan == FULL:
                    new.write(bytes(self.entry.stops[-1] - len(data)) + TRAILER)
        reached = max(held, reached)
        staged = self.entry.staged(None if reached > self.entry.num_groups else reached)
        return Staged(staged, copied, len(known))

    def _find_held(self) -> tuple[int, Buffer]:
        """Return the highest scan of an intact earlier copy, N + 1 for a whole file; its bytes."""
        entry = self.entry.staged(None)
        size = os.path.getsize(self.path) if os.path.isfile(self.path) else 0
        is_whole = size == entry.shard_bytes
        held = sum(stop <= size for stop in entry.prefix_stops[:-1]) + is_whole
        if held:
            scan = FULL if is_whole else held
            with suppress(FormatError):
                prefix = Shard(self.path, entry=entry).load(scan)
                data = storage.read(self.path, 0, size).data if is_whole else prefix.buffer.data
                if not (prefix.damaged or check_layout(self.path, prefix.index, scan, data)):
                    return held, data
        return 0, b""

    def _load(self, known: Buffer) -> Buffer:
        """Return the prefix of the scan, verified; ``known`` are its first bytes."""
        # No checksum covers headers and padding, so that those of the known bytes may be damaged.
        for first in (known, b""):
            prefix = self.source.load(self.scan, cancel=self.cancel, known=first)
            if prefix.damaged:
                list(prefix.samples())  # raises the first error
            data = prefix.buffer.data
            problems = check_layout(self.source.url, prefix.index, self.scan, data)
            if not problems:
                return data
        raise CorruptIndex(str(problems[0]))
