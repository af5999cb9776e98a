"""WebDataset integration: ``.pcr_scan(k)``, ``.pcr_decode()``, and a handler for ``.decode()``.

The reading stage replaces WebDataset's opener, tar expander and grouper: samples equal those of the
original tar, and later stages are unchanged. If ``select_files`` or ``rename_files`` is given, it
passes files to WebDataset's own ``group_by_keys``.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import random
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from webdataset import (
    DataPipeline,
    autodecode,
    cache,
    compat,
    filters,
    shardlists,
    tariterators,
)
from webdataset import utils as webdataset_utils
from webdataset.gopen import rewrite_url

from .. import storage
from ..errors import FormatError, ScanUnavailable, StorageError, TruncatedShard, naming
from ..format.dataset_index import DatasetIndex, ShardEntry
from ..format.names import is_jpeg_field
from ..format.scan import FULL, Scan, check_scan, is_fraction
from ..format.scan_script import MAX_GROUPS
from ..format.schema import Schema
from ..format.shard_head import MAGIC
from ..jpeg.image_decoder import Decoded, ImageDecoder
from ..jpeg.other_formats import to_picture
from ..jpeg.picture_size import picture_size
from ..jpeg.pixels import SMOOTHING, decode_image
from ..jpeg.views import Crop, Side
from ..memory import borrow_array
from ..native import PixelLayout
from ..native.pool import Pool, draw_keys
from ..reading.dataset_folder import entries_by_name, open_dataset
from ..reading.field_values import convert
from ..reading.options import ReadOptions
from ..reading.prefetch import prefetch
from ..reading.prefix import Prefix, number_lists
from ..reading.scan_level import ScanLevel, ScanOrFraction, current_scan, resolve_choice
from ..reading.shard import Shard
from ..redaction import redact_url
from ..training.shard_lists import EpochCounter, ShardOrder
from ..training.spatial import check_kinds, follow

Handler = Callable[[Exception], bool]
Samples = Iterator[dict[str, Any]]
# Items from the first stages of a pipeline: ``{"url": ...}``, or the URL.
Urls = Iterable[dict[str, Any] | str]
# Number of samples decoded together, which is cheaper, and of such groups decoded ahead by threads.
_GROUP_SAMPLES = 32
_GROUPS_AHEAD = 2
Pipeline = TypeVar("Pipeline", bound=DataPipeline)


@dataclass(frozen=True)
class _StageOptions(ReadOptions):
    """Options of the reading stage; see :func:`pcr_scan`."""

    index: str | os.PathLike[str] | DatasetIndex | None = field(default=None, repr=False)
    handler: Handler = filters.reraise_exception
    select_files: Callable[[str], bool] | None = None
    rename_files: Callable[[str], str] | None = None
    quality: float | None = None


class _Stopped(Exception):
    """A handler ended the iteration."""


def _handle(handler: Handler, details: tuple[Any, ...], error: Exception) -> bool:
    """Call a handler, which raises or returns whether to continue.

    Returns:
        True: continue.

    Raises:
        _Stopped: The handler says to stop.
    """
    error.args += details
    if not handler(error):
        raise _Stopped
    return True


def _pcr_samples(source: Urls, scan: Scan | ScanLevel = FULL, **options: Any) -> Samples:
    """Yield samples from shard URLs."""
    stage = _StageOptions(**options)
    entries = _entries(stage)
    scan_of = _scan_of(stage, scan, list(itertools.chain.from_iterable(entries.values())))

    def places() -> Iterator[tuple[str, str, ShardEntry | None]]:
        for url in map(_url_of, source):
            # What WebDataset would open: rewritten by GOPEN_REWRITE, local paths without a scheme.
            path = storage.plain_path(rewrite_url(url)).removeprefix("file:")
            own: Sequence[ShardEntry | None] = entries.get(storage.file_name(path), [])
            for entry in own or [None]:
                yield url, path, entry

    def load(place: tuple[str, str, ShardEntry | None], cancel: Event) -> Prefix:
        _, path, entry = place
        return stage.open(path, entry).load(scan_of(path), cancel=cancel)

    with suppress(_Stopped), closing(prefetch(places(), load, depth=stage.prefetch)) as loads:
        for (url, path, entry), future in loads:
            on_error = partial(_handle, stage.handler, (redact_url(url),))
            try:
                # It was read ahead: the level may have changed.
                found = future.result()
                found = found.shard.change_scan(found, scan_of(found.shard.url))
            except Exception as error:  # as WebDataset does
                try:
                    on_error(error)
                except _Stopped:
                    # Of a shard that is cut off, what came whole, as of a tar.
                    if isinstance(error, TruncatedShard):
                        shard = stage.open(path, entry)
                        yield from _samples_of(_load_whole(shard, error), url, stage, on_error)
                    raise
                continue
            yield from _samples_of(found, url, stage, on_error)
            del found, future  # before the next load starts


def _load_whole(shard: Shard, error: TruncatedShard) -> Prefix:
    """Return the prefix of the highest scan that a shard which was cut off has whole.

    Raises:
        _Stopped: It has none.
    """
    with suppress(FormatError, StorageError):
        for scan in range((shard.entry or shard.head).num_groups, 0, -1):
            with suppress(TruncatedShard, ScanUnavailable):
                prefix = shard.load(scan)
                warnings.warn(f"{error}; its samples are those of scan {scan}", stacklevel=2)
                return prefix
    raise _Stopped


def _scan_of(
    stage: _StageOptions, scan: Scan | ScanLevel, entries: Sequence[ShardEntry]
) -> Callable[[str], Scan]:
    """Return a function from the URL of a shard to the scan to read now."""
    if stage.quality is None:
        chosen = resolve_choice(entries, scan, "the dataset of index=") if entries else scan
        return lambda _: current_scan(chosen)
    quality = stage.quality

    @functools.cache
    def of_folder(folder: str) -> Scan:
        own = stage if stage.index is not None else replace(stage, index=folder)
        return _index_of(own).scan_of_quality(quality)

    return lambda url: of_folder(storage.parent(url))


def _entries(stage: _StageOptions) -> dict[str, list[ShardEntry]]:
    """Return the entries by file name, for a plain tar those of its parts in order.

    One request if ``index`` is a URL.
    """
    return {} if stage.index is None else entries_by_name(_index_of(stage).shards)


def _index_of(stage: _StageOptions) -> DatasetIndex:
    """Return the dataset index that a stage was given."""
    assert stage.index is not None
    if isinstance(stage.index, DatasetIndex):
        return stage.index
    return open_dataset(stage.index, storage_options=stage.store, cache=stage.cache)[0]


def _opened(index: Any, **options: Any) -> DatasetIndex:
    """Return a dataset index, which a stage may have been given."""
    if isinstance(index, DatasetIndex):
        return index
    return _index_of(_StageOptions(index=index, **options))


def _samples_of(loaded: Prefix, url: str, stage: _StageOptions, on_error: Handler) -> Samples:
    """Yield the samples that WebDataset would yield from a tar of the same fields."""
    path = loaded.shard.url
    about = {"__url__": redact_url(url)}
    if storage.is_local(path):
        about["__local_path__"] = path
    if stage.select_files is None and stage.rename_files is None:
        for sample in loaded.samples(on_error=on_error):
            yield number_lists(sample) | about
        return

    def files() -> Samples:
        for sample in loaded.samples(on_error=on_error):
            key = sample.pop("__key__")
            for own, data in number_lists(sample).items():
                name = f"{key}.{own}"
                if stage.rename_files is not None:
                    name = stage.rename_files(name)
                if stage.select_files is None or stage.select_files(name):
                    yield {"fname": name, "data": data, **about}

    yield from tariterators.group_by_keys(files(), handler=stage.handler)


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
        options: ``quality``, a least mean MS-SSIM such as 0.95, in place of a scan: the lowest scan
            that has it by the ``pcr.json`` next to the shards, or by ``index``; ``handler``,
            ``select_files`` and ``rename_files`` as in WebDataset; ``index``, a dataset folder, its
            ``pcr.json`` or a :class:`DatasetIndex`, which saves one small request per shard;
            ``storage_options`` for fsspec; ``retry``, a :class:`Retry`; ``prefetch``, number of
            shards to read ahead (2); ``cache_dir`` and ``cache_bytes``, a local folder that caches
            prefixes, and its upper bound.

    Returns:
        A callable from an iterator of ``{"url": ...}`` to an iterator of samples; it can be
        pickled.

    Raises:
        TypeError: The scan or an option has another type, or an option is unknown.
        ValueError: An option is out of range, or a fraction is given without ``index``.
        ScanUnavailable: The scan is negative or above 32.
    """
    _check_scan_type(scan, options.get("index"))
    # Raise errors for invalid options here, not in a worker. Kept per job, because each epoch and
    # worker recreates the options.
    options = {"begun": time.time(), **options}
    if _StageOptions(**options).quality is not None and scan != FULL:
        raise ValueError(f"expected a scan or a quality, got both, {scan!r} and quality=")
    return pcr_samples(scan, **options)


