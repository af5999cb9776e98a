"""Check and measure compress_activations on an accelerator: see scripts/gpu."""

import argparse
import contextlib
import functools
import itertools
import json
import os
import statistics
import sys
import time
import traceback
from typing import NamedTuple

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "scripts")]

from training.models import resnet18, resnet50

from evidence.activations.models import GPT, ViT
from pcrshard import compress_activations
from pcrshard.activation import ActivationOptions, blocks, fixed_size
from pcrshard.errorbound import RelativeStd

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 10
BOUND = RelativeStd(0.05)
ODD = 3  # blocks of 64 values with outliers
COLUMNS = ("peak GB", "saved GB", "kept GB", "ms", "host ms", "error", "first step s")


class Network(NamedTuple):
    """A network, the shape of a batch, and how many letters or classes there are."""

    make: object
    shape: tuple
    classes: int


NETWORKS = {
    "ResNet-50": Network(lambda: resnet50(1000), (256, 3, 224, 224), 1000),
    "ViT-B": Network(lambda: ViT(1000, width=768, heads=12), (256, 3, 224, 224), 1000),
    "GPT": Network(lambda: GPT(8192, 1024, 768, 12, 12), (16, 1024), 8192),
}
SMALL = {
    "ResNet-18": Network(lambda: resnet18(10, 16), (4, 3, 32, 32), 10),
    "GPT": Network(lambda: GPT(64, 32, 64, 2, 1), (4, 32), 64),
}
# Codec, bound and options; the most important ones first.
OURS = {
    "bits": ("bits", 0.05, {}),
    "bits, recompute": ("bits", 0.05, {"recompute": True}),
    "int8": ("int8", 0.05, {}),
    "bits, each kept": ("bits", 0.05, {"derive": False}),
    "bits, 0.1": ("bits", 0.1, {}),
}
WAYS = ("plain", *OURS, "checkpoint", "offload", "compiled", "compiled, bits", "compiled, int8",
        "compiled, Inductor's fp8 activations")  # fmt: skip
SMALL_WAYS = ("plain", "bits", "bits, recompute", "checkpoint")


class Step:
    """A training step of a network in one of the ways, in bfloat16, on synthetic data."""

    def __init__(self, network, way):
        torch.manual_seed(0)
        self.model = self.forward = network.make().to(DEVICE)
        self.context = contextlib.nullcontext()
        self.saver = None
        shape = network.shape
        if len(shape) == 4:
            self.inputs = torch.randn(shape, device=DEVICE)
            self.model.to(memory_format=torch.channels_last)
            self.inputs = self.inputs.contiguous(memory_format=torch.channels_last)
            targets = shape[:1]
        else:
            self.inputs = torch.randint(network.classes, shape, device=DEVICE)
            targets = shape
        self.targets = torch.randint(network.classes, targets, device=DEVICE)
        codec = OURS.get(way.removeprefix("compiled, "))
        if codec is not None:
            name, bound, options = codec
            self.context = self.saver = compress_activations(
                self.model, bound, name, ActivationOptions(**options)
            )
        elif way == "checkpoint":
            for block in self.model.blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        elif way == "offload":
            self.context = torch.autograd.graph.save_on_cpu(pin_memory=DEVICE == "cuda")
        if way.startswith("compiled"):
            self.forward = torch.compile(self.model)

    def __call__(self):
        """Run it; the seconds that the host took."""
        self.model.zero_grad()
        begun = time.perf_counter()
        with self.context, torch.autocast(DEVICE, torch.bfloat16):
            logits = self.forward(self.inputs).float()
            self.loss = functional.cross_entropy(logits.flatten(0, -2), self.targets.flatten())
        self.loss.backward()
        return time.perf_counter() - begun

    def gradients(self):
        """All gradients as one tensor."""
        return torch.cat([each.grad.float().flatten() for each in self.model.parameters()])


