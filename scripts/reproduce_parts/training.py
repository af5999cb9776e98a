"""Training runs by scripts/train.py's own loop, in this process; each is a line of runs.jsonl, and
is made once. The last line of a kind counts.
"""

import dataclasses
import json
import os
import statistics
import tempfile
import time

import hydra
import torch
import train
from train import Run, evaluate

import pcrshard
from pcrshard.fidelity.tuner import ScanTuner

from .lab import ROOT

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
    def name(self):
        """A short name of the kind of run, without the seed."""
        kind = (
            f"{self.task}{'-coarse' if self.coarse else ''} "
            f"{self.scan}{' smooth' if self.smoothing else ''}"
        )
        kind += "" if self.script == "standard" else f" {self.script}"
        return kind + (f" at {self.bandwidth:g} MB/s" if self.bandwidth else "")


def config(lab, spec, out, *more):
    """conf/train with a run's settings, and more overrides."""
    policy = (
        ["policy=tuner"]
        if spec.scan == "tuner"
        else ["policy=constant", f"policy.scan={spec.scan}"]
    )
    if spec.scan == "tuner":
        images = 32 if lab.quick else 128
        # One tuning, after an epoch: on so few images a second one would cost as much as two
        # epochs.
        policy += [f"policy.images={images}", "policy.first=1", "policy.every=1000"]
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
        f"batch_size={16 if lab.quick else 32}",
        f"optim.lr={LR}",
        f"bandwidth={spec.bandwidth or 'null'}",
        "workers=0",
        "threads=1",
        "save_every=1000000",
        f"out={out}",
        *more,
    ]
    with hydra.initialize_config_dir(
        version_base="1.3", config_dir=os.path.join(ROOT, "conf", "train")
    ):
        return hydra.compose("config", overrides)


class Timed:
    """Seconds spent waiting for batches, around a loader."""

    def __init__(self, around):
        self.around, self.seconds = around, 0.0

    def __call__(self, loader):
        source = iter(self.around(loader))
        while True:
            begun = time.monotonic()
            batch = next(source, None)
            self.seconds += time.monotonic() - begun
            if batch is None:
                return
            yield batch


