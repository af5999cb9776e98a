"""Copy versions from a remote store to another store, transferring only missing files."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import BinaryIO

from .. import storage
from ..errors import BrokenChain, ConcurrentWriter, CorruptCheckpoint
from ..storage.locks import hold_lock
from ..storage.stores import mapped_errors
from .chains import StoreIO
from .folder import memory_bytes
from .manifest import Manifest, VersionRecord
from .store import DeltaStore
from .version_file import Progress

# Files are downloaded in pieces of this size; completed pieces survive a killed process.
_BLOCK = 1 << 23


@dataclasses.dataclass(frozen=True)
class Pulled:
    """The result of a pull.

    Attributes:
        version: Number of the requested version.
        added: Numbers of the versions added to the store.
        moved_bytes: Bytes transferred; less than the size of the files after a resume.
    """

    version: int
    added: tuple[int, ...]
    moved_bytes: int


def pull(
    url: str | os.PathLike[str],
    store: DeltaStore,
    *,
    version: int = -1,
    max_bytes: int | None = None,
    options: storage.Options = None,
    progress: Progress | None = None,
) -> Pulled:
    """Copy a version, and the versions that its delta refers to, from a remote store.

    Only files missing from ``store`` are transferred; its other versions are kept. Each
    version is restored and verified against its id before anything is added. With a local store, an
    interrupted pull resumes in the middle of a file.

    Args:
        url: The folder of the source store: on any web server, or at any fsspec URL.
        store: The destination; versions keep their numbers.
        version: The version number; -1 for the newest.
        max_bytes: Largest accepted manifest, file, or restored version, in bytes; default: the
            machine's memory.
        options: fsspec storage options of ``url``.
        progress: Called with the bytes present and the bytes needed.

    Raises:
        VersionUnavailable: The store or version does not exist.
        BrokenChain: The two stores have different versions under the same number.
        CorruptCheckpoint: A file is damaged or does not match its record; nothing is added.
        StorageError: A file cannot be read, or the store cannot be written to.
        ConcurrentWriter: Another process is writing to the store.
        UnsupportedVersion: A store has another format version.
    """
    limit = memory_bytes() if max_bytes is None else max_bytes
    source = StoreIO(os.fspath(url), options, max_bytes=limit)
    offered = source.existing()
    wanted = offered.record(version)
    target = dataclasses.replace(store.settled(), max_bytes=limit)
    held = target.opened()
    missing = _missing(source, held, offered.chain(wanted.number))
    for record in missing:
        size = max(record.raw_bytes, record.file_bytes)
        if size > limit:
            raise CorruptCheckpoint(
                f"expected versions of at most {limit} bytes, version {record.number} has {size}: "
                "see max_bytes",
                url=source.url,
            )
    if not missing:
        return Pulled(wanted.number, (), 0)
    moved = _copy(source, target, missing, progress)
    merged = held.plus(*missing)
    try:
        for problem in target.problems(merged, missing):
            raise problem
        target.commit(held, merged)
    except CorruptCheckpoint:
        # A wrong manifest may name a file of a version that the store already has.
        target.remove(merged.files - held.files)
        raise
    return Pulled(wanted.number, tuple(record.number for record in missing), moved)


def _missing(source: StoreIO, held: Manifest, chain: list[VersionRecord]) -> list[VersionRecord]:
    """Return the records of a chain that the store lacks, oldest first."""
    ids = {record.number: record.id for record in held.versions}
    missing: list[VersionRecord] = []
    for record in chain:
        known = ids.get(record.number)
        if known == record.id:
            break
        if known is not None:
            message = f"the store's version {record.number} is of another run"
            raise BrokenChain(message, url=source.url)
        missing.insert(0, record)
    return missing


def _copy(
    source: StoreIO, target: StoreIO, missing: list[VersionRecord], progress: Progress | None
) -> int:
    """Copy the files of versions and return the number of bytes transferred."""
    moved = done = 0
    total = sum(record.file_bytes for record in missing)
    present = target.list()
    for record in missing:
        done += record.file_bytes
        if record.file in present:
            continue
        with _new_file(target, record.file) as file:
            for start in range(file.seek(0, os.SEEK_END), record.file_bytes, _BLOCK):
                stop = min(start + _BLOCK, record.file_bytes)
                file.write(source.read(record.file, start, stop))
                file.flush()
                moved += stop - start
                if progress is not None:
                    progress(done - record.file_bytes + stop, total)
    return moved


@contextlib.contextmanager
def _new_file(target: StoreIO, name: str) -> Iterator[BinaryIO]:
    """Yield a file that appears in the store once it is complete.

    In a local store, it continues where an interrupted download stopped.
    """
    url = target.join(name)
    if not storage.is_local(url):
        with storage.atomic_write(url, options=target.options, durable=False) as file:
            yield file
        return
    storage.make_folder(target.url)
    path = storage.plain_path(target.join(f".{name}.part"))
    with mapped_errors(path, "write", (OSError,)), hold_lock(path, wait=False) as handle:
        if handle is None:
            raise ConcurrentWriter("another process pulls this file", url=target.url)
        with open(handle, "r+b", closefd=False) as file:
            yield file
            os.fsync(handle)
        os.replace(path, storage.plain_path(url))
