"""Convert stores and releases of format 1, as written by pcrshard 0.x, to the current format."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import storage
from ..errorbound import content_bytes, decode_integers, decompress
from ..errors import BrokenChain, VersionUnavailable
from .codec import Entry, Tensor, decode_tensor, digest_of
from .frame import damage_named, decode_plain, encode, require, split_frame
from .manifest import COPY_NAME, Manifest, StoreIO
from .manifest import MAGIC as MANIFEST_MAGIC
from .patch import MAX_GROWTH, encode_patch
from .store import is_keyframe_due
from .tensors import TensorSpec
from .typed_tree import TreeReader, make_tree, pack
from .version_file import MAGIC as VERSION_MAGIC
from .version_file import Progress, VersionRecord, reported

_FORMAT = 1
_KEYFRAME_EVERY = 10
_MAX_RATIO = 1 << 17
# Maximum expansion of a compressed header, and the size allowed for any header.
_MAX_HEADER_GROWTH = 64
_FREE_BYTES = 1 << 16


def convert(
    source: str,
    target: str,
    *,
    options: storage.Options = None,
    progress: Progress | None = None,
) -> list[VersionRecord]:
    """Copy all versions of a format-1 store, or of a folder of releases, into a new store.

    Every version keeps its number and its exact content, which is verified against its id. The
    source is not modified. Versions of format 2 have different ids.

    Args:
        source: The folder, local or at any fsspec URL that can list.
        target: The new store, which must not exist.
        options: fsspec storage options of both.
        progress: Called with the number of finished versions, and of all versions.

    Returns:
        The versions of the new store.

    Raises:
        ValueError: ``target`` already contains a store.
        VersionUnavailable: ``source`` contains no versions.
        BrokenChain: A version's reference is missing.
        CorruptCheckpoint: A file is damaged.
        UnsupportedVersion: A file of the source has another format version.
        StorageError: A file cannot be read or written.
    """
    old, new = StoreIO(source, options), StoreIO(target, options)
    if new.newest().number:
        raise ValueError("expected a new store as the target, there is one already")
    with damage_named("a header is damaged", source):
        files = _files(old)
        ordered = sorted(files.values(), key=lambda file: file["number"])
    if not files:
        raise VersionUnavailable("there are no versions of format 1", url=source)
    manifest = Manifest()
    for file in reported(ordered, progress):
        with damage_named("the version is damaged", old.join(file["name"])):
            decoded = _decode_version(old, file, files)
            rows = [
                [path, each.spec.dtype, each.spec.shape, each.digest]
                for path, each in decoded.items()
            ]
            content = hashlib.sha256(encode([file["tree"], rows])).digest()
            require(content == file["id"], "it does not match its checksum")
            tree = make_tree(_pack_node(file["tree"]))
            names = TreeReader(tree).names
            tensors = {names[n]: tensor for n, tensor in enumerate(decoded.values())}
            parent = None if is_keyframe_due(manifest, _KEYFRAME_EVERY) else manifest.versions[-1]
            fields = {name: file[name] for name in ("number", "metrics", "saved")}
            record = new.write(tensors, parent, tree=tree, **fields)
            new.open(record)  # checks the fields, which format 1 does not limit
            manifest = manifest.plus(record)
    # Only now does the store exist: a conversion that failed can be repeated.
    return list(new.commit(Manifest(), manifest).versions)


def _files(io: StoreIO) -> dict[bytes, Any]:
    """Return the headers of files, and their names, by id: of two of a version, the keyframe."""
    names = {name for name in io.list() if name.endswith((".pcd", ".pcp"))}
    if COPY_NAME in io.list():
        manifest, _ = _read(io, COPY_NAME, MANIFEST_MAGIC)
        listed = {record["file"] for record in manifest["versions"]}
        if missing := listed - names:
            raise BrokenChain(f"the file {min(missing)} is missing", url=io.url)
        names = listed
    files = [_read(io, name, VERSION_MAGIC)[0] | {"name": name} for name in names]
    files.sort(key=lambda file: file["parent"] is None)
    return {file["id"]: file for file in files}


def _read(io: StoreIO, name: str, magic: bytes) -> tuple[Any, memoryview]:
    """Return the header of a file, and the bytes after it."""
    data = storage.read_bytes(io.join(name), options=io.options)
    body, rest = split_frame(memoryview(data), magic, _FORMAT)
    size = content_bytes(body)
    require(size <= _MAX_HEADER_GROWTH * len(body) + _FREE_BYTES, "the header is too large")
    return decode_plain(decompress(body, size)), rest


def _decode_version(io: StoreIO, file: Any, files: dict[bytes, Any]) -> dict[str, Tensor]:
    """Decode a version through its parents, which may be newer."""
    layers = [file]
    while (parent := layers[-1]["parent"]) is not None:
        if parent[1] not in files or len(layers) > len(files):
            raise BrokenChain(f"the reference {parent[1].hex()} is missing")
        layers.append(files[parent[1]])
    tensors: dict[str, Tensor] = {}
    for layer in reversed(layers):
        _, rest = _read(io, layer["name"], VERSION_MAGIC)
        before, tensors = tensors, {}
        for entry in layer["tensors"]:
            path, size = entry["path"], sum(entry["sizes"])
            tensors[path] = _decode(entry, rest[:size], before.get(path))
            rest = rest[size:]
    return tensors


def _decode(entry: Any, payload: memoryview, base: Tensor | None) -> Tensor:
    """Decode the main part as format 2 does, then the words that differ from it."""
    first, second, _ = entry["sizes"]
    main, index, rest = payload[:first], payload[first : first + second], payload[first + second :]
    spec = TensorSpec(entry["dtype"], tuple(entry["shape"]))
    is_delta = entry["coder"] != "intra"
    now = Entry(spec, entry["lattice"], is_delta, first, 0, 0, bytes(32))
    tensor = decode_tensor(now, main, base)
    count = entry["count"]
    require(8 * count <= _MAX_RATIO * len(payload), "too few bytes for the words")
    places = np.cumsum(decode_integers(index, count, np.uint32), dtype=np.int64) - 1
    if spec.word.itemsize > 1:
        changed = decode_integers(rest, count, spec.word)
    else:
        changed = np.frombuffer(decompress(rest, count), spec.word)
    bare = tensor.restore()
    words = bare.copy()
    if tensor.lattice is None:
        words[places] ^= changed
        return Tensor(spec, None, words, b"", digest_of(words))
    words[places] = changed
    patch, _ = encode_patch(words, bare, growth=MAX_GROWTH)
    assert patch is not None
    return dataclasses.replace(tensor, patch=patch, digest=digest_of(words))


def _pack_node(node: Any) -> Iterator[Any]:
    """Yield the tokens of a format-1 node, as :func:`.typed_tree.pack` does."""
    match node:
        case ["i", data]:
            yield from ("i", data)
        case ["s", dtype, data]:
            yield from ("g", dtype, data)
        case ["v", number, offset, shape, strides]:
            yield from ("v", number, offset, len(shape), *shape, *strides)
        case ["d" | "o" | "l" | "t" as kind, items, *metadata]:
            yield from (kind, len(items))
            inner = itertools.chain(*items) if kind in ("d", "o") else items
            for item in (*inner, *metadata):
                yield from _pack_node(item)
        case list():
            yield from node
        case _:
            yield from pack(node)
