"""The file of a mirror, and how another process reads one step of it.

Changed in place, the file has a name that no engine loads by itself; :func:`read_consistent` reads
it. A replaced file is a ``model.safetensors`` that is never changed, only renamed over.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch

from .. import storage
from ..checkpoint.folder import Folder
from ..checkpoint.frame import (
    Digest,
    Number,
    Record,
    Text,
    damage_named,
    know_types,
    pack_frame,
    require,
    unpack_frame,
)
from ..checkpoint.safetensors_file import FileLayout, file_header
from ..checkpoint.tensors import TensorSpec, tensor_from
from ..checksum import crc32c
from ..errorbound import Words
from ..errors import CorruptCheckpoint, FormatError, VersionUnavailable
from .disk_delta import Delta
from .layout import blocks, num_bytes, u32, words_in
from .steps import Step

_MAGIC = b"\x89PCL\r\n\x1a\n"
_REPLACED, _IN_PLACE = "model.safetensors", "model.safetensors.live"
_COUNT = ".mirror.count"
_POLL_SECONDS = 0.01


class State(Record, frozen=True):
    """What is in a mirror's file, written after it.

    Attributes:
        number: Number of the last step.
        id: Id of the weights.
        source: Name of the file that identifies the step in the stream.
        head: The first bytes of this file, if known.
        tensors: Name, type and shape of each tensor, in the order of the file.
        crcs: (blocks,) u32, CRC-32C of each block.
    """

    number: Number
    id: Digest
    source: Text
    head: bytes
    tensors: list[tuple[Text, TensorSpec]]
    crcs: bytes


know_types(State)


def _state_name(file: str) -> str:
    return f".{file}.pcw"


def _read_state(folder: Folder, file: str) -> State | None:
    data = folder.read_bytes(_state_name(file))
    if data is None:
        return None
    with damage_named("the state is damaged", folder.join(_state_name(file))):
        return unpack_frame(memoryview(data), _MAGIC, State)[0]


def check_blocks(words: Sequence[Words], crcs: bytes) -> None:
    """Raise :class:`CorruptCheckpoint` unless all blocks match their checksums."""
    is_same = u32(map(crc32c, blocks(words))) == crcs
    require(is_same, "the weights do not match their checksums")


class MirrorFile:
    """The file of a mirror.

    Args:
        folder: A local folder.
        is_replaced: Whether each change replaces the file.

    Attributes:
        path: Path of the file.
        state: What is in the file; ``None`` if that is not known.
        layout: The tensors.
        words: Their words, which share the memory of the mapped file.
    """

    def __init__(self, folder: str, *, is_replaced: bool) -> None:
        self.is_replaced = is_replaced
        name, other = (_REPLACED, _IN_PLACE) if is_replaced else (_IN_PLACE, _REPLACED)
        self.path = os.path.join(folder, name)
        self.state: State | None = None
        self.layout: FileLayout = []
        self.words: list[Words] = []
        self._folder = Folder(folder)
        storage.make_folder(folder)
        storage.remove_temporary_files(folder)
        if self._folder.read_bytes(_state_name(other)) is not None:
            # A mirror of the other kind wrote it, and nobody would keep it current.
            self._folder.remove([other, _state_name(other)])
        # Continue with the file of an earlier mirror if it matches its checksums.
        with suppress(FileNotFoundError, FormatError), damage_named("the file is damaged"):
            state = _read_state(self._folder, name)
            if state is not None:
                self.layout, self.words = state.tensors, _mapped(self.path, state.tensors)
                check_blocks(self.words, state.crcs)
                self.state = state

    def change(
        self,
        layout: FileLayout,
        steps: Sequence[Step | Delta],
        work: Callable[[Sequence[Words], Sequence[Step | Delta]], State],
    ) -> None:
        """Change the file by steps, in place or as a new file.

        If this fails, a file that is replaced keeps its weights; otherwise :attr:`state` becomes
        ``None``, and the next change must begin with all weights.

        Args:
            layout: The tensors after the change.
            steps: The first one may hold all weights.
            work: Applies the steps to words, and returns what these are then.
        """
        if not self.is_replaced and layout == self.layout:
            self.state = None
            self._count(1)
            state = work(self.words, steps)
        else:
            with storage.atomic_write(self.path, durable=False) as file:
                if isinstance(steps[0], Step) and steps[0].parent is None:
                    total = sum(map(len, steps[0].payloads))
                    require(total == num_bytes(layout), "expected the bytes of all weights")
                    file.writelines([file_header(layout), *steps[0].payloads])
                    steps = steps[1:]
                    file.flush()
                else:
                    shutil.copyfile(self.path, file.name)
                words = _mapped(file.name, layout)
                state = work(words, steps)
            self.layout, self.words = layout, words
        data = pack_frame(_MAGIC, state)
        self._folder.put(_state_name(os.path.basename(self.path)), [data])
        self.state = state
        self._count(0)

    def _count(self, change: int) -> None:
        """Make the counter odd (1) before the file changes, and even (0) when it has changed."""
        path = os.path.join(self._folder.url, _COUNT)
        with open(path, "ab"):
            pass
        with open(path, "r+b", buffering=0) as file:
            count = int.from_bytes(file.read(8), "little")
            if count % 2 != change:
                file.seek(0)
                file.write((count + 1).to_bytes(8, "little"))


def _mapped(path: str, layout: FileLayout) -> list[Words]:
    with open(path, "r+b") as file:
        return words_in(np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8), layout)


def read_consistent(
    folder: str | os.PathLike[str], *, timeout: float = 60.0
) -> dict[str, torch.Tensor]:
    """Read the weights of one step from the folder of a :class:`WeightMirror`, in any process.

    The folder's counter, a little-endian u64 in ``.mirror.count``, is odd while the file changes.
    It is compared before and after the file is read, and each block with its checksum; otherwise
    the file is read again.

    Args:
        folder: The local folder of a mirror, which may be updating it.
        timeout: Seconds to try.

    Returns:
        Tensors by name, in memory of their own, which a GPU copies faster than a mapped file.

    Raises:
        VersionUnavailable: The folder has no weights.
        TimeoutError: No step could be read in time: the mirror updates too often, or was killed
            during an update, and its folder must be opened again.
    """
    root = Folder(storage.plain_path(os.fspath(folder)))
    end = time.monotonic() + timeout
    while True:
        count = root.read_bytes(_COUNT, 8)
        if not (count or b"\0")[0] % 2:
            with suppress(CorruptCheckpoint):
                for file in (_IN_PLACE, _REPLACED):
                    state = _read_state(root, file)
                    data = None if state is None else _read(root.join(file))
                    if state is None or data is None or root.read_bytes(_COUNT, 8) != count:
                        continue
                    words = words_in(data, state.tensors)
                    check_blocks(words, state.crcs)
                    parts = zip(words, state.tensors, strict=True)
                    return {name: tensor_from(part, spec) for part, (name, spec) in parts}
        if count is None:
            raise VersionUnavailable("the folder has no mirrored weights", url=root.url)
        if time.monotonic() > end:
            message = f"no step could be read in {timeout:g} s: is a mirror of {root.url} running?"
            raise TimeoutError(message)
        time.sleep(_POLL_SECONDS)


def _read(path: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]] | None:
    """Read a file into memory of its own; return ``None`` if it does not exist."""
    try:
        with open(path, "rb") as file:
            data = np.empty(os.fstat(file.fileno()).st_size, np.uint8)
            size = file.readinto(data.data)
    except FileNotFoundError:
        return None
    return data[:size]
