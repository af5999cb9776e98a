"""Reading prefixes over a slow link: bytes on the wire, images a second, growth of the cache,
against stock WebDataset on the same link.

nginx serves from a network namespace behind a veth pair that `tc tbf` limits (root, iproute2), and
its own log says what it sent. The link's goodput is measured by curl in the same run, because the
limit counts packet headers too. Asserts requests, bytes and samples.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time

import webdataset as wds
from common import (
    ROOT,
    jpeg_files,
    judge,
    parse_args,
    photos,
    print_table,
    read,
    save,
    show,
    summary,
)

import pcrshard
from pcrshard.format.scan import FULL

sys.path.insert(0, os.path.join(ROOT, "tests"))
import servers

RATE = 20_000_000
COPIES = 4
SCANS = (1, 2, 5, FULL)
SECONDS = 4.0  # of each measurement at the predicted rate
HEADERS = 1500  # bytes of an answer's head that are not body


def build(folder):
    """Copies of the imagenet part as PCR shards, and the same images as plain tars with as many
    samples each.
    """
    source = os.path.join(folder, "photos", "imagenet")
    copies = os.path.join(folder, "copies")
    for i in range(COPIES):
        shutil.copytree(source, os.path.join(copies, f"copy{i}"))
    served = os.path.join(folder, "served")
    index = pcrshard.encode(copies, os.path.join(served, "pcr"))
    os.makedirs(os.path.join(served, "plain"))
    files = jpeg_files(copies)
    per_shard = -(-len(files) // len(index.shards))
    for number in range(len(index.shards)):
        with tarfile.open(os.path.join(served, "plain", f"data-{number:06d}.tar"), "w") as tar:
            for i, path in enumerate(files[number * per_shard : (number + 1) * per_shard]):
                tar.add(path, f"{number:03d}{i:05d}.jpg")
    return served, index


def goodput(server, name, size):
    """Bytes a second of one plain download."""
    begun = time.perf_counter()
    subprocess.run(["curl", "-sf", "-o", os.devnull, server.url(name)], check=True)
    return size / (time.perf_counter() - begun)


def epochs(urls, mean_bytes, num_samples):
    """The shard list as often as fills the time."""
    return urls * max(1, round(SECONDS * RATE / (mean_bytes * num_samples)))


def read_all(dataset, expected, field="jpg"):
    """Images a second of one pass."""
    begun = time.perf_counter()
    count = sum(1 for sample in dataset if sample[field] is not None)
    seconds = time.perf_counter() - begun
    assert count == expected, f"expected {expected} samples, got {count}"
    return count / seconds


def pcr_round(server, index, scan, **options):
    """Images a second at a scan, and what the server sent."""
    urls = epochs(
        [server.url(f"pcr/{s.name}") for s in index.shards],
        index.prefix_bytes(scan) / index.num_samples,
        index.num_samples,
    )
    expected = index.num_samples * len(urls) // len(index.shards)
    server.reset()
    stage = wds.WebDataset(urls, shardshuffle=False).pcr_scan(scan, index=index, **options)
    rate = read_all(stage, expected)
    requests = server.requests()
    assert len(requests) == len(urls), f"{len(requests)} requests for {len(urls)} shards"
    body = sum(request.body_bytes for request in requests)
    prefix = sum(index.shards[i % len(index.shards)].prefix_stop(scan) for i in range(len(urls)))
    assert body == prefix, f"{body} bytes of body for prefixes of {prefix}"
    sent = sum(request.sent_bytes for request in requests)
    assert sent <= prefix + HEADERS * len(requests)
    return {"rate": rate, "body_over_prefix": body / prefix, "sent_over_prefix": sent / prefix}


def stock_round(server, served, index):
    names = sorted(os.listdir(os.path.join(served, "plain")))
    sizes = sum(os.path.getsize(os.path.join(served, "plain", name)) for name in names)
    urls = epochs(
        [server.url(f"plain/{name}") for name in names],
        sizes / index.num_samples,
        index.num_samples,
    )
    expected = index.num_samples * len(urls) // len(names)
    return read_all(wds.WebDataset(urls, shardshuffle=False), expected)


def link_part(served, index, rounds):
    """Images a second over the slow link, per scan, and of stock WebDataset."""
    figures = {name: [] for name in ("goodput", "stock", *SCANS)}
    largest = max(index.shards, key=lambda shard: shard.shard_bytes)
    with servers.limited_link(RATE) as link, servers.nginx(served, link=link) as server:
        for _ in range(rounds):
            figures["goodput"].append(goodput(server, f"pcr/{largest.name}", largest.shard_bytes))
            figures["stock"].append(stock_round(server, served, index))
            for scan in SCANS:
                figures[scan].append(pcr_round(server, index, scan))
    rows, lines = {}, []
    for scan in SCANS:
        mean = index.prefix_bytes(scan) / index.num_samples
        row = {"rate": summary([f["rate"] for f in figures[scan]])}
        row["predicted"] = summary([speed / mean for speed in figures["goodput"]])
        pairs = list(zip(figures[scan], figures["goodput"], figures["stock"], strict=True))
        row["over_predicted"] = summary([f["rate"] / (speed / mean) for f, speed, _ in pairs])
        row["over_stock"] = summary([f["rate"] / stock for f, _, stock in pairs])
        row["sent_over_prefix"] = figures[scan][0]["sent_over_prefix"]
        rows[str(scan)] = row
        cells = [
            show(row["rate"], 0),
            show(row["predicted"], 0),
            show(row["over_predicted"], 3),
            show(row["over_stock"]),
        ]
        lines.append(
            [scan, f"{mean / 1000:.1f}", *cells, f"{(row['sent_over_prefix'] - 1) * 100:.3f} %"]
        )
    header = [
        "scan",
        "kB/image",
        "images/s",
        "goodput / bytes",
        "ratio",
        "over stock",
        "headers sent",
    ]
    print_table(f"One reader, link of {RATE / 1e6:.0f} MB/s; median [quartiles]", header, lines)
    print(
        f"goodput {show(summary([g / 1e6 for g in figures['goodput']]))} MB/s, stock WebDataset "
        f"{show(summary(figures['stock']), 0)} images/s"
    )
    return {
        "scans": rows,
        "goodput": summary(figures["goodput"]),
        "stock": summary(figures["stock"]),
    }


def cache_part(served, index):
    """Bytes fetched through the cache: scan 2, then 5, then 5 again; then scan 5 in a cache of half
    the full size.
    """
    full = index.prefix_bytes(FULL)
    with servers.nginx(served) as server, tempfile.TemporaryDirectory() as folder:
        urls = [server.url(f"pcr/{shard.name}") for shard in index.shards]

        def epoch(scan, **options):
            server.reset()
            read_all(
                wds.WebDataset(urls, shardshuffle=False).pcr_scan(scan, index=index, **options),
                index.num_samples,
            )
            return sum(request.body_bytes for request in server.requests())

        large = {"cache_dir": os.path.join(folder, "large")}
        moved = [epoch(scan, **large) for scan in (2, 5, 5, 1)]
        expected = [index.prefix_bytes(2), index.prefix_bytes(5) - index.prefix_bytes(2), 0, 0]
        assert moved == expected, f"moved {moved}, expected {expected}"
        half = {"cache_dir": os.path.join(folder, "half"), "cache_bytes": full // 2}
        pressed = [epoch(scan, **half) for scan in (FULL, 5, 5)]
        held = sum(
            os.path.getsize(path)
            for path in jpeg_files(os.path.join(folder, "half", "entries"))
            if not path.endswith("json")
        )
        assert held <= full // 2, f"the cache holds {held} bytes of {full // 2}"
        assert pressed[-1] == 0, f"an epoch at scan 5 still moved {pressed[-1]} bytes"
    lines = [
        [what, f"{size / 1e6:.1f}"]
        for what, size in zip(("scan 2", "then 5", "5 again", "1"), moved, strict=True)
    ]
    lines += [
        [f"half of full: {what}", f"{size / 1e6:.1f}"]
        for what, size in zip(("full", "5", "5 again"), pressed, strict=True)
    ]
    print_table("MB that the server sent through a cache, epoch by epoch", ["epoch", "MB"], lines)
    return {"growth": moved, "half": pressed, "held": held, "full": full}


def s3_part(served, index):
    """Bytes and requests on the wire of S3."""
    rows = {}
    with servers.s3(os.path.join(served, "pcr")) as store:
        urls = [store.url(shard.name) for shard in index.shards]
        for scan in SCANS:
            store.reset()
            stage = wds.WebDataset(urls, shardshuffle=False).pcr_scan(
                scan, index=index, storage_options=store.storage_options
            )
            read_all(stage, index.num_samples)
            gets = [request for request in store.requests() if request.method == "GET"]
            assert len(gets) == len(urls), f"{len(gets)} GETs for {len(urls)} shards"
            rows[str(scan)] = sum(request.body_bytes for request in gets) / index.prefix_bytes(scan)
            assert rows[str(scan)] == 1
    print_table(
        "S3: bytes sent over prefix bytes, one GET a shard",
        ["scan", "ratio"],
        [[k, f"{v:.6f}"] for k, v in rows.items()],
    )
    return rows


def main():
    args = parse_args(__doc__, rounds=3)
    with photos() as folder:
        served, index = build(folder)
        assert read(os.path.join(served, "pcr", "pcr.json"))
        results = {"cache": cache_part(served, index), "s3": s3_part(served, index)}
        results["link"] = link_part(served, index, args.rounds)
    targets = []
    for scan, row in results["link"]["scans"].items():
        targets.append(
            judge(
                f"scan {scan}: images/s over goodput / prefix bytes",
                row["over_predicted"]["median"],
                0.97,
                at_most=False,
            )
        )
        targets.append(
            judge(
                f"scan {scan}: bytes sent over prefix bytes",
                row["sent_over_prefix"],
                1.01,
                at_most=True,
            )
        )
    for scan, limit in (("5", 2.05), ("2", 6)):
        found = results["link"]["scans"][scan]["over_stock"]["median"]
        targets.append(
            judge(f"scan {scan}: images/s over stock WebDataset", found, limit, at_most=False)
        )
    save(args, results, targets)


if __name__ == "__main__":
    main()
