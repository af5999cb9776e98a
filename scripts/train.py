"""Train a classifier from a PCR dataset, at any scan policy.

    python scripts/train.py data.train=shards/train data.val=shards/val policy=tuner epochs=20
    torchrun --nproc-per-node 2 scripts/train.py data.train=shards/train
    scripts/slurm/submit jean-zay train -- data.train=$SCRATCH/shards out=$WORK/run model=resnet50

The same command goes on where it stopped, at the exact next batch. All settings: conf/train/. The
log is OUT/log.jsonl, one line an epoch; TensorBoard reads OUT, too.
"""

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time

import fsspec
import hydra
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training.checkpoints import Checkpoints
from training.hardware import PRECISIONS, choose_device, precision_of
from training.models import MODELS

import pcrshard
from pcrshard.fidelity.bandwidth import BandwidthTuner, bytes_per_sample
from pcrshard.fidelity.schedule import ScanSchedule
from pcrshard.fidelity.tuner import ScanTuner
from pcrshard.testing import ThrottledFS
from pcrshard.training.ranks import current

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def make_loader(cfg, url, level, decoder, *, training):
    """Batches of the training or the validation set; under a bandwidth limit, training bytes pass a
    token bucket that all workers share.
    """
    storage_options = None
    if cfg.bandwidth and training:
        fsspec.register_implementation("throttled", ThrottledFS, clobber=True)
        state = os.path.join(cfg.out, "bucket")
        storage_options = {"rate": cfg.bandwidth * 1e6, "state": os.path.abspath(state)}
        path = url.removeprefix("file://")
        if "://" in path:
            raise ValueError(f"bandwidth= slows a local folder down, got {url}")
        url = f"throttled://{os.path.abspath(path)}"
    dataset = pcrshard.PCRDataset(
        url,
        scan=level,
        decoder=decoder,
        fields=("jpg", "cls"),
        cache_dir=cfg.data.cache_dir,
        cache_bytes=cfg.data.cache_bytes,
        storage_options=storage_options,
    )
    order = {"shuffle": False, "drop_last": False}
    if training:
        names = ("shuffle", "lanes_per_rank", "max_world_size")
        order = {name: cfg.data[name] for name in names}
    return pcrshard.PCRLoader(
        dataset,
        cfg.batch_size,
        seed=cfg.seed,
        threads=None if cfg.workers else cfg.decoders,
        num_workers=cfg.workers,
        shards_ahead=cfg.data.shards_ahead,
        pin_memory=True,
        **order,
    )


class Batches:
    """uint8 batches to normalized floats and (coarse) labels on the device."""

    def __init__(self, cfg, device):
        self.device = device
        self.mean, self.std = (
            torch.tensor(values, device=device)[:, None, None] * 255 for values in (MEAN, STD)
        )
        self.coarse = (
            None if cfg.data.coarse is None else torch.tensor(list(cfg.data.coarse), device=device)
        )

    def __call__(self, batch):
        images, labels = (part.to(self.device, non_blocking=True) for part in batch)
        images = ((images.float() - self.mean) / self.std).contiguous(
            memory_format=torch.channels_last
        )
        return images, labels if self.coarse is None else self.coarse[labels]


def rate_at(step, steps_per_epoch, cfg, world):
    """The learning rate: linear warm-up (Goyal et al. 2017), then steps down."""
    optim, epoch = cfg.optim, step / steps_per_epoch
    peak = optim.lr * cfg.batch_size * world / 256
    if epoch < optim.warmup_epochs:
        return peak * (step + 1) / (optim.warmup_epochs * steps_per_epoch)
    return peak * optim.drop ** sum(epoch >= share * cfg.epochs for share in optim.milestones)


