"""Full trainings with and without compressed activations: the same seed, order and crops, so that
runs can be compared in pairs. Each is a line of runs.jsonl, and is made once.
"""

import dataclasses
import math
import pathlib
import statistics
import time

import torch
from torch.nn import functional
from training.models import Head, Residual, ResNet, conv

from pcrshard import compress_activations
from pcrshard.activation import ActivationOptions, GradientNoise

from ..learning import Data, files_of, fit, floats, pictures, vgg

BATCH = 32
RATE = 0.1
# Epochs at the end whose accuracies are averaged: the rate is near 0 there, before that they swing.
LAST = 2
PRINTED = "adaptive, as printed"
# Added when 0.1 had been seen to cost a network 0.3 points, and 0.05 to compress it too little.
BETWEEN = "0.08 std, images too"


class PrintedNoise(GradientNoise):
    """The paper's Eq. 6, 7 and 9 as they are printed: a * mean(|L|) * sqrt(N R), a = 0.32."""

    def noise_per_bound(self, profile):
        count = profile.batch_size * profile.nonzero_fraction
        return 0.32 * profile.mean_absolute * math.sqrt(count)


ARMS = {
    "plain": None,
    "0.05 std": {"bound": 0.05},
    "0.1 std": {"bound": 0.1},
    "0.2 std": {"bound": 0.2},
    BETWEEN: {"bound": 0.08, "options": ActivationOptions(inputs=True)},
    "0.1 std, images too": {"bound": 0.1, "options": ActivationOptions(inputs=True)},
    "0.1 std, stochastic": {"bound": 0.1, "options": ActivationOptions(rounding="stochastic")},
    "adaptive": {"bound": GradientNoise(0.01, every=50)},
    PRINTED: {"bound": PrintedNoise(0.01, every=50)},
}
# What is compared with the most seeds.
FIRST = ("plain", "0.1 std, images too", "0.05 std")
OTHERS = ("0.2 std", "adaptive", "0.1 std", "0.1 std, stochastic")


@dataclasses.dataclass(frozen=True)
class Spec:
    """What decides a run."""

    network: str
    arm: str
    seed: int
    epochs: int
    size: int


def resnet10(classes):
    """A stage for each of four widths, with one basic block."""
    return ResNet(Residual, (1, 1, 1, 1), classes, 16, stem=conv(3, 16, 3, 2))


def vgg8(classes):
    """Seven convolutions with batch normalization, max-pooling between them."""
    return vgg(((16, 1), (32, 2), (64, 2), (128, 2)), Head(128, classes))


NETWORKS = {"resnet10": resnet10, "vgg8": vgg8}


def load(lab, side):
    """The hand signs, by hundreds of file numbers: odd ones to train on, even ones to test on.

    A hundred is about ten pupils; the test set is half of all, so that tenths of a point count.
    """
    parts = ([], [])
    for path in files_of(pathlib.Path(lab.classify(lab.tasks[0].name if lab.quick else "signs"))):
        number = int("".join(filter(str.isdigit, path.stem)) or 0)
        odd = number % 4 < 2 if lab.quick else number // 100 % 2
        parts[0 if odd else 1].append(path)
    return Data(*pictures(parts[0], side), *pictures(parts[1], side))


def crops(images, size, generator):
    """A crop of each picture, at random."""
    room = images.shape[1] - size + 1
    corners = torch.randint(0, room, (len(images), 2), generator=generator).tolist()
    cut = [
        image[top : top + size, left : left + size]
        for image, (top, left) in zip(images, corners, strict=True)
    ]
    return floats(torch.stack(cut))


@torch.no_grad()
def evaluate(model, data, size):
    """Accuracy and loss on the middle of each test picture."""
    model.eval()
    edge = (data.test.shape[1] - size) // 2
    right = 0
    loss = 0.0
    for part, labels in zip(data.test.split(BATCH), data.test_labels.split(BATCH), strict=True):
        logits = model(floats(part[:, edge : edge + size, edge : edge + size]))
        right += int((logits.argmax(1) == labels).sum())
        loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
    model.train()
    return right / len(data.test), loss / len(data.test)


def batches(data, size, generator):
    """An epoch of crops in a random order, without a short batch at the end."""
    order = torch.randperm(len(data.train), generator=generator)
    for chosen in order[: len(order) // BATCH * BATCH].split(BATCH):
        yield crops(data.train[chosen], size, generator), data.train_labels[chosen]


def sgd(model):
    """The optimizer of the convolutional networks."""
    return torch.optim.SGD(model.parameters(), RATE, momentum=0.9, nesterov=True, weight_decay=5e-4)


def train(spec, data):
    """Train with SGD on a one-cycle learning rate; return the results per epoch."""
    torch.manual_seed(spec.seed)
    model = NETWORKS[spec.network](data.classes)
    saver = compress_activations(model, **ARMS[spec.arm] or {"codec": "none"})
    optimizer = sgd(model)
    steps = len(data.train) // BATCH * spec.epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps)
    generator = torch.Generator().manual_seed(spec.seed)
    rows = []
    begun = time.process_time()
    for _ in range(spec.epochs):
        order = batches(data, spec.size, generator)
        loss = statistics.fmean(fit(model, optimizer, order, schedule=schedule, saver=saver))
        rows.append([loss, *evaluate(model, data, spec.size)])
    report = saver.report()
    _, accuracy, test_loss = zip(*rows[-LAST:], strict=True)
    return {
        "spec": dataclasses.asdict(spec),
        "columns": ["loss", "accuracy", "test loss"],
        "rows": rows,
        "accuracy": statistics.fmean(accuracy),
        "test_loss": statistics.fmean(test_loss),
        "ratio": report.ratio,
        "ratio_of_conv_inputs": report.ratio_of_conv_inputs,
        "cpu_seconds": time.process_time() - begun,
        "train": len(data.train),
        "test": len(data.test),
    }


# (network, epochs, size, seeds, arms); the arms of a seed are next to each other, so that a stop
# leaves pairs. Three or four seeds left it open whether the gaps are chance: hence twelve.
PLAN = (
    ("resnet10", 12, 48, 12, (*FIRST, BETWEEN)),
    ("vgg8", 12, 32, 3, FIRST),
    ("resnet10", 12, 48, 3, OTHERS),
    ("resnet10", 12, 48, 2, (PRINTED,)),
)
QUICK_PLAN = (("resnet10", 2, 32, 2, FIRST),)


def specs(lab):
    """All runs."""
    return [
        Spec(network, arm, seed, epochs, size)
        for network, epochs, size, seeds, arms in (QUICK_PLAN if lab.quick else PLAN)
        for seed in range(seeds)
        for arm in arms
    ]


def train_all(lab):
    """The runs that are missing, one after another."""
    torch.set_num_threads(1)
    data = {}
    for key in lab.missing({"spec": dataclasses.asdict(spec)} for spec in specs(lab)):
        spec = Spec(**key["spec"])
        if spec.size not in data:
            data[spec.size] = load(lab, spec.size * 9 // 8)
        lab.append(train(spec, data[spec.size]))
