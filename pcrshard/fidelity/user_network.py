"""A classifier of the user's own, and what it sees in images at each scan."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MissingDependency, PCRError
from ..jpeg.image_decoder import ImageDecoder
from ..jpeg.pixels import SMOOTHING, Jpeg


@dataclass(frozen=True)
class Network:
    """A classifier that is asked about JPEGs.

    Attributes:
        function: From float32 (N, 3, size, size), values 0 to 1, to logits (N, classes), in the
            order of the dataset's classes; normalize in it. An ``nn.Module`` is asked in evaluation
            mode, on the device that its parameters are on.
        size: Side of the images in pixels: the middle square of 0.875 of the shorter side, resized.
    """

    function: Callable[[Tensor], Any]
    size: int = 224

    def classify(self, jpegs: Sequence[Jpeg], smoothing: bool = SMOOTHING) -> list[int]:
        """The class of each image.

        Args:
            jpegs: JPEGs, or the pieces of each.
            smoothing: As for :class:`pcrshard.ImageDecoder`.

        Raises:
            PCRError: The function did not give logits of shape (N, classes).
            CorruptJpeg: An image cannot be decoded.
        """
        pixels = self._pixels(jpegs, smoothing)
        if isinstance(self.function, nn.Module):
            self.function.eval()
        with torch.inference_mode():
            logits = self.function(pixels.to(self._device()).float() / 255)
        if not isinstance(logits, Tensor):
            raise PCRError(f"expected logits from the model, got {type(logits).__name__}")
        if logits.ndim != 2 or len(logits) != len(jpegs):
            shape = tuple(logits.shape)
            raise PCRError(f"expected logits ({len(jpegs)}, classes) from the model, got {shape}")
        return logits.argmax(dim=1).tolist()

    def _pixels(self, jpegs: Sequence[Jpeg], smoothing: bool) -> Tensor:
        """The middle of each image, (N, 3, size, size) uint8."""
        pixels = torch.empty(len(jpegs), 3, self.size, self.size, dtype=torch.uint8)
        decoder = ImageDecoder(self.size, "center", smoothing=smoothing)
        for jpeg, row in zip(jpegs, pixels.numpy(), strict=True):
            decoder(jpeg, out=row)
        return pixels

    def _device(self) -> torch.device:
        """Where the network's parameters are."""
        parameters = self.function.parameters() if isinstance(self.function, nn.Module) else ()
        return next((parameter.device for parameter in parameters), torch.device("cpu"))


def load_network(name: str, size: int = 224) -> Network:
    """Call ``package.module:function``, which gives an ``nn.Module`` or another callable.

    Modules are looked for in the working directory, too.

    Args:
        name: The function, which takes no arguments.
        size: Side of the images that the network takes.

    Raises:
        PCRError: The name is none, or what the function gives cannot be called.
        MissingDependency: The module cannot be imported.
    """
    module_name, _, function_name = name.partition(":")
    if not (module_name and function_name):
        raise PCRError(f"expected package.module:function, got {name!r}")
    make = getattr(_import(module_name), function_name, None)
    if not callable(make):
        raise PCRError(f"module {module_name!r} has no function {function_name!r}")
    network = make()
    if not callable(network):
        got = type(network).__name__
        raise PCRError(f"expected a network from {name}, which can be called, got {got}")
    return Network(network, size)


def _import(name: str) -> ModuleType:
    """A module, perhaps of the working directory."""
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependency(f"cannot import {name!r}: {error}") from error
