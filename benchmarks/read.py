"""Reading prefixes from the page cache to lists of JPEG bytes, against a bare read of the same
bytes, in CPU time.

Each measurement is a process of its own, so that no case inherits the memory of another. Its first
pass is the regime "fresh", the passes after it "steady". Imports and a tiny shard come before, so
that "fresh" is about memory, not about loading code. Asserts the JPEG bytes' sizes and that at most
prefix_stop bytes are read.
"""

import json
import os
import time

import pcrshard

from .harness import Quartiles, ratios, read

ROUNDS = 9
SCANS = (1, 2, 5, 10)
CASES = ("8 shards", "1 shard", "1 shard, 4x")
WAYS = ("bare", "unchecked", "checked")
STEADY_SECONDS = 0.2  # CPU time of the steady passes of a process


def build(bench, folder):
    """The imagenet part as 8 shards, as one, and as one of four copies; and a tiny one."""
    files = bench.files(os.path.join(folder, "photos", "imagenet"))
    parts = {"8 shards": (files, 8), "1 shard": (files, 1), "1 shard, 4x": (files * 4, 1)}
    for name, (paths, shards) in (parts | {"tiny": (files[:1], 1)}).items():
        per_shard = -(-len(paths) // shards)
        with pcrshard.ShardWriter(os.path.join(folder, name), samples_per_shard=per_shard) as out:
            for number, path in enumerate(paths):
                out.write({"__key__": f"{number:06d}", "jpg": read(path)})


def _plan(folder, scan):
    """(path, entry, prefix_stop, bytes of all JPEGs) of each shard."""
    index, paths = pcrshard.open_dataset(folder)
    for entry, path in zip(index.shards, paths, strict=True):
        with pcrshard.Shard(path).load(scan) as prefix:
            sizes = int(prefix.contents.groups.table.sizes.sum()) + 2 * entry.num_samples
        yield path, entry, entry.prefix_stop(scan), sizes


def _pass(plan, scan, way):
    for path, entry, stop, expected in plan:
        if way == "bare":
            with open(path, "rb") as file:
                assert len(file.read(stop)) == stop
        else:
            shard = pcrshard.Shard(path, entry=entry, check=way == "checked")
            assert sum(len(sample["jpg"]) for sample in shard.samples(scan)) == expected


def _bytes_read():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def child(folder, case, scan, way):
    """A first pass, then steady ones: CPU seconds of a pass."""
    scan = int(scan)
    _pass(list(_plan(os.path.join(folder, "tiny"), 1)), 1, "checked")
    plan = list(_plan(os.path.join(folder, case), scan))
    stops = sum(stop for _, _, stop, _ in plan)
    seconds = []
    for _ in range(3):
        before, begun = _bytes_read(), time.process_time()
        _pass(plan, scan, way)
        seconds.append(time.process_time() - begun)
        # Python's own buffers may read on, and the looks at the counter are reads, too.
        assert way == "bare" or _bytes_read() - before <= stops + 1024
    count = min(200, max(3, int(STEADY_SECONDS / max(seconds[-1], 1e-6))))
    begun = time.process_time()
    for _ in range(count):
        _pass(plan, scan, way)
    steady = (time.process_time() - begun) / count
    return json.dumps({"fresh": seconds[0], "steady": steady, "bytes": stops})


def run(bench):
    cases = [(case, scan) for case in CASES for scan in SCANS]
    found = {(case, scan, way): [] for case, scan in cases for way in WAYS}
    with bench.photos() as folder:
        build(bench, folder)
        for _ in range(bench.rounds):
            for (case, scan, way), rounds in found.items():
                rounds.append(bench.worker("child", folder, case, scan, way))
    for regime in ("fresh", "steady"):
        rows = []
        for case, scan in cases:
            seconds = {way: [r[regime] for r in found[case, scan, way]] for way in WAYS}
            mebibytes = found[case, scan, "bare"][0]["bytes"] / 2**20
            row = {"case": case, "scan": scan, "MiB": mebibytes}
            row |= {w: Quartiles(mebibytes / s for s in each) for w, each in seconds.items()}
            row |= {f"{w} ratio": ratios(seconds["bare"], seconds[w]) for w in WAYS[1:]}
            rows.append(row)
            over = row["checked ratio"].median
            bench.target(f"{regime}, {case}, scan {scan}: over the bare read", over, least=0.5)
        bench.show(f"{regime}: MiB per CPU second, median [quartiles]", rows)
        slowest = min(row["checked"].median for row in rows)
        bench.target(f"{regime}, the slowest: MiB per CPU second", slowest, least=400)
