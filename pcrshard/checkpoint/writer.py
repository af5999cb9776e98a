"""Adding versions to a store, in the background: files first, the manifest last, one writer."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from .. import storage
from ..errors import BrokenChain, ConcurrentWriter, CorruptCheckpoint, StorageError
from ..redaction import get_logger
from ..storage.locks import hold_lock
from .chain import read_against, read_version
from .held_version import (
    Bounds,
    HeldVersion,
    Progress,
    Written,
    copy_version,
    make_version,
    write_version,
)
from .manifest import (
    Manifest,
    VersionRecord,
    check_pinned,
    file_name,
    is_version_file,
    read_manifest,
    write_manifest,
)
from .tensor_codec import Held
from .typed_tree import Flattened
from .version_file import VersionFile, named

log = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a store is, and how it is reached.

    Attributes:
        url: The folder.
        options: fsspec storage options.
        workers: Threads that encode and decode.
    """

    url: str = dataclasses.field(repr=False)
    options: storage.Options | None = dataclasses.field(default=None, repr=False)
    workers: int = 1

    def open(self, record: VersionRecord) -> VersionFile:
        """The file of a version.

        Raises:
            CorruptCheckpoint: It is damaged, or holds another version.
        """
        url = storage.join(self.url, record.file)
        file = VersionFile(url, record.header_bytes, self.options)
        with named(url):
            check_pinned(record, file.header.number, file.header.id)
        return file

    def read(
        self,
        manifest: Manifest,
        number: int,
        *,
        verify: bool = True,
        progress: Progress | None = None,
    ) -> HeldVersion:
        """A whole version; the progress counts payloads.

        Raises:
            VersionUnavailable: There is none of this number.
            BrokenChain: A reference is missing or is another one.
            CorruptCheckpoint: Something does not match its checksum.
        """
        file = self.open(manifest.record(number))

        def open_version(number: int) -> VersionFile:
            return self.open(manifest.record(number))

        return read_version(
            file, open_version, verify=verify, workers=self.workers, progress=progress
        )

    def write(
        self,
        version: HeldVersion,
        parent: HeldVersion | None,
        source: VersionFile | None = None,
    ) -> VersionRecord:
        """Write a version under a name of its own.

        Args:
            version: What it holds.
            parent: The version that deltas refer to.
            source: A file that holds this version: where it fits, its payloads are copied.

        Returns:
            Its record for the manifest.
        """
        name = file_name(version.number)
        url = storage.join(self.url, name)
        known = None if parent is None else (parent.number, parent.id)
        if source is not None and source.parent_id == (None if parent is None else parent.id):
            written = copy_version(url, source, version.number, known, options=self.options)
        else:
            written = write_version(
                url, version, parent, options=self.options, workers=self.workers
            )
        return _record(version, parent, name, written)

    def remove(self, names: list[str]) -> None:
        """Remove files that no manifest names; what cannot be removed is logged."""
        for name in names:
            try:
                storage.remove(storage.join(self.url, name), options=self.options)
            except StorageError as error:
                log.warning("a replaced file is left over: %s", error)


def _record(
    version: HeldVersion,
    parent: HeldVersion | None,
    name: str,
    written: Written,
) -> VersionRecord:
    return VersionRecord(
        number=version.number,
        id=version.id,
        file=name,
        file_bytes=written.num_bytes,
        header_bytes=written.header_bytes,
        parent=None if parent is None else parent.number,
        raw_bytes=version.raw_bytes,
        metrics=version.metrics,
        saved=version.saved,
    )


@contextlib.contextmanager
def writing(place: Place) -> Iterator[None]:
    """Be the only writer of a local store for the ``with`` block; elsewhere there are no locks.

    Raises:
        ConcurrentWriter: Another one is writing now.
    """
    if not storage.is_local(place.url):
        yield
        return
    storage.make_folder(place.url)
    with hold_lock(storage.plain_path(place.url), wait=False) as held:
        if not held:
            raise ConcurrentWriter("another process is writing to this store", url=place.url)
        yield


def replace_manifest(
    place: Place,
    expected: int | None,
    manifest: Manifest,
) -> None:
    """Write the next manifest, if nobody else has written one.

    Args:
        place: The store.
        expected: Generation of the manifest that this one follows; ``None`` for no manifest.
        manifest: The new one.

    Raises:
        ConcurrentWriter: The generation is another one, before or after writing.
    """
    current = read_manifest(place.url, place.options)
    found = None if current is None else current.generation
    if found != expected:
        raise ConcurrentWriter(
            f"expected generation {expected} of the manifest, got {found}: open the store again",
            url=place.url,
        )
    write_manifest(place.url, manifest, place.options)
    if not storage.is_local(place.url) and read_manifest(place.url, place.options) != manifest:
        # Stores without locks: the one who wrote first finds the other's manifest here.
        raise ConcurrentWriter("another process has replaced the manifest", url=place.url)


