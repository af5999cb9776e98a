"""Small training states shared by the checkpoint tests."""

import torch

from pcrshard.checkpoint import DeltaStore


def tiny_state(step, rows=24, columns=16):
    """Return a state, of a few kilobytes by default, that depends only on its number."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator) * 0.02
    moment = torch.rand(rows, columns, generator=generator) * 1e-4
    for i in range(step):
        generator.manual_seed(100 + i)
        weight += torch.randn(rows, columns, generator=generator) * 1e-3
        moment *= 0.99
    return {
        "model": {"weight": weight, "b": torch.arange(4.0) * step},
        "opt": {"state": {0: {"exp_avg_sq": moment}}, "param_groups": [{"lr": 0.1 / (step + 1)}]},
        "epoch": step,
    }


ADAM_GROUP = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "amsgrad": False, "params": [0]}


def adam_state(step):
    """Return the same state with a known optimizer."""
    state = tiny_state(step)
    state["opt"]["param_groups"] = [ADAM_GROUP]
    return state


def saved(url, count, state=adam_state, **options):
    """Save the states 1 to ``count`` with an accuracy of a tenth of their number."""
    with DeltaStore(url, **options) as store:
        for number in range(1, count + 1):
            store.save(state(number), metrics={"acc": number / 10})
    return store


def same(a, b):
    """Return whether two states have equal types and values, with tensors equal bit for bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if hasattr(a, "tobytes"):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
