"""Checkpoints: coders against entropy and RLE+LZMA, a store's speed, the wait, any of 100 versions.

The weights are synthetic: normal, with a deviation of their own for each tensor; an epoch moves
them by a step whose size varies from weight to weight (log-normal), 4 % of the deviation on
average. Throughputs are in MB of the tensors' own type a second of CPU time of one core. Every
figure is of a result that was compared with its source.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

import common
import numpy as np
import torch
from common import judge

from pcrshard.checkpoint import DeltaStore
from pcrshard.errorbound import (
    FLOAT_TYPES,
    RelativeStd,
    check_error,
    decode_integers,
    encode_integers,
    paper,
    quantize,
    restore,
)

F32 = FLOAT_TYPES["float32"]
EPOCH_STEP = 0.04
# RLE+LZMA does single megabytes a second: it is timed on the first so many values.
SLOW_VALUES = 500_000
PARTS = ("coders", "store", "wait", "weight_sync", "many")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=100, help="size of the model")
    parser.add_argument("--versions", type=int, default=100)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
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
        first = quantize(old.view(np.uint32), F32, lattice)
        second = quantize(new.view(np.uint32), F32, lattice)
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


def store_speed(folder, megabytes, rounds):
    """A keyframe and a delta, encoded, written, read, restored and verified; MB/s of CPU time."""
    generator = np.random.default_rng(1)
    first = model(generator, megabytes)
    second = step(generator, first)
    rates = {}
    for number in range(rounds):
        with DeltaStore(os.path.join(folder, f"speed-{number}")) as store:
            work = {
                "keyframe_save_MB_s": lambda store=store: store.save(first, blocking=True),
                "delta_save_MB_s": lambda store=store: store.save(second, blocking=True),
                "keyframe_load_MB_s": lambda store=store: store.load(1),
                "delta_load_MB_s": lambda store=store: store.load(2),
            }
            for name, run in work.items():
                # Saving again would be another version; loading again is the same.
                _, seconds = timed(run, 3 if "load" in name else 1)
                rates.setdefault(name, []).append(megabytes / seconds)
            records = store.versions()
    figures = {name: common.summary(values) for name, values in rates.items()}
    for name, record in zip(("keyframe", "delta"), records, strict=True):
        figures[f"{name}_ratio"] = record.raw_bytes / record.file_bytes
    return figures


def wait_for_save(folder, megabytes, rounds):
    """Wall seconds that save keeps the caller, and those of a plain copy; interleaved."""
    generator = np.random.default_rng(2)
    state = model(generator, megabytes)
    waits = []
    copies = []
    with DeltaStore(os.path.join(folder, "wait")) as store:
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
        "share": statistics.median(waits) / statistics.median(copies),
    }


def weight_sync(folder, rounds):
    """Lossless bfloat16, 1 % of the words changed by one unit in the last place."""
    generator = np.random.default_rng(3)
    old = torch.from_numpy(weights(generator, 20_000_000)).bfloat16().view(torch.int16)
    rates = []
    with DeltaStore(os.path.join(folder, "sync"), "lossless") as store:
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
    with DeltaStore(url, keyframe_every=10) as store:
        for _ in range(versions):
            store.save(state)
            state = step(generator, state)
    saving = time.perf_counter() - started
    records = store.versions()
    deltas = [count_deltas(records, record) for record in records]
    assert max(deltas) <= 10
    rows = []
    # With a keyframe at every tenth version each of these has another number of deltas.
    for number in range(1, versions + 1, 11):
        command = [sys.executable, os.path.abspath(__file__), "--restore", url, str(number)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        wall, cpu, peak = map(float, done.stdout.split())
        row = {"version": number, "deltas": deltas[number - 1], "cpu_seconds": cpu}
        row |= {"wall_seconds": wall, "load": os.getloadavg()[0], "peak_MB": peak}
        rows.append(row)
    raw = sum(record.raw_bytes for record in records)
    return {
        "run_ratio": raw / sum(record.file_bytes for record in records),
        "saving_seconds": saving,
        "largest_number_of_deltas": max(deltas),
        "restores": rows,
    }


def count_deltas(records, record):
    """How many deltas are added to the keyframe that a version hangs on."""
    by_number = {each.number: each for each in records}
    count = 0
    while record.parent is not None:
        count += 1
        record = by_number[record.parent]
    return count


def restore_one(url, number):
    """In a process of its own: seconds, CPU seconds, and memory beyond what torch takes."""
    before = peak_megabytes()
    start = time.perf_counter()
    cpu = time.process_time()
    DeltaStore(url).load(int(number))
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
    results = {"memcpy_MB_s": memcpy_rate(args.rounds), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="pcrshard-bench-") as folder:
        parts = {
            "coders": lambda: coders(args.rounds),
            "store": lambda: store_speed(folder, args.megabytes, args.rounds),
            "wait": lambda: wait_for_save(folder, args.megabytes, args.rounds),
            "weight_sync": lambda: weight_sync(folder, args.rounds),
            "many": lambda: many_versions(folder, args.megabytes, args.versions),
        }
        for name in args.parts:
            results[name] = parts[name]()
            print_part(name, results)
    common.save(args, results, bars(results))


def print_part(name, results):
    """What was measured, as a table where there are rows."""
    found = results[name]
    if name == "coders":
        print_rows(f"Coders; memcpy {results['memcpy_MB_s']:.0f} MB/s", found)
    elif name == "many":
        print_rows(
            f"Restoring; the run is {found['run_ratio']:.1f} times smaller", found["restores"]
        )
    else:
        print(name, found)


def print_rows(title, found):
    header = list(found[0])
    common.print_table(title, header, [[show(row[name]) for name in header] for row in found])


def show(value):
    return value if isinstance(value, str) else f"{value:.4g}"


def bars(results):
    """The bars of the issue that synthetic weights can tell."""
    found = []
    if "coders" in results:
        found += coder_bars(results["coders"])
    if "store" in results:
        store = results["store"]
        saves = min(store[f"{name}_save_MB_s"]["median"] for name in ("keyframe", "delta"))
        loads = min(store[f"{name}_load_MB_s"]["median"] for name in ("keyframe", "delta"))
        found.append(judge("store: encode and save, MB/s a core", saves, 80, at_most=False))
        found.append(judge("store: load and verify, MB/s a core", loads, 400, at_most=False))
    if "wait" in results:
        share = results["wait"]["share"]
        found.append(judge("save: wait against a plain copy", share, 1.5, at_most=True))
    if "weight_sync" in results:
        sync = results["weight_sync"]
        rate = sync["save_MB_s"]["median"]
        found.append(judge("weight sync: ratio", sync["ratio"], 50, at_most=False))
        found.append(judge("weight sync: MB/s a core", rate, 300, at_most=False))
    if "many" in results:
        many = results["many"]
        seconds = max(row["cpu_seconds"] for row in many["restores"])
        deltas = many["largest_number_of_deltas"]
        found.append(judge("restore any version: deltas", deltas, 10, at_most=True))
        found.append(judge("restore: CPU seconds", seconds, 2.0, at_most=True))
    return found


def coder_bars(rows):
    """Those of the integer coder."""
    deltas = [row for row in rows if row["same_part_ratio"] < 40]
    share = min(row["entropy_share"] for row in rows)
    faster = min(row["encode_MB_s"] / row["rle_lzma_MB_s"] for row in deltas)
    decode = min(row["decode_MB_s"] for row in rows)
    larger = max(row["rle_lzma_ratio"] / row["same_part_ratio"] for row in deltas)
    return [
        judge("coder: share of the entropy bound", share, 0.97, at_most=False),
        judge("coder: decode, MB/s a core", decode, 400, at_most=False),
        judge("coder: times faster than RLE+LZMA below 40x", faster, 20, at_most=False),
        judge("coder: size against RLE+LZMA below 40x", larger, 1.0, at_most=True),
    ]


if __name__ == "__main__":
    main()
