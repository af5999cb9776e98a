"""Reading prefixes over a slow link: images per second, against what the link's goodput allows and
against stock WebDataset on the same link.

nginx serves from a network namespace behind a link that `tc tbf` limits (root, iproute2). The
goodput is measured by curl in the same run, because the limit counts packet headers too. Asserts
samples and bytes.
"""

import functools
import os
import time

import servers
import webdataset as wds

import pcrshard
from evidence.links import goodput, network
from pcrshard.format.scan import FULL

from .harness import Quartiles, ratios
from .read import write_shards

ROUNDS = 3
RATE = 20_000_000
COPIES = 4
SHARDS = 8
SCANS = (1, 2, 5, FULL)
SECONDS = 4.0  # of each measurement at the predicted rate


def _rate(bench, index, urls, num_bytes, scan=None):
    """Return images per second over a list of shards, repeated to fill the time."""
    times = 1 if bench.quick else max(1, round(SECONDS * RATE / num_bytes))
    dataset = wds.WebDataset(urls * times, shardshuffle=False)
    if scan is not None:
        dataset = dataset.pcr_scan(scan, index=index)
    begun = time.perf_counter()
    count = sum(1 for sample in dataset if sample["jpg"] is not None)
    seconds = time.perf_counter() - begun
    assert count == times * index.num_samples
    return count / seconds


def run(bench):
    with bench.photos() as folder:
        files = bench.files(os.path.join(folder, "photos", "imagenet")) * COPIES
        served = os.path.join(folder, "served")
        write_shards(files, os.path.join(served, "pcr"), SHARDS, os.path.join(served, "tars"))
        index, _ = pcrshard.open_dataset(os.path.join(served, "pcr"))
        tars = bench.files(os.path.join(served, "tars"))
        found = {name: [] for name in ("goodput", "stock", *SCANS)}
        with network(0, RATE, RATE) as (link, _), servers.nginx(served, link=link) as server:
            plain = [server.url(f"tars/{os.path.basename(path)}") for path in tars]
            urls = [server.url(f"pcr/{shard.name}") for shard in index.shards]
            largest = max(index.shards, key=lambda shard: shard.shard_bytes)
            plain_download = (server.url(f"pcr/{largest.name}"), *[largest.shard_bytes] * 2)
            rate = functools.partial(_rate, bench, index)
            ways = {"goodput": functools.partial(goodput, *plain_download)}
            ways["stock"] = lambda: rate(plain, sum(map(os.path.getsize, tars)))
            for scan in SCANS:
                ways[scan] = functools.partial(rate, urls, index.prefix_bytes(scan), scan)
            for _ in range(bench.rounds):
                for name, way in ways.items():
                    found[name].append(way())
            server.reset()
            assert rate(urls, RATE * SECONDS, 2) > 0
            assert sum(r.body_bytes for r in server.requests()) == index.prefix_bytes(2)
    rows = []
    for scan in SCANS:
        mean = index.prefix_bytes(scan) / index.num_samples
        allowed = [goodput / mean for goodput in found["goodput"]]
        row = {"scan": scan, "kB/image": mean / 1000, "images/s": Quartiles(found[scan])}
        row["over goodput / bytes"] = ratios(found[scan], allowed)
        row["over stock"] = ratios(found[scan], found["stock"])
        rows.append(row)
        what = f"scan {scan}: images/s over prediction"
        bench.target(what, row["over goodput / bytes"], least=0.97)
    bench.show(f"One reader, link of {RATE / 1e6:.0f} MB/s", rows, ".4g")
    for row, least in ((rows[2], 2.05), (rows[1], 6)):
        what = f"scan {row['scan']}: images/s over stock WebDataset"
        bench.target(what, row["over stock"], least=least)
