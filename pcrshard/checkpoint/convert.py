"""Stores and releases of format 1, as written by pcrshard 0.x, into a store of this format."""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import storage
from ..errors import BrokenChain, StorageError, VersionUnavailable
from .codec import Tensor
from .frame import MANIFEST, damage_named, unpack_frame
from .manifest import COPY_NAME, Manifest, StoreIO, VersionRecord
from .reader import Decoded, restore_all
from .version_file import Progress, VersionFile
from .writer import is_keyframe_due, write_record

_OLD_FORMAT = 1
_KEYFRAME_EVERY = 10


def convert(
    source: str,
    target: str,
    *,
    options: storage.Options | None = None,
    progress: Progress | None = None,
) -> list[VersionRecord]:
    """Copy all versions of a format-1 store, or of a folder of releases, into a new store.

    Every version keeps its number, its id and each bit; the source stays as it is.

    Args:
        source: The folder, local or at any fsspec URL that can list.
        target: The new store, which must not exist.
        options: fsspec storage options of both.
        progress: Called with the number of finished versions, and of all versions.

    Returns:
        The versions of the new store.

    Raises:
        ValueError: There is a store at ``target``.
        VersionUnavailable: There are no versions at ``source``.
        BrokenChain: A version's reference is missing.
        CorruptCheckpoint: A file is damaged.
    """
    old, new = StoreIO(source, options), StoreIO(target, options)
    if new.newest().number:
        raise ValueError("expected a new store as the target, there is one already")
    files = _files(old)
    if not files:
        raise VersionUnavailable("there are no versions of format 1", url=source)
    by_id = {file.id: file for file in files}
    numbered = {file.number: file for file in files}
    manifest = new.commit(Manifest(), Manifest())
    known: dict[bytes, dict[str, Tensor]] = {}
    last: Decoded | None = None
    for done, number in enumerate(sorted(numbered), 1):
        file = numbered[number]
        tensors = _decode(file, by_id, known)
        restore_all(file, tensors)
        record = VersionRecord(
            number=number,
            id=file.id,
            parent=None,
            file="",
            file_bytes=0,
            header_bytes=0,
            raw_bytes=file.raw_bytes,
            metrics={str(key): _plain(value) for key, value in file.metrics.items()},
            saved=file.saved,
        )
        checksums = {entry.path: entry.content_crc for entry in file.entries}
        reference = None if is_keyframe_due(manifest, _KEYFRAME_EVERY) else last
        record = write_record(new, record, file.tree, tensors, checksums, reference)
        versions = (*manifest.versions, record)
        after = dataclasses.replace(manifest, next_version=number + 1, versions=versions)
        manifest = new.commit(manifest, after)
        last = Decoded(number, file.id, tensors)
        if progress is not None:
            progress(done, len(numbered))
    return list(manifest.versions)


def _plain(value: Any) -> Any:
    return value if type(value) in (type(None), bool, int, float, str) else str(value)


def _files(io: StoreIO) -> list[VersionFile]:
    """Open the files of format 1; keyframes last, so that they are preferred."""
    names = [name for name in io.list() if name.endswith((".pcd", ".pcp"))]
    try:
        data = storage.read_bytes(io.join(COPY_NAME), options=io.options)
    except StorageError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
    else:
        with damage_named("the manifest is damaged", io.join(COPY_NAME)):
            raw = unpack_frame(data, MANIFEST, version=_OLD_FORMAT)
            named = {record["file"] for record in raw["versions"]}
        names = [name for name in names if name in named]
    files = [
        VersionFile(io.join(name), options=io.options, version=_OLD_FORMAT) for name in names
    ]  # fmt: skip
    return sorted(files, key=lambda file: (file.parent is None, file.number))


def _decode(
    file: VersionFile, by_id: dict[bytes, VersionFile], known: dict[bytes, dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Decode a version through its parents, which may be newer; the last one stays in memory."""
    layers = [file]
    while (parent := layers[-1].parent) is not None and parent[1] not in known:
        if parent[1] not in by_id or len(layers) > len(by_id):
            raise BrokenChain(f"the reference {parent[1].hex()} is missing", url=file.url)
        layers.append(by_id[parent[1]])
    tensors = {} if parent is None else known[parent[1]]
    for layer in reversed(layers):
        tensors = layer.decode(layer.entries, tensors)
    known.clear()
    known[file.id] = tensors
    return tensors