def _check_scan_type(scan: Any, index: object) -> None:
    if is_fraction(scan):
        if index is None:
            raise ValueError(f"expected index= with {scan=}, a fraction of a dataset's bytes")
    elif not isinstance(scan, ScanLevel):
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
    start, inherited = _find_opener(self.pipeline)
    result = copy.copy(self)
    result.pipeline = _with_order(self.pipeline[:start])
    result.pipeline.append(pcr_scan(scan, **inherited | options))
    result.pipeline += self.pipeline[start + len(_OPENER) :]
    return result


def _with_order(stages: list[Any]) -> list[Any]:
    """Return the stages of a shard list, with the :class:`ShardOrder` restored.

    WebDataset stores a list of its URLs.
    """
    if isinstance(stages[0], shardlists.SimpleShardList) and stages[0].urls:
        urls = stages[0].urls
        order = getattr(urls[0], "order", None)
        if isinstance(order, ShardOrder) and sorted(order.urls) == sorted(urls):
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


def _function(stage: Any) -> Any:
    """Return the function inside a WebDataset filter stage, or the type of other stages."""
    return getattr(stage, "f", type(stage))


# The stages that open and expand tars.
_OPENER = [cache.StreamingOpen, tariterators.tar_file_expander, tariterators.group_by_keys]


