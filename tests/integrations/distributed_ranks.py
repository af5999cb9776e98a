"""What each rank of test_distributed_checkpoint.py does.

Usage, for each rank: distributed_ranks.py save|load FOLDER
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pcrshard.integrations.distributed_checkpoint import DeltaStorageReader, DeltaStorageWriter

EXACT = {"precision": "lossless"}
VERSIONS = 2


def build(world):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 40), torch.nn.ReLU(), torch.nn.Linear(40, 5))
    if world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model, optimizer, number):
    batch = torch.randn(8, 33, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def state_of(model, optimizer, number):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments, "step": number, "note": {"text": "plain"}}


def digest(model):
    total = 0.0
    for parameter in model.parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        total += float(full.detach().double().square().sum())
    return f"{total:.17g}"


def save(folder, world):
    model, optimizer = build(world)
    writer = DeltaStorageWriter(folder, **EXACT)
    for number in range(1, VERSIONS + 1):
        step(model, optimizer, number)
        dcp.save(state_of(model, optimizer, number), storage_writer=writer)
        found = digest(model)
        if dist.get_rank() == 0:
            print("digest", number, found, flush=True)


def load(folder, world):
    for number in range(1, VERSIONS + 1):
        model, optimizer = build(world)
        step(model, optimizer, 100)  # so that the optimizer has a state to fill
        state = state_of(model, optimizer, 0)
        dcp.load(state, storage_reader=DeltaStorageReader(folder, number))
        assert state["step"] == number
        assert state["note"] == {"text": "plain"}
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        found = digest(model)
        if dist.get_rank() == 0:
            print("digest", number, found, flush=True)


if __name__ == "__main__":
    what, folder = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    {"save": save, "load": load}[what](folder, dist.get_world_size())
    dist.destroy_process_group()
