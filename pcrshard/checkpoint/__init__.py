"""Checkpoint stores, pulls and exports, exact or within stated error bounds.

The names are in ``__init__.pyi`` and loaded at first use: listing versions needs no torch.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
