"""Train a classifier from a PCR dataset, with any scan policy.

    python scripts/train.py data.train=shards/train data.val=shards/val policy=tuner epochs=20
    torchrun --nproc-per-node 2 scripts/train.py data.train=shards/train
    scripts/slurm/submit jean-zay train -- data.train=$SCRATCH/shards out=$WORK/run model=resnet50

The same command resumes a stopped run at the exact next batch. All settings are in conf/train/. The
log is OUT/log.jsonl, one line per epoch.
"""

import contextlib
import json
import math
import os
import signal
import sys
import time

import hydra
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from training.checkpoints import Checkpoints
from training.hardware import PRECISIONS, choose_device, precision_of
from training.models import MODELS

import pcrshard
from pcrshard import storage
from pcrshard.fidelity.bandwidth import BandwidthTuner, bytes_per_sample
from pcrshard.fidelity.schedule import ScanSchedule
from pcrshard.fidelity.tuner import ScanTuner
from pcrshard.training.ranks import current

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Attributes of a run that a checkpoint holds.
COUNTERS = ("step", "epoch", "seconds", "losses", "rows")


def make_loader(cfg, url, scan, decoder, *, training):
    """Return a loader of (images, labels)."""
    order = {"shuffle": False, "drop_last": False}
    if training:
        names = ("shuffle", "lanes_per_rank", "max_world_size")
        order = {name: cfg.data[name] for name in names}
    dataset = pcrshard.PCRDataset(
        url,
        scan=scan,
        decoder=decoder,
        fields=("jpg", "cls"),
        cache_dir=cfg.data.cache_dir,
        cache_bytes=cfg.data.cache_bytes,
        storage_options=cfg.data.storage_options and dict(cfg.data.storage_options),
    )
    return pcrshard.PCRLoader(
        dataset,
        cfg.batch_size,
        seed=cfg.seed,
        threads=None if cfg.workers else cfg.decoders,
        num_workers=cfg.workers,
        pin_memory=True,
        **order,
    )


def count_classes(cfg, dataset, val):
    """Return the number of outputs of the network."""
    if val is not None and val.classes != dataset.classes:
        raise SystemExit(
            f"train: data.val={cfg.data.val} has other classes than data.train={cfg.data.train}: "
            f"{', '.join(val.classes[:9])}, expected {', '.join(dataset.classes[:9])}"
        )
    if not dataset.num_classes:
        raise SystemExit(f"train: {cfg.data.train} has no classes: encode it with --classes FILE")
    return dataset.num_classes


def learning_rate(cfg, epoch, world):
    """Return the rate at a fraction of an epoch: linear warm-up (Goyal et al. 2017), then steps."""
    optim = cfg.optim
    drops = sum(epoch >= fraction * cfg.epochs for fraction in optim.milestones)
    warmup = min(epoch / optim.warmup_epochs, 1) if optim.warmup_epochs else 1
    return optim.lr * cfg.batch_size * world / 256 * warmup * optim.drop**drops


def make_policy(cfg, level, loader, loss):
    """Return the :class:`pcrshard.fidelity.ScanPolicy` that sets the level."""
    options = {name: value for name, value in cfg.policy.items() if name not in ("name", "scan")}
    if cfg.policy.name == "tuner":
        return ScanTuner(loader, loss, level, **options)
    if cfg.policy.name == "bandwidth":
        entries = loader.dataset.shards.entries
        return BandwidthTuner(level, bytes_per_sample(entries), **options)
    return ScanSchedule(level, dict(options.get("milestones", {0: cfg.policy.get("scan")})))


def evaluate(model, loader, prepare):
    """Return the fraction of images classified correctly, over all ranks."""
    model.eval()
    found = 0
    with torch.no_grad():
        for images, labels in map(prepare, loader):
            correct = (model(images).argmax(1) == labels).double()
            found += torch.stack((correct.sum(), torch.ones_like(correct).sum()))
    if dist.is_initialized():
        dist.all_reduce(found)
    return float(found[0] / found[1])


