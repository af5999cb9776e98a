"""The dataset index ``pcr.json``: the schema, and sizes and checksums of all shards (SPEC 6).

Bytes in, bytes out; no I/O.
"""

from __future__ import annotations

import codecs
import itertools
import json
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import CorruptIndex, ScanUnavailable, naming
from ..lazy import Chain, lazy
from ..memory import Buffer
from .levels import Levels
from .names import are_distinct
from .plain_tar import PLAIN
from .scan import FULL, Scan, check_scan, is_fraction, only_full
from .schema import Schema
from .shard_head import (
    BLOCK,
    HEAD_STOP,
    MAX_EXPANSION,
    MAX_SAMPLES,
    MIN_SAMPLE_BYTES,
    TRAILER,
    VERSION,
    Head,
    check_version,
    require,
)
from .shard_names import PATTERN, NumberedNames, pack_names, unpack_names

DATASET_INDEX = "pcr.json"
MAX_DATASET_INDEX_BYTES = 1 << 28
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
# Of Column: name, width, checksum.
_Column = tuple[
    Annotated[str, msgspec.Meta(max_length=64)],
    Annotated[int, msgspec.Meta(ge=1, le=256)],
    Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)],
]
# What columns that have a meaning take.
_WIDTHS = {"labels": 4, "sizes": 4, "flags": 1}
_ShardName = Annotated[str, msgspec.Meta(pattern=PATTERN)]
# Columns of the table: samples, head checksum, scan of a staged copy, then stops.
_NUM_COLUMNS = 3


class ShardEntry(msgspec.Struct, frozen=True):
    """The entry of a shard in the dataset index.

    Attributes:
        name: File name, relative to the dataset index.
        num_samples: Number of samples.
        head_crc32c: Checksum of the shard's head, which identifies the shard's content.
        stops: End in bytes of the index, which is the prefix of scan 0, of the prefix of each scan
            1..N, and of the prefix of ``"full"``.
        scan: The highest scan that a staged copy holds; ``None`` for a whole shard.
        index_url: For a plain tar, the URL of the file that its index is in; otherwise empty.
    """

    name: str
    num_samples: int
    head_crc32c: int
    stops: tuple[int, ...]
    scan: int | None = None
    index_url: str = ""

    @classmethod
    def of_head(cls, name: str, head: Head) -> ShardEntry:
        """Return the entry of a whole shard."""
        return cls(name, head.num_samples, head.crc32c, head.stops)

    @property
    def num_groups(self) -> int:
        """Scan groups N of the whole shard."""
        return len(self.stops) - 2

    @property
    def index_stop(self) -> int:
        """End of the index member in bytes: the prefix of scan 0."""
        return self.stops[0]

    @property
    def prefix_stops(self) -> tuple[int, ...]:
        """End of the prefix of each scan 1..N, then of ``"full"``, in bytes."""
        return self.stops[1:]

    @property
    def shard_bytes(self) -> int:
        """Size of the whole shard in bytes."""
        return self.stops[-1] + len(TRAILER)

    def describes(self, head: Head) -> bool:
        """Return whether the entry is that of the shard with this head."""
        own = (self.num_samples, self.head_crc32c, self.stops)
        return own == (head.num_samples, head.crc32c, head.stops)

    def staged(self, scan: int | None) -> ShardEntry:
        """Return the entry of a copy that holds scans 1..scan; ``None`` for the whole shard."""
        return msgspec.structs.replace(self, scan=scan)

    def prefix_stop(self, scan: Scan) -> int:
        """Return the end of the prefix of scans 1..scan; scan 0 is labels and metadata only.

        Raises:
            ScanUnavailable: The scan does not exist, or the staged copy does not hold it.
            TypeError: The scan is neither an integer nor ``"full"``.
        """
        rows = check_scan(scan, self.num_groups, 0)
        if self.scan is not None and rows > self.scan:
            raise ScanUnavailable(
                f"asked for scan {scan}, "
                f"the staged copy holds scans 1 to {self.scan} of {self.num_groups}; "
                f"fetch the rest with `pcrshard stage SRC DST --scan {scan}`"
            )
        return self.stops[rows]


