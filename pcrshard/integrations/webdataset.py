"""The one door to WebDataset: ``.pcr_scan(k)``, ``.pcr_decode()``, and the stages behind them.

The reading stage takes the place of WebDataset's opener, tar expander and grouper: samples come out
as they would from the original tar, and every later stage is stock. Where ``select_files`` or
``rename_files`` are given, it hands files to WebDataset's own ``group_by_keys``.
"""

from __future__ import annotations

import copy
import inspect
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
from ..format.scan import FULL, check_scan_type, is_fraction
from ..jpeg.image_decoder import Decoding, ImageDecoder, Layout
from ..jpeg.views import Crop, Side
from ..memory import borrow_array
from ..native.pool import Pool, draw_keys
from ..reading.dataset_folder import open_dataset
from ..reading.options import ReadOptions
from ..reading.prefetch import prefetch
from ..reading.prefix import Prefix
from ..reading.scan_level import ScanChoice, ScanLevel, ScanOrFraction, current_scan, resolve_choice
from ..storage import file_name
from ..training import ranks
from ..training.shard_lists import ShardOrder, SplitByNode
from .webdataset_decode import JpegHandler, warn_of_shard
from .webdataset_files import Handler, Samples, ShardFiles

Entries = dict[str, ShardEntry]
# What the first stages of a pipeline give: ``{"url": ...}``, or the URL.
Urls = Iterable[dict[str, Any] | str]
# Samples that are decoded together, and how many groups of them are decoded ahead by threads.
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
    """How the stage reads shards; see :func:`pcr_scan`."""

    index: str | DatasetIndex | None = field(default=None, repr=False)
    handler: Handler = filters.reraise_exception
    select_files: Callable[[str], bool] | None = None
    rename_files: Callable[[str], str] | None = None


def _pcr_samples(source: Urls, scan: ScanChoice = FULL, **options: Any) -> Samples:
    """The stage: shard URLs in, samples out."""
    _warn_of_lost_shards(source)
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
    """The samples or the files of each shard; an empty dict ends a shard."""
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
    """Loads the prefix of a shard, at the scan of the moment."""

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
        """What was read ahead, at the scan of now."""
        return loaded.shard.change_scan(loaded, current_scan(self.scan))


def _path(url: str) -> str:
    """What to open for a URL, as WebDataset would.

    Rewritten by GOPEN_REWRITE; a local one without scheme, query and fragment.
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


# Two names, because a stage must pickle: the function by its own name, the factory by another.
pcr_samples = filters.pipelinefilter(_pcr_samples)


def pcr_scan(scan: ScanOrFraction = FULL, **options: Any) -> Any:
    """A WebDataset stage that reads PCR shards at a scan: shard URLs in, samples out.

    For ``wds.DataPipeline``, in place of ``tarfile_to_samples()``. In the fluent interface write
    ``WebDataset(urls).pcr_scan(5)``.

    Args:
        scan: 1..N, ``"full"``, 0 for labels and metadata without images, a
            :class:`ScanLevel`, which is read at each shard, or, with ``index``, a fraction in
            (0, 1): the highest scan that takes at most that fraction of the full bytes.
        options: ``handler``, ``select_files`` and ``rename_files`` as in WebDataset; ``index``, a
            dataset folder, its ``pcr.json`` or a :class:`DatasetIndex`, which saves one small
            request per shard; ``check=False`` to skip checksums; ``storage_options`` for fsspec;
            ``retry``, a :class:`Retry`; ``prefetch``, shards that are read ahead (2), and
            ``prefetch_bytes``, their bound (256 MiB); ``cache_dir`` and ``cache_bytes``, a folder
            on local disk that keeps prefixes, and its bound.

    Returns:
        A callable from an iterator of ``{"url": ...}`` to an iterator of samples; it can be
        pickled.
    """
    _check_scan_type(scan, options.get("index"))
    # Wrong options are an error here, not in a worker.
    # Of the job, not of each epoch or worker, which make these options anew.
    options = {"begun": time.time(), **options}
    _StageOptions(**options)
    return pcr_samples(scan, **options)


def _check_scan_type(scan: Any, index: object) -> None:
    is_level = isinstance(scan, ScanLevel)
    if is_fraction(scan) or (is_level and scan.is_fraction):
        if index is None:
            raise ValueError(f"expected index= with {scan=}, a fraction of a dataset's bytes")
    elif not is_level:
        check_scan_type(scan, 0)


def _fluent_pcr_scan(self: Pipeline, scan: ScanOrFraction = FULL, **options: Any) -> Pipeline:
    """Read PCR shards at a scan: ``WebDataset(urls).pcr_scan(5)``.

    May stand before or after ``.shuffle()``, ``.decode()`` and the like. Handler, ``select_files``
    and ``rename_files`` are those given to ``WebDataset``. See :func:`pcrshard.pcr_scan` for the
    arguments.

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
    """The stages of a shard list, with a :class:`ShardOrder` in place of the list made of it."""
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
    """The order that was given to WebDataset, which keeps a list of its URLs."""
    if not isinstance(stage, shardlists.SimpleShardList):
        return None
    orders = {getattr(url, "order", None) for url in stage.urls}
    order = orders.pop()
    whole = not orders and order is not None and len(order) == len(stage.urls)
    return order if whole else None


