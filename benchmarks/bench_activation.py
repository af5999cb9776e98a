"""Activation compression: ratio, peak memory, time of a step, predicted against measured noise.

python benchmarks/bench_activation.py [--rounds N] [--networks resnet18,vgg16] [--json FILE]

Peak memory is that of separate processes, whose C library gives freed memory back, above what
there was before the step. Overhead is CPU time of one thread, rounds interleaved. Ratios are of
passes over real photographs at 224x224 with initial weights, not of trained networks.
"""

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import time

import torch
from activation_models import UNet3d, alexnet, resnet18, resnet50, resnet110, vgg16
from common import jpeg_files, judge, machine, photos, print_table, read, save, show, summary
from torch.nn import functional

from pcrshard import compress_activations, decode_image
from pcrshard.activation.measurements import find_batch_size, gradient_noise, peak_memory

NETWORKS = {
    "alexnet": (alexnet, 16),
    "vgg16": (vgg16, 4),
    "resnet18": (lambda: resnet18(classes=10, small=False), 16),
    "resnet50": (lambda: resnet50(classes=10, small=False), 8),
}
CODECS = ("int8", "zstd", "predicted", "bits")
# Codec, share of the standard deviation, whether the images are lossy, as in the paper.
CASES = (
    ("int8", 0.05, False),
    ("bits", 0.05, False),
    ("zstd", 0.05, False),
    ("zstd", 0.1, False),
    ("zstd", 0.1, True),
    ("predicted", 0.05, True),
)
# Each row: how blocks are recomputed, the codec, and whether the backward pass runs inside of the
# saver, too, so that what a reentrant checkpoint computes again is compressed while it is needed.
MEMORY = {
    "plain": (None, None, False),
    "checkpoint": ("frames", None, False),
    "int8": (None, "int8", False),
    "zstd": (None, "zstd", False),
    "predicted": (None, "predicted", False),
    "checkpoint + zstd, inputs": ("frames", "zstd", False),
    "checkpoint + zstd, all": ("reentrant", "zstd", True),
}
# For 32x32 images: few wide layers, and many narrow ones.
MEASURED = {
    "ResNet-18": functools.partial(resnet18, 64),
    "ResNet-110": resnet110,
}


BUDGET = 150_000_000


def small_batch(size):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, 3, 32, 32, generator=generator)
    return images, torch.randint(0, 10, (size,), generator=generator)


def loss_of(model, saver, images, labels):
    if saver is None:
        return functional.cross_entropy(model(images), labels)
    with saver:
        return functional.cross_entropy(model(images), labels)


def make_step(name, network="ResNet-18"):
    """A network for 32x32 images, and a function that runs a step of so many images."""
    recompute, codec, inside = MEMORY[name]
    torch.manual_seed(0)
    model = MEASURED[network](recompute=recompute)
    saver = None if codec is None else compress_activations(model, codec=codec)

    def step(size):
        images, labels = small_batch(size)
        if inside:
            with saver:
                loss_of(model, None, images, labels).backward()
        else:
            loss_of(model, saver, images, labels).backward()

    step(2)  # gradients and the libraries' own memory are there before what is measured
    return step, saver


def measure_batch(name):
    """The largest batch in BUDGET."""
    step, _ = make_step(name)
    return dataclasses.asdict(find_batch_size(step, BUDGET, most=256, multiple=4))


def measure_step(name, size, network="ResNet-18"):
    """Peak of the second step, the most bytes that were stored, and CPU seconds."""
    step, saver = make_step(name, network)
    begun = time.process_time()
    with peak_memory() as peak:
        step(size)
    seconds = time.process_time() - begun
    live = 0 if saver is None else saver.ledger.peak_bytes
    return {"peak_bytes": peak.num_bytes, "stored_bytes": live, "seconds": seconds}


