"""Hugging Face ``datasets`` integration: :func:`load_dataset`, and the builder behind it.

Each shard is a shard of ``datasets``, which handles splitting by node, shuffling, DataLoader
workers and ``state_dict()``. Images stay encoded until ``datasets`` decodes them. Works with
``datasets`` 3 and newer; ``scripts/hf/pcr_dataset.py`` is the loading script for versions before 4.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from .. import storage
from ..errors import FormatError, MissingDependency, StorageError
from ..format.dataset_index import DatasetIndex, ShardEntry
from ..format.names import is_other_image
from ..format.scan import FULL, Scan, check_scan
from ..format.schema import IMAGE, IMAGE_LIST, Field
from ..lazy import Chain
from ..reading.dataset_folder import Opened, find_datasets, open_lazily
from ..reading.field_values import INTEGER_KINDS
from ..reading.prefix import Sample
from ..reading.prefix_cache import PrefixCache
from ..reading.scan_level import (
    ScanLevel,
    ScanOrFraction,
    current_scan,
    highest_scan,
    resolve_choice,
)
from ..reading.shard import Shard

try:
    import datasets
except ImportError as missing:
    raise MissingDependency(
        "HuggingFace datasets is not installed: pip install 'pcrshard[hf]'"
    ) from missing

KEY = "__key__"
Decode = Callable[[Any], Any]


@dataclasses.dataclass
class PcrConfig(datasets.BuilderConfig):  # type: ignore[misc]  # datasets is untyped
    """The configuration of a dataset; ``data_dir`` is its folder, a local path or any fsspec URL.

    Attributes:
        scan: 1..N, ``"full"``, or (streaming only) a :class:`ScanLevel`, consulted at each shard.
        columns: Names of the columns; by default ``__key__`` and all fields.
        prefix_cache: Cache of prefixes on local disk when streaming.
    """

    # Increase it when rows of the same shards change: it identifies the Arrow cache.
    version: Any = "2.0.0"
    data_dir: str | None = dataclasses.field(default=None, repr=False)
    scan: Scan | ScanLevel = FULL
    columns: Sequence[str] | None = None
    prefix_cache: PrefixCache | None = None

    def create_config_id(
        self, config_kwargs: dict[str, Any], custom_features: datasets.Features | None = None
    ) -> str:
        """Name the Arrow cache by the options that affect the rows.

        The builder's hash identifies the content, whatever its URL.
        """
        chosen: dict[str, Any] = {
            "scan": "level" if isinstance(self.scan, ScanLevel) else self.scan
        }
        if self.columns is not None:
            chosen["columns"] = self.columns
        return str(super().create_config_id(chosen, custom_features))


class PcrBuilder(datasets.GeneratorBasedBuilder):  # type: ignore[misc]  # datasets is untyped
    """A builder of datasets from PCR shards.

    ``PcrBuilder(data_dir="shards", scan=5).as_streaming_dataset("train")``

    The dataset indexes are read immediately: they identify the Arrow cache, and have the schema.
    ``splits=`` lists the splits to read, by default all.
    """

    BUILDER_CONFIG_CLASS = PcrConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        data_dir = kwargs.get("data_dir")
        if not data_dir:
            raise ValueError(
                "expected data_dir, the folder or URL of a dataset that `pcrshard encode` wrote"
            )
        # A copy, because datasets adds its own options to the dict passed to it.
        self.options = dict(kwargs.get("storage_options") or {})
        found = _open_splits(os.fspath(data_dir), self.options, kwargs.get("prefix_cache"))
        self.is_split = "" not in found
        self.parts = {name or "train": part for name, part in found.items()}
        asked = kwargs.pop("splits", [None])
        if None not in asked:
            lengths = {name: index.num_samples for name, (index, _) in self.parts.items()}
            names = {name for split in asked for name in _split_names(split, lengths)}
            self.parts = {name: part for name, part in self.parts.items() if name in names}
        entries = Chain([index.shards for index, _ in self.parts.values()])
        scan = kwargs.get("scan", FULL)
        if (quality := kwargs.pop("quality", None)) is not None:
            if scan != FULL:
                raise ValueError(f"expected a scan or a quality, got {scan!r} and {quality}")
            # Of all splits, the lowest at which each has it.
            scans = {index.scan_of_quality(quality) for index, _ in self.parts.values()}
            scan = FULL if FULL in scans else max(map(int, scans))
        scan = resolve_choice(entries, scan, os.fspath(data_dir))
        kwargs["scan"] = scan
        # A level may rise while rows are read, but columns do not change.
        self.widest = highest_scan(entries) if isinstance(scan, ScanLevel) else scan
        # The content of the splits identifies their Arrow cache.
        contents = [name.encode() + index.encode() for name, (index, _) in self.parts.items()]
        kwargs["hash"] = hashlib.sha256(b"".join(contents)).hexdigest()[:16]
        kwargs["dataset_name"] = kwargs.get("dataset_name") or "pcrshard"
        super().__init__(*args, **kwargs)

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo()

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        shards = {
            name: list(zip(urls, index.shards, strict=True))
            for name, (index, urls) in self.parts.items()
        }
        (opened, _), *_ = self.parts.values()
        inferred = self._infer_features(opened)
        names = list(self.info.features or self.config.columns or inferred)
        if unknown := sorted(set(names) - set(inferred)):
            raise ValueError(f"expected columns of {list(inferred)}, got {unknown}")
        self.info.features = self.info.features or datasets.Features(
            {name: inferred[name] for name in names}
        )
        # A separate list for each: datasets splits and shuffles it.
        return [
            datasets.SplitGenerator(name=name, gen_kwargs={"shards": part})
            for name, part in shards.items()
        ]

    def _infer_features(self, index: DatasetIndex) -> dict[str, Any]:
        """Return the type of each column, by the schema."""
        position = check_scan(self.widest, index.num_groups, 0)
        inferred = {KEY: datasets.Value("string")}
        for name in index.schema.names_at(position):
            inferred[name] = _feature(index.schema.by_name[name])
        if index.classes and "cls" in inferred:
            inferred["cls"] = datasets.ClassLabel(names=list(index.classes))
        return inferred

    def _shard(self, url: str, entry: ShardEntry) -> Shard:
        return Shard(url, entry=entry, storage_options=self.options, cache=self.config.prefix_cache)

    def _prepare_split(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.config.scan, ScanLevel):
            raise TypeError(
                "a ScanLevel needs streaming=True: a map-style dataset is read once, at one scan"
            )
        return super()._prepare_split(*args, **kwargs)

    def _generate_examples(self, shards: list[tuple[str, ShardEntry]]) -> Iterator[tuple[str, Any]]:
        columns = {name: _decoder(feature) for name, feature in self.info.features.items()}
        for url, entry in shards:
            loaded = self._shard(url, entry).load(current_scan(self.config.scan))
            for row, key in enumerate(loaded.index.keys):
                sample = {name: loaded.value(row, name) for name in columns} | {KEY: key}
                # datasets 3 requires unique keys in a dataset.
                yield f"{entry.name}/{key}", _example(sample, columns, url)
            del loaded  # before the next shard takes memory


def _open_splits(
    url: str, storage_options: storage.Options, cache: PrefixCache | None
) -> dict[str, Opened]:
    """Open the dataset at a URL, by the name "", or those in its subfolders, by their names.

    Costs one request for a dataset, and a listing for a folder of datasets.

    Raises:
        StorageError: There is no dataset.
        ValueError: Classes differ between splits.
    """
    with suppress(StorageError):
        return {"": open_lazily(url, storage_options=storage_options, cache=cache)}
    found = {
        name: open_lazily(place, storage_options=storage_options, cache=cache)
        for name, place in find_datasets(url, storage_options=storage_options).items()
    }
    if len({index.classes for index, _ in found.values()}) > 1:
        classes = {name: list(index.classes)[:8] for name, (index, _) in found.items()}
        raise ValueError(f"expected the same classes in every split, got {classes}")
    return found


def _split_names(split: Any, lengths: Mapping[str, int]) -> set[str]:
    """Return the splits in a description such as ``train[:10%]+test``."""
    if not isinstance(split, datasets.ReadInstruction):
        split = datasets.ReadInstruction.from_spec(str(split))
    return {part.splitname for part in split.to_absolute(lengths)}


def _feature(field: Field) -> Any:
    """Return the type of a column.

    JSON is text, because its values need not have one type. Other fields are bytes, and nothing is
    unpickled.
    """
    kind = field.kind
    if kind == IMAGE_LIST:
        return datasets.Sequence(datasets.Image())
    if kind in (IMAGE, "mask") or (kind == "file" and is_other_image(field.name)):
        return datasets.Image()
    if kind in INTEGER_KINDS:
        return datasets.Value("int64")
    return datasets.Value("string" if kind in ("text", "json") else "binary")


def _decoder(feature: Any) -> Decode:
    """Return a function from a field's bytes to the value passed to ``datasets``."""
    if isinstance(getattr(feature, "feature", feature), datasets.Image):
        return lambda data: data
    if isinstance(feature, datasets.ClassLabel):
        # Not text, which datasets would interpret as a class name, such as "10".
        return int
    if not isinstance(feature, datasets.Value):
        return json.loads
    if feature.dtype in ("string", "large_string"):
        return lambda data: data if isinstance(data, str) else data.decode()
    if "binary" in feature.dtype:
        return bytes
    return float if "float" in feature.dtype else int


