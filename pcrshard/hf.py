"""``pcrshard.hf``: the short name of :mod:`pcrshard.integrations.huggingface`."""

from .integrations.huggingface import PcrBuilder, load_dataset

__all__ = ["PcrBuilder", "load_dataset"]
