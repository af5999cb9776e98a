"""Restore a version from a keyframe and its chain of deltas, and verify the digests."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ..errors import BrokenChain, PCRError, VersionUnavailable
from .codec import Tensor
from .frame import damage_named
from .manifest import Manifest, StoreIO
from .tensors import tensor_from
from .version_file import VersionFile

# The id of a version in memory, and its tensors.
Decoded = tuple[bytes, Mapping[str, Tensor]]


def read_tensors(
    io: StoreIO,
    manifest: Manifest,
    file: VersionFile,
    paths: Collection[str] | None = None,
    known: Decoded = (b"", {}),
) -> Mapping[str, Tensor]:
    """Decode a version's tensors, reading only the required files and payloads.

    Args:
        io: The store.
        manifest: The store's manifest.
        file: The version.
        paths: Paths of the tensors to read; default: all.
        known: A version already in memory, at which the chain may end.

    Raises:
        VersionUnavailable: A parent does not exist.
        BrokenChain: A reference is missing or is a different version.
        CorruptCheckpoint: A payload is damaged.
    """
    layers = []
    tensors: Mapping[str, Tensor] = {}
    paths = file.entries.keys() if paths is None else paths
    while True:
        layers.append((file, paths))
        deltas = {path for path in paths if file.entries[path].is_delta}
        header = file.header
        if header.parent is None:
            break
        record = manifest.record(header.parent)
        if record.id != header.parent_id:
            message = f"the parent of version {header.number} is another version {record.number}"
            raise BrokenChain(message, url=file.url)
        if known[0] == record.id:
            tensors = known[1]
            break
        if not deltas:
            break
        file = io.open(record)
        paths = deltas & file.entries.keys()
    for file, paths in reversed(layers):
        tensors = file.decode(paths, tensors)
    return tensors


def load_version(
    io: StoreIO,
    manifest: Manifest,
    number: int,
    *,
    names: Collection[str] | None = None,
    map_location: Any = None,
) -> tuple[Any, list[tuple[str, Any]]]:
    """Load a version, or the parts selected by ``names``; see :meth:`DeltaStore.load`.

    Returns:
        The state or the parts, and the path of each tensor or array with its value.
    """
    file = io.open(manifest.record(number))
    tree = file.tree
    wanted = set(names or ())
    if missing := wanted - tree.parts:
        raise VersionUnavailable("there is no such tensor", url=io.url, key=min(missing))

    def is_wanted(path: str) -> bool:
        above = itertools.accumulate(path.split("."), "{}.{}".format)
        return names is None or not wanted.isdisjoint(["", *above])

    with damage_named("the tree is damaged", file.url):
        paths = {number: tree.names[number] for path, number in tree.uses if is_wanted(path)}
    tensors = read_tensors(io, manifest, file, set(paths.values()))
    words = file.restore(tensors)
    made = {n: tensor_from(words[path], tensors[path].spec) for n, path in paths.items()}
    moved = {n: tensor.to(map_location) for n, tensor in made.items()}
    found: list[tuple[str, Any]] = []

    def tensor(path: str, number: int, tag: str, *view: Any) -> Any:
        if not is_wanted(path):
            return None
        # torch rejects a view outside its tensor's memory.
        value = moved[number].as_strided(*view) if view else moved[number]
        found.append((path, made[number].numpy() if tag == "a" else value))
        return found[-1][1]

    with damage_named("the tree is damaged", file.url):
        state, parts = tree.build(tensor)
    return state if names is None else {name: parts[name] for name in names}, found


def check(
    io: StoreIO, manifest: Manifest, file: VersionFile, known: Decoded = (b"", {})
) -> Decoded:
    """Read every byte of a version, restore it, and return it; see :func:`read_tensors`."""
    tensors = read_tensors(io, manifest, file, known=known)
    file.check_size()
    file.restore(tensors)
    return file.header.id, tensors


def problems(io: StoreIO, manifest: Manifest, numbers: Iterable[int]) -> Iterator[PCRError]:
    """Check versions, and yield the problems found."""
    known: Decoded = (b"", {})
    for number in numbers:
        try:
            known = check(io, manifest, io.open(manifest.record(number)), known)
        except PCRError as error:
            yield error
