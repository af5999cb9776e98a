"""Memory and time of a step: over a step, over batch sizes (Fig. 11), of the four compositions.

python -m reproduce_parts.activation_memory NAME BATCH prints the resident set over one step.
"""

import json
import os
import subprocess
import sys
import threading
import time

import torch

from .lab import ROOT

sys.path.insert(0, os.path.join(ROOT, "benchmarks"))
import bench_activation as bench

BATCHES = (8, 16, 32, 64)
PAGE = os.sysconf("SC_PAGE_SIZE")


def _resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def sample_step(name, size):
    """The resident set above what it was, about every 2 ms of one step: (seconds, bytes)."""
    torch.set_num_threads(1)
    step, _ = bench.make_step(name)
    step(size)
    begun = time.monotonic()
    before = _resident()
    samples = []
    ended = threading.Event()

    def watch():
        while not ended.wait(0.002):
            samples.append([time.monotonic() - begun, _resident() - before])

    watcher = threading.Thread(target=watch)
    watcher.start()
    step(size)
    ended.set()
    watcher.join()
    return samples


def timeline(name, size):
    """The same, in a process whose C library gives freed memory back."""
    limits = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    scripts = os.path.join(ROOT, "scripts")
    path = os.pathsep.join(filter(None, (scripts, ROOT, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "reproduce_parts.activation_memory", name, str(size)],
        env=os.environ | limits | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(lab):
    """All rows at one batch, plain and compressed over batches, and a step of each in time.

    A quick run stays in this process: its figures mean nothing, and imports take seconds.
    """
    size = 4 if lab.quick else 64
    rounds = 1 if lab.quick else 3
    batches = BATCHES[:2] if lab.quick else BATCHES
    step = bench.measure_step if lab.quick else bench.step_in_process
    torch.set_num_threads(1)
    overhead = {str(batch): bench.bench_overhead(batch, rounds) for batch in batches}
    peaks = {
        str(batch): {name: step(name, batch) for name in ("plain", "zstd")} for batch in batches
    }
    over_time = sample_step if lab.quick else timeline
    return {
        "batch": size,
        "compositions": bench.bench_memory(size, step),
        "deep": bench.bench_memory(size, step, "ResNet-110"),
        "overhead": overhead,
        "peaks": peaks,
        "budget_bytes": bench.BUDGET,
        "largest_batches": {} if lab.quick else bench.bench_batches(),
        "timelines": {name: over_time(name, size) for name in ("plain", "zstd")},
    }


if __name__ == "__main__":
    print(json.dumps(sample_step(sys.argv[1], int(sys.argv[2]))))
