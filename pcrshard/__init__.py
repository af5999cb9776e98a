"""Progressive Compressed Records as WebDataset shards: read only the fidelity that training needs.

``import pcrshard`` adds ``.pcr_scan(k)`` to ``wds.WebDataset``. Names that need torch or WebDataset
are loaded when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import wrapt

from ._version import __version__
from .encoding.encode_dataset import EncodeOptions, encode
from .encoding.shard_writer import ShardWriter
from .errors import PCRError
from .fidelity.bandwidth import BandwidthTuner
from .format.dataset_index import DatasetIndex
from .format.shard_format import ShardFormat
from .format.shard_index import ShardIndex
from .jpeg.image_decoder import ImageDecoder
from .jpeg.pixels import decode_image
from .jpeg.split import join_scans, split_scans
from .jpeg.views import View
from .reading.dataset_folder import open_dataset
from .reading.options import ReadOptions
from .reading.prefix_cache import PrefixCache
from .reading.scan_level import ScanLevel
from .reading.shard import Shard
from .storage.retry import Retry
from .training.shard_lists import shards, split_by_node
from .upkeep.stage import stage

if TYPE_CHECKING:
    from .activation.compressor import compress_activations
    from .checkpoint.store import DeltaStore
    from .fidelity.tuner import ScanTuner
    from .integrations.webdataset import pcr_decode, pcr_scan
    from .integrations.webdataset_decode import JpegHandler
    from .training.dataset import PCRDataset
    from .training.epoch_order import EpochOptions

__all__ = [
    "BandwidthTuner",
    "DatasetIndex",
    "DeltaStore",
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
    "View",
    "__version__",
    "compress_activations",
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
    "DeltaStore": "checkpoint.store",
    "compress_activations": "activation.compressor",
    "pcr_scan": "integrations.webdataset",
    "pcr_decode": "integrations.webdataset",
    "JpegHandler": "integrations.webdataset_decode",
    "PCRDataset": "training.dataset",
    "EpochOptions": "training.epoch_order",
    "ScanTuner": "fidelity.tuner",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return list(__all__)


# WebDataset brings torch, two seconds that `pcrshard info` or an encoding worker should not pay.
# So the methods are added when the user imports it, before or after pcrshard.
@wrapt.when_imported("webdataset")
def _add_fluent_methods(_webdataset: object) -> None:
    importlib.import_module(".integrations.webdataset", __name__)
