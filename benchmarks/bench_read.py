"""Reading prefixes from the page cache to lists of JPEG bytes, against a bare read of the same
bytes, in CPU time.

Each measurement is a process of its own, so that no case inherits the memory of another. Its first
pass is the regime "fresh", the passes after it "steady". Imports and a tiny shard come before, so
that "fresh" is about memory, not about loading code. Asserts the JPEG bytes' sizes and that at most
prefix_stop bytes are read. "plain" is what one would write without pcrshard's reader: the bare
read, the pieces of each image joined, and one CRC-32C of each.
"""

import gc
import json
import os
import resource
import subprocess
import sys
import time

from common import jpeg_files, judge, parse_args, photos, print_table, read, save, show, summary

import pcrshard
from pcrshard.checksum import crc32c
from pcrshard.encoding.shard_writer import (
    ShardFormat,
    encode_sample,
    write_dataset_index,
    write_shard,
)
from pcrshard.format.group_table import decode_table, join_tables
from pcrshard.format.piece_places import piece_starts
from pcrshard.format.shard_index import decode_head, decode_index

SCANS = (1, 2, 5, 10)
CASES = {"8 shards": "a", "1 shard": "b", "1 shard, 4x": "c"}
HOWS = ("bare", "plain", "unchecked", "checked")
REGIMES = ("fresh", "steady")
STEADY_SECONDS = 0.2  # CPU time of the steady passes of a process
TARGET_RATIO, TARGET_MIBS = 0.5, 400


def build(folder):
    """The imagenet part as 8 shards, as one, and as one of four copies; and a tiny one."""
    source = os.path.join(folder, "photos", "imagenet")
    pcrshard.encode(source, os.path.join(folder, "a"))
    samples = [
        encode_sample(
            {"__key__": os.path.relpath(path, source).rpartition(".")[0], "jpg": read(path)}
        )
        for path in jpeg_files(source)
    ]
    copies = [sample._replace(key=f"copy{i}/{sample.key}") for i in range(4) for sample in samples]
    for name, part in {"b": samples, "c": copies, "tiny": samples[:1]}.items():
        dst = os.path.join(folder, name)
        entry = write_shard(os.path.join(dst, "data-000000.tar"), part, ShardFormat())
        write_dataset_index(dst, pcrshard.DatasetIndex("standard", 10, (entry,)))


def bare(files):
    for path, _, stop, _ in files:
        with open(path, "rb") as file:
            data = file.read(stop)
        assert len(data) == stop


def jpegs(files, scan, check):
    for path, entry, _, expected in files:
        data = [
            sample["jpg"] for sample in pcrshard.Shard(path, entry=entry, check=check).samples(scan)
        ]
        assert sum(map(len, data)) == expected


def plain(files, scan):
    for path, _, stop, expected in files:
        with open(path, "rb") as file:
            shard = file.read(stop)
        head = decode_head(shard[512:1024])
        index = decode_index(head, shard[1024 : 1024 + head.body_bytes])
        places = index.table_places(0, scan)
        tables = [decode_table(index, place, shard[place.start : place.stop]) for place in places]
        table = join_tables(tables)
        pieces = [[] for _ in range(index.num_units)]
        headers = memoryview(table.headers)
        starts = piece_starts(index, table).tolist()
        for row, sizes, lengths in zip(
            starts, table.own_bytes.tolist(), table.header_sizes.tolist(), strict=True
        ):
            for unit, (start, size, length) in enumerate(zip(row, sizes, lengths, strict=True)):
                pieces[unit] += [headers[:length], shard[start : start + size]]
                headers = headers[length:]
        data = []
        for unit, crc in enumerate(table.crcs[-1].tolist()):
            jpeg = b"".join([*pieces[unit], b"\xff\xd9"])
            assert crc32c(jpeg) == crc32c(b"\xff\xd9", crc)
            data.append(jpeg)
        assert sum(map(len, data)) == expected


def plan(folder, case, scan):
    """(path, entry, prefix_stop, bytes of all JPEGs) of each shard."""
    index, paths = pcrshard.open_dataset(os.path.join(folder, case))
    files = []
    for entry, path in zip(index.shards, paths, strict=True):
        with pcrshard.Shard(path).load(scan) as prefix:
            sizes = int(prefix.contents.groups.table.sizes.sum()) + 2 * entry.num_samples
        files.append((path, entry, entry.prefix_stop(scan), sizes))
    return files


def bytes_read(function):
    """Bytes that this process asked of read calls while the function ran, from /proc/self/io."""
    function()
    io = os.open("/proc/self/io", os.O_RDONLY)
    try:
        before = os.pread(io, 4096, 0)
        function()
        after = os.pread(io, 4096, 0)
    finally:
        os.close(io)
    # The first look is itself a read, counted after its text was made.
    return rchar(after) - rchar(before) - len(before)


