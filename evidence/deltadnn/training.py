"""The training runs behind the Delta-DNN tables: three families of networks, all their epochs kept
with the optimizer's state, outside of the repository.

The generator of an epoch is seeded by the run's seed and the epoch, so that an epoch can be trained
again from its beginning: exactly, or from a restored state.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import statistics
import time

import numpy as np
import torch
from torch import nn
from training.models import conv, resnet18

from .. import lites
from ..learning import Data, files_of, fit, floats, hits, pictures, vgg

BATCH = 32
# Of each class; the others and the validation set are the test set. One of the 600 pictures of the
# validation set is 0.17 points of accuracy: too coarse for a budget of 0.2.
TRAIN_PER_CLASS = 300
DEFAULT_LR = 0.02
FINAL_LR = 0.1  # share of the first


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What decides a run, but for the seed.

    Attributes:
        name: As it stands in the tables.
        network: One of :data:`NETWORKS`.
        optimizer: ``"sgd"`` with momentum 0.9, or ``"adamw"``.
        lr: At the beginning; it falls to a tenth by a cosine.
        epochs: How many.
        size: Of the square pictures.
        images: Number of training images; ``None`` for all.
        test_every: Stride over the test images.
        seeds: One run each.
    """

    name: str
    network: str
    optimizer: str = "sgd"
    lr: float = DEFAULT_LR
    epochs: int = 16
    size: int = 48
    images: int | None = None
    test_every: int = 1
    seeds: tuple[int, ...] = (0, 1, 2)


RECIPES = (
    Recipe("VGG", "vgg"),
    Recipe("ResNet", "resnet"),
    Recipe("Lite0", "lite0", lr=0.01, epochs=12, size=128, images=480, test_every=3, seeds=(0,)),
    Recipe("VGG, AdamW", "vgg", "adamw", lr=1e-3, epochs=20, seeds=(0, 1)),
)
QUICK_RECIPES = (
    Recipe("VGG", "small_vgg", epochs=3, size=32, seeds=(0, 1)),
    Recipe("ResNet", "small_resnet", epochs=3, size=32, seeds=(0,)),
    Recipe("VGG, AdamW", "small_vgg", "adamw", lr=1e-3, epochs=3, size=32, seeds=(0,)),
)


def small_vgg(classes, width=32):
    """Six convolutions with BatchNorm in four stages, and two linear layers: 1.7 million."""
    hidden = nn.Linear(72 * width, 8 * width)
    head = [nn.AdaptiveAvgPool2d(3), nn.Flatten(), hidden, nn.ReLU()]
    head.append(nn.Linear(8 * width, classes))
    return vgg(((width, 1), (2 * width, 1), (4 * width, 2), (8 * width, 2)), head)


def small_resnet(classes, width=32):
    """ResNet-18 of half the width with a stem for small pictures: 2.8 million."""
    return resnet18(classes, width, stem=conv(3, width, 3, 2))


NETWORKS = {
    "vgg": small_vgg,
    "resnet": small_resnet,
    "lite0": functools.partial(lites.pretrained, "lite0"),
    # Below eight channels in channels-last, convolutions of torch 2.13 write past their memory.
    "small_vgg": functools.partial(small_vgg, width=8),
    "small_resnet": functools.partial(small_resnet, width=8),
}


def judged_epochs(recipe, seed):
    """Epochs whose accuracy is measured: some of the first seed's, and what is compared later."""
    last = recipe.epochs - 1
    some = range(last % 4, recipe.epochs, 4) if seed == 0 else ()
    return sorted({*some, recipe.epochs // 2, last})


def make_network(recipe, classes):
    """A new network as the recipe has it."""
    return NETWORKS[recipe.network](classes).to(memory_format=torch.channels_last)


def load(lab, recipe):
    """The pictures of a recipe, those to train on in a shuffled order."""
    root = pathlib.Path(lab.classify(lab.task(0).name))
    generator = np.random.default_rng(0)
    train, test = [], []
    for folder in sorted((root / "train").iterdir()):
        files = files_of(folder)
        generator.shuffle(files)
        test += files_of(root / "val" / folder.name) + files[TRAIN_PER_CLASS:]
        train += files[:TRAIN_PER_CLASS]
    generator.shuffle(train)
    # Only then parts of them, so that these are of all classes.
    train, test = train[: recipe.images], test[:: recipe.test_every]
    return Data(*pictures(train, recipe.size), *pictures(test, recipe.size))


def normalized(batch):
    """Pixels as -1 to 1, as EfficientNet-Lite has them."""
    return floats(batch, 127.0, 128.0).to(memory_format=torch.channels_last)


def accuracy(model, data):
    """The share of the test set that is classified correctly."""
    return float(recognized(model, data).mean())


def recognized(model, data):
    """Whether each test picture is recognized, (N,) bool."""
    model.eval()
    parts = zip(data.test.split(110), data.test_labels.split(110), strict=True)
    return hits(model, ((normalized(part), labels) for part, labels in parts)).numpy()


def learning_rate(recipe, epoch):
    """Of an epoch, by a cosine from the first to a tenth."""
    done = epoch / max(recipe.epochs - 1, 1)
    share = FINAL_LR + (1 - FINAL_LR) * (1 + math.cos(math.pi * done)) / 2
    return recipe.lr * share


def make_optimizer(recipe, model):
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=0.05)
    return torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=0.9, weight_decay=1e-4)


