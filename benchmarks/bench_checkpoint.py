"""Checkpoints: coders against entropy and RLE+LZMA, a store's speed, the wait for a save, restoring
any version.

The weights are synthetic: normal, with a deviation of their own for each tensor; an epoch moves
them by a
step whose size varies from weight to weight (log-normal), 4 % of the deviation on average.
Throughputs are
in MB of the tensors' own type a second of CPU time of one core. Every figure is of a result that
was compared
with its source.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

import common
import numpy as np
import torch

from pcrshard.checkpoint import DeltaStore
from pcrshard.errorbound import (
    FLOAT_TYPES,
    RelativeStd,
    check_error,
    decode_integers,
    encode_integers,
    paper,
    quantise,
    restore,
)

F32 = FLOAT_TYPES["float32"]
EPOCH_STEP = 0.04
# RLE+LZMA does single megabytes a second: it is timed on the first so many values.
SLOW_VALUES = 500_000


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=100, help="size of the model")
    parser.add_argument("--versions", type=int, default=100)
    parser.add_argument("--restore", nargs=2, help=argparse.SUPPRESS)
    default = os.path.join(tempfile.gettempdir(), "pcrshard-benchmarks", "bench_checkpoint.json")
    parser.add_argument("--json", default=default)
    return parser.parse_args()


def weights(generator, count):
    return generator.normal(0, 0.02, count).astype(np.float32)


def moved(generator, values):
    """The weights after an epoch."""
    sizes = generator.lognormal(-0.5, 1.0, len(values))
    step = generator.standard_normal(len(values)) * sizes * (EPOCH_STEP * 0.02 / np.sqrt(np.e))
    return (values + step).astype(np.float32)


def timed(work, rounds):
    """(result, CPU seconds: the least of the rounds)."""
    best = np.inf
    for _ in range(rounds):
        start = time.process_time()
        result = work()
        best = min(best, time.process_time() - start)
    return result, best


def entropy_bytes(codes):
    shares = np.unique(codes, return_counts=True)[1] / len(codes)
    return -(shares * np.log2(shares)).sum() * len(codes) / 8


def coders(rounds):
    """Codes of one epoch's delta, and of a keyframe, at several bounds."""
    generator = np.random.default_rng(0)
    old = weights(generator, 4_000_000)
    new = moved(generator, old)
    rows = []
    for fraction in (0.01, 0.02, 0.05, 0.1):
        lattice = RelativeStd(fraction).lattice(old.view(np.uint32), F32)
        first = quantise(old.view(np.uint32), F32, lattice)
        second = quantise(new.view(np.uint32), F32, lattice)
        worst = check_error(new.view(np.uint32), restore(second, F32, lattice), F32, lattice)
        assert worst <= 1
        for name, codes in (("delta", second.codes - first.codes), ("keyframe", second.codes)):
            rows.append(coder_row(name, fraction, codes, rounds))
    return rows


def coder_row(name, fraction, codes, rounds):
    payload, encode_seconds = timed(lambda: encode_integers(codes), rounds)
    back, decode_seconds = timed(lambda: decode_integers(payload, len(codes), np.int32), rounds)
    assert np.array_equal(back, codes)
    part = codes[:SLOW_VALUES]
    slow, slow_seconds = timed(lambda: paper.encode_factors(part, "rle+lzma"), 1)
    assert np.array_equal(paper.decode_factors(slow, len(part)), part)
    fast_part = encode_integers(part)
    megabytes = codes.nbytes / 1e6
    return {
        "codes": name,
        "bound_std": fraction,
        "ratio": codes.nbytes / len(payload),
        "entropy_share": entropy_bytes(codes) / len(payload),
        "encode_MB_s": megabytes / encode_seconds,
        "decode_MB_s": megabytes / decode_seconds,
        "rle_lzma_ratio": part.nbytes / len(slow),
        "same_part_ratio": part.nbytes / len(fast_part),
        "rle_lzma_MB_s": part.nbytes / 1e6 / slow_seconds,
    }


