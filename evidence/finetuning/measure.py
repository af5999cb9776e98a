"""A network of ImageNet trained on other tasks at each scan.

The last block and what follows it are trained, on what the rest gives for two augmented
pictures of each training picture at each scan. Rows are appended as runs end.
"""

import itertools
import math
import os
import time

import servers
import torch

import pcrshard
from pcrshard.format.scan import FULL

from ..lab import SAMPLES_PER_SHARD, SCANS
from ..learning import classify, fit, share
from . import layers, link, tails

MIXED = "mixed"
TUNER = "tuner"
# One picture of five at full fidelity, the others at scan 2.
MOSTLY = "mostly 2"
# What is trained on; the first are those whose figures are read first.
KINDS = (FULL, 5, 2, TUNER, MOSTLY, MIXED, 1)
SEEDS = 3
EPOCHS = {"flowers": 4, "signs": 6, "ham224": 8}
# Of the tuner: the paper's threshold for tuning again and again, and pictures of a trial, which
# are one shard.
THRESHOLD = 0.9
IMAGES = SAMPLES_PER_SHARD
TRIALS = 3
EVERY = 2


class Task:
    """What the trunk gives for the pictures of a task."""

    def __init__(self, lab, task):
        self.lab = lab
        self.task = task
        self.epochs = lab.scale * (task.epochs if lab.quick else EPOCHS[task.name])
        views = range(lab.scale * (1 if lab.quick else tails.VIEWS))
        found = [tails.trunk_outputs(lab, task, "train", view) for view in views]
        self.train = {scan: [outputs[scan] for outputs, _ in found] for scan in SCANS}
        self.labels = found[0][1]
        plain, self.tested = tails.trunk_outputs(lab, task, "val")
        smoothed = tails.trunk_outputs(lab, task, "val", smoothing=True)[0]
        self.val = {str(scan): outputs for scan, outputs in plain.items()}
        self.val |= {f"{scan} smoothed": outputs for scan, outputs in smoothed.items()}
        index = lab.index(task.name, "train")
        self.bytes = {scan: index.prefix_bytes(scan) / index.num_samples for scan in SCANS}
        # What a tuning reads: one shard a trial, whole.
        self.tuning_bytes = TRIALS * index.prefix_bytes(FULL) / len(index.shards)

    @property
    def classes(self):
        return int(self.labels.max()) + 1

    def batch(self, ids, scans, views):
        """Outputs of some pictures, each at a scan and of a view."""
        rows = [
            self.train[scan][view][number]
            for number, scan, view in zip(ids.tolist(), scans, views.tolist(), strict=True)
        ]
        found = torch.stack(rows).float()
        return found.contiguous(memory_format=torch.channels_last), self.labels[ids]

    def accuracies(self, tail, kinds=None):
        """Shares of the validation pictures that are told right, by how they are shown."""
        labels = self.tested.split(128)
        return {
            kind: share(
                tail,
                zip((part.float() for part in self.val[kind].split(128)), labels, strict=True),
            )
            for kind in kinds or self.val
        }


class Run:
    """A training run: a task, what it is trained on, a seed."""

    def __init__(self, task, kind, seed, look):
        torch.manual_seed(seed)
        self.task = task
        self.kind = kind
        self.seed = seed
        self.tail = tails.tail(task.classes)
        self.optimizer = torch.optim.AdamW(self.tail.parameters(), **tails.ADAMW)
        steps = task.epochs * math.ceil(len(task.labels) / tails.BATCH)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2
        )
        self.level = pcrshard.ScanLevel(FULL)
        self.tuner = self._tuner() if kind == TUNER else None
        self.whole = tails.Whole(look, self.tail)

    def _tuner(self):
        loader = tails.open_split(self.task.lab, self.task.task, "train")
        return pcrshard.ScanTuner(
            loader,
            classify,
            self.level,
            candidates=[scan for scan in SCANS if scan != FULL],
            threshold=THRESHOLD,
            images=16 if self.task.lab.quick else IMAGES,
            trials=TRIALS,
            first=1,
            every=EVERY,
        )

    def _scans(self, count, generator):
        """The scans of an epoch's pictures."""
        among = {MIXED: SCANS, MOSTLY: (FULL, 2, 2, 2, 2)}.get(self.kind)
        if among:
            drawn = torch.randint(len(among), (count,), generator=generator)
            return [among[number] for number in drawn.tolist()]
        return [self.level.value if self.kind == TUNER else self.kind] * count

    def _epoch(self, epoch):
        """Train an epoch; the bytes of its pictures."""
        task = self.task
        generator = torch.Generator().manual_seed(1000 * self.seed + epoch)
        order = torch.randperm(len(task.labels), generator=generator)
        views = torch.randint(len(task.train[FULL]), (len(order),), generator=generator)
        scans = self._scans(len(order), generator)
        parts = [slice(at, at + tails.BATCH) for at in range(0, len(order), tails.BATCH)]
        batches = (task.batch(order[part], scans[part], views[part]) for part in parts)
        fit(self.tail, self.optimizer, batches, schedule=self.schedule)
        return sum(task.bytes[scan] for scan in scans)

    def perform(self):
        """Train and return one row per epoch and the final accuracies."""
        rows = []
        begun = time.process_time()
        for epoch in range(self.task.epochs):
            tuned = self.tuner.step(self.whole, epoch) if self.tuner else None
            read = self._epoch(epoch) + (self.task.tuning_bytes if tuned else 0)
            last = epoch == self.task.epochs - 1
            found = self.task.accuracies(self.tail, None if last else (FULL,))
            row = {"scan": self.level.value if self.tuner else self.kind, "bytes": read}
            rows.append(row | {"accuracy": found[FULL]})
        row = {"task": self.task.task.name, "kind": self.kind, "seed": self.seed}
        row |= {"epochs": rows, "accuracy": found, "cpu_seconds": time.process_time() - begun}
        return row | ({"tunings": self._tunings()} if self.tuner else {})

    def _tunings(self):
        return [
            {
                "epoch": report.epoch,
                "scan": report.scan,
                "cosines": [list(found) for found in report.similarities],
                "images": report.images,
                "bytes": self.task.tuning_bytes,
                "seconds": report.seconds,
            }
            for report in self.tuner.reports
        ]


def _measure_tails(lab):
    """The runs that are missing, the smallest task first."""
    look = tails.trunk(lab)
    for task in sorted(lab.tasks, key=lambda task: lab.index(task.name, "train").num_samples):
        seeds = range(lab.scale * (1 if lab.quick else SEEDS))
        keys = [{"task": task.name, "kind": k, "seed": seed} for k in KINDS for seed in seeds]
        prepared = None
        for key in lab.missing(keys):
            prepared = prepared or Task(lab, task)
            lab.append(Run(prepared, key["kind"], key["seed"], look).perform())


def _measure_link(lab):
    """Real epochs behind a link; nothing where links cannot be shaped."""
    found = lab.load("link") or {}
    for task, scan in itertools.product(lab.tasks, link.READ):
        row = found.setdefault(task.name, {"link": link.rate(lab), "epochs": {}})
        if str(scan) in row["epochs"]:
            continue
        try:
            row["epochs"][str(scan)] = link.measure(lab, task, scan)
        except servers.Unavailable as reason:
            print(reason)
            return
        lab.save("link", found)


PARTS = {"tails": _measure_tails, "link": _measure_link, "layers": layers.measure}


def measure(lab, parts=()):
    """What is missing of some parts, or of all."""
    torch.set_num_threads(len(os.sched_getaffinity(0)) if lab.quick else 1)
    for part in parts or PARTS:
        PARTS[part](lab)
