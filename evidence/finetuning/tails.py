"""A pretrained network in two: a trunk that stays as it is, whose output is computed once, and a
tail that is trained on it.
"""

import os

import torch
from torch import nn

import pcrshard
from pcrshard.format.scan import FULL

from .. import lites
from ..lab import SCANS

SIZE = 224
# The tail is the last block, the layers behind it and a new last layer.
FIRST = 15
BATCH = 32
# Augmented views of each training image at each scan: freshly drawn crops and flips.
VIEWS = 2
SMOOTHED = (1, 2)
ADAMW = {"lr": 5e-4, "weight_decay": 0.02}


class Trunk(nn.Module):
    """The network up to the tail."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images):
        net = self.network
        found = net._swish(net._bn0(net._conv_stem(images)))
        for block in net._blocks[:FIRST]:
            found = block(found)
        return found


class Tail(nn.Module):
    """The rest of the network, where it is fast; what it takes and gives is on the processor.

    Statistics of batch normalization stay those of ImageNet.
    """

    def __init__(self, network, classes):
        super().__init__()
        self.blocks = network._blocks[FIRST:]
        self.head = nn.Sequential(network._conv_head, network._bn1, network._swish)
        self.last = nn.Linear(network._fc.in_features, classes)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def train(self, mode=True):
        """Gradients need no mode, and statistics are to stay."""
        return super().train(False)

    def forward(self, found):
        device = self.last.weight.device
        number = lites.fast_type()
        found = found.to(device)
        with torch.autocast(device.type, number, enabled=number != torch.float32):
            for block in self.blocks:
                found = block(found)
            return self.last(self.head(found).mean((2, 3))).float().cpu()


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
    return lites.Classifier(Trunk(lites.pretrained("lite0")))


def tail(classes):
    """A tail with the weights of ImageNet and a new last layer."""
    return Tail(lites.pretrained("lite0"), classes).to(lites.device()).train()


def through(look, images):
    """What the trunk gives for pictures, rounded as it is kept."""
    found = look(images).to(torch.bfloat16)
    return found.contiguous(memory_format=torch.channels_last)


def loader(url, scan, side, split, batch=BATCH, *, smoothing=False, **options):
    """Batches of a split: random crops to train, the middle to test."""
    if split == "train":
        decoder = pcrshard.ImageDecoder(side, "random", scale=(0.35, 1.0), flip=0.5)
    else:
        decoder = pcrshard.ImageDecoder(side, "center", smoothing=smoothing)
    dataset = pcrshard.PCRDataset(url, scan=scan, decoder=decoder, fields=("jpg", "cls"))
    return pcrshard.PCRLoader(dataset, batch, drop_last=False, **options)


def open_split(lab, task, split, *, smoothing=False):
    """All pictures of a split in the dataset's order."""
    url, side = lab.dataset(task.name, split), 64 if lab.quick else SIZE
    scan = pcrshard.ScanLevel(FULL) if split == "train" else FULL
    return loader(url, scan, side, split, smoothing=smoothing, shuffle=False)


def trunk_outputs(lab, task, split, view=0, *, smoothing=False):
    """({scan: outputs}, labels) of a split, computed once and kept; ``view`` is the epoch that
    crops are drawn for.
    """
    name = f"{task.name}-{split}-{view}{'-smoothed' if smoothing else ''}.pt"
    path = os.path.join(lab.cache, "trunks", name)
    if not os.path.exists(path):
        found = _look_at(lab, task, split, view, smoothing)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(found, f"{path}.new")
        os.replace(f"{path}.new", path)
        print(f"{name}: {len(found[1])} pictures", flush=True)
    return torch.load(path)


def _look_at(lab, task, split, view, smoothing):
    """All scans of a batch with the same crops, as the tuner of scans reads them."""
    source = open_split(lab, task, split, smoothing=smoothing)
    scans = SMOOTHED if smoothing else SCANS
    ids = [part.numpy() for part in torch.arange(len(source.dataset)).split(BATCH)]
    look = trunk()
    outputs = {scan: [] for scan in scans}
    labels = []
    for batches in source.views(ids, scans, epoch=view):
        for scan, (images, _) in batches.items():
            outputs[scan].append(through(look, images))
        labels.append(batches[scans[0]][1])
    return {scan: torch.cat(found) for scan, found in outputs.items()}, torch.cat(labels)
