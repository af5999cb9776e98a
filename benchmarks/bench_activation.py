"""Ways to save memory for backward, side by side: time of a step, and peak memory.

python benchmarks/bench_activation.py [--device cuda] [--networks resnet50,vit] [--batch 64]
    [--size 224] [--ways plain,int8,...] [--rounds 5] [--profile] [--json FILE]

Each way is a process of its own. Peak memory is above what there was before the step: of CUDA's
allocator, or of the resident set of a process whose C library gives freed memory back. On a CPU
seconds are CPU time. ``--profile`` shows instead which operations of a step take the time.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time

import torch
from common import judge, print_table, save, summary
from torch.nn import functional

from pcrshard import compress_activations
from pcrshard.activation import peak_memory

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from evidence.activations.models import resnet18, resnet50
from evidence.transformers.models import ViT

NETWORKS = {
    "resnet18": lambda size: resnet18(classes=10, small=size < 100),
    "resnet50": lambda size: resnet50(classes=10, small=size < 100),
    "vit": lambda size: ViT(10, size=size, patch=16 if size > 100 else 4),
    "narrow": lambda size: resnet18(16, classes=10, small=size < 100),
}
# Codec or method, and whether the model is compiled.
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
EAGER = ("plain", "int8", "bits", "zstd")
# Inductor's own activation quantization, of every tensor of a mebibyte or more.
FP8 = {
    "activation_quantization_aten_pass": {
        "quant_type": "torch.float8_e5m2",
        "size_in_mb": 1,
        "use_scaling": True,
        "allowed_dtypes": "torch.float32;torch.bfloat16",
    }
}
LIMITS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def make_step(way, network, batch, size, device):
    """A function that runs a step and returns the loss; and the saver, if there is one."""
    method, is_compiled = WAYS[way]
    torch.manual_seed(0)
    model = NETWORKS[network](size).to(device)
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.arange(batch, device=device) % 10
    saver = None
    context = contextlib.nullcontext()
    if method in ("int8", "bits", "zstd"):
        saver = context = compress_activations(model, codec=method)
    elif method == "offload":
        context = torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda")
    elif method == "checkpoint":
        blocks = model.blocks
        for position, block in enumerate(blocks):
            blocks[position] = Recomputed(block)
    elif method == "fp8":
        torch._inductor.config.post_grad_fusion_options = FP8
    forward = torch.compile(model, fullgraph=True) if is_compiled else model

    def step():
        with context:
            loss = functional.cross_entropy(forward(images), labels)
        loss.backward()
        model.zero_grad()
        return float(loss.detach())

    return step, saver


class Recomputed(torch.nn.Module):
    """A block that is computed again in the backward pass."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, values):
        return torch.utils.checkpoint.checkpoint(self.block, values, use_reentrant=False)


def clock(device):
    """Seconds: of the device's work, or of this process's CPU time."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def measure(way, network, batch, size, device, rounds):
    """Seconds of steps, the peak of one, and the loss."""
    step, saver = make_step(way, network, batch, size, device)
    step()
    with peak_memory(device) as peak:
        loss = step()
    seconds = []
    for _ in range(rounds):
        begun = clock(device)
        step()
        seconds.append(clock(device) - begun)
    report = None if saver is None else saver.report()
    return {
        "peak_bytes": peak.num_bytes,
        "seconds": summary(seconds),
        "loss": loss,
        "ratio": None if report is None else report.ratio,
        "packing_seconds": None if report is None else report.seconds,
    }


def in_process(way, network, args):
    """:func:`measure` in a process of its own."""
    command = [sys.executable, os.path.abspath(__file__), "--row", way, "--networks", network]
    for name in ("batch", "size", "device", "rounds", "threads"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(
        command, env=os.environ | LIMITS, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def overhead(network, args):
    """Time of steps over plain ones, interleaved: the median ratio of neighbors, per codec."""
    steps = {
        way: make_step(way, network, args.batch, args.size, args.device)[0]
        for way in args.ways.split(",")
        if way in EAGER
    }
    seconds = {way: [] for way in steps}
    for turn in range(args.rounds + 1):
        for way, step in steps.items():
            begun = clock(args.device)
            step()
            if turn:
                seconds[way].append(clock(args.device) - begun)
    plain = seconds["plain"]
    found = {
        way: summary([mine / base - 1 for mine, base in zip(values, plain, strict=True)])
        for way, values in seconds.items()
        if way != "plain"
    }
    print_table(
        f"{network}, batch {args.batch}, {args.size}x{args.size}: time over plain",
        ("", "median", "of plain s"),
        [
            (way, f"{row['median']:+.1%}", f"{summary(plain)['median']:.2f}")
            for way, row in found.items()
        ],
    )
    return found


def profile(network, args):
    """The operations of a step that take the most time, plain and packed."""
    for way in args.ways.split(","):
        step, saver = make_step(way, network, args.batch, args.size, args.device)
        step()
        with torch.profiler.profile() as profiler:
            step()
        print(f"\n{network}, {way}")
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=12))
        if saver is not None:
            print(saver.report())


def compare(network, args):
    """The table of all ways."""
    rows = {way: in_process(way, network, args) for way in args.ways.split(",")}
    plain = rows["plain"]
    cells = []
    for way, row in rows.items():
        if "error" in row:
            cells.append((way, row["error"], "", "", ""))
            continue
        assert abs(row["loss"] - plain["loss"]) < 1e-2 * abs(plain["loss"]), "another loss"
        cells.append(
            (
                way,
                f"{row['peak_bytes'] / 1e6:.0f}",
                f"{plain['peak_bytes'] / row['peak_bytes']:.2f}x",
                f"{1 / row['seconds']['median']:.2f}",
                f"{row['ratio']:.2f}x" if row["ratio"] else "",
            )
        )
    print_table(
        f"{network}, batch {args.batch}, {args.size}x{args.size}, {args.device}",
        ("", "peak MB", "below plain", "steps/s", "ratio of saved bytes"),
        cells,
    )
    return rows


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--networks", default="resnet50,vit", help=", ".join(NETWORKS))
    parser.add_argument("--ways", default=",".join(WAYS), help="by default all")
    parser.add_argument("--batch", type=int, default=64, help="images per step (default: 64)")
    parser.add_argument("--size", type=int, default=224, help="pixels of a side (default: 224)")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps (default: 5)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--profile", action="store_true", help="show the operations of a step")
    parser.add_argument("--overhead", action="store_true", help="only time, interleaved")
    parser.add_argument("--json", default="bench_activation.json", help="where the figures go")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    args = options()
    torch.set_num_threads(args.threads)
    names = args.networks.split(",")
    if args.row:
        figures = measure(args.row, names[0], args.batch, args.size, args.device, args.rounds)
        print(json.dumps(figures))
    elif args.profile:
        for name in names:
            profile(name, args)
    elif args.overhead:
        found = {name: overhead(name, args) for name in names}
        limits = {"zstd": 0.15, "int8": 0.08}
        targets = [
            judge(f"{name}: time over plain, {way}", row["median"], limits[way], at_most=True)
            for name, ways in found.items()
            for way, row in ways.items()
            if way in limits
        ]
        save(args, {"overhead": found}, targets)
    else:
        save(args, {name: compare(name, args) for name in names}, [])


if __name__ == "__main__":
    main()
