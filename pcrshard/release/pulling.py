"""Pulling: a release from a folder behind a URL into a store, by the files that it lacks."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence

from .. import storage
from ..checkpoint import DeltaStore
from ..checkpoint.held_version import Progress
from ..checkpoint.version_file import VersionFile, named
from ..errors import ConcurrentWriter, CorruptCheckpoint, VersionUnavailable
from ..storage.locks import hold_lock
from ..storage.stores import mapped_errors
from .release_index import INDEX_NAME, Release, ReleaseFile, ReleaseIndex, read_index

# A file is asked for in pieces of this size, each of which is kept if the process is killed.
_BLOCK = 1 << 23
_SPOOL = ".pull"


@dataclasses.dataclass(frozen=True)
class Pulled:
    """A release that is in a store.

    Attributes:
        number: Its number in this store.
        release: What the sender says of it.
        files: What was needed for it, in order; empty if the store held it already.
        num_bytes: Bytes that were moved, less than those of the files after a resume.
    """

    number: int
    release: Release
    files: tuple[ReleaseFile, ...]
    num_bytes: int


def pull(
    url: str,
    store: DeltaStore,
    *,
    release: int | None = None,
    max_bytes: int | None = None,
    options: storage.Options | None = None,
    progress: Progress | None = None,
) -> Pulled:
    """Add a release to a store, by those files whose bytes are fewest for what the store holds.

    Releases on the way are added too, so that a pull that was interrupted goes on behind them;
    in a local store it goes on in the middle of a file.

    Args:
        url: The folder of the sender, local or at any fsspec URL.
        store: It may be empty.
        release: The sender's number; default: the newest.
        max_bytes: Releases of more bytes than this are refused; default: the machine's memory.
        options: fsspec storage options of the folder.
        progress: Called with the bytes that are there and those that are needed.

    Raises:
        VersionUnavailable: There is no such release, or there are none.
        CorruptCheckpoint: The index or a file is not what it should be; nothing of it is added.
        StorageError: A file cannot be read, or the store cannot be written to.
        ConcurrentWriter: Another process is pulling into this store.
    """
    index = read_index(url, options)
    if index is None:
        raise VersionUnavailable(f"expected releases, there is no {INDEX_NAME}", url=url)
    wanted = index.find(release)
    numbers = {record.id.hex(): record.number for record in store.versions()}
    path = index.path_to(wanted, numbers)
    _check_sizes(index, path, url, max_bytes)
    if not path:
        return Pulled(numbers[wanted.id], wanted, (), 0)
    with _spool(store) as folder:
        download = _Download(url, options, folder, _Count(path, progress))
        number = _apply(store, index, path, download)
    return Pulled(number, wanted, tuple(path), download.count.moved)


def _check_sizes(
    index: ReleaseIndex,
    path: Sequence[ReleaseFile],
    url: str,
    max_bytes: int | None,
) -> None:
    """Refuse what would not fit, before anything is downloaded."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = memory_bytes if max_bytes is None else max_bytes
    makes = {file.new for file in path}
    for release in index.releases:
        if release.id in makes and release.raw_bytes > limit:
            raise CorruptCheckpoint(
                f"expected releases of at most {limit} bytes, release {release.number} has "
                f"{release.raw_bytes}: see max_bytes",
                url=url,
            )
    for file in path:
        if file.num_bytes > limit:
            raise CorruptCheckpoint(
                f"expected files of at most {limit} bytes, {file.name} has {file.num_bytes}: "
                "see max_bytes",
                url=url,
            )


@contextlib.contextmanager
def _spool(store: DeltaStore) -> Iterator[str]:
    """A folder for files on their way: in a local store one that outlives the process."""
    if not storage.is_local(store.url):
        with tempfile.TemporaryDirectory(prefix="pcrshard-") as folder:
            yield folder
        return
    folder = os.path.join(storage.plain_path(store.url), _SPOOL)
    storage.make_folder(folder)
    with hold_lock(folder, wait=False) as held:
        if not held:
            raise ConcurrentWriter("another process is pulling into this store", url=store.url)
        yield folder
        storage.remove(folder)