def _warn_of_lost_shards(source: Any) -> None:
    """Warn of shards that were shuffled before workers or ranks took their parts of them.

    An unseeded shuffle has another order in each process, so that the parts overlap.
    """
    split = False
    while inspect.isgenerator(source):
        arguments = inspect.getgeneratorlocals(source)
        name = source.__name__
        if name == "_shuffle" and arguments.get("rng") is arguments.get("seed") is None and split:
            warnings.warn(
                "shards are shuffled in another order in each worker and rank, and then split: "
                "some are read twice and others never; shuffle after split_by_worker, or begin "
                "the pipeline with pcrshard.shards(urls), which has one order for all",
                stacklevel=2,
            )
        split = split or (name in _SPLITTERS and _takes_a_part(name))
        source = next(filter(inspect.isgenerator, arguments.values()), None)


_BY_WORKER = shardlists.split_by_worker.__name__
_SPLITTERS = {
    _BY_WORKER,
    shardlists.split_by_node.__name__,
    SplitByNode.__call__.__name__,
}


def _takes_a_part(splitter: str) -> bool:
    _, world, _, workers = webdataset_utils.pytorch_worker_info()
    if splitter == _BY_WORKER:
        return int(workers) > 1
    return max(int(world), ranks.current().world) > 1


def _function(stage: Any) -> Any:
    """What a stage that WebDataset made of a function calls; ``None`` for other stages."""
    return getattr(stage, "f", None)


def _find_opener(pipeline: list[Any]) -> tuple[slice, dict[str, Any]]:
    """The stages that open and expand tars, and the options they were given."""
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
    """The stage: JPEG fields of samples to arrays."""
    rank, _, worker, _ = webdataset_utils.pytorch_worker_info()
    parts = (random.getrandbits(64) if seed is None else seed, rank, worker)
    # Images of one size are decoded together, which costs less for each of them.
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
    """Samples that are decoded together, and what comes after them.

    That is False for other samples, True for the end, or the error of the stage before, which is
    raised after the samples that came before it.
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
    """Begin to decode; the samples are those that come of it, or the error of a sample."""
    images = [
        (place, name)
        for place, sample in enumerate(samples)
        for name, value in sample.items()
        if isinstance(value, bytes) and (is_jpeg_field(name) or warn_of_shard(name, value))
    ]
    # Each image of a sample has the same draws, so that a mask is cropped as its image is.
    jpegs = [samples[place][name] for place, name in images]
    arrays = None
    if decoder.is_sized:
        shapes = decoder.batch_shapes(len(jpegs))
        arrays = [borrow_array(math.prod(shape)).reshape(shape) for shape in shapes]
    decoding = Decoding(decoder, pool, jpegs, [keys[place] for place, _ in images], arrays)

    def results() -> Iterator[dict[str, Any] | PCRError]:
        for place, sample in enumerate(samples):
            own = {name: spot for spot, (owner, name) in enumerate(images) if owner == place}
            try:
                found = {name: decoding[spot] for name, spot in own.items()}
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
    """A WebDataset stage that decodes, crops and resizes every JPEG field in one go, to uint8.

    In the fluent interface: ``WebDataset(urls).pcr_scan(5).pcr_decode(size=224, crop="random")``.
    Other fields stay as they are; put ``.decode(partial=True)`` after it for labels.

    Args:
        size: Side, or (height, width), of the result in pixels.
        crop: ``random``, ``center`` or ``None``; see :class:`ImageDecoder`.
        layout: ``chw`` or ``hwc``.
        seed: Seed of the crops, which differ by rank and worker; by default they differ every time.
            All images of a sample have the same crop and flip.
        threads: Threads that decode while the loop uses earlier samples, if ``size`` is given; by
            default the thread that asks decodes.
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


# Importing this module is what adds the fluent methods; `import pcrshard` does so when WebDataset
# is imported.
compat.FluidInterface.pcr_scan = _fluent_pcr_scan
compat.FluidInterface.pcr_decode = _fluent_pcr_decode
