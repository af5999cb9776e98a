"""Which module saves which tensor, and what a step tells about each convolution.

A pack hook sees tensors, not operations. So during a traced step the modules are hooked: the
innermost one that runs gives a tensor its name, and a tensor that a convolution saves with the
shape of its input is that input, whatever autocast has made of it. ReLU saves it before the
convolution does, hence positions in the order of saved tensors, which the next steps share.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from .noise_bound import Profile, valid_share

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)


def convolutions(model: nn.Module) -> dict[str, nn.Module]:
    """The convolutions of a model by name."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, _CONVOLUTIONS)
    }


class Trace:
    """Hooks on the modules of a model, until :meth:`close`.

    Attributes:
        profiles: By the name of the convolution. Energies are complete after the backward pass.

    Args:
        model: The model.
        measure: Whether convolutions are profiled, or tensors only named.
    """

    def __init__(self, model: nn.Module, *, measure: bool) -> None:
        self.profiles: dict[str, Profile] = {}
        self._measure = measure
        self._running: list[tuple[str, tuple[int, ...] | None]] = []
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            if next(module.children(), None) is None:
                self._hook(name, module)

    def _hook(self, name: str, module: nn.Module) -> None:
        is_convolution = isinstance(module, _CONVOLUTIONS)

        def before(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            shape = None
            if is_convolution and inputs:
                shape = tuple(inputs[0].shape)
            self._running.append((name, shape))

        def after(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if self._running:
                self._running.pop()
            if is_convolution and inputs and self._measure:
                self._profile(name, module, inputs[0], output)

        self._handles += [
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after),
        ]

    @property
    def name(self) -> str:
        """The module that runs now."""
        return self._running[-1][0] if self._running else ""

    def saves(self, tensor: Tensor, ordinal: int) -> None:
        """Takes notice that a tensor is saved, for the first time or again."""
        if not self._running:
            return
        name, shape = self._running[-1]
        if shape is None or tuple(tensor.shape) != shape:
            return
        ordinals = self._profile_of(name).ordinals
        if ordinal not in ordinals:
            ordinals.append(ordinal)

    def _profile_of(self, name: str) -> Profile:
        return self.profiles.setdefault(name, Profile(0.0, 0.0, 1, 1))

    @torch.no_grad()
    def _profile(self, name: str, module: Any, values: Tensor, output: Tensor) -> None:
        profile = self._profile_of(name)
        nonzero = int(values.count_nonzero())
        profile.nonzero_share = nonzero / max(values.numel(), 1)
        profile.valid_share = share_of_module(module, values, output)
        profile.num_outputs = module.out_channels
        profile.batch_size = values.shape[0]
        profile.energy = 0.0
        if output.requires_grad:
            hook = functools.partial(_add_energy, profile)
            output.register_hook(hook)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Takes the hooks off the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._running.clear()


def _add_energy(profile: Profile, gradient: Tensor) -> None:
    exact = gradient.detach().float()
    profile.energy += float(exact.square().sum())
    profile.mean_absolute = float(exact.abs().mean())


def share_of_module(module: Any, values: Tensor, output: Tensor) -> float:
    """V of a convolution; for a transposed one the share of outputs that each tap reaches."""
    dimensions = len(module.kernel_size)
    inputs = tuple(values.shape[-dimensions:])
    outputs = tuple(output.shape[-dimensions:])
    shape = (module.kernel_size, module.stride, module.dilation)
    padding: Any = module.padding
    if module.padding_mode != "zeros":
        return 1.0
    if not isinstance(module, _TRANSPOSED):
        # Pairs of numbers, the last dimension first: before and after the elements.
        before = module._reversed_padding_repeated_twice[-2::-2]
        return valid_share(inputs, outputs, *shape, before)
    # The same pairs, seen from the other side; each reaches one of the outputs.
    pairs = valid_share(outputs, inputs, *shape, padding)
    return pairs * math.prod(inputs) / math.prod(outputs)
