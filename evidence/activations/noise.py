"""The standard deviation of errors of gradients, predicted and measured, for every convolution
(Fig. 8).
"""

import torch
from torch.nn import functional

from pcrshard import compress_activations
from pcrshard.activation import ActivationOptions, gradient_noise

from .ratios import NETWORKS, photographs, settle

SHARE = 0.1


def _layers(model, images, rounding):
    labels = torch.arange(len(images)) % 10
    options = ActivationOptions(min_bytes=0, rounding=rounding)
    saver = compress_activations(model, SHARE, "int8", options)
    layers = gradient_noise(saver, model, lambda: functional.cross_entropy(model(images), labels))
    return {
        layer.name: {"predicted": layer.predicted_sigma, "measured": layer.measured_sigma}
        for layer in layers
    }


def measure(lab):
    """All networks, with initial weights, and settled with both roundings."""
    networks = {}
    for name in ("ResNet-18",) if lab.quick else NETWORKS:
        make, batch, *_ = NETWORKS[name]
        images = photographs(lab, 2 if lab.quick else batch)
        torch.manual_seed(0)
        cases = {
            "initial weights": (make(), "nearest"),
            "settled": (settle(lab, name), "nearest"),
            "settled, stochastic": (settle(lab, name), "stochastic"),
        }
        networks[name] = {
            case: _layers(model, images, rounding) for case, (model, rounding) in cases.items()
        }
    return {"share": SHARE, "networks": networks}