def perform(lab, spec, before_epoch=None):
    """Train, and return what came of it: a row an epoch, and the accuracy on images of the scan
    that was trained on.
    """
    torch.set_num_threads(1)
    torch.manual_seed(spec.seed)
    rows = []
    with tempfile.TemporaryDirectory(prefix="pcrshard-run-") as out:
        run = Run(config(lab, spec, out), train.current(), torch.device("cpu"))
        run.around = timed = Timed(run.around)
        cpu = [time.process_time(), 0.0]  # at the last evaluation's end; of training
        step = run.before_epoch

        def note(row):
            rows.append(row | {"waited": timed.seconds, "cpu_seconds": cpu[1]})
            cpu[0] = time.process_time()

        def before(model, epoch):
            if before_epoch is not None:
                before_epoch(run, epoch)
                cpu[0] = time.process_time()
            step(model, epoch)

        timed_epoch = run.train_epoch

        def train_epoch(per_epoch):
            timed_epoch(per_epoch)
            cpu[1] += time.process_time() - cpu[0]

        run.before_epoch, run.train_epoch = before, train_epoch
        run.train(note)
        own = None
        if spec.scan not in ("full", "tuner"):
            cfg = run.cfg.copy()
            cfg.data.val_scan = spec.scan
            own = evaluate(run.model, Run(cfg, train.current(), run.device).val, run.prepare)
        images = len(rows) * (run.dataset.num_samples // run.cfg.batch_size) * run.cfg.batch_size
        reports = [
            [r.epoch, r.scan, [list(s) for s in r.similarities], r.images, r.seconds]
            for r in getattr(run.policy, "reports", [])
        ]
    return {
        "name": spec.name,
        "spec": dataclasses.asdict(spec),
        "rows": rows,
        "images": images,
        "accuracy": rows[-1]["accuracy"],
        "accuracy_at_own_scan": own,
        "reports": reports,
    }


def _path(lab):
    return os.path.join(lab.out, "runs.jsonl")


def known(lab):
    """All runs that are kept, by their settings."""
    if not os.path.exists(_path(lab)):
        return {}
    with open(_path(lab)) as file:
        records = [json.loads(line) for line in file if line.strip()]
    return {_key(record["spec"]): record for record in records}


def _key(spec):
    return json.dumps(spec, sort_keys=True)


def runs(lab, specs):
    """The runs of some settings, made where they are missing, one after another; with
    ``lab.existing`` those that are there.
    """
    have = known(lab)
    found = []
    for spec in specs:
        key = _key(json.loads(json.dumps(dataclasses.asdict(spec))))
        if key not in have or (lab.fresh and key not in lab.renewed):
            if lab.existing:
                continue
            begun = time.monotonic()
            have[key] = perform(lab, spec)
            lab.renewed.add(key)
            with open(_path(lab), "a") as file:
                file.write(json.dumps(have[key]) + "\n")
            print(
                (
                    f"{spec.name}, seed {spec.seed}: {have[key]['accuracy']:.3f} "
                    f"({time.monotonic() - begun:.0f} s)"
                ),
                flush=True,
            )
        found.append(have[key])
    return found


def _replay(lab, record, bandwidth):
    """Seconds, epoch by epoch, of a run's own reads through a token bucket; its computing is
    replaced by a sleep of the CPU time that it was measured to take.

    On a machine that other jobs share this is what the run would take with a core of its own.
    """
    spec = Spec(
        **record["spec"] | {"coarse": tuple(record["spec"]["coarse"]), "bandwidth": bandwidth}
    )
    rows, level = record["rows"], pcrshard.ScanLevel(record["rows"][0]["scan"])
    spent = [
        b["cpu_seconds"] - a
        for a, b in zip([0.0, *(row["cpu_seconds"] for row in rows)], rows, strict=False)
    ]
    tuned = {report[0] for report in record["reports"]}
    usual = statistics.median(seconds for epoch, seconds in enumerate(spent) if epoch not in tuned)
    total, seconds = 0.0, []
    with tempfile.TemporaryDirectory(prefix="pcrshard-replay-") as out:
        cfg = config(lab, spec, out)
        loader = train.make_loader(cfg, cfg.data.train, level, None, training=True)
        tuner = (
            ScanTuner(loader, None, level, images=cfg.policy.images, trials=cfg.policy.trials)
            if tuned
            else None
        )
        for epoch, row in enumerate(rows):
            loader.set_epoch(epoch)
            begun = time.monotonic()
            if epoch in tuned:
                for trial in range(tuner.trials):
                    for _ in loader.views(tuner._batches(epoch, trial), ["full"], epoch=-1 - trial):
                        pass
                time.sleep(max(0.0, spent[epoch] - usual))
            level.value = row["scan"]
            step, end = min(spent[epoch], usual) / len(loader), time.monotonic()
            for _ in loader:
                end = max(end, time.monotonic()) + step
                time.sleep(max(0.0, end - time.monotonic()))
            total += time.monotonic() - begun
            seconds.append(total)
    return seconds


def replayed(lab):
    """All replays that are kept: (spec, bandwidth, seconds by epoch)."""
    path = os.path.join(lab.out, "replays.jsonl")
    if not os.path.exists(path):
        return []
    with open(path) as file:
        rows = [json.loads(line) for line in file if line.strip()]
    return [(*json.loads(row["key"]), row["seconds"]) for row in rows]


def replays(lab, records, bandwidth):
    """Replayed seconds of some runs, by epoch; lines of replays.jsonl."""
    path = os.path.join(lab.out, "replays.jsonl")
    have = {
        json.dumps([spec, limit], sort_keys=True): seconds for spec, limit, seconds in replayed(lab)
    }
    found = {}
    for record in records:
        key = json.dumps([record["spec"], bandwidth], sort_keys=True)
        if key not in have or (lab.fresh and key not in lab.renewed):
            if lab.existing:
                continue
            have[key] = _replay(lab, record, bandwidth)
            lab.renewed.add(key)
            with open(path, "a") as file:
                file.write(
                    json.dumps({"key": key, "name": record["name"], "seconds": have[key]}) + "\n"
                )
            print(
                f"replayed {record['name']}, seed {record['spec']['seed']}: {have[key][-1]:.1f} s",
                flush=True,
            )
        found[record["spec"]["seed"]] = have[key]
    return found
