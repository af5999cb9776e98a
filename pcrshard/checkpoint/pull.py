"""Pulling: versions of a store behind a URL into another store, by the files that it lacks."""

from __future__ import annotations

import contextlib
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
    target = dataclasses.replace(store.settled(), max_bytes=limit)
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
    moved = _copy(source, target, missing, progress)
    merged = held.with_versions((*held.versions, *missing))
    try:
        for record in missing:
            file = target.open(record)
            file.check_size()
            for _ in file.payloads():
                pass
        error, _ = problem_of(target, merged, wanted.number)
        if error is not None:
            raise error
        target.commit(held, merged)
    except CorruptCheckpoint:
        target.remove(record.file for record in missing)
        raise
    return Pulled(wanted.number, tuple(record.number for record in missing), moved)


def _copy(
    source: StoreIO, target: StoreIO, missing: list[VersionRecord], progress: Progress | None
) -> int:
    """Copy the files of versions; return the bytes that were moved."""
    moved = done = 0
    total = sum(record.file_bytes for record in missing)
    for record in missing:
        with _partial_file(target, record) as path:
            for there, came in _download(source, record, path):
                moved += came
                if progress is not None:
                    progress(done + there, total)
        done += record.file_bytes
    return moved


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


@contextlib.contextmanager
def _partial_file(target: StoreIO, record: VersionRecord) -> Iterator[str]:
    """Give the local path of a version's file on its way, and move the whole file to the store."""
    url = target.join(record.file)
    if storage.is_local(target.url):
        storage.make_folder(target.url)
        path = storage.plain_path(target.join(f".{record.file}.part"))
        with mapped_errors(path, "write", (OSError,)), hold_lock(path, wait=False) as is_held:
            if is_held is None:
                raise ConcurrentWriter("another process pulls this file", url=target.url)
            yield path
            os.replace(path, storage.plain_path(url))
        return
    with tempfile.TemporaryDirectory(prefix="pcrshard-") as folder:
        path = os.path.join(folder, record.file)
        yield path
        upload = storage.atomic_write(url, options=target.options, durable=False)
        with open(path, "rb") as whole, upload as file:
            shutil.copyfileobj(whole, file, _BLOCK)


def _download(source: StoreIO, record: VersionRecord, path: str) -> Iterator[tuple[int, int]]:
    """Complete a local file in pieces; yield the bytes that are there, and those that just came."""
    url = source.join(record.file)
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b") as file:
        there = file.seek(0, os.SEEK_END)
        if there > record.file_bytes:
            there = file.truncate(0)
            file.seek(0)
        yield there, 0
        while there < record.file_bytes:
            stop = min(there + _BLOCK, record.file_bytes)
            file.write(storage.read(url, there, stop, options=source.options).data)
            file.flush()
            yield stop, stop - there
            there = stop
        os.fsync(file.fileno())
