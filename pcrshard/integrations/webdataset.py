"""The one door to WebDataset: ``.pcr_scan(k)``, its stage, and a JPEG handler for ``.decode()``.

The stage takes the place of WebDataset's opener, tar expander and grouper. It hands the files of a prefix to WebDataset's own ``group_by_keys``, so
that samples come out as they would from the original tar, and every later stage is stock.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar
from urllib.parse import urlparse

import numpy as np
from webdataset import DataPipeline, WebDataset, WebLoader, cache, compat, filters, tariterators
from webdataset import utils as webdataset_utils
from webdataset.gopen import rewrite_url

from .. import storage
from ..errors import PCRError
from ..format.dataset_index import DatasetIndex, ShardEntry
from ..format.names import JPEG_EXTENSIONS
from ..format.scan import FULL, Scan, is_integer
from ..jpeg.image_decoder import Crop, ImageDecoder
from ..jpeg.pixels import decode_image
from ..reading.joined import JoinedSamples
from ..reading.open_dataset import index_url, open_dataset
from ..reading.options import ReadOptions
from ..reading.prefetch import prefetch
from ..reading.prefix import Prefix
from ..reading.scan_level import ScanLevel

Handler = Callable[[Exception], bool]
T = TypeVar("T")
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
_EXPANDERS = (tariterators.tar_file_expander, tariterators.group_by_keys)


@dataclasses.dataclass(frozen=True)
class _Reading(ReadOptions):
    """How the stage reads shards; see :func:`pcr_scan`."""

    index: str | DatasetIndex | None = None


def _pcr_samples(
    source: Iterable[dict[str, Any] | str],
    scan: Scan | ScanLevel = FULL,
    handler: Handler = filters.reraise_exception,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
    **reading: Any,
) -> Iterator[dict[str, Any]]:
    """The stage: shard URLs in, samples out."""
    files = _files(source, scan, handler, (select_files, rename_files), _Reading(**reading))
    yield from tariterators.group_by_keys(files, handler=handler)


def _files(
    source: Iterable[dict[str, Any] | str],
    scan: Scan | ScanLevel,
    handler: Handler,
    file_functions: tuple[Callable[[str], bool] | None, Callable[[str], str] | None],
    reading: _Reading,
) -> Iterator[dict[str, Any]]:
    """What ``tar_file_expander`` would give of the original tars, with an empty dict after each shard."""
    urls = (item["url"] if isinstance(item, dict) else item for item in source)
    load = _Load(scan, reading)
    with contextlib.closing(
        prefetch(urls, load, depth=reading.prefetch, max_bytes=reading.prefetch_bytes)
    ) as loaded:
        for url, future in loaded:
            on_error = _OnError(handler, url)
            names = _Names(*file_functions, on_error)
            try:
                with load.at_level(future.result()) as loaded_samples:
                    path = loaded_samples.shard.url
                    about = {"__url__": url} | (
                        {"__local_path__": path} if storage.is_local(path) else {}
                    )
                    for sample in loaded_samples.samples(select=names.select, on_error=on_error):
                        key = sample.pop("__key__")
                        for field, data in sample.items():
                            if (name := names.rename(f"{key}.{field}")) is not None:
                                yield {"fname": name, "data": data, **about}
                        if names.stopped:
                            break
                yield {}
            except Exception as error:  # as WebDataset does
                if on_error.raised:
                    raise
                if error is not on_error.last and on_error(error):
                    continue
                return


class _Load:
    """Loads the prefix of a shard, at the scan of the moment."""

    def __init__(self, scan: Scan | ScanLevel, reading: _Reading) -> None:
        self.scan, self.reading = scan, reading
        self.entries = _entries(reading.index, reading.storage_options)

    def __call__(self, url: str, cancel: threading.Event) -> Prefix | JoinedSamples:
        path = _path(url)
        shard = self.reading.open(path, self.entries.get(storage.file_name(path)))
        # Only a prefix can be turned into that of another scan.
        load = shard.load if isinstance(self.scan, ScanLevel) else shard.load_samples
        return load(self.level, cancel=cancel)

    @property
    def level(self) -> Scan:
        return self.scan.value if isinstance(self.scan, ScanLevel) else self.scan

    def at_level(self, loaded: Prefix | JoinedSamples) -> Prefix | JoinedSamples:
        """What was read ahead, at the scan of now."""
        return (
            loaded.shard.change_scan(loaded, self.level) if isinstance(loaded, Prefix) else loaded
        )


class _Names:
    """WebDataset's ``select_files`` and ``rename_files``; what they raise costs one file, or the rest of the shard.

    Attributes:
        select: For the reader, by key and field, so that what is not wanted is not read; ``None`` without functions.
        stopped: Whether the handler does not want to go on in this shard.
    """

    def __init__(
        self,
        select_files: Callable[[str], bool] | None,
        rename_files: Callable[[str], str] | None,
        on_error: _OnError,
    ) -> None:
        self.select_files, self.rename_files, self.on_error = select_files, rename_files, on_error
        self.select = self._select if select_files or rename_files else None
        self.stopped = False

    def rename(self, name: str) -> str | None:
        """The name that the user wants, ``None`` if there is none."""
        return name if self.rename_files is None else self._result(self.rename_files, name)

    def _select(self, key: str, field: str) -> bool:
        name = None if self.stopped else self.rename(f"{key}.{field}")
        return name is not None and (
            self.select_files is None or bool(self._result(self.select_files, name))
        )

    def _result(self, function: Callable[[str], T], name: str) -> T | None:
        try:
            return function(name)
        except Exception as error:
            self.stopped = not self.on_error(error)
            return None


class _OnError:
    """WebDataset's handler: it raises, or says whether to go on."""

    def __init__(self, handler: Handler, url: str) -> None:
        self.handler, self.url = handler, url
        self.last: Exception | None = None
        self.raised = False

    def __call__(self, error: Exception) -> bool:
        self.last = error
        error.args = (*error.args, self.url)
        self.raised = True
        go_on = bool(self.handler(error))
        self.raised = False
        return go_on


