"""Memory and time of a step of small networks: peaks, and overhead by batch.

python -m evidence.activations.memory FUNCTION ARGUMENT ... prints what a function of this module
gives, as JSON: each figure of memory is of a process of its own.
"""

import bisect
import functools
import json
import os
import statistics
import subprocess
import sys
import time

import torch
from torch.nn import functional

from pcrshard import compress_activations
from pcrshard.activation import peak_memory

from .. import ROOT
from .models import resnet18, resnet110

CODECS = ("int8", "zstd", "predicted", "bits")
# How blocks are recomputed, the codec, and whether the backward pass runs inside of the saver, too,
# so that what a reentrant checkpoint computes again is compressed while it is needed.
WAYS = {
    "plain": (None, None, False),
    "checkpoint": ("frames", None, False),
    "int8": (None, "int8", False),
    "zstd": (None, "zstd", False),
    "predicted": (None, "predicted", False),
    "checkpoint + zstd, inputs": ("frames", "zstd", False),
    "checkpoint + zstd, all": ("reentrant", "zstd", True),
}
# For 32x32 images: few wide layers, and many narrow ones.
NETWORKS = {"ResNet-18": functools.partial(resnet18, 64), "ResNet-110": resnet110}
BUDGET = 150_000_000
BATCHES = (8, 16, 32, 64)
# A C library that gives freed memory back.
LIMITS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def _batch(size):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, 3, 32, 32, generator=generator)
    return images, torch.randint(0, 10, (size,), generator=generator)


def _loss(model, saver, images, labels):
    if saver is None:
        return functional.cross_entropy(model(images), labels)
    with saver:
        return functional.cross_entropy(model(images), labels)


def _make_step(way, network):
    """Return a function that runs a step of n 32x32 images, and the activation saver."""
    recompute, codec, inside = WAYS[way]
    torch.manual_seed(0)
    model = NETWORKS[network](recompute=recompute)
    saver = None if codec is None else compress_activations(model, codec=codec)

    def step(size):
        images, labels = _batch(size)
        if inside:
            with saver:
                _loss(model, None, images, labels).backward()
        else:
            _loss(model, saver, images, labels).backward()

    step(2)  # gradients and the libraries' own memory are there before what is measured
    return step, saver


def peak(way, size, network="ResNet-18"):
    """Peak of the second step, the most bytes that were stored, and CPU seconds."""
    step, saver = _make_step(way, network)
    begun = time.process_time()
    with peak_memory() as found:
        step(size)
    seconds = time.process_time() - begun
    stored = 0 if saver is None else saver.ledger.peak_bytes
    return {"peak_bytes": found.num_bytes, "stored_bytes": stored, "seconds": seconds}


def largest_batch(way):
    """The largest batch, a multiple of 4, whose steps stay within BUDGET."""
    step, _ = _make_step(way, "ResNet-18")

    def exceeds(size):
        with peak_memory() as found:
            step(size)
            step(size)
        return found.num_bytes > BUDGET

    sizes = range(4, 257, 4)
    return {"batch_size": 4 * bisect.bisect_left(sizes, True, key=exceeds)}


def _overhead(size, rounds):
    """CPU seconds of a step: the median, plain; of each codec over plain, rounds interleaved."""
    torch.manual_seed(0)
    model = resnet18(64)
    images, labels = _batch(size)
    savers = {"plain": None}
    savers |= {codec: compress_activations(model, codec=codec) for codec in CODECS}
    seconds = {name: [] for name in savers}
    for turn in range(rounds + 1):
        for name, saver in savers.items():
            model.zero_grad()
            begun = time.process_time()
            _loss(model, saver, images, labels).backward()
            if turn:
                seconds[name].append(time.process_time() - begun)
    plain = seconds.pop("plain")
    over = {
        name: {"median": statistics.median(a / b - 1 for a, b in zip(values, plain, strict=True))}
        for name, values in seconds.items()
    }
    return {"seconds": {"plain": {"median": statistics.median(plain)}}, "overhead": over}


def _apart(function, *arguments):
    """What a function of this module gives in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, function.__name__, *map(str, arguments)]
    environment = os.environ | LIMITS
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def _here(function, *arguments):
    return function(*arguments)


def measure(lab):
    """All of it. A quick run stays in this process: its figures mean nothing, and imports take
    seconds.
    """
    torch.set_num_threads(1)
    run, size, rounds, batches = (
        (_here, 4, 1, BATCHES[:2]) if lab.quick else (_apart, 64, 3, BATCHES)
    )
    both = ("plain", "zstd")
    ways = () if lab.quick else ("plain", "checkpoint", "zstd")
    return {
        "batch": size,
        "compositions": {way: run(peak, way, size) for way in WAYS},
        "deep": {way: run(peak, way, size, "ResNet-110") for way in WAYS},
        "overhead": {str(batch): _overhead(batch, rounds) for batch in batches},
        "peaks": {str(batch): {way: run(peak, way, batch) for way in both} for batch in batches},
        "budget_bytes": BUDGET,
        "largest_batches": {way: run(largest_batch, way) for way in ways},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, *values = sys.argv[1:]
    print(json.dumps(globals()[name](*(int(v) if v.isdigit() else v for v in values))))
