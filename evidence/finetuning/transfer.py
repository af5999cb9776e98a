"""What a network of ImageNet is worth for other tasks at each scan.

EfficientNet-Lite0 at 224 pixels stays as it is, and a linear classifier is trained on what it
gives, at one scan or at several: what its last layer would learn first. Features are kept, so that
a run that was stopped goes on.
"""

import os

import numpy as np
import torch
from torch import nn

from pcrshard.format.scan import FULL

from .. import lites
from ..lab import SCANS
from . import tails

# Weight of the penalty; chosen for none of the scans.
DECAY = 1e-3


class Features(nn.Module):
    """The network without its last layer."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images):
        return self.network.extract_features(images).mean((2, 3))


def _kinds(lab):
    """All features: at a scan, smoothed, or with statistics adapted to the scan."""
    if lab.quick:
        return ["1", "1 smoothed", "1 adapted", "full adapted", "full"]
    adapted = [f"{scan} adapted" for scan in (1, 2, FULL)]
    return [*map(str, SCANS), "1 smoothed", "2 smoothed", *adapted]


def _pictures(lab, task, split, kind):
    """(images, labels) of a split, a batch at a time, in the dataset's order."""
    side = 64 if lab.quick else tails.SIZE
    scan = kind.split()[0]
    scan = scan if scan == FULL else int(scan)
    smoothing = kind.endswith("smoothed")
    url = lab.dataset(task.name, split)
    return tails.loader(url, scan, side, "val", smoothing=smoothing, shuffle=False, threads=0)


def _adapt(network, batches):
    """Recompute batch normalization statistics as their mean over all batches."""
    for module in network.eval().modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None
            module.train()
    with torch.no_grad():
        for images, _ in batches:
            network(lites.scaled(images, torch.float32))
    return network


def _features(lab, task, split, kind):
    """(features, labels) of a split; computed once."""
    name = f"{task.name}-{split}-{kind.replace(' ', '-')}.npz"
    path = os.path.join(lab.cache, "features", name)
    if not os.path.exists(path):
        network = Features(lites.pretrained("lite0"))
        if kind.endswith("adapted"):
            network = _adapt(network, _pictures(lab, task, "train", kind))
        look = lites.Classifier(network, fused=not lab.quick)
        batches = _pictures(lab, task, split, kind)
        pairs = [(look(images).numpy(), labels.numpy()) for images, labels in batches]
        os.makedirs(os.path.dirname(path), exist_ok=True)
        found, labels = (np.concatenate(part) for part in zip(*pairs, strict=True))
        np.savez(f"{path}.new.npz", found=found, labels=labels)
        os.replace(f"{path}.new.npz", path)
        print(f"{name}: {len(labels)} pictures", flush=True)
    with np.load(path) as kept:
        return torch.as_tensor(kept["found"]), torch.as_tensor(kept["labels"])


def _fit(train, labels, classes):
    """A linear classifier of standardized features, by LBFGS: a function of features."""
    mean = train.mean(0)
    scale = train.std(0) + 1e-3
    layer = nn.Linear(train.shape[1], classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        error = nn.functional.cross_entropy(layer((train - mean) / scale), labels)
        found = error + DECAY * layer.weight.square().sum()
        found.backward()
        return found

    optimizer.step(loss)
    return lambda found: layer((found - mean) / scale).detach()


def _measure_task(lab, task):
    """Marks of the validation pictures for each pair of (trained on, tested on)."""
    kinds = _kinds(lab)
    train, val = (
        {kind: _features(lab, task, split, kind) for kind in kinds} for split in ("train", "val")
    )
    classes = int(train[FULL][1].max()) + 1
    plain = [kind for kind in kinds if " " not in kind]
    adapted = [kind for kind in kinds if kind.endswith("adapted")]
    marks = {}

    def mark(trained, features, tested):
        classify = _fit(*features, classes)
        for kind in dict.fromkeys(tested):
            pictures, labels = val[kind]
            right = classify(pictures).argmax(1) == labels
            marks[f"{trained} > {kind}"] = "".join("1" if each else "0" for each in right)

    more = {FULL: kinds, f"{FULL} adapted": adapted}
    for kind in (*plain, *adapted):
        mark(kind, train[kind], (kind, FULL, *more.get(kind, ())))
    together = zip(*(train[kind] for kind in plain), strict=True)
    mark("mixed", [torch.cat(part) for part in together], plain)
    index = lab.index(task.name, "train")
    sizes = {
        kind: index.prefix_bytes(kind if kind == FULL else int(kind)) / index.num_samples
        for kind in plain
    }
    return {"marks": marks, "bytes": sizes, "images": len(train[FULL][1])}


def measure(lab):
    """Tasks that are missing, the smallest first."""
    results = lab.load("transfer") or {}
    for task in sorted(lab.tasks, key=lambda task: lab.index(task.name, "train").num_samples):
        if task.name not in results:
            results[task.name] = _measure_task(lab, task)
            lab.save("transfer", results)