def _path(url: str) -> str:
    """What to open for a URL, as WebDataset would: rewritten by GOPEN_REWRITE; local ones without scheme, query and fragment."""
    url = rewrite_url(url)
    if url.startswith("pipe:"):
        return url
    parsed = urlparse(url)
    if parsed.scheme == "file":
        return parsed.path
    return url if parsed.scheme or os.path.exists(url) else parsed.path


_known_entries: dict[str, dict[str, ShardEntry]] = {}


def _entries(
    index: str | DatasetIndex | None, options: storage.Options | None
) -> dict[str, ShardEntry]:
    """Shards' entries by file name; a dataset index is read once per process, and again when it was replaced."""
    if index is None:
        return {}
    if not isinstance(index, DatasetIndex):
        known = f"{index} {storage.identity(index_url(index), options=options)} {sorted((options or {}).items())!r}"
        if known not in _known_entries:
            found, _ = open_dataset(index, storage_options=options)
            _known_entries[known] = {entry.name: entry for entry in found.shards}
        return _known_entries[known]
    return {entry.name: entry for entry in index.shards}


# Two names, because a stage must pickle: the function by its own name, the stage factory by another.
pcr_samples = filters.pipelinefilter(_pcr_samples)


def pcr_scan(scan: Scan | ScanLevel = FULL, **kwargs: Any) -> Any:
    """A WebDataset stage that reads PCR shards at a scan: shard URLs in, samples out.

    For ``wds.DataPipeline``, in place of ``tarfile_to_samples()``. In the fluent interface write ``WebDataset(urls).pcr_scan(5)``.

    Args:
        scan: 1..N, ``"full"``, or a :class:`ScanLevel`, which is read at each shard.
        kwargs: ``handler``, ``select_files`` and ``rename_files`` as in WebDataset; ``index``, a dataset folder, its ``pcr.json`` or a
            :class:`DatasetIndex`, which saves one small request per shard; ``check=False`` to skip checksums; ``storage_options`` for
            fsspec; ``retry``, a :class:`Retry`; ``prefetch``, shards that are read ahead (2), and ``prefetch_bytes``, their bound (256 MiB);
            ``cache_dir`` and ``cache_bytes``, a folder on local disk that keeps prefixes, and its bound.

    Returns:
        A callable from an iterator of ``{"url": ...}`` to an iterator of samples; it can be pickled.
    """
    _check_scan_type(scan)
    _Reading(
        **{
            name: value
            for name, value in kwargs.items()
            if name not in ("handler", "select_files", "rename_files")
        }
    )
    return pcr_samples(scan, **kwargs)


