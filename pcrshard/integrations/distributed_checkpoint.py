"""``torch.distributed.checkpoint`` in DeltaStores: each rank stores its shards as deltas.

A folder holds one store per rank, and an index store whose versions refer to the versions of the
ranks. The coordinator commits by writing the index after all ranks have written. Files contain no
pickles; objects other than tensors are stored as a typed tree.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from .. import storage
from ..checkpoint import DeltaStore
from ..checkpoint.frame import damage_named
from ..redaction import redact_url


class ShardLocation(NamedTuple):
    """The location of a shard.

    Attributes:
        rank: The rank that wrote it.
        version: The version in the rank's store.
        name: Its path in this version; empty for an object.
    """

    rank: int
    version: int
    name: str


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _rank_store(url: str, rank: int, **how: Any) -> DeltaStore:
    return DeltaStore(storage.join(url, f"rank-{rank:05d}"), **how)


def _index_store(url: str, **how: Any) -> DeltaStore:
    return DeltaStore(storage.join(url, "index"), **how)


def _done(result: Any) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(result)
    return done


def _shard_key(index: MetadataIndex) -> str:
    return ",".join(map(str, index.offset or ())) or "whole"


def _optimizer_of(name: str) -> str | None:
    """Return the optimizer's name in a flattened name, or ``None``.

    >>> _optimizer_of("optim.state.layer.weight.exp_avg"), _optimizer_of("model.weight")
    ('optim', None)
    """
    prefix, found, _ = f".{name}".partition(".state.")
    return prefix.removeprefix(".") if found else None


def _group(whole: Any, prefix: str) -> dict[str, None]:
    """Return the keys of an optimizer's param groups, which identify its type."""
    start = f"{prefix}.param_groups".removeprefix(".")
    listed = whole.get(start)
    if isinstance(listed, list):
        return dict.fromkeys(key for group in listed for key in group)
    names = [name for name in whole if name.startswith(f"{start}.")]
    return {name.rpartition(".")[2]: None for name in names}


class DeltaStorageWriter(StorageWriter):
    """A storage writer for ``torch.distributed.checkpoint.save``; each call adds a version.

    Args:
        url: The folder, a local path or any fsspec URL.
        how: Options of :class:`DeltaStore`: ``precision``, ``keyframe_every``...
    """

    def __init__(self, url: str, **how: Any) -> None:
        self.url = url
        self._how = how

    @cached_property
    def _shards(self) -> DeltaStore:
        return _rank_store(self.url, _rank(), **self._how)

    @cached_property
    def _index(self) -> DeltaStore:
        return _index_store(self.url, **self._how)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: the store assigns version numbers, whatever the id."""

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Do nothing: the stores are opened when they are needed."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged."""
        return plans

    def write_data(
        self,
        plan: SavePlan,
        planner: SavePlanner,
    ) -> Future[list[WriteResult]]:
        """Save this rank's shards as one version."""
        tensors: dict[str, Any] = {}
        optimizers: dict[str, Any] = {}
        objects = {}
        written: list[tuple[MetadataIndex, int, str]] = []
        whole = getattr(planner, "state_dict", {})
        for item in plan.items:
            name, key = item.index.fqn, _shard_key(item.index)
            prefix = _optimizer_of(name)
            if item.type == WriteItemType.BYTE_IO:
                look_up: Any = getattr(planner, "lookup_object")  # noqa: B009  # not in its type
                objects[name] = look_up(item.index)
                written.append((item.index, 0, ""))
                continue
            if prefix is None:
                shards, path = tensors, f"tensors.{key}.{name}"
            else:
                # In the form by which a store recognizes optimizers and chooses error bounds.
                new = {"state": {}, "param_groups": [_group(whole, prefix)]}
                shards = optimizers.setdefault(prefix, new)["state"]
                path = f"optimizers.{prefix}.state.{key}.{name}"
            tensor: Any = planner.resolve_data(item)
            shards.setdefault(key, {})[name] = tensor
            written.append((item.index, tensor.nbytes, path))
        state = {"tensors": tensors, "optimizers": optimizers, "objects": objects}
        number = self._shards.save(state, blocking=True)
        return _done(
            [
                WriteResult(index, size, ShardLocation(_rank(), number, path))
                for index, size, path in written
            ]
        )

    def finish(
        self,
        metadata: Metadata,
        results: list[list[WriteResult]],
    ) -> None:
        """Commit the version; called on the coordinator after all ranks have written."""
        places = {
            result.index: result.storage_data for each_rank in results for result in each_rank
        }
        self._index.save(_plain_metadata(metadata, places), blocking=True)

    def storage_meta(self) -> StorageMeta | None:
        """Return the location of the versions."""
        return StorageMeta(checkpoint_id=redact_url(self.url))

    @classmethod
    def validate_checkpoint_id(cls, *_: Any) -> bool:
        """Accept any folder."""
        return True


