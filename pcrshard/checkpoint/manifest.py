"""Manifests: which versions a store has, in which files; numbered, and never changed.

See docs/checkpoints-format.md, section 3.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from contextlib import suppress
from typing import Any

from .. import storage
from ..errors import ConcurrentWriter, CorruptCheckpoint, StorageError, VersionUnavailable
from ..redaction import get_logger
from .codec import is_count
from .frame import MANIFEST, MAX_HEADER_BYTES, damage_named, pack_frame, require, unpack_frame
from .version_file import VersionFile, check_identity

log = get_logger(__name__)
# A copy of the newest manifest for web servers, which cannot list.
COPY_NAME = "manifest.pcm"
_NAME = re.compile(r"manifest-([0-9]{6,12})\.pcm")
_FILE_NAME = re.compile(r"[0-9]{6,12}-[0-9a-f]{16}\.pcd")
_KEYS = {"number", "next_version", "precision", "versions"}
# A reader that listed a moment ago still finds the manifest that it saw.
_KEPT_MANIFESTS = 3
_LEFTOVER_SECONDS = 3600.0
_ATTEMPTS = 5


@dataclasses.dataclass(frozen=True)
class VersionRecord:
    """One version of a store.

    Attributes:
        number: From 1, increasing; numbers are not reused.
        id: SHA-256 of the restored content.
        parent: Number of the version that it is a delta to; ``None`` for a keyframe.
        file: Name of its file in the store's folder.
        file_bytes: Size of the file.
        header_bytes: Size of the packed header in it.
        raw_bytes: Bytes of the restored tensors.
        metrics: Plain numbers and strings that the user noted.
        saved: Seconds since 1970.
    """

    number: int
    id: bytes
    parent: int | None
    file: str
    file_bytes: int
    header_bytes: int
    raw_bytes: int
    metrics: dict[str, Any]
    saved: float


_RECORD_KEYS = {field.name for field in dataclasses.fields(VersionRecord)}


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All versions of a store.

    Attributes:
        number: From 1, one more with each change of the store; 0 for a store that is not there.
        next_version: Number of the next version.
        precision: The allowed error of the last writer, in words.
        versions: In the order of their numbers.
    """

    number: int = 0
    next_version: int = 1
    precision: str = ""
    versions: tuple[VersionRecord, ...] = ()

    def record(self, number: int) -> VersionRecord:
        """Return the record of a version; negative numbers count from the newest, -1.

        Raises:
            VersionUnavailable: There is none.
        """
        if number < 0 and -number <= len(self.versions):
            return self.versions[number]
        for record in self.versions:
            if record.number == number:
                return record
        known = ", ".join(str(record.number) for record in self.versions[-20:])
        raise VersionUnavailable(f"expected one of the versions {known or '(none)'}, got {number}")

    def chain(self, number: int) -> list[VersionRecord]:
        """Return a version's record, its parent's, and so on down to a keyframe."""
        found = [self.record(number)]
        while (parent := found[-1].parent) is not None:
            found.append(self.record(parent))
        return found


def new_file_name(number: int) -> str:
    """Return a name for a version's file that was never used."""
    return f"{number:06d}-{secrets.token_hex(8)}.pcd"


def is_version_file(name: str) -> bool:
    """Whether a name is one of :func:`new_file_name`."""
    return _FILE_NAME.fullmatch(name) is not None