def _find_opener(pipeline: list[Any]) -> tuple[int, dict[str, Any]]:
    """Return where the stages that open and expand tars begin, and their options."""
    functions = list(map(_function, pipeline))
    for place in range(len(pipeline)):
        if functions[place : place + len(_OPENER)] == _OPENER:
            given = pipeline[place + 1].kw
            return place, {
                name: given.get(name) for name in ("handler", "select_files", "rename_files")
            }
    raise TypeError(
        "pcr_scan expected a pipeline that opens and expands tars, WebDataset(urls), once, before "
        "any WebLoader, and without cache_dir, which pcr_scan takes; in a DataPipeline use the "
        "stage pcrshard.pcr_scan(5) after the shard list and splitters"
    )


def _is_jpeg(name: str, value: Any) -> bool:
    """Return whether a field is a JPEG; warn of the index of a shard read as an ordinary tar."""
    if name.rpartition(".")[2] == "pcr" and bytes(value[: len(MAGIC)]) == MAGIC:
        warnings.warn(
            "a PCR shard is read as a plain tar, whose samples are whole shards: write "
            "WebDataset(urls).pcr_scan(5)",
            stacklevel=2,
        )
    return is_jpeg_field(name) and isinstance(value, bytes)


def _pcr_decode(
    source: Iterable[dict[str, Any]],
    decoder: ImageDecoder,
    seed: int | None,
    handler: Handler,
    threads: int,
    epochs: EpochCounter | None,
    schema: Schema | None,
) -> Samples:
    """Decode the JPEG fields of samples to arrays, and move what follows their crops."""
    rank, _, worker, _ = webdataset_utils.pytorch_worker_info()
    parts: tuple[int, ...] = ()
    if seed is None or epochs is None:
        parts = (random.getrandbits(64), rank, worker)
    ahead = _GROUPS_AHEAD if threads else 0
    source = iter(source)
    begun: deque[Samples] = deque()
    with suppress(_Stopped), Pool(threads) as pool:
        for first in itertools.count(0, _GROUP_SAMPLES):
            samples = list(itertools.islice(source, _GROUP_SAMPLES))
            if seed is not None and epochs is not None and not first:
                # A ShardOrder begins its epoch when its first shard is asked for.
                epoch = epochs.begun if isinstance(epochs, ShardOrder) else epochs.begin()
                parts = (seed, epoch, rank, worker)
            if samples:
                keys = draw_keys(parts, range(first, first + len(samples)))
                begun.append(_decoded(samples, decoder, pool, keys, handler, schema))
            elif not begun:
                return
            if not samples or len(begun) > ahead:
                yield from begun.popleft()