class ImageCounts(NamedTuple):
    """Numbers of images of a dataset.

    Attributes:
        images: All images.
        whole: Files kept whole, because they cannot be divided into scans.
        undecodable: Those of them that no decoder could decode when they were encoded.
        wide: Images whose ICC profile is not sRGB: their colors are right only if it is applied.
    """

    images: int = 0
    whole: int = 0
    undecodable: int = 0
    wide: int = 0

    def plus(self, other: ImageCounts) -> ImageCounts:
        """Return the numbers of both."""
        return ImageCounts(*map(operator.add, self, other))


class Column(NamedTuple):
    """A column of ``pcr.columns`` (SPEC 6.1).

    Attributes:
        name: Its name.
        width: Bytes of a sample.
        crc32c: CRC-32C of all shards' head checksums and the column.
    """

    name: str
    width: int
    crc32c: int


class ShardTable(Sequence[ShardEntry]):
    """The entries of all shards, as arrays: an entry is made when it is asked for.

    Args:
        names: File name of each shard.
        rows: (shards, N + 5) uint32: samples, head checksum, scan of a staged copy or 0, and the
            N + 2 stops in blocks of 512 bytes.
        index_urls: For plain tars, the URL of each one's index; otherwise empty.
    """

    def __init__(
        self, names: Sequence[str], rows: NDArray[np.uint32], index_urls: Sequence[str] = ()
    ) -> None:
        self.names = names
        self.rows = rows
        self.index_urls = index_urls

    @classmethod
    def of(cls, entries: Iterable[ShardEntry]) -> ShardTable:
        """Return a table of these entries, all with the same number of scans."""
        if isinstance(entries, ShardTable):
            return entries
        each = list(entries)
        rows = [
            (
                entry.num_samples,
                entry.head_crc32c,
                entry.scan or 0,
                *(stop // BLOCK for stop in entry.stops),
            )
            for entry in each
        ]
        names = tuple(entry.name for entry in each)
        index_urls = tuple(entry.index_url for entry in each if entry.index_url)
        return cls(names, np.array(rows, "<u4").reshape(len(each), -1), index_urls)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, place: int) -> ShardEntry: ...
    @overload
    def __getitem__(self, place: slice) -> ShardTable: ...
    def __getitem__(self, place: int | slice) -> ShardEntry | ShardTable:
        if isinstance(place, slice):
            return ShardTable(self.names[place], self.rows[place], self.index_urls[place])
        samples, crc, scan, *stops = self.rows[place].tolist()
        ends = tuple([stop * BLOCK for stop in stops])
        index_url = self.index_urls[place] if self.index_urls else ""
        return ShardEntry(self.names[place], samples, crc, ends, scan or None, index_url)

    def __iter__(self) -> Iterator[ShardEntry]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardTable) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardTable, (self.names, self.rows, self.index_urls)

    @property
    def num_samples(self) -> NDArray[np.int64]:
        """(shards,) int64 samples of each shard."""
        return self.rows[:, 0].astype(np.int64)

    @property
    def staged(self) -> int | None:
        """The highest scan that every shard of a staged copy holds; ``None`` for whole shards."""
        scans = self.rows[:, 2]
        return int(scans[scans > 0].min()) if scans.any() else None

    def stops(self, scan: Scan) -> NDArray[np.int64]:
        """Return the (shards,) int64 end of each shard's prefix of scans 1..scan, in bytes.

        Raises:
            ScanUnavailable, TypeError: See :meth:`ShardEntry.prefix_stop`.
        """
        # Of those that are staged, one with the fewest scans raises.
        scans = self.rows[:, 2]
        self[int(np.argmin(scans - np.uint32(1)))].prefix_stop(scan)
        rows = check_scan(scan, self.rows.shape[1] - _NUM_COLUMNS - 2, 0)
        return self.rows[:, _NUM_COLUMNS + rows].astype(np.int64) * BLOCK