def parse_manifest(data: bytes | memoryview, max_bytes: int = MAX_HEADER_BYTES) -> Manifest:
    """Parse a manifest, which may be hostile.

    Raises:
        CorruptCheckpoint: A rule of the format is broken.
    """
    raw = unpack_frame(data, MANIFEST, max_bytes=max_bytes)
    require(raw.keys() == _KEYS, f"expected the keys {sorted(_KEYS)}")
    require(is_count(raw["number"]) and is_count(raw["next_version"]), "expected two counts")
    require(type(raw["precision"]) is str and len(raw["precision"]) < 4096, "expected a precision")
    require(isinstance(raw["versions"], list), "expected a list of versions")
    versions = tuple(map(_parse_record, raw["versions"]))
    numbers = [record.number for record in versions]
    require(numbers == sorted(set(numbers)), "expected increasing numbers of versions")
    require(not numbers or numbers[-1] < raw["next_version"], "a number would be reused")
    for record in versions:
        known = record.parent is None or (record.parent < record.number)
        require(
            known and record.parent in {None, *numbers}, "expected an earlier version as parent"
        )
    return Manifest(raw["number"], raw["next_version"], raw["precision"], versions)


def _parse_record(raw: Any) -> VersionRecord:
    require(isinstance(raw, dict) and raw.keys() == _RECORD_KEYS, "expected a record")
    record = VersionRecord(**raw)
    check_identity(record.number, record.id, record.saved, record.metrics)
    counts = (record.file_bytes, record.header_bytes, record.raw_bytes)
    require(all(map(is_count, counts)), "expected sizes in a record")
    require(record.parent is None or is_count(record.parent), "expected the number of a parent")
    named = type(record.file) is str and is_version_file(record.file)
    require(named, f"expected the name of a version's file, got {record.file!r}")
    return record


