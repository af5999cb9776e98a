"""Training runs by scripts/train.py's own loop, in this process; each is a line of runs.jsonl, and
is made once. The last line of a kind counts.
"""

import dataclasses
import itertools
import json
import os
import statistics
import tempfile
import time

import fsspec
import hydra
import torch
import train

import pcrshard
from pcrshard.fidelity.tuner import ScanTuner
from pcrshard.testing import ThrottledFS

from .. import ROOT

LR = 0.4  # at a batch of 256, as conf/train has it


@dataclasses.dataclass(frozen=True)
class Spec:
    """What decides a run. ``scan`` is a scan of ``script``, or ``tuner``; ``bandwidth`` in MB/s."""

    task: str
    scan: int | str
    seed: int = 0
    epochs: int = 8
    coarse: tuple[int, ...] = ()
    smoothing: bool = False
    bandwidth: float | None = None
    script: str = "standard"

    @property
    def key(self):
        """As rows are found by."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def config(lab, spec, out, *more):
    """conf/train with a run's settings, and more overrides."""
    policy = ["policy=constant", f"policy.scan={spec.scan}"]
    if spec.scan == "tuner":
        images = 32 if lab.quick else 128
        # One tuning, after an epoch: with so few images, another one would cost as much as two
        # epochs.
        policy = ["policy=tuner", f"policy.images={images}", "policy.first=1", "policy.every=1000"]
    coarse = f"[{','.join(map(str, spec.coarse))}]" if spec.coarse else "null"
    overrides = [
        f"data.train={lab.dataset(spec.task, 'train', spec.script)}",
        f"data.val={lab.dataset(spec.task, 'val')}",
        f"data.coarse={coarse}",
        f"data.smoothing={str(spec.smoothing).lower()}",
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
        f"out={out}",
        *more,
    ]
    folder = os.path.join(ROOT, "conf", "train")
    with hydra.initialize_config_dir(version_base="1.3", config_dir=folder):
        cfg = hydra.compose("config", overrides)
    if spec.bandwidth:  # a token bucket that all readers share
        fsspec.register_implementation("throttled", ThrottledFS, clobber=True)
        cfg.data.train = f"throttled://{os.path.abspath(cfg.data.train)}"
        state = os.path.abspath(os.path.join(out, "bucket"))
        cfg.data.storage_options = {"rate": spec.bandwidth * 1e6, "state": state}
    return cfg


def batch(lab):
    """Images of a step."""
    return 16 if lab.quick else 32


class Watch:
    """A policy as it is, whose steps are announced and whose batches are timed."""

    def __init__(self, policy, before_epoch=None):
        self.policy = policy
        self.before_epoch = before_epoch
        self.waited = 0.0  # seconds for batches
        self.arrivals = []  # CPU seconds at which batches came
        self.begun = time.process_time()  # of the epoch

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def step(self, *, model, epoch):
        """Before each epoch."""
        if self.before_epoch is not None:
            self.before_epoch(epoch)
        self.begun = time.process_time()
        self.policy.step(model=model, epoch=epoch)

    def watch(self, loader):
        """The batches of the loader."""
        source = iter(self.policy.watch(loader))
        while True:
            begun = time.monotonic()
            found = next(source, None)
            self.waited += time.monotonic() - begun
            self.arrivals.append(time.process_time())
            if found is None:
                return
            yield found


class Watched(train.Run):
    """A training run whose waiting and computing are told apart."""

    def __init__(self, cfg, before_epoch=None):
        super().__init__(cfg, train.current(), torch.device("cpu"))
        look = None if before_epoch is None else lambda epoch: before_epoch(self, epoch)
        self.policy = Watch(self.policy, look)
        self.computed = 0.0

    def train_epoch(self, per_epoch):
        super().train_epoch(per_epoch)
        self.computed += time.process_time() - self.policy.begun

    def perform(self):
        """Train, and return a row for each epoch."""
        rows = []
        self.train(
            lambda row: rows.append(
                row | {"waited": self.policy.waited, "cpu_seconds": self.computed}
            )
        )
        return rows

    def accuracy_at(self, scan):
        """Accuracy on validation images of a scan."""
        cfg = self.cfg.copy()
        cfg.data.val_scan = scan
        val = train.Run(cfg, train.current(), self.device).val
        return train.evaluate(self.model, val, self.prepare)