class DeltaStorageReader(StorageReader):
    """A storage reader for ``torch.distributed.checkpoint.load``, on any number of ranks.

    Args:
        url: The folder of :class:`DeltaStorageWriter`.
        version: Number of the version in the index; -1 for the newest.
        options: fsspec storage options.
    """

    def __init__(self, url: str, version: int = -1, *, options: storage.Options = None) -> None:
        self.url = url
        self._version = version
        self._options = options
        self._places: dict[MetadataIndex, ShardLocation] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: the constructor takes the version."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the contents of the version.

        Raises:
            CorruptCheckpoint: The index is damaged.
        """
        plain = _index_store(self.url, options=self._options).load(self._version)
        with damage_named("not an index", self.url):
            return _metadata_from(plain)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any) -> None:
        """Store the locations of the shards."""
        assert metadata.storage_data is not None
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(
        self,
        plan: LoadPlan,
        planner: LoadPlanner,
    ) -> Future[None]:
        """Read only the tensors that this rank needs, from the ranks that wrote them."""
        needed: dict[tuple[int, int], list[Any]] = defaultdict(list)
        for item in plan.items:
            place = self._places[item.storage_index]
            needed[place.rank, place.version].append((item, place))
        for (rank, version), items in needed.items():
            _read(_rank_store(self.url, rank, options=self._options), version, items, planner)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, *_: Any) -> bool:
        """Accept any folder."""
        return True


def _read(
    store: DeltaStore,
    version: int,
    items: Sequence[tuple[ReadItem, ShardLocation]],
    planner: LoadPlanner,
) -> None:
    found = store.load(version, names={place.name or "objects" for _, place in items})
    for item, place in items:
        if item.type == LoadItemType.BYTE_IO:
            # The planner expects bytes from torch.save; they are made here from plain values.
            data = io.BytesIO()
            torch.save(found["objects"][item.storage_index.fqn], data)
            data.seek(0)
            planner.load_bytes(item, data)
            continue
        tensor = found[place.name]
        ranges = zip(item.storage_offsets, item.lengths, strict=True)
        for dimension, (start, length) in enumerate(ranges):
            tensor = tensor.narrow(dimension, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor)
        planner.commit_tensor(item, target)


def _plain_metadata(
    metadata: Metadata, places: dict[MetadataIndex, ShardLocation]
) -> dict[str, Any]:
    """Return torch's metadata of a checkpoint as plain values."""
    tensors: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            chunks = [[chunk.offsets, chunk.sizes] for chunk in entry.chunks]
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "size": entry.size, "chunks": chunks}
        else:
            tensors[name] = None
    rows = [[index.fqn, index.offset, *place] for index, place in places.items()]
    return {"entries": tensors, "planner": metadata.planner_data, "places": rows}


def _metadata_from(plain: dict[str, Any]) -> Metadata:
    entries: dict[str, Any] = {}
    for name, entry in plain["entries"].items():
        entries[name] = BytesStorageMetadata() if entry is None else _tensor_metadata(entry)
    places = {}
    for name, offset, rank, version, path in plain["places"]:
        index = MetadataIndex(name, None if offset is None else torch.Size(offset))
        places[index] = ShardLocation(int(rank), int(version), str(path))
    return Metadata(entries, planner_data=plain["planner"], storage_data=places)


def _tensor_metadata(entry: dict[str, Any]) -> TensorStorageMetadata:
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"expected a type of tensors, got {entry['dtype']}")
    chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in entry["chunks"]
    ]
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(entry["size"]), chunks)