def _decoded(
    samples: list[dict[str, Any]],
    decoder: ImageDecoder,
    pool: Pool,
    keys: list[int],
    handler: Handler,
    schema: Schema | None,
) -> Samples:
    """Start decoding; return the decoded samples."""
    count = itertools.count()
    # For each sample, the place of each image field among the images.
    places = [
        {name: next(count) for name, value in sample.items() if _is_jpeg(name, value)}
        for sample in samples
    ]
    jpegs = [sample[name] for sample, own in zip(samples, places, strict=True) for name in own]
    # All images of a sample share their random numbers, so that an image and its mask match.
    keys_of = [key for key, own in zip(keys, places, strict=True) for _ in own]

    if decoder.is_pooled:
        arrays = [borrow_array(*shape) for shape in decoder.batch_shapes(len(jpegs))]
        decoded = decoder.begin_jpegs(pool, jpegs, keys_of, arrays)
    else:
        decoded = Decoded(decoder, lambda place: decoder(jpegs[place], keys_of[place]))

    def results() -> Samples:
        for sample, own, draw in zip(samples, places, keys, strict=True):
            key, url = sample.get("__key__"), sample.get("__url__")
            try:
                with naming(url, key):
                    found = {name: decoded[place] for name, place in own.items()}
                    if schema is not None and own:
                        picture = sample[next(iter(own))]
                        found |= _moved(sample, picture, decoder, draw, schema)
            except Exception as error:  # as WebDataset does
                _handle(handler, (key, url), error)
            else:
                yield sample | found

    return results()


def _moved(
    sample: dict[str, Any], picture: bytes, decoder: ImageDecoder, draw: int, schema: Schema
) -> dict[str, Any]:
    """Return the masks, boxes and keypoints of a sample in the crop of its picture."""
    names = [name for name in schema.spatial if isinstance(sample.get(name), bytes)]
    if not names:
        return {}
    size = picture_size(lambda start, count: picture[start : start + count])
    if size is None:
        raise FormatError(f"field {names[0]!r} needs the size of its picture, which is unknown")
    key = sample["__key__"]
    values = {name: convert(schema.by_name[name], sample[name], key) for name in names}
    return {
        name: follow(schema, name, value, decoder, size, draw) for name, value in values.items()
    }


pcr_decoded = filters.pipelinefilter(_pcr_decode)


def _url_of(item: dict[str, Any] | str) -> str:
    if isinstance(item, str):
        return item
    if "url" not in item:
        raise TypeError(
            f"pcr_scan expected the URLs of shards, got a sample with {sorted(item)}: in a "
            "DataPipeline it takes the place of tarfile_to_samples()"
        )
    return str(item["url"])


def pcr_decode(
    size: Side | ImageDecoder = None,
    crop: Crop = None,
    layout: PixelLayout = "chw",
    *,
    seed: int | None = None,
    threads: int = 0,
    handler: Handler = filters.reraise_exception,
    index: str | os.PathLike[str] | DatasetIndex | None = None,
    **options: Any,
) -> Any:
    """Return a WebDataset stage that decodes, crops and resizes every JPEG field to uint8.

    In the fluent interface: ``WebDataset(urls).pcr_scan(5).pcr_decode(size=224, crop="random")``.
    With ``index``, masks, boxes and keypoints follow the crop and flip of the sample's first
    picture, as in :class:`PCRDataset`. Other fields are unchanged; add ``.decode(partial=True)``
    after it to decode labels.

    Args:
        size: Side, or (height, width), of the result in pixels; or an :class:`ImageDecoder`, which
            takes the place of ``crop``, ``layout`` and ``options``.
        crop: ``random``, ``center`` or ``None``; see :class:`ImageDecoder`.
        layout: ``chw`` or ``hwc``.
        seed: Seed of the crops, which differ by epoch, rank and worker; by default random. Epochs
            are those of :func:`pcrshard.shards` if the fluent pipeline begins with it, and passes
            over the pipeline otherwise. All images of a sample have the same crop and flip.
        threads: Threads that decode in the background if ``size`` is given; by default the calling
            thread decodes.
        handler: As in WebDataset.
        index: The dataset's folder, its ``pcr.json`` or a :class:`DatasetIndex`, which says what
            fields hold; in the fluent interface by default that of ``.pcr_scan``.
        options: Other arguments of :class:`ImageDecoder`.

    Returns:
        A callable from an iterator of samples to an iterator of samples; it can be pickled.

    Raises:
        TypeError: An option has another type, is unknown, or is given beside an
            :class:`ImageDecoder`.
        ValueError: An option is out of range, or with ``index`` and a random crop a field looks
            like a mask or boxes but has no such kind.
    """
    if not isinstance(size, ImageDecoder):
        size = ImageDecoder(size, crop, layout=layout, **options)
    elif crop or options or layout != "chw":
        raise TypeError("expected crop and other options in the ImageDecoder, not beside it")
    if threads < 0:
        raise ValueError(f"expected threads to be a whole number of at least 0, got {threads}")
    epochs = None if seed is None else EpochCounter()
    schema = None
    if index is not None and not size.return_geometry:
        schema = _opened(index).schema
        if size.is_random:
            check_kinds([schema], None)
    return pcr_decoded(size, seed, handler, threads, epochs=epochs, schema=schema)


