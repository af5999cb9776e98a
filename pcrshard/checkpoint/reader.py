"""From files to a version: a chain of deltas on a keyframe, restored and compared with its id."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from ..checksum import crc32c
from ..errorbound import Words
from ..errors import BrokenChain, CorruptCheckpoint, PCRError, VersionUnavailable
from .codec import INTRA, Entry, Tensor
from .frame import damage_named, require
from .manifest import Manifest, StoreIO
from .tensors import tensor_from
from .typed_tree import leaves_of, unflatten, walk
from .version_file import Progress, VersionFile, content_id, parallel_map


class Decoded(NamedTuple):
    """A version in memory as it is stored."""

    number: int
    id: bytes
    tensors: dict[str, Tensor]


def read_tensors(
    io: StoreIO,
    manifest: Manifest,
    number: int,
    *,
    paths: Collection[str] | None = None,
    known: Decoded | None = None,
) -> tuple[VersionFile, dict[str, Tensor]]:
    """Decode a version's tensors; only the files and payloads that they need are read.

    Args:
        io: The store.
        manifest: Its versions.
        number: The version's number.
        paths: Paths of tensors; default: all of them.
        known: A version in memory, at which the chain may end.

    Raises:
        VersionUnavailable: There is no such version.
        BrokenChain: A reference is missing or is another version.
        CorruptCheckpoint: A payload is damaged.
    """
    layers: list[tuple[VersionFile, list[Entry]]] = []
    wanted = paths
    tensors: dict[str, Tensor] = {}
    for record in manifest.chain(number):
        expected = layers[-1][0].parent if layers else None
        if known is not None and layers and expected == known[:2]:
            tensors = known.tensors
            break
        file = io.open(record)
        if layers and expected != (file.number, file.id):
            raise BrokenChain(
                f"the parent of version {layers[-1][0].number} is another version than "
                f"{file.number} {file.id.hex()}",
                url=layers[-1][0].url,
            )
        entries = [entry for entry in file.entries if wanted is None or entry.path in wanted]
        missing = set(wanted or ()) - {entry.path for entry in entries}
        if missing:
            raise BrokenChain(
                "the reference of a tensor is missing", url=file.url, key=min(missing)
            )
        layers.append((file, entries))
        wanted = {entry.path for entry in entries if entry.coder != INTRA}
        if not wanted:
            break
    for file, entries in reversed(layers):
        tensors = file.decode(entries, tensors, io.workers)
    return layers[0][0], tensors


def restore_all(
    file: VersionFile,
    tensors: Mapping[str, Tensor],
    workers: int = 1,
    progress: Progress | None = None,
) -> dict[str, Words]:
    """Restore the words (N,) of each tensor by path, and compare them with the version's id.

    Raises:
        CorruptCheckpoint: The version restores to other content.
    """

    def work(entry: Entry) -> tuple[Words, bytes]:
        words = tensors[entry.path].restore()
        return words, hashlib.sha256(words.data).digest()

    found = parallel_map(workers, work, file.entries, progress)
    pairs = list(zip(file.entries, found, strict=True))
    made = content_id(file.tree, ((entry.path, entry.spec, sha) for entry, (_, sha) in pairs))
    if made != file.id:
        message = f"version {file.number} restores to {made.hex()}, expected {file.id.hex()}"
        raise CorruptCheckpoint(message, url=file.url)
    return {entry.path: words for entry, (words, _) in pairs}


def load_version(
    io: StoreIO,
    manifest: Manifest,
    number: int,
    *,
    names: Collection[str] | None = None,
    map_location: Any = None,
) -> Any:
    """Load a version, or the parts of it that ``names`` select; see :meth:`DeltaStore.load`."""
    if names is None:
        file, tensors = read_tensors(io, manifest, number)
        return _state(file, file.tree, restore_all(file, tensors, io.workers), map_location)
    file = io.open(manifest.record(number))
    with damage_named("the tree is damaged", file.url):
        nodes = _find(file, names)
        leaves = set().union(*map(leaves_of, nodes.values()))
        require(all(0 <= n < len(file.entries) for n in leaves), "the tree fits other tensors")
    entries = [file.entries[n] for n in sorted(leaves)]
    _, tensors = read_tensors(io, manifest, number, paths=[entry.path for entry in entries])

    def work(entry: Entry) -> tuple[str, Words]:
        words = tensors[entry.path].restore()
        if crc32c(words) != entry.content_crc:
            message = "the restored tensor does not match its checksum"
            raise CorruptCheckpoint(message, url=file.url, key=entry.path)
        return entry.path, words

    words = dict(parallel_map(io.workers, work, entries))
    return _state(file, ["d", list(map(list, nodes.items()))], words, map_location)


def _find(file: VersionFile, names: Collection[str]) -> dict[str, Any]:
    """Return the node of each name: the path of a tensor, or of anything above it."""
    found: dict[str, Any] = {}
    for path, node in walk(file.tree):
        if path in names:
            found.setdefault(path, node)
    # Where two tensors have the same path, that of the second one ends in #2.
    for number, entry in enumerate(file.entries):
        if entry.path in names:
            found.setdefault(entry.path, ["x", number])
    missing = set(names) - found.keys()
    if missing:
        raise VersionUnavailable("there is no such tensor", url=file.url, key=min(missing))
    return {name: found[name] for name in names}


def _state(file: VersionFile, tree: Any, words: Mapping[str, Words], map_location: Any) -> Any:
    """Make a state of a tree; tensors that shared memory when they were saved share it again."""
    made: dict[int, torch.Tensor] = {}

    def leaf(number: int) -> torch.Tensor:
        require(0 <= number < len(file.entries), "the tree refers to a tensor that is not there")
        if number not in made:
            entry = file.entries[number]
            found = words[entry.path]
            # Words of an exact tensor may lie in memory that cannot be written to.
            made[number] = tensor_from(found if found.flags.writeable else found.copy(), entry.spec)
        return made[number]

    with damage_named("the tree is damaged", file.url):
        return unflatten(tree, leaf, map_location)


def problem_of(
    io: StoreIO, manifest: Manifest, number: int, known: Decoded | None = None
) -> tuple[PCRError | None, Decoded | None]:
    """Read every byte of a version, and restore it.

    Returns:
        What is wrong, or the version in memory, from which the next one may go on.
    """
    try:
        file, tensors = read_tensors(io, manifest, number, known=known)
        file.check_size()
        restore_all(file, tensors, io.workers)
    except PCRError as error:
        return error, None
    return None, Decoded(file.number, file.id, tensors)
