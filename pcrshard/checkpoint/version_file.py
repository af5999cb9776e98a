"""Read and write version files: a typed header and the payloads of the tensors.

See docs/checkpoints-format.md, section 2.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

from .. import storage
from ..checksum import crc32c
from ..errors import CorruptCheckpoint
from .codec import Entry, Tensor, decode_tensor, encode_tensor
from .frame import (
    HEAD_BYTES,
    Digest,
    Metrics,
    Number,
    Record,
    check_time,
    damage_named,
    encode,
    header_bytes,
    pack_frame,
    require,
    unpack_frame,
)
from .typed_tree import Tree, TreeReader

T = TypeVar("T")
S = TypeVar("S")
MAGIC = b"\x89PCD\r\n\x1a\n"
# Called with the number of finished steps and the total.
Progress = Callable[[int, int], None]


def parallel_map(workers: int, work: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """Apply a function to all items in a thread pool; the coders release the GIL."""
    if workers <= 1:  # memory allocated by a new thread would not be reused
        return list(map(work, items))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, items))


def reported(items: Sequence[T], progress: Progress | None) -> Iterator[T]:
    """Yield items, and report progress after each one."""
    for done, item in enumerate(items, 1):
        yield item
        if progress is not None:
            progress(done, len(items))


class Header(Record, frozen=True):
    """The header of a version's file.

    Attributes:
        number: The version number in its store, from 1.
        id: SHA-256 of the tree and of the type, shape, and SHA-256 of each tensor.
        parent: Number of the version that deltas refer to; ``None`` for a keyframe.
        parent_id: The parent's id.
        metrics: Numbers and strings that the user recorded.
        saved: Time of saving, in seconds since 1970.
        tree: The state without its tensors.
        tensors: Metadata of the tensors, in the order of their payloads.
    """

    number: Number
    id: Digest
    parent: Number | None
    parent_id: Digest | None
    metrics: Metrics
    saved: float
    tree: Tree
    tensors: list[Entry]

    def __post_init__(self) -> None:
        check_time(self.saved)
        if content_id(self.tree, self.tensors) != self.id:
            raise ValueError("the header does not match its id")
        if self.parent is None and any(entry.is_delta for entry in self.tensors):
            raise ValueError("a version without a parent holds a delta")

    @property
    def raw_bytes(self) -> int:
        """Size of all restored tensors in bytes."""
        return sum(entry.spec.num_bytes for entry in self.tensors)


def content_id(tree: Tree, tensors: Iterable[Entry]) -> bytes:
    """Return the SHA-256 of a version's content, independent of its encoding."""
    rows = [[entry.spec, entry.digest] for entry in tensors]
    return hashlib.sha256(encode([tree, rows])).digest()