def memcpy_rate(rounds):
    source = np.zeros(100_000_000, np.uint8)
    target = np.ones_like(source)
    _, seconds = timed(lambda: np.copyto(target, source), rounds)
    return 100 / seconds


def model(generator, megabytes, tensors=10):
    count = megabytes * 1_000_000 // 4 // tensors // 1000 * 1000
    return {
        f"layer{i}": torch.from_numpy(weights(generator, count).reshape(-1, 1000))
        for i in range(tensors)
    }


def step(generator, state):
    return {
        name: torch.from_numpy(moved(generator, tensor.numpy().ravel()).reshape(tensor.shape))
        for name, tensor in state.items()
    }


def store_speed(folder, megabytes):
    """A keyframe and a delta, encoded, written, read, restored and verified."""
    generator = np.random.default_rng(1)
    first = model(generator, megabytes)
    second = step(generator, first)
    figures = {}
    with DeltaStore(os.path.join(folder, "speed"), order="forward") as store:
        for name, state in (("keyframe", first), ("delta", second)):
            _, seconds = timed(lambda state=state: store.save(state, blocking=True), 1)
            figures[f"{name}_save_MB_s"] = megabytes / seconds
        for name, number in (("keyframe", 1), ("delta", 2)):
            _, seconds = timed(lambda number=number: store.load(number), 3)
            figures[f"{name}_load_MB_s"] = megabytes / seconds
        records = store.versions()
    for name, record in zip(("keyframe", "delta"), records, strict=True):
        figures[f"{name}_ratio"] = record.raw_bytes / record.file_bytes
    return figures


def wait_for_save(folder, megabytes, rounds):
    """Wall seconds that save keeps the caller, and those of a plain copy; interleaved."""
    generator = np.random.default_rng(2)
    state = model(generator, megabytes)
    waits = []
    copies = []
    with DeltaStore(os.path.join(folder, "wait"), order="forward") as store:
        for _ in range(rounds):
            start = time.perf_counter()
            copy = {name: tensor.clone() for name, tensor in state.items()}
            copies.append(time.perf_counter() - start)
            del copy
            start = time.perf_counter()
            store.save(state)
            waits.append(time.perf_counter() - start)
            store.wait()
    return {
        "save_seconds": common.summary(waits),
        "copy_seconds": common.summary(copies),
        "share": min(waits) / min(copies),
    }


def weight_sync(folder, rounds):
    """Lossless bfloat16, 1 % of the words changed by one unit in the last place."""
    generator = np.random.default_rng(3)
    old = torch.from_numpy(weights(generator, 20_000_000)).bfloat16().view(torch.int16)
    rates = []
    with DeltaStore(os.path.join(folder, "sync"), bound=None, order="forward") as store:
        store.save({"w": old.view(torch.bfloat16).reshape(-1, 1000)}, blocking=True)
        new = old
        for _ in range(rounds):
            changed = torch.from_numpy(generator.random(len(old)) < 0.01)
            new = new + changed.to(torch.int16)
            state = {"w": new.view(torch.bfloat16).reshape(-1, 1000)}
            _, seconds = timed(lambda state=state: store.save(state, blocking=True), 1)
            rates.append(new.nbytes / 1e6 / seconds)
        loaded = store.load()["w"].view(torch.int16).ravel()
        assert torch.equal(loaded, new)
        record = store.versions()[-1]
    return {"ratio": record.raw_bytes / record.file_bytes, "save_MB_s": common.summary(rates)}


