"""Choosing fidelity: a scan that may change while a job trains, and what changes it.

``tuner`` needs torch and ``measure`` torchmetrics: import them where they are used.
"""

from ..reading.scan_level import ScanLevel
from .bandwidth import BandwidthTuner, bytes_per_sample
from .schedule import ScanPolicy, ScanSchedule, scan_at

__all__ = [
    "BandwidthTuner",
    "ScanLevel",
    "ScanPolicy",
    "ScanSchedule",
    "bytes_per_sample",
    "scan_at",
]
