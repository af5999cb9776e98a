"""Choosing fidelity: a scan that may change while a job trains."""

from .level import ScanLevel

__all__ = ["ScanLevel"]
