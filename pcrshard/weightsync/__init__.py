"""Send weights from a trainer to inference servers as sparse lossless patches."""

from .mirror import WeightMirror
from .mirror_file import read_consistent
from .publisher import WeightPublisher

__all__ = ["WeightMirror", "WeightPublisher", "read_consistent"]