class Run:
    """A training run: the state that a checkpoint holds, and the loop.

    Attributes:
        asked: Whether this rank was asked to stop; ``stop`` is what all ranks have agreed on.
    """

    def __init__(self, cfg, rank, device):
        self.cfg, self.rank, self.device = cfg, rank, device
        self.level = pcrshard.ScanLevel(cfg.policy.get("scan", "highest"))
        scale = tuple(cfg.data.crop)
        random = pcrshard.ImageDecoder(cfg.size, "random", scale=scale, flip=cfg.data.flip)
        self.loader = make_loader(cfg, cfg.data.train, self.level, random, training=True)
        self.dataset = self.loader.dataset
        self.val = None
        if cfg.data.val:
            center = pcrshard.ImageDecoder(cfg.size, "center")
            self.val = make_loader(cfg, cfg.data.val, cfg.data.val_scan, center, training=False)
            if len(self.val.dataset) < rank.world:
                raise SystemExit(f"train: expected {rank.world} images or more in data.val")
        classes = count_classes(cfg, self.dataset, self.val and self.val.dataset)
        net = MODELS[cfg.model.name](classes).to(device, memory_format=torch.channels_last)
        self.model = net
        if dist.is_initialized():
            self.model = DistributedDataParallel(net)
        precision = precision_of(cfg.precision, device)
        self.autocast = PRECISIONS[precision]
        # fp16 has few exponents: small gradients would become 0 without scaling.
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        momentum, decay = cfg.optim.momentum, cfg.optim.weight_decay
        self.optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum, weight_decay=decay)
        self.saving = contextlib.nullcontext()
        if cfg.codec:
            self.saving = pcrshard.compress_activations(self.model, codec=cfg.codec)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=cfg.optim.label_smoothing)
        self.policy = make_policy(cfg, self.level, self.loader, self.loss)
        self.step = self.epoch = 0
        self.seconds, self.losses, self.rows = 0.0, [], []
        self.checkpoints = Checkpoints(cfg)
        self.parts = {
            "model": net,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "data": self.loader,
            "policy": self.policy,
        }
        self.asked = self.stop = False

    def prepare(self, batch):
        """Return a batch on the device: normalized images, and labels."""
        images, labels = (part.to(self.device, non_blocking=True) for part in batch)
        mean, std = (255 * images.new_tensor(each, dtype=torch.float) for each in (MEAN, STD))
        images = (images - mean[:, None, None]) / std[:, None, None]
        return images.contiguous(memory_format=torch.channels_last), labels

    def loss(self, model, batch):
        """Return the mean loss of a batch; ScanTuner differentiates it, too."""
        images, labels = self.prepare(batch)
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            return self.criterion(model(images), labels)

    def checkpoint(self):
        """Save everything that the next step depends on."""
        if self.rank.rank == 0:
            state = {name: part.state_dict() for name, part in self.parts.items()}
            state |= {name: getattr(self, name) for name in COUNTERS}
            state["torch"] = torch.get_rng_state()
            self.checkpoints.save(state, epoch_done=not self.losses)

    def restore(self):
        """Continue from a checkpoint, if there is one."""
        state = self.checkpoints.load(self.device)
        if state is not None:
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
            for name in COUNTERS:
                setattr(self, name, state[name])
            torch.set_rng_state(state["torch"].cpu())

    def log(self, row):
        """Add a row to OUT/log.jsonl; a killed job may have written rows that it did not save."""
        self.rows.append(row)
        if self.rank.rank == 0:
            with storage.atomic_write(os.path.join(self.cfg.out, "log.jsonl")) as file:
                file.writelines(f"{json.dumps(each)}\n".encode() for each in self.rows)
            print(row, flush=True)

    def train(self):
        """Train for the remaining epochs."""
        while self.epoch < self.cfg.epochs:
            if not self.losses:
                begun = time.monotonic()
                self.policy.step(model=self.model, epoch=self.epoch)
                self.seconds += time.monotonic() - begun  # tuning reads and computes, too
            self.train_epoch(len(self.loader))
            if self.stop:
                return
            self.log(
                {
                    "epoch": self.epoch,
                    "scan": self.level.value,
                    "loss": math.fsum(self.losses) / len(self.losses),
                    "accuracy": self.val and evaluate(self.model, self.val, self.prepare),
                    "seconds": self.seconds,
                    "step": self.step,
                }
            )
            self.losses = []
            self.epoch += 1
            self.checkpoint()

    def train_epoch(self, num_steps):
        """Train for the remaining steps of an epoch, of which a resumed run may have none."""
        self.loader.set_epoch(self.epoch)
        self.model.train()
        progress = tqdm(
            self.policy.watch(self.loader),
            f"epoch {self.epoch + 1} of {self.cfg.epochs}",
            num_steps,
            unit=" images",
            unit_scale=self.cfg.batch_size * self.rank.world,
            mininterval=self.cfg.progress,
            disable=self.rank.rank > 0 or not self.cfg.progress,
        )
        begun = time.monotonic() - self.seconds
        for batch in progress:
            rate = learning_rate(self.cfg, (self.step + 1) / num_steps, self.rank.world)
            self.optimizer.param_groups[0]["lr"] = rate
            with self.saving:
                loss = self.loss(self.model, batch)
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.step += 1
            self.losses.append(float(loss.detach()))
            self.seconds = time.monotonic() - begun
            progress.set_postfix(scan=self.level.value, loss=self.losses[-1], refresh=False)
            self.stop = self.agree_to_stop()
            if self.stop or self.step % self.cfg.save_every == 0:
                self.checkpoint()
            if self.stop:
                return

    def agree_to_stop(self):
        """Return whether any rank was asked to stop; the signal reaches ranks at other steps."""
        asked = self.asked or self.step == self.cfg.stop_after
        stop = torch.tensor(int(asked), device=self.device)
        if dist.is_initialized():
            dist.all_reduce(stop, dist.ReduceOp.MAX)
        return bool(stop)


@hydra.main(config_path="../conf/train", config_name="config", version_base="1.3")
def main(cfg):
    rank = current()
    device = choose_device()
    if rank.world > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank.rank, world_size=rank.world)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    run = Run(cfg, rank, device)
    run.restore()
    if run.epoch >= cfg.epochs:
        print(f"{cfg.out} is finished; to train with other settings, give another out=")
    elif rank.rank == 0:
        os.makedirs(cfg.out, exist_ok=True)
        OmegaConf.save(cfg, os.path.join(cfg.out, "config.yaml"))
    # SLURM sends this before the time limit. The job stops after the next step with a nonzero
    # status, by which scripts/slurm/train.slurm knows that it has to be requeued.
    signal.signal(signal.SIGUSR1, lambda *_: setattr(run, "asked", True))
    try:
        run.train()
    finally:
        run.checkpoints.close()
    status = os.EX_TEMPFAIL if run.stop and run.step != cfg.stop_after else 0
    if dist.is_initialized():
        dist.destroy_process_group()
        # Gloo's threads outlive the group in DistributedDataParallel's reference cycles, and one
        # that asks for the GIL during finalization aborts the process: skip finalization.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
