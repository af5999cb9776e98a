"""Memory and time of a step of small networks: peaks, and overhead by batch.

python -m evidence.activations.memory FUNCTION ARGUMENT ... prints what a function of this module
gives, as JSON: each figure of memory is of a process of its own.
"""

import bisect
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import time

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from training.models import Residual, ResNet, conv, resnet18

from pcrshard import compress_activations
from pcrshard.activation import peak_memory

from .. import ROOT

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
# For 32x32 images: few wide layers, and many narrow ones (He et al. 2016, section 4.2).
NETWORKS = {
    "ResNet-18": functools.partial(resnet18, 10, stem=conv(3, 64)),
    "ResNet-110": functools.partial(ResNet, Residual, (18, 18, 18), 10, 16, conv(3, 16)),
}
BUDGET = 150_000_000
BATCHES = (8, 16, 32, 64)
# A C library that gives freed memory back.
LIMITS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def _backward(model, saver, size, *, inside=False):
    """A forward and a backward pass of 32x32 images."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, 3, 32, 32, generator=generator)
    labels = torch.randint(0, 10, (size,), generator=generator)
    with saver:
        loss = functional.cross_entropy(model(images), labels)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()


def _make_step(way, network):
    """Return a function that runs a step of n images, and the activation saver."""
    recompute, codec, inside = WAYS[way]
    torch.manual_seed(0)
    model = NETWORKS[network]()
    for block in model.blocks if recompute else ():
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=recompute == "reentrant"
        )
    saver = compress_activations(model, codec=codec) if codec else contextlib.nullcontext()
    step = functools.partial(_backward, model, saver, inside=inside)
    step(2)  # gradients and the libraries' own memory are there before what is measured
    return step, saver


def peak(way, size, network="ResNet-18"):
    """Peak of the second step, the most bytes that were stored, and CPU seconds."""
    step, saver = _make_step(way, network)
    begun = time.process_time()
    with peak_memory() as found:
        step(size)
    seconds = time.process_time() - begun
    stored = saver.ledger.peak_bytes if WAYS[way][1] else 0
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
    model = NETWORKS["ResNet-18"]()
    savers = {"plain": contextlib.nullcontext()}
    savers |= {codec: compress_activations(model, codec=codec) for codec in CODECS}
    seconds = {name: [] for name in savers}
    for turn in range(rounds + 1):
        for name, saver in savers.items():
            model.zero_grad()
            begun = time.process_time()
            _backward(model, saver, size)
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