def count_classes(cfg, dataset, val):
    """How many outputs the network has; refuses a validation set that numbers classes otherwise."""
    if val is not None and val.classes != dataset.classes:
        raise SystemExit(
            f"train: data.val={cfg.data.val} has other classes than data.train={cfg.data.train}: "
            f"{_some(val.classes)}, expected {_some(dataset.classes)}"
        )
    if cfg.data.coarse is not None:
        return max(cfg.data.coarse) + 1
    found = dataset_classes(dataset)
    if val is not None and dataset_classes(val) > found:
        raise SystemExit(
            f"train: data.val={cfg.data.val} has {dataset_classes(val)} classes, "
            f"data.train={cfg.data.train} has {found}"
        )
    if not found:
        raise SystemExit(
            f"train: the dataset index of {cfg.data.train} does not say how many classes there "
            "are; encode it again with --classes FILE"
        )
    return found


def dataset_classes(dataset):
    return getattr(dataset, "num_classes", len(dataset.classes))


def _some(classes):
    shown = ", ".join(classes[:5])
    return f"{len(classes)} ({shown}{', ...' if len(classes) > 5 else ''})"


def make_policy(cfg, level, loader, loss):
    """What sets the level, a :class:`pcrshard.fidelity.ScanPolicy`."""
    policy = cfg.policy
    if policy.name == "milestones":
        return ScanSchedule(level, dict(policy.milestones))
    if policy.name == "tuner":
        names = ("threshold", "images", "trials", "first", "every")
        return ScanTuner(loader, loss, level, **{name: policy[name] for name in names})
    if policy.name == "bandwidth":
        entries = loader.dataset.shards.entries
        ahead = (cfg.data.shards_ahead + 1) * len(loader.dataset) // len(entries)
        options = {
            "floor": policy.floor,
            "max_wait": policy.max_wait,
            "window": policy.window,
            "ahead": ahead,
        }
        return BandwidthTuner(level, bytes_per_sample(entries), **options)
    return ScanSchedule(level, {0: policy.scan})


def make_saver(cfg, model):
    """What the forward pass runs in: activations are kept as they are, or compressed."""
    if cfg.memory == "compressed":
        return pcrshard.compress_activations(model, codec=cfg.codec)
    if cfg.memory != "plain":
        raise ValueError(f"expected memory=plain or memory=compressed, got {cfg.memory!r}")
    return contextlib.nullcontext()


def evaluate(model, loader, prepare):
    """Share of the validation images that are classified right, over all ranks."""
    if loader is None:
        return None
    model.eval()
    found = torch.zeros(2, dtype=torch.float64, device=prepare.device)
    with torch.no_grad():
        for batch in loader:
            images, labels = prepare(batch)
            found += torch.stack(
                (
                    (model(images).argmax(1) == labels).sum(),
                    torch.tensor(len(labels), device=prepare.device),
                )
            )
    if dist.is_initialized():
        dist.all_reduce(found)
    return float(found[0] / found[1])


