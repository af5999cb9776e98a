"""Training states kept as deltas within a bound: every version can be loaded."""

from .held_version import Bounds, HeldVersion
from .manifest import VersionRecord
from .store import DeltaStore

__all__ = ["Bounds", "DeltaStore", "HeldVersion", "VersionRecord"]
