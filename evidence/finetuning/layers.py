"""Networks trained in all their layers at each scan, on pictures that are read and decoded in each
epoch.
"""

import functools
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from training.models import resnet18

from pcrshard.format.scan import FULL

from .. import lites
from ..lab import SCANS
from ..learning import fit, share
from .tails import loader

# Share of the steps in which the rate rises.
RISE = 0.1
SEEDS = 2


class Recipe(NamedTuple):
    """How a network is trained; its last layer may be new where the others are not."""

    side: int
    epochs: int
    network: Callable[[int], nn.Module]
    rate: float
    last_rate: float
    gathers: bool  # statistics of batch normalization


RECIPES = {
    "EfficientNet-Lite0, all layers": Recipe(
        224, 2, functools.partial(lites.pretrained, "lite0"), 2e-4, 1e-3, gathers=False
    ),
    "ResNet-18 from scratch": Recipe(112, 6, resnet18, 1e-3, 1e-3, gathers=True),
}


class Model(lites.Trainable):
    """uint8 pictures to scores."""

    def forward(self, images):
        return super().forward(lites.scaled(images, torch.float32))


def train(lab, recipe, task, scan, seed):
    """Train, and return one entry per epoch, the final accuracies, and what it took."""
    torch.manual_seed(seed)
    epochs = lab.scale * (4 if lab.quick else recipe.epochs)
    side = recipe.side // (4 if lab.quick else 1)

    def read(split, at, **order):
        return loader(lab.dataset(task.name, split), at, side, split, threads=1, **order)

    source = read("train", scan, seed=seed)
    model = Model(recipe.network(source.dataset.num_classes), gathers=recipe.gathers)
    *others, weight, bias = model.parameters()
    last = {"params": [weight, bias], "lr": recipe.last_rate}
    groups = [{"params": others, "lr": recipe.rate}, last]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.02)

    def factor(step):
        done = (step + 0.5) / (epochs * len(source))
        return min(1, done / RISE) * (1 + math.cos(math.pi * done)) / 2

    def accuracy(at):
        return share(model.eval(), read("val", at, shuffle=False))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    size = lab.index(task.name, "train").prefix_bytes(scan)
    begun = time.process_time()
    training = 0.0
    rows = []
    for _ in range(epochs):
        before = time.process_time()
        fit(model.train(), optimizer, source, schedule=schedule)
        training += time.process_time() - before
        rows.append({"bytes": size, "accuracy": accuracy(FULL)})
    return {
        "epochs": rows,
        "accuracy": {str(at): accuracy(at) for at in SCANS},
        "images": epochs * len(source.dataset),
        "training_cpu_seconds": training,
        "cpu_seconds": time.process_time() - begun,
    }


def measure(lab):
    """The runs that are missing, on the largest task; those whose figures are read first."""
    task = lab.task(0)
    keys = [
        {"network": name, "task": task.name, "kind": scan, "seed": seed}
        for scans in ((FULL, 5), (2,))
        for seed in range(lab.scale * (1 if lab.quick else SEEDS))
        for scan in scans
        for name in RECIPES
    ]
    for key in lab.missing(keys, "layers"):
        recipe = RECIPES[key["network"]]
        lab.append(key | train(lab, recipe, task, key["kind"], key["seed"]), "layers")