class Run:
    """A training run: what a checkpoint holds, and the loop over it."""

    def __init__(self, cfg, rank, device):
        self.cfg, self.rank, self.device = cfg, rank, device
        scan = cfg.policy.get("scan", "full")
        self.level = pcrshard.ScanLevel(scan)
        smooth = {"smoothing": bool(cfg.data.smoothing)}
        random = pcrshard.ImageDecoder(
            cfg.size, "random", scale=tuple(cfg.data.crop), flip=cfg.data.flip, **smooth
        )
        self.loader = make_loader(cfg, cfg.data.train, self.level, random, training=True)
        self.dataset = self.loader.dataset
        self.val = None
        if cfg.data.val:
            center = pcrshard.ImageDecoder(cfg.size, "center", **smooth)
            self.val = make_loader(cfg, cfg.data.val, cfg.data.val_scan, center, training=False)
        self.prepare = Batches(cfg, device)
        classes = count_classes(cfg, self.dataset, self.val and self.val.dataset)
        self.net = MODELS[cfg.model.name](classes).to(device, memory_format=torch.channels_last)
        self.model = self.net
        if dist.is_initialized():
            self.model = DistributedDataParallel(
                self.net, device_ids=[device] if device.type == "cuda" else None
            )
        self.precision = precision_of(cfg.precision, device)
        # fp16 has few exponents: small gradients are scaled up, or they would be 0.
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")
        decay = cfg.optim.weight_decay
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), 0.1, cfg.optim.momentum, weight_decay=decay
        )
        self.saving = make_saver(cfg, self.model)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=cfg.optim.label_smoothing)
        self.policy = make_policy(cfg, self.level, self.loader, self.loss)
        self.step = self.epoch = 0
        self.seconds, self.losses = 0.0, []
        self.checkpoints = Checkpoints(cfg)
        self.asked = self.stop = False  # stop is what all ranks have agreed on

    def loss(self, model, batch):
        """The mean loss of a batch; also what ScanTuner differentiates."""
        images, labels = self.prepare(batch)
        number = PRECISIONS[self.precision]
        with torch.autocast(self.device.type, number, enabled=number is not None):
            return self.criterion(model(images), labels)

    def agree(self, stop):
        """Whether any rank is to stop: a signal reaches them at different steps."""
        if not dist.is_initialized():
            return stop
        flag = torch.tensor(float(stop), device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def checkpoint(self, *, epoch_done=False):
        """Save all that decides what comes next."""
        if self.rank.rank == 0:
            data = self.loader.state_dict()
            state = {
                "model": self.net.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "data": data,
                "step": self.step,
            }
            state |= {
                "seconds": self.seconds,
                "losses": self.losses,
                "epoch": self.epoch + epoch_done,
            }
            state["policy"] = self.policy.state_dict()
            state["torch"] = torch.get_rng_state()
            self.checkpoints.save(state, epoch_done=epoch_done)

    def restore(self):
        """Go on from a checkpoint, if there is one."""
        state = self.checkpoints.load(self.device)
        if state is None:
            return
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.loader.load_state_dict(state["data"])
        torch.set_rng_state(state["torch"].cpu())
        self.step, self.seconds, self.losses, self.epoch = (
            state[name] for name in ("step", "seconds", "losses", "epoch")
        )
        self.policy.load_state_dict(state["policy"])

    def train(self, log):
        """All epochs that are left."""
        per_epoch = len(self.loader)
        while self.epoch < self.cfg.epochs and not self.stop:
            fresh = not self.losses
            if fresh:
                self.loader.set_epoch(self.epoch)
                begun = time.monotonic()
                self.policy.step(model=self.model, epoch=self.epoch)
                self.seconds += time.monotonic() - begun  # a tuning reads and computes, too
            self.train_epoch(per_epoch)
            if self.stop:
                return
            accuracy = evaluate(self.model, self.val, self.prepare)
            scan, mean = self.level.value, math.fsum(self.losses) / max(len(self.losses), 1)
            log(
                {
                    "epoch": self.epoch,
                    "scan": scan,
                    "loss": mean,
                    "accuracy": accuracy,
                    "seconds": self.seconds,
                    "step": self.step,
                }
            )
            self.losses = []
            self.checkpoint(epoch_done=True)
            self.epoch += 1

    def train_epoch(self, per_epoch):
        """The steps of an epoch that are left."""
        self.model.train()
        begun = time.monotonic()
        before = self.seconds
        for batch in self.policy.watch(self.loader):
            for group in self.optimizer.param_groups:
                group["lr"] = rate_at(self.step, per_epoch, self.cfg, self.rank.world)
            with self.saving:
                loss = self.loss(self.model, batch)
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.step += 1
            self.losses.append(float(loss.detach()))
            self.seconds = before + time.monotonic() - begun
            self.stop = self.agree(self.asked or self.step == self.cfg.stop_after)
            if self.stop or self.step % self.cfg.save_every == 0:
                self.checkpoint()
            if self.stop:
                return


class Progress:
    """A line on where a run is, every few seconds, also while it waits, tunes or validates."""

    def __init__(self, run):
        self.run = run
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._print, daemon=True)

    def __enter__(self):
        if self.run.rank.rank == 0 and self.run.cfg.progress:
            self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()

    def _print(self):
        every = self.run.cfg.progress
        images = self.run.cfg.batch_size * self.run.rank.world
        before = self.run.step
        while not self.ended.wait(every):
            step = self.run.step
            recent = self.run.losses[-50:]
            loss = f"{math.fsum(recent) / len(recent):.3f}" if recent else "none yet"
            print(
                f"epoch {self.run.epoch + 1} of {self.run.cfg.epochs}, step {step}, loss {loss}, "
                f"{(step - before) * images / every:.0f} images/s, scan {self.run.level.value}",
                flush=True,
            )
            before = step


