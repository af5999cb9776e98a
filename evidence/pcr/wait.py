"""BandwidthTuner while the bandwidth falls and returns."""

import itertools
import time

import pcrshard
from pcrshard.fidelity.bandwidth import BandwidthTuner, bytes_per_sample

from ..server import serve
from .runs import batch


def _open(lab, url, level):
    """A loader whose one worker reads through the link and decodes."""
    decoder = pcrshard.ImageDecoder(lab.size, "random")
    dataset = pcrshard.PCRDataset(url, scan=level, decoder=decoder, fields=("jpg", "cls"))
    loader = pcrshard.PCRLoader(dataset, batch(lab), shuffle=1, num_workers=1, lanes_per_rank=1)
    loader.shards_ahead = 1
    return loader


def wait(lab):
    """Steps of a fixed length at a bandwidth that falls to a quarter and comes back."""
    task, used = lab.task(0), 0.02 if lab.quick else 0.2
    phases = ((2, 1.0), (2, 0.25), (2, 1.0)) if lab.quick else ((20, 1.0), (60, 0.25), (110, 1.0))
    rows = []
    with serve(lab.dataset(task.name, "train"), 1e9) as (url, link):
        level = pcrshard.ScanLevel("full")
        loader = _open(lab, url, level)
        entries = loader.dataset.shards.entries
        sizes, per_shard = bytes_per_sample(entries), entries[0].num_samples
        tuner = BandwidthTuner(level, sizes, window=15, ahead=2 * per_shard)
        # Half as much again as full fidelity needs.
        top = 1.5 * sizes[-1] * batch(lab) / used
        link.rate = top
        ends = list(itertools.accumulate(seconds for seconds, _ in phases))
        origin, factor = time.monotonic(), 1.0
        for begun, came, first in _arrivals(loader, origin + ends[-1]):
            time.sleep(used)  # an accelerator works, and the processor is free
            done = time.monotonic()
            waited = 0.0 if first else came - begun
            scan = tuner.record(waited, done - came, batch(lab))
            rows.append([done - origin, waited, done - came, scan, factor, first])
            factor = next((f for end, (_, f) in zip(ends, phases, strict=True)
                           if done - origin < end), factor)  # fmt: skip
            link.rate = top * factor
    return {
        "task": task.name,
        "rows": rows,
        "phases": phases,
        "top": top,
        "batch": batch(lab),
        "per_shard": per_shard,
        "sizes": sizes,
    }


def _arrivals(loader, deadline):
    """(asked at, came at, whether it is an epoch's first) of batches, epoch after epoch."""
    while time.monotonic() < deadline:
        source, first = iter(loader), True
        begun = time.monotonic()
        for _ in source:
            yield begun, time.monotonic(), first
            if time.monotonic() >= deadline:
                return
            begun, first = time.monotonic(), False
