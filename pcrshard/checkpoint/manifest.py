"""Manifests: numbered, immutable lists of a store's versions and their files.

See docs/checkpoints-format.md, section 3.
"""

from __future__ import annotations

import re
from contextlib import suppress

from ..errors import (
    ConcurrentWriter,
    CorruptCheckpoint,
    StorageError,
    VersionUnavailable,
)
from ..redaction import get_logger
from .folder import Folder
from .frame import (
    HEAD_BYTES,
    Count,
    Digest,
    FileName,
    HeaderBytes,
    Metrics,
    Number,
    Record,
    Text,
    Time,
    damage_named,
    header_limit,
    know_types,
    pack_frame,
    require,
    unpack_frame,
)

log = get_logger(__name__)
MAGIC = b"\x89PCM\r\n\x1a\n"
# A copy of the newest manifest for web servers, which cannot list directories.
COPY_NAME = "manifest.pcm"
MANIFEST_NAME = re.compile(r"manifest-([0-9]{6,12})\.pcm")
VERSION_NAME = re.compile(r"([0-9]{6,12})-[0-9a-f]{16}\.pcd")
# Keep recent manifests so that a reader that just listed the folder still finds the one it saw.
_KEPT_MANIFESTS = 3
_ATTEMPTS = 5


class Version(Record, frozen=True, kw_only=True):
    """A version of a store.

    Attributes:
        number: Version number, from 1, increasing and never reused.
        id: SHA-256 of the tree and of the type, shape, and SHA-256 of each tensor.
        parent: Number of the version that deltas refer to; ``None`` for a keyframe.
        metrics: Numbers and strings that the user recorded.
        saved: Time of saving, in seconds since 1970.
    """

    number: Number
    id: Digest
    parent: Number | None
    metrics: Metrics
    saved: Time


class VersionRecord(Version, frozen=True, kw_only=True):
    """One version of a store, as its manifest describes it.

    Attributes:
        number: Version number, from 1, increasing and never reused.
        id: SHA-256 of the restored content.
        parent: Number of the version that this delta refers to; ``None`` for a keyframe.
        metrics: Numbers and strings that the user recorded.
        saved: Time of saving, in seconds since 1970.
        file: Name of the version's file in the store's folder.
        file_bytes: Size of the file.
        header_bytes: Size of the file's header.
        raw_bytes: Size of the restored tensors.
    """

    file: FileName
    file_bytes: Count
    header_bytes: HeaderBytes
    raw_bytes: Count


class Manifest(Record, frozen=True):
    """An immutable list of all versions of a store.

    Attributes:
        number: Starts at 1 and increases by one with each change; 0 if the store does not exist.
        next_version: Number that the next version will get.
        precision: Precision of the last writer, in words.
        versions: Records in increasing order of number.
    """

    number: Count = 0
    next_version: Number = 1
    precision: Text = ""
    versions: tuple[VersionRecord, ...] = ()

    def __post_init__(self) -> None:
        last = 0
        known: set[int | None] = {None}
        for record in self.versions:
            if record.number <= last or record.parent not in known:
                raise ValueError("expected increasing numbers, and an earlier version as parent")
            last = record.number
            known.add(last)
        if last >= self.next_version:
            raise ValueError("expected a higher number for the next version")

    @property
    def files(self) -> set[str]:
        """The names of the versions' files."""
        return {record.file for record in self.versions}

    def record(self, number: int) -> VersionRecord:
        """Return the record of a version; negative numbers count back from the newest, -1.

        Raises:
            VersionUnavailable: The version does not exist.
        """
        numbers = [record.number for record in self.versions]
        with suppress(ValueError, IndexError):
            return self.versions[number if number < 0 else numbers.index(number)]
        raise VersionUnavailable(f"expected one of the versions {numbers[-20:]}, got {number}")

    def chain(self, number: int) -> list[VersionRecord]:
        """Return the records of a version and its ancestors, ending with a keyframe."""
        found = [self.record(number)]
        while (parent := found[-1].parent) is not None:
            found.append(self.record(parent))
        return found

    def plus(self, *records: VersionRecord) -> Manifest:
        """Return a copy with more versions; version numbers are never reused."""
        versions = sorted((*self.versions, *records), key=lambda record: record.number)
        following = max(self.next_version, versions[-1].number + 1)
        return self.replace(next_version=following, versions=tuple(versions))


