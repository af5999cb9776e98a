"""Manifests: numbered, immutable lists of a store's versions and their files.

See docs/checkpoints-format.md, section 3.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from .. import storage
from ..errors import (
    BrokenChain,
    ConcurrentWriter,
    CorruptCheckpoint,
    PCRError,
    StorageError,
    VersionUnavailable,
)
from ..redaction import get_logger
from .codec import Entry, Tensor
from .folder import Folder
from .frame import (
    HEAD_BYTES,
    Count,
    Number,
    Record,
    Text,
    damage_named,
    header_limit,
    know_types,
    pack_frame,
    require,
    unpack_frame,
)
from .kept import KeptTensors
from .typed_tree import Tree
from .version_file import MAGIC as VERSION_MAGIC
from .version_file import Header, VersionFile, VersionRecord, content_id

log = get_logger(__name__)
MAGIC = b"\x89PCM\r\n\x1a\n"
# A copy of the newest manifest for web servers, which cannot list directories.
COPY_NAME = "manifest.pcm"
MANIFEST_NAME = re.compile(r"manifest-([0-9]{6,12})\.pcm")
VERSION_NAME = re.compile(r"([0-9]{6,12})-[0-9a-f]{16}\.pcd")
# Keep recent manifests so that a reader that just listed the folder still finds the one it saw.
_KEPT_MANIFESTS = 3
_ATTEMPTS = 5


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


class StoreIO(Folder):
    """Access to the manifests and versions of a store.

    Attributes:
        decoded: The file of the last version that was written or read whole, and its tensors. Not
            its id, because versions of one content may hold it in different forms.
    """

    decoded: tuple[str, Mapping[str, Tensor]] = ("", {})

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

    def write(
        self,
        encoded: Iterable[tuple[str, Tensor, Entry, list[bytes]]],
        largest: Sequence[Entry],
        parent: VersionRecord | None = None,
        *,
        tree: Tree,
        number: int,
        **fields: Any,
    ) -> VersionRecord:
        """Write a version atomically under a new file name, and keep it.

        Args:
            encoded: Path, tensor, entry and payload of each tensor, in the order of the tree; each
                is written before the next one is made.
            largest: As large an entry as each may get: see :func:`largest_entry`.
            parent: The version that deltas refer to; ``None`` for a keyframe.
            tree: The state without its tensors.
            number: Number of the version.
            **fields: ``metrics`` and ``saved``.

        Raises:
            StorageError: The disk is full, or the storage rejected the write.
        """

        def head(entries: Sequence[Entry], num_bytes: int = 0) -> tuple[Header, bytes]:
            used = parent if any(entry.is_delta for entry in entries) else None
            header = Header(
                id=content_id(tree, entries),
                parent=None if used is None else used.number,
                parent_id=None if used is None else used.id,
                tree=tree,
                tensors=list(entries),
                number=number,
                **fields,
            )
            return header, pack_frame(VERSION_MAGIC, header, num_bytes)

        _, room = head([entry.replace(is_delta=parent is not None) for entry in largest])
        name = f"{number:06d}-{secrets.token_hex(8)}.pcd"
        kept, entries = self._new_kept(), []
        # The local temporary file of an upload need not survive a power failure.
        durable = storage.is_local(self.url)
        with storage.atomic_write(self.join(name), options=self.options, durable=durable) as file:
            file.seek(len(room))
            for path, tensor, entry, payload in encoded:
                file.writelines(payload)
                entries.append(entry)
                kept.add(path, tensor.narrowed())
            header, frame = head(entries, len(room))
            file.seek(0)
            file.write(frame)
        self.decoded = name, kept
        return header.record(name, len(frame) - HEAD_BYTES)

    def open(self, record: VersionRecord) -> VersionFile:
        """Open the file of a version.

        Raises:
            CorruptCheckpoint: The file is damaged or contains another version.
        """
        file = VersionFile(self, record.file, record.header_bytes)
        # Metrics and time are not part of the content.
        if file.record.replace(metrics=record.metrics, saved=record.saved) != record:
            message = f"expected version {record.number} as its manifest describes it"
            raise CorruptCheckpoint(message, url=file.url)
        return file

    def read_tensors(
        self, manifest: Manifest, file: VersionFile, paths: Collection[str]
    ) -> Mapping[str, Tensor]:
        """Decode tensors of a version, reading only the required files and payloads.

        Args:
            manifest: The store's manifest.
            file: The version; its chain may end at the version in :attr:`decoded`.
            paths: Paths of the tensors to read.

        Raises:
            VersionUnavailable: A parent does not exist.
            BrokenChain: A reference is missing or is a different version.
            CorruptCheckpoint: A payload is damaged.
        """
        layers = [(file, paths)]
        tensors: Mapping[str, Tensor] = {}
        while deltas := {path for path in paths if file.entries[path].is_delta}:
            assert file.header.parent is not None
            record = manifest.record(file.header.parent)
            if record.id != file.header.parent_id:
                message = f"its parent is another version than {record.number}"
                raise BrokenChain(message, url=file.url)
            if self.decoded[0] == record.file and deltas <= self.decoded[1].keys():
                tensors = self.decoded[1]
                break
            file = self.open(record)
            paths = deltas & file.entries.keys()
            layers.append((file, paths))
        for file, paths in reversed(layers):
            tensors = file.decode(paths, tensors)
        return tensors

    def read_whole(self, manifest: Manifest, file: VersionFile) -> Mapping[str, Tensor]:
        """Decode a version, and keep it; see :meth:`read_tensors`."""
        tensors = self.read_tensors(manifest, file, file.entries)
        kept = self._new_kept()
        for path, tensor in tensors.items():
            kept.add(path, tensor)
        self.decoded = file.record.file, kept
        return tensors

    def _new_kept(self) -> KeptTensors:
        return KeptTensors(storage.plain_path(self.url) if storage.is_local(self.url) else "")

    def forget(self) -> None:
        """Drop the version that is kept."""
        self.decoded = "", {}

    def load(
        self, number: int, names: Collection[str] | None = None, map_location: Any = None
    ) -> tuple[VersionRecord, Any]:
        """Load a version, or the parts selected by ``names``; see :meth:`DeltaStore.load`."""
        if isinstance(names, str):
            raise TypeError(f"expected a list of names, got {names!r}; write [{names!r}]")
        parts = None if names is None else dict.fromkeys(names)
        manifest = self.existing()
        record = manifest.record(number)
        try:
            file = self.open(record)
            tensors = self.read_tensors(manifest, file, file.paths(parts))
        except StorageError:
            if self.existing().number == manifest.number:
                raise
            # Another process has deleted files of that manifest.
            return self.load(number, names, map_location)
        return record, file.restore(tensors, parts, map_location)

    def check(self, manifest: Manifest, file: VersionFile) -> None:
        """Read every byte of a version, and restore it.

        Raises:
            PCRError: The version cannot be restored.
        """
        tensors = self.read_whole(manifest, file)
        file.check_size()
        file.restore(tensors)

    def problems(self, manifest: Manifest, records: Iterable[VersionRecord]) -> Iterator[PCRError]:
        """Check versions, and yield the problems found."""
        self.forget()  # not what was kept, but what is in the files
        for record in records:
            try:
                self.check(manifest, self.open(record))
            except PCRError as error:
                yield error
