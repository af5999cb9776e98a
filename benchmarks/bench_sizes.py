"""What each scan costs in bytes, for each photo set: prefix over source, saving over full, overhead
over the entropy-coded bytes alone: index, tables, headers of images, tar headers and padding.

The sizes do not vary, so there is one round. Asserts, for every image, that its pieces are what
jpegtran makes of it.
"""

import os
import subprocess

from common import jpeg_files, judge, parse_args, photos, print_table, save

import pcrshard

SCANS = (1, 2, 5, 10, "full")
LIMITS = {1: 15, 2: 6.8, 5: 2.05, 10: 1.0}
OVERHEADS = {
    "imagenet": {1: 0.03, 2: 0.02, 5: 0.01},
    "classify/ham224": {1: 0.06, 2: 0.04, 5: 0.04},
    "classify/flowers": {1: 0.06, 2: 0.04, 5: 0.04},
}


def measure(source, dst, options=pcrshard.EncodeOptions()):
    """Encode a folder and add up its bytes."""
    index = pcrshard.encode(source, dst, options)
    files = jpeg_files(source)
    own = dict.fromkeys((1, 2, 5, 10), 0)
    entropy = dict.fromkeys(own, 0)
    index_bytes = 0
    for entry in index.shards:
        shard = pcrshard.Shard(os.path.join(dst, entry.name))
        with shard.load(10) as prefix:
            table = prefix.contents.groups.table
        index_bytes += shard.head.index_stop
        for scan in own:
            own[scan] += int(table.sizes[:scan].sum())
            entropy[scan] += int(table.own_bytes[:scan].sum())
    jpegtran = sum(len(progressive(file)) - len(b"\xff\xd9") for file in files)
    assert own[10] == jpegtran, f"pieces have {own[10]} bytes, jpegtran's files {jpegtran}"
    return {
        "images": len(files),
        "shards": len(index.shards),
        "source_bytes": sum(map(os.path.getsize, files)),
        "prefix_bytes": {str(scan): index.prefix_bytes(scan) for scan in SCANS},
        "own_bytes": {str(scan): size for scan, size in own.items()},
        "entropy_bytes": {str(scan): size for scan, size in entropy.items()},
        "index_bytes": index_bytes,
    }


def progressive(file):
    return subprocess.run(
        ["jpegtran", "-copy", "none", "-progressive", file], check=True, capture_output=True
    ).stdout


def saving(row, scan):
    return row["prefix_bytes"]["full"] / row["prefix_bytes"][str(scan)]


def overhead(row, scan):
    return row["prefix_bytes"][str(scan)] / row["entropy_bytes"][str(scan)] - 1


def main():
    args = parse_args(__doc__, rounds=1)
    results = {}
    with photos("classify") as folder:
        for name in sorted(os.listdir(os.path.join(folder, "photos"))):
            results[name] = measure(
                os.path.join(folder, "photos", name), os.path.join(folder, "shards", name)
            )
        for task in ("ham224", "flowers", "signs"):
            options = pcrshard.EncodeOptions(samples_per_shard=1024)
            source = os.path.join(folder, "classify", task, "train")
            name = f"classify/{task}"
            results[name] = measure(source, os.path.join(folder, "shards", name), options)
    rows = [
        [name, row["images"], row["shards"], f"{row['source_bytes'] / 1e6:.2f}"]
        + [f"{row['prefix_bytes'][str(scan)] / row['source_bytes']:.3f}" for scan in SCANS]
        + [f"{saving(row, scan):.2f}x" for scan in SCANS[:-1]]
        + [f"{overhead(row, scan):.2%}" for scan in (1, 2, 5, 10)]
        for name, row in results.items()
    ]
    header = ["set", "images", "shards", "source MB", *(f"at {s}" for s in SCANS)]
    header += [*(f"saved {s}" for s in SCANS[:-1]), *(f"over {s}" for s in (1, 2, 5, 10))]
    title = (
        "at k: prefix over source. saved k: full prefix over prefix. over k: prefix over the "
        "entropy-coded bytes, less one. Sets of classify.tar have 1,024 samples a shard."
    )
    print_table(title, header, rows)
    row = results["imagenet"]
    targets = [
        judge(f"imagenet, saving at scan {scan}", saving(row, scan), limit, at_most=False)
        for scan, limit in LIMITS.items()
    ]
    total = row["prefix_bytes"]["full"] / row["source_bytes"]
    targets.append(judge("imagenet, full with metadata over source", total, 0.965, at_most=True))
    for name, limits in OVERHEADS.items():
        targets += [
            judge(
                f"{name}, overhead at scan {scan}",
                overhead(results[name], scan),
                limit,
                at_most=True,
            )
            for scan, limit in limits.items()
        ]
    save(args, results, targets)


if __name__ == "__main__":
    main()
