"""The dataset index ``pcr.json``: what is known of the shards before one is opened (SPEC.md section 6).

Bytes in, bytes out; no I/O.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, NamedTuple

from ..errors import CorruptIndex, ScanUnavailable, UnsupportedVersion
from .scan import Scan, check_scan
from .scan_script import MAX_GROUPS
from .shard_head import HEAD_STOP, VERSION, Buffer, require, rising

DATASET_INDEX = "pcr.json"
MAX_DATASET_INDEX_BYTES = 1 << 28
_SHARD_NAME = re.compile(r"[^/\\\x00]+\.tar")


class ShardEntry(NamedTuple):
    """What the dataset index knows of a shard; ``head_crc32c`` ties it to the file.

    ``scan`` is the highest scan that a staged copy holds; ``None`` for a whole shard.
    """

    name: str
    num_samples: int
    head_crc32c: int
    shard_bytes: int
    shard_crc32c: int
    prefix_stops: tuple[int, ...]
    scan: int | None = None

    @property
    def num_groups(self) -> int:
        """Scan groups N of the whole shard."""
        return len(self.prefix_stops) - 1

    def prefix_stop(self, scan: Scan) -> int:
        """End of the prefix that holds scans 1..scan.

        Raises:
            ScanUnavailable: There is no such scan, or the staged copy does not hold it.
        """
        rows = check_scan(scan, self.num_groups)
        if self.scan is not None and rows > self.scan:
            raise ScanUnavailable(
                f"asked for scan {scan}, the staged copy holds scans 1 to {self.scan} of {self.num_groups}; "
                f"fetch the rest with `pcrshard stage SRC DST --scan {scan}`"
            )
        return self.prefix_stops[rows - 1]


@dataclasses.dataclass(frozen=True)
class DatasetIndex:
    """The shards of a dataset (SPEC section 6); lies beside them as ``pcr.json``."""

    script: str
    num_groups: int
    shards: tuple[ShardEntry, ...]
    classes: tuple[str, ...] = ()

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def scan(self) -> int | None:
        """The highest scan that every shard of a staged copy holds; ``None`` for whole shards."""
        return min((shard.scan for shard in self.shards if shard.scan is not None), default=None)

    def prefix_bytes(self, scan: Scan) -> int:
        """Bytes of all shards' prefixes at a scan."""
        return sum(shard.prefix_stop(scan) for shard in self.shards)

    def encode(self) -> bytes:
        """The JSON of SPEC section 6."""
        head = {
            "format": "pcrshard",
            "version": VERSION,
            "script": self.script,
            "num_groups": self.num_groups,
        }
        head |= {"num_samples": self.num_samples} | (
            {"classes": list(self.classes)} if self.classes else {}
        )
        lines = ",\n".join(
            "  "
            + json.dumps(
                {name: value for name, value in shard._asdict().items() if value is not None}
            )
            for shard in self.shards
        )
        return f'{json.dumps(head)[:-1]},\n "shards": [\n{lines}\n]}}\n'.encode()

    @classmethod
    def decode(cls, data: Buffer, *, url: str | None = None) -> DatasetIndex:
        """Parse and check ``pcr.json``.

        Raises:
            CorruptIndex, UnsupportedVersion
        """
        require(len(data) <= MAX_DATASET_INDEX_BYTES, "the dataset index is too large", url)
        try:
            raw = json.loads(bytes(data))
            require(raw["format"] == "pcrshard", "expected format 'pcrshard'", url)
            if raw["version"] != VERSION:
                raise UnsupportedVersion(
                    f"expected format version {VERSION}, got {raw['version']!r}", url=url
                )
            require(isinstance(raw.get("classes", []), list), "expected classes to be a list", url)
            shards = tuple(_decode_entry(shard, raw["num_groups"], url) for shard in raw["shards"])
            index = cls(
                str(raw["script"]),
                int(raw["num_groups"]),
                shards,
                tuple(map(str, raw.get("classes", ()))),
            )
            same = index.num_samples == raw["num_samples"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, CorruptIndex | UnsupportedVersion):
                raise
            raise CorruptIndex(
                f"not a dataset index: {type(error).__name__} {error}", url=url
            ) from error
        require(shards, "expected at least one shard", url)
        require(same, "num_samples is not the sum over the shards", url)
        require(
            len({shard.name for shard in shards}) == len(shards),
            "shard names are not distinct",
            url,
        )
        return index


def _decode_entry(raw: dict[str, Any], num_groups: int, url: str | None) -> ShardEntry:
    entry = ShardEntry._make(
        raw.get(name) if name == "scan" else raw[name] for name in ShardEntry._fields
    )
    stops = entry.prefix_stops
    numbers = [num_groups, *entry[1:-2], *stops, *([] if entry.scan is None else [entry.scan])]
    require(
        all(type(number) is int and 0 <= number < 1 << 63 for number in numbers),
        "expected whole numbers",
        url,
    )
    require(
        type(entry.name) is str and _SHARD_NAME.fullmatch(entry.name),
        f"bad shard name {entry.name!r}",
        url,
    )
    require(
        entry.scan is None or 1 <= entry.scan <= num_groups, "scan is not in 1..num_groups", url
    )
    require(
        1 <= num_groups <= MAX_GROUPS and len(stops) == num_groups + 1,
        "prefix_stops do not fit num_groups",
        url,
    )
    require(
        rising(stops) and stops[0] >= HEAD_STOP and stops[-1] <= entry.shard_bytes,
        "bad prefix_stops",
        url,
    )
    return entry._replace(prefix_stops=tuple(stops))