@dataclasses.dataclass(frozen=True)
class StoreIO:
    """Where a store is, and how it is reached.

    Attributes:
        url: The folder.
        options: fsspec storage options.
        workers: Threads that encode and decode.
        max_bytes: What a manifest or a header may take in memory.
    """

    url: str = dataclasses.field(repr=False)
    options: storage.Options | None = dataclasses.field(default=None, repr=False)
    workers: int = 1
    max_bytes: int = MAX_HEADER_BYTES

    def join(self, name: str) -> str:
        """Return the URL of a file in the folder."""
        return storage.join(self.url, name)

    def list(self) -> dict[str, int | None]:
        """Return the sizes of all files in the folder, by name; empty if there is no folder."""
        if not storage.is_folder(self.url, options=self.options):
            return {}
        found = storage.list_files(self.url, options=self.options)
        return {name: size for name, size in found if "/" not in name}

    def newest(self) -> Manifest:
        """Read the newest manifest; number 0 if there is none.

        Raises:
            CorruptCheckpoint: It is damaged.
            StorageError: It cannot be read.
        """
        if self.url.startswith(("http:", "https:")):
            return self._read(COPY_NAME) or Manifest()
        for _ in range(_ATTEMPTS):
            names = self.list()
            numbers = manifest_numbers(names)
            if not numbers and COPY_NAME in names:
                return self._read(COPY_NAME) or Manifest()  # of format 1, or all others were lost
            if not numbers:
                return Manifest()
            found = self._read(manifest_name(max(numbers)))
            if found is not None:
                return found
        raise StorageError("the manifests change too fast to be read", url=self.url)

    def existing(self) -> Manifest:
        """Read the newest manifest of a store that must be there.

        Raises:
            VersionUnavailable: There is no store.
        """
        manifest = self.newest()
        if manifest.number == 0:
            raise VersionUnavailable(
                "there is no store of checkpoints; if only its manifests were lost, "
                "`pcrshard checkpoint recover` rebuilds them",
                url=self.url,
            )
        return manifest

    def _read(self, name: str) -> Manifest | None:
        url = self.join(name)
        try:
            data = storage.read_bytes(url, options=self.options, max_bytes=self.max_bytes)
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        try:
            with damage_named("the manifest is damaged", url):
                return parse_manifest(data, self.max_bytes)
        except CorruptCheckpoint as error:
            raise CorruptCheckpoint(f"{error}: see `pcrshard checkpoint recover`") from error

    def commit(self, before: Manifest, after: Manifest) -> Manifest:
        """Create the manifest that follows another one; return it.

        The file of every version in it must be in the store. Older manifests are pruned.

        Raises:
            ConcurrentWriter: Another process has written to the store; nothing has changed.
            StorageError: The disk is full, or the store refuses.
        """
        after = dataclasses.replace(after, number=before.number + 1)
        name = manifest_name(after.number)
        data = pack_frame(MANIFEST, dataclasses.asdict(after))
        try:
            storage.create(self.join(name), data, options=self.options)
        except FileExistsError:
            # A request whose answer was lost may have been repeated by the client's library.
            if not self._holds(name, data):
                raise ConcurrentWriter(
                    f"another process has written manifest {after.number} of this store",
                    url=self.url,
                ) from None
        numbers = manifest_numbers(self.list())
        if max(numbers) > after.number:
            self._check_followed(before, after)
            return after
        self._write_copy(data)
        self.remove(manifest_name(n) for n in numbers if n <= after.number - _KEPT_MANIFESTS)
        return after

    def _holds(self, name: str, data: bytes) -> bool:
        try:
            return storage.read_bytes(self.join(name), options=self.options) == data
        except StorageError:
            return False  # another process holds a lease, or has pruned the file

    def _check_followed(self, before: Manifest, mine: Manifest) -> None:
        """Check that the newest manifest was made of mine.

        A writer that slept while others wrote finds the next number free again, once it is pruned.
        """
        newest = self.newest()
        files = {record.file for record in newest.versions}
        added = {record.file for record in mine.versions if record not in before.versions}
        followed = added <= files if added else newest.number < mine.number + _KEPT_MANIFESTS
        if not followed:
            self.remove([manifest_name(mine.number)])
            raise ConcurrentWriter("other processes have written to this store", url=self.url)

    def _write_copy(self, data: bytes) -> None:
        try:
            url = self.join(COPY_NAME)
            with storage.atomic_write(url, options=self.options, durable=False) as file:
                file.write(data)
        except StorageError as error:
            log.warning("the manifest's copy for web servers is out of date: %s", error)

    def remove(self, names: Any) -> None:
        """Remove files; one that cannot be removed is logged, and left to the next writer."""
        for name in names:
            try:
                storage.remove(self.join(name), options=self.options)
            except StorageError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    log.warning("a file is left over: %s", error)

    def clean(self, manifest: Manifest) -> None:
        """Remove what killed writers left behind more than an hour ago."""
        used = {record.file for record in manifest.versions}
        for name in self.list():
            temporary = name.startswith(".") and name.endswith((".tmp", ".part"))
            if name in used or not (temporary or is_version_file(name)):
                continue
            with suppress(StorageError):  # another writer was faster
                if storage.age_seconds(self.join(name), options=self.options) > _LEFTOVER_SECONDS:
                    self.remove([name])

    def open(self, record: VersionRecord) -> VersionFile:
        """Open the file of a version.

        Raises:
            CorruptCheckpoint: It is damaged, or holds another version.
        """
        url = self.join(record.file)
        file = VersionFile(url, record.header_bytes, self.options, max_bytes=self.max_bytes)
        parent = None if file.parent is None else file.parent[0]
        found = (file.number, file.id, parent, file.num_bytes, file.raw_bytes)
        wanted = (
            record.number, record.id, record.parent, record.file_bytes, record.raw_bytes,
        )  # fmt: skip
        if found != wanted:
            raise CorruptCheckpoint(
                f"expected version {record.number} {record.id.hex()}, "
                f"got {file.number} {file.id.hex()}, or its sizes or parent differ",
                url=file.url,
            )
        return file


def manifest_name(number: int) -> str:
    """Return the name of a manifest."""
    return f"manifest-{number:06d}.pcm"


def manifest_numbers(names: Any) -> set[int]:
    """Return the numbers of the manifests among some names."""
    found = (_NAME.fullmatch(name) for name in names)
    return {int(match[1]) for match in found if match is not None}
