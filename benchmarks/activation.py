"""Ways to save memory for backward, side by side: peak memory, time, and error of the gradients.

With a GPU: ResNet-50 and ViT-Tiny at 224x224, seconds of its work, peaks of its allocator. On a CPU
smaller ones, CPU seconds, and peaks of the resident set of a process whose C library gives freed
memory back. Each row of the first tables is a process of its own; overhead is interleaved.
"""

import contextlib
import functools
import json
import os
import time

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from training.models import conv, resnet18, resnet50

from evidence.transformers.models import ViT
from pcrshard import compress_activations
from pcrshard.activation import peak_memory

from .harness import ratios

ROUNDS = 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def small_stem(size, width=64):
    """First layers for small images; ``None`` for those that a ResNet has."""
    return conv(3, width) if size < 100 else None


NETWORKS = {
    "ResNet-50": lambda size: resnet50(10, stem=small_stem(size)),
    "ResNet-18": lambda size: resnet18(10, stem=small_stem(size)),
    "ViT": lambda size: ViT(10, size=size, patch=16 if size > 100 else 4),
    "narrow": lambda size: resnet18(10, 16, small_stem(size, 16)),
}
EAGER = ("plain", "int8", "bits", "zstd", "offload", "checkpoint", "zstd+checkpoint")
# In each of two compilers; fp8 is Inductor's own activation quantization.
COMPILED = ("aot_eager plain", "aot_eager int8", "inductor plain", "inductor int8",
            "inductor bits", "inductor fp8")  # fmt: skip
OVERHEAD = {"int8": 0.08, "bits": None, "zstd": 0.15}
FP8 = {"quant_type": "torch.float8_e5m2", "size_in_mb": 1, "use_scaling": True,
       "allowed_dtypes": "torch.float32;torch.bfloat16"}  # fmt: skip


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
        if codec in OVERHEAD:
            self.context = compress_activations(self.model, codec=codec)
        elif method == "offload":
            self.context = torch.autograd.graph.save_on_cpu(pin_memory=DEVICE == "cuda")
        elif method == "fp8":
            options = {"activation_quantization_aten_pass": FP8}
            torch._inductor.config.post_grad_fusion_options = options
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
    """As JSON: a row of figures of one way."""
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
    elif way in OVERHEAD:  # whose hooks would unpack what they hold
        row["held MB"] = step.context.report().stored_bytes / 1e6
    loss.backward()
    with peak_memory(DEVICE) as peak:
        step()
    begun = _clock()
    for _ in range(int(rounds)):
        step()
    row |= {"peak MB": peak.num_bytes / 1e6, "s/step": (_clock() - begun) / int(rounds)}
    return json.dumps(row)


def _compare(bench, ways, network, batch, size):
    rows = [bench.worker("measure", way, network, batch, size, bench.rounds) for way in ways]
    by_way = {row[""]: row for row in rows}
    for row in rows:
        assert abs(row["loss"] - rows[0]["loss"]) < 1e-2 * rows[0]["loss"]
    title = f"{network}, batch {batch}, {size}x{size}, {DEVICE}"
    bench.show(title, rows)
    if "aot_eager int8" in by_way:
        plain, packed = by_way["aot_eager plain"], by_way["aot_eager int8"]
        assert plain["error of gradients"] < 1e-5
        assert packed["error of gradients"] < 1.1 * by_way["int8"]["error of gradients"]
        ratio = plain["held MB"] / packed["held MB"]
        bench.target(f"{title}, compiled: saved bytes, int8", ratio, least=3.5)


def _overhead(bench, network, batch, size, limits):
    steps = {way: Step(way, network, batch, size) for way in ("plain", *limits)}
    for step in steps.values():
        step()
    title = f"Time of a step, {network}, batch {batch}, {size}x{size}, {DEVICE}"
    seconds = bench.compare(title, steps, _clock)
    for way, limit in limits.items():
        if limit is not None:
            over = ratios(seconds[way], seconds["plain"])
            bench.target(f"{title}: {way} over plain", over, most=1 + limit)


def run(bench):
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    torch.set_num_threads(1)
    if bench.quick:
        _compare(bench, EAGER, "narrow", 4, 32)
        return
    large = ("ResNet-50", 64, 224) if DEVICE == "cuda" else ("ResNet-18", 8, 112)
    for network in (large[0], "ViT"):
        _compare(bench, EAGER + COMPILED, network, *large[1:])
    batch = 64 if DEVICE == "cuda" else 16
    for network in ("ResNet-18", "ViT"):
        _overhead(bench, network, batch, 112, OVERHEAD)
    _overhead(bench, "narrow", batch, 32, dict.fromkeys(OVERHEAD, 0.2))
