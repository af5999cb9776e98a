"""Networks trained in all their layers at each scan, on pictures that are read and decoded in each
epoch.
"""

import dataclasses
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


def lite0(classes):
    """Lite0 with the weights of ImageNet and a new last layer."""
    return lites.quick_backward(lites.pretrained("lite0", classes))


RECIPES = (
    Recipe(LITE0, 224, 2, lite0, 2e-4, 1e-3, gathers=False),
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


class Run:
    """A training run: a recipe, a task, a scan, a seed."""

    def __init__(self, lab, recipe, task, scan, seed):
        torch.manual_seed(seed)
        self.lab = lab
        self.recipe = recipe
        self.task = task
        self.scan = scan
        self.seed = seed
        self.epochs = lab.scale * (4 if lab.quick else recipe.epochs)
        self.loader = self._open("train", scan)
        self.model = Model(recipe.network(self.loader.dataset.num_classes))
        *others, weight, bias = self.model.parameters()
        groups = [
            {"params": others, "lr": recipe.rate},
            {"params": [weight, bias], "lr": recipe.last_rate},
        ]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=WEIGHT_DECAY)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._factor)

    def _factor(self, step):
        done = (step + 0.5) / (self.epochs * len(self.loader))
        return min(1, done / RISE) * (1 + math.cos(math.pi * done)) / 2

    def _open(self, split, scan):
        side = self.recipe.side // (4 if self.lab.quick else 1)
        order = {"seed": self.seed} if split == "train" else {"shuffle": False}
        url = self.lab.dataset(self.task.name, split)
        return loader(url, scan, side, split, threads=1, **order)

    def accuracy(self, scan):
        """Share of the validation pictures at a scan that are told right."""
        self.model.eval()
        return share(self.model, self._open("val", scan))

    def _train_epoch(self):
        self.model.train(self.recipe.gathers)
        fit(self.model, self.optimizer, self.loader, schedule=self.schedule)

    def perform(self):
        """Train and return one row per epoch and the final accuracies."""
        size = self.lab.index(self.task.name, "train").prefix_bytes(self.scan)
        begun = time.process_time()
        training = 0.0
        rows = []
        for _ in range(self.epochs):
            before = time.process_time()
            self._train_epoch()
            training += time.process_time() - before
            rows.append({"bytes": size, "accuracy": self.accuracy(FULL)})
        found = {str(scan): self.accuracy(scan) for scan in SCANS if scan != FULL}
        found[FULL] = rows[-1]["accuracy"]
        head = {"network": self.recipe.name, "task": self.task.name, "kind": self.scan}
        costs = {
            "images": self.epochs * len(self.loader.dataset),
            "training_cpu_seconds": training,
            "cpu_seconds": time.process_time() - begun,
        }
        return head | {"seed": self.seed, "epochs": rows, "accuracy": found} | costs


def measure(lab):
    """The runs that are missing, on the largest task; those whose figures are read first."""
    recipes = {recipe.name: recipe for recipe in RECIPES}
    seeds = range(lab.scale * (1 if lab.quick else SEEDS))
    keys = [
        {"network": name, "kind": scan, "seed": seed}
        for scans in ((FULL, 5), (2,))
        for seed in seeds
        for scan in scans
        for name in recipes
    ]
    for key in lab.missing(keys, "layers"):
        run = Run(lab, recipes[key["network"]], lab.task(0), key["kind"], key["seed"])
        lab.append(run.perform(), "layers")