def in_process(name, *options):
    """A row in a process of its own."""
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    command = [sys.executable, os.path.abspath(__file__), "--row", name, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def step_in_process(name, size, network="ResNet-18"):
    """:func:`measure_step` in a process of its own."""
    return in_process(name, "--batch", str(size), "--network", network)


def bench_memory(size, measure=step_in_process, network="ResNet-18"):
    rows = {name: measure(name, size, network) for name in MEMORY}
    plain = rows["plain"]["peak_bytes"]
    print_table(
        f"Peak memory of a step, {network}, batch {size}, 32x32",
        ("", "peak MB", "below plain", "stored MB", "CPU s"),
        [
            (
                name,
                f"{row['peak_bytes'] / 1e6:.0f}",
                f"{plain / row['peak_bytes']:.2f}x",
                f"{row['stored_bytes'] / 1e6:.0f}" if row["stored_bytes"] else "",
                f"{row['seconds']:.2f}",
            )
            for name, row in rows.items()
        ],
    )
    return rows


def bench_batches():
    """The largest batch that fits a budget, and what it does."""
    rows = {name: in_process(name, "--batch", "0") for name in ("plain", "checkpoint", "zstd")}
    print_table(
        f"Largest batch in {BUDGET / 1e6:.0f} MB, ResNet-18 w64, 32x32",
        ("", "images", "images/s"),
        [
            (name, str(row["batch_size"]), f"{row['samples_per_second']:.1f}")
            for name, row in rows.items()
        ],
    )
    return rows


def bench_overhead(size, rounds):
    """CPU seconds of a step, plain and with each codec, interleaved."""
    torch.manual_seed(0)
    model = resnet18(64)
    images, labels = small_batch(size)
    savers = {"plain": None}
    savers |= {codec: compress_activations(model, codec=codec) for codec in CODECS}
    seconds = {name: [] for name in savers}
    for turn in range(rounds + 1):
        for name, saver in savers.items():
            model.zero_grad()
            begun = time.process_time()
            loss_of(model, saver, images, labels).backward()
            if turn:
                seconds[name].append(time.process_time() - begun)
    stats = {name: summary(values) for name, values in seconds.items()}
    overhead = {
        name: summary(
            [mine / plain - 1 for mine, plain in zip(values, seconds["plain"], strict=True)]
        )
        for name, values in seconds.items()
        if name != "plain"
    }
    print_table(
        f"CPU time of a step, ResNet-18 w64, batch {size}, 32x32",
        ("", "s", "over plain"),
        [
            (
                name,
                show(stats[name]),
                f"{overhead[name]['median']:+.1%}" if name in overhead else "",
            )
            for name in stats
        ],
    )
    return {"seconds": stats, "overhead": overhead}


def bench_ratio(name, images):
    """Ratios of one pass over photographs, for each codec and share."""
    make, size = NETWORKS[name]
    torch.manual_seed(0)
    model = make()
    labels = torch.arange(size) % 10
    found = {}
    for codec, share, inputs in CASES:
        saver = compress_activations(model, share, codec, inputs=inputs)
        loss_of(model, saver, images[:size], labels).backward()
        report = saver.report()
        found[f"{codec} {share}{', images too' if inputs else ''}"] = {
            "raw_bytes": report.raw_bytes,
            "ratio": report.ratio,
            "ratio_of_conv_inputs": report.ratio_of_conv_inputs,
        }
        assert saver.ledger.live_bytes == 0
    return found


def bench_noise(name, images):
    """Predicted over measured sigma of every convolution, on photographs."""
    make, size = NETWORKS[name]
    torch.manual_seed(0)
    model = make()
    labels = torch.arange(size) % 10
    saver = compress_activations(model, codec="int8", min_bytes=0)
    layers = gradient_noise(
        saver, model, lambda: functional.cross_entropy(model(images[:size]), labels)
    )
    return {layer.name: layer.predicted_sigma / layer.measured_sigma for layer in layers}


def bench_unet(size=32):
    """A 3-D U-Net: ratio of one pass."""
    torch.manual_seed(0)
    model = UNet3d()
    saver = compress_activations(model)
    with saver:
        loss = model(torch.randn(1, 1, size, size, size)).square().mean()
    loss.backward()
    report = saver.report()
    return {"raw_bytes": report.raw_bytes, "ratio": report.ratio}


def load_images(count):
    """(count, 3, 224, 224) floats of photographs."""
    with photos() as folder:
        files = jpeg_files(folder)
        step = max(len(files) // count, 1)
        images = [decode_image(read(path), size=224) for path in files[::step][:count]]
    stacked = torch.stack([torch.as_tensor(image) for image in images]).float()
    mean = torch.tensor((0.485, 0.456, 0.406)) * 255
    deviation = torch.tensor((0.229, 0.224, 0.225)) * 255
    return ((stacked - mean) / deviation).permute(0, 3, 1, 2).contiguous()


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default: 7)")
    parser.add_argument("--batch", type=int, default=64, help="of the small network (default: 64)")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="for ratios and noise")
    parser.add_argument("--json", default="bench_activation.json", help="where the figures go")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--network", default="ResNet-18", help=argparse.SUPPRESS)
    return parser.parse_args()


