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


def _tuner(task, level):
    loader = tails.open_split(task.lab, task.task, "train")
    return pcrshard.ScanTuner(
        loader,
        classify,
        level,
        candidates=[scan for scan in SCANS if scan != FULL],
        threshold=THRESHOLD,
        images=16 if task.lab.quick else IMAGES,
        trials=TRIALS,
        first=1,
        every=EVERY,
    )


def _scans(kind, count, generator):
    """The scans of an epoch's pictures."""
    among = {MIXED: SCANS, MOSTLY: (FULL, 2, 2, 2, 2)}.get(kind, (kind,))
    if len(among) == 1:
        return [kind] * count
    drawn = torch.randint(len(among), (count,), generator=generator)
    return [among[number] for number in drawn.tolist()]


def _train_epoch(task, kind, generator, tail, optimizer, schedule):
    """Train an epoch; the bytes of its pictures."""
    order = torch.randperm(len(task.labels), generator=generator)
    views = torch.randint(len(task.train[FULL]), (len(order),), generator=generator)
    scans = _scans(kind, len(order), generator)
    parts = [slice(at, at + tails.BATCH) for at in range(0, len(order), tails.BATCH)]
    batches = (task.batch(order[part], scans[part], views[part]) for part in parts)
    fit(tail, optimizer, batches, schedule=schedule)
    return sum(task.bytes[scan] for scan in scans)


def _train(task, kind, seed, look):
    """Train, and return one entry per epoch, the final accuracies, and what was tuned."""
    torch.manual_seed(seed)
    tail = tails.tail(task.classes)
    optimizer = torch.optim.AdamW(tail.parameters(), **tails.ADAMW)
    steps = task.epochs * math.ceil(len(task.labels) / tails.BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2
    )
    level = pcrshard.ScanLevel(FULL)
    tuner = _tuner(task, level) if kind == TUNER else None
    whole = tails.Whole(look, tail)
    rows = []
    begun = time.process_time()
    for epoch in range(task.epochs):
        tuned = tuner and tuner.step(whole, epoch)
        scan = level.value if tuner else kind
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        read = _train_epoch(task, scan, generator, tail, optimizer, schedule)
        last = epoch == task.epochs - 1
        found = task.accuracies(tail, None if last else (FULL,))
        read += task.tuning_bytes if tuned else 0
        rows.append({"scan": scan, "bytes": read, "accuracy": found[FULL]})
    row = {"epochs": rows, "accuracy": found, "cpu_seconds": time.process_time() - begun}
    return row | ({"tunings": _tunings(tuner, task)} if tuner else {})


def _tunings(tuner, task):
    return [
        {
            "epoch": report.epoch,
            "scan": report.scan,
            "cosines": [list(found) for found in report.similarities],
            "images": report.images,
            "bytes": task.tuning_bytes,
            "seconds": report.seconds,
        }
        for report in tuner.reports
    ]


def _measure_tails(lab):
    """The runs that are missing, the smallest task first."""
    look = tails.trunk()
    for task in sorted(lab.tasks, key=lambda task: lab.index(task.name, "train").num_samples):
        seeds = range(lab.scale * (1 if lab.quick else SEEDS))
        keys = [{"task": task.name, "kind": k, "seed": seed} for k in KINDS for seed in seeds]
        prepared = None
        for key in lab.missing(keys):
            prepared = prepared or Task(lab, task)
            lab.append(key | _train(prepared, key["kind"], key["seed"], look))


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
