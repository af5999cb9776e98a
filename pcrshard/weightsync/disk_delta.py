"""Versions in the layout of disk deltas that slime, miles and SGLang share.

A version is a folder ``weight_v000001``: an ordinary Hugging Face checkpoint, or compressed
differences to the version before in the form of one. See docs/checkpoints-format.md, section 5.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from .. import zstd
from ..checkpoint.folder import Folder
from ..checkpoint.frame import damage_named, header_limit, require
from ..checkpoint.safetensors_file import Bytes, FileLayout, file_header, in_order, parse_file
from ..checkpoint.tensors import TensorSpec
from ..checkpoint.version_file import parallel_map
from ..errorbound import Words
from ..errors import MissingDependency
from .layout import num_bytes
from .steps import Step, whole_step

VERSION = re.compile(r"weight_v([0-9]{6,18})")
INDEX = "model.safetensors.index.json"
FULL = "model.safetensors"
_DELTA = "model-00000-of-00001.safetensors"
# A name in an index is never a path to elsewhere.
_PLAIN = re.compile(r"[\w-][\w.-]*\.safetensors")
_WEIGHTS = re.compile(r".*\.(?:safetensors|bin|pt|pth)|.*\.index\.json")
_SMALL = 19  # zstd level for slow links
# Bytes of an `overwrite` for each byte that changed: its place and its value.
_PLACED = 5


def folder_name(number: int) -> str:
    """Return the name of a version's folder."""
    return f"weight_v{number:06d}"


def version_id(number: int) -> bytes:
    """Return the id of a version, which is known by its number only."""
    return number.to_bytes(32, "big")


class _Metadata(msgspec.Struct):
    version: str = ""
    base_version: str = ""
    delta_encoding: Literal["xor", "overwrite"] | None = None
    compression_format: str = ""
    checksum_format: str = ""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


@dataclasses.dataclass(frozen=True)
class Delta:
    """A version that holds differences.

    Attributes:
        number: Number of the version.
        id: Its id.
        parent: Id of the version before it.
        source: Name of its index.
        encoding: ``"xor"`` or ``"overwrite"``.
        checksums: Name of the checksum.
        changes: The compressed difference and the new checksum of each tensor that changed.
    """

    number: int
    id: bytes
    parent: bytes
    source: str
    encoding: str
    checksums: str
    changes: Mapping[str, tuple[Bytes, str]]
    head = b""

    def apply(self, tensors: Mapping[str, Words], workers: int) -> None:
        """Change the words of tensors in place.

        Raises:
            CorruptCheckpoint: A tensor does not match its checksum afterwards; others may have
                been changed.
        """

        def work(item: tuple[str, tuple[Bytes, str]]) -> None:
            name, (payload, expected) = item
            data = tensors[name].view(np.uint8)
            size = zstd.content_bytes(payload)
            require(size <= 4 + _PLACED * len(data), f"the difference of {name} is too large")
            content = np.frombuffer(zstd.decompress(payload, size), np.uint8)
            if self.encoding == "xor":
                require(size == len(data), f"expected {len(data)} bytes of {name}, got {size}")
                np.bitwise_xor(data, content, out=data)
            else:
                stop = 4 + 4 * int(content[:4].view("<u4")[0])
                data[content[4:stop].view("<u4")] = content[stop:]
            is_same = _checksum(self.checksums, data) == expected.lower()
            require(is_same, f"{name} does not match its checksum")

        for _ in parallel_map(workers, work, self.changes.items()):
            pass


def _checksum(kind: str, data: Bytes) -> str:
    if kind == "adler32":
        return f"{zlib.adler32(data.data):08x}"
    require(kind == "xxh3-128", f"expected checksums xxh3-128 or adler32, got {kind!r}")
    try:
        import xxhash
    except ImportError as error:
        message = "checksums xxh3-128 need xxhash: pip install xxhash, or publish with adler32"
        raise MissingDependency(message) from error
    return str(xxhash.xxh3_128_hexdigest(data.data))


