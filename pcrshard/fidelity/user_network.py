"""A user-supplied classifier, and its predictions at each scan."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MissingDependency, PCRError
from ..jpeg.image_decoder import ImageDecoder
from ..jpeg.pixels import SMOOTHING, Jpeg


@dataclass(frozen=True)
class Network:
    """A classifier applied to JPEGs.

    Attributes:
        function: Maps float32 (N, 3, size, size) in [0, 1] to logits (N, classes), in the order of
            the dataset's classes, and does its own normalization. An ``nn.Module`` runs in
            evaluation mode, on the device of its parameters.
        size: Side of the input images in pixels: a center crop of 0.875 of the shorter side,
            resized.
    """

    function: Callable[[Tensor], Any]
    size: int = 224

    def classify(self, jpegs: Sequence[Jpeg], smoothing: bool = SMOOTHING) -> list[int]:
        """Return the predicted class of each image.

        Args:
            jpegs: JPEGs, or the pieces of each.
            smoothing: As for :class:`pcrshard.ImageDecoder`.

        Raises:
            PCRError: The function did not return logits of shape (N, classes).
            CorruptJpeg: An image cannot be decoded.
        """
        # The center crop of each image.
        pixels = torch.empty(len(jpegs), 3, self.size, self.size, dtype=torch.uint8)
        decoder = ImageDecoder(self.size, "center", smoothing=smoothing)
        for jpeg, row in zip(jpegs, pixels.numpy(), strict=True):
            decoder(jpeg, out=row)
        if isinstance(self.function, nn.Module):
            self.function.eval()
            for parameter in self.function.parameters():
                pixels = pixels.to(parameter.device)
                break
        with torch.inference_mode():
            logits = self.function(pixels.float() / 255)
        if not isinstance(logits, Tensor):
            raise PCRError(f"expected logits from the model, got {type(logits).__name__}")
        if logits.ndim != 2 or len(logits) != len(jpegs):
            shape = tuple(logits.shape)
            raise PCRError(f"expected logits ({len(jpegs)}, classes) from the model, got {shape}")
        return logits.argmax(dim=1).tolist()


def load_network(name: str, size: int = 224) -> Network:
    """Load a network by calling ``package.module:function``.

    The function returns an ``nn.Module`` or another callable. Modules are also searched for in the
    working directory.

    Args:
        name: The function, which takes no arguments.
        size: Side of the network's input images, in pixels.

    Raises:
        PCRError: The name is invalid, or the function's result is not callable.
        MissingDependency: The module cannot be imported.
    """
    module_name, _, function_name = name.partition(":")
    if not (module_name and function_name):
        raise PCRError(f"expected package.module:function, got {name!r}")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise MissingDependency(f"cannot import {module_name!r}: {error}") from error
    make = getattr(module, function_name, None)
    if not callable(make):
        raise PCRError(f"module {module_name!r} has no function {function_name!r}")
    network = make()
    if not callable(network):
        got = type(network).__name__
        raise PCRError(f"expected a network from {name}, which can be called, got {got}")
    return Network(network, size)