def perform(lab, spec, watch=None):
    """Train; ``watch(run, epoch)`` is called before each epoch."""
    torch.set_num_threads(1)
    torch.manual_seed(spec.seed)
    with tempfile.TemporaryDirectory(prefix="pcrshard-run-") as out:
        run = Watched(config(lab, spec, out), watch)
        rows = run.perform()
        own = None if spec.scan in ("full", "tuner") else run.accuracy_at(spec.scan)
        steps = run.dataset.num_samples // run.cfg.batch_size
        reports = [
            [r.epoch, r.scan, [list(s) for s in r.similarities], r.images, r.seconds]
            for r in getattr(run.policy, "reports", [])
        ]
    return {
        "spec": dataclasses.asdict(spec),
        "rows": rows,
        "images": len(rows) * steps * run.cfg.batch_size,
        "accuracy": rows[-1]["accuracy"],
        "accuracy_at_own_scan": own,
        "reports": reports,
    }


def known(lab):
    """All runs that are kept, by their settings."""
    return {json.dumps(row["spec"], sort_keys=True): row for row in lab.rows()}


def runs(lab, specs):
    """The runs of some settings, made where they are missing, one after another."""
    have = known(lab)
    for spec in specs:
        if spec.key not in have:
            begun = time.monotonic()
            have[spec.key] = perform(lab, spec)
            lab.append(have[spec.key])
            accuracy = have[spec.key]["accuracy"]
            print(f"{spec}: {accuracy:.3f} ({time.monotonic() - begun:.0f} s)", flush=True)
    return [have[spec.key] for spec in specs]


def _replay(lab, record, bandwidth):
    """Seconds, epoch by epoch, of a run's own reads through a token bucket; its computing is
    replaced by a sleep of the CPU time that it was measured to take.

    On a machine that other jobs share this is what the run would take with a core of its own.
    """
    settings = record["spec"] | {"coarse": tuple(record["spec"]["coarse"]), "bandwidth": bandwidth}
    rows, level = record["rows"], pcrshard.ScanLevel(record["rows"][0]["scan"])
    ends = [0.0, *(row["cpu_seconds"] for row in rows)]
    spent = [after - before for before, after in itertools.pairwise(ends)]
    tuned = {report[0] for report in record["reports"]}
    usual = statistics.median(seconds for epoch, seconds in enumerate(spent) if epoch not in tuned)
    total, seconds = 0.0, []
    with tempfile.TemporaryDirectory(prefix="pcrshard-replay-") as out:
        cfg = config(lab, Spec(**settings), out)
        loader = train.make_loader(cfg, cfg.data.train, level, None, training=True)
        for epoch, row in enumerate(rows):
            loader.set_epoch(epoch)
            begun = time.monotonic()
            if epoch in tuned:
                _read_as_tuner(loader, level, cfg.policy, epoch)
                time.sleep(max(0.0, spent[epoch] - usual))
            level.value = row["scan"]
            paced(loader, min(spent[epoch], usual) / len(loader))
            total += time.monotonic() - begun
            seconds.append(total)
    return seconds


def _read_as_tuner(loader, level, policy, epoch):
    tuner = ScanTuner(loader, None, level, images=policy.images, trials=policy.trials)
    for trial in range(tuner.trials):
        for _ in loader.views(tuner._batches(epoch, trial), ["full"], epoch=-1 - trial):
            pass


def paced(loader, step):
    """Read an epoch whose steps sleep for ``step`` seconds."""
    end = time.monotonic()
    for _ in loader:
        end = max(end, time.monotonic()) + step
        time.sleep(max(0.0, end - time.monotonic()))


def replayed(lab):
    """All replays that are kept: {key of spec and bandwidth: seconds by epoch}."""
    return {row["key"]: row["seconds"] for row in lab.rows("replays")}


def replay_key(spec, bandwidth):
    """As replays are found by."""
    return json.dumps([spec, bandwidth], sort_keys=True)


def replays(lab, records, bandwidth):
    """Replay the runs that were not; lines of replays.jsonl."""
    have = replayed(lab)
    for record in records:
        key = replay_key(record["spec"], bandwidth)
        if key not in have:
            have[key] = _replay(lab, record, bandwidth)
            lab.append({"key": key, "seconds": have[key]}, "replays")
            print(f"replayed {key}: {have[key][-1]:.1f} s", flush=True)
