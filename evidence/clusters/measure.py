"""The simulation of ``pcrshard plan --simulate``, held to clusters that are real, then at the scale
of the paper and beyond.
"""

import dataclasses
import itertools
import math
import os
import time

import pcrshard
from pcrshard.simulation.cluster import Cluster, Job
from pcrshard.simulation.epoch import Simulation

from . import real
from .real import BATCH, Setup

SETUPS = (
    Setup("one process, no worker, waits for the link", 5, storage=5, rate=400),
    Setup("one process, waits for the accelerator", 2, workers=1, storage=5, rate=150),
    Setup("link and accelerator alike", 5, workers=1, storage=7, rate=150),
    Setup("two processes, a worker each", "full", 2, workers=1, storage=8),
    Setup("four processes, no worker", 5, 4, storage=8, rate=100, epochs=2),
    Setup("two nodes, slow links", 2, 2, 2, workers=1, link=2, rate=400, epochs=2),
    Setup("two nodes, two processes each", 1, 4, 2, storage=3, link=3, epochs=4),
    Setup("waits for decoding", "full", storage=200, link=200, rate=5000, epochs=5),
    Setup("a thread decodes", "full", threads=1, storage=100, link=200, rate=1200, epochs=5),
    Setup("requests take 0.1 s, one in a hundred 0.3 s", 1, rate=600, epochs=3, latency=(0.1, 0.3)),
)
ROUNDS = 3
# Its few bytes pass in one burst of a slow link, which the simulation does not know.
QUICK_SETUPS = (Setup("two processes", 2, 2, rate=1000),)

# The paper: bytes of an ImageNet photograph (Table 1, Fig. 8: its mean, and times less at a scan).
PAPER_MEAN = 110e3
PAPER_TIMES = {1: 16, 2: 7, 5: 2, "full": 1}
# Images per second per node (Fig. 15: 4,200 and 7,000 for ten).
PAPER_RATES = {"ResNet-18": 420, "ShuffleNetV2": 700}
MIB = 1 << 20
IMAGENET = 1_281_167
PER_RECORD = 1024
# Images per second per core at a scan (Table 2), on 32 cores.
PAPER_DECODE = {1: 433, 2: 412, 5: 340, "full": 146}
SWEEP = (20, 50, 100, 200, 400, 500, 1000)
# Images per second per core of this machine at a scan: decode rates from evidence/pcr.
OUR_DECODE = {1: 6525, 2: 4268, 5: 1814, "full": 796}
# An H100 on ResNet-50 in mixed precision; and Amazon's list prices and guidance for S3.
H100_RATE = 2800
# Of a core, as the validation has measured it.
BYTE_SECONDS = 2.2e-9
S3 = {"stream": 90e6, "latency": (0.03, 0.3)}
DOLLARS_PER_REQUEST = 0.4e-6


