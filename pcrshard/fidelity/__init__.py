"""Fidelity: measuring scans, and choosing the scan that a job reads while it trains.

``tuner`` needs torch and ``measure`` needs OpenCV: import them only where they are used.
"""

from ..reading.scan_level import ScanLevel
from .bandwidth import BandwidthTuner, bytes_per_sample
from .schedule import ScanPolicy, ScanSchedule

__all__ = [
    "BandwidthTuner",
    "ScanLevel",
    "ScanPolicy",
    "ScanSchedule",
    "bytes_per_sample",
]
