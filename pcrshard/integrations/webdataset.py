"""WebDataset integration: ``.pcr_scan(k)``, ``.pcr_decode()``, and the stages behind them.

The reading stage replaces WebDataset's opener, tar expander and grouper: samples equal those of the
original tar, and later stages are unchanged. If ``select_files`` or ``rename_files`` is given, it
passes files to WebDataset's own ``group_by_keys``.
"""

from __future__ import annotations

import copy
import math
import random
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from threading import Event
from typing import Any, TypeVar
from urllib.parse import urlparse

from webdataset import (
    DataPipeline,
    WebDataset,
    WebLoader,
    cache,
    compat,
    filters,
    shardlists,
    tariterators,
)
from webdataset import utils as webdataset_utils
from webdataset.gopen import rewrite_url

from .. import storage
from ..errors import PCRError
from ..format.dataset_index import DatasetIndex, ShardEntry
from ..format.names import is_jpeg_field
from ..format.scan import FULL, check_scan, is_fraction
from ..format.scan_script import MAX_GROUPS
from ..jpeg.image_decoder import ImageDecoder
from ..jpeg.views import Crop, Side
from ..memory import borrow_array
from ..native import Layout
from ..native.pool import Pool, draw_keys
from ..reading.dataset_folder import open_dataset
from ..reading.options import ReadOptions
from ..reading.prefetch import prefetch
from ..reading.prefix import Prefix
from ..reading.scan_level import ScanChoice, ScanLevel, ScanOrFraction, current_scan, resolve_choice
from ..storage import file_name
from ..training.shard_lists import ShardOrder
from .webdataset_decode import JpegHandler, warn_of_shard
from .webdataset_files import Handler, Samples, ShardFiles

Entries = dict[str, ShardEntry]
# Items from the first stages of a pipeline: ``{"url": ...}``, or the URL.
Urls = Iterable[dict[str, Any] | str]
# Number of samples decoded together, and of such groups decoded ahead by threads.
_GROUP_SAMPLES = 32
_GROUPS_AHEAD = 2
_OPENERS = (cache.StreamingOpen, cache.FileCache)
Pipeline = TypeVar("Pipeline", bound=DataPipeline)
__all__ = [
    "JpegHandler",
    "WebDataset",
    "WebLoader",
    "pcr_decode",
    "pcr_decoded",
    "pcr_samples",
    "pcr_scan",
]


@dataclass(frozen=True)
class _StageOptions(ReadOptions):
    """Options of the reading stage; see :func:`pcr_scan`."""

    index: str | DatasetIndex | None = field(default=None, repr=False)
    handler: Handler = filters.reraise_exception
    select_files: Callable[[str], bool] | None = None
    rename_files: Callable[[str], str] | None = None


def _pcr_samples(source: Urls, scan: ScanChoice = FULL, **options: Any) -> Samples:
    """Yield samples from shard URLs."""
    stage = _StageOptions(**options)
    if stage.select_files is None and stage.rename_files is None:
        yield from filter(None, _read(source, scan, stage, ShardFiles.samples))
    else:
        files = _read(source, scan, stage, ShardFiles.files)
        yield from tariterators.group_by_keys(files, handler=stage.handler)


def _read(
    source: Urls,
    scan: ScanChoice,
    options: _StageOptions,
    contents: Callable[[ShardFiles, Prefix], Samples],
) -> Samples:
    """Yield the samples or files of each shard; an empty dict ends a shard."""
    urls = (item["url"] if isinstance(item, dict) else item for item in source)
    load = _Load(scan, options)
    ahead = prefetch(urls, load, depth=options.prefetch, max_bytes=options.prefetch_bytes)
    with closing(ahead) as loads:
        for url, future in loads:
            shard = ShardFiles(url, options.handler, options.select_files, options.rename_files)
            try:
                with load.at_level(future.result()) as loaded:
                    yield from contents(shard, loaded)
                yield {}
            except Exception as error:  # as WebDataset does
                if shard.handler_raised:
                    raise
                if error is shard.last_error or not shard.on_error(error):
                    return


