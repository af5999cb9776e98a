"""From files to a version: the chain of deltas down to what needs no reference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from ..checksum import crc32c
from ..errors import BrokenChain, CorruptCheckpoint
from .held_version import HeldVersion, Progress, Steps, each, restore_all
from .tensor_codec import INTRA, Held, decode
from .version_file import TensorEntry, VersionFile, named

Layer = tuple[VersionFile, list[TensorEntry]]
Opener = Callable[[int], VersionFile]


def chain_of(file: VersionFile, open_version: Opener) -> Iterator[VersionFile]:
    """A version's file, then its parent's, and so on down to one without a parent.

    Args:
        file: The version.
        open_version: Opens the file of a number.

    Raises:
        BrokenChain: A parent is missing, is another version, or leads back to its child.
    """
    seen = set()
    yield file
    while file.header.parent is not None:
        seen.add(file.header.number)
        number, wanted = file.header.parent
        if number in seen:
            raise BrokenChain(f"version {number} is its own reference", url=file.url)
        parent = open_version(number)
        if parent.header.id != wanted:
            raise BrokenChain(
                f"expected version {number} to be {wanted.hex()}, got {parent.header.id.hex()}",
                url=file.url,
            )
        file = parent
        yield file


def plan_layers(chain: Iterator[VersionFile], paths: Collection[str]) -> list[Layer]:
    """Which entries of which files the tensors need; files are opened only as far as needed.

    Raises:
        BrokenChain: A tensor's reference is not in the parent.
    """
    layers: list[Layer] = []
    wanted = set(paths)
    for file in chain:
        entries = [entry for entry in file.header.tensors if entry.path in wanted]
        missing = wanted - {entry.path for entry in entries}
        if missing:
            message = "expected the reference of a tensor, it is not there"
            raise BrokenChain(message, url=file.url, key=min(missing))
        layers.append((file, entries))
        wanted = {entry.path for entry in entries if entry.described.coder != INTRA}
        if not wanted:
            break
    return layers


def read_tensors(
    layers: Sequence[Layer],
    *,
    verify: bool = True,
    workers: int = 1,
    progress: Progress | None = None,
) -> dict[str, Held]:
    """What is held of the tensors of the first layer.

    Args:
        layers: Of :func:`plan_layers`.
        verify: Compare each restored tensor with its checksum.
        workers: Threads.
        progress: Called with the payloads that are decoded.

    Raises:
        BrokenChain: A reference does not fit.
        CorruptCheckpoint: A payload or a restored tensor does not match its checksum.
    """
    steps = Steps(sum(len(entries) for _, entries in layers), progress)
    held: dict[str, Held] = {}
    for file, entries in reversed(layers):
        held = _decode_layer(file, entries, held, workers, steps)
    if verify:
        file, entries = layers[0]
        with named(file.url):
            each(workers, lambda entry: _check_tensor(entry, held[entry.path]), entries)
    return held


def _decode_layer(
    file: VersionFile,
    entries: list[TensorEntry],
    below: Mapping[str, Held],
    workers: int,
    steps: Steps,
) -> dict[str, Held]:
    def work(item: tuple[TensorEntry, Any]) -> tuple[str, Held]:
        entry, payload = item
        with named(file.url, entry.path):
            return entry.path, decode(entry.described, payload, below.get(entry.path))

    if workers <= 1:
        return dict(steps.counted(map(work, file.payloads(entries))))
    # The buffer of a payload is used again: threads get copies.
    copies = [(entry, memoryview(bytes(view))) for entry, view in file.payloads(entries)]
    return dict(each(workers, work, copies, steps))


def _check_tensor(entry: TensorEntry, held: Held) -> None:
    found = crc32c(held.restore())
    if found != entry.content_crc:
        raise CorruptCheckpoint(
            f"the restored tensor has the checksum {found:08x}, expected {entry.content_crc:08x}",
            key=entry.path,
        )


def read_version(
    file: VersionFile,
    open_version: Opener,
    *,
    verify: bool = True,
    workers: int = 1,
    progress: Progress | None = None,
) -> HeldVersion:
    """A whole version; the progress is that of :func:`read_tensors`.

    Raises:
        BrokenChain: A reference is missing or is another one.
        CorruptCheckpoint: Something does not match its checksum.
    """
    paths = [entry.path for entry in file.header.tensors]
    layers = plan_layers(chain_of(file, open_version), paths)
    found = read_tensors(layers, verify=False, workers=workers, progress=progress)
    version = _assemble(file, found)
    if verify:
        with named(file.url):
            restore_all(version, workers=workers)
    return version


def read_against(
    file: VersionFile,
    reference: Mapping[str, Held],
    *,
    workers: int = 1,
) -> HeldVersion:
    """A whole version whose reference is in memory; always verified.

    Raises:
        BrokenChain: A tensor's reference does not fit.
        CorruptCheckpoint: Something does not match its checksum.
    """
    entries = list(file.header.tensors)
    found = _decode_layer(file, entries, reference, workers, Steps(len(entries)))
    version = _assemble(file, found)
    with named(file.url):
        restore_all(version, workers=workers)
    return version


def _assemble(file: VersionFile, found: Mapping[str, Held]) -> HeldVersion:
    header = file.header
    return HeldVersion(
        header.number,
        header.id,
        header.tree,
        {entry.path: found[entry.path] for entry in header.tensors},
        {entry.path: entry.content_crc for entry in header.tensors},
        header.metrics,
        header.saved,
    )
