"""Checkpoints: the integer coder against entropy, a store's speed, the wait for a save, and the
time to restore any of many versions.

The weights are synthetic: normal, with a deviation of their own for each tensor; an epoch moves
them by a step whose size varies from weight to weight (log-normal), 4 % of the deviation on
average. Rates are MB of the tensors' type per second of CPU time of one core.
"""

import functools
import os
import tempfile
import time

import numpy as np
import torch

from pcrshard import errorbound
from pcrshard.checkpoint import DeltaStore

from .harness import Quartiles, peak_memory

ROUNDS = 5
F32 = errorbound.FLOAT_TYPES["float32"]
EPOCH_STEP = 0.04
LEAST_RATES = {"save keyframe": 200, "save delta": 300, "load keyframe": 400, "load delta": 400}


def _moved(generator, values):
    """The weights after an epoch."""
    sizes = generator.lognormal(-0.5, 1.0, values.shape)
    step = generator.standard_normal(values.shape) * sizes * (EPOCH_STEP * 0.02 / np.sqrt(np.e))
    return (values + step).astype(np.float32)


def _coders(bench):
    """Codes of one epoch's delta, and of a keyframe, at several bounds."""
    generator = np.random.default_rng(0)
    old = generator.normal(0, 0.02, 100_000 if bench.quick else 4_000_000).astype(np.float32)
    old, new = (each.view(np.uint32) for each in (old, _moved(generator, old)))
    rows = []
    for fraction in (0.01, 0.02, 0.05, 0.1):
        lattice = errorbound.RelativeStd(fraction).lattice(old, F32)
        first, second = (errorbound.quantize(words, F32, lattice) for words in (old, new))
        restored = errorbound.dequantize(second.codes, F32, lattice)
        assert np.abs(F32.widen(restored) - F32.widen(new)).max() <= lattice.error_bound
        for name, codes in (("delta", second.codes - first.codes), ("keyframe", second.codes)):
            rows.append({"codes": name, "bound": fraction} | _coder(bench, codes))
    bench.show("Coders", rows)
    bench.target("coder: entropy over size", min(row["entropy"] for row in rows), least=0.97)
    bench.target("coder: decode, MB/s", min(row["decode MB/s"] for row in rows), least=400)


def _entropy_bits(values):
    """Bits of integers (N,) by their order-0 entropy."""
    shares = np.unique(values, return_counts=True)[1] / len(values)
    return float(-(shares * np.log2(shares)).sum() * len(values))


def _coder(bench, codes):
    payload = errorbound.encode_integers(codes)
    decode = functools.partial(errorbound.decode_integers, payload, len(codes), np.int32)
    ways = {"encode": functools.partial(errorbound.encode_integers, codes), "decode": decode}
    assert np.array_equal(decode(), codes)
    seconds = {name: min(each) for name, each in bench.interleaved(ways).items()}
    return {
        "ratio": codes.nbytes / len(payload),
        "entropy": _entropy_bits(codes) / 8 / len(payload),
        **{f"{name} MB/s": codes.nbytes / 1e6 / each for name, each in seconds.items()},
    }


def _model(generator, megabytes):
    shape = (megabytes * 25, 1000)
    layers = (generator.normal(0, 0.02, shape).astype(np.float32) for _ in range(10))
    return {f"layer{i}": torch.from_numpy(values) for i, values in enumerate(layers)}


def _next(generator, model):
    return {n: torch.from_numpy(_moved(generator, each.numpy())) for n, each in model.items()}


def _store(bench, folder, megabytes):
    """A keyframe and a delta, saved, loaded and verified; and the wait for a save."""
    generator = np.random.default_rng(1)
    first = _model(generator, megabytes)
    second = _next(generator, first)
    rates = {name: [] for name in LEAST_RATES}
    waits = []
    for number in range(bench.rounds):
        with DeltaStore(os.path.join(folder, f"speed-{number}")) as store:
            save = functools.partial(store.save, blocking=True)
            ways = ((save, first), (save, second), (store.load, 1), (store.load, 2))
            for name, (way, argument) in zip(rates, ways, strict=True):
                begun = time.process_time()
                way(argument)
                rates[name].append(megabytes / (time.process_time() - begun))
            begun = time.perf_counter()
            copied = {name: tensor.clone() for name, tensor in second.items()}
            between = time.perf_counter()
            store.save(copied)
            waits.append((time.perf_counter() - between) / (between - begun))
    found = {name: Quartiles(values) for name, values in rates.items()}
    bench.show("A store, MB/s of CPU time", [found])
    for name, figures in found.items():
        bench.target(f"store: {name}, MB/s a core", figures, least=LEAST_RATES[name])
    bench.target("save: wait against a plain copy", Quartiles(waits), most=1.5)


def restore_one(url, number):
    """In a process of its own: CPU seconds, and MB beyond what torch takes."""
    before, begun = peak_memory(), time.process_time()
    DeltaStore(url).load(int(number))
    return time.process_time() - begun, (peak_memory() - before) / 1e6


def _many(bench, folder, megabytes, versions):
    """Any of many versions of a large model: a process for each of a dozen restores."""
    url = os.path.join(folder, "many")
    generator = np.random.default_rng(4)
    model = _model(generator, megabytes)
    with DeltaStore(url, keyframe_every=10) as store:
        for _ in range(versions):
            store.save(model)
            model = _next(generator, model)
    records = store.versions()
    raw, stored = (sum(getattr(r, n) for r in records) for n in ("raw_bytes", "file_bytes"))
    rows = []
    # With a keyframe at every tenth version each of these has another number of deltas.
    for number in range(1, versions + 1, 11):
        seconds, peak = bench.worker("restore_one", url, number)
        rows.append({"version": number, "CPU s": seconds, "peak MB": peak})
    bench.show(f"Restoring any version; the run is {raw / stored:.1f} times smaller", rows)
    slowest = max(row["CPU s"] for row in rows)
    bench.target("restore any version: CPU seconds", slowest, most=2.0)


def run(bench):
    torch.set_num_threads(1)
    megabytes, versions = (4, 12) if bench.quick else (100, 100)
    _coders(bench)
    with tempfile.TemporaryDirectory(prefix="pcrshard-bench-") as folder:
        _store(bench, folder, megabytes)
        _many(bench, folder, megabytes, versions)