def print_ratios(ratios):
    rows = [
        (name, key, f"{row['raw_bytes'] / 1e6:.0f}", f"{row['ratio']:.2f}",
         f"{row['ratio_of_conv_inputs']:.2f}")
        for name, found in ratios.items()
        for key, row in found.items()
    ]  # fmt: skip
    header = ("network", "codec, share", "saved MB", "ratio, all", "ratio, conv inputs")
    print_table("Ratios at 224x224, initial weights, photographs", header, rows)


def targets_of(results):
    memory = results["memory"]
    deep = {name: row["peak_bytes"] for name, row in results["deep"].items()}
    plain = memory["plain"]["peak_bytes"]
    zstd = memory["zstd"]["peak_bytes"]
    both = memory["checkpoint + zstd, all"]["peak_bytes"]
    recompute = memory["checkpoint"]["peak_bytes"]
    overhead = results["overhead"]["overhead"]
    targets = [
        judge("peak memory below plain, zstd", plain / zstd, 2.5, at_most=False),
        judge("peak memory over per-block checkpoint", zstd / recompute, 1.0, at_most=True),
        judge(
            "with checkpoint, over the better of both",
            both / min(zstd, recompute),
            1.0,
            at_most=True,
        ),
        judge(
            "the same of ResNet-110",
            deep["checkpoint + zstd, all"] / min(deep["zstd"], deep["checkpoint"]),
            1.0,
            at_most=True,
        ),
        judge("CPU time over plain, zstd", overhead["zstd"]["median"], 0.15, at_most=True),
        judge("CPU time over plain, int8", overhead["int8"]["median"], 0.08, at_most=True),
    ]
    for name, found in results["noise"].items():
        targets.append(
            judge(f"least predicted/measured, {name}", min(found.values()), 0.8, at_most=False)
        )
        targets.append(
            judge(f"most predicted/measured, {name}", max(found.values()), 1.25, at_most=True)
        )
    return targets


def main():
    args = options()
    torch.set_num_threads(1)
    if args.row:
        if args.batch:
            figures = measure_step(args.row, args.batch, args.network)
        else:
            figures = measure_batch(args.row)
        print(json.dumps(figures))
        return
    print(f"load average {machine()['load_average']:.1f}")
    results = {"memory": bench_memory(args.batch)}
    results["deep"] = bench_memory(args.batch, network="ResNet-110")
    results["overhead"] = bench_overhead(args.batch, args.rounds)
    results["batches"] = bench_batches()
    names = args.networks.split(",")
    images = load_images(max(NETWORKS[name][1] for name in names))
    results["ratios"] = {name: bench_ratio(name, images) for name in names}
    print_ratios(results["ratios"])
    results["noise"] = {name: bench_noise(name, images) for name in names}
    results["unet3d"] = bench_unet()
    print(f"3-D U-Net, zstd at 0.05: {results['unet3d']['ratio']:.2f} times less")
    save(args, results, targets_of(results))


if __name__ == "__main__":
    main()
