"""CPU time per GB of prefixes from nginx and from an S3 server, against ``cat_file`` of fsspec:
what a read costs in the libraries below, and what it costs here.

Counts the calling thread and fsspec's event loop, not the servers. Asserts the number of bytes.
"""

import os
import threading
import time

import servers
from fsspec.core import url_to_fs

import pcrshard
from pcrshard.format.scan import FULL

from .read import build

ROUNDS = 15


def _cpu():
    threads = (t for t in threading.enumerate() if t.name in ("MainThread", "fsspecIO"))
    return sum(time.clock_gettime(time.pthread_getcpuclockid(t.ident)) for t in threads)


def _ways(index, server):
    """Ways to read all prefixes from a server, by name."""
    options = getattr(server, "storage_options", {})
    entries = {server.url(entry.name): entry for entry in index.shards}

    def load():
        for url, entry in entries.items():
            prefix = pcrshard.Shard(url, entry=entry, storage_options=options).load()
            assert prefix.num_bytes == entry.prefix_stop(FULL)

    def cat_file():
        for url, entry in entries.items():
            fs, path = url_to_fs(url, **options)
            stop = entry.prefix_stop(FULL)
            assert len(fs.cat_file(path, start=0, end=stop)) == stop

    return {"Shard.load": load, "cat_file": cat_file}


def run(bench):
    with bench.photos() as folder:
        build(bench, folder)
        served = os.path.join(folder, "8 shards")
        index, _ = pcrshard.open_dataset(served)
        for store, serve in (("nginx", servers.nginx), ("S3", servers.s3)):
            with serve(served) as server:
                gigabytes = index.prefix_bytes(FULL) / 1e9
                bench.compare(
                    f"CPU time per GB, {store}", _ways(index, server), _cpu, per=gigabytes
                )
