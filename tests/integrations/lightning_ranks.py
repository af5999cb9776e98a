"""A job of two ranks under Lightning, run by test_lightning_resume.py: one that runs through, one
that is interrupted, and one that resumes from its last checkpoint; then a validation.

Usage: lightning_ranks.py FOLDER ROOT STOP
"""

import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist
from lightning_jobs import make_module, make_trainer
from numbered import scan_of
from test_lightning_resume import Recorder, fit, keeping, newest

from pcrshard import PCRDataset, PCRLoader

folder, root, stop = sys.argv[1:]


def fit_two(name, **options):
    """The samples of each step of this rank."""
    target = pathlib.Path(root, name)
    how = {"callbacks": keeping(target, every_n_train_steps=1), "max_epochs": 3, "devices": 2}
    return fit(folder, target, strategy="ddp", **how, **options)


seen = {"through": fit_two("through"), "before": fit_two("stopped", stop=int(stop))}
dist.barrier()  # rank 0 writes the checkpoints
seen["after"] = fit_two("resumed", checkpoint=newest(pathlib.Path(root, "stopped")))


class Sums(Recorder):
    """Logs the sum and the number of the labels of all ranks, which wait for each other for it."""

    def validation_step(self, batch, _):
        (labels,) = batch
        found = {"sum": labels.sum().float(), "count": torch.tensor(float(len(labels)))}
        self.log_dict(found, sync_dist=True, reduce_fx="sum", batch_size=len(labels))


dataset = PCRDataset(folder, scan=scan_of(folder, 1), fields=("cls",))
trainer = make_trainer(pathlib.Path(root, "validated"), devices=2, strategy="ddp")
seen["sums"] = []
for size in (2, 3, 13, 16, 17):
    loader = PCRLoader(dataset.subset(range(size)), 2, shuffle=False)
    (logged,) = trainer.validate(make_module(Sums), loader, verbose=False)
    seen["sums"].append([size, logged["count"], logged["sum"]])
pathlib.Path(root, f"seen-{dist.get_rank()}.json").write_text(json.dumps(seen))
dist.barrier()
dist.destroy_process_group()
# DDP's cycle keeps gloo's threads; one that wants the GIL while Python ends aborts (PyTorch).
os._exit(0)
