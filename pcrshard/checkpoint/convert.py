"""Convert stores and releases of format 1, as written by pcrshard 0.x, to the current format."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from typing import Any, NamedTuple

import numpy as np

from .. import storage
from ..checksum import crc32c
from ..errorbound import Words, content_bytes, decode_integers, decompress
from ..errors import BrokenChain, VersionUnavailable
from .codec import Entry, Tensor, decode_tensor, digest_of, store_words
from .frame import (
    HEAD_BYTES,
    damage_named,
    decode_plain,
    encode,
    header_bytes,
    require,
    split_frame,
)
from .manifest import COPY_NAME, Manifest, StoreIO
from .manifest import MAGIC as MANIFEST_MAGIC
from .store import is_keyframe_due
from .tensors import TensorSpec
from .typed_tree import Packer, Tree, TreeReader
from .version_file import MAGIC as VERSION_MAGIC
from .version_file import Progress, VersionRecord, reported

_FORMAT = 1
_KEYFRAME_EVERY = 10
_MAX_RATIO = 1 << 17
# Maximum expansion of a compressed header, and the size allowed for any header.
_MAX_GROWTH = 64
_FREE_BYTES = 1 << 16
# By path, what a delta refers to, which lacks escaped values, and the words of the tensor.
_Tensors = dict[str, tuple[Tensor, Words]]


class _File(NamedTuple):
    name: str
    header: Any
    start: int  # of the first payload


def convert(
    source: str,
    target: str,
    *,
    options: storage.Options | None = None,
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
    """
    old, new = StoreIO(source, options), StoreIO(target, options)
    if new.newest().number:
        raise ValueError("expected a new store as the target, there is one already")
    with damage_named("a header is damaged", source):
        files = _files(old)
        by_id = {file.header["id"]: file for file in files}
        numbered = {file.header["number"]: file for file in files}
    if not files:
        raise VersionUnavailable("there are no versions of format 1", url=source)
    manifest = Manifest()
    for number in reported(sorted(numbered), progress):
        file = numbered[number]
        with damage_named("the version is damaged", old.join(file.name)):
            stored = _stored(file.header, _decode_chain(old, file, by_id))
            packer = Packer()
            _pack_node(packer, file.header["tree"])
            tree = Tree(packer.tokens, packer.blobs)
            names = TreeReader(tree).names
            tensors = {names[n]: tensor for n, tensor in enumerate(stored)}
            fields = {name: file.header[name] for name in ("number", "metrics", "saved")}
        parent = None if is_keyframe_due(manifest, _KEYFRAME_EVERY) else manifest.versions[-1]
        record = new.write(tensors, parent, tree=tree, **fields)
        manifest = manifest.with_versions((*manifest.versions, record))
    # Only now does the store exist: a conversion that failed can be repeated.
    return list(new.commit(Manifest(), manifest).versions)


def _files(io: StoreIO) -> list[_File]:
    """Open the files of format 1, keyframes last, so that keyframes take precedence."""
    names = {name for name in io.list() if name.endswith((".pcd", ".pcp"))}
    manifest = io.read_bytes(COPY_NAME)
    if manifest is not None:
        versions = _unpack(memoryview(manifest), MANIFEST_MAGIC)["versions"]
        listed = {record["file"] for record in versions}
        if missing := listed - names:
            raise BrokenChain(f"the file {min(missing)} is missing", url=io.url)
        names = listed
    files = []
    for name in names:
        start = HEAD_BYTES + header_bytes(io.read(name, 0, HEAD_BYTES), VERSION_MAGIC, _FORMAT)
        header = _unpack(io.read(name, 0, start), VERSION_MAGIC)
        files.append(_File(name, header, start))
    return sorted(files, key=lambda file: (file.header["parent"] is None, file.header["number"]))


