"""Restore a version from a keyframe and its chain of deltas, and verify the digests."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..errors import BrokenChain, PCRError, StorageError, VersionUnavailable
from .codec import Tensor
from .frame import damage_named
from .manifest import Manifest, StoreIO
from .version_file import VersionFile, VersionRecord


def read_tensors(
    io: StoreIO, manifest: Manifest, file: VersionFile, paths: Collection[str]
) -> Mapping[str, Tensor]:
    """Decode tensors of a version, reading only the required files and payloads.

    Args:
        io: The store; the chain of versions may end at the one that it holds in memory.
        manifest: The store's manifest.
        file: The version.
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
        if io.decoded[0] == record.id:
            tensors = io.decoded[1]
            break
        file = io.open(record)
        paths = deltas & file.entries.keys()
        layers.append((file, paths))
    for file, paths in reversed(layers):
        tensors = file.decode(paths, tensors)
    return tensors


def read_whole(io: StoreIO, manifest: Manifest, file: VersionFile) -> Mapping[str, Tensor]:
    """Decode a version, and keep it in memory; see :func:`read_tensors`."""
    tensors = read_tensors(io, manifest, file, file.entries)
    io.decoded = file.header.id, tensors
    return tensors


class Loaded(NamedTuple):
    """A version, or parts of it.

    Attributes:
        record: The version.
        state: Its state, or a dict of the parts by name.
        tensors: The path of each tensor or array, and its value.
    """

    record: VersionRecord
    state: Any
    tensors: list[tuple[str, Any]]


def load_version(
    io: StoreIO, number: int, names: Collection[str] | None = None, map_location: Any = None
) -> Loaded:
    """Load a version, or the parts selected by ``names``; see :meth:`DeltaStore.load`."""
    wanted = set(names or ())

    def is_wanted(path: str) -> bool:
        above = itertools.accumulate(path.split("."), "{}.{}".format)
        return names is None or not wanted.isdisjoint(["", *above])

    manifest = io.existing()
    record = manifest.record(number)
    try:
        file = io.open(record)
        tree = file.tree
        if missing := wanted - tree.parts:
            raise VersionUnavailable("there is no such tensor", url=io.url, key=min(missing))
        needed = {tree.names[n] for path, n in tree.uses if is_wanted(path)}
        tensors = file.restore(read_tensors(io, manifest, file, needed))
    except StorageError:
        if io.existing().number == manifest.number:
            raise
        # Another process has deleted files of that manifest.
        return load_version(io, number, names, map_location)
    moved = {name: tensor.to(map_location) for name, tensor in tensors.items()}
    found: list[tuple[str, Any]] = []

    def tensor(path: str, number: int, tag: str, *view: Any) -> Any:
        if not is_wanted(path):
            return None
        name = tree.names[number]
        value: Any = tensors[name].numpy() if tag == "a" else moved[name]
        # torch rejects a view outside its tensor's memory.
        found.append((path, value.as_strided(*view) if view else value))
        return found[-1][1]

    with damage_named("the tree is damaged", file.url):
        state, parts = tree.build(tensor)
    return Loaded(record, state if names is None else {name: parts[name] for name in names}, found)


def check(io: StoreIO, manifest: Manifest, file: VersionFile) -> None:
    """Read every byte of a version, and restore it.

    Raises:
        PCRError: The version cannot be restored.
    """
    tensors = read_whole(io, manifest, file)
    file.check_size()
    file.restore(tensors)


def problems(io: StoreIO, manifest: Manifest, numbers: Iterable[int]) -> Iterator[PCRError]:
    """Check versions, and yield the problems found."""
    io.decoded = b"", {}  # not what is in memory, but what is in the files
    for number in numbers:
        try:
            check(io, manifest, io.open(manifest.record(number)))
        except PCRError as error:
            yield error