class _Load:
    """Loads the prefix of a shard at the current scan."""

    def __init__(self, scan: ScanChoice, options: _StageOptions) -> None:
        self.options = options
        self.entries = _entries(options.index, options.storage_options, options.retry)
        self.scan = scan
        if self.entries:
            self.scan = resolve_choice(list(self.entries.values()), scan, "the dataset of index=")

    def __call__(self, url: str, cancel: Event) -> Prefix:
        path = _path(url)
        entry = self.entries.get(file_name(path))
        return self.options.open(path, entry).load(current_scan(self.scan), cancel=cancel)

    def at_level(self, loaded: Prefix) -> Prefix:
        """Return a prefix that was read ahead at the current scan."""
        return loaded.shard.change_scan(loaded, current_scan(self.scan))


def _path(url: str) -> str:
    """Return the URL or path that WebDataset would open.

    It is rewritten by GOPEN_REWRITE; local URLs lose scheme, query and fragment.
    """
    url = storage.plain_path(rewrite_url(url))
    if not storage.is_local(url) or storage.exists(url):
        return url
    return urlparse(url).path


def _entries(
    index: str | DatasetIndex | None,
    options: storage.Options,
    retry: storage.Retry | None,
) -> Entries:
    """Return the shards' entries by file name. One request if ``index`` is a URL."""
    if index is None:
        return {}
    if not isinstance(index, DatasetIndex):
        index, _ = open_dataset(index, storage_options=options, retry=retry)
    return {entry.name: entry for entry in index.shards}


# Stages must pickle, so the stage and its factory need different names.
pcr_samples = filters.pipelinefilter(_pcr_samples)


def pcr_scan(scan: ScanOrFraction = FULL, **options: Any) -> Any:
    """Return a WebDataset stage that reads PCR shards at a scan: shard URLs in, samples out.

    Use it in ``wds.DataPipeline`` instead of ``tarfile_to_samples()``. In the fluent interface
    write ``WebDataset(urls).pcr_scan(5)``.

    Args:
        scan: 1..N, ``"full"``, 0 for labels and metadata without images, a :class:`ScanLevel`,
            which is consulted at each shard, or, with ``index``, a fraction in (0, 1): the highest
            scan that takes at most that fraction of the full bytes.
        options: ``handler``, ``select_files`` and ``rename_files`` as in WebDataset; ``index``, a
            dataset folder, its ``pcr.json`` or a :class:`DatasetIndex`, which saves one small
            request per shard; ``check=False`` to skip checksums; ``storage_options`` for fsspec;
            ``retry``, a :class:`Retry`; ``prefetch``, number of shards to read ahead (2), and
            ``prefetch_bytes``, an upper bound of their size (256 MiB); ``cache_dir`` and
            ``cache_bytes``, a local folder that caches prefixes, and its upper bound.

    Returns:
        A callable from an iterator of ``{"url": ...}`` to an iterator of samples; it can be
        pickled.
    """
    _check_scan_type(scan, options.get("index"))
    # Raise errors for invalid options here, not in a worker. Kept per job, because each epoch and
    # worker recreates the options.
    options = {"begun": time.time(), **options}
    _StageOptions(**options)
    return pcr_samples(scan, **options)


def _check_scan_type(scan: Any, index: object) -> None:
    is_level = isinstance(scan, ScanLevel)
    if is_fraction(scan) or (is_level and scan.is_fraction):
        if index is None:
            raise ValueError(f"expected index= with {scan=}, a fraction of a dataset's bytes")
    elif not is_level:
        check_scan(scan, MAX_GROUPS, 0)


def _fluent_pcr_scan(self: Pipeline, scan: ScanOrFraction = FULL, **options: Any) -> Pipeline:
    """Read PCR shards at a scan: ``WebDataset(urls).pcr_scan(5)``.

    It may come before or after ``.shuffle()``, ``.decode()`` and similar stages. It uses the
    handler, ``select_files`` and ``rename_files`` given to ``WebDataset``. See
    :func:`pcrshard.pcr_scan` for the arguments.

    Raises:
        TypeError: This is not a ``WebDataset`` that opens tars.
    """
    _check_scan_type(scan, options.get("index"))
    if isinstance(self, WebLoader):
        raise TypeError(
            "pcr_scan belongs on the WebDataset that the WebLoader loads: "
            "WebDataset(urls).pcr_scan(5)"
        )
    opener, inherited = _find_opener(self.pipeline)
    result = copy.copy(self)
    result.pipeline = _with_order(self.pipeline[: opener.start])
    result.pipeline.append(pcr_scan(scan, **inherited | options))
    result.pipeline += self.pipeline[opener.stop :]
    return result