def _unpack(data: memoryview, magic: bytes) -> Any:
    body, _ = split_frame(data, magic, version=_FORMAT)
    size = content_bytes(body)
    require(size <= _MAX_GROWTH * len(body) + _FREE_BYTES, "the header is too large")
    return decode_plain(decompress(body, size))


def _decode_chain(io: StoreIO, file: _File, by_id: dict[bytes, _File]) -> _Tensors:
    """Decode a version through its parents, which may be newer."""
    layers = [file]
    while (parent := layers[-1].header["parent"]) is not None:
        if parent[1] not in by_id or len(layers) > len(by_id):
            raise BrokenChain(f"the reference {parent[1].hex()} is missing", url=io.join(file.name))
        layers.append(by_id[parent[1]])
    decoded: _Tensors = {}
    for layer in reversed(layers):
        start = layer.start
        found = {}
        for entry in layer.header["tensors"]:
            path, stop = entry["path"], start + sum(entry["sizes"])
            payload = io.read(layer.name, start, stop)
            with damage_named("the payload is damaged", io.join(layer.name), path):
                require(crc32c(payload) == entry["payload_crc"], "it does not match its checksum")
                found[path] = _decode(entry, payload, decoded[path][0] if path in decoded else None)
            start = stop
        decoded = found
    return decoded


def _decode(entry: Any, payload: memoryview, base: Tensor | None) -> tuple[Tensor, Words]:
    """Decode the main part as format 2 does, then the words that differ from it."""
    first, second, _ = entry["sizes"]
    main, index, rest = payload[:first], payload[first : first + second], payload[first + second :]
    spec = TensorSpec(entry["dtype"], tuple(entry["shape"]))
    is_delta = entry["coder"] != "intra"
    tensor = decode_tensor(
        Entry(spec, entry["lattice"], is_delta, first, 0, 0, bytes(32)), main, base
    )
    count = entry["count"]
    require(8 * count <= _MAX_RATIO * len(payload), "too few bytes for the words")
    places = np.cumsum(decode_integers(index, count, np.uint32), dtype=np.int64) - 1
    if spec.word.itemsize > 1:
        changed = decode_integers(rest, count, spec.word)
    else:
        changed = np.frombuffer(decompress(rest, count), spec.word)
    words = tensor.restore().copy()
    if tensor.lattice is None:
        words[places] ^= changed
        tensor = dataclasses.replace(tensor, values=words)
    else:
        words[places] = changed
    return tensor, words


def _stored(header: Any, decoded: _Tensors) -> list[Tensor]:
    """Return the tensors in the form of format 2, after comparing them with the version's id."""
    tensors = []
    rows = []
    for entry in header["tensors"]:
        tensor, words = decoded[entry["path"]]
        digest = digest_of(words)
        rows.append([entry["path"], tensor.spec.dtype, tensor.spec.shape, digest])
        stored = store_words(words, tensor.spec, tensor.lattice)
        if stored.digest != digest:  # a value that the grid would round again
            stored = store_words(words, tensor.spec, None)
        tensors.append(stored)
    made = hashlib.sha256(encode([header["tree"], rows])).digest()
    require(made == header["id"], "the version restores to other content")
    return tensors


def _pack_node(packer: Packer, node: Any) -> None:
    """Append the tokens of a format-1 node; format 1 represented nodes as nested lists."""
    match node:
        case ["i", data]:
            packer.add_bytes(data, "i")
        case ["s", dtype, data]:
            packer.add_bytes(data, "g", dtype)
        case ["v", number, offset, shape, strides]:
            packer.tokens += ("v", number, offset, len(shape), *shape, *strides)
        case ["d" | "o" | "l" | "t" as kind, items, *metadata]:
            packer.tokens += (kind, len(items))
            inner = itertools.chain(*items) if kind in ("d", "o") else items
            for item in (*inner, *metadata):
                _pack_node(packer, item)
        case list():
            packer.tokens += node
        case _:
            packer.pack(node, (), None)