def _check_scan_type(scan: Any) -> None:
    if not (scan == FULL or is_integer(scan) or isinstance(scan, ScanLevel)):
        raise TypeError(f"expected a scan number, 'full' or a ScanLevel, got {scan!r}")
    if is_integer(scan) and scan < 1:
        raise ValueError(f"expected a scan of 1 or more, or 'full', got {scan}")


def _fluent_pcr_scan(self: Pipeline, scan: Scan | ScanLevel = FULL, **kwargs: Any) -> Pipeline:
    """Read PCR shards at a scan: ``WebDataset(urls).pcr_scan(5)``.

    May stand before or after ``.shuffle()``, ``.decode()`` and the like. Handler, ``select_files`` and ``rename_files`` are those given to
    ``WebDataset``. See :func:`pcrshard.pcr_scan` for the arguments.

    Raises:
        TypeError: This is not a ``WebDataset`` that opens tars.
    """
    _check_scan_type(scan)
    if isinstance(self, WebLoader):
        raise TypeError(
            "pcr_scan belongs on the WebDataset that the WebLoader loads: WebDataset(urls).pcr_scan(5)"
        )
    first, last, inherited = _find_opener(self.pipeline)
    if any(
        getattr(stage, "f", None) is filters._shuffle and any(stage.args) and "seed" in stage.kw
        for stage in self.pipeline[:first]
    ):
        warnings.warn(
            "WebDataset's shardshuffle gives every epoch the same order of shards; make the pipeline for each epoch with "
            "WebDataset(pcrshard.shards(urls, seed, epoch), shardshuffle=False), or set detshuffle=True, or use PCRDataset",
            stacklevel=2,
        )
    result = copy.copy(self)
    result.pipeline = [
        *self.pipeline[:first],
        pcr_scan(scan, **inherited | kwargs),
        *self.pipeline[last + 1 :],
    ]
    return result


def _find_opener(pipeline: list[Any]) -> tuple[int, int, dict[str, Any]]:
    """Positions of the stages that open and expand tars, and the options they were given."""
    functions = [getattr(stage, "f", None) for stage in pipeline]
    if _pcr_samples in functions:
        raise TypeError("pcr_scan was already applied to this pipeline")
    if tariterators.tarfile_samples in functions:
        position = functions.index(tariterators.tarfile_samples)
        return position, position, dict(pipeline[position].kw)
    openers = [
        i
        for i, stage in enumerate(pipeline)
        if isinstance(stage, cache.StreamingOpen | cache.FileCache)
    ]
    expanders = [i for i, function in enumerate(functions) if function in _EXPANDERS]
    if not openers or len(expanders) != len(_EXPANDERS):
        raise TypeError(
            "pcr_scan expected a pipeline that opens tars, WebDataset(urls); in a DataPipeline use the stage pcrshard.pcr_scan(5) "
            "after the shard list and splitters"
        )
    first, last = openers[0], expanders[-1]
    if list(range(first, last + 1)) != [first, *expanders]:
        raise TypeError(
            "pcr_scan cannot keep a stage that stands between the opener and the tar expander"
        )
    if isinstance(pipeline[first], cache.FileCache):
        raise TypeError(
            "WebDataset's cache_dir downloads whole shards and tells them apart by file name only; "
            "leave it out of WebDataset(...) and give it to pcr_scan, which keeps prefixes: .pcr_scan(5, cache_dir=...)"
        )
    options = {
        name: pipeline[expanders[0]].kw.get(name) for name in ("select_files", "rename_files")
    }
    return first, last, {"handler": pipeline[first].handler, **options}


