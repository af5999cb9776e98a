"""CPU time per GB of prefixes from nginx and from an S3 server, by thread, against ``cat_file`` of
fsspec alone: what a read costs in the libraries below, and what it costs here.

Both servers run on this machine; their CPU time is not counted. Asserts the bytes that came.
"""

import functools
import os
import threading
import time

import numpy as np
import servers
from fsspec.core import url_to_fs

import pcrshard
from pcrshard.format.scan import FULL
from pcrshard.storage.remote import HTTP_PART_BYTES, PART_BYTES

from .harness import Quartiles
from .read import build

ROUNDS = 15
THREADS = {"caller": "MainThread", "event loop": "fsspecIO"}


def _load(shards, options):
    for url, entry in shards:
        prefix = pcrshard.Shard(url, entry=entry, storage_options=options).load()
        assert prefix.num_bytes == entry.prefix_stop(FULL)
        del prefix


def _cat(files, part_bytes):
    for fs, path, stop in files:
        for start in range(0, stop, part_bytes):
            end = min(start + part_bytes, stop)
            assert len(fs.cat_file(path, start=start, end=end)) == end - start


def _cpu_by_thread():
    threads = {thread.name: thread.ident for thread in threading.enumerate()}
    clocks = [time.pthread_getcpuclockid(threads[name]) for name in THREADS.values()]
    return np.array([time.clock_gettime(clock) for clock in clocks])


def run(bench):
    rows = []
    with bench.photos() as folder:
        build(bench, folder)
        served = os.path.join(folder, "8 shards")
        index, _ = pcrshard.open_dataset(served)
        for store, serve, part_bytes in (
            ("nginx", servers.nginx, HTTP_PART_BYTES),
            ("S3", servers.s3, PART_BYTES),
        ):
            with serve(served) as server:
                options = getattr(server, "storage_options", {})
                shards = [(server.url(entry.name), entry) for entry in index.shards]
                files = [(*url_to_fs(u, **options), e.prefix_stop(FULL)) for u, e in shards]
                ways = {
                    "Shard.load": functools.partial(_load, shards, options),
                    "cat_file": functools.partial(_cat, files, part_bytes),
                }
                for way in ways.values():
                    way()
                for way, seconds in bench.interleaved(ways, _cpu_by_thread).items():
                    per_gb = np.transpose(seconds) * 1e9 / index.prefix_bytes(FULL)
                    figures = map(Quartiles, per_gb.tolist())
                    rows.append(
                        {"store": store, "way": way, **dict(zip(THREADS, figures, strict=True))}
                    )
    bench.show("CPU seconds per GB", rows)