class Log:
    """Rows to OUT/log.jsonl, to TensorBoard if it is installed, and to the terminal; silent on
    ranks above 0.
    """

    def __init__(self, cfg, rank, epoch):
        self.path, self.board = os.path.join(cfg.out, "log.jsonl") if rank.rank == 0 else None, None
        if self.path is not None and os.path.exists(self.path):
            self._forget_from(epoch)
        with contextlib.suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(cfg.out) if self.path else None

    def _forget_from(self, epoch):
        """Drop rows that no checkpoint followed: a job that is killed then does its epoch again."""
        with open(self.path) as file:
            lines = [line for line in file if json.loads(line)["epoch"] < epoch]
        with open(f"{self.path}.new", "w") as file:
            file.writelines(lines)
        os.replace(f"{self.path}.new", self.path)

    def __call__(self, row):
        if self.path is None:
            return
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            "  ".join(
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in row.items()
            ),
            flush=True,
        )
        for name in ("loss", "accuracy", "seconds"):
            if self.board is not None and row[name] is not None:
                self.board.add_scalar(name, row[name], row["step"])


def is_finished(cfg):
    """Whether OUT holds this very run, done; a finished run with other settings is not touched."""
    known = os.path.join(cfg.out, "config.yaml")
    if not os.path.exists(known):
        return False
    before = OmegaConf.load(known)
    state = Checkpoints(before).load("cpu")
    if state is None or state["epoch"] < before.epochs:
        return False
    changed = [name for name in cfg if name not in HOW and cfg[name] != before.get(name)]
    if changed:
        raise SystemExit(
            f"train: {cfg.out} holds a finished run with other settings "
            f"({', '.join(changed)}); write out=ANOTHER_FOLDER"
        )
    return True


# Settings that do not change what comes out.
HOW = ("out", "workers", "decoders", "threads", "bandwidth", "progress", "save_every", "stop_after")


@hydra.main(config_path="../conf/train", config_name="config", version_base="1.3")
def main(cfg):
    if is_finished(cfg):
        print(f"{cfg.out} is finished; nothing is left to do")
        return
    rank = current()
    device = choose_device()
    if rank.world > 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank.rank, world_size=rank.world)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    run = Run(cfg, rank, device)
    run.restore()
    if rank.rank == 0:
        os.makedirs(cfg.out, exist_ok=True)
        OmegaConf.save(cfg, os.path.join(cfg.out, "config.yaml"))
    # SLURM's warning before the time limit: stop after the next step; the job is requeued and goes
    # on there. With a status that is not 0, by which scripts/slurm/train.slurm knows.
    signal.signal(signal.SIGUSR1, lambda *_: setattr(run, "asked", True))
    log = Log(cfg, rank, run.epoch)
    try:
        with Progress(run):
            run.train(log)
    finally:
        run.checkpoints.close()
    status = os.EX_TEMPFAIL if run.stop and run.step != cfg.stop_after else 0
    if dist.is_initialized():
        dist.destroy_process_group()
        # Gloo's threads outlive the group in DistributedDataParallel's reference cycles, and one
        # that wants the GIL while Python ends aborts the process: end without that phase.
        if log.board is not None:
            log.board.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
