"""``reproduce.py layers``: networks trained in all their layers at each scan, on pictures that are
read and decoded in each epoch; two sections of docs/evidence/finetuning.md.
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable

import torch
from models import resnet18
from torch import nn

import pcrshard
from pcrshard.format.scan import FULL

from . import finetuning, finetuning_layers_page, lites
from .finetuning_layers_page import LITE0, RESNET, ROWS
from .lab import SCANS

NAME = finetuning_layers_page.NAME
BATCH = 32
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
    # Whether batch normalisation gathers statistics.
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
            {"params": others, "lr": recipe.rate, "highest": recipe.rate},
            {"params": [weight, bias], "lr": recipe.last_rate, "highest": recipe.last_rate},
        ]
        self.optimiser = torch.optim.AdamW(groups, weight_decay=WEIGHT_DECAY)
        self.step = 0

    def _open(self, split, scan):
        side = self.recipe.side // (4 if self.lab.quick else 1)
        if split == "train":
            decoder = pcrshard.ImageDecoder(side, "random", scale=(0.35, 1.0), flip=0.5)
        else:
            decoder = pcrshard.ImageDecoder(side, "center")
        url = self.lab.dataset(self.task.name, split)
        dataset = pcrshard.PCRDataset(url, scan=scan, decoder=decoder, fields=("jpg", "cls"))
        how = {"seed": self.seed} if split == "train" else {"shuffle": False}
        return pcrshard.PCRLoader(dataset, BATCH, threads=1, drop_last=False, **how)

    def accuracy(self, scan):
        """Share of the validation pictures at a scan that are told right."""
        self.model.eval()
        right = 0
        loader = self._open("val", scan)
        with torch.inference_mode():
            for images, labels in loader:
                right += int((self.model(images).argmax(1) == labels).sum())
        return right / len(loader.dataset)

    def _train_epoch(self, loader):
        self.model.train(self.recipe.gathers)
        for images, labels in loader:
            share = (self.step + 0.5) / (self.epochs * len(self.loader))
            factor = min(1, share / RISE) * (1 + math.cos(math.pi * share)) / 2
            for group in self.optimiser.param_groups:
                group["lr"] = group["highest"] * factor
            self.step += 1
            self.optimiser.zero_grad()
            nn.functional.cross_entropy(self.model(images), labels).backward()
            self.optimiser.step()

    def perform(self):
        """Train, and what came of it: a row an epoch, and accuracies in the end."""
        size = self.lab.index(self.task.name, "train").prefix_bytes(self.scan)
        begun = time.process_time()
        training = 0.0
        rows = []
        for _ in range(self.epochs):
            before = time.process_time()
            self._train_epoch(self.loader)
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


def _runs(lab):
    """What is trained on, by seed; the first are those whose figures are read first."""
    seeds = range(lab.scale * (1 if lab.quick else SEEDS))
    return [(scan, seed) for scans in ((FULL, 5), (2,)) for seed in seeds for scan in scans]


def measure(lab):
    """The runs that are missing, on the largest task."""
    torch.set_num_threads(len(os.sched_getaffinity(0)) if lab.quick else 1)
    have = {(row["network"], row["kind"], row["seed"]) for row in lab.rows(ROWS)}
    for scan, seed in _runs(lab):
        for recipe in RECIPES:
            if (recipe.name, scan, seed) in have:
                continue
            row = Run(lab, recipe, lab.task(0), scan, seed).perform()
            lab.append(ROWS, row)
            done = f"{recipe.name}, {scan}, seed {seed}: {100 * row['accuracy'][FULL]:.1f}"
            print(f"{done} ({row['cpu_seconds']:.0f} CPU s)", flush=True)


def reproduce(lab):
    """What is missing is measured; figures and the page are made anew."""
    if not lab.existing:
        measure(lab)
    finetuning.publish(lab)
