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
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .. import storage, zstd
from ..checksum import crc32c
from ..errors import (
    BrokenChain,
    ConcurrentWriter,
    CorruptCheckpoint,
    MissingDependency,
    StorageError,
    UnsupportedState,
    VersionUnavailable,
)
from ..native import sparse_words
from .codec import is_count
from .frame import (
    HEAD_BYTES,
    damage_named,
    header_bytes,
    pack_frame,
    pack_plain,
    require,
    unpack_frame,
)
from .tensors import (
    ITEM_BYTES,
    TensorSpec,
    check_storable,
    spec_from,
    spec_of,
    tensor_from,
    words_of,
)

STEP = b"\x89PCW\r\n\x1a\n"
MODEL_NAME = "model.safetensors"
_STATE_NAME = ".mirror.json"
_JOURNAL_NAME = ".mirror.journal"
_LATEST = "latest"
_KEYS = {"number", "id", "parent", "tensors", "coders", "sizes", "gaps", "crcs"}
# A block stays in a core's cache while it is compared and checked.
_BLOCK_WORDS = 1 << 19
_SAME, _SPARSE, _WHOLE = 0, 1, 2
_POLL_SECONDS = 0.05
# Of the journal: what is finished, what is in progress, and how many of its words are changed.
# The first two are a block and a count of steps in one word, so that one store commits a step.
_HEADER_WORDS = 3
_SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
    "int32": "I32", "uint64": "U64", "int64": "I64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float16": "F16", "bfloat16": "BF16", "float32": "F32",
    "float64": "F64", "complex64": "C64",
}  # fmt: skip


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
                "dtype": _SAFETENSORS[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [start, start + spec.num_bytes],
            }
        text = json.dumps(found, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def rows(self) -> list[list[Any]]:
        """Return plain values for a step's header."""
        return [[name, spec.dtype, list(spec.shape)] for name, spec in self.specs.items()]


def _words(data: NDArray[np.uint8], block: Block) -> NDArray[Any]:
    return data[block.start : block.stop].view(f"u{block.item_bytes}")


class WeightPublisher:
    """Publishes weights to a folder, as patches of what it published before.

    It holds a copy of the weights, and when it starts, when the names or shapes change, and every
    ``keyframe_every`` steps it publishes all of them, for new mirrors.

    Args:
        url: The folder, local or at any fsspec URL; any web server can offer it.
        keyframe_every: Steps from one keyframe to the next.
        options: fsspec storage options.

    Raises:
        MissingDependency: The native core is not built.
    """

    def __init__(
        self, url: str, *, keyframe_every: int = 50, options: storage.Options | None = None
    ) -> None:
        _require_core()
        self.url = url
        self._every = keyframe_every
        self._options = options
        self._layout: Layout | None = None
        self._held = np.empty(0, np.uint8)
        self._id = b""
        self._number = 0
        self._scratch = np.empty(4 * _BLOCK_WORDS, np.uint8)

    def publish(self, weights: Mapping[str, torch.Tensor] | str) -> int:
        """Publish weights; return the number of the step.

        Args:
            weights: Tensors by name, or the path of a safetensors file.

        Raises:
            UnsupportedState: A tensor has no values of its own, or a type safetensors lacks.
            ConcurrentWriter: Another process publishes to this folder.
            StorageError: The folder cannot be written to.
        """
        tensors = _load(weights) if isinstance(weights, str) else weights
        specs = {}
        for name, tensor in tensors.items():
            check_storable(tensor, name)
            specs[name] = spec_of(tensor)
            if specs[name].dtype not in _SAFETENSORS:
                raise UnsupportedState(f"safetensors has no {specs[name].dtype}", key=name)
        layout = Layout(specs)
        is_new = self._layout is None or self._layout.specs != layout.specs
        if is_new:
            self._held = np.empty(layout.num_bytes, np.uint8)
            self._number = max(_numbers(self.url, self._options), default=0)
            self._layout = layout
        coders, payloads, gaps, crcs = self._compare(layout, tensors, is_new)
        parent = None if is_new else self._id
        body = {
            "number": self._number + 1,
            "parent": parent,
            "tensors": layout.rows(),
            "coders": bytes(coders),
            "sizes": np.array([len(part) for part in payloads], "<u4").tobytes(),
            "gaps": np.array(gaps, "<u4").tobytes(),
            "crcs": np.array(crcs, "<u4").tobytes(),
        }
        payload = b"".join(payloads)
        step_id = _step_id(body, payload)
        try:
            self._write(_step_name(self._number + 1), body | {"id": step_id}, payload)
        except FileExistsError:
            self._layout = None
            message = "another process publishes to this folder"
            raise ConcurrentWriter(message, url=self.url) from None
        except BaseException:
            self._layout = None  # what is held was not published
            raise
        self._id, self._number = step_id, self._number + 1
        if self._number % self._every == 0 and not is_new:
            self._write_keyframe(body | {"id": step_id})
        with storage.atomic_write(
            storage.join(self.url, _LATEST), options=self._options, durable=False
        ) as file:
            file.write(str(self._number).encode())
        return self._number

    def _compare(
        self, layout: Layout, tensors: Mapping[str, torch.Tensor], is_new: bool
    ) -> tuple[list[int], list[bytes], list[int], list[int]]:
        """Encode what changed, and hold it."""
        coders: list[int] = []
        payloads: list[bytes] = []
        gaps: list[int] = []
        crcs: list[int] = []
        for block, now in self._blocks(layout, tensors):
            was = _words(self._held, block)
            found = None
            if is_new:
                was[:] = now
            else:
                found = sparse_words.encode(now, was, self._scratch[: now.nbytes])
            crcs.append(crc32c(was))
            if found is None:
                coder, payload, gap_bytes = _WHOLE, was.tobytes(), 0
            elif found[0] == 0:
                coder, payload, gap_bytes = _SAME, b"", 0
            else:
                coder, payload = _SPARSE, zstd.compress(found[1] + found[2])
                gap_bytes = len(found[1])
            coders.append(coder)
            payloads.append(payload)
            gaps.append(gap_bytes)
        return coders, payloads, gaps, crcs

    def _blocks(
        self, layout: Layout, tensors: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[Block, NDArray[Any]]]:
        blocks = iter(layout.blocks)
        for name, spec in layout.specs.items():
            words = words_of(tensors[name].detach().cpu().contiguous()).view(np.uint8)
            start = 0
            while start < spec.num_bytes:
                block = next(blocks)
                size = block.stop - block.start
                yield block, words[start : start + size].view(f"u{block.item_bytes}")
                start += size

    def _write(self, name: str, header: dict[str, Any], payload: bytes) -> None:
        data = pack_frame(STEP, header) + payload
        storage.create(storage.join(self.url, name), data, options=self._options)

    def _write_keyframe(self, body: dict[str, Any]) -> None:
        """Publish all weights under the same number, and remove what no mirror needs any more."""
        assert self._layout is not None
        sizes = [block.stop - block.start for block in self._layout.blocks]
        body |= {
            "parent": None,
            "coders": bytes([_WHOLE] * len(sizes)),
            "sizes": np.array(sizes, "<u4").tobytes(),
            "gaps": bytes(4 * len(sizes)),
        }
        self._write(_keyframe_name(self._number), body, self._held.tobytes())
        for number in _numbers(self.url, self._options):
            if number <= self._number - self._every:
                for name in (_step_name(number), _keyframe_name(number)):
                    url = storage.join(self.url, name)
                    if storage.exists(url, options=self._options):
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
    :meth:`wait`. A process killed there is no harm: the next mirror of the folder takes the
    unfinished block back and goes on.

    Args:
        url: The publisher's folder.
        folder: A local folder; one mirror at a time.
        options: fsspec storage options of ``url``.
        max_bytes: Refuse weights of more bytes than this; default: the machine's memory.

    Attributes:
        step: Number of the step that the file holds; 0 for none.
        path: The file.

    Raises:
        MissingDependency: The native core is not built.
        CorruptCheckpoint: The folder's files are damaged.
    """

    def __init__(
        self,
        url: str,
        folder: str,
        *,
        options: storage.Options | None = None,
        max_bytes: int | None = None,
    ) -> None:
        _require_core()
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.url = url
        self.step = 0
        self.path = os.path.join(folder, MODEL_NAME)
        self._folder = Path(folder)
        self._options = options
        self._limit = memory_bytes if max_bytes is None else max_bytes
        self._id = b""
        self._layout = Layout({})
        self._data = self._old = np.empty(0, np.uint8)
        self._journal = np.empty(0, np.uint64)
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
        newest = self._latest()
        if newest == 0:
            raise VersionUnavailable("no weights were published", url=self.url)
        if newest <= self.step:
            return self.step
        steps = self._patches(newest) if self.step else None
        if steps is None:
            self._load_whole(newest)
        elif steps:
            self._begin(steps)
        return self.step

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights by name; they share the file's memory, and change with it.

        After the mirror had to load all weights (another publisher, or other shapes) the file is
        another one: call this again.
        """
        found = {}
        for name, spec in self._layout.specs.items():
            start = self._layout.starts[name]
            words = self._data[start : start + spec.num_bytes]
            found[name] = tensor_from(words, spec)
        return found

    def _latest(self) -> int:
        url = storage.join(self.url, _LATEST)
        try:
            text = storage.read_bytes(url, options=self._options, max_bytes=20)
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return 0
            raise
        require(text.isdigit(), "expected the number of a step")
        return int(text)

    def _patches(self, newest: int) -> list[_Step] | None:
        """Read the steps after the file's; ``None`` if all weights have to be loaded instead."""
        steps: list[_Step] = []
        expected = self._id
        for number in range(self.step + 1, newest + 1):
            step = self._read(_step_name(number))
            if step is None or step.parent is None:
                return None  # pruned, or the publisher began anew
            if step.parent != expected or step.layout.specs != self._layout.specs:
                raise BrokenChain(
                    f"step {number} is a patch of {step.parent.hex()}, expected {expected.hex()}",
                    url=self.url,
                )
            steps.append(step)
            expected = step.id
        return steps

    def _read(self, name: str) -> _Step | None:
        url = storage.join(self.url, name)
        try:
            data = storage.read_bytes(url, options=self._options, max_bytes=2 * self._limit)
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        with damage_named("the step is damaged", url):
            return _Step(memoryview(data), self._limit, is_keyframe=name.startswith("keyframe"))

    def _load_whole(self, newest: int) -> None:
        """Write the file anew from the newest keyframe, then apply the steps after it."""
        for number in range(newest, 0, -1):
            for name in (_keyframe_name(number), _step_name(number)):
                step = self._read(name)
                if step is not None and step.parent is None:
                    self._write_whole(step)
                    later = self._patches(newest)
                    if later:
                        self._begin(later)
                    return
        raise VersionUnavailable("there is no keyframe", url=self.url)

    def _write_whole(self, step: _Step) -> None:
        for name in (_STATE_NAME, _JOURNAL_NAME):
            (self._folder / name).unlink(missing_ok=True)
        self.step = 0
        with storage.atomic_write(self.path, durable=False) as file:
            file.write(step.layout.header())
            for n, block in enumerate(step.layout.blocks):
                part = step.payloads[n]
                require(
                    step.coders[n] == _WHOLE and crc32c(part) == step.crcs[n],
                    f"bytes {block.start} to {block.stop} do not match their checksum",
                )
                file.write(part)
        self._layout, self._id, self.step = step.layout, step.id, step.number
        self._map()
        self._save_state(step.number, step.id)

    def _apply(self, steps: list[_Step], first_block: int = 0, first_step: int = 0) -> None:
        """Apply steps in one pass; each block is compared with its checksum at the last one."""
        last = steps[-1]
        for n in range(first_block, len(self._layout.blocks)):
            words = _words(self._data, self._layout.blocks[n])
            for k in range(first_step, len(steps)):
                self._apply_block(steps[k], n, k, words)
            first_step = 0
            if crc32c(words) != last.crcs[n]:
                self._forget()
                raise CorruptCheckpoint(
                    f"block {n} of step {last.number} does not match its checksum", url=self.url
                )
            self._journal[0] = _place(n + 1, 0)
        self.step, self._id = last.number, last.id
        self._save_state(self.step, self._id)

    def _apply_block(self, step: _Step, n: int, k: int, words: NDArray[Any]) -> None:
        if step.coders[n] == _SPARSE:
            gaps, steps = step.patch(n, words)
            old, done = self._old.view(words.dtype), self._journal[2:]
            done[0] = 0
            self._journal[1] = _place(n, k + 1)
            if sparse_words.apply(words, gaps, steps, old, done) < 0:
                self._forget()
                raise CorruptCheckpoint(f"block {n} of step {step.number} is damaged", url=self.url)
        elif step.coders[n] == _WHOLE:
            words.view(np.uint8)[:] = np.frombuffer(step.payloads[n], np.uint8)
        self._journal[0] = _place(n, k + 1)

    def _begin(self, steps: list[_Step]) -> None:
        """Apply steps from the first block on."""
        self._journal[:] = 0
        self._save_state(self.step, self._id, steps[-1].number)
        self._apply(steps)

    def _map(self) -> None:
        """Map the file and its journal."""
        with open(self.path, "r+b") as file:
            whole = mmap.mmap(file.fileno(), 0)
        head = 8 + int.from_bytes(whole[:8], "little")
        self._data = np.frombuffer(whole, np.uint8)[head:]
        with open(self._folder / _JOURNAL_NAME, "a+b") as file:
            size = 8 * _HEADER_WORDS + 4 * _BLOCK_WORDS
            file.truncate(size)
            journal = mmap.mmap(file.fileno(), size)
        self._journal = np.frombuffer(journal, np.uint64, _HEADER_WORDS)
        self._old = np.frombuffer(journal, np.uint8)[8 * _HEADER_WORDS :]

    def _save_state(self, step: int, step_id: bytes, target: int | None = None) -> None:
        state = {
            "step": step,
            "id": step_id.hex(),
            "target": target,
            "boot": _boot_id(),
            "tensors": self._layout.rows(),
        }
        with storage.atomic_write(str(self._folder / _STATE_NAME), durable=False) as file:
            file.write(json.dumps(state).encode())

    def _forget(self) -> None:
        """Load all weights again at the next update."""
        (self._folder / _STATE_NAME).unlink(missing_ok=True)
        self.step = 0

    def _open(self) -> None:
        """Go on with the file of an earlier mirror, if it was left by a process of this boot."""
        path = self._folder / _STATE_NAME
        if not (path.exists() and os.path.exists(self.path)):
            return
        with damage_named("the mirror's state is damaged", str(path)):
            state = json.loads(path.read_bytes())
            specs = {name: spec_from(dtype, shape) for name, dtype, shape in state["tensors"]}
            layout = Layout(specs)
        expected = len(layout.header()) + layout.num_bytes
        # After a power cut memory and disk may differ: the weights are loaded again.
        if state["boot"] != _boot_id() or os.path.getsize(self.path) != expected:
            self._forget()
            return
        self._layout, self.step, self._id = layout, state["step"], bytes.fromhex(state["id"])
        self._map()
        if state["target"] is not None:
            self._finish(int(state["target"]))

    def _finish(self, target: int) -> None:
        """Take an unfinished block back, and finish the steps that a killed process began."""
        steps = self._patches(target)
        if steps is None:
            self._forget()
            return
        finished, begun, done = (int(value) for value in self._journal)
        block, count = finished >> 32, finished & 0xFFFFFFFF
        if done and begun == _place(block, count + 1):
            words = _words(self._data, self._layout.blocks[block])
            gaps, changes = steps[count].patch(block, words)
            old = self._old.view(words.dtype)
            sparse_words.undo(words, gaps, changes, old, self._journal[2:])
        if steps:
            self._apply(steps, block, count)


def _place(block: int, steps: int) -> int:
    return block << 32 | steps


class _Step:
    """A step that was read, checked as far as it can be without the weights."""

    def __init__(self, data: memoryview, max_bytes: int, *, is_keyframe: bool) -> None:
        start = HEAD_BYTES + header_bytes(data[:HEAD_BYTES], STEP)
        raw = unpack_frame(data[:start], STEP)
        require(raw.keys() == _KEYS, f"expected the keys {sorted(_KEYS)}")
        self.number, self.id, self.parent = raw["number"], raw["id"], raw["parent"]
        require(is_count(self.number), "expected the number of a step")
        ids = [self.id, self.id if self.parent is None else self.parent]
        require(all(type(each) is bytes and len(each) == 32 for each in ids), "expected ids")
        specs = {}
        for name, dtype, shape in raw["tensors"]:
            require(type(name) is str and dtype in _SAFETENSORS, "expected a tensor of safetensors")
            specs[name] = spec_from(dtype, shape)
        self.layout = Layout(specs) if _total(specs) <= max_bytes else Layout({})
        require(_total(specs) <= max_bytes, f"expected at most {max_bytes} bytes of weights")
        count = len(self.layout.blocks)
        self.coders = raw["coders"]
        require(type(self.coders) is bytes and len(self.coders) == count, "expected coders")
        sizes, self.gaps, self.crcs = (
            np.frombuffer(raw[name], "<u4") for name in ("sizes", "gaps", "crcs")
        )
        require(len(sizes) == len(self.gaps) == len(self.crcs) == count, "expected sizes")
        stops = start + np.cumsum(sizes, dtype=np.int64)
        require(len(data) == (stops[-1] if count else start), "the step is cut, or too long")
        self.payloads = [
            data[stop - size : stop]
            for size, stop in zip(sizes.tolist(), stops.tolist(), strict=True)
        ]
        for coder, block, part in zip(self.coders, self.layout.blocks, self.payloads, strict=True):
            whole = coder == _WHOLE and len(part) == block.stop - block.start
            require(
                whole or coder == _SPARSE or (coder == _SAME and not part), "a block is damaged"
            )
        body = {name: value for name, value in raw.items() if name != "id"}
        # A keyframe has the id of the patch that leads to the same weights.
        require(is_keyframe or _step_id(body, data[start:]) == self.id, "the step has another id")

    def patch(self, n: int, words: NDArray[Any]) -> tuple[memoryview, memoryview]:
        """Return gaps and steps of a block."""
        size = zstd.content_bytes(self.payloads[n])
        require(size <= 8 * words.nbytes + 16, "a patch is larger than its block")
        plain = memoryview(zstd.decompress(self.payloads[n], size))
        split = int(self.gaps[n])
        require(split <= size, "a patch is damaged")
        return plain[:split], plain[split:]


def _total(specs: Mapping[str, TensorSpec]) -> int:
    return sum(spec.num_bytes for spec in specs.values())


def _step_id(body: Mapping[str, Any], payload: bytes | memoryview) -> bytes:
    """SHA-256 of the parent's id and the patch: it names the weights without reading them."""
    digest = hashlib.sha256(pack_plain(dict(sorted(body.items()))))
    digest.update(payload)
    return digest.digest()


def _load(path: str) -> dict[str, torch.Tensor]:
    from .safetensors_file import safetensors_module

    found: dict[str, torch.Tensor] = safetensors_module().torch.load_file(path)
    return found


def _require_core() -> None:
    if not sparse_words.available:
        raise MissingDependency("weight sync needs the native core: build pcrshard with a compiler")


def _step_name(number: int) -> str:
    return f"step-{number:09d}.pcw"


def _keyframe_name(number: int) -> str:
    return f"keyframe-{number:09d}.pcw"


def _numbers(url: str, options: storage.Options | None) -> set[int]:
    if not storage.is_folder(url, options=options):
        return set()
    names = [name for name, _ in storage.list_files(url, options=options)]
    return {int(name[5:14]) for name in names if name.startswith("step-") and name[5:14].isdigit()}


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
