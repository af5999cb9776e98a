"""Stores and releases of format 1, as written by pcrshard 0.x, into a store of this format."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import msgspec
import numpy as np

from .. import storage
from ..checksum import crc32c
from ..errorbound import (
    FLOAT_TYPES,
    Lattice,
    Words,
    content_bytes,
    decode_index,
    decode_integers,
    decode_planes,
    decode_words,
    decompress,
    lattice_from,
    restore,
)
from ..errorbound import Quantized as LatticeCodes
from ..errors import BrokenChain, CorruptCheckpoint, StorageError, VersionUnavailable
from .codec import Exact, Quantized, Tensor, digest_of
from .frame import (
    HEAD_BYTES,
    Checksum,
    Count,
    Digest,
    Number,
    Record,
    Shape,
    damage_named,
    encode,
    header_bytes,
    require,
    unpack_body,
)
from .manifest import COPY_NAME, Manifest, StoreIO, VersionRecord
from .manifest import MAGIC as MANIFEST_MAGIC
from .patch import encode_patch
from .store import is_keyframe_due
from .tensors import TensorSpec
from .typed_tree import Tree, TreeReader
from .version_file import MAGIC as VERSION_MAGIC
from .version_file import Progress, StoredTensor, reported

_FORMAT = 1
_KEYFRAME_EVERY = 10
_MAX_RATIO = 1 << 17
# Content of a header by its compressed bytes, and what any header may have.
_MAX_GROWTH = 64
_FREE_BYTES = 1 << 16


class _Entry(Record, frozen=True):
    path: str
    dtype: str
    shape: Shape
    lattice: tuple[str, list[int | float]] | None
    coder: str
    count: Count
    sizes: tuple[Count, Count, Count]
    payload_crc: Checksum
    content_crc: Checksum

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.dtype, self.shape)


class _Header(Record, frozen=True):
    number: Number
    id: Digest
    parent: tuple[Number, Digest] | None
    tree: Any
    tensors: list[_Entry]
    metrics: dict[str, Any]
    saved: float


class _ManifestRow(msgspec.Struct):
    file: str


class _Manifest(msgspec.Struct):
    versions: list[_ManifestRow]


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A decoded tensor; places and words are those that are kept bit for bit."""

    lattice: Lattice | None
    values: Any
    places: Any
    words: Any


@dataclasses.dataclass(frozen=True)
class _File:
    url: str
    header: _Header
    start: int


