"""The door to Grain: samples by number, for ``grain.MapDataset.source``.

Grain chooses the order, and asks for one sample at a time from many threads. A shard is read by its
prefix, so prefixes are held in memory: samples of a shard that is held cost no request.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from ..format.scan import FULL
from ..reading.field_values import convert_all
from ..reading.options import ReadOptions
from ..reading.prefix import Prefix, Sample
from ..reading.scan_level import ScanChoice, current_scan
from ..storage import Urls
from ..training.shard_set import ShardSet


class PCRSource:
    """A random-access source of samples; Grain's protocol, and that of a map-style dataset.

    Args:
        url: Dataset folder or its ``pcr.json``, or several of them; local or any fsspec URLs. One
            request each.
        scan: Highest scan to read, 1-based, or ``"full"``, or a :class:`ScanLevel`, which is read
            at each sample; Grain's worker processes follow it, too.
        fields: Fields of a sample; by default all.
        held_bytes: Bound of the prefixes that are held. An order that jumps between more shards
            than fit reads a prefix for every sample: shuffle by windows of some shards then.
        read: Cache and network.

    Raises:
        ScanUnavailable: The dataset has no such scan.
    """

    def __init__(
        self,
        url: Urls,
        *,
        scan: ScanChoice = FULL,
        fields: Sequence[str] | None = None,
        held_bytes: int = 1 << 30,
        read: ReadOptions = ReadOptions(),
    ) -> None:
        self.shards = ShardSet(url, read)
        self.shards.check_scan(scan)
        self.scan = scan
        self.fields = fields
        self.held_bytes = held_bytes
        self._forget()

    def _forget(self) -> None:
        self._held: OrderedDict[int, Prefix] = OrderedDict()
        self._lock = threading.Lock()
        # One for each shard, so that threads which want the same shard read it once.
        self._gates = [threading.Lock() for _ in self.shards.urls]

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).copy()
        for name in ("_held", "_lock", "_gates"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def __len__(self) -> int:
        return self.shards.num_samples

    def __repr__(self) -> str:
        # Grain compares it when a state is loaded: the same for the same samples, at any scan.
        return f"<PCRSource {self.shards}, {self.shards.fingerprint:08x}>"

    def __getitem__(self, number: int) -> Sample:
        """A sample: JPEG fields as bytes, ``cls`` an int, ``json`` parsed, ``txt`` a str.

        Raises:
            IndexError: There is no such sample.
            FormatError, StorageError: It cannot be read.
        """
        place = self.shards.place(number)
        sample = self._prefix(place.shard).sample(place.row, select=self._select)
        return convert_all(sample)

    def _select(self, key: str, field: str) -> bool:
        return self.fields is None or field in self.fields

    def _prefix(self, shard: int) -> Prefix:
        scan = current_scan(self.scan)
        opened = self.shards.open(shard)
        with self._gates[shard]:
            with self._lock:
                held = self._held.get(shard)
            if held is None or held.num_bytes < opened.prefix_stop(scan):
                held = opened.load(scan)
            self._hold(shard, held)
            return held.at(scan)

    def _hold(self, shard: int, prefix: Prefix) -> None:
        """Hold what was used last, and drop what was used longest ago."""
        with self._lock:
            self._held[shard] = prefix
            self._held.move_to_end(shard)
            total = sum(each.num_bytes for each in self._held.values())
            while total > self.held_bytes and len(self._held) > 1:
                # Not closed: another thread may still read it.
                _, dropped = self._held.popitem(last=False)
                total -= dropped.num_bytes
