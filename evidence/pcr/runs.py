"""Training runs by scripts/train.py's own loop, in this process; each is a line of runs.jsonl, and
is made once. The last line of a kind counts.
"""

import contextlib
import dataclasses
import itertools
import os
import statistics
import tempfile
import time

import hydra
import numpy as np
import torch
import train

import pcrshard

from .. import ROOT
from ..server import serve

LR = 0.4  # at a batch of 256, as conf/train has it


@dataclasses.dataclass(frozen=True)
class Spec:
    """What decides a run. ``scan`` is a scan of ``script``, or ``tuner``; ``bandwidth`` in MB/s."""

    task: str
    scan: int | str
    seed: int = 0
    epochs: int = 8
    bandwidth: float | None = None
    script: str = "standard"


@contextlib.contextmanager
def config(lab, spec, *more):
    """conf/train with a run's settings and more overrides, in a folder that is removed again. A
    bandwidth is that of a server of the training shards.
    """
    policy = ["policy=constant", f"policy.scan={spec.scan}"]
    if spec.scan == "tuner":
        # One tuning, after an epoch: with so few images, another one would cost as much as two
        # epochs.
        policy = [
            "policy=tuner",
            f"policy.images={tuning_images(lab)}",
            "policy.first=1",
            "policy.every=1000",
        ]
    overrides = [
        f"data.val={lab.dataset(spec.task, 'val')}",
        # One lane and a narrow window: the first batch of an epoch waits for few of these small
        # shards.
        "data.lanes_per_rank=1",
        *policy,
        f"seed={spec.seed}",
        f"epochs={spec.epochs}",
        f"size={lab.size}",
        f"batch_size={batch(lab)}",
        f"optim.lr={LR}",
        "workers=0",
        "threads=1",
        "save_every=1000000",
        *more,
    ]
    folder = os.path.join(ROOT, "conf", "train")
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(tempfile.TemporaryDirectory(prefix="pcrshard-run-"))
        source = lab.dataset(spec.task, "train", spec.script)
        if spec.bandwidth:
            source, _ = stack.enter_context(serve(source, spec.bandwidth * 1e6))
        overrides += [f"data.train={source}", f"out={out}"]
        with hydra.initialize_config_dir(version_base="1.3", config_dir=folder):
            cfg = hydra.compose("config", overrides)
        yield cfg


def tuning_images(lab):
    """Images of a trial of the tuner."""
    return 32 if lab.quick else 128


def batch(lab):
    """Images of a step."""
    return 16 if lab.quick else 32


class Watched(train.Run):
    """A training run that counts the CPU time of tuning and training, without evaluation."""

    def __init__(self, cfg):
        super().__init__(cfg, train.current(), torch.device("cpu"))
        self.computed = 0.0
        self.begun = time.process_time()

    def train_epoch(self, num_steps):
        super().train_epoch(num_steps)
        self.computed += time.process_time() - self.begun

    def log(self, row):
        self.rows.append(row | {"cpu_seconds": self.computed})

    def checkpoint(self):
        super().checkpoint()
        self.begun = time.process_time()


def perform(lab, spec, *more):
    """Train, with more overrides of the configuration; what is kept of it."""
    torch.set_num_threads(1)
    torch.manual_seed(spec.seed)
    with config(lab, spec, *more) as cfg:
        run = Watched(cfg)
        run.train()
        steps = run.dataset.num_samples // run.cfg.batch_size
        reports = [
            [r.epoch, r.scan, [list(s) for s in r.similarities], r.images, r.seconds]
            for r in getattr(run.policy, "reports", [])
        ]
    return {
        "spec": dataclasses.asdict(spec),
        "rows": run.rows,
        "images": len(run.rows) * steps * run.cfg.batch_size,
        "accuracy": run.rows[-1]["accuracy"],
        "reports": reports,
    }


def runs(lab, specs):
    """The runs of some settings, made where they are missing, one after another."""
    keys = [{"spec": dataclasses.asdict(spec)} for spec in specs]
    for key in lab.missing(keys):
        lab.append(perform(lab, Spec(**key["spec"])))
    return [row for row in lab.rows() if {"spec": row["spec"]} in keys]


def _replay(lab, record, bandwidth):
    """Seconds, epoch by epoch, of a run's own reads through a token bucket; its computing is
    replaced by a sleep of the CPU time that it was measured to take.

    On a machine that other jobs share this is what the run would take with a core of its own.
    """
    rows, level = record["rows"], pcrshard.ScanLevel(record["rows"][0]["scan"])
    ends = [0.0, *(row["cpu_seconds"] for row in rows)]
    spent = [after - before for before, after in itertools.pairwise(ends)]
    tuned = {report[0] for report in record["reports"]}
    usual = statistics.median(seconds for epoch, seconds in enumerate(spent) if epoch not in tuned)
    total, seconds = 0.0, []
    with config(lab, Spec(**(record["spec"] | {"bandwidth": bandwidth}))) as cfg:
        loader = train.make_loader(cfg, cfg.data.train, level, None, training=True)
        for epoch, row in enumerate(rows):
            loader.set_epoch(epoch)
            begun = time.monotonic()
            if epoch in tuned:
                _read_as_tuner(loader, cfg.policy, epoch)
                time.sleep(max(0.0, spent[epoch] - usual))
            level.value = row["scan"]
            paced(loader, min(spent[epoch], usual) / len(loader))
            total += time.monotonic() - begun
            seconds.append(total)
    return seconds


def _read_as_tuner(loader, policy, epoch):
    """Read random images of each trial at full fidelity, as ScanTuner does."""
    for trial in range(policy.trials):
        rng = np.random.default_rng((epoch, trial))
        ids = rng.permutation(len(loader.dataset))[: policy.images]
        batches = np.array_split(ids, -(-len(ids) // loader.batch_size))
        for _ in loader.views(batches, ["full"], epoch=trial):
            pass


def paced(loader, step):
    """Read an epoch whose steps sleep for ``step`` seconds."""
    end = time.monotonic()
    for _ in loader:
        end = max(end, time.monotonic()) + step
        time.sleep(max(0.0, end - time.monotonic()))


def replays(lab, records, bandwidth):
    """Replay the runs that were not; lines of replays.jsonl."""
    for record in records:
        for key in lab.missing([{"spec": record["spec"], "bandwidth": bandwidth}], "replays"):
            lab.append(key | {"seconds": _replay(lab, record, bandwidth)}, "replays")
