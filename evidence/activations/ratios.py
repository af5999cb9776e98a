"""Table 1 at full shapes: what AlexNet, VGG-16, ResNet-18 and ResNet-50 save in a forward and
backward pass over photographs at 224x224, and in how many bytes it is kept.

The weights are those after some steps at a reduced size: sparsity is then no longer that of random
weights, and not yet that of a trained network.
"""

import os
import pathlib

import torch
from torch import nn
from torch.nn import functional
from training.models import resnet18, resnet50

from pcrshard import compress_activations
from pcrshard.activation import ActivationOptions

from ..learning import drawn, files_of, fit, floats, pictures
from .models import alexnet, vgg16

# Network: how it is made, the batch that is measured; size, batch and number of the steps before.
NETWORKS = {
    "AlexNet": (alexnet, 8, 224, 8, 40),
    "VGG-16": (vgg16, 2, 64, 8, 30),
    "ResNet-18": (lambda: resnet18(10), 8, 64, 16, 80),
    "ResNet-50": (lambda: resnet50(10), 4, 64, 16, 80),
}
SIZE = 224
# Name of a case, its share of the standard deviation, and other options.
SHARES = (0.05, 0.08, 0.1, 0.2)
KEPT = "0.05 std, images too, each kept"
AGAIN = "0.05 std, images too, recomputed"
CASES = {f"{share} std, images too": (share, {}) for share in SHARES}
CASES |= {KEPT: (0.05, {"derive": False}), AGAIN: (0.05, {"recompute": True})}


def photographs(lab, count, size=SIZE):
    """(count, 3, size, size) floats of the ImageNet photographs, as training code gives them."""
    files = files_of(pathlib.Path(next(iter(lab.photos().values()))))
    chosen = files[:: max(len(files) // count, 1)][:count]
    mean = torch.tensor((0.485, 0.456, 0.406)).view(3, 1, 1) * 255
    deviation = torch.tensor((0.229, 0.224, 0.225)).view(3, 1, 1) * 255
    return floats(pictures(chosen, size)[0], mean, deviation)


def _small(name, model):
    """The network for small images: VGG's classifier wants 7x7, and gets a smaller one."""
    if name != "VGG-16":
        return model
    features = [layer for layer in model if not isinstance(layer, nn.Linear | nn.Dropout)]
    features = features[: features.index(next(x for x in model if isinstance(x, nn.Flatten)))]
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def settle(lab, name):
    """A network after some steps of Adam on the flowers; its weights are kept beside the data."""
    make, _, size, batch, steps = NETWORKS[name]
    torch.manual_seed(0)
    model = make()
    steps = 1 if lab.quick else steps
    path = os.path.join(lab.cache, f"settled-{name}-{size}-{steps}.pt")
    if os.path.exists(path):
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    task = lab.tasks[0].name if lab.quick else "flowers"
    images, labels = pictures(files_of(pathlib.Path(lab.classify(task), "train"))[::5], size)
    small = _small(name, model)
    optimizer = torch.optim.Adam(small.parameters(), 2e-4)
    generator = torch.Generator().manual_seed(0)
    fit(small, optimizer, drawn((floats(images, 118.0, 58.0), labels), batch, steps, generator))
    os.makedirs(lab.cache, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


def _kinds(model, report):
    """Raw and stored bytes by what a tensor is."""
    modules = dict(model.named_modules())
    found = {}
    for row in report.rows:
        module = type(modules.get(row.name)).__name__
        image = row.shape[1:] == (3, SIZE, SIZE)
        kind = "images" if image else "inputs of convolutions" if row.read_by else module
        raw, stored = found.get(kind, (0, 0))
        found[kind] = (raw + row.raw_bytes, stored + row.stored_bytes)
    return found


def _one_pass(model, images, share, others):
    torch.manual_seed(1)  # of dropout
    saver = compress_activations(model, share, "zstd", ActivationOptions(inputs=True, **others))
    labels = torch.arange(len(images)) % 10
    with saver:
        loss = functional.cross_entropy(model(images), labels)
    loss.backward()
    model.zero_grad()
    report = saver.report()
    kinds = _kinds(model, report)
    raw, stored = kinds["images"]
    return {
        "raw_bytes": report.raw_bytes,
        "ratio": report.ratio,
        "ratio_images_kept": report.raw_bytes / (report.stored_bytes - stored + raw),
        "ratio_of_conv_inputs": report.ratio_of_conv_inputs,
        "kinds": kinds,
        "live_bytes_after": saver.ledger.live_bytes,
    }


def measure_network(lab, name):
    """One network's ratios, with initial weights and after the steps."""
    make, batch, _, _, steps = NETWORKS[name]
    images = photographs(lab, 2 if lab.quick else batch)
    torch.manual_seed(0)
    initial = make()
    settled = settle(lab, name)
    cases = {case: _one_pass(settled, images, *how) for case, how in CASES.items()}
    cases["0.1 std, images too, initial weights"] = _one_pass(initial, images, 0.1, {})
    return {"batch": len(images), "steps": steps, "cases": cases}


def measure(lab):
    """All networks."""
    names = ("ResNet-18",) if lab.quick else NETWORKS
    return {"networks": {name: measure_network(lab, name) for name in names}}
