"""Encoding: CPU time against jpegtran, parallel efficiency on two cores, peak memory of a worker.

Asserts that every image's pieces are byte for byte jpegtran's file.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time

from common import (
    child_cpu,
    jpeg_files,
    judge,
    machine_busy,
    parse_args,
    photos,
    print_table,
    read,
    save,
    show,
    summary,
)

import pcrshard
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.format.scan_script import STANDARD, scans_for
from pcrshard.format.shard_format import ShardFormat
from pcrshard.jpeg.markers import map_jpeg
from pcrshard.jpeg.pixels import make_progressive

COPIES = 4
ONE_SHARD = pcrshard.EncodeOptions(num_shards=1)


def jpegtran(files, out):
    """CPU seconds of one jpegtran process per file."""
    begin = child_cpu()
    for file in files:
        subprocess.run(
            ["jpegtran", "-copy", "none", "-progressive", "-outfile", out, file], check=True
        )
    return child_cpu() - begin


def in_process(files):
    """CPU seconds of the same transcoding by the native core, without
    processes: what of the encoder is not pcrshard's own.
    """
    begin = time.process_time()
    for file in files:
        jpeg = read(file)
        found = map_jpeg(jpeg)
        make_progressive(jpeg, scans_for(STANDARD, found.color, len(found.frame.components)))
    return time.process_time() - begin


def encode(source, dst, **kwargs):
    """Encode into a folder that is removed again; returns wall seconds, CPU seconds, cores that
    other processes used.
    """
    busy, wall, cpu = machine_busy(), time.perf_counter(), time.process_time() + child_cpu()
    index = pcrshard.encode(source, dst, **kwargs)
    wall, cpu = time.perf_counter() - wall, time.process_time() + child_cpu() - cpu
    others = max(0.0, machine_busy() - busy - cpu) / wall
    assert index.num_samples == len(jpeg_files(source))
    shutil.rmtree(dst)
    return wall, cpu, others


def check(files, folder):
    """The pieces of every image, EOI added, are jpegtran's file."""
    out = os.path.join(folder, "out.jpg")
    for file in files:
        jpegtran([file], out)
        pieces = encode_jpeg(read(file), ShardFormat().scan_script).pieces
        assert b"".join(pieces[:-1]) + b"\xff\xd9" == read(out), f"{file}: differs from jpegtran"


def peak_kib():
    """Peak resident memory of this process; of this program only, unlike ru_maxrss."""
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\s+(\d+)", file.read())[1])


def memory_child(source, dst):
    """A fresh worker: its peak after the imports, and after one shard."""
    before = peak_kib()
    index = pcrshard.encode(source, dst, ONE_SHARD, workers=1)
    print(
        json.dumps(
            {
                "baseline": before * 1024,
                "peak": peak_kib() * 1024,
                "shard": index.shards[0].shard_bytes,
            }
        )
    )


def memory(source, dst):
    command = [sys.executable, __file__, "--memory", source, dst]
    figures = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    shutil.rmtree(dst)
    return figures | {
        "shards_above_baseline": (figures["peak"] - figures["baseline"]) / figures["shard"]
    }


def cpu_part(files, source, folder, rounds):
    """Encoder against jpegtran and against the bare library, interleaved."""
    figures = []
    for _ in range(rounds):
        row = {
            "jpegtran": jpegtran(files, os.path.join(folder, "out.jpg")),
            "library": in_process(files),
        }
        row["encode"] = encode(source, os.path.join(folder, "dst"), workers=1)[1]
        figures.append(row)
    result = {
        name: summary([1000 * row[name] / len(files) for row in figures]) for name in figures[0]
    }
    result["over_jpegtran"] = summary([row["encode"] / row["jpegtran"] for row in figures])
    result["over_library"] = summary([row["encode"] / row["library"] for row in figures])
    names = ("jpegtran", "library", "encode")
    cells = [
        *(show(result[name]) for name in names),
        show(result["over_jpegtran"], 3),
        show(result["over_library"], 3),
    ]
    print_table(
        "CPU ms per image; median [quartiles]",
        [*names, "encode/jpegtran", "encode/library"],
        [cells],
    )
    return result


def parallel_part(sources, folder, rounds):
    """T1 / (2 * T2) on the wall clock, and how busy other processes were meanwhile."""
    result, lines = {}, []
    for name, source in sources.items():
        dst = os.path.join(folder, "dst")
        runs = [
            (encode(source, dst, workers=1), encode(source, dst, workers=2)) for _ in range(rounds)
        ]
        row = {
            "t1": summary([one[0] for one, _ in runs]),
            "t2": summary([two[0] for _, two in runs]),
        }
        row["efficiency"] = summary([one[0] / (2 * two[0]) for one, two in runs])
        row["cpu_growth"] = summary([two[1] / one[1] for one, two in runs])
        row["others1"], row["others2"] = (summary([run[i][2] for run in runs]) for i in range(2))
        result[name] = row
        lines.append(
            [
                name,
                *(
                    show(row[key])
                    for key in ("t1", "t2", "efficiency", "cpu_growth", "others1", "others2")
                ),
            ]
        )
    header = [
        "images",
        "T1 s",
        "T2 s",
        "T1/(2 T2)",
        "CPU 2/1",
        "cores others used, 1 worker",
        "2 workers",
    ]
    print_table("Two workers against one, wall clock; median [quartiles]", header, lines)
    return result


def memory_part(sources, folder):
    rows = {name: memory(source, os.path.join(folder, "dst")) for name, source in sources.items()}
    cells = [
        [
            name,
            *(f"{row[key] / 2**20:.1f}" for key in ("shard", "baseline", "peak")),
            f"{row['shards_above_baseline']:.2f}",
        ]
        for name, row in rows.items()
    ]
    header = ["images", "shard MiB", "baseline MiB", "peak MiB", "shards above baseline"]
    print_table("Peak resident memory of a worker that encodes one shard", header, cells)
    return rows


def main():
    if sys.argv[1:2] == ["--memory"]:
        memory_child(*sys.argv[2:])
        return
    args = parse_args(__doc__, rounds=5)
    with photos() as folder:
        source, large = os.path.join(folder, "photos", "imagenet"), os.path.join(folder, "copies")
        for i in range(COPIES):
            shutil.copytree(source, os.path.join(large, f"copy{i}"))
        files = jpeg_files(source)
        sources = {f"{len(files)}": source, f"{COPIES * len(files)}": large}
        check(files, folder)
        results = {"cpu": cpu_part(files, source, folder, args.rounds)}
        results["parallel"] = parallel_part(sources, folder, args.rounds)
        results["memory"] = memory_part(sources, folder)
    targets = [
        judge(
            "CPU time over jpegtran's",
            results["cpu"]["over_jpegtran"]["median"],
            1.15,
            at_most=True,
        )
    ]
    for name, row in results["parallel"].items():
        targets.append(
            judge(
                f"parallel efficiency, {name} images",
                row["efficiency"]["median"],
                0.9,
                at_most=False,
            )
        )
    for name, row in results["memory"].items():
        targets.append(
            judge(
                f"peak memory in shards, {name} images",
                row["shards_above_baseline"],
                3,
                at_most=True,
            )
        )
    save(args, results, targets)


if __name__ == "__main__":
    main()