def _example(
    sample: Sample,
    columns: Mapping[str, Decode],
    url: str,
) -> dict[str, Any]:
    example = {}
    for name, decode in columns.items():
        try:
            example[name] = None if sample[name] is None else decode(sample[name])
        except ValueError as error:
            raise FormatError(
                f"{name!r} does not fit its column: {error}", url=url, key=sample[KEY]
            ) from error
    return example


def load_dataset(
    url: str | os.PathLike[str],
    *,
    scan: ScanOrFraction = FULL,
    quality: float | None = None,
    streaming: bool = False,
    split: Any = None,
    columns: Sequence[str] | None = None,
    features: datasets.Features | None = None,
    storage_options: storage.Options = None,
    prefix_cache: PrefixCache | None = None,
    cache_dir: str | None = None,
    num_proc: int | None = None,
) -> Any:
    """Open a PCR dataset as a ``datasets.IterableDataset`` or ``datasets.Dataset``.

    Columns have the names of the fields: ``__key__``; images ``jpg`` (:class:`datasets.Image`,
    encoded until accessed, rotated upright); ``cls`` an integer, or a ``ClassLabel`` if the dataset
    index has classes; ``txt`` and ``json`` text; all others bytes.

    Args:
        url: A path or any fsspec URL, such as ``hf://datasets/USER/NAME``, of a folder with
            ``pcr.json``, which is the split ``train``, or a folder of such folders, each a split
            of its name.
        scan: 1..N, ``"full"``, a fraction in (0, 1) of the full bytes, or, when streaming, a
            :class:`ScanLevel`, which is consulted at each shard.
        quality: Least mean MS-SSIM, such as 0.95, in place of a scan: the lowest scan at which all
            splits have it by the estimate in ``pcr.json``.
        streaming: ``False``, the default as in ``datasets``, copies everything into an Arrow cache,
            once per scan; ``True`` reads each shard's prefix on demand in one request.
        split: ``"train"``, ``"train+test"``, a list of these, or for a map-style dataset a slice,
            ``"train[:10%]"``. By default all: one dataset if the URL is one, otherwise a
            ``DatasetDict`` or ``IterableDatasetDict``.
        columns: Names of the columns; others are not parsed. By default all.
        features: The columns and their types; by default inferred. A ``json`` field whose type is
            not text is parsed.
        storage_options: fsspec storage options.
        prefix_cache: Cache of prefixes on local disk.
        cache_dir: Folder of Arrow caches; by default that of ``datasets``.
        num_proc: Number of processes that build the Arrow cache.

    Raises:
        PCRError: The dataset or a shard cannot be read, or has no such scan; for a map-style
            dataset, the cause of a ``DatasetGenerationError``.
        ValueError: The column or split does not exist.
        TypeError: ``columns`` is a string, or ``scan`` has another type.
    """
    if isinstance(columns, str):
        raise TypeError(
            f"expected a sequence of column names, got {columns!r}; write [{columns!r}]"
        )
    builder = PcrBuilder(
        data_dir=os.fspath(url),
        scan=scan,
        quality=quality,
        splits=split if isinstance(split, list | tuple) else [split],
        storage_options=dict(storage_options or {}),
        cache_dir=cache_dir,
        columns=list(columns) if columns else None,
        features=features,
        prefix_cache=prefix_cache,
    )
    if not streaming:
        builder.download_and_prepare(num_proc=num_proc)
    if split is None and not builder.is_split:
        split = "train"
    opened = builder.as_streaming_dataset if streaming else builder.as_dataset
    if isinstance(split, list | tuple):
        return [opened(split=one) for one in split]
    return opened(split=split)
