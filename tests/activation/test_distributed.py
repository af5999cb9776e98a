"""Two processes: DDP and FSDP2 with compressed activations."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed._composable.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pcrshard import compress_activations
from pcrshard.activation import ActivationOptions, GradientNoise

RANKS = 2


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 64, 4),
    )


def wrapped(model, kind):
    if kind == "ddp":
        return DistributedDataParallel(model)
    for layer in (*(layer for layer in model if list(layer.parameters())), model):
        fully_shard(layer)
    return model


def train(model, bound, rank, codec):
    """The saver after three steps; each rank has its own images."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    saver = compress_activations(model, bound, codec, ActivationOptions(min_bytes=0))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        images = torch.randn(4, 3, 8, 8, generator=generator)
        optimizer.zero_grad()
        with saver:
            loss = model(images).square().mean()
        loss.backward()
        optimizer.step()
        saver.step(optimizer)
    return saver


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def weights(model):
    return torch.cat([whole(parameter.detach()).flatten() for parameter in model.parameters()])


def work(rank, kind, meeting):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=RANKS)
    found = {}
    for codec in ("none", "zstd"):
        model = wrapped(network(), kind)
        saver = train(model, GradientNoise(every=2), rank, codec)
        report = saver.report()
        assert saver.ledger.live_bytes == 0
        assert (report.ratio > 1.5) == (codec == "zstd")
        assert not any(row.shape == (8, 8, 3, 3) for row in report.rows)
        found[codec] = weights(model)
        gathered = [torch.empty_like(found[codec]) for _ in range(RANKS)]
        dist.all_gather(gathered, found[codec])
        assert torch.equal(*gathered)  # all ranks have the same weights
    change = (found["none"] - weights(network())).norm()
    assert (found["zstd"] - found["none"]).norm() < 0.05 * change
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_agree_and_train_as_without(kind, tmp_path):
    """Hooks are local, bounds are each rank's own, weights stay equal, nothing stays alive."""
    how = {"nprocs": RANKS, "start_method": "forkserver"}
    mp.start_processes(work, (kind, tmp_path / "meeting"), **how)
