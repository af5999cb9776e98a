"""A whole version in memory as it is stored: made of a state, written to a file, made a state."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import fnmatch
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from .. import storage
from ..checksum import crc32c
from ..errorbound import Bound, Words
from ..errors import CorruptCheckpoint
from .file_frame import HEAD_BYTES
from .tensor_codec import Held, encode, hold
from .tensors import spec_of, tensor_from, words_of
from .typed_tree import Flattened, Leaf, unflatten
from .version_file import TensorEntry, VersionFile, VersionHeader, content_id, describe

T = TypeVar("T")
S = TypeVar("S")
# Called with the pieces of work that are done, and with all that are to be done.
Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Which error is allowed where; ``None`` is lossless.

    Attributes:
        weights: For tensors of two dimensions and more.
        optimizer: The same in the state of an optimizer.
        second_moment: The same for ``exp_avg_sq`` and its like.
        exact: Patterns of paths (``*.embedding.*``) of tensors that are stored losslessly.
    """

    weights: Bound | None = None
    optimizer: Bound | None = None
    second_moment: Bound | None = None
    exact: tuple[str, ...] = ()

    def of(self, leaf: Leaf) -> Bound | None:
        """The bound of one tensor."""
        if any(fnmatch.fnmatchcase(leaf.path, pattern) for pattern in self.exact):
            return None
        by_role = {
            "weight": self.weights,
            "optimizer": self.optimizer,
            "second-moment": self.second_moment,
        }
        return by_role.get(leaf.role)


@dataclasses.dataclass(frozen=True)
class HeldVersion:
    """A version as it is stored.

    Attributes:
        number: Its number in its store.
        id: SHA-256 of its restored content.
        tree: The state without its tensors.
        tensors: What is held of each tensor, by path.
        content_crcs: CRC-32C of each restored tensor.
        metrics: What the user noted.
        saved: Seconds since 1970.
    """

    number: int
    id: bytes
    tree: Any
    tensors: Mapping[str, Held]
    content_crcs: Mapping[str, int]
    metrics: dict[str, Any]
    saved: float

    @property
    def raw_bytes(self) -> int:
        """Bytes of all tensors, restored."""
        return sum(held.spec.num_bytes for held in self.tensors.values())


class Steps:
    """Counts the pieces of work that are done.

    Args:
        total: All that are to be done.
        progress: Who wants to know, if anybody.
    """

    def __init__(self, total: int, progress: Progress | None = None) -> None:
        self._done = 0
        self._total = total
        self._progress = progress

    def counted(self, results: Iterable[T]) -> Iterator[T]:
        """The results, each counted as it comes."""
        for result in results:
            self._done += 1
            if self._progress is not None:
                self._progress(self._done, self._total)
            yield result


def each(
    workers: int,
    work: Callable[[S], T],
    items: Iterable[S],
    steps: Steps | None = None,
) -> list[T]:
    """The results of work on items, by so many threads: the coders give up the GIL."""
    steps = Steps(0) if steps is None else steps
    if workers <= 1:
        return list(steps.counted(map(work, items)))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(steps.counted(pool.map(work, items)))


def make_version(
    state: Flattened,
    bounds: Bounds,
    before: HeldVersion | None,
    *,
    number: int,
    metrics: dict[str, Any],
    workers: int = 1,
) -> HeldVersion:
    """What is stored of a state.

    Args:
        state: Of :func:`.typed_tree.flatten`.
        bounds: The errors that are allowed.
        before: The version before, whose lattices are kept where they still fit.
        number: The new version's number.
        metrics: What the user notes.
        workers: Threads.
    """
    known: Mapping[str, Held] = {} if before is None else before.tensors

    def work(leaf: Leaf) -> _Restored:
        return _hold_leaf(leaf, bounds, known.get(leaf.path))

    found = each(workers, work, state.leaves)
    digests = [(restored.path, restored.held, restored.digest) for restored in found]
    return HeldVersion(
        number=number,
        id=content_id(state.tree, digests),
        tree=state.tree,
        tensors={restored.path: restored.held for restored in found},
        content_crcs={restored.path: restored.checksum for restored in found},
        metrics=metrics,
        saved=time.time(),
    )


class _Restored(NamedTuple):
    """What is held of a tensor, and what its restored bytes are known by."""

    path: str
    held: Held
    digest: bytes
    checksum: int


def _hold_leaf(
    leaf: Leaf,
    bounds: Bounds,
    before: Held | None,
) -> _Restored:
    held = hold(words_of(leaf.tensor), spec_of(leaf.tensor), bounds.of(leaf), before)
    restored = held.restore()
    digest = hashlib.sha256(restored.data).digest()
    return _Restored(leaf.path, held, digest, crc32c(restored))


@dataclasses.dataclass(frozen=True)
class Written:
    """A version file that was written.

    Attributes:
        header_bytes: Of the packed header.
        num_bytes: Of the file.
    """

    header_bytes: int
    num_bytes: int


