"""Reading prefixes from the local disk that are not in the page cache, against one read of the same
bytes, by the clock. Asserts that whole prefixes were read.
"""

import os
import time

import pcrshard

from .harness import Quartiles, ratios
from .read import build

ROUNDS = 18
SCANS = (1, 2, 5, 10)


def _drop(paths):
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(shards, scan):
    for path, entry in shards:
        with open(path, "rb", buffering=0) as file:
            assert len(file.read(entry.prefix_stop(scan))) == entry.prefix_stop(scan)


def _load(shards, scan):
    for path, entry in shards:
        prefix = pcrshard.Shard(path, entry=entry).load(scan)
        assert prefix.num_bytes == entry.prefix_stop(scan)
        del prefix


def run(bench):
    rows = []
    with bench.photos() as folder:
        build(bench, folder)
        for name in ("1 shard", "8 shards"):
            index, paths = pcrshard.open_dataset(os.path.join(folder, name))
            shards = list(zip(paths, index.shards, strict=True))
            for scan in SCANS:
                ways = {"read": lambda: _read(shards, scan), "prefix": lambda: _load(shards, scan)}
                found = bench.interleaved(ways, time.perf_counter, before=lambda: _drop(paths))
                row = {"case": name, "scan": scan}
                row |= {f"{way}, ms": Quartiles(1e3 * s for s in found[way]) for way in ways}
                row["ratio"] = ratios(found["prefix"], found["read"])
                bench.target(f"{name}, scan {scan}: over one read", row["ratio"], most=1.1)
                rows.append(row)
    bench.show("A prefix from the local disk, and one read of its bytes", rows)
