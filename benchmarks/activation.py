"""Ways to save memory for backward, side by side: peak memory and time of a step.

With a GPU: ResNet-50 and ViT-Tiny at 224x224, seconds of its work, peaks of its allocator. On a CPU
smaller ones, CPU seconds, and peaks of the resident set of a process whose C library gives freed
memory back. Each row of the first table is a process of its own; overhead is interleaved.
"""

import contextlib
import json
import os
import time

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from evidence.activations.models import resnet18, resnet50
from evidence.transformers.models import ViT
from pcrshard import compress_activations
from pcrshard.activation import peak_memory

from .harness import Quartiles

ROUNDS = 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NETWORKS = {
    "ResNet-50": lambda size: resnet50(small=size < 100),
    "ResNet-18": lambda size: resnet18(small=size < 100),
    "ViT": lambda size: ViT(10, size=size, patch=16 if size > 100 else 4),
    "narrow": lambda size: resnet18(16, small=size < 100),
}
# The codec or method, and whether the model is compiled.
WAYS = {
    "plain": (None, False),
    "int8": ("int8", False),
    "bits": ("bits", False),
    "zstd": ("zstd", False),
    "offload": ("offload", False),
    "checkpoint": ("checkpoint", False),
    "compiled": (None, True),
    "compiled, int8": ("int8", True),
    "compiled, bits": ("bits", True),
    "compiled, fp8 pass": ("fp8", True),
}
OVERHEAD = {"int8": 0.08, "bits": None, "zstd": 0.15}
# Inductor's own activation quantization, of every tensor of a mebibyte or more.
FP8 = {
    "quant_type": "torch.float8_e5m2",
    "size_in_mb": 1,
    "use_scaling": True,
    "allowed_dtypes": "torch.float32;torch.bfloat16",
}


class Recomputed(torch.nn.Module):
    """A block that is computed again in the backward pass."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, values):
        return checkpoint(self.block, values, use_reentrant=False)


def _make_step(way, network, batch, size):
    """A function that runs a step and returns the loss; and the saver, if there is one."""
    method, is_compiled = WAYS[way]
    torch.manual_seed(0)
    model = NETWORKS[network](size).to(DEVICE)
    images = torch.randn(batch, 3, size, size, device=DEVICE)
    labels = torch.arange(batch, device=DEVICE) % 10
    saver = None
    context = contextlib.nullcontext()
    if method in OVERHEAD:
        saver = context = compress_activations(model, codec=method)
    elif method == "offload":
        context = torch.autograd.graph.save_on_cpu(pin_memory=DEVICE == "cuda")
    elif method == "checkpoint":
        for position, block in enumerate(model.blocks):
            model.blocks[position] = Recomputed(block)
    elif method == "fp8":
        options = {"activation_quantization_aten_pass": FP8}
        torch._inductor.config.post_grad_fusion_options = options
    forward = torch.compile(model, fullgraph=True) if is_compiled else model

    def step():
        with context:
            loss = functional.cross_entropy(forward(images), labels)
        loss.backward()
        model.zero_grad()
        return float(loss.detach())

    return step, saver


def _clock():
    """Seconds of the device's work, or of this process's CPU time."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def measure(way, network, batch, size, rounds):
    """As JSON: the peak of a step, its seconds, the loss and the ratio of saved bytes."""
    torch.set_num_threads(1)
    step, saver = _make_step(way, network, int(batch), int(size))
    step()
    with peak_memory(DEVICE) as peak:
        loss = step()
    seconds = []
    for _ in range(int(rounds)):
        begun = _clock()
        step()
        seconds.append(_clock() - begun)
    ratio = 1.0 if saver is None else saver.report().ratio
    return json.dumps([peak.num_bytes, seconds, loss, ratio])


def _compare(bench, ways, network, batch, size):
    rows = []
    for way in ways:
        peak, seconds, loss, ratio = bench.worker(
            "measure", way, network, batch, size, bench.rounds
        )
        if way == "plain":
            plain_peak, plain_loss = peak, loss
        assert abs(loss - plain_loss) < 1e-2 * plain_loss
        rows.append(
            {
                "": way,
                "peak MB": peak / 1e6,
                "below plain": plain_peak / peak,
                "steps/s": 1 / Quartiles(seconds).median,
                "ratio of saved bytes": ratio,
            }
        )
    bench.show(f"{network}, batch {batch}, {size}x{size}, {DEVICE}", rows)


