"""Send weights from a trainer to inference servers as sparse lossless patches.

See docs/checkpoints-format.md, section 4. Each step is a patch to the previous step, applied in
place. If 1.3 % of the words of bfloat16 weights change, a step takes about 1.2 bytes per change.
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
# Sized so that a block stays in a core's cache while it is compared and checksummed.
_BLOCK_WORDS = 1 << 19
# The journal holds, per worker, twice the number of its next block (plus one while that block is
# being changed), then the original content of that block.
_JOURNAL_BYTES = 64 + 4 * _BLOCK_WORDS
_SAME, _PATCH, _WHOLE, _BY_EXPONENT = range(4)
_SMALL = 19  # zstd level for slow links
_POLL_SECONDS = 0.05


class Block(NamedTuple):
    """A byte range ``[start, stop)`` of the weights that is patched as a unit."""

    start: int
    stop: int
    item_bytes: int


class Layout:
    """The layout of tensors in a safetensors file, in the order used by its library.

    Args:
        specs: Type and shape of each tensor by name.

    Attributes:
        specs: Type and shape of each tensor, in the order of the file.
        starts: Byte offset of each tensor, relative to the end of the header.
        blocks: The blocks into which the weights are divided for patching.
        num_bytes: Size of all tensors in bytes.
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
        """Return the header of the safetensors file."""
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
        """Split the weights' bytes into blocks and return the words of each."""
        return [data[b.start : b.stop].view(f"u{b.item_bytes}") for b in self.blocks]


