"""CPU time per GB of prefixes from nginx and from an S3 server, by thread, against ``cat_file`` of
fsspec alone: what a read costs in the libraries below, and what it costs here.

Both servers run on this machine; their CPU time is not counted. Asserts the bytes that came.
"""

import functools
import os
import threading
import time

import servers
from fsspec.core import url_to_fs

import pcrshard
from pcrshard.format.scan import FULL
from pcrshard.storage.remote import HTTP_PART_BYTES, PART_BYTES

from .harness import Quartiles
from .read import build

ROUNDS = 15
THREADS = {"caller": "MainThread", "event loop": "fsspecIO"}


def _loads(shards, options):
    for url, entry, _, stop in shards:
        with pcrshard.Shard(url, entry=entry, storage_options=options).load() as prefix:
            assert prefix.num_bytes == stop


def _parts(fs, shards, size):
    for _, _, path, stop in shards:
        for start in range(0, stop, size):
            part = fs.cat_file(path, start=start, end=min(start + size, stop))
            assert len(part) == min(size, stop - start)


def run(bench):
    rows = []
    with bench.photos() as folder:
        build(bench, folder)
        served = os.path.join(folder, "8 shards")
        index, _ = pcrshard.open_dataset(served)
        for store, serve, size in (
            ("nginx", servers.nginx, HTTP_PART_BYTES),
            ("S3", servers.s3, PART_BYTES),
        ):
            with serve(served) as server:
                options = getattr(server, "storage_options", {})
                shards = []
                for entry in index.shards:
                    url = server.url(entry.name)
                    fs, path = url_to_fs(url, **options)
                    shards.append((url, entry, path, entry.prefix_stop(FULL)))
                ways = {
                    "Shard.load": functools.partial(_loads, shards, options),
                    "cat_file": functools.partial(_parts, fs, shards, size),
                }
                for way in ways.values():
                    way()
                rows += _measured(bench, store, ways, sum(stop for *_, stop in shards) / 1e9)
    bench.show("CPU seconds per GB", rows)


def _measured(bench, store, ways, gigabytes):
    """A row for each way: CPU seconds per GB of the caller's thread and of the event loop's."""
    threads = {thread.name: thread.ident for thread in threading.enumerate()}
    clocks = {n: time.pthread_getcpuclockid(threads[name]) for n, name in THREADS.items()}
    spent = {way: {name: [] for name in clocks} for way in ways}
    for _ in range(bench.rounds):
        for way, run_way in ways.items():
            begun = {name: time.clock_gettime(clock) for name, clock in clocks.items()}
            run_way()
            for name, clock in clocks.items():
                spent[way][name].append((time.clock_gettime(clock) - begun[name]) / gigabytes)
    return [
        {"store": store, "way": way} | {name: Quartiles(each) for name, each in by_thread.items()}
        for way, by_thread in spent.items()
    ]
