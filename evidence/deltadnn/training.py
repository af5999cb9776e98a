"""The training runs behind the Delta-DNN tables: three families of networks, all their epochs kept
with the optimizer's state, outside of the repository.

The generator of an epoch is seeded by the run's seed and the epoch, so that an epoch can be trained
again from its beginning: exactly, or from a restored state.
"""

import dataclasses
import json
import math
import os
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from training.models import Head, Residual, conv

import pcrshard

from .. import lites

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


def vgg(classes, width=32):
    """Six convolutions with BatchNorm in four stages, and two linear layers: 1.7 million."""
    layers = []
    inputs = 3
    for outputs, count in ((width, 1), (2 * width, 1), (4 * width, 2), (8 * width, 2)):
        for _ in range(count):
            layers.append(conv(inputs, outputs))
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    pooled = nn.AdaptiveAvgPool2d(3)
    hidden = nn.Linear(9 * inputs, 8 * width)
    return nn.Sequential(
        *layers, pooled, nn.Flatten(), hidden, nn.ReLU(), nn.Linear(8 * width, classes)
    )


def resnet(classes, width=32):
    """ResNet-18 of half the width with a stem for small pictures: 2.8 million."""
    layers = [conv(3, width, 3, 2)]
    inputs = width
    for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        layers += [Residual(inputs, outputs, stride), Residual(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, Head(inputs, classes))


NETWORKS = {
    "vgg": vgg,
    "resnet": resnet,
    "lite0": lambda classes: lites.pretrained("lite0", classes),
    "small_vgg": lambda classes: vgg(classes, 6),
    "small_resnet": lambda classes: resnet(classes, 4),
}


def recipes(lab):
    return QUICK_RECIPES if lab.quick else RECIPES


def judged_epochs(recipe, seed):
    """Epochs whose accuracy is measured: some of the first seed's, and what is compared later."""
    last = recipe.epochs - 1
    some = range(last % 4, recipe.epochs, 4) if seed == 0 else ()
    return sorted({*some, recipe.epochs // 2, last})


def make_network(recipe, classes):
    """A new network as the recipe has it."""
    return NETWORKS[recipe.network](classes).to(memory_format=torch.channels_last)


@dataclasses.dataclass
class Pictures:
    """Pictures (N, 3, size, size) uint8 and labels of both splits."""

    train: torch.Tensor
    train_labels: torch.Tensor
    test: torch.Tensor
    test_labels: torch.Tensor

    @property
    def classes(self):
        return int(self.train_labels.max()) + 1


def pictures(lab, recipe):
    """The pictures of a recipe, decoded once and kept."""
    path = os.path.join(os.path.join(lab.cache, "networks"), f"pictures-{recipe.size}.npz")
    if not os.path.exists(path):
        os.makedirs(os.path.join(lab.cache, "networks"), exist_ok=True)
        arrays = _decoded(lab, recipe.size)
        np.savez(path + ".part.npz", **arrays)
        os.replace(path + ".part.npz", path)
    with np.load(path) as file:
        tensors = {name: torch.from_numpy(file[name]) for name in file.files}
    found = Pictures(**tensors)
    # The training pictures are in a shuffled order.
    found.train = found.train[: recipe.images]
    found.train_labels = found.train_labels[: recipe.images]
    found.test = found.test[:: recipe.test_every]
    found.test_labels = found.test_labels[:: recipe.test_every]
    return found


def _decoded(lab, size):
    folder = lab.classify(lab.task(0).name)
    generator = np.random.default_rng(0)
    train = []
    test = []
    for label, name in enumerate(sorted(os.listdir(os.path.join(folder, "train")))):
        files = _files(os.path.join(folder, "train", name))
        generator.shuffle(files)
        test += [(path, label) for path in _files(os.path.join(folder, "val", name))]
        test += [(path, label) for path in files[TRAIN_PER_CLASS:]]
        train += [(path, label) for path in files[:TRAIN_PER_CLASS]]
    generator.shuffle(train)
    arrays = {}
    for split, found in (("train", train), ("test", test)):
        arrays[split] = np.stack([_picture(path, size) for path, _ in found])
        arrays[f"{split}_labels"] = np.array([int(label) for _, label in found])
    return arrays


def _files(folder):
    return sorted(os.path.join(folder, name) for name in os.listdir(folder))


def _picture(path, size):
    with open(path, "rb") as file:
        return np.array(pcrshard.decode_image(file.read(), size=size, layout="chw"))


def normalized(batch):
    """Pixels as -1 to 1, as EfficientNet-Lite has them."""
    scaled = (batch.float() - 127.0) / 128.0
    return scaled.to(memory_format=torch.channels_last)


def accuracy(model, data):
    """The share of the test set that is recognized."""
    return float(recognized(model, data).mean())


def recognized(model, data):
    """Whether each test picture is recognized, (N,) bool."""
    model.eval()
    right = []
    with torch.inference_mode():
        for start in range(0, len(data.test), 110):
            scores = model(normalized(data.test[start : start + 110]))
            right.append(scores.argmax(1) == data.test_labels[start : start + 110])
    return torch.cat(right).numpy()


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
    total = 0.0
    steps = len(order) // BATCH
    for number in range(steps):
        chosen = order[number * BATCH : (number + 1) * BATCH]
        batch = _augmented(normalized(data.train[chosen]))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(batch), data.train_labels[chosen])
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / steps


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
    """One run, trained from where it stopped."""
    name = recipe.name.lower().replace(", ", "-")
    folder = os.path.join(lab.cache, "networks", f"{name}-{seed}")
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "epochs.jsonl")
    rows = []
    if os.path.exists(path):
        with open(path) as file:
            rows = [json.loads(line) for line in file]
    model, optimizer = start(recipe, seed, data)
    if rows:
        state = torch.load(_checkpoint(folder, len(rows) - 1), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for epoch in range(len(rows), recipe.epochs):
        begun = time.process_time()
        loss = train_epoch(recipe, seed, epoch, model, optimizer, data)
        seconds = time.process_time() - begun
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, _checkpoint(folder, epoch))
        row = {"epoch": epoch, "loss": loss, "cpu_seconds": seconds}
        if epoch in judged_epochs(recipe, seed):
            row["accuracy"] = accuracy(model, data)
        rows.append(row)
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{recipe.name}, seed {seed}: {row}", flush=True)
    return Trained(recipe, seed, folder, rows)