class Writer:
    """Appends versions; remembers the last one, so that it is not read again.

    Args:
        place: The store.
        bounds: The errors that are allowed.
        empty: The manifest of a store that has no versions yet.
    """

    def __init__(
        self,
        place: Place,
        bounds: Bounds,
        empty: Manifest,
    ) -> None:
        self._place = place
        self._bounds = bounds
        self._empty = empty
        self._manifest: Manifest | None = None
        self._last: HeldVersion | None = None
        self._keyframe: HeldVersion | None = None

    def forget(self) -> None:
        """Read everything again at the next write."""
        self._manifest = None
        self._last = None
        self._keyframe = None

    def append(
        self,
        state: Flattened,
        number: int,
        metrics: dict[str, Any],
    ) -> HeldVersion:
        """Add a version.

        Raises:
            ConcurrentWriter: Another process has written to the store.
            StorageError: The disk is full, or the store refuses.
        """
        with self._turn() as manifest:
            if number != manifest.next_number:
                raise ConcurrentWriter(
                    f"expected to write version {manifest.next_number}, got {number}: "
                    "another process has written to this store",
                    url=self._place.url,
                )
            version = make_version(
                state,
                self._bounds,
                self._last,
                number=number,
                metrics=metrics,
                workers=self._place.workers,
            )
            self._add(manifest, version)
        return version

    def append_version(self, version: HeldVersion) -> HeldVersion:
        """Add a version that was made elsewhere, with the store's next number."""
        with self._turn() as manifest:
            version = dataclasses.replace(version, number=manifest.next_number)
            self._add(manifest, version)
        return version

    def append_file(self, file: VersionFile) -> HeldVersion:
        """Add the version that a file makes of one that the store holds, under any number.

        Raises:
            BrokenChain: The store does not hold the version that the file was made from.
            CorruptCheckpoint: The file is damaged, or does not make what it promises.
        """
        with self._turn() as manifest:
            reference = self._find(manifest, file)
            version = read_against(file, reference, workers=self._place.workers)
            version = dataclasses.replace(version, number=manifest.next_number)
            self._add(manifest, version, file)
        return version

    def _find(self, manifest: Manifest, file: VersionFile) -> Mapping[str, Held]:
        """The tensors that a file's deltas refer to."""
        wanted = file.parent_id
        if wanted is None:
            return {}
        for known in (self._last, self._keyframe):
            if known is not None and known.id == wanted:
                return known.tensors
        for record in manifest.versions:
            if record.id == wanted:
                return self._place.read(manifest, record.number).tensors
        newest = ", ".join(record.id.hex() for record in manifest.versions[-3:])
        raise BrokenChain(
            f"expected a store with {wanted.hex()}, its newest versions are {newest or 'none'}",
            url=file.url,
        )

    @contextlib.contextmanager
    def _turn(self) -> Iterator[Manifest]:
        """The manifest, while nobody else writes; after a failure nothing is remembered."""
        try:
            with writing(self._place):
                yield self._open()
        except BaseException:
            self.forget()
            raise

    def _open(self) -> Manifest:
        current = read_manifest(self._place.url, self._place.options)
        if self._manifest is None:
            self._manifest = current or self._create()
            clean(self._place, self._manifest)
            if self._manifest.versions:
                self._remember(self._manifest)
        elif current is None or current.generation != self._manifest.generation:
            found = None if current is None else current.generation
            raise ConcurrentWriter(
                f"expected generation {self._manifest.generation} of the manifest, got {found}: "
                "another process has written to this store",
                url=self._place.url,
            )
        return self._manifest

    def _create(self) -> Manifest:
        """Write the manifest of an empty store, before any version: so a lost one is noticed."""
        left = version_files(self._place)
        if left:
            raise CorruptCheckpoint(
                f"expected a manifest beside the files of {len(left)} versions, there is none: "
                "see DeltaStore.recover",
                url=self._place.url,
            )
        manifest = dataclasses.replace(self._empty, generation=1)
        replace_manifest(self._place, None, manifest)
        return manifest

    def _remember(self, manifest: Manifest) -> None:
        last = manifest.versions[-1]
        self._last = self._place.read(manifest, last.number)
        if manifest.order == "hop" and last.parent is not None:
            self._keyframe = self._place.read(manifest, last.parent)
        else:
            self._keyframe = self._last

    def _add(
        self,
        manifest: Manifest,
        version: HeldVersion,
        source: VersionFile | None = None,
    ) -> None:
        last = self._last
        starts_group = last is None or group_size(manifest) >= manifest.keyframe_every
        parent = None
        if not starts_group and manifest.order != "backward":
            parent = self._keyframe if manifest.order == "hop" else last
        records = [self._place.write(version, parent, source)]
        replaced = []
        if last is not None and not starts_group and manifest.order == "backward":
            records.append(self._place.write(last, version))
            replaced.append(manifest.record(last.number).file)
        after = dataclasses.replace(
            manifest,
            generation=manifest.generation + 1,
            next_number=version.number + 1,
            versions=manifest.replaced(*records),
        )
        replace_manifest(self._place, manifest.generation, after)
        self._place.remove(replaced)
        self._manifest = after
        self._last = version
        if starts_group:
            self._keyframe = version


def group_size(manifest: Manifest) -> int:
    """How many versions at the end of a store are loaded through its last keyframe."""
    parents = {record.number: record.parent for record in manifest.versions}
    numbers = sorted(parents)
    size = 0
    while numbers and size < len(numbers):
        number = numbers[-1 - size]
        size += 1
        if manifest.order == "backward":
            older = numbers[-1 - size] if size < len(numbers) else None
            if older is None or parents[older] != number:
                break
        elif parents[number] is None:
            break
    return size


def clean(place: Place, manifest: Manifest) -> None:
    """Remove what a killed writer left in a local store; call it as the only writer."""
    if not storage.is_local(place.url):
        return
    storage.remove_temporary_files(place.url)
    known = {record.file for record in manifest.versions}
    place.remove([name for name in version_files(place) if name not in known])


def version_files(place: Place) -> list[str]:
    """Names of all version files of a store, whether the manifest names them or not."""
    if not storage.is_folder(place.url, options=place.options):
        return []
    found = storage.list_files(place.url, options=place.options)
    return [name for name, _ in found if is_version_file(name)]
