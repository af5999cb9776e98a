"""Where scripts/train.py keeps its states: the last one as a file, or every epoch's as a delta."""

import os

import torch

from pcrshard import DeltaStore, storage
from pcrshard.checkpoint import Precision
from pcrshard.errorbound import PointwiseRelative, RelativeStd

# The optimizer's state needs fewer digits than the weights (docs/checkpoints.md).
OPTIMIZER_SHARE = 60


class Checkpoints:
    """The states of a run.

    With ``checkpoints=last`` there is one file, ``checkpoint.pt``. With ``checkpoints=delta`` each
    epoch's end is a version of the store OUT/checkpoints, written while the training goes on; in
    the middle of an epoch the file is written, so that a stopped run goes on exactly.

    Args:
        cfg: The settings.
    """

    def __init__(self, cfg):
        if cfg.checkpoints not in ("last", "delta"):
            raise ValueError(
                f"expected checkpoints=last or checkpoints=delta, got {cfg.checkpoints!r}"
            )
        self.path = os.path.join(cfg.out, "checkpoint.pt")
        self.url = os.path.join(cfg.out, "checkpoints")
        self.store = None
        if cfg.checkpoints == "delta":
            self.store = DeltaStore(self.url, precision(cfg.checkpoint_bound))

    def save(self, state, *, epoch_done):
        """Keep a state; only rank 0 does."""
        if epoch_done and self.store is not None:
            noted = {name: state[name] for name in ("epoch", "step")}
            self.store.save(state, metrics=noted)
        else:
            with storage.atomic_write(self.path) as file:
                torch.save(state, file)

    def load(self, device):
        """The state that is farthest, or ``None``; after an epoch's end the epoch is done."""
        found = None
        if os.path.exists(self.path):
            found = torch.load(self.path, map_location=device, weights_only=True)
        versions = [] if self.store is None else self.store.versions()
        # A version is of an epoch's end: at the same step it is farther than the file.
        if versions and (found is None or versions[-1].metrics["step"] >= found["step"]):
            found = self.store.load(map_location=device)
        return found

    def close(self):
        """Wait until everything is written."""
        if self.store is not None:
            self.store.close()


def precision(fraction):
    """What a store keeps whose weights have this error, as a fraction of their std."""
    if fraction is None:
        return "lossless"
    coarse = fraction * OPTIMIZER_SHARE
    return Precision(RelativeStd(fraction), RelativeStd(coarse), PointwiseRelative(coarse))