def _with_order(stages: list[Any]) -> list[Any]:
    """Return the stages of a shard list, with the :class:`ShardOrder` restored."""
    order = _order_of(stages[0]) if stages else None
    if order is not None:
        stages = [order, *stages[1:]]
    for stage in stages:
        shuffles = _function(stage) is filters._shuffle and any(stage.args) and "seed" in stage.kw
        if shuffles or (isinstance(stage, filters.detshuffle) and stage.bufsize):
            warnings.warn(
                "WebDataset's shardshuffle repeats the same order of shards every epoch, and so "
                "does detshuffle=True where workers are started for each epoch; write "
                "WebDataset(pcrshard.shards(urls), shardshuffle=False), or use PCRDataset",
                stacklevel=4,
            )
    return stages


def _order_of(stage: Any) -> ShardOrder | None:
    """Return the order that was given to WebDataset, which stores a list of its URLs."""
    if not isinstance(stage, shardlists.SimpleShardList):
        return None
    orders = {getattr(url, "order", None) for url in stage.urls}
    order = orders.pop()
    whole = not orders and order is not None and len(order) == len(stage.urls)
    return order if whole else None


def _function(stage: Any) -> Any:
    """Return the function inside a WebDataset filter stage; ``None`` for other stages."""
    return getattr(stage, "f", None)


def _find_opener(pipeline: list[Any]) -> tuple[slice, dict[str, Any]]:
    """Return the stages that open and expand tars, and their options."""
    functions = [_function(stage) for stage in pipeline]
    if _pcr_samples in functions:
        raise TypeError("pcr_scan was already applied to this pipeline")
    if tariterators.tarfile_samples in functions:
        position = functions.index(tariterators.tarfile_samples)
        return slice(position, position + 1), dict(pipeline[position].kw)
    openers = [stage for stage in pipeline if isinstance(stage, _OPENERS)]
    if not openers:
        raise TypeError(
            "pcr_scan expected a pipeline that opens tars, WebDataset(urls); "
            "in a DataPipeline use the stage pcrshard.pcr_scan(5) "
            "after the shard list and splitters"
        )
    opener = openers[0]
    place = slice(pipeline.index(opener), pipeline.index(opener) + 3)
    if functions[place] != [None, tariterators.tar_file_expander, tariterators.group_by_keys]:
        raise TypeError(
            "pcr_scan cannot keep a stage that stands between the opener and the tar expander"
        )
    if isinstance(opener, cache.FileCache):
        raise TypeError(
            "WebDataset's cache_dir downloads whole shards and tells them apart by file name only;"
            " leave it out of WebDataset(...) and give it to pcr_scan, which keeps prefixes: "
            ".pcr_scan(5, cache_dir=...)"
        )
    given = pipeline[place][1].kw
    inherited = {name: given.get(name) for name in ("select_files", "rename_files")}
    return place, inherited | {"handler": opener.handler}


def _pcr_decode(
    source: Iterable[dict[str, Any]],
    decoder: ImageDecoder,
    seed: int | None,
    handler: Handler,
    threads: int,
) -> Samples:
    """Decode the JPEG fields of samples to arrays."""
    rank, _, worker, _ = webdataset_utils.pytorch_worker_info()
    parts = (random.getrandbits(64) if seed is None else seed, rank, worker)
    # Images of one size are decoded together, which is cheaper per image.
    size = _GROUP_SAMPLES if decoder.is_sized else 1
    ahead = _GROUPS_AHEAD if threads else 0
    begun: deque[Iterator[dict[str, Any] | PCRError]] = deque()
    with Pool(threads) as pool:
        for number, (samples, error) in enumerate(_groups(source, size)):
            ids = range(number * size, number * size + len(samples))
            begun.append(_decoded(samples, decoder, pool, draw_keys(parts, ids)))
            while begun and (error or len(begun) > ahead):
                for found in begun.popleft():
                    if not isinstance(found, PCRError):
                        yield found
                    elif not handler(found):
                        return
            if isinstance(error, Exception):
                raise error


