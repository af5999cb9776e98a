"""What each scan costs in bytes: prefix over source, saving over full, overhead over the
entropy-coded bytes alone (index, tables, headers of images, tar headers and padding).

Asserts, for every image, that its pieces are what jpegtran makes of it.
"""

import os
import subprocess

import pcrshard

ROUNDS = 1
SCANS = (1, 2, 5, 10)
SAVINGS = {1: 15, 2: 6.8, 5: 2.05, 10: 1.0}
OVERHEADS = {
    "imagenet": {1: 0.03, 2: 0.02, 5: 0.01},
    "classify/ham224": {1: 0.06, 2: 0.04, 5: 0.04},
    "classify/flowers": {1: 0.06, 2: 0.04, 5: 0.04},
}


def _measure(bench, source, dst, options):
    """Encode a folder and add up its bytes: of the source, prefixes, and entropy-coded bytes."""
    index = pcrshard.encode(source, dst, options)
    files = bench.files(source)
    pieces, entropy = 0, dict.fromkeys(SCANS, 0)
    for entry in index.shards:
        with pcrshard.Shard(os.path.join(dst, entry.name)).load(10) as prefix:
            table = prefix.contents.groups.table
            pieces += int(table.sizes.sum())
            for scan in SCANS:
                entropy[scan] += int(table.own_bytes[:scan].sum())
    if not bench.quick:
        command = ["jpegtran", "-copy", "none", "-progressive"]
        made = [subprocess.run([*command, f], check=True, capture_output=True) for f in files]
        assert pieces == sum(len(done.stdout) - len(b"\xff\xd9") for done in made)
    prefixes = {scan: index.prefix_bytes(scan) for scan in (*SCANS, "full")}
    return sum(map(os.path.getsize, files)), prefixes, entropy


def run(bench):
    rows, found = [], {}
    with bench.photos("classify") as folder:
        photos = os.path.join(folder, "photos")
        sources = {name: os.path.join(photos, name) for name in sorted(os.listdir(photos))}
        for task in ("ham224", "flowers", "signs"):
            sources[f"classify/{task}"] = os.path.join(folder, "classify", task, "train")
        for name, source in list(sources.items())[: 2 if bench.quick else None]:
            count = 1024 if "/" in name else None
            options = pcrshard.EncodeOptions(**{"samples_per_shard": count} if count else {})
            dst = os.path.join(folder, "shards", name)
            size, prefixes, entropy = found[name] = _measure(bench, source, dst, options)
            row = {"set": name, "source MB": size / 1e6}
            row |= {f"at {scan}": stop / size for scan, stop in prefixes.items()}
            row |= {f"saved {scan}": prefixes["full"] / prefixes[scan] for scan in SCANS}
            row |= {f"over {scan}": prefixes[scan] / entropy[scan] - 1 for scan in SCANS}
            rows.append(row)
    bench.show("Bytes of prefixes", rows)
    if bench.quick:
        return
    by_name = {row["set"]: row for row in rows}
    for scan, least in SAVINGS.items():
        saved = by_name["imagenet"][f"saved {scan}"]
        bench.target(f"imagenet, saving at scan {scan}", saved, least=least)
    bench.target("imagenet, full over source", by_name["imagenet"]["at full"], most=0.965)
    for name, limits in OVERHEADS.items():
        for scan, most in limits.items():
            over = by_name[name][f"over {scan}"]
            bench.target(f"{name}, overhead at scan {scan}", over, most=most)
