"""Versions of a network for others: plain files, of which each reader takes what it lacks."""

from .publishing import Published, publish
from .pulling import Pulled, pull

__all__ = ["Published", "Pulled", "publish", "pull"]