class JpegHandler:
    """A handler for ``.decode()`` that decodes JPEG fields through the native core or libjpeg-turbo; other fields go on to WebDataset's own handlers.

    >>> JpegHandler("rgb8")
    JpegHandler('rgb8')

    Args:
        imagespec: As in WebDataset, but that gray is the JPEG's own luma: ``l8``, ``rgb8`` give (H, W) and (H, W, 3) uint8; ``l``, ``rgb`` float32 in 0..1;
            ``torchl8``, ``torchrgb8``, ``torchl``, ``torchrgb``, ``torch`` the same as tensors, (H, W) and (3, H, W).
    """

    def __init__(self, imagespec: str) -> None:
        spec = "torchrgb" if imagespec == "torch" else imagespec
        self.torch = spec.startswith("torch")
        spec = spec.removeprefix("torch")
        colours: dict[str, Literal["gray", "rgb"]] = {"l": "gray", "rgb": "rgb"}
        if spec.removesuffix("8") not in colours:
            raise ValueError(
                f"expected an imagespec like 'rgb8', 'torchrgb', 'l8', got {imagespec!r}"
            )
        self.colour = colours[spec.removesuffix("8")]
        self.imagespec, self.floating = imagespec, not spec.endswith("8")

    def __repr__(self) -> str:
        return f"JpegHandler({self.imagespec!r})"

    def __call__(self, key: str, data: bytes) -> Any:
        """Decode ``data`` if the field ``key`` is a JPEG, else return ``None``."""
        if key.rpartition(".")[2].lower() not in JPEG_EXTENSIONS:
            return None
        if not self.torch:
            image = decode_image(data, colour=self.colour)
            image = image[..., 0] if self.colour == "gray" else image
            return np.divide(image, np.float32(255), dtype=np.float32) if self.floating else image
        import torch

        planes = torch.from_numpy(decode_image(data, colour=self.colour, layout="chw"))
        planes = planes[0] if self.colour == "gray" else planes
        return planes.to(torch.float32).div_(255) if self.floating else planes


def _pcr_decode(
    source: Iterable[dict[str, Any]],
    decoder: ImageDecoder,
    seed: int | None = None,
    handler: Handler = filters.reraise_exception,
) -> Iterator[dict[str, Any]]:
    """The stage: JPEG fields of samples to arrays."""
    rank, _, worker, _ = webdataset_utils.pytorch_worker_info()
    rng = random.Random() if seed is None else random.Random(f"{seed} {rank} {worker}")
    for sample in source:
        try:
            yield {
                name: decoder(value, rng)
                if isinstance(value, bytes) and name.rpartition(".")[2] in JPEG_EXTENSIONS
                else value
                for name, value in sample.items()
            }
        except PCRError as error:
            error.args = (*error.args, sample.get("__key__"), sample.get("__url__"))
            if not handler(error):
                return


pcr_decoded = filters.pipelinefilter(_pcr_decode)


def pcr_decode(
    size: int | tuple[int, int] | None = None,
    crop: Crop = None,
    layout: Literal["chw", "hwc"] = "chw",
    **kwargs: Any,
) -> Any:
    """A WebDataset stage that decodes, crops and resizes every JPEG field in one go, to uint8 arrays.

    In the fluent interface: ``WebDataset(urls).pcr_scan(5).pcr_decode(size=224, crop="random")``. Other fields stay as they are; put
    ``.decode(partial=True)`` behind it for labels.

    Args:
        size: Side, or (height, width), of the result.
        crop: ``random``, ``center`` or ``None``; see :class:`ImageDecoder`.
        layout: ``chw`` or ``hwc``.
        kwargs: ``seed`` of the crops, which differ by rank and worker; by default they differ every time. ``handler`` as in WebDataset.
            Other arguments of :class:`ImageDecoder`.

    Returns:
        A callable from an iterator of samples to an iterator of samples; it can be pickled.
    """
    options = {name: kwargs.pop(name) for name in ("seed", "handler") if name in kwargs}
    return pcr_decoded(ImageDecoder(size, crop, layout, **kwargs), **options)


def _fluent_pcr_decode(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Decode, crop and resize JPEG fields; see :func:`pcrshard.pcr_decode`."""
    return self.compose(pcr_decode(*args, **kwargs))


# Importing this module is what adds the fluent methods; `import pcrshard` does so when WebDataset is imported.
compat.FluidInterface.pcr_scan = _fluent_pcr_scan
compat.FluidInterface.pcr_decode = _fluent_pcr_decode
