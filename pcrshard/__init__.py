"""Progressive Compressed Records as WebDataset shards: read only the fidelity that training needs.

``import pcrshard`` adds ``.pcr_scan(k)`` to ``wds.WebDataset``. Every other name is loaded at first
use, so that the import takes a tenth of a second.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import wrapt

from ._version import __version__
from .errors import PCRError

if TYPE_CHECKING:
    from .activation.compressor import compress_activations
    from .checkpoint.store import DeltaStore
    from .encoding.encode_dataset import EncodeOptions, encode
    from .encoding.shard_writer import ShardWriter
    from .fidelity.bandwidth import BandwidthTuner
    from .fidelity.tuner import ScanTuner
    from .format.dataset_index import DatasetIndex
    from .format.shard_format import ShardFormat
    from .format.shard_index import ShardIndex
    from .integrations.webdataset import pcr_decode, pcr_scan
    from .integrations.webdataset_decode import JpegHandler
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
    from .training.buckets import Buckets
    from .training.dataset import PCRDataset
    from .training.loader import PCRLoader
    from .training.shard_lists import shards, split_by_node
    from .upkeep.stage import stage

__all__ = [
    "BandwidthTuner",
    "Buckets",
    "DatasetIndex",
    "DeltaStore",
    "EncodeOptions",
    "ImageDecoder",
    "JpegHandler",
    "PCRDataset",
    "PCRError",
    "PCRLoader",
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

# The module of each name.
_HOMES = {
    "BandwidthTuner": "fidelity.bandwidth",
    "Buckets": "training.buckets",
    "DatasetIndex": "format.dataset_index",
    "DeltaStore": "checkpoint.store",
    "EncodeOptions": "encoding.encode_dataset",
    "ImageDecoder": "jpeg.image_decoder",
    "JpegHandler": "integrations.webdataset_decode",
    "PCRDataset": "training.dataset",
    "PCRLoader": "training.loader",
    "PrefixCache": "reading.prefix_cache",
    "ReadOptions": "reading.options",
    "Retry": "storage.retry",
    "ScanLevel": "reading.scan_level",
    "ScanTuner": "fidelity.tuner",
    "Shard": "reading.shard",
    "ShardFormat": "format.shard_format",
    "ShardIndex": "format.shard_index",
    "ShardWriter": "encoding.shard_writer",
    "View": "jpeg.views",
    "compress_activations": "activation.compressor",
    "decode_image": "jpeg.pixels",
    "encode": "encoding.encode_dataset",
    "join_scans": "jpeg.split",
    "open_dataset": "reading.dataset_folder",
    "pcr_decode": "integrations.webdataset",
    "pcr_scan": "integrations.webdataset",
    "shards": "training.shard_lists",
    "split_by_node": "training.shard_lists",
    "split_scans": "jpeg.split",
    "stage": "upkeep.stage",
}


def __getattr__(name: str) -> Any:
    if name == "hf":  # a module that is slow to import
        return importlib.import_module(".hf", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)


# WebDataset imports torch, which takes two seconds that `pcrshard info` or an encoding worker
# should not spend. So the methods are added when the user imports it, before or after pcrshard.
@wrapt.when_imported("webdataset")
def _add_fluent_methods(_webdataset: object) -> None:
    importlib.import_module(".integrations.webdataset", __name__)