class _Count:
    """How far the transfer is.

    Args:
        files: What is needed.
        progress: Who wants to know.

    Attributes:
        moved: Bytes that came over the network.
    """

    def __init__(self, files: Sequence[ReleaseFile], progress: Progress | None) -> None:
        self.moved = 0
        self._there = 0
        self._total = sum(file.num_bytes for file in files)
        self._progress = progress

    def add(self, num_bytes: int, *, moved: bool) -> None:
        """Count bytes that are there."""
        self._there += num_bytes
        if moved:
            self.moved += num_bytes
        if self._progress is not None:
            self._progress(self._there, self._total)


@dataclasses.dataclass(frozen=True)
class _Download:
    """Files on their way.

    Attributes:
        url: The sender's folder.
        options: fsspec storage options of it.
        folder: Where they go.
        count: How far it is.
    """

    url: str = dataclasses.field(repr=False)
    options: storage.Options | None = dataclasses.field(repr=False)
    folder: str
    count: _Count

    def path(self, file: ReleaseFile) -> str:
        """Where a file is kept, by its content: it may be of an earlier pull."""
        return os.path.join(self.folder, f"{file.sha256}.part")

    def fetch(self, file: ReleaseFile) -> str:
        """A whole file, compared with its digest; what an earlier pull has left is used.

        Raises:
            CorruptCheckpoint: It is not the one that the index names.
            StorageError: It cannot be read, or the disk is full.
        """
        path = self.path(file)
        with mapped_errors(path, "write", (OSError,)):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            there = os.fstat(handle).st_size
            if there > file.num_bytes:
                os.ftruncate(handle, 0)
                there = 0
            self.count.add(there, moved=False)
            self._fill(handle, file, there)
        finally:
            os.close(handle)
        self._check(path, file)
        return path

    def _fill(
        self,
        handle: int,
        file: ReleaseFile,
        start: int,
    ) -> None:
        url = storage.join(self.url, file.name)
        while start < file.num_bytes:
            stop = min(start + _BLOCK, file.num_bytes)
            with storage.open_range(url, start, stop, options=self.options) as view:
                storage.write_at(handle, start, view, url=self.path(file))
            self.count.add(stop - start, moved=True)
            start = stop

    def _check(self, path: str, file: ReleaseFile) -> None:
        with open(path, "rb") as whole:
            found = hashlib.file_digest(whole, "sha256").hexdigest()
        if found != file.sha256:
            os.unlink(path)
            message = f"expected the SHA-256 {file.sha256}, got {found}: pull again"
            raise CorruptCheckpoint(message, url=storage.join(self.url, file.name))


def _apply(
    store: DeltaStore,
    index: ReleaseIndex,
    path: Sequence[ReleaseFile],
    download: _Download,
) -> int:
    """Fetch the files and add what they make, one after the other; gives the last number."""
    releases = {release.id: release for release in index.releases}
    number = 0
    for file in path:
        local = download.fetch(file)
        with named(storage.join(download.url, file.name)):
            patch = _open(local, file, releases[file.new])
            number = store.append_file(patch).number
        os.unlink(local)
    return number


def _open(
    path: str,
    file: ReleaseFile,
    release: Release,
) -> VersionFile:
    """A file that came, if it makes what the index promises of what the index says."""
    patch = VersionFile(path)
    patch.check_size()
    made = patch.header.id.hex()
    parent = None if patch.parent_id is None else patch.parent_id.hex()
    if (made, parent) != (file.new, file.old):
        raise CorruptCheckpoint(
            f"expected a file that makes {file.new} of {file.old}, "
            f"got one that makes {made} of {parent}"
        )
    raw_bytes = sum(entry.described.spec.num_bytes for entry in patch.header.tensors)
    if raw_bytes != release.raw_bytes:
        raise CorruptCheckpoint(f"expected {release.raw_bytes} bytes of tensors, got {raw_bytes}")
    return patch
