"""What the trainings of several subjects share: pictures in memory, networks, the loop."""

import contextlib
import dataclasses

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from training.models import conv

import pcrshard


@dataclasses.dataclass
class Data:
    """Pictures (N, side, side, 3) uint8 and labels (N,) of both splits."""

    train: torch.Tensor
    train_labels: torch.Tensor
    test: torch.Tensor
    test_labels: torch.Tensor

    @property
    def classes(self):
        return int(self.train_labels.max()) + 1


def pictures(files, size):
    """Decoded files (N, size, size, 3) uint8; their folders' places among all as labels (N,)."""
    names = sorted({path.parent.name for path in files})
    images = [pcrshard.decode_image(path.read_bytes(), size=size) for path in files]
    labels = [names.index(path.parent.name) for path in files]
    return torch.as_tensor(np.stack(images)), torch.tensor(labels)


def files_of(folder):
    """All files in a folder, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def floats(images, middle=127.5, scale=64.0):
    """(N, 3, H, W) floats of (N, H, W, 3) uint8."""
    return images.permute(0, 3, 1, 2).float().sub_(middle).div_(scale).contiguous()


def vgg(stages, head):
    """Stages of (channels, convolutions) with max-pooling behind each, and a head."""
    layers = []
    inputs = 3
    for outputs, depth in stages:
        for _ in range(depth):
            layers.append(conv(inputs, outputs))
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, *head)


def classify(model, batch):
    """The loss of a batch of (images, labels)."""
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def fit(model, optimizer, batches, *, loss=classify, schedule=None, saver=None, clip=None):
    """Train one step per batch; the loss of each."""
    losses = []
    for batch in batches:
        with saver or contextlib.nullcontext():
            value = loss(model, batch)
        optimizer.zero_grad()
        value.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if saver is not None:
            saver.step(optimizer)
        if schedule is not None:
            schedule.step()
        losses.append(float(value.detach()))
    return losses


def drawn(data, size, count, generator):
    """``count`` batches of random pictures with replacement: (pictures, labels)."""
    images, labels = data
    for _ in range(count):
        chosen = torch.randint(len(images), (size,), generator=generator)
        yield images[chosen], labels[chosen]


@torch.inference_mode()
def hits(model, batches):
    """Whether each picture of some batches is classified correctly: (N,) bool."""
    return torch.cat([model(images).argmax(1) == labels for images, labels in batches])


def share(model, batches):
    """The share of pictures that is classified correctly."""
    return float(hits(model, batches).double().mean())
