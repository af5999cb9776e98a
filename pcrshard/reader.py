"""Read a shard: plan the prefix (pure), read it in one request, ungroup it into samples."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from . import storage
from .dataset_index import DATASET_INDEX, DatasetIndex, ShardEntry
from .errors import CorruptIndex, CorruptPiece, NotAShard, PCRError, ScanUnavailable
from .index import BLOCK, FULL, HEAD_STOP, Head, Scan, ShardIndex, check_scan, crc32c, decode_head, decode_index
from .jpeg import join_pieces
from .markers import EOI

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
        try:
            return self.entry.prefix_stop(scan) if self.entry else self.head.prefix_stop(scan)
        except ScanUnavailable as error:
            raise ScanUnavailable(str(error), url=self.url) from error

    def samples(
        self,
        scan: Scan = FULL,
        *,
        select: Callable[[str, str], bool] | None = None,
        on_error: Callable[[PCRError], bool] | None = None,
        decode: Callable[[list[memoryview]], Any] | None = None,
    ) -> Iterator[Sample]:
        """Read the prefix of a scan and yield its samples in order.

        Exactly ``[0, prefix_stop(scan))`` is read, in one request with a dataset index, in two without.

        Args:
            scan: 1..N; ``"full"`` also restores metadata.
            select: Called with (key, field); False leaves the field out.
            on_error: Called with the error of a damaged sample; True goes on with the next sample. By default it is raised.

            decode: Called with the pieces of an image, which are valid only during the call; its result takes the place of the bytes.
                ``functools.partial(ImageDecoder(224, "random"), rng=rng)`` decodes without joining them.

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
            self.__dict__["index"] = decode_index(self.head, body, url=self.url)
            yield from _Prefix(self, view, start, scan, decode).samples(select, on_error)

    def _decode_head(self, view: memoryview) -> Head:
        if bytes(view[257:262]) != b"ustar":
            raise NotAShard("expected a PCR shard, got something that is not a tar", url=self.url)
        head = decode_head(view[BLOCK:HEAD_STOP], url=self.url)
        crc = int.from_bytes(view[BLOCK + 8 : BLOCK + 12], "little")
        known = self.entry
        if known and (crc, head.num_samples, head.prefix_stops) != (known.head_crc32c, known.num_samples, known.prefix_stops):
            raise CorruptIndex(
                f"the shard is not the one that {DATASET_INDEX} describes: it was replaced, or the index is old", url=self.url
            )
        return head


class _Prefix:
    """The bytes of a prefix in memory, and where the pieces are in them."""

    def __init__(
        self, shard: Shard, view: memoryview, base: int, scan: Scan, decode: Callable[[list[memoryview]], Any] | None
    ) -> None:
        index = shard.index
        rows = check_scan(scan, index.num_groups)
        self.shard, self.view, self.base, self.index = shard, view, base, index
        self.decode = decode
        self.num_scans = min(rows, index.num_groups)
        starts = index.starts(scan) - base
        # Plain lists, sample by sample: indexing numpy arrays one element at a time costs more than the checksums.
        self.starts = starts.reshape(rows, -1).T.tolist()
        self.stops = (starts + index.sizes[:rows]).reshape(rows, -1).T.tolist()
        self.crcs = index.crcs[self.num_scans - 1].ravel().tolist()

    def samples(self, select: Callable[[str, str], bool] | None, on_error: Callable[[PCRError], bool] | None) -> Iterator[Sample]:
        streams = [field for field, _ in self.index.schema.streams]
        fields = self.index.fields.items()
        for s, key in enumerate(self.index.keys):
            sample: Sample = {"__key__": key}
            try:
                for m, field in enumerate(streams):
                    unit = s * len(streams) + m
                    if self.starts[unit][0] < self.stops[unit][0] and (select is None or select(key, field)):
                        sample[field] = self._decoded(unit, key) if self.decode else self._jpeg(unit, key)
            except PCRError as error:
                if on_error is None or not on_error(error):
                    raise
                continue
            for field, values in fields:
                value = values[s]
                if value is not None and (select is None or select(key, field)):
                    sample[field] = value
            yield sample

    def _decoded(self, unit: int, key: str) -> Any:
        """The result of the caller's decoder on the scattered pieces."""
        ranges = zip(self.starts[unit], self.stops[unit], strict=True)
        pieces = [self.view[a:b] for a, b in itertools.islice(ranges, self.num_scans)]
        if self.shard.check and functools.reduce(lambda crc, piece: crc32c(piece, crc), pieces, 0) != self.crcs[unit]:
            self._refuse(unit, key)
        try:
            return self.decode(pieces) if self.decode else None
        except PCRError as error:
            raise type(error)(str(error), url=self.shard.url, key=key) from error

    def _jpeg(self, unit: int, key: str) -> bytes:
        view, scans = self.view, self.num_scans
        pieces: list[memoryview | bytes] = [view[a:b] for a, b in zip(self.starts[unit], self.stops[unit], strict=True)]
        tail = bytes(pieces.pop()) if len(pieces) > scans else b""
        pieces.append(EOI)
        jpeg = b"".join(pieces)
        # Checked after the join, when the bytes are in the processor's cache, and once for all scans; EOI runs on from the checksum.
        if self.shard.check and crc32c(jpeg) != crc32c(EOI, self.crcs[unit]):
            self._refuse(unit, key)
        if not tail:
            return jpeg
        if self.shard.check and crc32c(tail) != self.index.crcs[-1].flat[unit]:
            self._refuse(unit, key)
        return join_pieces(pieces[:-1], tail)

    def _refuse(self, unit: int, key: str) -> None:
        """Name the first scan whose bytes are not those that were written."""
        pieces = [self.view[a:b] for a, b in zip(self.starts[unit], self.stops[unit], strict=True)]
        expected = [int(row.flat[unit]) for row in self.index.crcs]
        got = list(itertools.accumulate(pieces[: self.num_scans], lambda crc, piece: crc32c(piece, crc), initial=0))[1:]
        bad = next((i for i, crc in enumerate(got) if crc != expected[i]), None)
        row, crc = (bad, got[bad]) if bad is not None else (-1, crc32c(pieces[-1]))
        raise CorruptPiece(
            f"expected CRC-32C {expected[row]:08x}, got {crc:08x} for {len(pieces[row])} bytes",
            url=self.shard.url,
            key=key,
            scan="tail" if bad is None else bad + 1,
            offset=self.starts[unit][row] + self.base,
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
