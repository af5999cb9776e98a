"""A prefix in memory: ungroup it into samples, each compared with its checksum."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, Self

import numpy as np

from .. import native
from ..checksum import crc32c
from ..errors import CorruptJpeg, CorruptPiece, PCRError, ScanUnavailable
from ..format.scan import Scan, check_scan
from ..format.shard_index import U32, ShardIndex
from ..jpeg.markers import EOI
from ..jpeg.split import join_pieces

Sample = dict[str, Any]
Select = Callable[[str, str], bool]
OnError = Callable[[PCRError], bool]
Decode = Callable[[list[memoryview]], Any]


class Source(Protocol):
    """What a prefix was read from: a :class:`Shard`."""

    url: str
    check: bool

    @property
    def index(self) -> ShardIndex:
        """Where everything is."""

    def change_scan(self, prefix: Prefix, scan: Scan) -> Prefix:
        """The prefix of another scan."""


class Prefix:
    """The bytes of a prefix in memory, and where the pieces are in them; from :meth:`Shard.load`.

    Attributes:
        index: The shard's index.
        scan: What was loaded.
        num_bytes: What is held in memory until :meth:`close`.
        check: Whether a sample is compared with its checksum when it is used: not after :meth:`is_sound` said yes.
    """

    def __init__(
        self,
        shard: Source,
        view: memoryview,
        base: int,
        scan: Scan,
        resources: contextlib.ExitStack,
        *,
        check: bool | None = None,
    ) -> None:
        index = shard.index
        rows = check_scan(scan, index.num_groups)
        self.shard, self.view, self.base, self.index = shard, view, base, index
        self.scan, self.resources = scan, resources
        self._lower: dict[Scan, Prefix] = {}
        self.num_bytes, self.close = len(view), resources.close
        self.check = shard.check if check is None else check
        self.streams = tuple(field for field, _ in index.schema.streams)
        self.num_scans = min(rows, index.num_groups)
        # A missing stream of the preview layout starts at 0, which may lie before what was read.
        self._starts = np.maximum(index.starts(scan) - base, 0).reshape(rows, -1).T
        self._sizes = index.sizes[:rows].reshape(rows, -1).T
        self._crcs = index.crcs[self.num_scans - 1].ravel()

    # Plain lists, sample by sample: indexing numpy arrays one element at a time costs more than the checksums.
    @functools.cached_property
    def starts(self) -> list[list[int]]:
        """Where the pieces of each image begin in the view."""
        found: list[list[int]] = self._starts.tolist()
        return found

    @functools.cached_property
    def stops(self) -> list[list[int]]:
        """Where they end."""
        found: list[list[int]] = (self._starts + self._sizes).tolist()
        return found

    @functools.cached_property
    def crcs(self) -> list[int]:
        """CRC-32C of the scans of each image."""
        found: list[int] = self._crcs.tolist()
        return found

    @functools.cached_property
    def table(self) -> native.Table:
        """Where the scans of each image are in memory, for the native core; valid until :meth:`close`."""
        return native.piece_table(
            self.view, self._starts[:, : self.num_scans], self._sizes[:, : self.num_scans]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def at(self, scan: Scan) -> Prefix:
        """The same bytes at this or a lower scan; valid as long as this prefix is not closed.

        Raises:
            ScanUnavailable: The scan is higher.
        """
        if scan == self.scan:
            return self
        if self.index.head.prefix_stop(scan) > self.base + len(self.view):
            raise ScanUnavailable(
                f"asked for scan {scan} of a prefix of scan {self.scan}", url=self.shard.url
            )
        if scan not in self._lower:
            self._lower[scan] = Prefix(
                self.shard,
                self.view,
                self.base,
                scan,
                contextlib.ExitStack(),
                check=self.checks_at(scan),
            )
        return self._lower[scan]

    def checks_at(self, scan: Scan) -> bool:
        """Whether samples of these bytes at another scan have to be checked: what was found sound is so at lower scans, not at higher ones."""
        head = self.index.head
        return (
            self.check
            if head.prefix_stop(scan) <= head.prefix_stop(self.scan)
            else self.shard.check
        )

    def is_sound(self) -> bool:
        """Whether every piece has its checksum; those that were found sound are not checked again."""
        n = self.num_scans
        sound = self._have_crcs(slice(0, n), self._crcs) and self._have_crcs(
            slice(n, None), self.index.crcs[-1].ravel()
        )
        if sound:
            self.check = False
        return sound

    def _have_crcs(self, rows: slice, crcs: U32) -> bool:
        """Whether these pieces of each image, if there are any, together have its checksum."""
        if not self._starts[:, rows].size:
            return True
        if native.available:
            return native.all_sound(
                native.piece_table(self.view, self._starts[:, rows], self._sizes[:, rows]), crcs
            )
        return all(
            functools.reduce(_extend_crc, self.pieces(unit)[rows], 0) == crc
            for unit, crc in enumerate(crcs.tolist())
        )

    def samples(
        self,
        rows: Iterable[int] | None = None,
        *,
        select: Select | None = None,
        on_error: OnError | None = None,
        decode: Decode | None = None,
    ) -> Iterator[Sample]:
        """The samples of the shard.

        Args:
            rows: Which, and in which order; all in order by default.
            select: Called with (key, field); False leaves the field out.
            on_error: Called with the error of a damaged sample; True goes on with the next sample. By default it is raised.
            decode: Called with the pieces of an image, which are valid only during the call; its result takes the place of the bytes.
                ``functools.partial(ImageDecoder(224, "random"), rng=rng)`` decodes without joining them.

        Yields:
            ``__key__``, image fields as complete JPEGs, other fields as stored, all bytes.

        Raises:
            CorruptPiece: A sample is damaged; names its key and scan.
        """
        chosen = range(len(self.index.keys)) if rows is None else list(rows)
        whole = (
            self._join(chosen)
            if native.available and select is None and decode is None
            else itertools.repeat((None,))
        )
        names = ("__key__", *self.streams, *self.index.fields)
        for row, values in zip(chosen, whole, strict=False):
            if None not in values:
                yield dict(zip(names, values))  # noqa: B905  # strictness would cost half as much again
                continue
            try:
                sample = self.sample(row, select=select, decode=decode)
            except PCRError as error:
                if on_error is None or not on_error(error):
                    raise
                continue
            yield sample

    def _join(self, rows: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        """Key, images and other fields of these samples, joined together; with None for what has to be looked at one by one."""
        every = len(rows) == len(self.index.keys) and isinstance(rows, range)
        columns = [self.index.keys, *self.index.fields.values()]
        table, crcs = self.table, self._crcs
        if self._sizes.shape[1] > self.num_scans:
            table = table.copy()
            table["size"][self._sizes[:, -1] > 0] = (
                0  # metadata go between the segments of the first piece
            )
        if not every:
            columns = [tuple(column[row] for row in rows) for column in columns]
            units = (
                np.add.outer(np.multiply(rows, len(self.streams)), range(len(self.streams)))
                .ravel()
                .astype(np.intp)
            )
            table, crcs = table[units], crcs[units]
        images = native.join(table, crcs if self.check else None)
        return zip(columns[0], *[images] * len(self.streams), *columns[1:], strict=False)

    def sample(
        self, row: int, *, select: Select | None = None, decode: Decode | None = None
    ) -> Sample:
        """One sample; see :meth:`samples`."""
        key = self.index.keys[row]
        sample: Sample = {"__key__": key}
        unit = row * len(self.streams)
        for m, field in enumerate(self.streams, unit):
            if self.starts[m][0] < self.stops[m][0] and (select is None or select(key, field)):
                sample[field] = self._decoded(m, key, decode) if decode else self._jpeg(m, key)
        for field, values in self.index.fields.items():
            value = values[row]
            if value is not None and (select is None or select(key, field)):
                sample[field] = value
        return sample

    def pieces(self, unit: int) -> list[memoryview]:
        """The pieces of an image; images count by sample, then by stream."""
        return [self.view[a:b] for a, b in zip(self.starts[unit], self.stops[unit], strict=True)]

    def _tail_crc(self, unit: int) -> int:
        return int(self.index.crcs[-1].flat[unit])

    def _decoded(self, unit: int, key: str, decode: Decode) -> Any:
        """The result of the caller's decoder on the scattered pieces."""
        pieces = self.pieces(unit)[: self.num_scans]
        if self.check and functools.reduce(_extend_crc, pieces, 0) != self.crcs[unit]:
            self._refuse(unit, key)
        try:
            return decode(pieces)
        except PCRError as error:
            raise type(error)(str(error), url=self.shard.url, key=key) from error

    def _jpeg(self, unit: int, key: str) -> bytes:
        pieces: list[memoryview | bytes] = list(self.pieces(unit))
        tail = bytes(pieces.pop()) if len(pieces) > self.num_scans else b""
        pieces.append(EOI)
        jpeg = b"".join(pieces)
        # Checked after the join, when the bytes are in the processor's cache, and once for all scans; EOI runs on from the checksum.
        if self.check and crc32c(jpeg) != crc32c(EOI, self.crcs[unit]):
            self._refuse(unit, key)
        if not tail:
            return jpeg
        if self.check and crc32c(tail) != self._tail_crc(unit):
            self._refuse(unit, key)
        try:
            return join_pieces(pieces[:-1], tail)
        except CorruptJpeg as error:
            raise CorruptJpeg(
                f"the tail: {error}", url=self.shard.url, key=key, scan="tail"
            ) from error

    def _refuse(self, unit: int, key: str) -> None:
        """Name the first scan whose bytes are not those that were written."""
        pieces = self.pieces(unit)
        expected = [int(row.flat[unit]) for row in self.index.crcs]
        got = list(itertools.accumulate(pieces[: self.num_scans], _extend_crc, initial=0))[1:]
        bad = next((i for i, crc in enumerate(got) if crc != expected[i]), None)
        row, crc = (bad, got[bad]) if bad is not None else (-1, crc32c(pieces[-1]))
        raise CorruptPiece(
            f"expected CRC-32C {expected[row]:08x}, got {crc:08x} for {len(pieces[row])} bytes",
            url=self.shard.url,
            key=key,
            scan="tail" if bad is None else bad + 1,
            offset=self.starts[unit][row] + self.base,
        )


def _extend_crc(crc: int, piece: memoryview) -> int:
    return crc32c(piece, crc)