def write_version(
    url: str,
    version: HeldVersion,
    parent: HeldVersion | None,
    *,
    options: storage.Options | None = None,
    workers: int = 1,
    progress: Progress | None = None,
    durable: bool = True,
) -> Written:
    """Write a version as a file that appears whole or not at all.

    Args:
        url: Where the file appears.
        version: What it holds.
        parent: The version that deltas refer to; ``None`` for a keyframe.
        options: fsspec storage options.
        workers: Threads.
        progress: Called with the tensors that are encoded.
        durable: Whether a local file must survive a power cut.

    Raises:
        StorageError: The disk is full, or the store refuses.
    """
    steps = Steps(len(version.tensors), progress)
    encoded = _encode_all(version, parent, workers, steps)
    entries = _placed([entry for entry, _ in encoded])
    head = _header(version, parent, entries).pack()
    # The temporary file of an upload need not survive a power cut.
    durable = durable and storage.is_local(url)
    with storage.atomic_write(url, options=options, durable=durable) as file:
        file.write(head)
        for _, parts in encoded:
            file.writelines(parts)
    payload_bytes = entries[-1].stop if entries else 0
    return Written(len(head) - HEAD_BYTES, len(head) + payload_bytes)


def copy_version(
    url: str,
    source: VersionFile,
    number: int,
    parent: tuple[int, bytes] | None,
    *,
    options: storage.Options | None = None,
    durable: bool = True,
) -> Written:
    """Write a file's version under another number, which takes no coding.

    Args:
        url: Where the copy appears.
        source: The file.
        number: The version's number in the copy.
        parent: The same parent as in the source, with its number in the new place.
        options: fsspec storage options.
        durable: Whether a local file must survive a power cut.

    Raises:
        CorruptCheckpoint: A payload of the source does not match its checksum.
        StorageError: A file cannot be read or written.
    """
    head = dataclasses.replace(source.header, number=number, parent=parent).pack()
    durable = durable and storage.is_local(url)
    with storage.atomic_write(url, options=options, durable=durable) as file:
        file.write(head)
        for _, payload in source.payloads(source.header.tensors):
            file.write(payload)
    return Written(len(head) - HEAD_BYTES, len(head) + source.header.payload_bytes())


def _encode_all(
    version: HeldVersion,
    parent: HeldVersion | None,
    workers: int,
    steps: Steps,
) -> list[tuple[TensorEntry, Sequence[bytes]]]:
    references: Mapping[str, Held] = {} if parent is None else parent.tensors

    def work(path: str) -> tuple[TensorEntry, Sequence[bytes]]:
        held = version.tensors[path]
        encoded = encode(held, references.get(path))
        return describe(path, held, encoded, version.content_crcs[path]), encoded.parts

    return each(workers, work, version.tensors, steps)


def _placed(entries: Sequence[TensorEntry]) -> tuple[TensorEntry, ...]:
    """The entries with the places of their payloads, one after the other."""
    placed: list[TensorEntry] = []
    start = 0
    for entry in entries:
        placed.append(dataclasses.replace(entry, start=start))
        start = placed[-1].stop
    return tuple(placed)


def _header(
    version: HeldVersion,
    parent: HeldVersion | None,
    entries: tuple[TensorEntry, ...],
) -> VersionHeader:
    return VersionHeader(
        number=version.number,
        id=version.id,
        parent=None if parent is None else (parent.number, parent.id),
        tree=version.tree,
        tensors=entries,
        metrics=version.metrics,
        saved=version.saved,
    )


def one_delta(
    target: Flattened,
    reference: Flattened,
    bounds: Bounds,
) -> tuple[float, Any]:
    """How small the difference of two states is within bounds, and what comes back.

    Returns:
        Bytes of the target's tensors by bytes of their deltas, and the restored state.
    """
    first = make_version(reference, bounds, None, number=1, metrics={})
    second = make_version(target, bounds, first, number=2, metrics={})
    sizes = [
        encode(held, first.tensors.get(path)).num_bytes for path, held in second.tensors.items()
    ]
    restored = restore_all(second, verify=False)
    return second.raw_bytes / max(sum(sizes), 1), state_of(second, restored)


def restore_all(
    version: HeldVersion,
    *,
    verify: bool = True,
    workers: int = 1,
) -> dict[str, Words]:
    """The words of each tensor, by path, compared with the content that the id stands for.

    Raises:
        CorruptCheckpoint: The version restores to other content.
    """

    def work(path: str) -> tuple[Words, bytes]:
        words = version.tensors[path].restore()
        return words, hashlib.sha256(words.data).digest() if verify else b""

    found = dict(zip(version.tensors, each(workers, work, version.tensors), strict=True))
    if verify:
        digests = [(path, version.tensors[path], digest) for path, (_, digest) in found.items()]
        made = content_id(version.tree, digests)
        if made != version.id:
            message = f"version {version.number} restores to {made.hex()}"
            raise CorruptCheckpoint(f"{message}, expected {version.id.hex()}")
    return {path: words for path, (words, _) in found.items()}


def tensor_of(
    held: Held,
    words: Words,
    map_location: Any = None,
) -> Any:
    """A tensor of restored words, with memory of its own."""
    # Without a lattice they may lie in memory that another version shares, or cannot be written.
    own = words.copy() if held.lattice is None else words
    tensor = tensor_from(own, held.spec)
    return tensor if map_location is None else tensor.to(map_location)


def state_of(
    version: HeldVersion,
    words: Mapping[str, Words],
    map_location: Any = None,
) -> Any:
    """The state of a version, each tensor that it holds once made once.

    Raises:
        CorruptCheckpoint: The tree does not fit the tensors.
    """
    paths = list(version.tensors)
    made: dict[int, Any] = {}

    def leaf(number: int) -> Any:
        if not 0 <= number < len(paths):
            raise CorruptCheckpoint(f"expected one of {len(paths)} tensors, got {number}")
        if number not in made:
            path = paths[number]
            made[number] = tensor_of(version.tensors[path], words[path], map_location)
        return made[number]

    return unflatten(version.tree, leaf)
