"""Version files: a typed header and the payloads of the tensors.

See docs/checkpoints-format.md, section 2.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from .. import storage
from ..checksum import crc32c
from ..errorbound import Words
from ..errors import CorruptCheckpoint
from .codec import Entry, Tensor, decode_tensor, digest_of, encode_tensor
from .frame import (
    HEAD_BYTES,
    Count,
    Digest,
    FileName,
    Metrics,
    Number,
    Record,
    Time,
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


class VersionRecord(Record, frozen=True):
    """One version of a store.

    Attributes:
        number: Version number, from 1, increasing and never reused.
        id: SHA-256 of the restored content.
        parent: Number of the version that this delta refers to; ``None`` for a keyframe.
        file: Name of the version's file in the store's folder.
        file_bytes: Size of the file.
        header_bytes: Size of the file's header.
        raw_bytes: Size of the restored tensors.
        metrics: Numbers and strings that the user recorded.
        saved: Time of saving, in seconds since 1970.
    """

    number: Number
    id: Digest
    parent: Number | None
    file: FileName
    file_bytes: Count
    header_bytes: Count
    raw_bytes: Count
    metrics: Metrics
    saved: Time


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
    saved: Time
    tree: Tree
    tensors: list[Entry]

    def __post_init__(self) -> None:
        if content_id(self.tree, self.tensors) != self.id:
            raise ValueError("the header does not match its id")
        if self.parent is None and any(entry.is_delta for entry in self.tensors):
            raise ValueError("a version without a parent holds a delta")

    def record(self, url: str, header_bytes: int) -> VersionRecord:
        """Return the record of the version in a manifest."""
        return VersionRecord(
            number=self.number,
            id=self.id,
            parent=self.parent,
            file=storage.file_name(url),
            file_bytes=HEAD_BYTES + header_bytes + sum(e.num_bytes for e in self.tensors),
            header_bytes=header_bytes,
            raw_bytes=sum(entry.spec.num_bytes for entry in self.tensors),
            metrics=self.metrics,
            saved=self.saved,
        )


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
        record: The record of the version in a manifest.

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
            data = storage.read(url, 0, HEAD_BYTES + header_size, options=options).data
            self.header, rest = unpack_frame(data, MAGIC, Header, max_bytes=max_bytes)
            require(not rest, f"expected a header of {header_size} bytes")
            self.record = self.header.record(url, header_size)

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
        if size not in (None, self.record.file_bytes):
            message = f"expected {self.record.file_bytes} bytes, got {size}"
            raise CorruptCheckpoint(message, url=self.url)

    def payloads(self, paths: Iterable[str]) -> Iterator[tuple[str, memoryview]]:
        """Yield the path and verified payload of tensors; read adjacent payloads in one request.

        Raises:
            CorruptCheckpoint: A payload does not match its checksum.
        """
        wanted = set(paths)
        start = HEAD_BYTES + self.record.header_bytes
        groups = itertools.groupby(self.entries.items(), lambda item: item[0] in wanted)
        for is_wanted, group in groups:
            run = list(group)
            stop = start + sum(entry.num_bytes for _, entry in run)
            view = memoryview(b"")
            if is_wanted and start < stop:
                view = storage.read(self.url, start, stop, options=self._options).data
            for path, entry in run if is_wanted else ():
                payload, view = view[: entry.num_bytes], view[entry.num_bytes :]
                if crc32c(payload) != entry.payload_crc:
                    message = "the payload does not match its checksum"
                    raise CorruptCheckpoint(message, url=self.url, key=path)
                yield path, payload
            start = stop

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

    def restore(self, tensors: Mapping[str, Tensor], workers: int = 1) -> dict[str, Words]:
        """Restore the words (N,) of tensors by path, and verify each against its digest.

        Raises:
            CorruptCheckpoint: A restored tensor does not match its digest.
        """

        def work(path: str) -> tuple[str, Words]:
            with damage_named("the tensor cannot be restored", self.url, path):
                words = tensors[path].restore()
                require(
                    digest_of(words) == tensors[path].digest,
                    "the restored tensor does not match its digest",
                )
            return path, words

        return dict(parallel_map(workers, work, tensors))


def write_version(
    url: str,
    tensors: Sequence[tuple[Tensor, Tensor | None]],
    *,
    options: storage.Options | None = None,
    workers: int = 1,
    tree: Tree,
    **fields: Any,
) -> VersionRecord:
    """Write a version file atomically.

    Args:
        url: The file.
        tensors: The tensors in the order of the tree, each with its reference in the parent.
        options: fsspec storage options.
        workers: Threads.
        tree: The state without its tensors.
        **fields: Other fields of the header; the id is computed from the content.

    Raises:
        StorageError: The disk is full, or the storage rejected the write.
    """
    encoded = parallel_map(workers, lambda pair: encode_tensor(*pair), tensors)
    entries = [entry for entry, _ in encoded]
    header = Header(id=content_id(tree, entries), tree=tree, tensors=entries, **fields)
    head = pack_frame(MAGIC, header)
    # The local temporary file of an upload need not survive a power failure.
    with storage.atomic_write(url, options=options, durable=storage.is_local(url)) as file:
        file.write(head)
        for _, parts in encoded:
            file.writelines(parts)
    return header.record(url, len(head) - HEAD_BYTES)