def simulated(setup, found, costs, sizes, prefixes):
    """A set-up's outcome by the simulation; nothing of it is fitted to the set-up but the goodput
    of its links, which a plain download has measured.
    """
    share = found["goodput"] / (min(setup.storage, setup.link) * 1e6)
    cores = max(1, len(os.sched_getaffinity(0)) // setup.nodes)
    cluster = Cluster(
        setup.storage * 1e6 * share,
        setup.per_node,
        cores,
        setup.link * 1e6 * share,
        latency=setup.latency or (costs["latency"],) * 2,
    )
    some = min(setup.workers, 1)
    job = Job(
        setup.processes,
        setup.rate,
        BATCH,
        setup.workers,
        setup.threads,
        sync_seconds=costs["batch_seconds"][some],
        start_seconds=costs["start_seconds"][some],
        image_seconds=costs["image_seconds"][f"{setup.scan}, {setup.threads}"],
        byte_seconds=costs["byte_seconds"],
    )
    simulation = Simulation(cluster, job, sizes, prefixes, lanes_per_rank=real.phases(setup))
    traces = [simulation.run(epoch) for epoch in range(setup.epochs)]
    seconds = sum(trace.step_ends[-1] for trace in traces)
    waited = sum(trace.waited for trace in traces) / setup.processes
    return {
        "images_per_second": sum(trace.images for trace in traces) / seconds,
        "stall": waited / seconds,
        "first_batch": traces[0].first_batch,
        "requests": sum(trace.requests for trace in traces),
        "sent_bytes": sum(trace.sent_bytes for trace in traces),
    }


def validate(lab):
    """Each set-up, real and simulated, in several rounds; kept as they end."""
    results = lab.load("validation") or {"rows": []}
    setups = QUICK_SETUPS if lab.quick else SETUPS
    index = pcrshard.open_dataset(real.dataset(lab))[0]
    sizes = [shard.num_samples for shard in index.shards]
    known = {(row["round"], row["name"]) for row in results["rows"]}
    costs = {}  # of each round: what a machine does in a second changes from hour to hour
    for number, setup in itertools.product(range(1 if lab.quick else ROUNDS), setups):
        if (number, setup.name) in known:
            continue
        if number not in costs:
            ways = {(setup.scan, setup.threads) for setup in setups}
            costs[number] = real.calibrate(lab, ways)
        prefixes = [shard.prefix_stop(setup.scan) for shard in index.shards]
        found = real.real(lab, setup)
        model = simulated(setup, found, costs[number], sizes, prefixes)
        row = {"round": number, **dataclasses.asdict(setup), "costs": costs[number]}
        results["rows"].append(row | {"real": found, "simulated": model})
        lab.save("validation", results)
        ratio = model["images_per_second"] / found["images_per_second"]
        print(f"{setup.name}: {found['images_per_second']:.1f} images/s, simulated x{ratio:.3f}")


def run(cluster, job, scan, steps=None):
    """The outcome of an epoch of ImageNet's records at a scan."""
    whole, rest = divmod(IMAGENET, PER_RECORD)
    sizes = [PER_RECORD] * whole + [rest]
    prefixes = [round(size * PAPER_MEAN / PAPER_TIMES[scan]) for size in sizes]
    simulation = Simulation(cluster, job, sizes, prefixes, lanes_per_rank=job.workers)
    return simulation.run(steps=steps).outcome(job)


def paper_cluster(bandwidth, nodes_rate, nodes, scan):
    """The paper's: one TitanX and 32 cores a node."""
    job = Job(nodes, nodes_rate, 128, workers=4, image_seconds=1 / PAPER_DECODE[scan])
    return run(Cluster(bandwidth, 1, 32), job, scan)


def sweep(model, nodes, mebibytes):
    """{scan: [MiB/s, outcome]} of the paper's cluster at some bandwidths."""
    return {
        str(scan): [
            [mib, paper_cluster(mib * MIB, PAPER_RATES[model], nodes, scan)] for mib in mebibytes
        ]
        for scan in PAPER_TIMES
    }


def figure5(lab):
    """Ten nodes with ResNet-18: images per second against bandwidth."""
    return sweep("ResNet-18", 10, SWEEP[:1] if lab.quick else SWEEP)


def figure9(_):
    """Twenty nodes at 700 MiB/s: seconds per epoch, both models."""
    return {
        model: {scan: points[0][1] for scan, points in sweep(model, 20, (700,)).items()}
        for model in PAPER_RATES
    }


def figure16(lab):
    """Ten nodes: hours for 90 epochs at some bandwidths, both models."""
    limits = (20, 200) if lab.quick else (20, 50, 200, 500)
    return {model: sweep(model, 10, limits) for model in PAPER_RATES}


def dgx(lab):
    """64 H100 in eight machines that read ImageNet from S3, at some shares of its bandwidth."""
    shares = (2.0,) if lab.quick else (1.0, 2.0, 5.0, 10.0, math.inf)
    found = {}
    for scan in PAPER_TIMES:
        rows = []
        for gigabytes in shares:
            cluster = Cluster(gigabytes * 1e9, 8, 192, 12.5e9, **S3)
            seconds = {"image_seconds": 1 / OUR_DECODE[scan], "byte_seconds": BYTE_SECONDS}
            job = Job(64, H100_RATE, 256, workers=8, **seconds)
            outcome = run(cluster, job, scan)
            outcome["dollars"] = outcome["requests"] * DOLLARS_PER_REQUEST
            rows.append([min(gigabytes, 1e6), outcome])
        found[str(scan)] = rows
    return found


def scale(lab):
    """CPU seconds to simulate an epoch of ImageNet on 1 to 1,024 accelerators."""
    rows = []
    for accelerators in (1, 8) if lab.quick else (1, 8, 64, 256, 1024):
        cluster = Cluster(10e9, 8, 192, 12.5e9, **S3)
        batch = 64 if accelerators > 64 else 256
        seconds = {"image_seconds": 1 / OUR_DECODE[5], "byte_seconds": BYTE_SECONDS}
        job = Job(accelerators, H100_RATE, batch, workers=4, **seconds)
        begun = time.process_time()
        found = run(cluster, job, 5, steps=20 if lab.quick else None)
        rows.append([accelerators, time.process_time() - begun, found])
    return rows


SIMULATED = {"fig5": figure5, "fig9": figure9, "fig16": figure16, "scale": scale, "dgx": dgx}


def measure_scale(lab):
    """All that is only simulated."""
    lab.measured("scale", lambda: {name: part(lab) for name, part in SIMULATED.items()})


PARTS = {"validation": validate, "scale": measure_scale}


def measure(lab, parts=()):
    """What is missing of some parts, or of both."""
    for part in parts or PARTS:
        PARTS[part](lab)
