"""One version as a file: its header, checked rule by rule, and its payloads.

See docs/checkpoints-format.md, section 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from .. import storage
from ..checksum import crc32c
from ..errorbound import lattice_from
from ..errors import CorruptCheckpoint, PCRError
from .file_frame import (
    HEAD_BYTES,
    MAX_RATIO,
    VERSION_FILE,
    header_bytes,
    pack_frame,
    pack_plain,
    require,
    unpack_frame,
)
from .tensor_codec import INTRA, SAME, SPARSE, Described, Encoded, Held, check_coder
from .tensors import spec_from

ID_BYTES = 32
_HEADER_KEYS = {"number", "id", "parent", "tree", "tensors", "metrics", "saved"}
_ENTRY_KEYS = {
    "path", "dtype", "shape", "lattice", "coder", "count", "sizes", "payload_crc", "content_crc",
}  # fmt: skip
_MAX_PATH = 4096


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One tensor of a version file.

    Attributes:
        path: Its keys in the state, joined by dots.
        described: Type, shape, coder and sizes.
        payload_crc: CRC-32C of its payload.
        content_crc: CRC-32C of the restored tensor's bytes.
        start: Where its payload starts, in bytes after the header.
    """

    path: str
    described: Described
    payload_crc: int
    content_crc: int
    start: int = 0

    @property
    def stop(self) -> int:
        """Where its payload ends."""
        return self.start + sum(self.described.sizes)

    def pack(self) -> dict[str, Any]:
        """Plain values for the header."""
        lattice = self.described.lattice
        return {
            "path": self.path,
            "dtype": self.described.spec.dtype,
            "shape": list(self.described.spec.shape),
            "lattice": None if lattice is None else [lattice.kind, lattice.numbers()],
            "coder": self.described.coder,
            "count": self.described.count,
            "sizes": list(self.described.sizes),
            "payload_crc": self.payload_crc,
            "content_crc": self.content_crc,
        }


