"""Versions of a store: written, and restored through the chains of their deltas."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .. import storage
from ..errors import BrokenChain, CorruptCheckpoint, PCRError, StorageError
from .codec import Entry, Tensor
from .frame import HEAD_BYTES, pack_frame
from .kept import KeptTensors
from .manifest import Manifest, ManifestFolder, VersionRecord
from .typed_tree import Tree
from .version_file import MAGIC, Header, VersionFile, content_id


class StoreIO(ManifestFolder):
    """Access to the manifests and versions of a store.

    Attributes:
        decoded: The file of the last version that was written or read whole, and its tensors. Not
            its id, because versions of one content may hold it in different forms.
    """

    decoded: tuple[str, Mapping[str, Tensor]] = ("", {})

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
            return header, pack_frame(MAGIC, header, num_bytes)

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