def tables_of(entries: Sequence[ShardEntry]) -> Sequence[ShardTable]:
    """Return the entries as tables, each of shards with the same number of scans."""
    found: list[ShardTable] = []
    for part in entries.parts if isinstance(entries, Chain) else [entries]:
        if isinstance(part, ShardTable):
            found.append(part)
        else:
            runs = itertools.groupby(part, lambda entry: entry.num_groups)
            found += [ShardTable.of(own) for _, own in runs]
    return found


class _File(msgspec.Struct, kw_only=True):
    """``pcr.json``; ``bytes`` are base64 in JSON."""

    format: Literal["pcrshard"]
    version: Any
    num_samples: _Number
    schema: Schema
    classes: tuple[str, ...] = ()
    num_classes: _Number = 0
    levels: Levels | None = None
    similarity: tuple[tuple[_Fraction, _Fraction], ...] = ()
    counts: tuple[_Number, _Number, _Number, _Number] | None = None
    columns: Annotated[tuple[_Column, ...], msgspec.Meta(max_length=256)] = ()
    tars: str = ""
    names: Annotated[tuple[_ShardName, ...], msgspec.Meta(min_length=1)]
    table: bytes


class _Start(msgspec.Struct):
    """The fields that decide whether the rest of ``pcr.json`` can be read."""

    format: Literal["pcrshard"]
    version: Any


# Made once, before there are threads; see the decoder of schemas.
_START_DECODER = msgspec.json.Decoder(_Start)
_FILE_DECODER = msgspec.json.Decoder(_File)


