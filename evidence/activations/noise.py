"""Errors of activations (Fig. 3) and of gradients (Figs. 6 and 8): how they are distributed, and
their standard deviation as predicted and as measured, for every convolution.
"""

import math

import torch
from torch.nn import functional

from pcrshard import compress_activations
from pcrshard.activation import ActivationOptions
from pcrshard.activation.noise import convolutions
from pcrshard.activation.quantizer import lattice_for, quantize, restore

from .ratios import NETWORKS, photographs, settle

SHARE = 0.1
BINS = 41
# Layers whose errors are drawn, one a network, and their edge in standard deviations.
DRAWN = {
    "AlexNet": "6",
    "VGG-16": "14",
    "ResNet-18": "blocks.3.body.1.0",
    "ResNet-50": "blocks.5.body.1.0",
}
EDGE = 4.0
# What a core can carry.
BATCHES = {"AlexNet": 8, "VGG-16": 2, "ResNet-18": 8, "ResNet-50": 4}


def _histogram(values, edge):
    """Shares of values in BINS bins from -edge to edge."""
    counts = torch.histc(values.double(), BINS, -edge, edge)
    return (counts / values.numel()).tolist()


def _gradients(saver, weights, positions, forward):
    """Gradients of the weights where the tensors at some positions are compressed."""
    torch.manual_seed(2)  # dropout's masks are the same in both passes
    with saver.trial(positions):
        loss = forward()
    return torch.autograd.grad(loss, list(weights.values()), allow_unused=True)


def gradient_errors(model, images, rounding):
    """For each convolution: predicted sigma, and the errors."""
    labels = torch.arange(len(images)) % 10
    options = ActivationOptions(min_bytes=0, rounding=rounding)
    saver = compress_activations(model, SHARE, "int8", options)
    weights = {name: module.weight for name, module in convolutions(model).items()}

    def forward():
        return functional.cross_entropy(model(images), labels)

    exact = _gradients(saver, weights, set(), forward)
    positions = {ordinal for ordinal, row in enumerate(saver.report().rows) if row.read_by}
    inexact = _gradients(saver, weights, positions, forward)
    predicted = {layer.name: layer.predicted_sigma for layer in saver.report().layers}
    found = {}
    for name, before, after in zip(weights, exact, inexact, strict=True):
        if predicted.get(name, 0) > 0:
            found[name] = (predicted[name], (after - before).flatten(1))
    return found


def _by_channel(errors):
    """Errors over the standard deviation of their output channel; without channels that are dead.

    The noise of a channel follows the gradient of its output, so that a whole layer is a mixture.
    """
    sigma = errors.double().square().mean(1, keepdim=True).sqrt()
    alive = sigma.flatten() > 0
    return (errors / sigma)[alive].flatten()


def _layers(found):
    layers = {}
    for layer, (predicted, errors) in found.items():
        sigma = float(errors.double().square().mean().sqrt())
        layers[layer] = {
            "predicted": predicted,
            "measured": sigma,
            "within_one_sigma": float((errors.abs() < predicted).double().mean()),
        }
    return layers


def measure_network(lab, name):
    """One network's convolutions: with initial weights, and settled with both roundings."""
    images = photographs(lab, 2 if lab.quick else BATCHES[name])
    torch.manual_seed(0)
    cases = {
        "initial weights": (NETWORKS[name][0](), "nearest"),
        "settled": (settle(lab, name), "nearest"),
        "settled, stochastic": (settle(lab, name), "stochastic"),
    }
    found = {case: gradient_errors(model, images, rounding)
             for case, (model, rounding) in cases.items()}  # fmt: skip
    drawn = DRAWN[name]
    _, errors = found["settled, stochastic"][drawn]
    histogram = _histogram(_by_channel(errors), EDGE)
    layers = {case: _layers(rows) for case, rows in found.items()}
    return {"layers": layers, "drawn": drawn, "histogram": histogram}


def measure_errors(lab):
    """Errors of one convolution's input, over the bound, where it is zero and where it is not."""
    model = settle(lab, "ResNet-18")
    kept = []
    handle = (
        model.blocks[1]
        .body[1][0]
        .register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0].detach()))
    )
    with torch.no_grad():
        model(photographs(lab, 2 if lab.quick else 8))
    handle.remove()
    values = kept[0].flatten()
    bound = SHARE * float(values.std())
    lattice = lattice_for(bound, values.dtype)
    errors = restore(quantize(values[None], lattice), lattice) - values
    zero = values == 0
    over = (errors / bound)[~zero]
    return {
        "elements": values.numel(),
        "zeros": float(zero.double().mean()),
        "largest_at_zeros": float(errors[zero].abs().max()) if bool(zero.any()) else 0.0,
        "largest": float(over.abs().max()),
        "deviation": float(over.double().std()),
        "uniform": 1 / math.sqrt(3),
        "histogram": _histogram(over, 1.0),
    }


def measure(lab):
    """All of it, at SHARE of the standard deviation."""
    names = ("ResNet-18",) if lab.quick else NETWORKS
    networks = {name: measure_network(lab, name) for name in names}
    return {"share": SHARE, "errors": measure_errors(lab), "networks": networks}