class VersionFile:
    """An open version file.

    Args:
        url: The file.
        header_size: Size of the header, if known; saves one request.
        options: fsspec storage options.
        max_bytes: Memory limit for the decoded header.

    Attributes:
        header: The decoded header.
        payload_start: Byte offset of the first payload.
        num_bytes: Expected size of the file.

    Raises:
        CorruptCheckpoint: The header is damaged.
        StorageError: The file cannot be read.
    """

    def __init__(
        self,
        url: str,
        header_size: int | None = None,
        options: storage.Options | None = None,
        max_bytes: int = 1 << 62,
    ) -> None:
        self.url = url
        self._options = options
        with damage_named("the header is damaged", url):
            if header_size is None:
                head = storage.read(url, 0, HEAD_BYTES, options=options)
                header_size = header_bytes(head.data, MAGIC)
            self.payload_start = HEAD_BYTES + header_size
            data = storage.read(url, 0, self.payload_start, options=options)
            self.header = unpack_frame(data.data, MAGIC, Header, max_bytes=max_bytes)
        self.num_bytes = self.payload_start + sum(e.num_bytes for e in self.header.tensors)

    @cached_property
    def tree(self) -> TreeReader:
        """The structure of the state."""
        with damage_named("the tree is damaged", self.url):
            tree = TreeReader(self.header.tree)
            tree.read()
            count = len(self.header.tensors)
            require(sorted(tree.names) == list(range(count)), f"expected a tree of {count} tensors")
        return tree

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Metadata of the tensors, by path."""
        return {self.tree.names[n]: entry for n, entry in enumerate(self.header.tensors)}

    def check_size(self) -> None:
        """Raise :class:`CorruptCheckpoint` unless the file ends exactly after its last payload."""
        size = storage.file_bytes(self.url, options=self._options)
        if size is not None and size != self.num_bytes:
            raise CorruptCheckpoint(f"expected {self.num_bytes} bytes, got {size}", url=self.url)

    def payloads(self, paths: Iterable[str] | None = None) -> Iterator[tuple[str, memoryview]]:
        """Yield the path and verified payload of tensors; read adjacent payloads in one request.

        Raises:
            CorruptCheckpoint: A payload does not match its checksum.
        """
        wanted = self.entries.keys() if paths is None else set(paths)
        run: list[str] = []
        start = stop = self.payload_start
        for path, entry in self.entries.items():
            if path in wanted:
                run.append(path)
            else:
                yield from self._run(run, start, stop)
                run, start = [], stop + entry.num_bytes
            stop += entry.num_bytes
        yield from self._run(run, start, stop)

    def _run(self, paths: list[str], start: int, stop: int) -> Iterator[tuple[str, memoryview]]:
        view = memoryview(b"")
        if start < stop and paths:
            view = storage.read(self.url, start, stop, options=self._options).data
        for path in paths:
            entry = self.entries[path]
            part, view = view[: entry.num_bytes], view[entry.num_bytes :]
            if crc32c(part) != entry.payload_crc:
                message = "the payload does not match its checksum"
                raise CorruptCheckpoint(message, url=self.url, key=path)
            yield path, part

    def decode(
        self, paths: Iterable[str], references: Mapping[str, Tensor], workers: int = 1
    ) -> dict[str, Tensor]:
        """Decode tensors, resolving deltas against ``references``.

        Raises:
            BrokenChain: A reference is missing or does not match.
            CorruptCheckpoint: A payload is damaged.
        """

        def work(item: tuple[str, memoryview]) -> tuple[str, Tensor]:
            path, payload = item
            with damage_named("the payload is damaged", self.url, path):
                return path, decode_tensor(self.entries[path], payload, references.get(path))

        return dict(parallel_map(workers, work, self.payloads(paths)))


class StoredTensor(NamedTuple):
    """A tensor to write.

    Attributes:
        tensor: The tensor.
        reference: The same tensor in the parent version, for a delta.
        digest: SHA-256 of the tensor's restored bytes.
    """

    tensor: Tensor
    reference: Tensor | None
    digest: bytes


def write_version(
    url: str,
    tensors: Sequence[StoredTensor],
    *,
    options: storage.Options | None = None,
    workers: int = 1,
    **fields: object,
) -> tuple[Header, int, int]:
    """Write a version file atomically.

    Args:
        url: The file.
        tensors: The tensors in the order of the tree.
        options: fsspec storage options.
        workers: Threads.
        **fields: Other fields of the header; the id is computed from the content.

    Returns:
        The header, its size, and the size of the file, in bytes.

    Raises:
        StorageError: The disk is full, or the storage rejected the write.
    """
    encoded = parallel_map(workers, lambda item: encode_tensor(*item), tensors)
    entries = [entry for entry, _ in encoded]
    identity = content_id(fields["tree"], entries)  # type: ignore[arg-type]
    header = Header(id=identity, tensors=entries, **fields)  # type: ignore[arg-type]
    head = pack_frame(MAGIC, header)
    # The local temporary file of an upload need not survive a power failure.
    with storage.atomic_write(url, options=options, durable=storage.is_local(url)) as file:
        file.write(head)
        for _, parts in encoded:
            file.writelines(parts)
    payload_bytes = sum(entry.num_bytes for entry in entries)
    return header, len(head) - HEAD_BYTES, len(head) + payload_bytes
