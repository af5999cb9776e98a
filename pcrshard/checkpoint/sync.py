"""Weights from a trainer to inference servers: sparse lossless patches, applied in place.

See docs/checkpoints-format.md, section 4. A step is a patch of the step before; of bfloat16 weights
of which 1.3 % of the words changed it takes about 1.2 bytes for each of these.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .. import storage
from ..checksum import crc32c
from ..errors import (
    BrokenChain,
    ConcurrentWriter,
    CorruptCheckpoint,
    StorageError,
    UnsupportedState,
    VersionUnavailable,
)
from .frame import (
    HEAD_BYTES,
    Digest,
    Number,
    Record,
    Text,
    damage_named,
    encode,
    header_bytes,
    pack_frame,
    require,
    unpack_frame,
)
from .patch import apply_patch, encode_patch
from .safetensors_file import DTYPES, load_tensors
from .tensors import ITEM_BYTES, TensorSpec, check_storable, spec_of, tensor_from, words_of
from .version_file import parallel_map

MAGIC = b"\x89PCW\r\n\x1a\n"
MODEL_NAME = "model.safetensors"
_STATE_NAME = ".mirror.json"
_JOURNAL_NAME = ".mirror.journal"
_LATEST = "latest"
# A block stays in a core's cache while it is compared and checked.
_BLOCK_WORDS = 1 << 19
# Of the journal, for each worker: twice the number of its next block, odd while that block is being
# changed; then that block as it was.
_JOURNAL_BYTES = 64 + 4 * _BLOCK_WORDS
_SAME, _PATCH, _WHOLE, _BY_EXPONENT = range(4)
_SMALL = 19  # the level of compression for slow links
_POLL_SECONDS = 0.05


class Block(NamedTuple):
    """A part of the weights' bytes ``[start, stop)`` that is one patch."""

    start: int
    stop: int
    item_bytes: int


