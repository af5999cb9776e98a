"""One version as a file: a header, checked rule by rule, and payloads.

See docs/checkpoints-format.md, section 2.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from .. import storage
from ..checksum import crc32c
from ..errors import CorruptCheckpoint
from .codec import INTRA, Entry, Tensor, decode, encode, is_count, parse_entry
from .frame import (
    HEAD_BYTES,
    MAX_HEADER_BYTES,
    VERSION,
    VERSION_FILE,
    damage_named,
    header_bytes,
    pack_frame,
    pack_plain,
    require,
    unpack_frame,
)
from .tensors import TensorSpec

T = TypeVar("T")
S = TypeVar("S")
ID_BYTES = 32
# Called with the number of finished steps, and of all steps.
Progress = Callable[[int, int], None]
_KEYS = {"number", "id", "parent", "tree", "tensors", "metrics", "saved"}
_LATEST = 1 << 40  # seconds since 1970; more cannot be shown as a date


def parallel_map(
    workers: int, work: Callable[[S], T], items: Iterable[S], progress: Progress | None = None
) -> list[T]:
    """Apply a function to all items, in threads: the coders release the GIL."""
    waiting = list(items)
    results: list[T] = []
    with concurrent.futures.ThreadPoolExecutor(max(workers, 1)) as pool:
        for result in map(work, waiting) if workers <= 1 else pool.map(work, waiting):
            results.append(result)
            if progress is not None:
                progress(len(results), len(waiting))
    return results


def content_id(tree: Any, tensors: Iterable[tuple[str, TensorSpec, bytes]]) -> bytes:
    """SHA-256 of a version's content.

    Args:
        tree: The state without its tensors.
        tensors: Path, type and shape, and SHA-256 of the restored bytes of each tensor, in order.
    """
    rows = [[path, spec.dtype, list(spec.shape), digest] for path, spec, digest in tensors]
    return hashlib.sha256(pack_plain([tree, rows])).digest()


def check_metrics(metrics: Any) -> None:
    """Raise ``ValueError`` unless metrics are plain numbers and strings by name."""
    plain = (type(None), bool, int, float, str)
    if not isinstance(metrics, dict) or not all(
        type(name) is str and type(value) in plain for name, value in metrics.items()
    ):
        raise ValueError(f"expected plain numbers and strings as metrics, got {metrics!r}")
    try:
        pack_plain(metrics)
    except (OverflowError, UnicodeError) as error:
        raise ValueError(f"expected plain numbers and strings as metrics: {error}") from error


class VersionFile:
    """An open version file.

    Args:
        url: The file.
        header_size: Bytes of the packed header if known, which saves one request.
        options: fsspec storage options.
        version: The format version to expect.
        max_bytes: What the header may take in memory.

    Attributes:
        number: The version's number in its store, from 1.
        id: SHA-256 of the restored content.
        parent: Number and id of the version that deltas refer to; ``None`` for a keyframe.
        tree: The state without its tensors.
        entries: The tensors, in the order of their payloads.
        metrics: What the user noted.
        saved: Seconds since 1970.
        payload_start: Where the first payload starts, in bytes.

    Raises:
        CorruptCheckpoint: The header is damaged.
        StorageError: It cannot be read.
    """

    def __init__(
        self,
        url: str,
        header_size: int | None = None,
        options: storage.Options | None = None,
        version: int = VERSION,
        max_bytes: int = MAX_HEADER_BYTES,
    ) -> None:
        self.url = url
        self._options = options
        with damage_named("the header is damaged", url):
            if header_size is None:
                with storage.open_range(url, 0, HEAD_BYTES, options=options) as head:
                    header_size = header_bytes(head, VERSION_FILE, version)
            self.payload_start = HEAD_BYTES + header_size
            with storage.open_range(url, 0, self.payload_start, options=options) as data:
                raw = unpack_frame(data, VERSION_FILE, version=version, max_bytes=max_bytes)
            self._parse(raw, version)

    def _parse(self, raw: dict[str, Any], version: int) -> None:
        require(raw.keys() == _KEYS, f"expected the keys {sorted(_KEYS)}")
        self.number, self.id = raw["number"], raw["id"]
        self.metrics, self.saved, self.tree = raw["metrics"], raw["saved"], raw["tree"]
        # Format 1 allowed any plain values as metrics.
        noted = self.metrics if version == VERSION else {}
        require(isinstance(self.metrics, dict), "expected a map of metrics")
        check_identity(self.number, self.id, self.saved, noted)
        parent = raw["parent"]
        self.parent: tuple[int, bytes] | None = None
        if parent is not None:
            require(isinstance(parent, list) and len(parent) == 2, "expected the parent's number")
            check_identity(parent[0], parent[1], 0.0, {})
            self.parent = (parent[0], parent[1])
        require(isinstance(raw["tensors"], list), "expected a list of tensors")
        self.entries: list[Entry] = []
        for item in raw["tensors"]:
            self.entries.append(parse_entry(item, self.entries[-1].stop if self.entries else 0))
        paths = {entry.path for entry in self.entries}
        require(len(paths) == len(self.entries), "expected distinct paths of tensors")
        alone = all(entry.coder == INTRA for entry in self.entries)
        require(self.parent is not None or alone, "a version without a parent holds a delta")

    @property
    def raw_bytes(self) -> int:
        """Bytes of all tensors, restored."""
        return sum(entry.spec.num_bytes for entry in self.entries)

    @property
    def num_bytes(self) -> int:
        """Bytes that the file must have."""
        return self.payload_start + (self.entries[-1].stop if self.entries else 0)

    def check_size(self) -> None:
        """Raise :class:`CorruptCheckpoint` unless the file ends where its last payload ends."""
        size = storage.file_bytes(self.url, options=self._options)
        if size is not None and size != self.num_bytes:
            raise CorruptCheckpoint(f"expected {self.num_bytes} bytes, got {size}", url=self.url)

    def payloads(self, entries: Sequence[Entry]) -> Iterator[tuple[Entry, memoryview]]:
        """Yield each entry with its checked payload, which is valid until the next one.

        Adjacent payloads are read in one request.

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

    def decode(
        self,
        entries: Sequence[Entry],
        references: Mapping[str, Tensor],
        workers: int = 1,
    ) -> dict[str, Tensor]:
        """Decode tensors, whose deltas refer to ``references``.

        Raises:
            BrokenChain: A reference is missing, or does not fit.
            CorruptCheckpoint: A payload is damaged.
        """

        def work(item: tuple[Entry, Any]) -> tuple[str, Tensor]:
            entry, payload = item
            with damage_named("the payload is damaged", self.url, entry.path):
                return entry.path, decode(entry, payload, references.get(entry.path))

        pairs = self.payloads(entries)
        if workers <= 1:
            return dict(map(work, pairs))
        # The buffer of a payload is reused: threads get copies.
        copies = [(entry, memoryview(bytes(view))) for entry, view in pairs]
        return dict(parallel_map(workers, work, copies))


