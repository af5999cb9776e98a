"""The smallest training that stops at a time limit and resumes at the exact next batch.

    srun python train_minimal.py DATASET RUN_FOLDER

SIGUSR1 (on any rank) makes all ranks save and exit with status 75. The same command resumes, also
with another number of tasks that divides ``--slots``, with the same samples in the same order.
"""

import argparse
import json
import os
import signal
import sys

import torch
import torch.distributed as dist

import pcrshard
from pcrshard import storage
from pcrshard.training import ranks

STOPPED = 75  # EX_TEMPFAIL: not done, try again
SAVE_EVERY = 100  # steps


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("data", help="dataset folder or URL")
    add("run", help="folder for checkpoint.pt and log.jsonl")
    add("--scan", type=int, default=5, help="highest scan to read")
    add("--epochs", type=int, default=2, help="number of epochs")
    add("--batch", type=int, default=32, help="samples per step, of all ranks together")
    add("--slots", type=int, default=4, help="the most ranks that this job will ever have")
    return parser.parse_args()


def choose_device():
    """Return this task's GPU, or the CPU with the cores that SLURM allocated."""
    torch.set_num_threads(int(os.environ.get("SLURM_CPUS_PER_TASK", "1")))
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("SLURM_LOCALID", "0")) % torch.cuda.device_count())
    return torch.device("cuda")


def train_step(model, optimizer, batch, device):
    """Update the model with the mean of all ranks' gradients; return this rank's loss."""
    images = batch["jpg"].to(device, non_blocking=True).float() / 255
    loss = torch.nn.functional.cross_entropy(model(images), batch["cls"].to(device))
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    return loss.item()


def log(path, step, loss, keys):
    """Append a line to the log, with the mean loss and the keys of all ranks."""
    world = dist.get_world_size()
    gathered = [None] * world
    dist.all_gather_object(gathered, (loss, keys))
    if dist.get_rank() == 0:
        row = {"step": step, "loss": sum(loss for loss, _ in gathered) / world, "world": world}
        row["keys"] = [key for _, keys in gathered for key in keys]
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


def main():
    asked = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(True))
    args = parse_args()
    os.makedirs(args.run, exist_ok=True)
    rank, world = ranks.current()
    device = choose_device()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world)

    decoder = pcrshard.ImageDecoder(32, "random")
    dataset = pcrshard.PCRDataset(args.data, scan=args.scan, decoder=decoder)
    loader = pcrshard.PCRLoader(
        dataset, args.batch // world, pin_memory=device.type == "cuda", max_world_size=args.slots
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 5, 2),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(64, max(2, dataset.num_classes)),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoint, step = os.path.join(args.run, "checkpoint.pt"), 0
    if os.path.exists(checkpoint):
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        step = state["step"]
        for name, part in parts.items():
            part.load_state_dict(state[name])

    def save_all():
        if rank == 0:
            state = {"step": step} | {name: part.state_dict() for name, part in parts.items()}
            with storage.atomic_write(checkpoint) as file:
                torch.save(state, file)
        dist.barrier()

    for _ in range(loader.epoch, args.epochs):
        for batch in loader:
            loss = train_step(model, optimizer, batch, device)
            step += 1
            log(os.path.join(args.run, "log.jsonl"), step, loss, batch["__key__"])
            # All ranks stop after the same step, whichever got the signal first.
            stop = torch.tensor(len(asked), device=device)
            dist.all_reduce(stop, dist.ReduceOp.MAX)
            if stop or step % SAVE_EVERY == 0:
                save_all()
            if stop:
                return STOPPED
    save_all()
    return 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
