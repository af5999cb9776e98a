"""Ways to save memory for backward, side by side: peak memory, time, and error of the gradients.

On a CPU, CPU time and the resident set of a process whose C library gives freed memory back. Each
row of the first tables is a process.
"""

import contextlib
import functools
import os
import time

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from evidence.activations.models import ViT  # also makes `training` importable

# isort: split
from training.models import conv, resnet18, resnet50

from pcrshard import compress_activations
from pcrshard.activation import Compressor, peak_memory

from .harness import ratios

ROUNDS = 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NETWORKS = {
    "ResNet-50": lambda _: resnet50(10),
    "ResNet-18": lambda _: resnet18(10),
    "ViT": lambda size: ViT(10, size=size, patch=16),
    "narrow": lambda _: resnet18(10, 16, conv(3, 16)),  # for small images
}
EAGER = ("plain", "int8", "bits", "zstd", "offload", "checkpoint", "zstd+checkpoint")
COMPILED = ("aot_eager plain", "aot_eager int8", "inductor plain", "inductor int8", "inductor bits")
STEPS = (("ResNet-18", 112, 1.08, 1.15), ("ViT", 112, 1.08, 1.15), ("narrow", 32, 1.2, 1.2))


class Step:
    """A training step of a network in one of the ways, on synthetic images."""

    def __init__(self, way, network, batch, size):
        backend, _, method = way.rpartition(" ")
        torch.manual_seed(0)
        self.model = self.forward = NETWORKS[network](size).to(DEVICE)
        self.images = torch.randn(batch, 3, size, size, device=DEVICE)
        self.labels = torch.arange(batch, device=DEVICE) % 10
        self.context = contextlib.nullcontext()
        if method.endswith("checkpoint"):
            for block in self.model.blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        codec = method.removesuffix("+checkpoint")
        if codec in ("int8", "bits", "zstd"):
            self.context = compress_activations(self.model, codec=codec)
        elif method == "offload":
            self.context = torch.autograd.graph.save_on_cpu(pin_memory=DEVICE == "cuda")
        if backend:
            self.forward = torch.compile(self.model, backend=backend, fullgraph=True)

    def loss(self):
        with self.context:
            return functional.cross_entropy(self.forward(self.images), self.labels)

    def __call__(self):
        self.model.zero_grad()
        self.loss().backward()


def _clock():
    """Seconds of the device's work, or of this process's CPU time."""
    if DEVICE == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def held_bytes(loss, model, images):
    """Bytes of the storages that the graph holds for backward, without weights and images."""
    nodes, held = [loss.grad_fn], {}
    for node in nodes:  # grows
        nodes += {following for following, _ in node.next_functions} - {None, *nodes}
        for tensor in filter(torch.is_tensor, getattr(node, "saved_tensors", ())):
            held[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    for tensor in (*model.parameters(), *model.buffers(), images):
        held.pop(tensor.untyped_storage()._cdata, None)
    return sum(held.values())


def measure(way, network, batch, size, rounds):
    """A row of figures of one way."""
    torch.set_num_threads(1)
    both = []
    for each in ("plain", way):
        step = Step(each, network, int(batch), int(size))
        step()
        both.append(torch.cat([weight.grad.flatten() for weight in step.model.parameters()]))
    wrong = float((both[1] - both[0]).norm() / both[0].norm())
    loss = step.loss()
    row = {"": way, "held MB": "", "loss": float(loss.detach()), "error of gradients": wrong}
    if step.forward is not step.model:
        row["held MB"] = held_bytes(loss, step.model, step.images) / 1e6
    elif isinstance(step.context, Compressor):  # whose hooks would unpack what they hold
        row["held MB"] = step.context.report().stored_bytes / 1e6
    loss.backward()
    with peak_memory(DEVICE) as peak:
        step()
    begun = _clock()
    for _ in range(int(rounds)):
        step()
    row |= {"peak MB": peak.num_bytes / 1e6, "s/step": (_clock() - begun) / int(rounds)}
    return row


def _overhead(bench):
    """The time of a step with each codec over that of a plain one."""
    for network, size, *limits in STEPS:
        steps = {way: Step(way, network, 64, size) for way in ("plain", "int8", "zstd")}
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for step in steps.values():
                step()
            title = f"Step of {network}, batch 64, {size}x{size}, {DEVICE}, threads: {threads}"
            is_wall = threads > 1 and DEVICE == "cpu"
            seconds = bench.compare(title, steps, time.perf_counter if is_wall else _clock)
            for way, limit in zip(("int8", "zstd"), limits, strict=True):
                over = ratios(seconds[way], seconds["plain"])
                bench.target(f"{title}: {way} over plain", over, most=limit)


def run(bench):
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    large = ("ResNet-50", 64, 224) if DEVICE == "cuda" else ("ResNet-18", 8, 112)
    cases = [("narrow", 4, 32)] if bench.quick else [large, ("ViT", *large[1:])]
    for network, batch, size in cases:
        ways = EAGER if bench.quick else EAGER + COMPILED
        rows = [bench.worker("measure", way, network, batch, size, bench.rounds) for way in ways]
        assert all(abs(row["loss"] - rows[0]["loss"]) < 1e-2 * rows[0]["loss"] for row in rows)
        title = f"{network}, batch {batch}, {size}x{size}, {DEVICE}"
        bench.show(title, rows)
        if bench.quick:
            return
        by_way = {row[""]: row for row in rows}
        plain, packed = by_way["aot_eager plain"], by_way["aot_eager int8"]
        assert plain["error of gradients"] < 1e-5
        assert packed["error of gradients"] < 1.1 * by_way["int8"]["error of gradients"]
        ratio = plain["held MB"] / packed["held MB"]
        bench.target(f"{title}, compiled: saved bytes, int8", ratio, least=3.5)
    _overhead(bench)
