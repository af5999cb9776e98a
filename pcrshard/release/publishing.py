"""Publishing: versions of a store as plain files that any web server can offer."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from typing import IO, Any

from .. import storage
from ..checkpoint import DeltaStore, HeldVersion, VersionRecord
from ..checkpoint.held_version import Progress, copy_version, write_version
from ..checkpoint.writer import Place, writing
from ..errors import BrokenChain, ConcurrentWriter, VersionUnavailable
from ..redaction import get_logger
from .release_index import (
    INDEX_NAME,
    Release,
    ReleaseFile,
    ReleaseIndex,
    pack_index,
    read_index,
    release_file_name,
)

log = get_logger(__name__)
_BLOCK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Published:
    """What was added to a folder of releases.

    Attributes:
        releases: The new ones, oldest first.
        files: Their files.
    """

    releases: tuple[Release, ...]
    files: tuple[ReleaseFile, ...]


def publish(
    store: DeltaStore,
    url: str,
    *,
    versions: Sequence[int] | None = None,
    keyframe_every: int = 10,
    options: storage.Options | None = None,
    progress: Progress | None = None,
) -> Published:
    """Offer versions of a store in a folder: an index, keyframes, and deltas between releases.

    The files are written first and the index last, so that a reader never sees half a release.
    Nothing that was published is changed, and what is there already is not written again.

    Args:
        store: Where the versions are.
        url: The folder, local or at any fsspec URL that can be written to.
        versions: Their numbers, in the order of their release; default: all of the store.
        keyframe_every: So many releases share a keyframe, from which new readers begin.
        options: fsspec storage options of the folder.
        progress: Called with the releases that are written and those that are to be.

    Returns:
        What was added.

    Raises:
        VersionUnavailable: A version is not there.
        BrokenChain: The folder has releases of another store.
        ConcurrentWriter: Another process is publishing to this folder.
        StorageError: The folder cannot be written to.
    """
    if keyframe_every < 1:
        raise ValueError(f"expected keyframe_every to be at least 1, got {keyframe_every}")
    place = Place(url, options)
    with writing(place):
        index = read_index(url, options) or ReleaseIndex()
        records = _unpublished(store, index, versions)
        added = _write_files(store, place, index, records, keyframe_every, progress)
        if added.releases:
            after = ReleaseIndex(
                index.releases + added.releases, index.files + added.files, index.generation + 1
            )
            _replace_index(place, index, after)
    return added


def _unpublished(
    store: DeltaStore,
    index: ReleaseIndex,
    versions: Sequence[int] | None,
) -> list[VersionRecord]:
    """The versions that the index does not have."""
    by_number = {record.number: record for record in store.versions()}
    published = {release.number: release.id for release in index.releases}
    records = []
    for number in by_number if versions is None else dict.fromkeys(versions):
        if number not in by_number:
            raise VersionUnavailable(f"there is no version {number}", url=store.url)
        record = by_number[number]
        if published.get(number, record.id.hex()) != record.id.hex():
            raise BrokenChain(
                f"expected release {number} to be {record.id.hex()}, got {published[number]}: "
                "the folder has releases of another store"
            )
        if record.id.hex() not in published.values():
            records.append(record)
    return records


def _write_files(
    store: DeltaStore,
    place: Place,
    index: ReleaseIndex,
    records: Sequence[VersionRecord],
    keyframe_every: int,
    progress: Progress | None,
) -> Published:
    releases: list[Release] = []
    files: list[ReleaseFile] = []
    offers = _Offers(store, place)
    before = _last_release(store, index) if records else None
    for record in records:
        release = Release(record.number, record.id.hex(), record.raw_bytes)
        count = len(index.releases) + len(releases)
        if before is not None:
            files.append(offers.write(release, record, before))
        if before is None or count % keyframe_every == 0:
            files.append(offers.write(release, record, None))
        releases.append(release)
        before = record
        if progress is not None:
            progress(len(releases), len(records))
    return Published(tuple(releases), tuple(files))


def _last_release(store: DeltaStore, index: ReleaseIndex) -> VersionRecord | None:
    """The version that readers have already, if the store still holds it."""
    if not index.releases:
        return None
    wanted = index.releases[-1]
    for record in store.versions():
        if record.id.hex() == wanted.id:
            return record
    log.warning(
        "the store does not hold release %s any more: a keyframe is published, no delta",
        wanted.number,
    )
    return None


class _Offers:
    """Writes files that make one version of another.

    Args:
        store: Where the versions are.
        place: Where the files go.
    """

    def __init__(self, store: DeltaStore, place: Place) -> None:
        self._store = store
        self._place = place
        # Of the version that was read last: it is the next one's reference.
        self._last: HeldVersion | None = None

    def write(
        self,
        release: Release,
        record: VersionRecord,
        before: VersionRecord | None,
    ) -> ReleaseFile:
        """One file, and its entry in the index."""
        old = None if before is None else before.id.hex()
        name = release_file_name(release, old)
        with tempfile.TemporaryDirectory(prefix="pcrshard-") as folder:
            spool = os.path.join(folder, name)
            num_bytes = self._make(spool, record, before)
            digest = _put(spool, storage.join(self._place.url, name), self._place.options)
        return ReleaseFile(name, num_bytes, digest, old, release.id)

    def _make(
        self,
        path: str,
        record: VersionRecord,
        before: VersionRecord | None,
    ) -> int:
        """Write the file; gives its size. The store's own one is copied if it is the same."""
        own = self._store.open_file(record.number)
        if own.parent_id == (None if before is None else before.id):
            parent = own.header.parent
            return copy_version(path, own, record.number, parent, durable=False).num_bytes
        reference = None if before is None else self._read(before)
        version = self._read(record)
        return write_version(path, version, reference, durable=False).num_bytes

    def _read(self, record: VersionRecord) -> HeldVersion:
        if self._last is None or self._last.id != record.id:
            self._last = self._store.read(record.number)
        return self._last


def _put(
    path: str,
    url: str,
    options: storage.Options | None,
) -> str:
    """Copy a local file to where it is offered; gives its SHA-256."""
    with open(path, "rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
        source.seek(0)
        _copy(source, url, options)
    return digest


def _copy(
    source: IO[bytes],
    url: str,
    options: storage.Options | None,
) -> None:
    with storage.atomic_write(url, options=options, durable=storage.is_local(url)) as target:
        shutil.copyfileobj(source, target, _BLOCK)


def _replace_index(
    place: Place,
    expected: ReleaseIndex,
    index: ReleaseIndex,
) -> None:
    """Write the index, if nobody else has written one; where there are no locks, look again."""
    found: Any = read_index(place.url, place.options) or ReleaseIndex()
    if found != expected:
        message = "another process has published to this folder: publish again"
        raise ConcurrentWriter(message, url=place.url)
    url = storage.join(place.url, INDEX_NAME)
    durable = storage.is_local(url)
    with storage.atomic_write(url, options=place.options, durable=durable) as file:
        file.write(pack_index(index))
    if not durable and read_index(place.url, place.options) != index:
        raise ConcurrentWriter("another process has replaced the index", url=place.url)
