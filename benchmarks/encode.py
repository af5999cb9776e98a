"""Encoding: CPU time against jpegtran and against the bare transcoding, two workers against one,
a Dask cluster of two workers against them, and peak memory of a worker.

Asserts that every image's pieces are byte for byte jpegtran's file, and that engines write the same
bytes.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import time

import pcrshard
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.format.scan_script import STANDARD, scans_for
from pcrshard.jpeg.markers import map_jpeg
from pcrshard.jpeg.pixels import make_progressive

from .harness import Quartiles, cpu, ratios, read

ROUNDS = 5
COPIES = 4
OPTIONS = pcrshard.EncodeOptions(samples_per_shard=64)


def _jpegtran(file):
    command = ["jpegtran", "-copy", "none", "-progressive", file]
    return subprocess.run(command, check=True, capture_output=True).stdout


def _transcode(files):
    """What of the encoder is not pcrshard's own: the native core on each file."""
    for file in files:
        jpeg = read(file)
        found = map_jpeg(jpeg)
        make_progressive(jpeg, scans_for(STANDARD, found.color, len(found.frame.components)))


def _digest(folder):
    """Of all files but the journal."""
    found = hashlib.sha256()
    for name in sorted(os.listdir(folder)):
        if name != "encode-journal.json":
            found.update(name.encode() + hashlib.sha256(read(os.path.join(folder, name))).digest())
    return found.hexdigest()


def _encode(source, dst, **how):
    """Encode into a folder that is removed again; the digest of its files."""
    pcrshard.encode(source, dst, OPTIONS, **how)
    digest = _digest(dst)
    shutil.rmtree(dst)
    return digest


def memory(source, dst):
    """A fresh worker: bytes of its peak above what the imports took, by those of the shard."""

    def peak():
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", read("/proc/self/status").decode())[1])

    before = peak()
    index = pcrshard.encode(source, dst, pcrshard.EncodeOptions(num_shards=1), workers=1)
    shutil.rmtree(dst)
    return json.dumps((peak() - before) / index.shards[0].shard_bytes)


@contextlib.contextmanager
def _dask():
    """An executor of two Dask workers that have imported the package, or ``None``."""
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        yield None
        return
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        client.run(__import__, "pcrshard.encoding.encode_dataset")
        yield client.get_executor()


def _cpu(bench, files, source, dst):
    ways = {
        "jpegtran": lambda: [_jpegtran(file) for file in files],
        "transcoding": lambda: _transcode(files),
        "encode": lambda: _encode(source, dst, workers=1),
    }
    seconds = bench.interleaved(ways, cpu)
    row = {name: Quartiles(1000 * s / len(files) for s in each) for name, each in seconds.items()}
    row["encode / transcoding"] = ratios(seconds["encode"], seconds["transcoding"])
    bench.show("CPU ms per image", [row])
    over = ratios(seconds["encode"], seconds["jpegtran"]).median
    bench.target("CPU time over jpegtran's", over, most=1.15)


def run(bench):
    with bench.photos() as folder, _dask() as executor:
        source, large = os.path.join(folder, "few"), os.path.join(folder, "many")
        dst = os.path.join(folder, "dst")
        os.makedirs(source)
        for path in bench.files(os.path.join(folder, "photos", "imagenet")):
            shutil.copy(path, source)
        for copy in range(COPIES):
            shutil.copytree(source, os.path.join(large, f"copy{copy}"))
        files = bench.files(source)
        for file in files:
            pieces = encode_jpeg(read(file), STANDARD).pieces
            assert b"".join(pieces[:-1]) + b"\xff\xd9" == _jpegtran(file), file
        _cpu(bench, files, source, dst)
        engines = {f"{count} workers": {"workers": count} for count in (1, 2)}
        if executor is not None:
            engines["Dask"] = {"executor": executor}
        ways = {n: functools.partial(_encode, large, dst, **how) for n, how in engines.items()}
        assert len({way() for way in ways.values()}) == 1, "the engines' bytes differ"
        seconds = bench.interleaved(ways, time.perf_counter)
        bench.show("Wall seconds", [{name: Quartiles(each) for name, each in seconds.items()}])
        half = ratios(seconds["1 workers"], seconds["2 workers"]).median / 2
        bench.target("parallel efficiency of two workers", half, least=0.9)
        if executor is not None:
            over = ratios(seconds["Dask"], seconds["2 workers"]).median
            bench.target("Dask over the process pool", over, most=1.1)
        for name, images in (("few", source), ("many", large)):
            shards = bench.worker("memory", images, dst)
            bench.target(f"peak memory above the imports, in shards, {name} images", shards, most=3)
