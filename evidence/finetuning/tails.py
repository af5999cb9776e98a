"""A pretrained network in two: a trunk that stays as it is, whose output is computed once, and a
tail that is trained on it.
"""

import os

import torch
from torch import nn

import pcrshard
from pcrshard import storage
from pcrshard.format.scan import FULL

from .. import lites
from ..lab import SCANS

SIZE = 224
# The tail is the last block, the layers behind it and a new last layer.
FIRST = 15
BATCH = 32
SMOOTHED = (1, 2)


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


def open_split(lab, task, split, **smoothing):
    """All pictures of a split in the dataset's order."""
    url, side = lab.dataset(task.name, split), 64 if lab.quick else SIZE
    scan = pcrshard.ScanLevel(FULL) if split == "train" else FULL
    return loader(url, scan, side, split, shuffle=False, **smoothing)


def trunk_outputs(lab, task, split, view=0, *, smoothing=False):
    """({scan: outputs}, labels) of a split, computed once and kept; ``view`` is the epoch that
    crops are drawn for. All scans of a batch have the same crops, as the tuner of scans reads them.
    """
    name = f"{task.name}-{split}-{view}{'-smoothed' if smoothing else ''}.pt"
    path = os.path.join(lab.cache, "trunks", name)
    if os.path.exists(path):
        return torch.load(path)
    source = open_split(lab, task, split, smoothing=smoothing)
    ids = [part.numpy() for part in torch.arange(len(source.dataset)).split(BATCH)]
    scans = SMOOTHED if smoothing else SCANS
    look = trunk()
    outputs, labels = {scan: [] for scan in scans}, []
    for batches in source.views(ids, scans, epoch=view):
        for scan, (images, _) in batches.items():
            outputs[scan].append(through(look, images))
        labels.append(batches[scans[0]][1])
    found = {scan: torch.cat(parts) for scan, parts in outputs.items()}, torch.cat(labels)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with storage.atomic_write(path) as file:
        torch.save(found, file)
    print(f"{name}: {len(found[1])} pictures", flush=True)
    return found
