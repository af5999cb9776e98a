"""Checkpoint stores, pulls, exports, and weight sync, exact or within stated error bounds."""

from .choose_bound import choose_bound
from .codec import Precision
from .pull import pull
from .recover import recover
from .safetensors_file import export_safetensors
from .store import DeltaStore
from .version_file import VersionRecord

__all__ = [
    "DeltaStore",
    "Precision",
    "VersionRecord",
    "choose_bound",
    "export_safetensors",
    "pull",
    "recover",
]
