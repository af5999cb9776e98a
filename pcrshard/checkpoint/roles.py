"""Which tensors of a state a precision applies to: weights, and moments of known optimizers.

The only recognizer, for stores and all integrations. A tensor that is not recognized has no role,
and is stored bit for bit.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from .typed_tree import Leaf

# For each known optimizer of torch: the param-group keys that identify it, and its state. A group
# with any other key belongs to another optimizer, whose state may have another meaning
# (Schedule-Free has `exp_avg_sq` and `z`), and so does any other entry of the state.
_KNOWN = (
    (
        {"betas", "eps", "amsgrad"},  # Adam, AdamW
        {
            "step": None,
            "exp_avg": "first_moment",
            "exp_avg_sq": "second_moment",
            "max_exp_avg_sq": "second_moment",
        },
    ),
    ({"momentum", "dampening", "nesterov"}, {"momentum_buffer": "first_moment"}),  # SGD
)
_COMMON_KEYS = {
    "params", "param_names", "lr", "weight_decay", "maximize", "foreach", "capturable",
    "differentiable", "fused", "decoupled_weight_decay", "name", "lr_scale",
    # Keys added by learning-rate schedulers.
    "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum",
}  # fmt: skip
# Keys under which states hold modules. A dict that `Module.state_dict` returned needs none.
_MODULES = {
    "model", "module", "network", "net", "ema", "ema_model", "state_dict", "model_state_dict",
}  # fmt: skip
# Names of parameters of torch's modules. Not `weight_scale`, `weight_mask`, `class_weight`.
_WEIGHT = re.compile(
    r"(?:(?:in|q|k|v)_proj_)?weight|weight_(?:[ih]h|hr)_l\d+(?:_reverse)?|weight_(?:g|v|orig)"
)
_NO_WEIGHTS = re.compile("exp_avg|momentum|optim|grad|_extra_state", re.IGNORECASE)
_GROUPS, _STATE = (re.compile(rf"(?<![^.]){key}\.") for key in ("param_groups", "state"))

Roles = Mapping[str, str]


@dataclasses.dataclass
class _Optimizer:
    """The state of an optimizer.

    Attributes:
        groups: Options of its param groups. If the state is flattened, each parameter is a group.
        state: Parameter and key of each value, by path.
    """

    groups: dict[str, dict[str, Any]]
    state: dict[str, tuple[str, str]]

    @property
    def parameters(self) -> set[Any]:
        """The names of its parameters, or their numbers."""
        groups = self.groups.items()
        return {each for name, group in groups for each in group.get("params", [name])}

    def roles(self) -> dict[str, str]:
        """Return the roles of the tensors in its state: none if the optimizer is unknown."""
        parameters = set(map(str, self.parameters))
        used = {key for _, key in self.state.values()}
        for keys, moments in _KNOWN:
            is_known = used <= moments.keys() and all(
                keys <= group.keys() <= keys | _COMMON_KEYS for group in self.groups.values()
            )
            if is_known:
                return {
                    path: role
                    for path, (parameter, key) in self.state.items()
                    if (role := moments[key]) and parameter in parameters
                }
        return {}


def find_roles(state: Any) -> dict[str, str]:
    """Return the roles of the recognized tensors of a state, by path.

    Weights are parameters in a module's state, by their names: those of torch's modules, or those
    by which an optimizer in the state lists them. A module's state is a dict that
    ``Module.state_dict`` returned, whatever is under ``model``, ``module``, ``state_dict`` and the
    like, or the whole state if it is a dict of tensors.

    Moments belong to an optimizer: ``state`` and ``param_groups`` under one path, nested or
    flattened into keys with dots, by number or by name. The param groups identify its type.

    Args:
        state: A nested or flattened state, without cycles.
    """
    optimizers: dict[str, _Optimizer] = {}
    leaves = list(_walk(state, (), in_module=_is_flat_module(state)))
    for path, value, _ in leaves:
        if match := _GROUPS.search(path):
            found = optimizers.setdefault(
                path[: match.start()], _Optimizer(collections.defaultdict(dict), {})
            )
            group, _, key = path[match.end() :].rpartition(".")
            found.groups[group][key] = value
    candidates = []
    for path, value, in_module in leaves:
        above = [match for match in _STATE.finditer(path) if path[: match.start()] in optimizers]
        if above:
            parameter, _, key = path[above[0].end() :].rpartition(".")
            optimizers[path[: above[0].start()]].state[path] = parameter, key
        elif isinstance(value, torch.Tensor) and not _NO_WEIGHTS.search(path):
            candidates.append((path, in_module))
    listed = {name for each in optimizers.values() for name in each.parameters}
    roles = {
        path: "weights" for path, in_module in candidates if _is_weight(path, in_module, listed)
    }
    for each in optimizers.values():
        roles |= each.roles()
    return roles


def assign_roles(leaves: Iterable[Leaf], roles: Roles) -> None:
    """Set the role of each leaf: none if any of its uses has none, or they differ."""
    for leaf in leaves:
        first, *others = {roles.get(path) for path in leaf.uses}
        leaf.role = None if others else first


def _walk(value: Any, path: tuple[str, ...], *, in_module: bool) -> Iterator[tuple[str, Any, bool]]:
    """Yield the path of each value, the value, and whether it is in a module's state."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        items = value.items()
        in_module = in_module or hasattr(value, "_metadata")
    elif isinstance(value, list | tuple) and any(
        isinstance(each, dict | list | tuple | torch.Tensor) for each in value
    ):
        items = enumerate(value)
    else:  # the numbers of parameters in one list
        yield ".".join(path), value, in_module
        return
    for key, item in items:
        yield from _walk(item, (*path, str(key)), in_module=in_module)


def _is_flat_module(state: Any) -> bool:
    return isinstance(state, dict) and all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in state.items()
    )


def _is_weight(path: str, in_module: bool, listed: set[Any]) -> bool:
    *above, name = path.split(".")
    if not in_module and _MODULES.isdisjoint(above):
        return False
    if name.startswith("original") and above[-2:] == ["parametrizations", "weight"]:
        return True
    suffixes = (".".join([*above[start:], name]) for start in range(len(above) + 1))
    return bool(_WEIGHT.fullmatch(name)) or any(suffix in listed for suffix in suffixes)