def train_epoch(recipe, seed, epoch, model, optimizer, data):
    """One epoch, decided by the seed, its number and the state; returns the mean loss."""
    torch.manual_seed(1000 * seed + epoch)
    model.train()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(recipe, epoch)
    order = torch.randperm(len(data.train))
    parts = order[: len(order) // BATCH * BATCH].split(BATCH)
    batches = (
        (_augmented(normalized(data.train[part])), data.train_labels[part]) for part in parts
    )
    return statistics.fmean(fit(model, optimizer, batches))


def _augmented(batch):
    """Each picture is mirrored or not; the batch is moved by up to an eighth."""
    mirrored = torch.rand(len(batch)) < 0.5
    batch[mirrored] = batch[mirrored].flip(3)
    reach = batch.shape[2] // 8
    down = int(torch.randint(-reach, reach + 1, ()))
    right = int(torch.randint(-reach, reach + 1, ()))
    return torch.roll(batch, (down, right), (2, 3)).contiguous(memory_format=torch.channels_last)


def start(recipe, seed, data):
    """The network and optimizer before the first epoch."""
    torch.manual_seed(seed)
    model = make_network(recipe, data.classes)
    return model, make_optimizer(recipe, model)


def resume(recipe, seed, epoch, state, data):
    """Train the epoch after a state; returns the mean loss and the network."""
    model, optimizer = start(recipe, seed, data)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    loss = train_epoch(recipe, seed, epoch + 1, model, optimizer, data)
    return loss, model


@dataclasses.dataclass
class Trained:
    """A run that is there: its recipe, seed, folder, and a row an epoch."""

    recipe: Recipe
    seed: int
    folder: str
    rows: list

    def state(self, epoch):
        """The state after an epoch."""
        return torch.load(_checkpoint(self.folder, epoch), weights_only=True)

    def weights(self, epoch):
        """The state of the network alone."""
        return self.state(epoch)["model"]


def _checkpoint(folder, epoch):
    return os.path.join(folder, f"epoch-{epoch:02d}.pt")


def trained(lab, recipe, seed, data):
    """One run, whose checkpoints stay, so that it is trained once.

    They are found by all that decides the run: other checkpoints have another folder.
    """
    name = recipe.name.lower().replace(", ", "-")
    decides = dataclasses.replace(recipe, seeds=()), BATCH, TRAIN_PER_CLASS, FINAL_LR
    network, _ = start(recipe, seed, data)
    key = hashlib.sha256(f"{decides} {network} {data.classes}".encode()).hexdigest()[:8]
    folder = os.path.join(lab.cache, "networks", f"{name}-{seed}-{key}")
    path = os.path.join(folder, "epochs.json")
    if not os.path.exists(path):
        os.makedirs(folder, exist_ok=True)
        rows = list(_train(recipe, seed, data, folder))
        with open(path, "w") as file:
            json.dump(rows, file)
    with open(path) as file:
        return Trained(recipe, seed, folder, json.load(file))


def _train(recipe, seed, data, folder):
    """A row for each epoch, whose state is saved."""
    model, optimizer = start(recipe, seed, data)
    for epoch in range(recipe.epochs):
        begun = time.process_time()
        loss = train_epoch(recipe, seed, epoch, model, optimizer, data)
        row = {"epoch": epoch, "loss": loss, "cpu_seconds": time.process_time() - begun}
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, _checkpoint(folder, epoch))
        if epoch in judged_epochs(recipe, seed):
            row["accuracy"] = accuracy(model, data)
        print(f"{recipe.name}, seed {seed}: {row}", flush=True)
        yield row
