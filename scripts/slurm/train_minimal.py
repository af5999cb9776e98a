"""The smallest training that stops at a time limit and goes on at the exact next batch.

    srun python train_minimal.py DATASET RUN_FOLDER

SIGUSR1 (on any rank) makes all ranks save and exit with status 75; the same command goes on, also
with another number of tasks that divides ``--slots``. With ``--exact`` even the bits of the loss
are the same for any such number.
"""

import argparse
import json
import os
import signal
import sys

import torch
import torch.distributed as dist

import pcrshard
from pcrshard.training import ranks

STOPPED = 75  # EX_TEMPFAIL: not done, try again


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("data", help="dataset folder or URL")
    add("run", help="folder for checkpoint.pt and log.jsonl")
    add("--scan", type=int, default=5)
    add("--epochs", type=int, default=2)
    add(
        "--batch",
        type=int,
        default=32,
        help="samples per step, of all ranks together (default: %(default)s)",
    )
    add(
        "--slots",
        type=int,
        default=4,
        help="the most ranks that this job will ever have (default: %(default)s)",
    )
    add("--size", type=int, default=32, help="side of the crops in pixels (default: %(default)s)")
    add(
        "--workers",
        type=int,
        default=0,
        help="DataLoader workers of each rank (default: %(default)s)",
    )
    add("--save-every", type=int, default=100, metavar="STEPS")
    add(
        "--exact",
        action="store_true",
        help="sum gradients in the order of the slots instead of by DistributedDataParallel",
    )
    add("--log-keys", action="store_true", help="log the keys of each step's samples, too")
    return parser.parse_args()


def exact_gradients(model, images, labels, slots):
    """Each slot's loss and gradients alone, then their mean in the order of slots: the same bits
    however many ranks share the slots.
    """
    rows, parameters = [], list(model.parameters())
    for x, y in zip(images.chunk(slots), labels.chunk(slots), strict=True):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, parameters)
        rows.append(
            torch.cat([loss.detach().view(1), *(gradient.flatten() for gradient in gradients)])
        )
    mine = torch.stack(rows)  # (slots of this rank, 1 + parameters)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    loss, *gradients = (
        torch.cat(gathered).mean(0).split([1, *(parameter.numel() for parameter in parameters)])
    )
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.view_as(parameter)
    return loss.item()


def usual_gradients(model, images, labels, _slots):
    """What DistributedDataParallel does; ``model`` is one. Returns the loss over all ranks."""
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    model.zero_grad()
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def save(path, **state):
    """Whole or not at all."""
    if dist.get_rank() == 0:
        with open(f"{path}.new", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.new", path)
    dist.barrier()


def log(path, step, loss, keys):
    gathered = [None] * dist.get_world_size()
    if keys:
        dist.all_gather_object(gathered, keys)
    if dist.get_rank() == 0:
        row = {"step": step, "loss": loss, "world": dist.get_world_size()} | (
            {"keys": [key for row in gathered for key in row]} if keys else {}
        )
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


def main():
    asked = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(True))
    args = parse_args()
    os.makedirs(args.run, exist_ok=True)
    rank, world = ranks.current()
    cuda = torch.cuda.is_available()
    device = torch.device(
        f"cuda:{int(os.environ.get('SLURM_LOCALID', '0')) % torch.cuda.device_count()}"
        if cuda
        else "cpu"
    )
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("SLURM_CPUS_PER_TASK", "1")))
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=world)

    decoder = pcrshard.ImageDecoder(args.size, "random")
    dataset = pcrshard.PCRDataset(args.data, scan=args.scan, decoder=decoder)
    loader = pcrshard.PCRLoader(
        dataset,
        args.batch // world,
        num_workers=args.workers,
        pin_memory=cuda,
        max_world_size=args.slots,
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 5, 2),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(64, max(2, len(dataset.classes))),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    checkpoint, step = os.path.join(args.run, "checkpoint.pt"), 0
    if os.path.exists(checkpoint):
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        step = state["step"]
    wrapped = model if args.exact else torch.nn.parallel.DistributedDataParallel(model)
    gradients = exact_gradients if args.exact else usual_gradients

    for _ in range(loader.epoch, args.epochs):
        for batch in loader:
            images, labels = (
                batch["jpg"].to(device, non_blocking=True).float() / 255,
                batch["cls"].to(device),
            )
            loss = gradients(wrapped, images, labels, args.slots // world)
            optimizer.step()
            step += 1
            log(
                os.path.join(args.run, "log.jsonl"),
                step,
                loss,
                batch["__key__"] if args.log_keys else [],
            )
            stop = torch.tensor(len(asked), device=device)
            dist.all_reduce(
                stop, dist.ReduceOp.MAX
            )  # all ranks stop after the same step, whichever got the signal first
            if stop or step % args.save_every == 0:
                parts = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": loader.state_dict(),
                }
                save(checkpoint, step=step, **parts)
            if stop:
                return STOPPED
    save(
        checkpoint,
        step=step,
        model=model.state_dict(),
        optimizer=optimizer.state_dict(),
        loader=loader.state_dict(),
    )
    return 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.stdout.flush()
    # Gloo's threads outlive the group in DistributedDataParallel's reference cycles, and one that
    # wants the GIL while Python ends aborts the process: end without that phase.
    os._exit(status)
