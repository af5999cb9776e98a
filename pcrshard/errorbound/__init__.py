"""Error-bounded coding: what checkpoints and activations share."""
