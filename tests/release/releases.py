"""Small stores that the tests of this room share."""

import torch

from pcrshard.checkpoint import DeltaStore


def state(step):
    """A pure function of its number: a walk of a matrix."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 100, generator=generator) * 0.02
    for _ in range(step):
        weight += torch.randn(200, 100, generator=generator) * 2e-4
    return {"model": {"w": weight, "b": torch.arange(4.0) * step}, "epoch": step}


def make_store(folder, count=5):
    """A store with so many versions."""
    store = DeltaStore(str(folder))
    for number in range(1, count + 1):
        store.save(state(number))
    store.wait()
    return store


def ids(store):
    """The ids of all versions of a store."""
    return [record.id.hex() for record in store.versions()]


def same(a, b):
    """Whether two states of :func:`state` are equal, tensors bit for bit."""
    tensors = ((a["model"][name], b["model"][name]) for name in a["model"])
    return a["epoch"] == b["epoch"] and all(torch.equal(*pair) for pair in tensors)
