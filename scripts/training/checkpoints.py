"""The checkpoints of scripts/train.py: the last one as a file, or one per epoch as deltas."""

import os

import torch

from pcrshard import DeltaStore, storage
from pcrshard.checkpoint import Precision
from pcrshard.errorbound import PointwiseRelative, RelativeStd

# The optimizer's state needs fewer digits than the weights (docs/checkpoints.md).
OPTIMIZER_SHARE = 60


class Checkpoints:
    """The states of a run.

    With ``checkpoints=last`` there is one file, ``checkpoint.pt``. With ``checkpoints=delta`` the
    end of each epoch is a version of the store OUT/checkpoints, written in the background; in the
    middle of an epoch the file is written, so that a stopped run resumes exactly.

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
        """Save a state; for rank 0 only."""
        if epoch_done and self.store is not None:
            noted = {name: state[name] for name in ("epoch", "step")}
            self.store.save(state, metrics=noted)
        else:
            with storage.atomic_write(self.path) as file:
                torch.save(state, file)

    def load(self, device):
        """Return the state of the latest step, or ``None``."""
        found = None
        if os.path.exists(self.path):
            found = torch.load(self.path, map_location=device, weights_only=True)
        versions = [] if self.store is None else self.store.versions()
        # A version is saved at the end of an epoch: at the same step it is later than the file.
        if versions and (found is None or versions[-1].metrics["step"] >= found["step"]):
            found = self.store.load(map_location=device)
        return found

    def close(self):
        """Wait until everything is written."""
        if self.store is not None:
            self.store.close()


def precision(fraction):
    """Return the precision of a store whose weights may err by this fraction of their std."""
    if fraction is None:
        return "lossless"
    coarse = fraction * OPTIMIZER_SHARE
    return Precision(RelativeStd(fraction), RelativeStd(coarse), PointwiseRelative(coarse))