def rchar(text):
    return int(text.split()[1])


def child(folder, case, scan, how):
    """One process: a first pass, then steady ones; prints figures as JSON."""
    jpegs(plan(folder, "tiny", 1), 1, check=True)
    files = plan(folder, case, scan)

    def work():
        if how == "bare":
            bare(files)
        elif how == "plain":
            plain(files, scan)
        else:
            jpegs(files, scan, how == "checked")

    gc.collect()
    figures = {"fresh": measure(work)}
    passes = [measure(work) for _ in range(2)]
    count = max(3, int(STEADY_SECONDS / max(passes[-1]["cpu"], 1e-6)))
    figures["steady"] = measure(work, min(count, 200))
    stops = sum(stop for _, _, stop, _ in files)
    requested = bytes_read(work)
    if how not in ("bare", "plain"):
        assert requested <= stops, f"read {requested} bytes, prefix stops add up to {stops}"
    print(json.dumps(figures | {"bytes": stops, "requested": requested}))


def measure(work, passes=1):
    """CPU seconds, wall seconds and minor page faults of a pass."""
    faults, wall, cpu = (
        resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
        time.perf_counter(),
        time.process_time(),
    )
    for _ in range(passes):
        work()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return {"cpu": cpu / passes, "wall": wall / passes, "faults": faults / passes}


def run_child(*args):
    done = subprocess.run(
        [sys.executable, __file__, "--child", *map(str, args)], check=True, stdout=subprocess.PIPE
    )
    return json.loads(done.stdout)


def summarise(rounds):
    """Rows for the JSON file: rate, ratio to the bare read of the same round, faults."""
    rows = []
    for (case, scan, how), figures in rounds.items():
        for regime in REGIMES:
            mib = figures[0]["bytes"] / 2**20
            base = rounds[case, scan, "bare"]
            row = {
                "case": case,
                "scan": scan,
                "how": how,
                "regime": regime,
                "bytes": figures[0]["bytes"],
            }
            row["mib_per_cpu_s"] = summary([mib / f[regime]["cpu"] for f in figures])
            row["mib_per_s"] = summary([mib / f[regime]["wall"] for f in figures])
            row["ratio"] = summary(
                [b[regime]["cpu"] / f[regime]["cpu"] for b, f in zip(base, figures, strict=True)]
            )
            row["faults"] = summary([f[regime]["faults"] for f in figures])
            row["requested_over_prefix"] = figures[0]["requested"] / figures[0]["bytes"]
            rows.append(row)
    return rows


def report(rows):
    found = {(r["case"], r["scan"], r["how"], r["regime"]): r for r in rows}
    for regime in REGIMES:
        lines = []
        for case in CASES:
            for scan in SCANS:
                row = {how: found[case, scan, how, regime] for how in HOWS}
                line = [case, scan, f"{row['bare']['bytes'] / 2**20:.1f}"]
                line += [show(row[how]["mib_per_cpu_s"], 0) for how in HOWS]
                line += [show(row[how]["ratio"]) for how in HOWS[1:]]
                line += [f"{row[how]['faults']['median']:.0f}" for how in ("bare", "checked")]
                lines.append(line)
        header = [
            "case",
            "scan",
            "MiB",
            *(f"{how} MiB/s" for how in HOWS),
            *(f"{how} ratio" for how in HOWS[1:]),
        ]
        title = (
            f"{regime}: MiB per CPU second, ratio to the bare read, page faults a pass; median "
            "[quartiles]"
        )
        print_table(title, [*header, "faults bare", "faults checked"], lines)


def main():
    if sys.argv[1:2] == ["--child"]:
        folder, case, scan, how = sys.argv[2:]
        child(folder, case, int(scan), how)
        return
    args = parse_args(__doc__, rounds=9)
    rounds = {(case, scan, how): [] for case in CASES for scan in SCANS for how in HOWS}
    with photos() as folder:
        build(folder)
        for _ in range(args.rounds):
            for (case, scan, how), figures in rounds.items():
                figures.append(run_child(folder, CASES[case], scan, how))
    rows = summarise(rounds)
    report(rows)
    targets = []
    for regime in REGIMES:
        checked = [row for row in rows if row["regime"] == regime and row["how"] == "checked"]
        for row in checked:
            what = f"{regime}, {row['case']}, scan {row['scan']}, checked: rate over bare read"
            targets.append(judge(what, row["ratio"]["median"], TARGET_RATIO, at_most=False))
        slowest = min(checked, key=lambda row: row["mib_per_cpu_s"]["median"])
        what = (
            f"{regime}, {slowest['case']}, scan {slowest['scan']} (the slowest), checked: MiB per "
            "CPU second"
        )
        targets.append(judge(what, slowest["mib_per_cpu_s"]["median"], TARGET_MIBS, at_most=False))
    save(args, rows, targets)


if __name__ == "__main__":
    main()
