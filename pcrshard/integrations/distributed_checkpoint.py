"""``torch.distributed.checkpoint`` in DeltaStores: each rank stores its shards as deltas.

A folder holds one store per rank, and an index store whose versions refer to the versions of the
ranks. The coordinator commits by writing the index after all ranks have written. Files contain no
pickles; objects other than tensors are stored as a typed tree.
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
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
from ..checkpoint.roles import assign_roles, find_roles
from ..checkpoint.typed_tree import flatten
from ..lazy import lazy


class ShardLocation(NamedTuple):
    """The rank that wrote a shard or an object, and the version in the rank's store."""

    rank: int
    version: int


Places = dict[MetadataIndex, ShardLocation]


def _path(index: MetadataIndex) -> tuple[str, str]:
    """Return the path of a shard or an object in its version.

    >>> _path(MetadataIndex("optim.state.layer.weight.exp_avg", (0, 8)))
    ('0,8', 'optim.state.layer.weight.exp_avg')
    """
    if index.offset is None:
        return "object", index.fqn
    return ",".join(map(str, index.offset)) or "scalar", index.fqn


def _done(result: Any) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(result)
    return done


class _Stores:
    """The stores of a folder; plans stay as torch makes them."""

    def __init__(self, url: str | os.PathLike[str], **how: Any) -> None:
        self.url = os.fspath(url)
        self._how = how

    def _store(self, rank: int) -> DeltaStore:
        """Open the store of a rank."""
        return DeltaStore(storage.join(self.url, f"rank-{rank:05d}"), **self._how)

    @lazy
    def _index(self) -> DeltaStore:
        return DeltaStore(storage.join(self.url, "index"), **self._how)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: versions have numbers, whatever the id."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        """Return the plans unchanged."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, *_: Any) -> bool:
        """Accept any folder."""
        return True


class DeltaStorageWriter(_Stores, StorageWriter):
    """A storage writer for ``torch.distributed.checkpoint.save``; each call adds a version.

    Args:
        url: The folder, a local path or any fsspec URL.
        how: Options of :class:`DeltaStore`: ``precision``, ``keyframe_every``...
    """

    def set_up_storage_writer(self, *_: Any, **__: Any) -> None:
        """Do nothing: stores are opened at first use."""

    @lazy
    def _own(self) -> tuple[int, DeltaStore]:
        """This rank, and its store."""
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return rank, self._store(rank)

    def write_data(
        self,
        plan: SavePlan,
        planner: SavePlanner,
    ) -> Future[list[WriteResult]]:
        """Save this rank's shards as one version."""
        state: dict[str, dict[str, Any]] = defaultdict(dict)
        num_bytes = []
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                look_up: Any = getattr(planner, "lookup_object")  # noqa: B009  # not in its type
                value = look_up(item.index)
            else:
                value = planner.resolve_data(item)
            offset, name = _path(item.index)
            state[offset][name] = value
            num_bytes.append(getattr(value, "nbytes", 0))
        tree, leaves = flatten(dict(state))
        # The names that users know: roles and patterns are the same on all ranks.
        for leaf in leaves:
            leaf.uses = [use.partition(".")[2] for use in leaf.uses]
        assign_roles(leaves, find_roles(getattr(planner, "state_dict", {})))
        rank, store = self._own
        place = ShardLocation(rank, store.save_flat(tree, leaves, {}, blocking=True))
        sizes = zip(plan.items, num_bytes, strict=True)
        return _done([WriteResult(item.index, size, place) for item, size in sizes])

    def finish(
        self,
        metadata: Metadata,
        results: list[list[WriteResult]],
    ) -> None:
        """Commit the version; called on the coordinator after all ranks have written."""
        places = {result.index: result.storage_data for each in results for result in each}
        self._index.save(_plain_metadata(metadata, places), blocking=True)


class DeltaStorageReader(_Stores, StorageReader):
    """A storage reader for ``torch.distributed.checkpoint.load``, on any number of ranks.

    Args:
        url: The folder of :class:`DeltaStorageWriter`.
        version: Number of the version in the index; -1 for the newest.
        options: fsspec storage options.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        version: int = -1,
        *,
        options: storage.Options = None,
    ) -> None:
        super().__init__(url, options=options)
        self._version = version
        self._places: Places = {}

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the contents of the version.

        Raises:
            CorruptCheckpoint: The index is damaged.
        """
        plain = self._index.load(self._version)
        with damage_named("not an index", self.url):
            return _metadata_from(plain)

    def set_up_storage_reader(self, metadata: Metadata, *_: Any, **__: Any) -> None:
        """Store the locations of the shards."""
        assert metadata.storage_data is not None
        self._places = metadata.storage_data

    def read_data(
        self,
        plan: LoadPlan,
        planner: LoadPlanner,
    ) -> Future[None]:
        """Read only the tensors that this rank needs, from the ranks that wrote them."""
        needed: dict[ShardLocation, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            needed[self._places[item.storage_index]].append(item)
        for (rank, version), items in needed.items():
            paths = [".".join(_path(item.storage_index)) for item in items]
            found = self._store(rank).load(version, names=set(paths))
            for item, path in zip(items, paths, strict=True):
                _hand_over(found[path], item, planner)
        return _done(None)


def _hand_over(value: Any, item: ReadItem, planner: LoadPlanner) -> None:
    """Give a planner an object, or the part of a tensor that it asked for."""
    if item.type == LoadItemType.BYTE_IO:
        # The planner expects bytes from torch.save; they are made here from plain values.
        data = io.BytesIO()
        torch.save(value, data)
        data.seek(0)
        planner.load_bytes(item, data)
        return
    ranges = zip(item.storage_offsets, item.lengths, strict=True)
    for dimension, (start, length) in enumerate(ranges):
        value = value.narrow(dimension, start, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(value)
    planner.commit_tensor(item, target)


def _plain_metadata(metadata: Metadata, places: Places) -> dict[str, Any]:
    """Return torch's metadata of a checkpoint, and the places, as plain values."""
    entries: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            entries[name] = list(places[MetadataIndex(name)])
            continue
        chunks = [
            [chunk.offsets, chunk.sizes, *places[MetadataIndex(name, chunk.offsets)]]
            for chunk in entry.chunks
        ]
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        entries[name] = {"dtype": dtype, "size": entry.size, "chunks": chunks}
    return {"entries": entries, "planner": metadata.planner_data}


def _metadata_from(plain: dict[str, Any]) -> Metadata:
    entries: dict[str, Any] = {}
    places: Places = {}
    for name, entry in plain["entries"].items():
        if isinstance(entry, list):
            entries[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = ShardLocation(*map(int, entry))
            continue
        dtype = getattr(torch, entry["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"expected a type of tensors, got {entry['dtype']}")
        chunks = []
        for offsets, sizes, *place in entry["chunks"]:
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            places[MetadataIndex(name, offsets)] = ShardLocation(*map(int, place))
        size = torch.Size(entry["size"])
        entries[name] = TensorStorageMetadata(TensorProperties(dtype), size, chunks)
    return Metadata(entries, planner_data=plain["planner"], storage_data=places)
