"""The dataset index ``pcr.json``: sizes and checksums of all shards (SPEC.md section 6).

Bytes in, bytes out; no I/O.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from ..errors import CorruptIndex, ScanUnavailable, naming
from ..memory import Buffer
from .names import are_distinct
from .scan import Scan, check_scan, is_fraction
from .scan_script import MAX_GROUPS
from .shard_head import (
    HEAD_STOP,
    MAX_EXPANSION,
    MAX_SAMPLES,
    MIN_SAMPLE_BYTES,
    VERSION,
    check_version,
    require,
    rising,
)

DATASET_INDEX = "pcr.json"
MAX_DATASET_INDEX_BYTES = 1 << 28
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Group = Annotated[int, msgspec.Meta(ge=1, le=MAX_GROUPS)]
# Braces would be expanded as a pattern.
_ShardName = Annotated[str, msgspec.Meta(pattern=r"^[^/\\{}\x00-\x1f\x7f]{1,251}\.tar\Z")]


class ShardEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """The entry of a shard in the dataset index.

    Attributes:
        name: File name, relative to the dataset index.
        num_samples: Number of samples.
        head_crc32c: CRC-32C of the shard's head, which ties the entry to the file.
        shard_bytes: Size of the whole shard in bytes.
        shard_crc32c: CRC-32C of the whole shard.
        prefix_stops: End of the prefix of each scan 1..N, then of ``"full"``, in bytes.
        index_stop: End of the index member in bytes: the prefix of scan 0.
        scan: The highest scan that a staged copy holds; ``None`` for a whole shard.
    """

    name: _ShardName
    num_samples: _Number
    head_crc32c: _Number
    shard_bytes: _Number
    shard_crc32c: _Number
    prefix_stops: tuple[_Number, ...]
    index_stop: _Number
    scan: _Group | None = None

    @property
    def num_groups(self) -> int:
        """Scan groups N of the whole shard."""
        return len(self.prefix_stops) - 1

    @property
    def stops(self) -> tuple[int, ...]:
        """The prefix stops of scans 0..N, and of ``"full"``."""
        return (self.index_stop, *self.prefix_stops)

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


class _Start(msgspec.Struct):
    """The fields that decide whether the rest of ``pcr.json`` can be read, and the total."""

    format: Literal["pcrshard"]
    version: Any
    num_samples: Any = None


@dataclass(frozen=True)
class DatasetIndex:
    """The index of a dataset (SPEC section 6), stored next to the shards as ``pcr.json``.

    Attributes:
        script: Name of the scan script.
        num_groups: Scan groups of every shard.
        shards: An entry per shard, in the order of the dataset.
        classes: Names of the labels, empty if they have none.
        num_classes: Outputs that a classifier needs: the highest integer label + 1, but at least
            the number of names; 0 for a dataset without labels.
    """

    script: str
    num_groups: _Group
    shards: Annotated[tuple[ShardEntry, ...], msgspec.Meta(min_length=1)]
    classes: tuple[str, ...] = ()
    num_classes: _Number = 0

    def __post_init__(self) -> None:
        at_least = max(self.num_classes, len(self.classes))
        object.__setattr__(self, "num_classes", at_least)  # frozen

    def __repr__(self) -> str:
        return (
            f"<DatasetIndex: {self.num_samples} samples in {len(self.shards)} shards, script "
            f"{self.script}, {self.num_groups} scans, {self.num_classes} classes>"
        )

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def scan(self) -> int | None:
        """The highest scan that every shard of a staged copy holds; ``None`` for whole shards."""
        return min((shard.scan for shard in self.shards if shard.scan is not None), default=None)

    def prefix_bytes(self, scan: Scan) -> int:
        """Return the bytes of all shards' prefixes at a scan.

        Raises:
            ScanUnavailable: A shard has no such scan, or its staged copy does not hold it.
            TypeError: The scan is neither an integer nor ``"full"``.
        """
        return sum(shard.prefix_stop(scan) for shard in self.shards)

    def encode(self) -> bytes:
        """Return the JSON of SPEC section 6, one line per shard."""
        # Folders need not have names in UTF-8, which JSON needs.
        classes = tuple(name.encode(errors="replace").decode() for name in self.classes)
        fields = msgspec.to_builtins(self) | {"classes": classes}
        described = {name: value for name, value in fields.items() if value}
        lines = ",\n".join(f"  {json.dumps(shard)}" for shard in described.pop("shards"))
        start = {
            "format": "pcrshard",
            "version": VERSION,
            "script": self.script,
            "num_groups": self.num_groups,
            "num_samples": self.num_samples,
        }
        head = json.dumps(start | described)[:-1]
        return f'{head},\n "shards": [\n{lines}\n]}}\n'.encode()

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
                start = msgspec.json.decode(text, type=_Start)
                check_version(start.version)
                index = msgspec.json.decode(text, type=cls)
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                message = f"not a dataset index, it begins with {text[:20]!r}: {error}"
                raise CorruptIndex(message) from error
            for entry in index.shards:
                _check_entry(entry, index.num_groups)
            total = index.num_samples
            require(start.num_samples == total, f"expected num_samples to be the sum, {total}")
            require(are_distinct([shard.name for shard in index.shards]), "shard names repeat")
        return index


def _check_entry(entry: ShardEntry, num_groups: int) -> None:
    require((entry.scan or 1) <= num_groups, "scan is not in 1..num_groups")
    stops = entry.prefix_stops
    require(len(stops) == num_groups + 1, "prefix_stops do not fit num_groups")
    inside = entry.index_stop > HEAD_STOP and stops[-1] <= entry.shard_bytes
    require(inside and rising(entry.stops), "bad prefix_stops")
    # As many as a shard may have and its index has room for (SPEC 2.3).
    most = min(MAX_SAMPLES, (entry.index_stop - HEAD_STOP) * MAX_EXPANSION // MIN_SAMPLE_BYTES)
    fits = 1 <= entry.num_samples <= most
    require(fits, f"expected 1 to {most} samples in a shard of these stops")


def prefix_totals(entries: Sequence[ShardEntry]) -> list[int]:
    """Return the bytes of all prefixes of some shards at scans 1..N and at ``"full"``.

    Args:
        entries: Entries of a dataset index; for a staged copy, those of the whole shards count.
    """
    stops = [entry.prefix_stops for entry in entries]
    scans = [sum(each) for each in zip(*(own[:-1] for own in stops), strict=False)]
    return [*scans, sum(own[-1] for own in stops)]


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
    scans = [number for number, total in enumerate(totals, 1) if total <= scan * full]
    if not scans:
        raise ScanUnavailable(
            f"expected at least {totals[0] / full:.3f} of the full bytes, which scan 1 takes, "
            f"got scan={scan}"
        )
    return min(scans[-1], *(entry.scan or entry.num_groups for entry in entries))
