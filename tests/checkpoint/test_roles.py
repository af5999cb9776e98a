"""Only weights and moments of known optimizers are lossy, in every form that torch gives them."""

import collections
import logging
import uuid
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import same
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_map_only

from pcrshard.checkpoint import DeltaStore, Precision
from pcrshard.errorbound import RelativeStd
from pcrshard.integrations.distributed_checkpoint import DeltaStorageReader, DeltaStorageWriter

pytestmark = pytest.mark.filterwarnings("ignore")

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
ADAM = {"weight", "exp_avg", "exp_avg_sq"}
WEIGHTS = {"weight"}


class Net(torch.nn.Module):
    """Weights, biases, a norm, and a buffer of floats that must not change."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(24, 40)
        self.norm = torch.nn.LayerNorm(40)
        self.last = torch.nn.Linear(40, 24)
        self.register_buffer("table", torch.randn(24, 24) * 1e3)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


class EightBit(torch.optim.AdamW):
    """The layout of the 8-bit optimizers: codes, maps, and other keys of groups."""

    def state_dict(self):
        state = super().state_dict()
        for group in state["param_groups"]:
            group |= {"alpha": 0.0, "t_alpha": None}
        for entry in state["state"].values():
            entry["qmap1"] = torch.rand(16, 16)
        return state

    def load_state_dict(self, state):
        for entry in state["state"].values():
            entry.pop("qmap1")
        super().load_state_dict(state)


class MasterWeights(torch.optim.AdamW):
    """AdamW with an entry more, and no other key of groups."""

    def state_dict(self):
        state = super().state_dict()
        for entry in state["state"].values():
            entry["master"] = entry["exp_avg"] + 1
        return state


def muon(parameters):
    return torch.optim.Muon([each for each in parameters if each.dim() == 2], lr=0.01)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True)


def radam(parameters):
    return torch.optim.RAdam(parameters, lr=0.01)


def nadam(parameters):
    return torch.optim.NAdam(parameters, lr=0.01)


class Form(NamedTuple):
    """A form of a training state: from a model and an optimizer, and back."""

    make: Any
    changes: set[str]
    save: Any
    load: Any


def load_plain(key, find=lambda optimizer: optimizer):
    def load(model, optimizer, state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(find(state[key]))

    return load


def plain(key="optimizer"):
    return lambda model, optimizer: {"model": model.state_dict(), key: optimizer.state_dict()}


def load_named(model, optimizer, state):
    set_model_state_dict(model, state["model"])
    flat = any(isinstance(key, str) and "." in key for key in state["optim"])
    set_optimizer_state_dict(model, optimizer, state["optim"], options=FLAT if flat else None)


def named(options=None):
    return lambda model, optimizer: {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
    }


def both(model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": dict(weights), "optim": moments}


def load_bare(model, optimizer, state):
    groups = optimizer.state_dict()["param_groups"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict({"state": state["adam"], "param_groups": groups})


def by_moment(model, optimizer):
    """The moments as dicts with the names of the weights, as DeepSpeed and others write them."""
    state = get_optimizer_state_dict(model, optimizer)["state"]
    kinds = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    moments = {kind: {name: entry[kind] for name, entry in state.items()} for kind in kinds}
    return {"model": model.state_dict(), "model.moments": moments}


def load_by_moment(model, optimizer, state):
    moments = state["model.moments"]
    entries = {
        n: {kind: each[name] for kind, each in moments.items()}
        for n, name in enumerate(moments["step"])
    }
    load_bare(model, optimizer, {"model": state["model"], "adam": entries})


def lightning(model, optimizer):
    weights = collections.OrderedDict((f"net.{k}", v) for k, v in model.state_dict().items())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, 100)
    return {
        "state_dict": weights,
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [scheduler.state_dict()],
        "hyper_parameters": {"width": 40},
    }


def load_lightning(model, optimizer, state):
    model.load_state_dict({k.partition(".")[2]: v for k, v in state["state_dict"].items()})
    optimizer.load_state_dict(state["optimizer_states"][0])


def compiled(model, optimizer):
    """As a wrapped model names its weights: torch.compile, DDP, FSDP 1."""
    names = {f"_orig_mod.module._fsdp_wrapped_module.{k}": v for k, v in model.state_dict().items()}
    return {"module": names, "opt": optimizer.state_dict()}


def load_compiled(model, optimizer, state):
    weights = {k.rpartition("module.")[2]: v for k, v in state["module"].items()}
    model.load_state_dict(weights)
    optimizer.load_state_dict(state["opt"])


def accelerated(model, optimizer):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    wrapped, prepared = accelerator.prepare(model, optimizer)
    return {"model": accelerator.get_state_dict(wrapped), "optimizer": prepared.state_dict()}


def other_parameters(model, optimizer):
    """Parameters that no module of torch has, which the optimizer lists by name."""
    state = named(FLAT)(model, optimizer)
    for part in state.values():
        for name in [name for name in part if "first.weight" in name]:
            part[name.replace("first.weight", "experts.gate_up_proj")] = part.pop(name)
    return state


def load_other_parameters(model, optimizer, state):
    for part in state.values():
        for name in [name for name in part if "gate_up_proj" in name]:
            part[name.replace("experts.gate_up_proj", "first.weight")] = part.pop(name)
    load_named(model, optimizer, state)


AMSGRAD = ADAM | {"max_exp_avg_sq"}
FORMS = {
    "by number": Form(adamw, AMSGRAD, plain(), load_plain("optimizer")),
    "under any key": Form(adamw, AMSGRAD, plain("x.1"), load_plain("x.1")),
    "in a list": Form(
        adamw,
        AMSGRAD,
        lambda m, o: {"model": m.state_dict(), "all": [(o.state_dict(),), None]},
        load_plain("all", lambda found: found[0][0]),
    ),
    "momentum": Form(sgd, {"weight", "momentum_buffer"}, plain(), load_plain("optimizer")),
    "by name": Form(adamw, AMSGRAD, named(), load_named),
    "flattened": Form(adamw, AMSGRAD, named(FLAT), load_named),
    "both": Form(adamw, AMSGRAD, both, load_named),
    "flattened momentum": Form(sgd, {"weight", "momentum_buffer"}, named(FLAT), load_named),
    "other parameters": Form(
        adamw, AMSGRAD | {"gate_up_proj"}, other_parameters, load_other_parameters
    ),
    "Lightning": Form(adamw, AMSGRAD, lightning, load_lightning),
    "wrapped": Form(adamw, AMSGRAD, compiled, load_compiled),
    "Accelerate": Form(adamw, AMSGRAD, accelerated, load_plain("optimizer")),
    "state alone": Form(
        adamw,
        WEIGHTS,
        lambda m, o: {"model": m.state_dict(), "adam": o.state_dict()["state"]},
        load_bare,
    ),
    "by moment": Form(adamw, WEIGHTS, by_moment, load_by_moment),
    "8 bit": Form(EightBit, WEIGHTS, plain(), load_plain("optimizer")),
    "master weights": Form(MasterWeights, WEIGHTS, plain(), load_plain("optimizer")),
    "Muon": Form(muon, WEIGHTS, plain(), load_plain("optimizer")),
    "RAdam": Form(radam, WEIGHTS, named(FLAT), load_named),
    "NAdam": Form(nadam, WEIGHTS, plain(), load_plain("optimizer")),
}


def job(form):
    torch.manual_seed(0)
    model = Net()
    return model, form.make(model.parameters())


def train(model, optimizer, first, count):
    """Train some steps, and return the mean loss."""
    total = 0.0
    for step in range(first, first + count):
        batch = torch.randn(16, 24, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        total += loss.item() / count
    return total


def flat(value, path=""):
    """Return the tensors of a state by path."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    if not isinstance(value, dict | list | tuple):
        return {}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    parts = [flat(item, f"{path}.{key}" if path else str(key)) for key, item in items]
    return {path: tensor for part in parts for path, tensor in part.items()}