def _overhead(bench, network, batch, size, limits):
    made = {way: _make_step(way, network, batch, size) for way in ("plain", *limits)}
    steps = {way: step for way, (step, _) in made.items()}
    for step in steps.values():
        step()
    seconds = bench.interleaved(steps, _clock)
    rows = []
    for way, limit in limits.items():
        pairs = zip(seconds[way], seconds["plain"], strict=True)
        over = Quartiles(mine / plain - 1 for mine, plain in pairs)
        report = made[way][1].report()
        share = report.seconds / Quartiles(seconds["plain"]).median
        rows.append({"": way, "over plain": over, "packing and unpacking": share})
        if limit is not None:
            bench.target(
                f"{network}, {size}x{size}: time over plain, {way}", over.median, most=limit
            )
    bench.show(f"Time of a step, {network}, batch {batch}, {size}x{size}, {DEVICE}", rows)


def held_bytes(loss, model, images):
    """Bytes of the storages that the graph holds for backward, without weights and images."""
    outside = [*model.parameters(), *model.buffers(), images]
    known = {tensor.untyped_storage()._cdata for tensor in outside}
    nodes, seen, held = [loss.grad_fn], set(), {}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        for tensor in filter(torch.is_tensor, getattr(node, "saved_tensors", ())):
            storage = tensor.untyped_storage()
            held[storage._cdata] = storage.nbytes()
    return sum(size for storage, size in held.items() if storage not in known)


def compiled(network, batch, size):
    """As JSON: (loss, held bytes, error of the gradients) of a step, by way of saving."""
    torch.manual_seed(0)
    model = NETWORKS[network](int(size)).to(DEVICE)
    images = torch.randn(int(batch), 3, int(size), int(size), device=DEVICE)
    labels = torch.arange(int(batch), device=DEVICE) % 10
    graph = torch.compile(model, backend="aot_eager", fullgraph=True)
    ways = {"eager": (model, None), "eager, int8": (model, "int8")}
    ways |= {"compiled": (graph, None), "compiled, int8": (graph, "int8")}
    found, expected = {}, None
    for way, (forward, codec) in ways.items():
        context = compress_activations(forward, codec=codec) if codec else contextlib.nullcontext()
        model.zero_grad()
        with context:
            loss = functional.cross_entropy(forward(images), labels)
        held = held_bytes(loss, model, images) if forward is graph else None
        loss.backward()
        gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()])
        expected = gradient if expected is None else expected
        wrong = float((gradient - expected).norm() / expected.norm())
        found[way] = [float(loss.detach()), held, wrong]
    return json.dumps(found)


def _compare_compiled(bench, network, batch, size):
    """Compiled code, under the bound that eager code has: fewer bytes, gradients as close."""
    found = bench.worker("compiled", network, batch, size)
    loss, plain, same = found["compiled"]
    loss_of_codes, held, wrong = found["compiled, int8"]
    eager_loss, _, eager_wrong = found["eager, int8"]
    assert same < 1e-5
    assert abs(loss - found["eager"][0]) < 1e-5 * loss
    assert abs(loss_of_codes - eager_loss) < 1e-5 * loss
    assert wrong < 1.1 * eager_wrong
    bench.target(f"{network}, {size}x{size}, compiled: saved bytes, int8", plain / held, least=3.5)
    rows = [
        {"": way, "held MB": num_bytes / 1e6 if num_bytes else "", "error of gradients": error}
        for way, (_, num_bytes, error) in found.items()
    ]
    bench.show(f"Compiled {network} (aot_eager), batch {batch}, {size}x{size}", rows)


def run(bench):
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    torch.set_num_threads(1)
    if bench.quick:
        _compare(bench, ("plain", "int8", "bits", "zstd", "offload", "checkpoint"), "narrow", 4, 32)
        return
    if DEVICE == "cuda":
        cases = (("ResNet-50", 64, 224), ("ViT", 64, 224))
    else:
        cases = (("ResNet-18", 16, 112), ("ViT", 8, 32))
    for network, batch, size in cases:
        _compare(bench, WAYS, network, batch, size)
    for network in ("ResNet-18", "ViT"):
        _compare_compiled(bench, network, 8, 112)
    batch = 64 if DEVICE == "cuda" else 16
    _overhead(bench, "ResNet-18", batch, 112, OVERHEAD)
    _overhead(bench, "ViT", batch, 112, OVERHEAD)
    _overhead(bench, "narrow", batch, 32, dict.fromkeys(OVERHEAD, 0.2))