@dataclass(frozen=True)
class DatasetIndex:
    """The index of a dataset (SPEC section 6), stored next to the shards as ``pcr.json``.

    Attributes:
        schema: What the samples of all shards hold.
        shards: An entry per shard, in the order of the dataset.
        classes: Names of the labels, empty if they have none.
        num_classes: Outputs that a classifier needs: the highest integer label + 1, but at least
            the number of names; 0 for a dataset without labels.
        levels: With the script ``levels``, what divides images into groups.
        similarity: For each group, estimated MS-SSIM of its prefix: mean over images, and 5th
            percentile; empty if not known.
        counts: Numbers of images; ``None`` if not known.
        columns: What ``pcr.columns`` holds, in its order; empty if there is none.
        tars: For plain tars, the folder that they are in, relative to that of the index, or its
            URL; otherwise empty. A tar has an entry for each of its parts, in order.
    """

    schema: Schema
    shards: ShardTable
    classes: tuple[str, ...] = ()
    num_classes: int = 0
    levels: Levels | None = None
    similarity: tuple[tuple[float, float], ...] = ()
    counts: ImageCounts | None = None
    columns: tuple[Column, ...] = ()
    tars: str = ""

    def __post_init__(self) -> None:
        at_least = max(self.num_classes, len(self.classes))
        object.__setattr__(self, "num_classes", at_least)  # frozen
        object.__setattr__(self, "shards", ShardTable.of(self.shards))

    def __repr__(self) -> str:
        return (
            f"<DatasetIndex: {self.num_samples} samples in {len(self.shards)} shards, script "
            f"{self.script}, {self.num_groups} scans, {self.num_classes} classes>"
        )

    @property
    def script(self) -> str:
        """Name of the scan script."""
        return self.schema.script

    @property
    def num_groups(self) -> int:
        """Scan groups of every shard."""
        return self.schema.num_groups

    @lazy
    def num_samples(self) -> int:
        """Samples in all shards."""
        return int(self.shards.num_samples.sum())

    @property
    def scan(self) -> int | None:
        """The highest scan that every shard of a staged copy holds; ``None`` for whole shards."""
        return self.shards.staged

    def column_range(self, column: Column) -> tuple[int, int]:
        """Return where a column is in ``pcr.columns``: a half-open range of bytes."""
        before = self.columns[: self.columns.index(column)]
        start = sum(each.width for each in before) * self.num_samples
        return start, start + column.width * self.num_samples

    def at_most(self, scan: int) -> Scan:
        """Return this scan, or a lower one if that is the highest with pixels that is held.

        That is ``"full"`` for plain tars, which have no other.
        """
        return min(scan, self.scan or self.num_groups) if self.num_groups else FULL

    def prefix_bytes(self, scan: Scan) -> int:
        """Return the bytes of all shards' prefixes at a scan.

        Raises:
            ScanUnavailable: A shard has no such scan, or its staged copy does not hold it.
            TypeError: The scan is neither an integer nor ``"full"``.
        """
        return int(self.shards.stops(scan).sum())

    def scan_of_quality(self, quality: float) -> Scan:
        """Return the lowest scan at which images have at least a mean MS-SSIM, by estimate.

        Plain tars, and datasets without images in scans, have one quality, which is 1.

        Raises:
            ScanUnavailable: The index does not say how alike images are at its scans.
            ValueError: The quality is not in (0, 1].
        """
        if not 0 < quality <= 1:
            raise ValueError(f"expected a quality (MS-SSIM) above 0 and up to 1, got {quality!r}")
        if self.schema.layout == PLAIN:
            return FULL
        for scan, (mean, _) in enumerate(self.similarity, 1):
            if mean >= quality:
                return scan
        if self.counts is not None and self.counts.images == self.counts.whole:
            return 1
        raise ScanUnavailable(
            "expected a dataset whose index says how alike images are at each scan, got none: "
            "encode it again, or give a scan"
        )

    def encode(self) -> bytes:
        """Return the JSON of SPEC section 6.

        Raises:
            CorruptIndex: It would be larger than readers accept.
        """
        table = self.shards
        file = _File(
            format="pcrshard",
            version=VERSION,
            num_samples=self.num_samples,
            table=table.rows.astype("<u4").tobytes(),
            names=tuple(pack_names(table.names)),
            schema=self.schema,
            # Folders need not have names in UTF-8, which JSON needs.
            classes=tuple(name.encode(errors="replace").decode() for name in self.classes),
            num_classes=self.num_classes,
            levels=self.levels,
            similarity=self.similarity,
            counts=self.counts,
            columns=self.columns,
            tars=self.tars,
        )
        found = {name: value for name, value in msgspec.to_builtins(file).items() if value}
        lines = ",\n".join(f' "{name}": {json.dumps(value)}' for name, value in found.items())
        data = f"{{\n{lines}\n}}\n".encode()
        fits = len(data) <= MAX_DATASET_INDEX_BYTES
        require(fits, f"{len(table)} shards are too many for {DATASET_INDEX}: make larger shards")
        return data

    @classmethod
    def decode(cls, data: Buffer, *, url: str | None = None) -> DatasetIndex:
        """Parse and check ``pcr.json``.

        Raises:
            CorruptIndex: The data is not a dataset index, or breaks a rule of SPEC section 6.
            UnsupportedVersion: This reader does not support its format version.
        """
        with naming(url):
            require(len(data) <= MAX_DATASET_INDEX_BYTES, "the dataset index is too large")
            text = bytes(data).removeprefix(codecs.BOM_UTF8)
            try:
                try:
                    file = _FILE_DECODER.decode(text)
                except msgspec.ValidationError:
                    # Another version may have other fields.
                    check_version(_START_DECODER.decode(text).version)
                    raise
                check_version(file.version)
                file.schema.check()
                num_groups = file.schema.num_groups
                width = (_NUM_COLUMNS + num_groups + 2) * 4
                count, more = divmod(len(file.table), width)
                require(not more, f"expected a table of rows of {width} bytes, got {more} too many")
                names = unpack_names(file.names, count)
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                message = f"not a dataset index, it begins with {text[:20]!r}: {error}"
                raise CorruptIndex(message) from error
            rows = np.frombuffer(file.table, "<u4").reshape(count, -1)
            _check_rows(rows, num_groups)
            if file.tars:
                require(file.schema.layout == PLAIN, "tars of shards that are none")
            else:
                distinct = isinstance(names, NumberedNames) or are_distinct(names)
                require(distinct, "shard names repeat")
                named = all(name.endswith(".tar") for name in file.names)
                require(named, "expected names of shards to end in .tar")
            if file.levels is not None:
                file.levels.check()
                fits = file.levels.groups == file.schema.groups
                require(fits, "levels do not have the slopes of the schema")
            found = len(file.similarity)
            fits = found in (0, num_groups)
            require(fits, f"expected similarity of {num_groups} groups, got {found}")
            index = cls(
                file.schema,
                ShardTable(names, rows),
                file.classes,
                file.num_classes,
                file.levels,
                file.similarity,
                file.counts and ImageCounts(*file.counts),
                tuple(Column(*each) for each in file.columns),
                file.tars,
            )
            _check_columns(index.columns)
            total = index.num_samples
            require(file.num_samples == total, f"expected num_samples to be the sum, {total}")
        return index