def convert(
    source: str,
    target: str,
    *,
    options: storage.Options | None = None,
    progress: Progress | None = None,
) -> list[VersionRecord]:
    """Copy all versions of a format-1 store, or of a folder of releases, into a new store.

    Every version keeps its number and each bit of its content, which is compared with its id; the
    source stays as it is. Ids of format 2 are others.

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
    by_id = {file.header.id: file for file in files}
    numbered = {file.header.number: file for file in files}
    manifest = new.commit(Manifest(), Manifest())
    known: dict[bytes, dict[str, _Tensor]] = {}
    references: dict[str, Tensor] = {}
    for number in reported(sorted(numbered), progress):
        file = numbered[number]
        decoded = _decode_chain(file, by_id, known, options)
        with damage_named("the version is damaged", file.url):
            tensors, digests = _restored(file, decoded)
            tree = Tree([], [])
            _add_tokens(tree, file.header.tree)
            reader = TreeReader(tree)
            reader.read()
        paths = [reader.names[n] for n in range(len(tensors))]
        is_due = is_keyframe_due(manifest, _KEYFRAME_EVERY)
        stored = [
            StoredTensor(tensor, None if is_due else references.get(path), digest)
            for path, tensor, digest in zip(paths, tensors, digests, strict=True)
        ]
        metrics = file.header.metrics
        record = new.write(
            stored,
            None if is_due else manifest.versions[-1],
            number=number,
            tree=tree,
            metrics={key: _plain(value) for key, value in metrics.items()},
            saved=file.header.saved,
        )
        manifest = new.commit(manifest, manifest.with_versions((*manifest.versions, record)))
        references = dict(zip(paths, tensors, strict=True))
    return list(manifest.versions)


def _plain(value: Any) -> Any:
    return value if type(value) in (type(None), bool, int, float, str) else str(value)


def _files(io: StoreIO) -> list[_File]:
    """Open the files of format 1; keyframes last, so that they are preferred."""
    names = [name for name in io.list() if name.endswith((".pcd", ".pcp"))]
    url = io.join(COPY_NAME)
    try:
        data = storage.read_bytes(url, options=io.options)
    except StorageError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
    else:
        with damage_named("the manifest is damaged", url):
            named = {row.file for row in _unpack(data, MANIFEST_MAGIC, _Manifest).versions}
        names = [name for name in names if name in named]
    files = [_open(io.join(name), io.options) for name in names]
    return sorted(files, key=lambda file: (file.header.parent is None, file.header.number))


def _open(url: str, options: storage.Options | None) -> _File:
    with damage_named("the header is damaged", url):
        head = storage.read(url, 0, HEAD_BYTES, options=options).data
        start = HEAD_BYTES + header_bytes(head, VERSION_MAGIC, _FORMAT)
        data = storage.read(url, 0, start, options=options).data
        return _File(url, _unpack(data, VERSION_MAGIC, _Header), start)


def _unpack(data: bytes | memoryview, magic: bytes, kind: Any) -> Any:
    body = unpack_body(data, magic, version=_FORMAT)
    size = content_bytes(body)
    require(size <= _MAX_GROWTH * len(body) + _FREE_BYTES, "the header is too large")
    return msgspec.msgpack.decode(decompress(body, size), type=kind)


def _decode_chain(
    file: _File,
    by_id: dict[bytes, _File],
    known: dict[bytes, dict[str, _Tensor]],
    options: storage.Options | None,
) -> dict[str, _Tensor]:
    """Decode a version through its parents, which may be newer; the last one stays in memory."""
    layers = [file]
    while (parent := layers[-1].header.parent) is not None and parent[1] not in known:
        if parent[1] not in by_id or len(layers) > len(by_id):
            raise BrokenChain(f"the reference {parent[1].hex()} is missing", url=file.url)
        layers.append(by_id[parent[1]])
    tensors = {} if parent is None else known[parent[1]]
    for layer in reversed(layers):
        start = layer.start
        found = {}
        for entry in layer.header.tensors:
            stop = start + sum(entry.sizes)
            payload = storage.read(layer.url, start, stop, options=options).data
            with damage_named("the payload is damaged", layer.url, entry.path):
                require(crc32c(payload) == entry.payload_crc, "it does not match its checksum")
                found[entry.path] = _decode(entry, payload, tensors.get(entry.path))
            start = stop
        tensors = found
    known.clear()
    known[file.header.id] = tensors
    return tensors


def _decode(entry: _Entry, payload: memoryview, reference: _Tensor | None) -> _Tensor:
    first, second, _ = entry.sizes
    main, index = payload[:first], payload[first : first + second]
    spec, coder = entry.spec, entry.coder
    lattice = None if entry.lattice is None else lattice_from(*entry.lattice)
    whole = coder in ("intra", "delta")
    require(not whole or spec.num_bytes <= _MAX_RATIO * first, "too few bytes for the tensor")
    require(8 * entry.count <= _MAX_RATIO * len(payload), "too few bytes for the words")
    base: Any = None
    if coder != "intra":
        if reference is None or reference.lattice != lattice:
            raise BrokenChain("the reference has no such tensor")
        base = reference.values
        require(len(base) == spec.num_words, "the reference has another size")
    places = decode_index(index, entry.count, spec.num_words)
    words = decode_words(payload[first + second :], entry.count, spec.word)
    if lattice is not None:
        values = decode_integers(main, spec.num_words, np.int32) if whole else base
        return _Tensor(lattice, values + base if coder == "delta" else values, places, words)
    values = decode_planes(main, spec.num_words, spec.word) if whole else base.copy()
    if coder == "delta":
        values = values ^ base
    values[places] ^= words
    return _Tensor(None, values, places[:0], words[:0])


def _restored(file: _File, decoded: dict[str, _Tensor]) -> tuple[list[Tensor], list[bytes]]:
    """Return the tensors and the digests of their restored bytes, compared with the id."""
    tensors: list[Tensor] = []
    digests = []
    for entry in file.header.tensors:
        tensor, words = _renewed(entry.spec, decoded[entry.path])
        tensors.append(tensor)
        digests.append(digest_of(words))
    rows = [
        [entry.path, entry.dtype, entry.shape, digest]
        for entry, digest in zip(file.header.tensors, digests, strict=True)
    ]
    if hashlib.sha256(encode([file.header.tree, rows])).digest() != file.header.id:
        raise CorruptCheckpoint("the version restores to other content")
    return tensors, digests


def _renewed(spec: TensorSpec, old: _Tensor) -> tuple[Tensor, Words]:
    """Return a tensor in the form of this format, and the words that it restores to."""
    if old.lattice is None:
        return Exact(spec, old.values), old.values
    kind = FLOAT_TYPES[spec.dtype]
    words = restore(LatticeCodes(old.values, old.places, old.words), kind, old.lattice)
    bare = restore(LatticeCodes(old.values, old.places[:0], old.words[:0]), kind, old.lattice)
    escapes = encode_patch(words, bare)
    if escapes is None:
        return Exact(spec, words), words
    return Quantized(spec, old.lattice, old.values, escapes[1]), words


def _add_tokens(tree: Tree, node: Any) -> None:
    """Add the tokens of a node of format 1, whose nodes were lists in lists."""
    if type(node) is bytes:
        node = ["b", node]
    elif type(node) is str:
        tree.tokens.extend(("s", node))
        return
    if type(node) is not list:
        tree.tokens.append(node)
        return
    tag, content, *rest = node
    if tag in ("d", "o", "l", "t"):
        tree.tokens.extend((tag, len(content)))
        for item in content:
            for part in item if tag in ("d", "o") else [item]:
                _add_tokens(tree, part)
        for metadata in rest:
            _add_tokens(tree, metadata)
    elif tag == "v":
        offset, shape, strides = rest
        tree.tokens.extend(("v", content, offset, len(shape), *shape, *strides))
    elif tag in ("b", "i", "s"):
        *before, data = node[1:]
        tree.tokens.extend(("g" if tag == "s" else tag, *before, len(tree.blobs)))
        tree.blobs.append(data)
    else:
        tree.tokens.extend(node)
