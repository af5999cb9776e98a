"""States whose stores are kept in tests/golden/checkpoints-2."""

import collections

import numpy as np
import torch
from states import ADAM_GROUP


def _noise(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float() * 0.02


def store_states(step):
    """Return a state with every supported type of tensor and value, after some random steps."""
    weight = _noise(0, 40, 30) + sum(_noise(n, 40, 30) for n in range(1, step + 1)) / 50
    weight[0, :4] = torch.tensor([torch.nan, -torch.inf, -0.0, 1e-42])
    sparse = _noise(99, 50, 40)
    sparse.view(-1)[step::100] += 1
    module = collections.OrderedDict(w=weight, b=torch.arange(5.0) * step)
    module._metadata = {"": {"version": 2}}
    return {
        "model": module,
        "half": {
            "f16": (weight * 3).half(),
            "bf16": (weight * 2).bfloat16(),
            "f64": weight.double(),
        },
        "ids": (sparse * 1000).int(),
        "tied": weight,
        "view": weight[3:7].t(),
        "opt": {
            "state": {
                0: {"exp_avg": _noise(50 + step, 40, 30), "exp_avg_sq": _noise(9, 40, 30) ** 2}
            },
            "param_groups": [ADAM_GROUP],
        },
        "same": torch.ones(3, dtype=torch.complex128),
        "empty": torch.empty(0, 4),
        "array": np.arange(step, dtype=np.int16),
        "scalar": np.float32(0.5),
        "values": (None, True, -step, 1.5, 1 << 100, "text", b"bytes", [{1: 2, b"k": 3, None: 4}]),
    }
