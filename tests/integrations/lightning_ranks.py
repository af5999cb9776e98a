"""A job of two ranks under Lightning, run by test_lightning_resume.py.

Usage: lightning_ranks.py FOLDER ROOT STOP [CHECKPOINT]
"""

import json
import pathlib
import sys

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from test_lightning_resume import Interrupted, Recorder, loaders

folder, root, stop, *checkpoint = sys.argv[1:]
module = Recorder(int(stop) or None)
keep = ModelCheckpoint(dirpath=root, filename="last", save_top_k=-1, every_n_train_steps=1)
trainer = lightning.Trainer(
    max_epochs=3,
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=root,
    callbacks=[keep],
)
try:
    trainer.fit(module, *loaders(folder), ckpt_path=checkpoint[0] if checkpoint else None)
except Interrupted:
    print("interrupted")
path = pathlib.Path(root) / f"seen-{trainer.global_rank}-{stop}-{len(checkpoint)}.json"
path.write_text(json.dumps(module.seen))
