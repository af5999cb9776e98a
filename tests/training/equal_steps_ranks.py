"""One rank of a validation: every step waits for all ranks, as FSDP's forward does."""

import itertools
import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from pcrshard import PCRDataset, PCRLoader

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
dataset = PCRDataset(sys.argv[1], scan=0, fields=("cls",))


def gathered(labels):
    """The labels of a step on all ranks, padded to one length as users pad them."""
    own = torch.full((16,), -1)
    own[: len(labels)] = labels
    each = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(each, own)
    found = torch.cat(each)
    return found[found >= 0].tolist()


def steps(loader):
    return [gathered(labels) for (labels,) in loader]


for size, batch in itertools.product(range(1, 18), (1, 2, 5)):
    part = dataset.subset(range(size))
    if size < world:
        try:
            PCRLoader(part, batch, shuffle=False)
        except ValueError as error:
            assert "at least one sample for each of" in str(error)
            continue
        raise AssertionError
    loader = PCRLoader(part, batch, shuffle=False, threads=0)
    found = steps(loader)
    assert len(found) == len(loader), (size, batch)
    assert sorted(itertools.chain(*found)) == list(range(size)), (size, batch, found)
    if size % 4 != 3:
        continue
    # Stopped and resumed in the middle, as an elastic job is.
    first = list(itertools.islice(loader, len(found) // 2))
    state = json.loads(json.dumps(loader.state_dict()))
    again = PCRLoader(part, batch, shuffle=False, threads=0)
    again.load_state_dict(state)
    left = steps(again)
    assert len(first) + len(left) == len(found) or len(first) == 0
    # A training loader of the same samples has equal steps, too.
    if size >= batch * world:
        assert {len(each) for each in steps(PCRLoader(part, batch, threads=0))} == {batch * world}

# FSDP gathers the weights in each forward: a rank with a batch less would wait forever.
model = torch.nn.Linear(1, 4)
fully_shard(model)
with torch.no_grad():
    for size in (world, world + 1, 13):
        counts = torch.zeros(2)
        loader = PCRLoader(dataset.subset(range(size)), 2, shuffle=False, threads=0)
        for (labels,) in loader:
            scores = model(labels[:, None].float())
            counts += torch.tensor([len(scores), (scores.argmax(1) == labels % 4).sum()])
        dist.all_reduce(counts)
        assert counts[0] == size
dist.barrier()
print("done")
dist.destroy_process_group()
