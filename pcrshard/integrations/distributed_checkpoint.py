"""``torch.distributed.checkpoint`` in DeltaStores: each rank stores its shards as deltas.

A folder holds one store per rank, and an index store whose versions refer to the versions of the
ranks. The coordinator commits by writing the index after all ranks have written. A checkpoint's id
is a metric of its version in the index. Files contain no pickles; objects other than tensors are
stored as a typed tree.
"""

from __future__ import annotations

import io
import os
import re
from collections import defaultdict
from collections.abc import Collection
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
from ..checkpoint import DeltaStore, VersionRecord
from ..checkpoint.frame import MAX_TEXT, damage_named
from ..checkpoint.roles import assign_roles, find_roles
from ..checkpoint.typed_tree import flatten
from ..errors import VersionUnavailable
from ..lazy import lazy

# The folder of the index store, and the metric that holds a checkpoint's id.
INDEX = "index"
_ID = "checkpoint_id"
_RANK = re.compile(r"rank-([0-9]{5,})")


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
        self._id: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the stores, which another process opens itself."""
        return {name: vars(self)[name] for name in vars(self) if name not in ("_index", "_own")}

    def _store(self, rank: int) -> DeltaStore:
        """Open the store of a rank."""
        return DeltaStore(storage.join(self.url, f"rank-{rank:05d}"), **self._how)

    @lazy
    def _index(self) -> DeltaStore:
        return DeltaStore(storage.join(self.url, INDEX), **self._how)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the id of the checkpoint that is written or read next, and of no other."""
        self._id = None if checkpoint_id is None else str(checkpoint_id)

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        """Return the plans unchanged."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether an id can be recorded: any text that is not empty."""
        return 0 < len(str(checkpoint_id)) <= MAX_TEXT

    def versions(self) -> list[VersionRecord]:
        """Return the records of all checkpoints, oldest first.

        The id that a checkpoint was saved under is its metric ``checkpoint_id``.
        """
        return self._index.versions()

    def _number(self, checkpoint_id: str) -> int:
        """Return the number of the newest version of an id."""
        found = {record.metrics.get(_ID): record.number for record in self.versions()}
        if checkpoint_id not in found:
            known = [name for name in found if name is not None][-20:]
            message = f"expected one of the checkpoint ids {known}, got {checkpoint_id!r}"
            raise VersionUnavailable(message, url=self.url)
        return found[checkpoint_id]


class DeltaStorageWriter(_Stores, StorageWriter):
    """A storage writer for ``torch.distributed.checkpoint.save``; each call adds a version.

    A ``checkpoint_id`` names the version; saving under the same id again adds a newer version.

    Args:
        url: The folder, a local path or any fsspec URL.
        how: Options of :class:`DeltaStore`: ``precision``, ``keyframe_every``...
    """

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the id that was set for this save.

        Raises:
            ValueError: Each rank would write an index of its own.
        """
        del is_coordinator, args
        if not kwargs.get("use_collectives", True):
            raise ValueError("expected use_collectives=True: all ranks share one index")
        self._saved_id, self._id = self._id, None

    @lazy
    def _own(self) -> tuple[int, DeltaStore]:
        """This rank, and its store."""
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return rank, self._store(rank)

    def delete(self, *, keep: Collection[int | str]) -> None:
        """Delete all checkpoints except some, from the index and from the stores of all ranks.

        Call it on one rank, while no rank saves.

        Args:
            keep: Ids of checkpoints, or numbers of versions in the index; negative ones count back
                from the newest. Of several versions of an id, the newest is kept.

        Raises:
            VersionUnavailable: A checkpoint to keep does not exist; nothing was changed.
            ConcurrentWriter: Another process has written to a store; calling again resumes.
            BrokenChain, CorruptCheckpoint: A version to keep cannot be restored.
            StorageError: A file cannot be read or written.
        """
        self._index.delete(keep=[self._number(k) if isinstance(k, str) else k for k in keep])
        used: dict[int, set[int]] = defaultdict(set)
        for record in self.versions():
            for rank, version in _read_metadata(self._index, record.number).storage_data.values():
                used[rank].add(version)
        for rank in _ranks(self.url, self._how.get("options")):
            store = self._store(rank)
            store.delete(keep=used[rank])

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
        rank, store = self._own
        tree, leaves = flatten(dict(state), None)
        # The names that users know: roles and patterns are the same on all ranks.
        for leaf in leaves:
            leaf.uses = [use.partition(".")[2] for use in leaf.uses]
        assign_roles(leaves, find_roles(getattr(planner, "state_dict", {})))
        store.settled()  # another rank may have deleted versions
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
        self._index.settled()
        named = {} if self._saved_id is None else {_ID: self._saved_id}
        self._index.save(_plain_metadata(metadata, places), metrics=named, blocking=True)


class DeltaStorageReader(_Stores, StorageReader):
    """A storage reader for ``torch.distributed.checkpoint.load``, on any number of ranks.

    Args:
        url: The folder of :class:`DeltaStorageWriter`.
        version: Number of the version in the index, unless a load has a ``checkpoint_id``; -1 for
            the newest.
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

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Return the contents of the version, or of the checkpoint whose id was set for this load.

        Raises:
            VersionUnavailable: There is no such version or id.
            CorruptCheckpoint: The index is damaged.
            ValueError: The metadata of one rank is asked for; there is one index.
        """
        if args or options:
            raise ValueError("expected no arguments: all ranks share one index")
        checkpoint_id, self._id = self._id, None
        number = self._version if checkpoint_id is None else self._number(checkpoint_id)
        return _read_metadata(self._index, number)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Store the locations of the shards."""
        del is_coordinator, args, kwargs
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


def _read_metadata(index: DeltaStore, number: int) -> Metadata:
    plain = index.load(number)
    with damage_named("not an index", index.url):
        return _metadata_from(plain)


def _ranks(url: str, options: storage.Options) -> list[int]:
    """Return the ranks that have a store in a folder."""
    matches = map(_RANK.fullmatch, storage.list_names(url, options=options))
    return sorted(int(match[1]) for match in matches if match)


def list_checkpoints(url: str, options: storage.Options = None) -> dict[str, Any]:
    """Return the checkpoints of a folder, and the sizes of its stores together, as plain values."""
    reader = DeltaStorageReader(url, options=options)
    ranks = _ranks(url, options)
    sizes = [
        (record.file_bytes, record.raw_bytes)
        for records in (reader.versions(), *(reader._store(rank).versions() for rank in ranks))
        for record in records
    ]
    return {
        "ranks": len(ranks),
        "file_bytes": sum(file_bytes for file_bytes, _ in sizes),
        "raw_bytes": sum(raw_bytes for _, raw_bytes in sizes),
        "versions": [
            {
                "number": record.number,
                "checkpoint_id": record.metrics.get(_ID),
                "saved": record.saved,
            }
            for record in reader.versions()
        ],
    }


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
