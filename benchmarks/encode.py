"""Encoding: CPU time against jpegtran, two workers against one, peak memory of a worker, and the
size of each scan's prefix over the source and over its entropy-coded bytes.

Asserts that every image's pieces are byte for byte jpegtran's file.
"""

import functools
import os
import pathlib
import shutil
import subprocess
import time

import pcrshard
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.format.scan_script import STANDARD

from .harness import cpu, peak_memory, ratios, read

ROUNDS = 5
COPIES = 4
SCANS = (1, 2, 5, 10)
LEAST_SAVINGS = {1: 15, 2: 6.8, 5: 2.05, 10: 1.0}
MOST_OVERHEADS = {
    "imagenet": {1: 0.03, 2: 0.02, 5: 0.01},
    "ham224": {1: 0.06, 2: 0.04, 5: 0.04},
    "flowers": {1: 0.06, 2: 0.04, 5: 0.04},
}


def _jpegtran(file):
    command = ["jpegtran", "-copy", "none", "-progressive", file]
    return subprocess.run(command, check=True, capture_output=True).stdout


def _encode(source, dst, workers):
    """Encode into a folder that is removed again."""
    options = pcrshard.EncodeOptions(samples_per_shard=64, fmt=pcrshard.ShardFormat("standard"))
    pcrshard.encode(source, dst, options, workers=workers)
    shutil.rmtree(dst)


def memory(source, dst):
    """Peak memory of a fresh worker above its imports, in shards."""
    before = peak_memory()
    options = pcrshard.EncodeOptions(num_shards=1, fmt=pcrshard.ShardFormat("standard"))
    index = pcrshard.encode(source, dst, options, workers=1)
    shutil.rmtree(dst)
    return (peak_memory() - before) / index.shards[0].shard_bytes


def _sizes(bench, name, source, dst):
    """Sizes of the prefixes of a folder's shards."""
    options = {} if name == "imagenet" else {"samples_per_shard": 1024}
    index = pcrshard.encode(source, dst, pcrshard.EncodeOptions(**options))
    entropy = dict.fromkeys(SCANS, 0)
    for entry in index.shards:
        prefix = pcrshard.Shard(os.path.join(dst, entry.name)).load(10)
        for scan in SCANS:
            entropy[scan] += int(prefix.tables.own_bytes[:scan].sum())
    files = [path for path in pathlib.Path(source).rglob("*") if path.is_file()]
    size, full = sum(map(os.path.getsize, files)), index.prefix_bytes("full")
    row = {"set": name, "full": full / size}
    for scan in SCANS:
        stop = index.prefix_bytes(scan)
        row |= {f"at {scan}": stop / size, f"saved {scan}": full / stop}
        row |= {f"over {scan}": stop / entropy[scan] - 1}
    for scan, most in MOST_OVERHEADS[name].items():
        bench.target(f"{name}, overhead at scan {scan}", row[f"over {scan}"], most=most)
    return row


def run(bench):
    with bench.photos("classify") as folder:
        small, large, dst = (os.path.join(folder, name) for name in ("small", "large", "dst"))
        os.mkdir(small)
        for file in bench.files(os.path.join(folder, "photos", "imagenet")):
            shutil.copy(file, small)
        files = bench.files(small)
        for copy in range(COPIES):
            shutil.copytree(small, os.path.join(large, str(copy)))
        for file in files:
            pieces = encode_jpeg(read(file), STANDARD).pieces
            assert b"".join(pieces[:-1]) + b"\xff\xd9" == _jpegtran(file), file

        ways = {
            "jpegtran": lambda: [_jpegtran(file) for file in files],
            "encode": lambda: _encode(small, dst, 1),
        }
        seconds = bench.compare("CPU ms per image", ways, cpu, per=len(files))
        over = ratios(seconds["encode"], seconds["jpegtran"])
        bench.target("CPU time over jpegtran's", over, most=1.15)

        ways = {workers: functools.partial(_encode, large, dst, workers) for workers in (1, 2)}
        title = "Wall ms per image by workers"
        seconds = bench.compare(title, ways, time.perf_counter, per=COPIES * len(files))
        bench.target("two workers over one", ratios(seconds[1], seconds[2]), least=1.8)
        for name, images in (("few", small), ("many", large)):
            shards = bench.worker("memory", images, dst)
            bench.target(f"peak memory above the imports, in shards, {name} images", shards, most=3)

        sets = {"imagenet": small}
        for task in ("ham224", "flowers"):
            sets[task] = os.path.join(folder, "classify", task, "train")
        rows = [_sizes(bench, name, source, f"{dst}-{name}") for name, source in sets.items()]
        bench.show("Bytes of prefixes", rows)
        for scan, least in LEAST_SAVINGS.items():
            bench.target(f"saving at scan {scan}", rows[0][f"saved {scan}"], least=least)
        bench.target("imagenet, full over source", rows[0]["full"], most=0.965)
