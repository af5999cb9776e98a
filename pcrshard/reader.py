"""Read a shard: plan the prefix (pure), read it in one request, ungroup it into samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from . import storage
from .errors import CorruptIndex, CorruptPiece, NotAShard, PCRError
from .index import (
    BLOCK,
    DATASET_INDEX,
    FULL,
    HEAD_STOP,
    DatasetIndex,
    Head,
    Scan,
    ShardEntry,
    ShardIndex,
    check_scan,
    crc32c,
    decode_head,
    decode_index,
)
from .jpeg import join_pieces

Sample = dict[str, Any]


class Shard:
    """One shard, read at any scan.

    Nothing is read until it is needed. The index is kept; pieces are not.

    Args:
        url: Local path or any fsspec URL.
        entry: The shard's entry in the dataset index; with it a prefix is one request, without it two.
        check: Whether to compare each piece with its CRC-32C.
        storage_options: fsspec storage options.
    """

    def __init__(
        self,
        url: str,
        *,
        entry: ShardEntry | None = None,
        check: bool = True,
        storage_options: storage.Options | None = None,
    ) -> None:
        self.url = url
        self.entry = entry
        self.check = check
        self._options = storage_options

    def __repr__(self) -> str:
        return f"Shard({self.url!r})"

    @functools.cached_property
    def head(self) -> Head:
        """The head; one request of 1024 bytes."""
        with storage.open_range(self.url, 0, HEAD_STOP, options=self._options) as view:
            return self._decode_head(view)

    @functools.cached_property
    def index(self) -> ShardIndex:
        """The index; one request beside that for the head."""
        stop = HEAD_STOP + self.head.body_bytes
        with storage.open_range(self.url, HEAD_STOP, stop, options=self._options) as view:
            return decode_index(self.head, view, url=self.url)

    @property
    def num_samples(self) -> int:
        """Samples in the shard."""
        return self.entry.num_samples if self.entry else self.head.num_samples

    @property
    def num_groups(self) -> int:
        """Scan groups N: the highest scan."""
        return len(self.entry.prefix_stops) - 1 if self.entry else self.head.num_groups

    def prefix_stop(self, scan: Scan) -> int:
        """Bytes that a read at this scan moves.

        Raises:
            ScanUnavailable: The scan is not in 1..N.
        """
        return self.entry.prefix_stop(scan) if self.entry else self.head.prefix_stop(scan)

    def samples(
        self,
        scan: Scan = FULL,
        *,
        select: Callable[[str, str], bool] | None = None,
        on_error: Callable[[PCRError], bool] | None = None,
    ) -> Iterator[Sample]:
        """Read the prefix of a scan and yield its samples in order.

        Exactly ``[0, prefix_stop(scan))`` is read, in one request with a dataset index, in two without.

        Args:
            scan: 1..N; ``"full"`` also restores metadata.
            select: Called with (key, field); False leaves the field out.
            on_error: Called with the error of a damaged sample; True goes on with the next sample. By default it is raised.

        Yields:
            ``__key__``, image fields as complete JPEGs, other fields as stored, all bytes.

        Raises:
            ScanUnavailable, NotAShard, UnsupportedVersion, CorruptIndex, TruncatedShard, StorageError: The shard cannot be read.
            CorruptPiece: A sample is damaged; names its key and scan.
        """
        stop = self.prefix_stop(scan)
        start = 0 if self.entry else HEAD_STOP
        with storage.open_range(self.url, start, stop, options=self._options) as view:
            if self.entry:
                self.__dict__["head"] = self._decode_head(view[:HEAD_STOP])
            body = view[HEAD_STOP - start :][: self.head.body_bytes]
            if "index" not in self.__dict__:
                self.__dict__["index"] = decode_index(self.head, body, url=self.url)
            yield from _Prefix(self, view, start, scan).samples(select, on_error)

    def _decode_head(self, view: memoryview) -> Head:
        if bytes(view[257:262]) != b"ustar":
            raise NotAShard("expected a PCR shard, got something that is not a tar", url=self.url)
        head = decode_head(view[BLOCK:HEAD_STOP], url=self.url)
        crc = int.from_bytes(view[BLOCK + 8 : BLOCK + 12], "little")
        if self.entry and (crc != self.entry.head_crc32c or head.prefix_stops != self.entry.prefix_stops):
            raise CorruptIndex(
                f"the shard is not the one that {DATASET_INDEX} describes: it was replaced, or the index is old", url=self.url
            )
        return head


class _Piece(NamedTuple):
    start: int
    size: int
    crc: int


class _Prefix:
    """The bytes of a prefix in memory, and where the pieces are in them."""

    def __init__(self, shard: Shard, view: memoryview, base: int, scan: Scan) -> None:
        index = shard.index
        rows = check_scan(scan, index.num_groups)
        self.shard, self.view, self.base, self.index = shard, view, base, index
        self.full = scan == FULL
        # Plain lists, piece by piece: indexing numpy arrays one element at a time costs more than the checksums.
        units = (index.starts(scan) - base, index.sizes[:rows], index.crcs[:rows])
        self.starts, self.sizes, self.crcs = (a.reshape(rows, -1).T.tolist() for a in units)

    def samples(self, select: Callable[[str, str], bool] | None, on_error: Callable[[PCRError], bool] | None) -> Iterator[Sample]:
        streams = [field for field, _ in self.index.schema.streams]
        fields = self.index.fields
        for s, key in enumerate(self.index.keys):
            sample: Sample = {"__key__": key}
            try:
                for m, field in enumerate(streams):
                    unit = s * len(streams) + m
                    if self.sizes[unit][0] and (select is None or select(key, field)):
                        sample[field] = self._jpeg(unit, key)
            except PCRError as error:
                if on_error is None or not on_error(error):
                    raise
                continue
            for field, values in fields.items():
                value = values[s]
                if value is not None and (select is None or select(key, field)):
                    sample[field] = value
            yield sample

    def _jpeg(self, unit: int, key: str) -> bytes:
        view, check = self.view, self.shard.check
        parts: list[bytes | memoryview] = []
        for start, size, crc in zip(self.starts[unit], self.sizes[unit], self.crcs[unit], strict=True):
            if not size:
                parts.append(b"")
                continue
            part = view[start : start + size]
            if check and crc32c(part) != crc:
                self._refuse(len(parts) + 1, start, crc, part, key)
            parts.append(part)
        tail = bytes(parts.pop()) if self.full else b""
        return join_pieces(parts, tail)

    def _refuse(self, row: int, start: int, crc: int, part: memoryview, key: str) -> None:
        raise CorruptPiece(
            f"expected CRC-32C {crc:08x}, got {crc32c(part):08x} for {len(part)} bytes",
            url=self.shard.url,
            key=key,
            scan="tail" if row > self.index.num_groups else row,
            offset=start + self.base,
        )


def open_dataset(url: str, *, storage_options: storage.Options | None = None) -> tuple[DatasetIndex, list[str]]:
    """Read a dataset index.

    Args:
        url: The folder, or its ``pcr.json``.
        storage_options: fsspec storage options.

    Returns:
        The index, and the URL of each shard in its order. One request.
    """
    folder = url.removesuffix(DATASET_INDEX).rstrip("/") or "."
    path = storage.join(folder, DATASET_INDEX)
    index = DatasetIndex.decode(storage.read_bytes(path, options=storage_options), url=path)
    return index, [storage.join(folder, shard.name) for shard in index.shards]
