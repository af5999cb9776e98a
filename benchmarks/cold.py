"""Reading prefixes that are not in the page cache, against one read of the same bytes, by the
clock: from the local disk, and through a file system whose requests take 2 ms and are counted.

That file system is a FUSE mount over the local files. The kernel treats it as it treats the client
of a network file system: attributes and data come by requests, pages are kept, and it reads ahead.
It needs fuse3 and the package mfusepy; without them this part is skipped. Asserts that whole
prefixes were read.
"""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

import pcrshard

from .harness import ROOT, Quartiles, ratios, read
from .read import build

ROUNDS = 9
SCANS = (1, 2, 5, 10)
LATENCY = 2e-3  # seconds of each request of the counted file system


def serve(root, mountpoint, log):
    """Serve a folder until it is unmounted; each request becomes a line of ``log`` and sleeps."""
    import mfusepy

    lock = threading.Lock()

    class Counted(mfusepy.Operations):
        use_ns = True

        def _request(self, operation, path):
            with lock:
                print(operation, file=lines, flush=True)
            time.sleep(LATENCY)
            return root + path

        def getattr(self, path, fh=None):
            try:
                found = os.lstat(self._request("getattr", path))
            except OSError as error:
                raise mfusepy.FuseOSError(error.errno) from None
            names = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size")
            times = {f"st_{t}time": getattr(found, f"st_{t}time_ns") for t in "acm"}
            return {name: getattr(found, name) for name in names} | times

        def open(self, path, flags):
            return os.open(self._request("open", path), flags)

        def read(self, path, size, offset, fh):
            self._request("read", path)
            return os.pread(fh, size, offset)

        def release(self, path, fh):
            os.close(fh)

    with open(log, "a") as lines:
        mfusepy.FUSE(Counted(), mountpoint, foreground=True)


@contextlib.contextmanager
def _mounted(root, folder):
    """(mount point, a function that returns the number of requests so far)"""
    mountpoint, log = os.path.join(folder, "mounted"), os.path.join(folder, "requests")
    os.mkdir(mountpoint)
    open(log, "w").close()
    command = [sys.executable, "-m", "benchmarks", "cold", "--worker", "serve"]
    server = subprocess.Popen([*command, root, mountpoint, log], cwd=ROOT)

    try:
        while not os.path.ismount(mountpoint):
            if server.poll() is not None:
                raise OSError("the counted file system could not be mounted")
            time.sleep(0.05)
        yield mountpoint, lambda: read(log).count(b"\n")
    finally:
        subprocess.run(["fusermount3", "-u", mountpoint], check=False)
        server.wait(10)


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
        with pcrshard.Shard(path, entry=entry).load(scan) as prefix:
            assert prefix.num_bytes == entry.prefix_stop(scan)


def _compare(bench, title, folder, requests):
    rows = []
    for name in ("1 shard", "8 shards"):
        index, paths = pcrshard.open_dataset(os.path.join(folder, name))
        shards = list(zip(paths, index.shards, strict=True))
        for scan in SCANS:
            ways = {"read": lambda: _read(shards, scan), "prefix": lambda: _load(shards, scan)}
            found = bench.interleaved(
                ways,
                lambda: np.array([1e3 * time.perf_counter(), requests()]),
                before=lambda: _drop(paths),
            )
            read, prefix = (np.transpose(found[way]).tolist() for way in ways)
            row = {"case": name, "scan": scan}
            row |= {"read, ms": Quartiles(read[0]), "prefix, ms": Quartiles(prefix[0])}
            row["ratio"] = ratios(prefix[0], read[0])
            what = f"{title}, {name}, scan {scan}: over one read"
            bench.target(what, row["ratio"], most=1.1)
            if any(read[1]):
                row |= {"read, requests": Quartiles(read[1])}
                row |= {"prefix, requests": Quartiles(prefix[1])}
                bench.target(f"{what}, requests", ratios(prefix[1], read[1]), most=1)
            rows.append(row)
    bench.show(f"{title}: a prefix and one read of its bytes", rows)


def run(bench):
    with bench.photos() as folder, tempfile.TemporaryDirectory() as beside:
        build(bench, folder)
        _compare(bench, "local disk", folder, lambda: 0)
        if shutil.which("fusermount3") is None or importlib.util.find_spec("mfusepy") is None:
            print("skipped: the counted file system needs fuse3 and mfusepy")
            return
        with _mounted(folder, beside) as (mountpoint, requests):
            _compare(bench, "requests of 2 ms", mountpoint, requests)