def _fluent_pcr_decode(self: Any, *args: Any, **options: Any) -> Any:
    """Decode, crop and resize JPEG fields; see :func:`pcrshard.pcr_decode`."""
    for stage in self.pipeline:
        if _function(stage) is _pcr_samples and stage.kw.get("index") is not None:
            options = {"index": _opened(**stage.kw)} | options
    stage = pcr_decode(*args, **options)
    if isinstance(self.pipeline[0], ShardOrder):
        stage.kw["epochs"] = self.pipeline[0]
    return self.compose(stage)


class JpegHandler:
    """A handler for ``.decode()`` that decodes JPEG fields with the native core.

    Other fields are left to WebDataset's own handlers.

    >>> JpegHandler("rgb8")
    JpegHandler('rgb8')

    Args:
        imagespec: As in WebDataset, except that gray is the JPEG's stored luma: ``l8``, ``rgb8``
            give (H, W) and (H, W, 3) uint8; ``l``, ``rgb`` float32 in 0..1; ``torchl8``,
            ``torchrgb8``, ``torchl``, ``torchrgb``, ``torch`` the same as tensors, (H, W) and (3,
            H, W); ``pill``, ``pilrgb``, ``pil`` Pillow images.
        upright: Apply the EXIF orientation, unlike WebDataset's own handlers.
        smoothing: Smooth between blocks of images at a lower scan, like WebDataset's own handlers.
        color: ``rgb`` as stored, like WebDataset's own handlers, or ``srgb``, converted by the ICC
            profile.

    Raises:
        ValueError: The ``imagespec`` is unknown or has an alpha channel.
    """

    def __init__(
        self,
        imagespec: str,
        *,
        upright: bool = True,
        smoothing: bool = SMOOTHING,
        color: Literal["rgb", "srgb"] = "rgb",
    ) -> None:
        self.kind, self.dtype, mode = autodecode.imagespecs.get(imagespec, ("", None, ""))
        if mode not in ("l", "rgb"):
            raise ValueError(
                f"expected an imagespec like 'rgb8', 'torchrgb', 'pil', 'l8', got {imagespec!r}"
            )
        self.imagespec = imagespec
        self.is_gray = mode == "l"
        self.decode = partial(
            decode_image,
            color="gray" if self.is_gray else color,
            layout="chw" if self.kind == "torch" else "hwc",
            upright=upright,
            smoothing=smoothing,
        )

    def __repr__(self) -> str:
        return f"JpegHandler({self.imagespec!r})"

    def __call__(self, key: str, data: bytes) -> Any:
        """Decode ``data`` if the field ``key`` is a JPEG, else return ``None``."""
        if not _is_jpeg(key.lower(), data):
            return None
        image = self.decode(data)
        if self.kind == "pil":
            return to_picture(image)
        if self.is_gray:
            image = image.squeeze(0 if self.kind == "torch" else 2)
        if self.dtype != "uint8":
            image = np.divide(image, np.float32(255), dtype=np.float32)
        return torch.from_numpy(image) if self.kind == "torch" else image


# Importing this module adds the fluent methods; `import pcrshard` does so when WebDataset is
# imported.
compat.FluidInterface.pcr_scan = _fluent_pcr_scan
compat.FluidInterface.pcr_decode = _fluent_pcr_decode
