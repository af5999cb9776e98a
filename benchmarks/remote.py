"""Reading prefixes over a slow link: bytes on the wire, images per second, cache growth,
against stock WebDataset on the same link.

nginx serves from a network namespace behind a veth pair that `tc tbf` limits (root, iproute2), and
its own log says what it sent. The link's goodput is measured by curl in the same run, because the
limit counts packet headers too. Asserts requests, bytes and samples.
"""

import functools
import os
import shutil
import subprocess
import tempfile
import time

import servers
import webdataset as wds

import pcrshard
from pcrshard.format.scan import FULL

from .harness import Quartiles, ratios, read

ROUNDS = 3
RATE = 20_000_000
COPIES = 4
SCANS = (1, 2, 5, FULL)
SECONDS = 4.0  # of each measurement at the predicted rate
HEADERS = 1500  # bytes of an answer's head that are not body
PART = 1 << 20  # bytes of a request


def _build(bench, folder):
    """Copies of the imagenet part as PCR shards, and as plain tars with as many samples each."""
    files = bench.files(os.path.join(folder, "photos", "imagenet")) * COPIES
    served = os.path.join(folder, "served")
    copies = os.path.join(folder, "copies")
    os.makedirs(copies)
    os.makedirs(os.path.join(served, "plain"))
    for number, path in enumerate(files):
        shutil.copy(path, os.path.join(copies, f"{number:06d}.jpg"))
    index = pcrshard.encode(copies, os.path.join(served, "pcr"))
    pattern = os.path.join(served, "plain", "data-%06d.tar")
    per_shard = -(-len(files) // len(index.shards))
    with wds.ShardWriter(pattern, maxcount=per_shard, verbose=0) as writer:
        for number, path in enumerate(files):
            writer.write({"__key__": f"{number:06d}", "jpg": read(path)})
    return served, index


def _repeated(bench, urls, total_bytes):
    """A list of shards as often as fills the time."""
    return urls * (1 if bench.quick else max(1, round(SECONDS * RATE / total_bytes)))


def _rate(dataset, expected):
    """Return images per second for one pass."""
    begun = time.perf_counter()
    count = sum(1 for sample in dataset if sample["jpg"] is not None)
    seconds = time.perf_counter() - begun
    assert count == expected, f"expected {expected} samples, got {count}"
    return count / seconds


def _ours(bench, server, index, scan):
    """Return images per second at a scan, and the ratio of bytes sent to prefix bytes."""
    names = [f"pcr/{shard.name}" for shard in index.shards]
    urls = _repeated(bench, [server.url(name) for name in names], index.prefix_bytes(scan))
    server.reset()
    stage = wds.WebDataset(urls, shardshuffle=False).pcr_scan(scan, index=index)
    times = len(urls) // len(names)
    rate = _rate(stage, index.num_samples * times)
    requests = server.requests()
    stops = [shard.prefix_stop(scan) for shard in index.shards]
    assert len(requests) == times * sum(-(-stop // PART) for stop in stops)
    prefix = sum(stops) * times
    assert sum(request.body_bytes for request in requests) == prefix
    sent = sum(request.sent_bytes for request in requests)
    assert sent <= prefix + HEADERS * len(requests)
    return rate, sent / prefix


def _stock(bench, server, served, index):
    files = bench.files(os.path.join(served, "plain"))
    names = [server.url(f"plain/{os.path.basename(path)}") for path in files]
    urls = _repeated(bench, names, sum(map(os.path.getsize, files)))
    num_samples = index.num_samples * len(urls) // len(names)
    return _rate(wds.WebDataset(urls, shardshuffle=False), num_samples)


def _goodput(server, shard):
    """Bytes a second of one plain download."""
    begun = time.perf_counter()
    url = server.url(f"pcr/{shard.name}")
    subprocess.run(["curl", "-sf", "-o", os.devnull, url], check=True)
    return shard.shard_bytes / (time.perf_counter() - begun)


def _link(bench, served, index):
    """Measure images per second over the slow link, per scan and with stock WebDataset."""
    largest = max(index.shards, key=lambda shard: shard.shard_bytes)
    found = {name: [] for name in ("goodput", "stock", *SCANS)}
    with servers.limited_link(RATE) as link, servers.nginx(served, link=link) as server:
        ways = {"goodput": functools.partial(_goodput, server, largest)}
        ways["stock"] = functools.partial(_stock, bench, server, served, index)
        ways |= {scan: functools.partial(_ours, bench, server, index, scan) for scan in SCANS}
        for _ in range(bench.rounds):
            for name, way in ways.items():
                found[name].append(way())
    rows = []
    for scan in SCANS:
        mean = index.prefix_bytes(scan) / index.num_samples
        rates, sent = zip(*found[scan], strict=True)
        predicted = ratios(rates, [speed / mean for speed in found["goodput"]])
        row = {"scan": scan, "kB/image": mean / 1000, "images/s": Quartiles(rates)}
        row |= {"over goodput / bytes": predicted, "over stock": ratios(rates, found["stock"])}
        rows.append(row | {"sent over prefix": sent[0]})
        bench.target(f"scan {scan}: images/s over prediction", predicted.median, least=0.97)
        bench.target(f"scan {scan}: bytes sent over prefix", sent[0], most=1.01)
    bench.show(f"One reader, link of {RATE / 1e6:.0f} MB/s", rows, ".4g")
    for row, least in ((rows[2], 2.05), (rows[1], 6)):
        what = f"scan {row['scan']}: images/s over stock WebDataset"
        bench.target(what, row["over stock"].median, least=least)


def _cache(bench, served, index):
    """Bytes fetched through a cache: scan 2, then 5, then 5 again, then 1."""
    with servers.nginx(served) as server, tempfile.TemporaryDirectory() as folder:
        urls = [server.url(f"pcr/{shard.name}") for shard in index.shards]

        def epoch(scan):
            server.reset()
            stage = wds.WebDataset(urls, shardshuffle=False)
            _rate(stage.pcr_scan(scan, index=index, cache_dir=folder), index.num_samples)
            return sum(request.body_bytes for request in server.requests())

        moved = [epoch(scan) for scan in (2, 5, 5, 1)]
        first, second = index.prefix_bytes(2), index.prefix_bytes(5)
        assert moved == [first, second - first, 0, 0], moved
    row = dict(zip(("scan 2", "then 5", "5 again", "1"), moved, strict=True))
    bench.show("Bytes that the server sent through a cache, epoch by epoch", [row])


def run(bench):
    with bench.photos() as folder:
        served, index = _build(bench, folder)
        _cache(bench, served, index)
        _link(bench, served, index)