def wait():
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds_of(work, count=STEPS):
    """The median time of some work on the device."""
    found = []
    for _ in range(count):
        wait()
        begun = time.perf_counter()
        work()
        wait()
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def measure(network, way, reference, count):
    """A row of figures of one way, and its gradients in the first step."""
    setting = contextlib.nullcontext()
    if "Inductor" in way:
        passes = {"activation_quantization_aten_pass": {"quant_type": "torch.float8_e5m2"}}
        setting = torch._inductor.config.patch(post_grad_fusion_options=passes)
    begun = time.perf_counter()
    with setting:
        step = Step(network, way)
        step()
    wait()
    row = {"first step s": time.perf_counter() - begun, "loss": float(step.loss.detach())}
    gradients = step.gradients()
    known = gradients if reference is None else reference
    row["error"] = float((gradients - known).norm() / known.norm())
    for _ in range(2):
        step()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    host = []
    row["ms"] = 1e3 * seconds_of(lambda: host.append(step()), count)
    row["host ms"] = 1e3 * statistics.median(host)
    if DEVICE == "cuda":
        row["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
    if step.saver is not None:
        report = step.saver.report()
        row |= {"saved GB": report.raw_bytes / 1e9, "kept GB": report.stored_bytes / 1e9}
    return row, known


class Kernel(NamedTuple):
    """Functions that pack (count, 64) values on the device, and restore them."""

    pack: object
    unpack: object
    check: object


def of_tensor(width):
    """The kernels that find the deviation of a tensor themselves."""

    def pack(there):
        return blocks.fused(fixed_size.pack, there.device, width, BOUND)(there.flatten())

    def unpack(*packed):
        device = packed[0].device
        return blocks.fused(fixed_size.unpack, device, width, torch.bfloat16)(*packed)

    def check(given, packed, found):
        usual = fixed_size.pack(width, BOUND, given.flatten())
        # Sums in another order change the last digits of the deviation, so of the step.
        step = float(packed[-1][0])
        assert abs(step / float(usual[-1][0]) - 1) < 1e-5, f"step {step}, not {usual[-1][0]}"
        on_cpu = (each.cpu() for each in packed)
        again = fixed_size.unpack(width, torch.bfloat16, *on_cpu)
        assert torch.equal(found.nan_to_num(7), again.nan_to_num(7)), "other values than a CPU's"
        flat = given.flatten()
        are_zero = [each[64 * ODD :] == 0 for each in (found, flat)]
        assert torch.equal(*are_zero), "other zeros"
        return step

    return Kernel(pack, unpack, check)


def of_normalization(width):
    """Those of what a normalization of 64 channels reads."""
    lines = {
        device: [line.to(device) for line in (torch.linspace(-1, 1, 64), torch.full((64,), 1.0))]
        for device in {"cpu", DEVICE}
    }

    def restored(packed, dtype):
        device = packed[0].device
        how = blocks.fused(
            fixed_size.unpack_normalized, device, width, BOUND.fraction, dtype, False
        )
        center, gain = lines[device.type]
        offset = center if dtype == torch.bfloat16 else 0 * center
        return how(*packed, gain, offset, [packed[1].shape[0], 64])

    def pack(there):
        how = blocks.fused(fixed_size.pack_normalized, there.device, width, BOUND.fraction)
        return how(there, *lines[there.device.type])

    def unpack(*packed):
        return restored(packed, torch.bfloat16)

    def check(given, packed, _):
        signs = restored(packed, torch.float32).cpu().sign(), (given - lines["cpu"][0]).sign()
        are_equal = torch.equal(*(each[ODD:] for each in signs))
        assert are_equal, "other signs, so another mask of a ReLU"
        return BOUND.fraction

    return Kernel(pack, unpack, check)


def check_kernel(kernel, given):
    """The device's values are those of its codes, and within the bounds of their blocks."""
    packed = kernel.pack(given.to(DEVICE))
    found = kernel.unpack(*packed).cpu()
    step = kernel.check(given, packed, found)
    flat, found = (each.flatten().float().view(-1, 64)[ODD:] for each in (given, found))
    doublings = packed[1].cpu().float()[ODD:, None]
    assert float(doublings.mean()) < 0.05, "larger steps than values in reach of the codes need"
    bounds = step * doublings.exp2() + flat.abs() / 128 + 2e-3
    assert bool(((found - flat).abs() <= bounds).all()), "beyond the bound"


def kernels(count):
    """Whether the device packs as a CPU does; GB/s of bfloat16 in each direction."""
    rows = {}
    values = torch.randn(count, 64, dtype=torch.bfloat16)
    values[:ODD, 5] = torch.tensor([torch.nan, torch.inf, 3e38])
    for name, is_relu, kernel in (
        ("int8", False, of_tensor(fixed_size.BYTE)),
        ("bits", False, of_tensor(fixed_size.width_of(BOUND, ""))),
        ("bits, of ReLU", True, of_tensor(fixed_size.width_of(BOUND, "relu"))),
        ("int8, of BatchNorm", False, of_normalization(fixed_size.BYTE)),
        ("bits, of BatchNorm", False, of_normalization(fixed_size.width_of(BOUND, ""))),
    ):
        given = values.relu() if is_relu else values
        there = given.to(DEVICE)
        try:
            check_kernel(kernel, given)
        except Exception as error:
            rows[name] = failure(error)
            continue
        packed = kernel.pack(there)
        works = {
            "pack GB/s": functools.partial(kernel.pack, there),
            "unpack GB/s": functools.partial(kernel.unpack, *packed),
            "copy GB/s": there.clone,
        }
        rows[name] = {way: given.nbytes / seconds_of(work) / 1e9 for way, work in works.items()}
    return rows


def failure(error):
    """A row that says what went wrong."""
    traceback.print_exc()
    return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def lines_of(rows, columns):
    """A table in Markdown."""
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for name, row in rows.items():
        cells = [f"{row[column]:.3g}" if column in row else "" for column in columns]
        cells[-1] = row.get("failed", cells[-1]).replace("|", "/")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def table(report):
    """The page's table of what was measured, in Markdown."""
    return "\n".join(
        [
            f"{report['device']}, PyTorch {report['torch']}, bfloat16 autocast, {report['date']}",
            "",
            *lines_of(report["rows"], COLUMNS),
            "",
            *lines_of(report["kernels"], ("pack GB/s", "unpack GB/s", "copy GB/s")),
            "",
        ]
    )


def main():
    """Run the command."""
    parser = argparse.ArgumentParser(prog="scripts/gpu", description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny networks, for any machine")
    parser.add_argument("--minutes", type=float, default=18, help="start nothing after these")
    parser.add_argument("--out", default=".", help="folder for gpu.json and gpu.md")
    args = parser.parse_args()
    if DEVICE == "cpu" and not args.small:
        parser.error("found no GPU that PyTorch can use; --small runs on a CPU")
    deadline = time.monotonic() + 60 * args.minutes
    is_cuda = DEVICE == "cuda"
    report = {
        "device": torch.cuda.get_device_name() if is_cuda else "CPU (nothing here is of a GPU)",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "kernels": {},
        "rows": {},
    }

    def keep():
        for ending, text in (("json", json.dumps(report, indent=1)), ("md", table(report))):
            with open(os.path.join(args.out, f"gpu.{ending}"), "w") as file:
                file.write(text)

    os.makedirs(args.out, exist_ok=True)
    report["kernels"] = kernels(1 << 20 if is_cuda else 1 << 9)
    keep()
    networks, ways = (SMALL, SMALL_WAYS) if args.small else (NETWORKS, WAYS)
    reference = None
    for (name, network), way in itertools.product(networks.items(), ways):
        if time.monotonic() > deadline:
            break
        reference = None if way == "plain" else reference
        try:
            row, reference = measure(network, way, reference, 2 if args.small else STEPS)
        except Exception as error:  # the others are measured
            row = failure(error)
        report["rows"][f"{name}, {way}"] = row
        print(f"{name}, {way}: {json.dumps(row)}", flush=True)
        keep()
        torch.compiler.reset()
        if is_cuda:
            torch.cuda.empty_cache()
    print(table(report))
    if any("failed" in row for part in ("kernels", "rows") for row in report[part].values()):
        sys.exit("some of it failed: see above")


if __name__ == "__main__":
    main()
