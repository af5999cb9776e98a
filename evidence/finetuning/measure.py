"""A network of ImageNet trained on other tasks at each scan.

The last block and what follows it are trained, on what the rest gives for two augmented
pictures of each training picture at each scan. Rows are appended as runs end.
"""

import math
import os
import time

import torch

import pcrshard
from pcrshard.format.scan import FULL

from ..lab import SAMPLES_PER_SHARD, SCANS
from ..learning import classify, fit, share
from . import tails

# What is trained on; the first are those whose figures are read first. Of "mostly 2", one picture
# of five is at full fidelity.
KINDS = (FULL, 5, 2, "tuner", "mostly 2", "mixed", 1)
AT_EQUAL_BYTES = (5, 2, *tails.LEVELS)
# Files of rows, whose pairs are of one machine: kinds, what they need, and scans of the tests.
FILES = (("runs", KINDS, SCANS, SCANS), ("levels", AT_EQUAL_BYTES, AT_EQUAL_BYTES, (FULL,)))
DRAWN = {"mixed": SCANS, "mostly 2": (FULL, 2, 2, 2, 2)}
SEEDS = 3
EPOCHS = {"flowers": 4, "signs": 6, "ham224": 8}
# Augmented views of each training image at each scan: freshly drawn crops and flips.
VIEWS = 2
# Of the tuner: the paper's threshold for tuning again and again; a trial's pictures are a shard.
TUNER = {"threshold": 0.9, "trials": 3, "first": 1, "every": 2}


class Task:
    """What the trunk gives for the pictures of a task at some scans and levels, and at which scans
    it is tested.
    """

    def __init__(self, lab, task, kinds, tested=SCANS):
        self.lab = lab
        self.task = task
        self.epochs = lab.scale * (task.epochs if lab.quick else EPOCHS[task.name])
        views = range(lab.scale * (1 if lab.quick else VIEWS))
        found = {
            kind: [tails.trunk_outputs(lab, task, "train", kind, view) for view in views]
            for kind in kinds
        }
        self.train = {kind: [outputs for outputs, _ in parts] for kind, parts in found.items()}
        self.labels = found[kinds[0]][0][1]
        self.val = {}
        for scan in tested:
            self.val[str(scan)], self.tested = tails.trunk_outputs(lab, task, "val", scan)
        for scan in tails.SMOOTHED if 1 in tested else ():
            outputs, _ = tails.trunk_outputs(lab, task, "val", scan, smoothing=True)
            self.val[f"{scan} smoothed"] = outputs
        index = lab.index(task.name, "train")
        self.bytes = {scan: index.prefix_bytes(scan) / index.num_samples for scan in SCANS}
        url, levels = tails.levels(lab, task)
        by_level, _ = pcrshard.open_dataset(url)
        for kind, level in levels.items():
            self.bytes[kind] = by_level.prefix_bytes(level) / by_level.num_samples
        # What a tuning reads: one shard a trial, whole.
        self.tuning_bytes = TUNER["trials"] * index.prefix_bytes(FULL) / len(index.shards)

    def draw(self, kind, seed, epoch):
        """The batches of an epoch, and the bytes of their pictures."""
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        order = torch.randperm(len(self.labels), generator=generator)
        views = torch.randint(
            len(next(iter(self.train.values()))), (len(order),), generator=generator
        )
        among, scans = DRAWN.get(kind), [kind] * len(order)
        if among:
            drawn = torch.randint(len(among), (len(order),), generator=generator)
            scans = [among[number] for number in drawn.tolist()]
        rows = list(zip(scans, views.tolist(), order.tolist(), strict=True))
        parts = [rows[at : at + tails.BATCH] for at in range(0, len(rows), tails.BATCH)]
        return map(self.batch, parts), sum(self.bytes[scan] for scan in scans)

    def batch(self, rows):
        """Outputs and labels of (scan, view, picture)."""
        found = torch.stack([self.train[scan][view][number] for scan, view, number in rows])
        labels = self.labels[[number for *_, number in rows]]
        return found.float().contiguous(memory_format=torch.channels_last), labels

    def accuracies(self, tail, kinds):
        """Shares of the validation pictures that are told right, by how they are shown."""
        labels = self.tested.split(128)
        return {
            kind: share(
                tail,
                zip((part.float() for part in self.val[kind].split(128)), labels, strict=True),
            )
            for kind in kinds
        }

    def tuner(self, level):
        return pcrshard.ScanTuner(
            tails.open_split(self.lab, self.task, "train"),
            classify,
            level,
            candidates=[scan for scan in SCANS if scan != FULL],
            images=16 if self.lab.quick else SAMPLES_PER_SHARD,
            **TUNER,
        )


def _train(task, kind, seed, look):
    """Train, and return one entry per epoch, the final accuracies, and what was tuned."""
    torch.manual_seed(seed)
    tail = tails.tail(int(task.labels.max()) + 1)
    optimizer = torch.optim.AdamW(tail.parameters(), lr=5e-4, weight_decay=0.02)
    steps = task.epochs * math.ceil(len(task.labels) / tails.BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2
    )
    level = pcrshard.ScanLevel(FULL)
    tuner = task.tuner(level) if kind == "tuner" else None
    whole = tails.Whole(look, tail)
    rows = []
    begun = time.process_time()
    for epoch in range(task.epochs):
        tuned = tuner and tuner.step(whole, epoch)
        scan = level.value if tuner else kind
        batches, read = task.draw(scan, seed, epoch)
        fit(tail, optimizer, batches, schedule=schedule)
        read += task.tuning_bytes if tuned else 0
        (accuracy,) = task.accuracies(tail, (FULL,)).values()
        rows.append({"scan": scan, "bytes": read, "accuracy": accuracy})
    found = task.accuracies(tail, task.val)
    row = {"epochs": rows, "accuracy": found, "cpu_seconds": time.process_time() - begun}
    if tuner:
        row["tunings"] = [
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
    return row


KEPT = ("layers", "link")  # measured once


def measure(lab, _parts=()):
    """The runs that are missing, the smallest task first; there are no parts."""
    torch.set_num_threads(len(os.sched_getaffinity(0)) if lab.quick else 1)
    look = tails.trunk()
    for task in sorted(lab.tasks, key=lambda task: lab.index(task.name, "train").num_samples):
        seeds = range(lab.scale * (1 if lab.quick else SEEDS))
        for name, kinds, shown, tested in FILES:
            prepared = None
            keys = [{"task": task.name, "kind": k, "seed": seed} for k in kinds for seed in seeds]
            for key in lab.missing(keys, name):
                prepared = prepared or Task(lab, task, shown, tested)
                lab.append(key | _train(prepared, key["kind"], key["seed"], look), name)
