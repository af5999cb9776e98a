"""Version files: a typed header and the payloads of the tensors.

See docs/checkpoints-format.md, section 2.
"""

from __future__ import annotations

import collections
import concurrent.futures
import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from .. import storage
from ..checksum import crc32c
from ..errors import CorruptCheckpoint, VersionUnavailable
from .codec import Entry, Tensor, decode_tensor, digest_of
from .folder import Folder
from .frame import (
    HEAD_BYTES,
    MAX_HEADER_BYTES,
    Digest,
    damage_named,
    encode,
    know_types,
    require,
    unpack_frame,
)
from .manifest import Version, VersionRecord
from .tensors import tensor_from
from .typed_tree import Tree, TreeReader

T = TypeVar("T")
S = TypeVar("S")
MAGIC = b"\x89PCD\r\n\x1a\n"
# Called with the number of finished steps and the total.
Progress = Callable[[int, int], None]


def parallel_map(workers: int, work: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """Apply a function to items in a thread pool, a few ahead; the coders release the GIL."""
    if workers <= 1:  # memory allocated by a new thread would not be reused
        yield from map(work, items)
        return
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        ahead: collections.deque[concurrent.futures.Future[T]] = collections.deque()
        for item in items:
            ahead.append(pool.submit(work, item))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def reported(items: Sequence[T], progress: Progress | None) -> Iterator[T]:
    """Yield items, and report progress after each one."""
    for done, item in enumerate(items, 1):
        yield item
        if progress is not None:
            progress(done, len(items))


class Header(Version, frozen=True, kw_only=True):
    """The header of a version's file.

    Attributes:
        parent_id: The parent's id.
        tree: The state without its tensors.
        tensors: Metadata of the tensors, in the order of their payloads.
    """

    parent_id: Digest | None
    tree: Tree
    tensors: list[Entry]

    def __post_init__(self) -> None:
        if content_id(self.tree, self.tensors) != self.id:
            raise ValueError("the header does not match its id")
        if self.parent is None and any(entry.is_delta for entry in self.tensors):
            raise ValueError("a version without a parent holds a delta")

    def record(self, name: str, header_bytes: int) -> VersionRecord:
        """Return the manifest's record of the version in a file."""
        return VersionRecord(
            **{field: getattr(self, field) for field in Version.__struct_fields__},
            file=name,
            file_bytes=HEAD_BYTES + header_bytes + sum(e.num_bytes for e in self.tensors),
            header_bytes=header_bytes,
            raw_bytes=sum(entry.spec.num_bytes for entry in self.tensors),
        )


know_types(Header)


def content_id(tree: Tree, tensors: Iterable[Entry]) -> bytes:
    """Return the SHA-256 of a version's content, independent of its encoding."""
    rows = [[entry.spec, entry.digest] for entry in tensors]
    return hashlib.sha256(encode([tree, rows])).digest()


class VersionFile:
    """An open version file.

    Args:
        folder: The store.
        name: Name of the file.
        header_size: Size of the header, if known; saves one request.

    Attributes:
        url: The file.
        header: The decoded header.
        record: The manifest's record of the version.
        tree: The structure of the state.
        entries: Metadata of the tensors, by path.

    Raises:
        CorruptCheckpoint: The header or the tree is damaged.
        StorageError: The file cannot be read.
    """

    def __init__(self, folder: Folder, name: str, header_size: int | None = None) -> None:
        self.url = folder.join(name)
        self._folder = folder
        with damage_named("the header is damaged", self.url):
            if header_size is None:
                head = folder.read(name, 0, HEAD_BYTES)
                header_size = min(int.from_bytes(head[-8:], "little"), MAX_HEADER_BYTES)
            data = folder.read(name, 0, HEAD_BYTES + header_size)
            self.header, _ = unpack_frame(data, MAGIC, Header, folder.max_bytes)
            self.record = self.header.record(name, header_size)
            self.tree = TreeReader(self.header.tree)
            numbers = dict(enumerate(self.header.tensors))
            used = {number for _, number in self.tree.uses}
            is_complete = used == self.tree.names.keys() == numbers.keys()
            require(is_complete, "expected a tree of these tensors")
        self.entries = {self.tree.names[n]: entry for n, entry in numbers.items()}

    def check_size(self) -> None:
        """Raise :class:`CorruptCheckpoint` unless the file ends exactly after its last payload."""
        size = storage.file_bytes(self.url, options=self._folder.options)
        if size not in (None, self.record.file_bytes):
            message = f"expected {self.record.file_bytes} bytes, got {size}"
            raise CorruptCheckpoint(message, url=self.url)

    def _payloads(self, paths: Collection[str]) -> Iterator[tuple[str, memoryview]]:
        """Yield the path and payload of tensors; read adjacent payloads in one request."""
        start = HEAD_BYTES + self.record.header_bytes
        for is_wanted, group in itertools.groupby(self.entries, lambda path: path in paths):
            sizes = {path: self.entries[path].num_bytes for path in group}
            stop = start + sum(sizes.values())
            if is_wanted:
                data = self._folder.read(self.record.file, start, stop)
                for path, size in sizes.items():
                    yield path, data[:size]
                    data = data[size:]
            start = stop

    def decode(self, paths: Collection[str], references: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Decode tensors, resolving deltas against ``references``.

        Raises:
            BrokenChain: A reference is missing or does not match.
            CorruptCheckpoint: A payload is damaged.
        """

        def work(item: tuple[str, memoryview]) -> tuple[str, Tensor]:
            path, payload = item
            entry = self.entries[path]
            with damage_named("the payload is damaged", self.url, path):
                require(crc32c(payload) == entry.payload_crc, "it does not match its checksum")
                return path, decode_tensor(entry, payload, references.get(path))

        return dict(parallel_map(self._folder.workers, work, self._payloads(paths)))

    def paths(self, names: Collection[str] | None) -> set[str]:
        """Return the paths of the tensors in the named parts, or of all."""
        return {self.tree.names[number] for path, number in self.tree.uses if _is_in(path, names)}

    def restore(
        self,
        tensors: Mapping[str, Tensor],
        names: Collection[str] | None = None,
        map_location: Any = None,
    ) -> Any:
        """Restore the state, or the parts of it selected by ``names``; see :meth:`DeltaStore.load`.

        Args:
            tensors: The tensors at the :meth:`paths` of these names.
            names: Paths of parts, in a set or dict.
            map_location: The torch device for tensors.

        Raises:
            CorruptCheckpoint: A restored tensor does not match its digest.
            VersionUnavailable: There is no part of a name, or there are several.
        """

        def work(path: str) -> tuple[str, torch.Tensor]:
            with damage_named("the tensor cannot be restored", self.url, path):
                words = tensors[path].to_words()
                is_same = digest_of(words) == tensors[path].digest
                require(is_same, "the restored tensor does not match its digest")
            # Words of an exact tensor may be in read-only memory.
            writable = words if words.flags.writeable else words.copy()
            return path, tensor_from(writable, tensors[path].spec)

        restored = dict(parallel_map(self._folder.workers, work, tensors))
        moved = {name: tensor.to(map_location) for name, tensor in restored.items()}

        def tensor(path: str, number: int, tag: str, *view: Any) -> Any:
            if not _is_in(path, names):
                return None
            name = self.tree.names[number]
            value: Any = restored[name].numpy() if tag == "a" else moved[name]
            # torch rejects a view outside its tensor's memory.
            return value.as_strided(*view) if view else value

        with damage_named("the tree is damaged", self.url):
            state = self.tree.build(tensor, names or ())
        if names is None:
            return state
        for name, parts in self.tree.parts.items():
            if len(parts) != 1:
                message = f"expected one part of this name, found {len(parts)}"
                raise VersionUnavailable(message, url=self.url, key=name)
        return {name: parts[0] for name, parts in self.tree.parts.items()}


def _is_in(path: str, names: Collection[str] | None) -> bool:
    """Return whether a path is that of one of the named parts, or of something in it."""
    if names is None:
        return True
    above = itertools.accumulate(path.split("."), "{}.{}".format)
    return any(name in names for name in ("", *above))