class StepHeader(Record, frozen=True):
    """The header of a step or a keyframe.

    Attributes:
        number: Number of the step, from 1.
        digest: SHA-256 of the header, with this field zeroed, and the payloads.
        step: For a keyframe, the id of the step that yields the same weights; ``None`` for a step,
            whose id is its digest.
        parent: The id of the step to which this patch applies; ``None`` for full weights.
        sha256: SHA-256 of all weights after the step, if enabled in the publisher.
        tensors: Name, type and shape of each tensor, in the order of the file.
        coders: (blocks,) bytes, the coder of each block.
        sizes: (blocks,) u32, size of each payload in bytes.
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
        """The id of the weights after the step."""
        return self.step or self.digest

    def digest_with(self, payloads: list[Any]) -> bytes:
        """Return the expected digest."""
        digest = hashlib.sha256(encode(self.replace(digest=bytes(32))))
        for payload in payloads:
            digest.update(payload)
        return digest.digest()


class WeightPublisher:
    """A publisher that writes weights to a folder as patches to the previously published ones.

    It keeps a copy of the weights. It publishes a keyframe with all weights when it starts, when
    names or shapes change, and every ``keyframe_every`` steps, for new mirrors.

    Args:
        url: The folder, local or at any fsspec URL; any web server can serve it.
        keyframe_every: Number of steps between keyframes.
        slow_link: Make steps about 20 % smaller at a tenth of the encoding speed.
        sha256: Include the SHA-256 of all weights in each step, for mirrors to verify.
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
        # The published weights; None if unknown.
        self._last: StepHeader | None = None
        self._layout = Layout({})
        self._held = np.empty(0, np.uint8)

    def publish(self, weights: Mapping[str, torch.Tensor] | str) -> int:
        """Publish weights and return the step number.

        Args:
            weights: Tensors by name, or the path of a safetensors file.

        Raises:
            UnsupportedState: A tensor has no dense local values or a type unknown to safetensors.
            ConcurrentWriter: Another process is publishing to this folder.
            StorageError: The folder cannot be written to.
        """
        tensors = load_tensors(weights) if isinstance(weights, str) else weights
        for name, tensor in tensors.items():
            check_storable(tensor, name)
            if spec_of(tensor).dtype not in DTYPES:
                raise UnsupportedState(f"safetensors has no {spec_of(tensor).dtype}", key=name)
        layout = Layout({name: spec_of(tensor) for name, tensor in tensors.items()})
        # If publishing fails, the copy does not match the published weights.
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
        """Return the coder, payload, and checksum of each block, and update the copy."""
        held = self._layout.split(self._held)
        now = list(self._words(tensors))

        def work(numbers: range) -> list[tuple[int, Any, int]]:
            return [self._encode_block(now[n], held[n], is_new=is_new) for n in numbers]

        parts = parallel_map(self._workers, work, _parts(len(held), self._workers))
        return [block for part in parts for block in part]

    def _words(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[NDArray[Any]]:
        """Yield the current words of each block."""
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
        """Remove files that no mirror needs anymore."""
        for number in self._numbers():
            for kind in ("step", "keyframe"):
                url = storage.join(self.url, _name(kind, number))
                if number <= last and storage.exists(url, options=self._options):
                    storage.remove(url, options=self._options)


@lru_cache(maxsize=4)
def _publisher(url: str) -> WeightPublisher:
    return WeightPublisher(url)


def publish_weights(weights: Mapping[str, torch.Tensor] | str, url: str) -> int:
    """Publish weights with this process's :class:`WeightPublisher` for the folder.

    Args:
        weights: Tensors by name, or the path of a safetensors file.
        url: The folder.

    Returns:
        The number of the step.
    """
    return _publisher(url).publish(weights)


class WeightMirror:
    """A local ``model.safetensors`` that mirrors published weights.

    The file changes in place, through one memory mapping, and only inside :meth:`update` and
    :meth:`wait`. Killing the process at that point is safe: the next mirror of the folder restores
    the unfinished blocks and continues.

    Args:
        url: The publisher's folder.
        folder: A local folder, used by at most one mirror at a time.
        workers: Threads.
        options: fsspec storage options of ``url``.
        max_bytes: Maximum accepted size of the weights in bytes; default: the machine's memory.

    Attributes:
        step: Number of the last applied step; 0 for none.
        path: Path of the file.

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
        # The step being applied; the journal records the progress.
        self._target: int | None = None
        self._layout = Layout({})
        self._data = np.empty(0, np.uint8)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._open()

    def wait(self, *, newer_than: int | None = None, timeout: float | None = None) -> int:
        """Wait for a new step, apply it, and return its number.

        Args:
            newer_than: Wait for a step with a number above this one; default: the file's step.
            timeout: Seconds to wait.

        Raises:
            TimeoutError: No new step was published in time.
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
        """Apply all available steps and return the number of the last one.

        Multiple steps are applied in one pass over the file.

        Raises:
            VersionUnavailable: Nothing has been published.
            BrokenChain: A step is a patch to other weights than the file's.
            CorruptCheckpoint: A step is damaged; the next call reloads all weights.
            StorageError: The folder cannot be read.
        """
        if self._target is not None:
            self._open()  # an exception ended the previous update
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
        """Return the weights by name; they share the file's memory and change with it.

        If the mirror reloads all weights (another publisher, or other shapes), it replaces the
        file: call this method again.
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
        """Read a file of the folder; return ``None`` if it does not exist."""
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
        """Read the steps after the file's step; return ``None`` if all weights must be reloaded."""
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
        """Apply steps in one pass, starting at the position in the journal."""
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
        """Record that the file now holds a step."""
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
        """Reload all weights at the next update."""
        (self._folder / _STATE_NAME).unlink(missing_ok=True)
        self.step, self._target = 0, None

    def _open(self) -> None:
        """Continue with the file of an earlier mirror if it was written since the last boot."""
        path = self._folder / _STATE_NAME
        if not (path.exists() and os.path.exists(self.path)):
            return
        with damage_named("the mirror's state is damaged", str(path)):
            state = json.loads(path.read_bytes())
            rows = state["tensors"]
            layout = Layout({name: TensorSpec(dtype, tuple(shape)) for name, dtype, shape in rows})
            size = len(layout.header()) + layout.num_bytes
            # After a power failure the disk may lack writes, so reload the weights.
            if state["boot"] != _boot_id() or os.path.getsize(self.path) != size:
                self._forget()
                return
            self._layout, self.step, self._id = layout, state["step"], bytes.fromhex(state["id"])
            self._target, workers = state["target"], int(state["workers"])
        if self._target is None:
            self._map()
            return
        # A process was killed while applying steps: restore its unfinished blocks.
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
    """A decoded step, validated as far as possible without the weights."""

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
        """Apply the step to the words of a block."""
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
    """Return the permutation that sorts words (N,) by exponent.

    Small weights change more often than large ones, so gaps between changes are more uniform among
    words of the same exponent.
    """
    shift = 8 * words.itemsize - 9  # the sign and the next eight bits
    return np.argsort((words >> shift).astype(np.uint8), kind="stable")


def _parts(count: int, workers: int) -> list[range]:
    """Divide the blocks among workers."""
    return [range(count * n // workers, count * (n + 1) // workers) for n in range(workers)]


def _name(kind: str, number: int) -> str:
    return f"{kind}-{number:09d}.pcw"


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    # Without a boot id, treat every process as a new boot.
    return path.read_text().strip() if path.exists() else uuid.uuid4().hex
