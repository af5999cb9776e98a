"""A pretrained network in two: a trunk that stays as it is, whose output is computed once, and a
tail that is trained on it.
"""

import os
import pathlib

import numpy as np
import torch
from torch import nn

import pcrshard
from pcrshard import storage
from pcrshard.encoding.encode_jpeg import measure_scans
from pcrshard.format.scan import FULL
from pcrshard.format.scan_script import STANDARD

from .. import lites

SIZE = 224
# The tail is the last block, the layers behind it and a new last layer.
FIRST = 15
BATCH = 32
SMOOTHED = (1, 2)
# Levels that cost at most what these scans of `standard` cost, by the name of the kind.
LEVELS = {"level at 2": 2, "level at 5": 5}


class Whole(nn.Module):
    """Pictures to scores: what a tuner of scans asks for gradients."""

    def __init__(self, look, tail):
        super().__init__()
        self.look = look
        self.tail = tail

    def forward(self, images):
        return self.tail(through(self.look, images).float())


def trunk():
    """The trunk, which only looks."""
    net = lites.pretrained("lite0")
    stem = (net._conv_stem, net._bn0, net._swish)
    return lites.Classifier(nn.Sequential(*stem, *net._blocks[:FIRST]))


def tail(classes):
    """A tail with the weights of ImageNet and a new last layer."""
    net = lites.pretrained("lite0")
    last = nn.Linear(net._fc.in_features, classes)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    head = (net._conv_head, net._bn1, net._swish, nn.AdaptiveAvgPool2d(1), nn.Flatten(), last)
    return lites.Trainable(nn.Sequential(*net._blocks[FIRST:], *head)).train()


def through(look, images):
    """What the trunk gives for pictures, rounded as it is kept."""
    found = look(images).to(torch.bfloat16)
    return found.contiguous(memory_format=torch.channels_last)


def loader(url, scan, side, split, *, smoothing=False, **options):
    """Batches of a split: random crops to train, the middle to test."""
    if split == "train":
        decoder = pcrshard.ImageDecoder(side, "random", scale=(0.35, 1.0), flip=0.5)
    else:
        decoder = pcrshard.ImageDecoder(side, "center", smoothing=smoothing)
    dataset = pcrshard.PCRDataset(url, scan=scan, decoder=decoder, fields=("jpg", "cls"))
    return pcrshard.PCRLoader(dataset, BATCH, drop_last=False, **options)


def levels(lab, task):
    """The folder of a task's training pictures by levels, and {kind: level}: the highest that costs
    at most what a scan costs.
    """
    files = sorted(pathlib.Path(lab.classify(task.name), "train").glob("*/*.*"))
    some = files[:: max(len(files) // 64, 1)]
    sizes = np.mean([measure_scans(file.read_bytes(), STANDARD, 0).sizes for file in some], axis=0)
    ends = sizes / sizes[-1]
    rungs = [ends[scan - 1] * np.linspace(0.84, 1.02, 7) for scan in LEVELS.values()]
    shares = np.concatenate(rungs).round(4).tolist()
    url = lab.dataset(task.name, "train", "levels", (*shares, 1.0))
    index, _ = pcrshard.open_dataset(url)
    most = lab.index(task.name, "train")
    return url, {
        kind: max(
            level
            for level in range(1, len(shares) + 1)
            if index.prefix_bytes(level) <= most.prefix_bytes(scan)
        )
        for kind, scan in LEVELS.items()
    }


def open_split(lab, task, split, *, url=None, smoothing=False):
    """All pictures of a split in the dataset's order."""
    side = 64 if lab.quick else SIZE
    scan = pcrshard.ScanLevel(FULL) if split == "train" else FULL
    url = url or lab.dataset(task.name, split)
    return loader(url, scan, side, split, shuffle=False, smoothing=smoothing)


def trunk_outputs(lab, task, split, kind, view=0, *, smoothing=False):
    """(outputs, labels) of a split at a scan or a level, computed once and kept; ``view`` is the
    epoch that crops are drawn for. All kinds have the same crops.
    """
    name = f"{task.name}-{split}-{view}-{kind}{'-smoothed' if smoothing else ''}.pt"
    path = os.path.join(lab.cache, "trunks", name.replace(" ", "-"))
    if os.path.exists(path):
        return torch.load(path)
    url, scans = levels(lab, task) if kind in LEVELS else (None, {})
    source = open_split(lab, task, split, url=url, smoothing=smoothing)
    ids = [part.numpy() for part in torch.arange(len(source.dataset)).split(BATCH)]
    look = trunk()
    outputs, labels = [], []
    for batches in source.views(ids, [scans.get(kind, kind)], epoch=view):
        ((images, numbers),) = batches.values()
        outputs.append(through(look, images))
        labels.append(numbers)
    found = torch.cat(outputs), torch.cat(labels)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with storage.atomic_write(path) as file:
        torch.save(found, file)
    print(f"{name}: {len(found[1])} pictures", flush=True)
    return found