def _groups(
    source: Iterable[dict[str, Any]], size: int
) -> Iterator[tuple[list[dict[str, Any]], Exception | bool]]:
    """Yield groups of samples to decode together, and what follows each.

    That is False for more samples, True for the end, or an error of the previous stage, which is
    raised after the samples that preceded it.
    """
    samples: list[dict[str, Any]] = []
    after: Exception | bool = True
    try:
        for sample in source:
            samples.append(sample)
            if len(samples) == size:
                yield samples, False
                samples = []
    except Exception as error:  # raised later
        after = error
    yield samples, after


def _decoded(
    samples: list[dict[str, Any]],
    decoder: ImageDecoder,
    pool: Pool,
    keys: list[int],
) -> Iterator[dict[str, Any] | PCRError]:
    """Start decoding; yield the decoded samples, or the error of a sample."""
    jpegs: list[bytes] = []
    # All images of a sample share their random numbers, so that an image and its mask match.
    keys_of: list[int] = []
    # For each sample, the place of each image field among the images.
    places: list[dict[str, int]] = []
    for sample, key in zip(samples, keys, strict=True):
        own = {}
        for name, value in sample.items():
            if isinstance(value, bytes) and (is_jpeg_field(name) or warn_of_shard(name, value)):
                own[name] = len(jpegs)
                jpegs.append(value)
                keys_of.append(key)
        places.append(own)
    arrays = None
    if decoder.is_sized:
        shapes = decoder.batch_shapes(len(jpegs))
        arrays = [borrow_array(math.prod(shape)).reshape(shape) for shape in shapes]
    result = decoder.begin_jpegs(pool, jpegs, keys_of, arrays)

    def results() -> Iterator[dict[str, Any] | PCRError]:
        for sample, own in zip(samples, places, strict=True):
            try:
                found = {name: result(place) for name, place in own.items()}
            except PCRError as error:
                error.args = (*error.args, sample.get("__key__"), sample.get("__url__"))
                yield error
            else:
                yield sample | found

    return results()


pcr_decoded = filters.pipelinefilter(_pcr_decode)


def pcr_decode(
    size: Side = None,
    crop: Crop = None,
    layout: Layout = "chw",
    *,
    seed: int | None = None,
    threads: int = 0,
    handler: Handler = filters.reraise_exception,
    **options: Any,
) -> Any:
    """Return a WebDataset stage that decodes, crops and resizes every JPEG field to uint8.

    In the fluent interface: ``WebDataset(urls).pcr_scan(5).pcr_decode(size=224, crop="random")``.
    Other fields are unchanged; add ``.decode(partial=True)`` after it to decode labels.

    Args:
        size: Side, or (height, width), of the result in pixels.
        crop: ``random``, ``center`` or ``None``; see :class:`ImageDecoder`.
        layout: ``chw`` or ``hwc``.
        seed: Seed of the crops, which differ by rank and worker; by default random. All images of a
            sample have the same crop and flip.
        threads: Threads that decode in the background if ``size`` is given; by default the calling
            thread decodes.
        handler: As in WebDataset.
        options: Other arguments of :class:`ImageDecoder`.

    Returns:
        A callable from an iterator of samples to an iterator of samples; it can be pickled.
    """
    decoder = ImageDecoder(size, crop, layout=layout, **options)
    return pcr_decoded(decoder, seed, handler, threads)


def _fluent_pcr_decode(self: Any, *args: Any, **options: Any) -> Any:
    """Decode, crop and resize JPEG fields; see :func:`pcrshard.pcr_decode`."""
    return self.compose(pcr_decode(*args, **options))


# Importing this module adds the fluent methods; `import pcrshard` does so when WebDataset is
# imported.
compat.FluidInterface.pcr_scan = _fluent_pcr_scan
compat.FluidInterface.pcr_decode = _fluent_pcr_decode
