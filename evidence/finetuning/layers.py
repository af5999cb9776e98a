"""Networks trained in all their layers at each scan, on pictures that are read and decoded in each
epoch.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable

import torch
from torch import nn
from training.models import resnet18

from pcrshard.format.scan import FULL

from .. import lites
from ..lab import SCANS
from ..learning import fit, share
from .tails import loader

LITE0 = "EfficientNet-Lite0, all layers"
RESNET = "ResNet-18 from scratch"
WEIGHT_DECAY = 0.02
# Share of the steps in which the rate rises.
RISE = 0.1
SEEDS = 2


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A network, and how it is trained."""

    name: str
    side: int
    epochs: int
    network: Callable[[int], nn.Module]
    rate: float
    # Of the last layer, which is new where the others are not.
    last_rate: float
    # Whether batch normalization gathers statistics.
    gathers: bool


RECIPES = (
    Recipe(LITE0, 224, 2, functools.partial(lites.pretrained, "lite0"), 2e-4, 1e-3, gathers=False),
    Recipe(RESNET, 112, 6, resnet18, 1e-3, 1e-3, gathers=True),
)


class Model(nn.Module):
    """uint8 pictures to scores, both on the processor; the network is where it is fast."""

    def __init__(self, network):
        super().__init__()
        self.device = lites.device()
        self.number = lites.fast_type()
        self.network = network.to(self.device, memory_format=torch.channels_last)

    def forward(self, images):
        pixels = lites.scaled(images.to(self.device), torch.float32)
        faster = self.number != torch.float32
        with torch.autocast(self.device.type, self.number, enabled=faster):
            return self.network(pixels).float().cpu()


def train(lab, recipe, task, scan, seed):
    """Train, and return one entry per epoch, the final accuracies, and what it took."""
    torch.manual_seed(seed)
    epochs = lab.scale * (4 if lab.quick else recipe.epochs)
    side = recipe.side // (4 if lab.quick else 1)

    def read(split, at, **order):
        return loader(lab.dataset(task.name, split), at, side, split, threads=1, **order)

    source = read("train", scan, seed=seed)
    model = Model(recipe.network(source.dataset.num_classes))
    *others, weight, bias = model.parameters()
    groups = [
        {"params": others, "lr": recipe.rate},
        {"params": [weight, bias], "lr": recipe.last_rate},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=WEIGHT_DECAY)

    def factor(step):
        done = (step + 0.5) / (epochs * len(source))
        return min(1, done / RISE) * (1 + math.cos(math.pi * done)) / 2

    def accuracy(at):
        model.eval()
        return share(model, read("val", at, shuffle=False))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    size = lab.index(task.name, "train").prefix_bytes(scan)
    begun = time.process_time()
    training = 0.0
    rows = []
    for _ in range(epochs):
        before = time.process_time()
        model.train(recipe.gathers)
        fit(model, optimizer, source, schedule=schedule)
        training += time.process_time() - before
        rows.append({"bytes": size, "accuracy": accuracy(FULL)})
    found = {str(at): accuracy(at) for at in SCANS if at != FULL}
    return {
        "epochs": rows,
        "accuracy": found | {FULL: rows[-1]["accuracy"]},
        "images": epochs * len(source.dataset),
        "training_cpu_seconds": training,
        "cpu_seconds": time.process_time() - begun,
    }


def measure(lab):
    """The runs that are missing, on the largest task; those whose figures are read first."""
    recipes = {recipe.name: recipe for recipe in RECIPES}
    seeds = range(lab.scale * (1 if lab.quick else SEEDS))
    keys = [
        {"network": name, "task": lab.task(0).name, "kind": scan, "seed": seed}
        for scans in ((FULL, 5), (2,))
        for seed in seeds
        for scan in scans
        for name in recipes
    ]
    for key in lab.missing(keys, "layers"):
        recipe = recipes[key["network"]]
        lab.append(key | train(lab, recipe, lab.task(0), key["kind"], key["seed"]), "layers")