know_types(Manifest)


class ManifestFolder(Folder):
    """The manifests of a store, which need no torch."""

    def newest(self) -> Manifest:
        """Read the newest manifest; return an empty one, number 0, if there is none.

        Raises:
            CorruptCheckpoint: The manifest is damaged.
            StorageError: The manifest cannot be read.
        """
        is_web = self.url.startswith(("http:", "https:"))
        for _ in range(_ATTEMPTS):
            numbers = {} if is_web else self.numbered(MANIFEST_NAME)
            # Only the copy may be left if all other manifests were lost.
            name = max(numbers, key=numbers.__getitem__, default=COPY_NAME)
            data = self.read_bytes(name, HEAD_BYTES + header_limit(self.max_bytes))
            if data is not None:
                problem = "the manifest is damaged, see `pcrshard checkpoint recover`"
                with damage_named(problem, self.join(name)):
                    found, rest = unpack_frame(memoryview(data), MAGIC, Manifest)
                    require(not rest, "the manifest is too long")
                    return found
            if not numbers:
                return Manifest()
            # It was pruned after the listing.
        raise StorageError(f"the manifest {name} is listed but cannot be read", url=self.url)

    def existing(self) -> Manifest:
        """Read the newest manifest of an existing store.

        Raises:
            VersionUnavailable: The store does not exist.
        """
        manifest = self.newest()
        if manifest.number == 0:
            if "index" in self.list():
                message = "expected a store, got a folder of the stores of several ranks: name one"
                raise VersionUnavailable(message, url=self.url)
            raise VersionUnavailable(
                "there is no store of checkpoints; if only its manifests were lost, "
                "`pcrshard checkpoint recover` rebuilds them",
                url=self.url,
            )
        return manifest

    def opened(self, precision: str = "") -> Manifest:
        """Read the newest manifest to write its successor; create the store if there is none.

        Raises:
            CorruptCheckpoint: The manifest is damaged, or there are versions without a manifest.
        """
        manifest = self.newest()
        if manifest.number == 0:
            if files := self.numbered(VERSION_NAME):
                raise CorruptCheckpoint(
                    f"expected a manifest beside the files of {len(files)} versions, there is "
                    "none: see `pcrshard checkpoint recover`",
                    url=self.url,
                )
            # Written before any version, so that a lost manifest is detected.
            manifest = self.commit(manifest, Manifest(precision=precision))
        return manifest

    def commit(self, before: Manifest, after: Manifest) -> Manifest:
        """Create the successor of a manifest and return it.

        The files of all its versions must already be in the store. Older manifests, and files that
        the new manifest no longer references, are removed.

        Raises:
            ConcurrentWriter: Another process has written to the store; nothing was changed.
            StorageError: The disk is full, or the storage rejected the write.
        """
        after = after.replace(number=before.number + 1)
        data = pack_frame(MAGIC, after)
        added, removed = after.files - before.files, before.files - after.files
        is_ours = self.create(f"manifest-{after.number:06d}.pcm", data)
        numbers = self.numbered(MANIFEST_NAME)
        is_newest = max(numbers.values()) == after.number
        if is_ours and not is_newest:
            # If a suspended writer resumes after others wrote, its number may have been pruned
            # and be free again; the newest manifest then does not descend from this one.
            named = self.newest().files
            is_ours = added <= named and removed.isdisjoint(named)
        if not is_ours:
            raise ConcurrentWriter("another process has written to this store", url=self.url)
        if is_newest:
            try:
                self.put(COPY_NAME, [data])
            except StorageError as error:
                log.warning("the manifest's copy for web servers is out of date: %s", error)
            last = after.number - _KEPT_MANIFESTS
            self.remove(name for name, number in numbers.items() if number <= last)
        self.remove(removed)
        return after
