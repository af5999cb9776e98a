"""A job of two ranks under Lightning, run by test_lightning_resume.py: one that runs through, one
that is interrupted, and one that resumes from its last checkpoint.

Usage: lightning_ranks.py FOLDER ROOT STOP
"""

import json
import os
import pathlib
import sys

import lightning
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from test_lightning_resume import Interrupted, Recorder, loaders

folder, root, stop = sys.argv[1:]


def fit(name, stop=None, checkpoint=None):
    """Train with a new model, loaders and trainer; return the samples of each step."""
    module = Recorder(stop)
    target = pathlib.Path(root, name)
    keep = ModelCheckpoint(dirpath=target, filename="last", save_top_k=-1, every_n_train_steps=1)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=target,
        callbacks=[keep],
    )
    try:
        trainer.fit(module, *loaders(folder), ckpt_path=checkpoint)
    except Interrupted:
        print("interrupted")
    return module.seen


seen = {"through": fit("through"), "before": fit("stopped", int(stop))}
dist.barrier()  # rank 0 writes the checkpoints
last = max(pathlib.Path(root, "stopped").glob("*.ckpt"), key=os.path.getmtime)
seen["after"] = fit("resumed", checkpoint=str(last))
pathlib.Path(root, f"seen-{dist.get_rank()}.json").write_text(json.dumps(seen))
dist.barrier()
dist.destroy_process_group()
# DDP's cycle keeps gloo's threads; one that wants the GIL while Python ends aborts (PyTorch).
os._exit(0)
