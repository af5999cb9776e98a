"""Progressive Compressed Records as WebDataset shards: read only the JPEG fidelity that training needs.

``import pcrshard`` adds ``.pcr_scan(k)`` to ``wds.WebDataset``. Names that need torch or WebDataset are loaded when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._on_import import on_import
from ._version import __version__
from .batches import ReadOptions
from .cache import PrefixCache
from .dataset_index import DatasetIndex
from .decoder import ImageDecoder
from .encode import EncodeOptions, encode
from .errors import PCRError
from .fidelity.bandwidth import BandwidthTuner
from .fidelity.level import ScanLevel
from .index import ShardIndex
from .jpeg import join_scans, split_scans
from .pixels import decode_image
from .reader import Shard, open_dataset
from .retry import Retry
from .shardlists import shards, split_by_node
from .stage import stage
from .writer import ShardFormat, ShardWriter

if TYPE_CHECKING:
    from .dataset import EpochOptions, PCRDataset
    from .fidelity.tuner import ScanTuner
    from .wds import JpegHandler, pcr_decode, pcr_scan

__all__ = [
    "BandwidthTuner",
    "DatasetIndex",
    "EncodeOptions",
    "EpochOptions",
    "ImageDecoder",
    "JpegHandler",
    "PCRDataset",
    "PCRError",
    "PrefixCache",
    "ReadOptions",
    "Retry",
    "ScanLevel",
    "ScanTuner",
    "Shard",
    "ShardFormat",
    "ShardIndex",
    "ShardWriter",
    "__version__",
    "decode_image",
    "encode",
    "join_scans",
    "open_dataset",
    "pcr_decode",
    "pcr_scan",
    "shards",
    "split_by_node",
    "split_scans",
    "stage",
]

_LAZY = {
    "pcr_scan": "wds",
    "pcr_decode": "wds",
    "JpegHandler": "wds",
    "PCRDataset": "dataset",
    "EpochOptions": "dataset",
    "ScanTuner": "fidelity.tuner",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)


on_import("webdataset", lambda: importlib.import_module(".wds", __name__))
