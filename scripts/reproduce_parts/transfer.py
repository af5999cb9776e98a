"""``reproduce.py transfer``: what a network of ImageNet is worth for other tasks at each scan; the
page is docs/evidence/transfer.md.

EfficientNet-Lite0 at 224 pixels stays as it is, and a linear classifier is trained on what it
gives, at one scan or at several: what its last layer would learn first. Features are kept, so that
a run that was stopped goes on.
"""

import itertools
import os
import pathlib

import numpy as np
import torch
from torch import nn

import pcrshard
from pcrshard.format.scan import FULL

from . import lites, transfer_page
from .lab import SCANS, write
from .report import wrap_prose

NAME = "transfer"
SIZE = 224
SMOOTHED = (1, 2)
ADAPTED = (1, 2, FULL)
MIXED = "mixed"
BATCH = 32
# Weight of the penalty; chosen for none of the scans.
DECAY = 1e-3


class Features(nn.Module):
    """The network without its last layer."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images):
        found = self.network.extract_features(images)
        return found.mean((2, 3))


def kinds(lab):
    """(scan, how) of all features: plain, smoothed, or with statistics adapted to the scan."""
    if lab.quick:
        adapted = [(1, "adapted"), (FULL, "adapted")]
        return [(1, "plain"), (1, "smoothed"), *adapted, (FULL, "plain")]
    plain = [(scan, "plain") for scan in SCANS]
    smoothed = [(scan, "smoothed") for scan in SMOOTHED]
    return plain + smoothed + [(scan, "adapted") for scan in ADAPTED]


def _pictures(lab, task, split, scan, smoothing):
    """(images, labels) of a split, a batch at a time, in the dataset's order."""
    size = 64 if lab.quick else SIZE
    decoder = pcrshard.ImageDecoder(size, "center", smoothing=smoothing)
    url = lab.dataset(task.name, split)
    found = pcrshard.PCRDataset(url, scan=scan, decoder=decoder, fields=("jpg", "cls"))
    yield from pcrshard.PCRLoader(found, BATCH, shuffle=False, drop_last=False, threads=0)


def adapt(network, batches):
    """Batch normalisation's statistics, anew from pictures: their mean over all batches."""
    for module in network.eval().modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None
            module.train()
    with torch.no_grad():
        for images, _ in batches:
            network(lites.scaled(images, torch.float32))
    return network


def features(lab, task, split, kind):
    """(features, labels) of a split; computed once."""
    scan, how = kind
    name = f"{task.name}-{split}-{scan}-{how}.npz"
    path = os.path.join(lab.cache, "features", name)
    if not os.path.exists(path):
        if lab.existing:
            return None
        network = Features(lites.pretrained("lite0"))
        if how == "adapted":
            network = adapt(network, _pictures(lab, task, "train", scan, False))
        look = lites.Classifier(network, fused=not lab.quick)
        pairs = [
            (look(images).numpy(), labels.numpy())
            for images, labels in _pictures(lab, task, split, scan, how == "smoothed")
        ]
        os.makedirs(os.path.dirname(path), exist_ok=True)
        found, labels = (np.concatenate(part) for part in zip(*pairs, strict=True))
        np.savez(f"{path}.new.npz", found=found, labels=labels)
        os.replace(f"{path}.new.npz", path)
        print(f"{name}: {len(labels)} pictures", flush=True)
    with np.load(path) as kept:
        return torch.as_tensor(kept["found"]), torch.as_tensor(kept["labels"])


def fit(train, labels, classes):
    """A linear classifier of standardised features, by LBFGS: a function of features."""
    mean = train.mean(0)
    scale = train.std(0) + 1e-3
    layer = nn.Linear(train.shape[1], classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimiser = torch.optim.LBFGS(layer.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def loss():
        optimiser.zero_grad()
        error = nn.functional.cross_entropy(layer((train - mean) / scale), labels)
        found = error + DECAY * layer.weight.square().sum()
        found.backward()
        return found

    optimiser.step(loss)
    return lambda found: layer((found - mean) / scale).detach()


def _marks(classify, found):
    pictures, labels = found
    right = classify(pictures).argmax(1) == labels
    return "".join("1" if each else "0" for each in right)


def measure_task(lab, task):
    """Marks of the validation pictures for each pair of (trained on, tested on); ``None`` if
    features are missing.
    """
    sets = {}
    for kind, split in itertools.product(kinds(lab), ("train", "val")):
        found = features(lab, task, split, kind)
        if found is not None:
            sets[kind, split] = found
    full = (FULL, "plain")
    if (full, "val") not in sets:
        return None
    classes = int(sets[full, "train"][1].max()) + 1
    known = [kind for kind in kinds(lab) if (kind, "val") in sets]
    plain = [kind for kind in known if kind[1] == "plain"]
    adapted = [kind for kind in known if kind[1] == "adapted"]
    more = {full: known, (FULL, "adapted"): adapted}
    rows = {}
    for kind in known:
        classify = fit(*sets[kind, "train"], classes)
        for tested in dict.fromkeys((kind, full, *more.get(kind, ()))):
            rows[f"{_name(kind)} > {_name(tested)}"] = _marks(classify, sets[tested, "val"])
    together = [
        torch.cat(part) for part in zip(*(sets[kind, "train"] for kind in plain), strict=True)
    ]
    classify = fit(*together, classes)
    for tested in plain:
        rows[f"{MIXED} > {_name(tested)}"] = _marks(classify, sets[tested, "val"])
    index = lab.index(task.name, "train")
    sizes = {str(kind[0]): index.prefix_bytes(kind[0]) / index.num_samples for kind in plain}
    return {"marks": rows, "bytes": sizes, "images": len(sets[full, "train"][1])}


def _name(kind):
    scan, how = kind
    return f"{scan}" if how == "plain" else f"{scan} {how}"


def _count(lab, task):
    return sum(len(names) for _, _, names in os.walk(lab.classify(task.name)))


def reproduce(lab):
    """What is missing is computed, the smallest task first; figure and page are made anew."""
    report = None if lab.fresh else lab.load(NAME)
    results = report["results"] if report else {}
    for task in sorted(lab.tasks, key=lambda task: _count(lab, task)):
        if lab.existing or transfer_page.ADAPTED in results.get(task.name, {}).get("marks", {}):
            continue
        found = measure_task(lab, task)
        if found is not None:
            results[task.name] = found
            lab.save(NAME, results)
    if results:
        transfer_page.draw(results, lab.figure(NAME))
        page = transfer_page.text(results)
        write(str(pathlib.Path(lab.out, f"{NAME}.md")), wrap_prose(page))
