"""A job of two ranks under Lightning, run by test_lightning_resume.py: one that runs through, one
that is interrupted, and one that resumes from its last checkpoint.

Usage: lightning_ranks.py FOLDER ROOT STOP
"""

import json
import os
import pathlib
import sys

import torch.distributed as dist
from test_lightning_resume import fit, keeping, newest

folder, root, stop = sys.argv[1:]


def fit_two(name, **options):
    """The samples of each step of this rank."""
    target = pathlib.Path(root, name)
    how = {"callbacks": keeping(target, every_n_train_steps=1), "max_epochs": 3, "devices": 2}
    return fit(folder, target, strategy="ddp", **how, **options)


seen = {"through": fit_two("through"), "before": fit_two("stopped", stop=int(stop))}
dist.barrier()  # rank 0 writes the checkpoints
seen["after"] = fit_two("resumed", checkpoint=newest(pathlib.Path(root, "stopped")))
pathlib.Path(root, f"seen-{dist.get_rank()}.json").write_text(json.dumps(seen))
dist.barrier()
dist.destroy_process_group()
# DDP's cycle keeps gloo's threads; one that wants the GIL while Python ends aborts (PyTorch).
os._exit(0)