def encode_version(
    number: int,
    layout: FileLayout,
    tensors: Iterable[Words],
    held: Sequence[Words],
    *,
    is_full: bool,
    model: str | None,
    is_slow_link: bool,
    workers: int,
) -> dict[str, list[Any]]:
    """Encode a version, and set ``held`` equal to the weights.

    Args:
        number: Number of the version.
        layout: The tensors.
        tensors: The words of each tensor.
        held: The words of each tensor in the version before.
        is_full: Whether to write a checkpoint instead of differences.
        model: A local folder, whose other files belong to each full checkpoint.
        is_slow_link: Whether to compress slowly.
        workers: Number of threads.

    Returns:
        The parts of each file of the version by name; the last one makes it complete.
    """
    folder = folder_name(number)
    files: dict[str, list[Any]] = {}
    metadata: dict[str, Any] = {"version": f"{number:06d}"}
    if is_full:
        for before, now in zip(held, tensors, strict=True):
            before[:] = now
        for name in _other_files(model):
            with open(os.path.join(str(model), name), "rb") as file:
                files[f"{folder}/{name}"] = [file.read()]
        files[f"{folder}/{FULL}"] = [file_header(layout), *(words.data for words in held)]
        weights = dict.fromkeys((name for name, _ in layout), FULL)
        metadata["total_size"] = num_bytes(layout)
    else:

        def work(item: tuple[str, Words, Words]) -> tuple[str, bytes, str]:
            name, now, before = item
            difference = now ^ before
            if not difference.any():
                return name, b"", ""
            before[:] = now
            packed = zstd.compress(difference, _SMALL if is_slow_link else 1)
            return name, packed, _checksum("adler32", now.view(np.uint8))

        names = [name for name, _ in layout]
        found = parallel_map(workers, work, zip(names, tensors, held, strict=True))
        changes = {name: (packed, checksum) for name, packed, checksum in found if packed}
        if changes:
            packed = [data for data, _ in changes.values()]
            specs = [TensorSpec("uint8", (len(data),)) for data in packed]
            checksums = {name: checksum for name, (_, checksum) in changes.items()}
            header = file_header(list(zip(changes, specs, strict=True)), checksums)
            files[f"{folder}/{_DELTA}"] = [header, *packed]
        weights = dict.fromkeys(changes, _DELTA)
        metadata |= {
            "base_version": f"{number - 1:06d}",
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "adler32",
        }
    index = {"metadata": metadata, "weight_map": weights}
    files[f"{folder}/{INDEX}"] = [json.dumps(index).encode()]
    return files


def _other_files(model: str | None) -> list[str]:
    """Return the names of a model's files that hold no weights: configuration, tokenizer."""
    if model is None:
        return []
    names = [each.name for each in os.scandir(model) if each.is_file()]
    return [name for name in names if not _WEIGHTS.fullmatch(name)]


def read_version(folder: Folder, number: int, name: str | None = None) -> Step | Delta | None:
    """Read a version, and validate it as far as possible without the weights.

    Args:
        folder: The stream.
        number: Number of the version.
        name: Name of its folder in the stream; "" for the stream's folder itself.

    Returns:
        A step with all weights, or differences; ``None`` if there is no such version.

    Raises:
        CorruptCheckpoint: A file is damaged or missing.
        StorageError: A file cannot be read.
    """
    name = folder_name(number) + "/" if name is None else name
    limit, source = folder.max_bytes, name + INDEX
    text = folder.read_bytes(source, header_limit(limit))
    with damage_named("the version is damaged", folder.join(source)):
        if text is None:
            # A checkpoint in one file has no index, but a delta always has one.
            index, source = _Index({"": FULL}), name + FULL
        else:
            index = msgspec.json.decode(text, type=_Index)
        found: dict[str, tuple[TensorSpec, Bytes]] = {}
        checksums: dict[str, str] = {}
        for file in sorted(set(index.weight_map.values())):
            require(_PLAIN.fullmatch(file), f"expected a safetensors file, got {file!r}")
            data = folder.read_bytes(name + file, 2 * limit)
            if data is None and text is None:
                return None
            require(data is not None, f"{file} is missing")
            texts, tensors = parse_file(data)
            require(not found.keys() & tensors.keys(), "expected each tensor once")
            found |= tensors
            checksums |= texts
            total = sum(len(part) for _, part in found.values())
            require(total <= limit, f"expected at most {limit} bytes of weights, got {total}")
        about = index.metadata
        if about.delta_encoding is None:
            return whole_step(number, version_id(number), *in_order(found), source)
        require(int(about.version) == number, f"expected version {number}, got {about.version}")
        require(about.compression_format == "zstd", "expected differences compressed by zstd")
        changes = {each: (part, checksums[each]) for each, (_, part) in found.items()}
        return Delta(
            number, version_id(number), version_id(int(about.base_version)), source,
            about.delta_encoding, about.checksum_format, changes,
        )  # fmt: skip
