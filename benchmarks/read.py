"""Reading prefixes from the page cache to lists of JPEG bytes, against a bare read of the same
bytes, in CPU time.

Each measurement is a process of its own, so that no case inherits the memory of another. Imports
and a tiny shard come first; then "fresh" is the first pass, and "steady" the passes after three.
Asserts the sizes of the JPEGs and that at most prefix_stop bytes are read.
"""

import contextlib
import os
import time

import webdataset as wds

import pcrshard
from pcrshard import ShardWriter

from .harness import Quartiles, ratios, read

ROUNDS = 9
SCANS = (1, 2, 5, 10)
CASES = ("8 shards", "1 shard")
STEADY_PASSES = 20


def write_shards(files, shards, count, tars=None):
    """Write photographs as a dataset of ``count`` shards, and as plain tars of the same size."""
    per_shard = -(-len(files) // count)
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(ShardWriter(shards, samples_per_shard=per_shard))]
        if tars is not None:
            os.makedirs(tars)
            pattern = os.path.join(tars, "%06d.tar")
            stock = wds.ShardWriter(pattern, maxcount=per_shard, verbose=0)
            writers.append(stack.enter_context(stock))
        for number, file in enumerate(files):
            for writer in writers:
                writer.write({"__key__": f"{number:06d}", "jpg": read(file), "cls": number})


def build(bench, folder):
    """The imagenet part as 8 shards and as one, and a tiny shard."""
    files = bench.files(os.path.join(folder, "photos", "imagenet"))
    for name, count in (("8 shards", 8), ("1 shard", 1)):
        write_shards(files, os.path.join(folder, name), count)
    write_shards(files[:1], os.path.join(folder, "tiny"), 1)


def _plan(folder, scan):
    """(path, entry, prefix_stop, bytes of all JPEGs) of each shard."""
    index, paths = pcrshard.open_dataset(folder)
    for entry, path in zip(index.shards, paths, strict=True):
        prefix = pcrshard.Shard(path).load(scan)
        sizes = int(prefix.tables.sizes.sum()) + 2 * entry.num_samples
        yield path, entry, entry.prefix_stop(scan), sizes


def _pass(plan, scan, way):
    """CPU seconds of reading all shards once."""
    begun = time.process_time()
    for path, entry, stop, expected in plan:
        if way == "bare":
            with open(path, "rb") as file:
                assert len(file.read(stop)) == stop
        else:
            samples = pcrshard.Shard(path, entry=entry).samples(scan)
            assert sum(len(sample["jpg"]) for sample in samples) == expected
    return time.process_time() - begun


def child(folder, case, scan, way):
    """CPU seconds of a fresh and of a steady pass, and the bytes of the prefixes."""
    scan = int(scan)
    _pass(list(_plan(os.path.join(folder, "tiny"), 1)), 1, "samples")
    plan = list(_plan(os.path.join(folder, case), scan))
    stops = sum(stop for _, _, stop, _ in plan)
    before = int(read("/proc/self/io").split()[1])
    seconds = [_pass(plan, scan, way) for _ in range(3 + STEADY_PASSES)]
    taken = int(read("/proc/self/io").split()[1]) - before
    # Python's own buffers may read on; the counter counts the reads of itself.
    assert way == "bare" or taken <= len(seconds) * stops + 4096
    return [seconds[0], sum(seconds[3:]) / STEADY_PASSES, stops]


def run(bench):
    cases = [(case, scan) for case in CASES for scan in SCANS]
    found = {(*case, way): [] for case in cases for way in ("bare", "samples")}
    with bench.photos() as folder:
        build(bench, folder)
        for _ in range(bench.rounds):
            for case, rounds in found.items():
                rounds.append(bench.worker("child", folder, *case))
    for column, regime in enumerate(("fresh", "steady")):
        rows = []
        for case, scan in cases:
            bare, ours = (
                [round_[column] for round_ in found[case, scan, way]] for way in ("bare", "samples")
            )
            mebibytes = found[case, scan, "bare"][0][2] / 2**20
            row = {"case": case, "scan": scan, "MiB": mebibytes, "ratio": ratios(bare, ours)}
            row["bare MiB/s"] = Quartiles(mebibytes / s for s in bare)
            row["MiB/s"] = Quartiles(mebibytes / s for s in ours)
            rows.append(row)
            what = f"{regime}, {case}, scan {scan}: over the bare read"
            bench.target(what, row["ratio"], least=0.5)
        bench.show(f"{regime}: MiB per CPU second", rows)
        slowest = min(row["MiB/s"].median for row in rows)
        bench.target(f"{regime}, the slowest: MiB per CPU second", slowest, least=400)