def changed(before, after):
    """Return the paths of the tensors that differ."""
    return {path for path, tensor in flat(before).items() if not same(tensor, flat(after)[path])}


def stored(state, precision):
    with DeltaStore(f"memory://roles-{uuid.uuid4().hex}", precision) as store:
        store.save(state)
        return store.load()


@pytest.mark.parametrize("name", FORMS)
def test_each_form_of_a_state_is_exact_or_recognized(name):
    """Losslessly, training continues bit for bit. Otherwise only weights and moments of torch's
    Adam and SGD change, the same through a distributed writer, and training continues alike.
    """
    form = FORMS[name]
    model, optimizer = job(form)
    train(model, optimizer, 0, 60)
    state = form.save(model, optimizer)
    exact, lossy = stored(state, "lossless"), stored(state, "balanced")
    assert same(exact, state)
    found = changed(state, lossy)
    assert {path.rpartition(".")[2] for path in found} == form.changes
    assert len(found) >= 2 * len(form.changes - {"gate_up_proj"}) - (name == "other parameters")

    url = f"memory://roles-{uuid.uuid4().hex}"
    dcp.save(state, storage_writer=DeltaStorageWriter(url, precision="balanced"), no_dist=True)
    target = tree_map_only(torch.Tensor, torch.zeros_like, state)
    dcp.load(target, storage_reader=DeltaStorageReader(url), no_dist=True)
    assert changed(state, target) == found

    losses = []
    for each in (exact, lossy):
        form.load(*(other := job(form)), each)
        losses.append(train(*other, 60, 30))
    assert losses[0] == train(model, optimizer, 60, 30)
    assert losses[1] == pytest.approx(losses[0], rel=0.002)


def test_other_tables_of_floats_are_exact(caplog):
    """Numbers outside a module, and those in it that are no weights, stay as they are; the first
    save lists what does not.
    """
    caplog.set_level(logging.INFO)
    table = torch.arange(400.0).view(20, 20) * 1e3
    state = {
        "model": Net().state_dict(),
        "net": {"layer.weight_scale_inv": table, "mask": {"weight_mask": table}},
        "table": table,
        "weight": table + 1,
        "sampler": {"weight": table + 2, "epoch": 3},
        "grads": {"model": {"0.weight": table + 3}},
        "model_ids": {"ids": table.double()},
    }
    assert changed(state, stored(state, "balanced")) == {"model.first.weight", "model.last.weight"}
    assert "weights, 38.1% of the bytes (model.first.weight, model.last.weight)" in caplog.text
    assert stored({"0.weight": table}, "lossless")["0.weight"].equal(table)


def test_patterns_add_weights_and_take_them_away():
    """``lossy`` adds tensors that are not recognized; ``exact`` has the last word."""
    table = torch.randn(20, 20)
    state = {"a": {"x": table, "y": table + 1, "ids": table.int()}, "b": table + 2}
    precision = Precision(weights=RelativeStd(0.005), lossy=("a.*",), exact=("*.y",))
    assert changed(state, stored(state, precision)) == {"a.x"}


def test_memory_of_two_roles_is_exact():
    """A weight that shares memory with anything else that is exact stays exact."""
    weight = torch.randn(30, 30)
    state = {"model": {"0.weight": weight}, "best": {"copy": weight}}
    assert changed(state, stored(state, "balanced")) == set()
    state = {"model": {"0.weight": weight, "1.weight": weight}}
    assert len(changed(state, stored(state, "balanced"))) == 2
