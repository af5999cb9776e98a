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

import pcrshard

from .harness import ROOT, Quartiles, ratios
from .read import build

ROUNDS = 9
SCANS = (1, 2, 5, 10)
LATENCY = 2e-3  # seconds of each request of the counted file system


def serve(root, mountpoint, log):
    """Serve a folder until it is unmounted; each request sleeps and becomes a line of ``log``."""
    import mfusepy

    lock = threading.Lock()

    class Counted(mfusepy.Operations):
        use_ns = True

        def _request(self, operation, path):
            time.sleep(LATENCY)
            with lock:
                print(operation, file=lines, flush=True)
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
    return "{}"


@contextlib.contextmanager
def _mounted(root, folder):
    """(mount point, a function that gives the requests since its last call)"""
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
        with open(log) as lines:

            def requests():
                time.sleep(5 * LATENCY)  # files are released after close returns
                return lines.read().split()

            yield mountpoint, requests
    finally:
        subprocess.run(["fusermount3", "-u", mountpoint], check=False)
        server.wait(10)


def _drop(paths):
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _plain(path, stop):
    with open(path, "rb", buffering=0) as file:
        assert len(file.read(stop)) == stop


def _prefix(path, entry, scan):
    with pcrshard.Shard(path, entry=entry).load(scan) as prefix:
        assert prefix.num_bytes == entry.prefix_stop(scan)


def _compare(bench, title, folder, requests):
    rows = []
    for name in ("1 shard", "8 shards"):
        index, paths = pcrshard.open_dataset(os.path.join(folder, name))
        for scan in SCANS:
            seconds, counts = {"read": [], "prefix": []}, {"read": [], "prefix": []}
            for number in range(2 * bench.rounds):
                for way in ("read", "prefix") if number % 4 in (0, 3) else ("prefix", "read"):
                    _drop(paths)
                    requests()
                    begun = time.perf_counter()
                    for path, entry in zip(paths, index.shards, strict=True):
                        if way == "read":
                            _plain(path, entry.prefix_stop(scan))
                        else:
                            _prefix(path, entry, scan)
                    seconds[way].append(time.perf_counter() - begun)
                    counts[way].append(len(requests()))
            row = {"case": name, "scan": scan}
            row |= {f"{way}, ms": Quartiles(1e3 * s for s in each) for way, each in seconds.items()}
            row["ratio"] = ratios(seconds["prefix"], seconds["read"])
            what = f"{title}, {name}, scan {scan}: over one read"
            bench.target(what, row["ratio"].median, most=1.1)
            if any(counts["read"]):
                row |= {f"{way}, requests": Quartiles(each) for way, each in counts.items()}
                more = row["prefix, requests"].median / row["read, requests"].median
                bench.target(f"{what}, requests", more, most=1)
            rows.append(row)
    bench.show(f"{title}: a prefix and one read of its bytes", rows)


def run(bench):
    with bench.photos() as folder, tempfile.TemporaryDirectory() as beside:
        build(bench, folder)
        _compare(bench, "local disk", folder, lambda: ())
        if shutil.which("fusermount3") is None or importlib.util.find_spec("mfusepy") is None:
            print("skipped: the counted file system needs fuse3 and mfusepy")
            return
        with _mounted(folder, beside) as (mountpoint, requests):
            _compare(bench, "requests of 2 ms", mountpoint, requests)
