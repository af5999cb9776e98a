"""Decoding: WebDataset's own decoders against pcrshard.JpegHandler, at several scans, in CPU time
per image.

Both run as the .decode() stage over samples that are already in memory, on one thread. Asserts that
both give the same picture.
"""

import os
import time

import numpy as np
import torch
import webdataset as wds
from common import judge, parse_args, photos, print_table, save, show, summary

import pcrshard

SCANS = (1, 2, 5, "full", "source")
# WebDataset's decoder and the handler that takes its place.
PAIRS = {"pil": "rgb8", "rgb8": "rgb8", "torchrgb": "torchrgb"}
EVERY = 2  # each second image, to keep a round short


def load(folder):
    """The samples at each scan, and as they were in the source."""
    source = os.path.join(folder, "photos", "imagenet")
    index = pcrshard.encode(
        source, os.path.join(folder, "shards"), pcrshard.EncodeOptions(num_shards=1)
    )
    shard = pcrshard.Shard(os.path.join(folder, "shards", index.shards[0].name))
    samples = {scan: list(shard.samples(scan))[::EVERY] for scan in SCANS[:-1]}
    paths = {}
    for top, _, names in os.walk(source):
        paths |= {
            os.path.relpath(os.path.join(top, name), source).rpartition(".")[0]: os.path.join(
                top, name
            )
            for name in names
        }
    samples["source"] = []
    for sample in samples["full"]:
        with open(paths[sample["__key__"]], "rb") as file:
            samples["source"].append({"__key__": sample["__key__"], "jpg": file.read()})
    return samples


def decode(samples, how):
    """Run the stage; returns CPU milliseconds per image."""
    stage = wds.decode(how)
    # The stage decodes in place, so it is given copies.
    fresh = [dict(sample) for sample in samples]
    begin = time.process_time()
    count = sum(1 for sample in stage(iter(fresh)) if sample["jpg"] is not None)
    cpu = time.process_time() - begin
    assert count == len(samples)
    return 1000 * cpu / count


def check(samples, scan):
    """Both decoders give the same picture; returns the share of images that are equal to the last
    bit.

    Complete images must be equal. Unfinished ones differ, because libjpeg smooths between their
    blocks and the native core does not.
    """
    equal = total = 0
    for stock, ours in PAIRS.items():
        levels = 255 if stock == "torchrgb" else 1
        pairs = (
            wds.decode(how)(dict(sample) for sample in samples)
            for how in (stock, pcrshard.JpegHandler(ours))
        )
        for a, b in zip(*pairs, strict=True):
            x, y = (np.asarray(image["jpg"], np.float64) * levels for image in (a, b))
            assert x.shape == y.shape, (x.shape, y.shape)
            difference = np.abs(x - y)
            assert difference.mean() < (2 if scan in ("full", "source") else 40), (
                f"{a['__key__']}: pictures differ by {difference.mean():.2f} of 255"
            )
            equal += bool(difference.max() < 1e-3)
            total += 1
    assert equal == total or scan not in ("full", "source"), (
        f"{total - equal} complete images differ"
    )
    return equal / total


def main():
    args = parse_args(__doc__, rounds=7)
    torch.set_num_threads(1)
    with photos() as folder:
        samples = load(folder)
    equal = {scan: check(samples[scan], scan) for scan in SCANS}
    times = {(stock, scan): ([], []) for stock in PAIRS for scan in SCANS}
    for _ in range(args.rounds):
        for (stock, scan), (theirs, ours) in times.items():
            theirs.append(decode(samples[scan], stock))
            ours.append(decode(samples[scan], pcrshard.JpegHandler(PAIRS[stock])))
    rows, results = [], []
    for (stock, scan), (theirs, ours) in times.items():
        ratio = summary([a / b for a, b in zip(theirs, ours, strict=True)])
        row = {
            "stock": stock,
            "handler": PAIRS[stock],
            "scan": scan,
            "ratio": ratio,
            "equal": equal[scan],
        }
        results.append(row | {"stock_ms": summary(theirs), "handler_ms": summary(ours)})
        rows.append(
            [
                stock,
                PAIRS[stock],
                scan,
                show(summary(theirs)),
                show(summary(ours)),
                show(ratio),
                f"{equal[scan]:.1%}",
            ]
        )
    header = [
        "WebDataset",
        "JpegHandler",
        "scan",
        "WebDataset ms",
        "JpegHandler ms",
        "times faster",
        "equal pixels",
    ]
    print_table(
        f"{len(samples['full'])} images, CPU ms per image, median [quartiles]", header, rows
    )
    slowest = min(results, key=lambda row: row["ratio"]["median"])
    what = f"least gain over WebDataset ({slowest['stock']}, scan {slowest['scan']})"
    save(args, results, [judge(what, slowest["ratio"]["median"], 1.0, at_most=False)])


if __name__ == "__main__":
    main()
