"""A user-supplied classifier, and its predictions at each scan."""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import PCRError
from ..jpeg.image_decoder import ImageDecoder
from ..jpeg.pixels import Jpeg


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

    def classify(self, jpegs: Sequence[Jpeg]) -> list[int]:
        """Return the predicted class of each image.

        Args:
            jpegs: JPEGs, or the pieces of each.

        Raises:
            PCRError: The function failed, or did not return logits of shape (N, classes).
            CorruptJpeg: An image cannot be decoded.
        """
        decoder = ImageDecoder(self.size, "center")
        pixels = torch.from_numpy(np.stack([decoder(jpeg) for jpeg in jpegs]))
        if isinstance(self.function, nn.Module):
            self.function.eval()
            for parameter in self.function.parameters():
                pixels = pixels.to(parameter.device)
                break
        with torch.inference_mode():
            logits = _call(self.function, pixels.float() / 255)
        shape = tuple(getattr(logits, "shape", ()))
        if len(shape) != 2 or shape[0] != len(jpegs):
            raise PCRError(f"expected logits ({len(jpegs)}, classes) from the model, got {shape}")
        classes: list[int] = logits.argmax(dim=1).tolist()
        return classes


def load_network(name: str, size: int = 224) -> Network:
    """Load a network by calling ``package.module:function``.

    The function returns an ``nn.Module`` or another callable. Modules are also searched for in the
    working directory.

    Args:
        name: The function, which takes no arguments.
        size: Side of the network's input images, in pixels.

    Raises:
        PCRError: There is no such function, it failed, or its result is not callable.
    """
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
    try:
        make = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PCRError(f"expected package.module:function, got {name!r}: {error}") from error
    network = _call(make) if callable(make) else None
    if not callable(network):
        raise PCRError(f"expected a function that returns a network, got {name!r}")
    return Network(network, size)


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the user's code, whose errors are named like ours."""
    try:
        return function(*arguments)
    except Exception as error:
        raise PCRError(f"the model failed with {type(error).__name__}: {error}") from error