def _check_rows(rows: NDArray[np.uint32], num_groups: int) -> None:
    samples, scans, stops = rows[:, 0], rows[:, 2], rows[:, _NUM_COLUMNS:]
    first = stops[:, 0].astype(np.int64) * BLOCK
    require((scans <= num_groups).all(), "scan is not in 1..num_groups")
    rising = (stops[:, 1:] >= stops[:, :-1]).all() and (first > HEAD_STOP).all()
    require(rising, "bad stops")
    # As many as a shard may have and its index has room for (SPEC 2.3).
    most = (first - HEAD_STOP) * MAX_EXPANSION // MIN_SAMPLE_BYTES
    fits = (samples >= 1) & (samples <= np.minimum(most, MAX_SAMPLES))
    require(fits.all(), "a shard has no samples, or more than its index has room for")


def _check_columns(columns: Sequence[Column]) -> None:
    require(are_distinct([each.name for each in columns]), "names of columns repeat")
    for name, width, _ in columns:
        expected = _WIDTHS.get(name, width)
        require(width == expected, f"expected {expected} bytes a sample of {name}, got {width}")


def most_shards(num_groups: int, name_bytes: int) -> int:
    """Return how many shards an index of at most 256 MiB holds, without anything else.

    Args:
        num_groups: Scan groups.
        name_bytes: Length of a shard's name.
    """
    row_bytes = (_NUM_COLUMNS + num_groups + 2) * 4
    # Base64 takes a third more; a name has quotes, a comma and a blank.
    return MAX_DATASET_INDEX_BYTES // (-(-row_bytes * 4 // 3) + name_bytes + 4)


def prefix_totals(entries: Sequence[ShardEntry]) -> list[int]:
    """Return the bytes of all prefixes of some shards at scans 1..N and at ``"full"``.

    Args:
        entries: Entries of a dataset index; for a staged copy, those of the whole shards count.
    """
    stops = [table.rows[:, _NUM_COLUMNS + 1 :].sum(axis=0) * BLOCK for table in tables_of(entries)]
    # Datasets may have different numbers of scans.
    scans = [int(sum(each)) for each in zip(*(own[:-1] for own in stops), strict=False)]
    return [*scans, int(sum(own[-1] for own in stops))]


def resolve_scan(entries: Sequence[ShardEntry], scan: Any) -> Any:
    """Convert a fraction in (0, 1) to the highest scan that takes at most that much of all bytes.

    Other values are returned unchanged. A staged copy has at most the scans that it holds.

    Raises:
        ScanUnavailable: Even scan 1 takes more.
        TypeError: The number is neither a scan nor a fraction.
    """
    if not isinstance(scan, float):
        return scan
    if not is_fraction(scan):
        raise TypeError(f"expected a scan number, a fraction in (0, 1) or 'full', got {scan!r}")
    *totals, full = prefix_totals(entries)
    if not totals:
        raise only_full(scan)
    scans = [number for number, total in enumerate(totals, 1) if total <= scan * full]
    if not scans:
        raise ScanUnavailable(
            f"expected at least {totals[0] / full:.3f} of the full bytes, which scan 1 takes, "
            f"got scan={scan}"
        )
    return min(scans[-1], *(table.staged or scans[-1] for table in tables_of(entries)))
