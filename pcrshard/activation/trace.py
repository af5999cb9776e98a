"""Find which module saves which tensor, and profile each convolution.

A pack hook sees tensors, not operations. In a traced step, a tensor is named after the innermost
running module, and a tensor that a convolution saves with the shape of its input is that input,
even if autocast changed its type. ReLU saves it before the convolution does, so tensors are
identified by their position in the order of saving, which is the same in later steps.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from .noise_bound import Profile

_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


def convolutions(model: nn.Module) -> dict[str, nn.Module]:
    """Return the convolutions of a model by name."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, _CONVOLUTIONS)
    }


class Trace:
    """A trace of a model's modules during one forward pass, until :meth:`close`.

    Modules are found on the caller's stack, not by hooks, which would make ``torch.compile``
    compile the model twice. Only profiled convolutions are hooked.

    Attributes:
        profiles: Profiles by convolution name. Energies are complete after the backward pass.

    Args:
        model: The model.
        measure: Whether to profile convolutions as well as find their inputs.
    """

    def __init__(self, model: nn.Module, *, measure: bool) -> None:
        self.profiles: dict[str, Profile] = {}
        self._root = type(model).__name__
        self._names = {module: name for name, module in model.named_modules()}
        self._handles: list[Any] = []
        for name, module in convolutions(model).items() if measure else ():
            hook = functools.partial(self._profile, name)
            self._handles.append(module.register_forward_hook(hook))

    def saves(self, tensor: Tensor, ordinal: int) -> str:
        """Record that a tensor is saved, whether for the first time or not.

        Returns:
            The innermost running module of the model; ``""`` outside modules.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
            module = frame.f_locals.get("self") if arguments[:1] == ("self",) else None
            if isinstance(module, nn.Module) and module in self._names:
                name = self._names[module]
                if isinstance(module, _CONVOLUTIONS) and len(arguments) > 1:
                    self._find_input(name, frame.f_locals[arguments[1]], tensor, ordinal)
                return name or self._root
            frame = frame.f_back
        return ""

    def _find_input(self, name: str, values: Any, tensor: Tensor, ordinal: int) -> None:
        if isinstance(values, Tensor) and values.shape == tensor.shape:
            ordinals = self._profile_of(name).ordinals
            if ordinal not in ordinals:
                ordinals.append(ordinal)

    def _profile_of(self, name: str) -> Profile:
        return self.profiles.setdefault(name, Profile(0.0, 0.0, 1, 1))

    @torch.no_grad()
    def _profile(self, name: str, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        values = inputs[0]
        profile = self._profile_of(name)
        nonzero = int(values.count_nonzero())
        profile.nonzero_share = nonzero / max(values.numel(), 1)
        profile.valid_share = _valid_share(module, values, output)
        profile.num_outputs = module.out_channels
        profile.batch_size = values.shape[0]
        profile.energy = 0.0
        if output.requires_grad:
            hook = functools.partial(_add_energy, profile)
            output.register_hook(hook)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _add_energy(profile: Profile, gradient: Tensor) -> None:
    exact = gradient.detach().float()
    profile.energy += float(exact.square().sum())
    profile.mean_absolute = float(exact.abs().mean())


def _valid_share(module: Any, values: Tensor, output: Tensor) -> float:
    """Return V, the fraction of (kernel tap, output) pairs that read an input, not padding.

    The weight gradient for all-one tensors counts these pairs. For a transposed convolution, V is
    the fraction of outputs that a tap reaches.
    """
    # Not a deep copy: FSDP2's subclasses cannot be copied, and their weights are sharded.
    kind = next(kind for kind in _CONVOLUTIONS if isinstance(module, kind))
    bare: Any = object.__new__(kind)
    ones = torch.ones(module.weight.shape, device=values.device, requires_grad=True)
    bare.__dict__ |= module.__dict__ | {"_parameters": {"weight": ones, "bias": None}}
    plain = torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept)
    with torch.enable_grad(), torch.autocast(values.device.type, enabled=False), plain:
        counted = kind.forward(bare, torch.ones_like(values[:1], dtype=torch.float32))
        (pairs,) = torch.autograd.grad(counted.sum(), ones)
    return float(pairs.mean()) / output[0, 0].numel()
