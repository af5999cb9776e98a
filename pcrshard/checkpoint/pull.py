"""Pulling: versions of a store behind a URL into another store, by the files that it lacks."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator

from .. import storage
from ..errors import BrokenChain, ConcurrentWriter, CorruptCheckpoint
from ..storage.locks import hold_lock
from ..storage.stores import mapped_errors
from .manifest import Manifest, StoreIO, VersionRecord
from .reader import problem_of
from .store import DeltaStore
from .version_file import Progress

# A file is requested in pieces of this size, each of which is kept if the process is killed.
_BLOCK = 1 << 23


@dataclasses.dataclass(frozen=True)
class Pulled:
    """Versions that were added to a store.

    Attributes:
        version: Number of the version that was asked for.
        added: Numbers of the versions that the store lacked.
        moved_bytes: Bytes that were moved; less than those of the files after a resume.
    """

    version: int
    added: tuple[int, ...]
    moved_bytes: int


def pull(
    url: str,
    store: DeltaStore,
    *,
    version: int = -1,
    max_bytes: int | None = None,
    options: storage.Options | None = None,
    progress: Progress | None = None,
) -> Pulled:
    """Copy a version, and the versions that it is a delta to, from a store behind a URL.

    Only the files that ``store`` lacks are moved, and it keeps what it has. The version is restored
    and compared with its id before anything is added. A local store resumes an interrupted pull in
    the middle of a file.

    Args:
        url: The folder of the other store: on any web server, or at any fsspec URL.
        store: Where the versions go, under the numbers that they have.
        version: The number; -1 for the newest.
        max_bytes: Refuse manifests, files and restored versions of more bytes than this; default:
            the machine's memory.
        options: fsspec storage options of ``url``.
        progress: Called with the bytes that are there, and that are needed.

    Raises:
        VersionUnavailable: There is no such store or version.
        BrokenChain: The two stores have different versions under one number.
        CorruptCheckpoint: A file is not what it should be; nothing is added.
        StorageError: A file cannot be read, or the store cannot be written to.
        ConcurrentWriter: Another process is writing to the store.
    """
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = memory_bytes if max_bytes is None else max_bytes
    source = StoreIO(url, options, max_bytes=limit)
    offered = source.existing()
    wanted = offered.record(version)
    target = store.settled()
    held = target.newest()
    missing = _missing(held, offered, wanted)
    for record in missing:
        size = max(record.raw_bytes, record.file_bytes)
        if size > limit:
            raise CorruptCheckpoint(
                f"expected versions of at most {limit} bytes, version {record.number} has {size}: "
                "see max_bytes",
                url=url,
            )
    if not missing:
        return Pulled(wanted.number, (), 0)
    moved = 0
    done, total = 0, sum(record.file_bytes for record in missing)
    for record in missing:
        for there, came in _copy(source, target, record):
            moved += came
            if progress is not None:
                progress(done + there, total)
        done += record.file_bytes
    try:
        merged = _merged(held, missing)
        _check(dataclasses.replace(target, max_bytes=limit), merged, missing, wanted.number)
        target.commit(held, merged)
    except CorruptCheckpoint:
        target.remove(record.file for record in missing)
        raise
    return Pulled(wanted.number, tuple(record.number for record in missing), moved)


def _missing(held: Manifest, offered: Manifest, wanted: VersionRecord) -> list[VersionRecord]:
    """Return what the store lacks of a version's chain, oldest first."""
    ids = {record.number: record.id for record in held.versions}
    missing: list[VersionRecord] = []
    for record in offered.chain(wanted.number):
        if record.number in ids:
            if ids[record.number] != record.id:
                raise BrokenChain(
                    f"expected version {record.number} to be {record.id.hex()}, the store has "
                    f"{ids[record.number].hex()}: it is of another run"
                )
            break
        missing.insert(0, record)
    return missing


def _merged(held: Manifest, added: list[VersionRecord]) -> Manifest:
    versions = sorted((*held.versions, *added), key=lambda record: record.number)
    following = max(held.next_version, versions[-1].number + 1)
    return dataclasses.replace(held, next_version=following, versions=tuple(versions))


def _copy(source: StoreIO, target: StoreIO, record: VersionRecord) -> Iterator[tuple[int, int]]:
    """Copy a version's file; yield the bytes that are there, and those that just came."""
    if not storage.is_local(target.url):
        with tempfile.TemporaryDirectory(prefix="pcrshard-") as folder:
            path = os.path.join(folder, record.file)
            yield from _download(source, record, path)
            with (
                open(path, "rb") as whole,
                storage.atomic_write(
                    target.join(record.file), options=target.options, durable=False
                ) as file,
            ):
                shutil.copyfileobj(whole, file, _BLOCK)
        return
    storage.make_folder(target.url)
    path = storage.plain_path(target.join(f".{record.file}.part"))
    with mapped_errors(path, "write", (OSError,)), hold_lock(path, wait=False) as is_held:
        if is_held is None:
            raise ConcurrentWriter("another process pulls this file", url=target.url)
        yield from _download(source, record, path)
        os.replace(path, storage.plain_path(target.join(record.file)))


def _download(source: StoreIO, record: VersionRecord, path: str) -> Iterator[tuple[int, int]]:
    """Complete a local file, in pieces that a later call need not fetch again."""
    url = source.join(record.file)
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b") as file:
        there = file.seek(0, os.SEEK_END)
        if there > record.file_bytes:
            there = file.truncate(0)
            file.seek(0)
        yield there, 0
        while there < record.file_bytes:
            stop = min(there + _BLOCK, record.file_bytes)
            with storage.open_range(url, there, stop, options=source.options) as view:
                file.write(view)
            file.flush()
            yield stop, stop - there
            there = stop
        os.fsync(file.fileno())


def _check(target: StoreIO, merged: Manifest, added: list[VersionRecord], number: int) -> None:
    """Check every byte of the new files, and that the wanted version restores to its id."""
    for record in added:
        file = target.open(record)
        file.check_size()
        for _ in file.payloads(file.entries):
            pass
    error, _ = problem_of(target, merged, number)
    if error is not None:
        raise error