def check_identity(number: Any, version_id: Any, saved: Any, metrics: Any) -> None:
    """Check the fields that a version's file and its record share.

    Raises:
        CorruptCheckpoint: One is not what it should be.
    """
    require(is_count(number) and number > 0, "expected a version's number")
    require(type(version_id) is bytes and len(version_id) == ID_BYTES, "expected a version's id")
    require(type(saved) is float and 0 <= saved < _LATEST, "expected the time of saving")
    with damage_named("expected metrics"):
        check_metrics(metrics)


def _runs(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    run: list[Entry] = []
    for entry in sorted(entries, key=lambda entry: entry.start):
        if run and entry.start != run[-1].stop:
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


def write_version(
    url: str,
    header: dict[str, Any],
    tensors: Mapping[str, tuple[Tensor, int]],
    references: Mapping[str, Tensor],
    *,
    options: storage.Options | None = None,
    workers: int = 1,
) -> tuple[int, int]:
    """Write a version as a file that appears whole or not at all.

    Args:
        url: The file.
        header: Its header without the tensors.
        tensors: Each tensor with the CRC-32C of its restored bytes, by path.
        references: The parent's tensors by path; empty for a keyframe.
        options: fsspec storage options.
        workers: Threads.

    Returns:
        Bytes of the packed header, and of the file.

    Raises:
        StorageError: The disk is full, or the store refuses.
    """

    def work(item: tuple[str, tuple[Tensor, int]]) -> tuple[Entry, list[bytes]]:
        path, (tensor, checksum) = item
        return encode(path, tensor, references.get(path), checksum)

    encoded = parallel_map(workers, work, tensors.items())
    head = pack_frame(VERSION_FILE, header | {"tensors": [entry.pack() for entry, _ in encoded]})
    # The local temporary file of an upload need not survive a power cut.
    with storage.atomic_write(url, options=options, durable=storage.is_local(url)) as file:
        file.write(head)
        for _, parts in encoded:
            file.writelines(parts)
    payload_bytes = sum(sum(entry.sizes) for entry, _ in encoded)
    return len(head) - HEAD_BYTES, len(head) + payload_bytes
