"""Encoding on a Dask cluster of two workers against a process pool of two, interleaved; and with a
Dask worker killed midway.

Asserts that every run writes the same bytes.
"""

import contextlib
import hashlib
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
    save,
    show,
    summary,
)

import pcrshard
from pcrshard.encoding.clusters import dask_executor

COPIES = 4
WORKERS = 2
OPTIONS = pcrshard.EncodeOptions(samples_per_shard=64)


@contextlib.contextmanager
def dask_cluster(folder):
    """Scheduler and workers as processes: (address, worker processes).

    In the session of this process: with one of their own Linux would give them a larger share of a
    busy machine (autogroup) than the pool gets.
    """
    python = [sys.executable, "-W", "ignore", "-m"]
    scheduler = subprocess.Popen(
        [
            *python,
            "distributed.cli.dask_scheduler",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--no-dashboard",
            "--no-jupyter",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    workers = []
    try:
        address = next(
            found[0] for line in scheduler.stderr if (found := re.search(r"tcp://[\d.]+:\d+", line))
        )
        command = [
            *python,
            "distributed.cli.dask_worker",
            address,
            "--nthreads",
            "1",
            "--no-nanny",
            "--no-dashboard",
        ]
        command += ["--local-directory", folder]
        workers += [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(WORKERS)]
        yield address, scheduler, workers
    finally:
        for process in [*workers, scheduler]:
            process.kill()
            process.wait()


def digest(folder):
    """Of all files but the journal."""
    result = hashlib.sha256()
    for name in sorted(os.listdir(folder)):
        if name != "encode-journal.json":
            with open(os.path.join(folder, name), "rb") as file:
                result.update(name.encode() + hashlib.file_digest(file, "sha256").digest())
    return result.hexdigest()


def cpu_seconds(pids):
    """CPU seconds of this process, of its ended children, and of the processes given."""
    total = time.process_time() + child_cpu()
    for pid in pids:
        with open(f"/proc/{pid}/stat") as file:
            total += sum(map(int, file.read().rpartition(")")[2].split()[11:13])) / os.sysconf(
                "SC_CLK_TCK"
            )
    return total


def encode(source, dst, pids=(), **how):
    """Wall seconds, CPU seconds of all processes that take part, cores that all of the machine's
    used, digest.
    """
    begin, busy, cpu = time.perf_counter(), machine_busy(), cpu_seconds(pids)
    pcrshard.encode(source, dst, OPTIONS, **how)
    wall = time.perf_counter() - begin
    result = {"wall": wall, "busy": (machine_busy() - busy) / wall, "digest": digest(dst)}
    result["cpu"] = cpu_seconds(pids) - cpu
    shutil.rmtree(dst)
    return result


def with_local(source, dst):
    return encode(source, dst, workers=WORKERS)


def with_dask(source, dst, folder, *, kill=False):
    """A cluster that is up already; starting it is not counted, as for any cluster."""
    with (
        dask_cluster(folder) as (address, scheduler, workers),
        dask_executor(address) as executor,
    ):
        executor._client.wait_for_workers(WORKERS)
        # Workers import the package with their first task, the pool's are forked with it imported.
        list(executor.map(len, [OPTIONS.name] * WORKERS))
        executor._client.run(__import__, "pcrshard.encoding.encode_dataset")
        killed = []

        def midway(done, total):
            if kill and not killed and done >= total / 2:
                workers[0].kill()
                killed.append(done / total)

        pids = [] if kill else [process.pid for process in (scheduler, *workers)]
        result = encode(source, dst, pids, executor=executor, progress=midway)
        return result | {"killed_at": killed[0] if killed else None}


def main():
    args = parse_args(__doc__, rounds=5)
    with photos() as folder:
        source, dst = os.path.join(folder, "copies"), os.path.join(folder, "dst")
        for i in range(COPIES):
            shutil.copytree(
                os.path.join(folder, "photos", "imagenet"), os.path.join(source, f"copy{i}")
            )
        runs = []
        for _ in range(args.rounds):
            row = {"local": with_local(source, dst), "dask": with_dask(source, dst, folder)}
            row["killed"] = with_dask(source, dst, folder, kill=True)
            row["local again"] = with_local(source, dst)
            assert len({part["digest"] for part in row.values()}) == 1, "the engines' bytes differ"
            assert row["killed"]["killed_at"]
            runs.append(row)
        images = len(jpeg_files(source))
    names = list(runs[0])
    results = {
        name: {key: summary([run[name][key] for run in runs]) for key in ("wall", "cpu", "busy")}
        for name in names
    }
    for ratio, name, key in (
        ("dask_over_local", "dask", "wall"),
        ("killed_over_local", "killed", "wall"),
        ("dask_cpu_over_local", "dask", "cpu"),
    ):
        results[ratio] = summary(
            [2 * run[name][key] / (run["local"][key] + run["local again"][key]) for run in runs]
        )
    results["images"] = images
    lines = [
        [
            name,
            show(results[name]["wall"]),
            "" if name == "killed" else show(results[name]["cpu"]),
            show(results[name]["busy"]),
        ]
        for name in names
    ]
    print_table(
        f"{images} images, {WORKERS} workers; median [quartiles]",
        ["engine", "wall s", "CPU s", "cores busy, all processes"],
        lines,
    )
    print(
        f"dask / local: {show(results['dask_over_local'], 3)}; in CPU time "
        f"{show(results['dask_cpu_over_local'], 3)}; with one of two workers killed midway: "
        f"{show(results['killed_over_local'], 3)}"
    )
    targets = [
        judge(
            "Dask over process pool, wall clock",
            results["dask_over_local"]["median"],
            1.1,
            at_most=True,
        )
    ]
    save(args, results, targets)


if __name__ == "__main__":
    main()