class Layout:
    """Where tensors lie in a safetensors file, in the order of its own library.

    Args:
        specs: Type and shape of each tensor by name.

    Attributes:
        specs: The same, in the order of the file.
        starts: Where each tensor's bytes start, after the header.
        blocks: The parts that are patched.
        num_bytes: Bytes of all tensors.
    """

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        order = sorted(specs, key=lambda name: (-ITEM_BYTES[specs[name].dtype], name))
        self.specs = {name: specs[name] for name in order}
        self.starts: dict[str, int] = {}
        self.blocks: list[Block] = []
        self.num_bytes = 0
        for name, spec in self.specs.items():
            self.starts[name] = self.num_bytes
            item_bytes = min(ITEM_BYTES[spec.dtype], 4)
            stop = self.num_bytes + spec.num_bytes
            size = _BLOCK_WORDS * item_bytes
            for start in range(self.num_bytes, stop, size):
                self.blocks.append(Block(start, min(start + size, stop), item_bytes))
            self.num_bytes = stop

    def header(self) -> bytes:
        """Return the header of a safetensors file."""
        found: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, spec in self.specs.items():
            start = self.starts[name]
            found[name] = {
                "dtype": DTYPES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [start, start + spec.num_bytes],
            }
        text = json.dumps(found, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def split(self, data: NDArray[np.uint8]) -> list[NDArray[Any]]:
        """Return the words of each block of the weights' bytes."""
        return [data[b.start : b.stop].view(f"u{b.item_bytes}") for b in self.blocks]


class StepHeader(Record, frozen=True):
    """The header of a step or keyframe.

    Attributes:
        number: Of the step, from 1.
        digest: SHA-256 of the header with a digest of zeros, and of the payloads.
        step: For a keyframe the id of the step that leads to the same weights; ``None`` for a step,
            whose id is its digest.
        parent: The id of the step that this one is a patch of; ``None`` for all weights.
        sha256: SHA-256 of all weights after the step, if the publisher was asked for it.
        tensors: Name, type and shape of each tensor, in the order of the file.
        coders: A byte for each block.
        sizes: (blocks,) u32, bytes of each payload.
        crcs: (blocks,) u32, CRC-32C of each block after the step.
    """

    number: Number
    digest: Digest
    step: Digest | None
    parent: Digest | None
    sha256: Digest | None
    tensors: list[tuple[Text, TensorSpec]]
    coders: bytes
    sizes: bytes
    crcs: bytes

    @property
    def id(self) -> bytes:
        """What the weights after the step are called."""
        return self.step or self.digest

    def digest_with(self, payloads: list[Any]) -> bytes:
        """Return what the digest must be."""
        digest = hashlib.sha256(encode(self.replace(digest=bytes(32))))
        for payload in payloads:
            digest.update(payload)
        return digest.digest()


class WeightPublisher:
    """Publishes weights to a folder, as patches of what it published before.

    It holds a copy of the weights, and when it starts, when the names or shapes change, and every
    ``keyframe_every`` steps it publishes all of them, for new mirrors.

    Args:
        url: The folder, local or at any fsspec URL; any web server can offer it.
        keyframe_every: Steps from one keyframe to the next.
        slow_link: Make steps about 20 % smaller, at a tenth of the speed.
        sha256: Also send SHA-256 of all weights with each step, which mirrors then compare.
        workers: Threads.
        options: fsspec storage options.
    """

    def __init__(
        self,
        url: str,
        *,
        keyframe_every: int = 50,
        slow_link: bool = False,
        sha256: bool = False,
        workers: int = 1,
        options: storage.Options | None = None,
    ) -> None:
        self.url = url
        self._every = keyframe_every
        self._is_slow_link = slow_link
        self._needs_sha256 = sha256
        self._workers = workers
        self._options = options
        # What was published; None when that is not known.
        self._last: StepHeader | None = None
        self._layout = Layout({})
        self._held = np.empty(0, np.uint8)

    def publish(self, weights: Mapping[str, torch.Tensor] | str) -> int:
        """Publish weights; return the number of the step.

        Args:
            weights: Tensors by name, or the path of a safetensors file.

        Raises:
            UnsupportedState: A tensor has no values of its own, or a type safetensors lacks.
            ConcurrentWriter: Another process publishes to this folder.
            StorageError: The folder cannot be written to.
        """
        tensors = load_tensors(weights) if isinstance(weights, str) else weights
        for name, tensor in tensors.items():
            check_storable(tensor, name)
            if spec_of(tensor).dtype not in DTYPES:
                raise UnsupportedState(f"safetensors has no {spec_of(tensor).dtype}", key=name)
        layout = Layout({name: spec_of(tensor) for name, tensor in tensors.items()})
        # If this fails, what is held was not published.
        last, self._last = self._last, None
        if last is None or layout.specs != self._layout.specs:
            self._layout, self._held = layout, np.empty(layout.num_bytes, np.uint8)
            last = None
        number = 1 + (max(self._numbers(), default=0) if last is None else last.number)
        encoded = self._encode(tensors, is_new=last is None)
        header = StepHeader(
            number=number,
            digest=bytes(32),
            step=None,
            parent=None if last is None else last.id,
            sha256=hashlib.sha256(self._held.data).digest() if self._needs_sha256 else None,
            tensors=list(self._layout.specs.items()),
            coders=bytes(coder for coder, _, _ in encoded),
            sizes=b"",
            crcs=np.array([crc for _, _, crc in encoded], "<u4").tobytes(),
        )
        header = self._write("step", header, [payload for _, payload, _ in encoded])
        if number % self._every == 0 and last is not None:
            blocks = self._layout.blocks
            whole = header.replace(
                step=header.id, parent=None, coders=bytes([_WHOLE] * len(blocks))
            )
            self._write("keyframe", whole, [self._held[b.start : b.stop].data for b in blocks])
            self._prune(number - self._every)
        with storage.atomic_write(
            storage.join(self.url, _LATEST), options=self._options, durable=False
        ) as file:
            file.write(str(number).encode())
        self._last = header
        return number

    def _encode(
        self, tensors: Mapping[str, torch.Tensor], *, is_new: bool
    ) -> list[tuple[int, Any, int]]:
        """Return coder, payload and checksum of each block, and hold the weights."""
        held = self._layout.split(self._held)
        now = list(self._words(tensors))

        def work(numbers: range) -> list[tuple[int, Any, int]]:
            return [self._encode_block(now[n], held[n], is_new=is_new) for n in numbers]

        parts = parallel_map(self._workers, work, _parts(len(held), self._workers))
        return [block for part in parts for block in part]

    def _words(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[NDArray[Any]]:
        """Yield the new words of each block."""
        for name in self._layout.specs:
            whole = {name: spec_of(tensors[name])}
            words = words_of(tensors[name].detach().cpu().contiguous())
            yield from Layout(whole).split(words.view(np.uint8))

    def _encode_block(
        self, now: NDArray[Any], held: NDArray[Any], *, is_new: bool
    ) -> tuple[int, Any, int]:
        found = None
        coder = _PATCH
        if is_new:
            held[:] = now
        elif self._is_slow_link and now.itemsize > 1:
            coder = _BY_EXPONENT
            order = _by_exponent(held)
            found = encode_patch(now[order], held[order], _SMALL)
            held[:] = now
        else:
            found = encode_patch(now, held)
        crc = crc32c(held)
        if found is None:
            return _WHOLE, held.tobytes(), crc
        changed, payload = found
        return (coder if changed else _SAME), payload, crc

    def _write(self, kind: str, header: StepHeader, payloads: list[Any]) -> StepHeader:
        sizes = np.array([len(payload) for payload in payloads], "<u4").tobytes()
        header = header.replace(sizes=sizes)
        header = header.replace(digest=header.digest_with(payloads))
        url = storage.join(self.url, _name(kind, header.number))
        try:
            data = b"".join([pack_frame(MAGIC, header), *payloads])
            storage.create(url, data, options=self._options)
        except FileExistsError:
            message = "another process publishes to this folder"
            raise ConcurrentWriter(message, url=self.url) from None
        return header

    def _numbers(self) -> set[int]:
        """Return the numbers of the steps in the folder."""
        if not storage.is_folder(self.url, options=self._options):
            return set()
        names = [name for name, _ in storage.list_files(self.url, options=self._options)]
        return {int(name[5:14]) for name in names if name[:5] == "step-" and name[5:14].isdigit()}

    def _prune(self, last: int) -> None:
        """Remove what no mirror needs any more."""
        for number in self._numbers():
            for kind in ("step", "keyframe"):
                url = storage.join(self.url, _name(kind, number))
                if number <= last and storage.exists(url, options=self._options):
                    storage.remove(url, options=self._options)


@lru_cache(maxsize=4)
def _publisher(url: str) -> WeightPublisher:
    return WeightPublisher(url)


def publish_weights(weights: Mapping[str, torch.Tensor] | str, url: str) -> int:
    """Publish weights with this process's :class:`WeightPublisher` of the folder; see there.

    Args:
        weights: Tensors by name, or the path of a safetensors file.
        url: The folder.

    Returns:
        The number of the step.
    """
    return _publisher(url).publish(weights)


class WeightMirror:
    """A local ``model.safetensors`` that is kept equal to what a publisher publishes.

    The file is changed in place, through one memory mapping, only inside of :meth:`update` and
    :meth:`wait`. A process killed there does no harm: the next mirror of the folder restores the
    unfinished blocks and continues.

    Args:
        url: The publisher's folder.
        folder: A local folder; one mirror at a time.
        workers: Threads.
        options: fsspec storage options of ``url``.
        max_bytes: Refuse weights of more bytes than this; default: the machine's memory.

    Attributes:
        step: Number of the step that the file holds; 0 for none.
        path: The file.

    Raises:
        CorruptCheckpoint: The folder's files are damaged.
    """

    def __init__(
        self,
        url: str,
        folder: str,
        *,
        workers: int = 1,
        options: storage.Options | None = None,
        max_bytes: int | None = None,
    ) -> None:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.url = url
        self.step = 0
        self.path = os.path.join(folder, MODEL_NAME)
        self._folder = Path(folder)
        self._workers = workers
        self._options = options
        self._limit = memory_bytes if max_bytes is None else max_bytes
        self._id = b""
        # The step that is being applied; the journal says how far.
        self._target: int | None = None
        self._layout = Layout({})
        self._data = np.empty(0, np.uint8)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._open()

    def wait(self, *, newer_than: int | None = None, timeout: float | None = None) -> int:
        """Wait for a step, apply it, and return its number.

        Args:
            newer_than: The newest step that is not of interest; default: the file's own.
            timeout: Seconds to wait.

        Raises:
            TimeoutError: There was none in time.
            PCRError: See :meth:`update`.
        """
        wanted = self.step if newer_than is None else newer_than
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            if self.step > wanted or self._latest() > wanted:
                return self.update()
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"there is no step after {wanted}")
            time.sleep(_POLL_SECONDS)

    def update(self) -> int:
        """Apply all steps that are there; return the number of the last one.

        Several steps are applied in one pass over the file.

        Raises:
            VersionUnavailable: Nothing was published.
            BrokenChain: A step is a patch of other weights than the file's.
            CorruptCheckpoint: A step is damaged; the file is then loaded again by the next call.
            StorageError: The folder cannot be read.
        """
        if self._target is not None:
            self._open()  # an exception has ended the update before
        newest = self._latest()
        if newest == 0:
            raise VersionUnavailable("no weights were published", url=self.url)
        if newest > self.step:
            steps = self._patches(newest) if self.step else None
            if steps is None:
                self._load_whole(newest)
                steps = self._patches(newest)
            if steps:
                parts = _parts(len(self._layout.blocks), self._workers)
                for n, part in enumerate(parts):
                    self._position(n)[0] = 2 * part.start
                self._target = steps[-1].header.number
                self._save_state()
                self._apply(steps)
        return self.step

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights by name; they share the file's memory, and change with it.

        After the mirror had to load all weights (another publisher, or other shapes) the file is
        another one: call this again.
        """
        found = {}
        for name, spec in self._layout.specs.items():
            start = self._layout.starts[name]
            found[name] = tensor_from(self._data[start : start + spec.num_bytes], spec)
        return found

    def _latest(self) -> int:
        text = self._bytes(_LATEST, 20)
        require(text is None or text.isdigit(), "expected the number of a step")
        return int(text or 0)

    def _bytes(self, name: str, max_bytes: int) -> bytes | None:
        """Read a file of the folder; ``None`` if there is none."""
        url = storage.join(self.url, name)
        try:
            return storage.read_bytes(url, options=self._options, max_bytes=max_bytes)
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def _read(self, kind: str, number: int) -> _Step | None:
        name = _name(kind, number)
        data = self._bytes(name, 2 * self._limit)
        if data is None:
            return None
        with damage_named("the step is damaged", storage.join(self.url, name)):
            return _Step(memoryview(data), self._limit)

    def _patches(self, newest: int) -> list[_Step] | None:
        """Read the steps after the file's; ``None`` if all weights have to be loaded instead."""
        steps: list[_Step] = []
        expected = self._id
        for number in range(self.step + 1, newest + 1):
            step = self._read("step", number)
            if step is None or step.header.parent is None:
                return None  # pruned, or the publisher was restarted
            if step.header.parent != expected or step.layout.specs != self._layout.specs:
                found = step.header.parent.hex()
                message = f"step {number} is a patch of {found}, expected {expected.hex()}"
                raise BrokenChain(message, url=self.url)
            steps.append(step)
            expected = step.header.id
        return steps

    def _load_whole(self, newest: int) -> None:
        """Write a new file from the newest keyframe."""
        kinds = ((kind, n) for n in range(newest, 0, -1) for kind in ("keyframe", "step"))
        steps = (self._read(kind, number) for kind, number in kinds)
        step = next((s for s in steps if s is not None and s.header.parent is None), None)
        if step is None:
            raise VersionUnavailable("there is no keyframe", url=self.url)
        self._forget()
        with storage.atomic_write(self.path, durable=False) as file:
            file.write(step.layout.header())
            for n, block in enumerate(step.layout.blocks):
                part = step.payloads[n]
                if step.header.coders[n] != _WHOLE or crc32c(part) != step.crcs[n]:
                    message = f"bytes {block.start} to {block.stop} do not match their checksum"
                    raise CorruptCheckpoint(message, url=self.url)
                file.write(part)
        self._layout = step.layout
        self._map()
        self._finish(step)

    def _apply(self, steps: list[_Step]) -> None:
        """Apply steps in one pass, from where the journal is."""
        blocks = self._layout.split(self._data)
        last = steps[-1]

        def work(item: tuple[int, range]) -> None:
            worker, part = item
            position, old = self._position(worker), self._old(worker)
            for n in range(int(position[0]) // 2, part.stop):
                words = blocks[n]
                changes = [step for step in steps if step.header.coders[n] != _SAME]
                if changes:
                    old[: words.nbytes] = words.view(np.uint8)
                    position[0] = 2 * n + 1
                    for step in changes:
                        step.apply(n, words)
                if crc32c(words) != last.crcs[n]:
                    message = f"block {n} of step {last.header.number} does not match its checksum"
                    raise CorruptCheckpoint(message, url=self.url)
                position[0] = 2 * (n + 1)

        try:
            parts = _parts(len(blocks), self._workers)
            parallel_map(self._workers, work, enumerate(parts))
            self._finish(last)
        except CorruptCheckpoint:
            self._forget()
            raise

    def _finish(self, last: _Step) -> None:
        """Note that the file holds a step."""
        expected = last.header.sha256
        if expected is not None and hashlib.sha256(self._data.data).digest() != expected:
            self._forget()
            raise CorruptCheckpoint("the weights do not match their SHA-256", url=self.url)
        self.step, self._id = last.header.number, last.header.id
        self._target = None
        self._save_state()

    def _map(self) -> None:
        """Map the file and its journal."""
        with open(self.path, "r+b") as file:
            whole = mmap.mmap(file.fileno(), 0)
        head = 8 + int.from_bytes(whole[:8], "little")
        self._data = np.frombuffer(whole, np.uint8)[head:]
        with open(self._folder / _JOURNAL_NAME, "a+b") as file:
            file.truncate(self._workers * _JOURNAL_BYTES)
            self._journal = mmap.mmap(file.fileno(), self._workers * _JOURNAL_BYTES)

    def _position(self, worker: int) -> NDArray[np.uint64]:
        return np.frombuffer(self._journal, np.uint64, 1, worker * _JOURNAL_BYTES)

    def _old(self, worker: int) -> NDArray[np.uint8]:
        size = 4 * _BLOCK_WORDS
        return np.frombuffer(self._journal, np.uint8, size, worker * _JOURNAL_BYTES + 64)

    def _save_state(self) -> None:
        state = {
            "step": self.step,
            "id": self._id.hex(),
            "target": self._target,
            "workers": self._workers,
            "boot": _boot_id(),
            "tensors": [
                [name, spec.dtype, spec.shape] for name, spec in self._layout.specs.items()
            ],
        }
        with storage.atomic_write(str(self._folder / _STATE_NAME), durable=False) as file:
            file.write(json.dumps(state).encode())

    def _forget(self) -> None:
        """Load all weights again at the next update."""
        (self._folder / _STATE_NAME).unlink(missing_ok=True)
        self.step, self._target = 0, None

    def _open(self) -> None:
        """Continue with the file of an earlier mirror, if it was left by a process of this boot."""
        path = self._folder / _STATE_NAME
        if not (path.exists() and os.path.exists(self.path)):
            return
        with damage_named("the mirror's state is damaged", str(path)):
            state = json.loads(path.read_bytes())
            rows = state["tensors"]
            layout = Layout({name: TensorSpec(dtype, tuple(shape)) for name, dtype, shape in rows})
            size = len(layout.header()) + layout.num_bytes
            # After a power cut memory and disk may differ: the weights are loaded again.
            if state["boot"] != _boot_id() or os.path.getsize(self.path) != size:
                self._forget()
                return
            self._layout, self.step, self._id = layout, state["step"], bytes.fromhex(state["id"])
            self._target, workers = state["target"], int(state["workers"])
        if self._target is None:
            self._map()
            return
        # A process was killed while it applied steps: its unfinished blocks are taken back.
        wanted, self._workers = self._workers, workers
        self._map()
        blocks = layout.split(self._data)
        for worker in range(workers):
            position = self._position(worker)
            if position[0] % 2:
                words = blocks[int(position[0]) // 2].view(np.uint8)
                words[:] = self._old(worker)[: len(words)]
                position[0] -= 1
        steps = self._patches(self._target)
        if steps is None:
            self._forget()
        else:
            self._apply(steps)
        self._workers = wanted
        self._map()


class _Step:
    """A step that was read, checked as far as it can be without the weights."""

    def __init__(self, data: memoryview, max_bytes: int) -> None:
        start = HEAD_BYTES + header_bytes(data[:HEAD_BYTES], MAGIC)
        self.header = unpack_frame(data[:start], MAGIC, StepHeader, max_bytes=max_bytes)
        specs = dict(self.header.tensors)
        require(all(spec.dtype in DTYPES for spec in specs.values()), "expected known types")
        total = sum(spec.num_bytes for spec in specs.values())
        require(total <= max_bytes, f"expected at most {max_bytes} bytes of weights, got {total}")
        self.layout = Layout(specs)
        sizes, self.crcs = (np.frombuffer(x, "<u4") for x in (self.header.sizes, self.header.crcs))
        counts = {len(each) for each in (self.header.coders, sizes, self.crcs, self.layout.blocks)}
        require(len(counts) == 1, "expected a coder, a size and a checksum for each block")
        stops = start + np.cumsum(sizes, dtype=np.int64)
        require(len(data) == [start, *stops][-1], "the step is cut, or too long")
        self.payloads = [data[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]
        digest = self.header.digest_with(self.payloads)
        require(digest == self.header.digest, "the step does not match its digest")

    def apply(self, n: int, words: NDArray[Any]) -> None:
        """Change the words of a block."""
        coder, payload = self.header.coders[n], self.payloads[n]
        if coder == _WHOLE:
            require(len(payload) == words.nbytes, "expected a whole block")
            words.view(np.uint8)[:] = np.frombuffer(payload, np.uint8)
        elif coder == _PATCH:
            apply_patch(words, payload)
        else:
            require(coder == _BY_EXPONENT, "expected a known coder")
            order = _by_exponent(words)
            ordered = words[order]
            apply_patch(ordered, payload)
            words[order] = ordered


def _by_exponent(words: NDArray[Any]) -> NDArray[np.intp]:
    """Return the order of words (N,) by their exponents.

    Small weights change more often than large ones, so the gaps between changes are more alike
    among words of one exponent.
    """
    shift = 8 * words.itemsize - 9  # the sign and eight bits after it
    return np.argsort((words >> shift).astype(np.uint8), kind="stable")


def _parts(count: int, workers: int) -> list[range]:
    """Divide the blocks among workers."""
    return [range(count * n // workers, count * (n + 1) // workers) for n in range(workers)]


def _name(kind: str, number: int) -> str:
    return f"{kind}-{number:09d}.pcw"


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    # Where there is none, no boot is the same.
    return path.read_text().strip() if path.exists() else uuid.uuid4().hex