def many_versions(folder, megabytes, versions):
    """Any of many versions of a large model: a process for each of a dozen restores."""
    url = os.path.join(folder, "many")
    generator = np.random.default_rng(4)
    state = model(generator, megabytes)
    started = time.perf_counter()
    with DeltaStore(url, order="forward", keyframe_every=10) as store:
        for _ in range(versions):
            store.save(state)
            state = step(generator, state)
    saving = time.perf_counter() - started
    records = store.versions()
    numbers = sorted({1, *range(5, versions + 1, max(1, versions // 10)), versions})
    rows = []
    for number in numbers:
        command = [sys.executable, os.path.abspath(__file__), "--restore", url, str(number)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        wall, cpu, peak = map(float, done.stdout.split())
        links = 0
        record = records[number - 1]
        while record.parent is not None:
            links += 1
            record = records[record.parent - 1]
        assert links <= 10
        rows.append(
            {"version": number, "deltas": links, "seconds": wall, "cpu": cpu, "peak_MB": peak}
        )
    raw = sum(record.raw_bytes for record in records)
    return {
        "run_ratio": raw / sum(record.file_bytes for record in records),
        "saving_seconds": saving,
        "restores": rows,
    }


def restore_one(url, number):
    """In a process of its own: seconds, CPU seconds, and memory beyond what torch takes."""
    before = peak_megabytes()
    start = time.perf_counter()
    cpu = time.process_time()
    DeltaStore(url, workers=2).load(int(number))
    seconds = time.perf_counter() - start
    print(seconds, time.process_time() - cpu, peak_megabytes() - before)


def peak_megabytes():
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1000


def main():
    torch.set_num_threads(1)
    args = parse_args()
    if args.restore:
        restore_one(*args.restore)
        return
    results = {"coders": coders(args.rounds), "memcpy_MB_s": memcpy_rate(args.rounds)}
    header = list(results["coders"][0])
    rows = [[show(row[name]) for name in header] for row in results["coders"]]
    common.print_table(f"Coders; memcpy {results['memcpy_MB_s']:.0f} MB/s", header, rows)
    with tempfile.TemporaryDirectory(prefix="pcrshard-bench-") as folder:
        results["store"] = store_speed(folder, args.megabytes)
        results["wait"] = wait_for_save(folder, args.megabytes, args.rounds)
        results["weight_sync"] = weight_sync(folder, args.rounds)
        results["many"] = many_versions(folder, args.megabytes, args.versions)
    print(results["store"], results["wait"], results["weight_sync"], sep="\n")
    restores = results["many"]["restores"]
    header = list(restores[0])
    rows = [[show(row[name]) for name in header] for row in restores]
    common.print_table(
        f"Restoring; the run is {results['many']['run_ratio']:.1f} times smaller", header, rows
    )
    common.save(args, results, bars(results))


def show(value):
    return value if isinstance(value, str) else f"{value:.4g}"


def bars(results):
    """The bars of the issue that synthetic weights can tell."""
    bar = common.bar
    deltas = [row for row in results["coders"] if row["same_part_ratio"] < 40]
    restores = results["many"]["restores"]
    share = min(row["entropy_share"] for row in results["coders"])
    faster = min(row["encode_MB_s"] / row["rle_lzma_MB_s"] for row in deltas)
    decode = min(row["decode_MB_s"] for row in results["coders"])
    larger = max(row["rle_lzma_ratio"] / row["same_part_ratio"] for row in deltas)
    store = results["store"]
    saves = min(store["keyframe_save_MB_s"], store["delta_save_MB_s"])
    loads = min(store["keyframe_load_MB_s"], store["delta_load_MB_s"])
    sync = results["weight_sync"]
    return [
        bar("coder: share of the entropy bound", share, 0.97, at_most=False),
        bar("coder: decode, MB/s a core", decode, 400, at_most=False),
        bar("coder: times faster than RLE+LZMA below 40x", faster, 20, at_most=False),
        bar("coder: size against RLE+LZMA below 40x", larger, 1.0, at_most=True),
        bar("store: encode and save, MB/s a core", saves, 80, at_most=False),
        bar("store: load and verify, MB/s a core", loads, 400, at_most=False),
        bar("save: wait against a plain copy", results["wait"]["share"], 1.5, at_most=True),
        bar("weight sync: ratio", sync["ratio"], 50, at_most=False),
        bar("weight sync: MB/s a core", sync["save_MB_s"]["median"], 300, at_most=False),
        bar("restore: deltas", max(row["deltas"] for row in restores), 10, at_most=True),
        bar("restore: seconds", max(row["seconds"] for row in restores), 2.0, at_most=True),
    ]


if __name__ == "__main__":
    main()