@dataclasses.dataclass(frozen=True)
class VersionHeader:
    """What a version file says before its payloads.

    Attributes:
        number: The version's number in its store, from 1.
        id: SHA-256 of the restored content; see :func:`content_id`.
        parent: Number and id of the version that deltas refer to.
        tree: The state without its tensors; see :mod:`.typed_tree`.
        tensors: In the order of their payloads.
        metrics: What the user noted.
        saved: Seconds since 1970.
    """

    number: int
    id: bytes
    parent: tuple[int, bytes] | None
    tree: Any
    tensors: tuple[TensorEntry, ...]
    metrics: dict[str, Any]
    saved: float

    def pack(self) -> bytes:
        """The file's bytes up to the payloads."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["parent"] = None if self.parent is None else list(self.parent)
        fields["tensors"] = [entry.pack() for entry in self.tensors]
        return pack_frame(VERSION_FILE, fields)

    def payload_bytes(self) -> int:
        """Bytes of all payloads."""
        return self.tensors[-1].stop if self.tensors else 0


def content_id(tree: Any, digests: Sequence[tuple[str, Held, bytes]]) -> bytes:
    """SHA-256 of a version's content: the tree, and path, type, shape and digest of each tensor.

    Args:
        tree: Of :func:`.typed_tree.flatten`.
        digests: Path, tensor, and SHA-256 of its restored bytes, in the order of the leaves.
    """
    tensors = [
        [path, held.spec.dtype, list(held.spec.shape), digest] for path, held, digest in digests
    ]
    return hashlib.sha256(pack_plain([tree, tensors])).digest()


def describe(
    path: str,
    held: Held,
    encoded: Encoded,
    content_crc: int,
) -> TensorEntry:
    """The entry of an encoded tensor; its place comes with the others."""
    first, second, third = (len(part) for part in encoded.parts)
    checksum = crc32c(b"".join(encoded.parts))
    sizes = (first, second, third)
    described = Described(
        held.spec,
        held.lattice,
        encoded.coder,
        encoded.count,
        sizes,
    )
    return TensorEntry(path, described, checksum, content_crc)


def parse_header(raw: dict[str, Any]) -> VersionHeader:
    """The header of plain values, possibly hostile.

    Raises:
        CorruptCheckpoint: A rule of the format is broken.
    """
    _check_fields(raw)
    parent = _parse_parent(raw["parent"])
    entries = _parse_entries(raw["tensors"])
    alone = all(entry.described.coder == INTRA for entry in entries)
    require(parent is not None or alone, "a version without a parent holds a delta")
    return VersionHeader(**{**raw, "parent": parent, "tensors": entries})


def _check_fields(raw: dict[str, Any]) -> None:
    require(raw.keys() == _HEADER_KEYS, f"expected the keys {sorted(_HEADER_KEYS)}")
    require(_is_count(raw["number"]) and raw["number"] > 0, "expected a version's number")
    require(_is_id(raw["id"]), "expected the id of a version")
    require(isinstance(raw["metrics"], dict), "expected a map of metrics")
    require(type(raw["saved"]) is float, "expected the time of saving")
    require(isinstance(raw["tensors"], list), "expected a list of tensors")


def _parse_entries(items: list[Any]) -> tuple[TensorEntry, ...]:
    entries: list[TensorEntry] = []
    start = 0
    for item in items:
        entries.append(_parse_entry(item, start))
        start = entries[-1].stop
    paths = {entry.path for entry in entries}
    require(len(paths) == len(entries), "expected distinct paths of tensors")
    return tuple(entries)


def _parse_parent(raw: Any) -> tuple[int, bytes] | None:
    if raw is None:
        return None
    require(isinstance(raw, list) and len(raw) == 2, "expected number and id of the parent")
    require(_is_count(raw[0]) and _is_id(raw[1]), "expected number and id of the parent")
    return raw[0], raw[1]


def _parse_entry(raw: Any, start: int) -> TensorEntry:
    require(isinstance(raw, dict) and raw.keys() == _ENTRY_KEYS, "expected a tensor's entry")
    path = raw["path"]
    require(isinstance(path, str) and len(path) <= _MAX_PATH, "expected a tensor's path")
    checksums = (raw["payload_crc"], raw["content_crc"])
    known = all(_is_count(checksum) and checksum < 1 << 32 for checksum in checksums)
    require(known, f"{path}: expected two checksums")
    described = _parse_described(raw, path)
    _check_ratio(described, path)
    return TensorEntry(path, described, *checksums, start)


def _parse_described(raw: dict[str, Any], path: str) -> Described:
    spec = spec_from(raw["dtype"], raw["shape"])
    lattice = None
    if raw["lattice"] is not None:
        pair = raw["lattice"]
        require(isinstance(pair, list) and len(pair) == 2, f"{path}: expected a lattice")
        require(spec.dtype in ("float16", "bfloat16", "float32", "float64"), f"{path}: lattice")
        lattice = lattice_from(*pair)
    sizes = raw["sizes"]
    require(isinstance(sizes, list) and len(sizes) == 3, f"{path}: expected three sizes")
    require(all(_is_count(size) for size in sizes), f"{path}: expected three sizes")
    require(_is_count(raw["count"]), f"{path}: expected a count")
    coder = check_coder(raw["coder"], lattice)
    return Described(
        spec,
        lattice,
        coder,
        raw["count"],
        (sizes[0], sizes[1], sizes[2]),
    )


def _check_ratio(described: Described, path: str) -> None:
    """Refuse an entry that promises more than its bytes can hold, before memory is taken."""
    main, index, words = described.sizes
    if described.coder in (SAME, SPARSE):
        require(main == 0, f"{path}: expected no main part, got {main} bytes")
    else:
        content = described.spec.num_bytes
        require(content <= MAX_RATIO * main, f"{path}: {main} bytes cannot hold {content}")
    count = described.count
    require(count <= described.spec.num_words, f"{path}: more escapes than values: {count}")
    require(8 * count <= MAX_RATIO * min(index, words), f"{path}: too few bytes for {count}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_id(value: Any) -> bool:
    return isinstance(value, bytes) and len(value) == ID_BYTES


@contextlib.contextmanager
def named(url: str | None, key: str | None = None) -> Iterator[None]:
    """Give an error of ours that names no file its file, and its tensor."""
    try:
        yield
    except PCRError as error:
        if " (file=" in str(error) or (url is None and key is None):
            raise
        raise type(error)(str(error), url=url, key=key) from error.__cause__


class VersionFile:
    """A version file that is read.

    Args:
        url: The file.
        header_size: Bytes of the packed header if they are known, which saves one request.
        options: fsspec storage options.

    Raises:
        CorruptCheckpoint: The header is damaged.
        StorageError: It cannot be read.
    """

    def __init__(
        self,
        url: str,
        header_size: int | None = None,
        options: storage.Options | None = None,
    ) -> None:
        self.url = url
        self._options = options
        with named(url):
            if header_size is None:
                with storage.open_range(url, 0, HEAD_BYTES, options=options) as head:
                    header_size = header_bytes(head, VERSION_FILE)
            self.payload_start = HEAD_BYTES + header_size
            with storage.open_range(url, 0, self.payload_start, options=options) as data:
                self.header = parse_header(unpack_frame(data, VERSION_FILE))

    @property
    def parent_id(self) -> bytes | None:
        """Id of the version that deltas refer to; ``None`` for a keyframe."""
        return None if self.header.parent is None else self.header.parent[1]

    @property
    def num_bytes(self) -> int:
        """Bytes that the file must have."""
        return self.payload_start + self.header.payload_bytes()

    def check_size(self) -> None:
        """Raise :class:`CorruptCheckpoint` unless the file ends where its last payload ends."""
        size = storage.file_bytes(self.url, options=self._options)
        if size is not None and size != self.num_bytes:
            raise CorruptCheckpoint(f"expected {self.num_bytes} bytes, got {size}", url=self.url)

    def payloads(self, entries: Sequence[TensorEntry]) -> Iterator[tuple[TensorEntry, memoryview]]:
        """Each entry with its checked payload, which is valid until the next one.

        Entries that lie side by side are read in one request.

        Raises:
            CorruptCheckpoint: A payload does not match its checksum.
        """
        for run in _runs(entries):
            start = self.payload_start + run[0].start
            stop = self.payload_start + run[-1].stop
            if start == stop:
                yield from ((entry, memoryview(b"")) for entry in run)
                continue
            with storage.open_range(self.url, start, stop, options=self._options) as view:
                for entry in run:
                    part = view[entry.start - run[0].start : entry.stop - run[0].start]
                    if crc32c(part) != entry.payload_crc:
                        message = "the payload does not match its checksum"
                        raise CorruptCheckpoint(message, url=self.url, key=entry.path)
                    yield entry, part


def _runs(entries: Sequence[TensorEntry]) -> Iterator[list[TensorEntry]]:
    run: list[TensorEntry] = []
    for entry in sorted(entries, key=lambda entry: entry.start):
        if run and entry.start != run[-1].stop:
            yield run
            run = []
        run.append(entry)
    if run:
        yield run
