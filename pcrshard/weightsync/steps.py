"""Steps: the blocks of weights that changed, in files of this package.

See docs/checkpoints-format.md, section 4.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint.folder import Folder
from ..checkpoint.frame import (
    HEAD_BYTES,
    Digest,
    Number,
    Record,
    Text,
    damage_named,
    encode,
    know_types,
    pack_frame,
    require,
    unpack_frame,
)
from ..checkpoint.patch import apply_patch, encode_patch
from ..checkpoint.safetensors_file import Bytes, FileLayout, order
from ..checkpoint.tensors import TensorSpec
from ..checkpoint.version_file import parallel_map
from ..checksum import crc32c
from ..errorbound import Words
from .layout import blocks, num_bytes, u32

MAGIC = b"\x89PCW\r\n\x1a\n"
_SAME, _PATCH, _WHOLE, _BY_EXPONENT = range(4)
_SMALL = 19  # zstd level for slow links
KINDS = ("step", "keyframe")


def file_name(kind: str, number: int) -> str:
    """Return the name of a file of a stream."""
    return f"{kind}-{number:09d}.pcw"


class StepHeader(Record, frozen=True):
    """The header of a step or a keyframe.

    Attributes:
        number: Number of the step, from 1.
        digest: SHA-256 of the header, with this field zeroed, and the payloads.
        step: For a keyframe, the id of the step that yields the same weights; ``None`` for a step,
            whose id is its digest.
        parent: The id of the step to which this patch applies; ``None`` for full weights.
        tensors: Name, type and shape of each tensor, in the order of the file.
        coders: (blocks,) bytes, the coder of each block.
        sizes: (blocks,) u32, size of each payload in bytes.
        crcs: (blocks,) u32, CRC-32C of each block after the step.
    """

    number: Number
    digest: Digest
    step: Digest | None
    parent: Digest | None
    tensors: list[tuple[Text, TensorSpec]]
    coders: bytes
    sizes: bytes
    crcs: bytes

    def __post_init__(self) -> None:
        if not len(self.coders) == len(self.sizes) / 4 == len(self.crcs) / 4:
            raise ValueError("expected a coder, a size and a checksum for each block")
        # Another order would put weights under other names.
        if list(map(order, self.tensors)) != sorted(set(map(order, self.tensors))):
            raise ValueError("expected each tensor once, in the order of a safetensors file")

    @property
    def id(self) -> bytes:
        """The id of the weights after the step."""
        return self.step or self.digest

    def digest_with(self, payloads: Sequence[Any]) -> bytes:
        """Return the expected digest."""
        digest = hashlib.sha256(encode(self.replace(digest=bytes(32))))
        for payload in payloads:
            digest.update(payload)
        return digest.digest()


know_types(StepHeader)


@dataclasses.dataclass(frozen=True)
class Step:
    """What a mirror applies to its weights.

    Attributes:
        number: Number of the step.
        id: Id of the weights after the step.
        parent: Id of the weights before it; ``None`` if it holds all weights.
        layout: The tensors.
        coders: The coder of each block.
        payloads: The payload of each block.
        crcs: CRC-32C of each block after the step; ``None`` if they are not known.
        source: Name of the file that identifies the step.
        head: The first bytes of this file.
    """

    number: int
    id: bytes
    parent: bytes | None
    layout: FileLayout
    coders: bytes
    payloads: Sequence[Any]
    crcs: bytes | None
    source: str
    head: bytes

    def apply(self, block: Words, n: int) -> int:
        """Apply the step to the n-th block; return its CRC-32C, 0 if it is not at hand."""
        coder, payload = self.coders[n], self.payloads[n]
        if coder == _WHOLE:
            require(len(payload) == block.nbytes, "expected a whole block")
            block.view(np.uint8)[:] = payload
        elif coder == _PATCH:
            return apply_patch(block, payload, with_crc=True)
        elif coder == _BY_EXPONENT:
            places = _by_exponent(block)
            ordered = block[places]
            apply_patch(ordered, payload)
            block[places] = ordered
        else:
            require(coder == _SAME, "expected a known coder")
        return 0


def whole_step(
    number: int, step_id: bytes, layout: FileLayout, tensors: Sequence[Words], source: str
) -> Step:
    """Return a step that holds all weights, from the words of each tensor."""
    payloads = [block.view(np.uint8) for block in blocks(tensors)]
    coders = bytes([_WHOLE] * len(payloads))
    return Step(number, step_id, None, layout, coders, payloads, None, source, b"")


def encode_steps(
    number: int,
    layout: FileLayout,
    tensors: Iterable[Words],
    held: Sequence[Words],
    parent: bytes | None,
    *,
    with_keyframe: bool,
    is_slow_link: bool,
    workers: int,
) -> tuple[bytes, dict[str, list[Any]]]:
    """Encode a step, and set ``held`` equal to the weights.

    Args:
        number: Number of the step.
        layout: The tensors.
        tensors: The words of each tensor.
        held: The words of each tensor before the step.
        parent: The id of the weights in ``held``; ``None`` if there are none.
        with_keyframe: Whether to encode all weights, too.
        is_slow_link: Whether to take ten times as long for 20 % less.
        workers: Number of threads.

    Returns:
        The id of the weights, and the parts of each file by name, which may share their memory.
    """

    def work(pair: tuple[Words, Words]) -> tuple[int, Any, int]:
        return _encode(*pair, is_new=parent is None, is_slow_link=is_slow_link)

    before = list(blocks(held))
    encoded = list(parallel_map(workers, work, zip(blocks(tensors), before, strict=True)))
    coders, payloads, crcs = map(list, zip(*encoded, strict=True)) if encoded else ([], [], [])
    header = StepHeader(
        number, bytes(32), None, parent, layout, bytes(coders), u32(map(len, payloads)), u32(crcs)
    )
    header, parts = _pack(header, payloads)
    files = {file_name("step", number): parts}
    if with_keyframe and parent is not None:
        whole = header.replace(
            step=header.id,
            parent=None,
            coders=bytes([_WHOLE] * len(before)),
            sizes=u32(block.nbytes for block in before),
        )
        _, files[file_name("keyframe", number)] = _pack(whole, [block.data for block in before])
    return header.id, files


def _encode(now: Words, held: Words, *, is_new: bool, is_slow_link: bool) -> tuple[int, Any, int]:
    """Return the coder, payload, and checksum of a block, and update the copy."""
    coder, patch, crc = _PATCH, None, 0
    if is_new:
        held[:] = now
    elif is_slow_link and now.itemsize > 1:
        coder, places = _BY_EXPONENT, _by_exponent(held)
        patch, _ = encode_patch(now[places], held[places], _SMALL)
        held[:] = now
    else:
        patch, crc = encode_patch(now, held, with_crc=True)
    crc = crc or crc32c(held)
    if patch is None:
        return _WHOLE, held.view(np.uint8).data, crc
    return (coder if patch else _SAME), patch, crc


def _pack(header: StepHeader, payloads: Sequence[Any]) -> tuple[StepHeader, list[Any]]:
    """Return a header with the digest, and the parts of its file."""
    header = header.replace(digest=header.digest_with(payloads))
    return header, [pack_frame(MAGIC, header), *payloads]


def read_step(folder: Folder, kind: str, number: int) -> Step | None:
    """Read a file, and validate it as far as possible without the weights.

    Raises:
        CorruptCheckpoint: The file is damaged.
        StorageError: The file cannot be read.
    """
    name, limit = file_name(kind, number), folder.max_bytes
    data = folder.read_bytes(name, 2 * limit)
    if data is None:
        return None
    with damage_named("the step is damaged", folder.join(name)):
        header, rest = unpack_frame(memoryview(data), MAGIC, StepHeader, limit)
        total = num_bytes(header.tensors)
        require(total <= limit, f"expected at most {limit} bytes of weights, got {total}")
        is_same = header.digest_with([rest]) == header.digest
        require(is_same, "the step does not match its digest")
    stops = np.cumsum(np.frombuffer(header.sizes, "<u4"), dtype=np.int64)
    payloads: list[Bytes] = np.split(np.frombuffer(rest, np.uint8), stops)
    return Step(
        header.number, header.id, header.parent, header.tensors, header.coders, payloads,
        header.crcs, name, data[:HEAD_BYTES],
    )  # fmt: skip


def _by_exponent(words: Words) -> NDArray[np.intp]:
    """Return the permutation that sorts words (N,) by exponent.

    Small weights change more often than large ones, so gaps between changes are more uniform among
    words of the same exponent.
    """
    shift = 8 * words.itemsize - 9  # the sign and the next eight bits
    return np.argsort((words >> shift).astype(np.uint8), kind="stable")
