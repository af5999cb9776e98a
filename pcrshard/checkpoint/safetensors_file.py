"""safetensors files: exported versions, and the bytes of a model in weight sync."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from .. import storage
from ..errorbound import Words
from ..errors import UnsupportedState
from .frame import MAX_HEADER_BYTES, MAX_TEXT, Count, Record, Shape, require
from .store import DeltaStore
from .tensors import ITEM_BYTES, TensorSpec, check_storable, spec_of, words_of
from .typed_tree import leaves_of

Bytes = NDArray[np.uint8]
# The tensors of a model in the order of a safetensors file.
FileLayout = list[tuple[str, TensorSpec]]
FORMAT = {"format": "pt"}  # transformers refuses files without it
# The element types that safetensors supports.
DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
    "int32": "I32", "uint64": "U64", "int64": "I64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0", "float4_e2m1fn_x2": "F4",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64",
}  # fmt: skip
# Two numbers in a byte.
PACKED = "float4_e2m1fn_x2"


def order(item: tuple[str, TensorSpec]) -> tuple[int, str]:
    """Return the sort key of a tensor in a :data:`FileLayout`: larger types first, then names."""
    name, spec = item
    return -ITEM_BYTES[spec.dtype], name


def file_header(layout: FileLayout, metadata: dict[str, str] | None = None) -> bytes:
    """Return the header of a safetensors file."""
    found: dict[str, Any] = {"__metadata__": metadata or FORMAT}
    start = 0
    for name, spec in layout:
        # The file counts the two numbers of a byte of PACKED, and torch counts the bytes.
        shape, stop = list(spec.shape), start + spec.num_bytes
        if spec.dtype == PACKED:
            shape[-1] *= 2
        found[name] = {"dtype": DTYPES[spec.dtype], "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(found, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class _Entry(Record, frozen=True):
    dtype: str
    shape: Shape
    data_offsets: tuple[Count, Count]


_SPECS = {name: dtype for dtype, name in DTYPES.items()}


def parse_file(data: Any) -> tuple[dict[str, str], dict[str, tuple[TensorSpec, Bytes]]]:
    """Return the metadata of an untrusted safetensors file, and the type and bytes of each tensor.

    Raises:
        CorruptCheckpoint: A size or a place is wrong.
        msgspec.MsgspecError, LookupError: The header is wrong: see :func:`frame.damage_named`.
    """
    data = np.frombuffer(data, np.uint8)
    size = int.from_bytes(bytes(data[:8]), "little")
    is_there = 8 <= 8 + size <= len(data) and size <= MAX_HEADER_BYTES
    require(is_there, "expected the header of a safetensors file")
    raw = msgspec.json.decode(bytes(data[8 : 8 + size]), type=dict[str, dict[str, Any]])
    metadata = msgspec.convert(raw.pop("__metadata__", {}), dict[str, str])
    body, found = data[8 + size :], {}
    for name, value in raw.items():
        entry = msgspec.convert(value, _Entry)
        dtype, shape = _SPECS[entry.dtype], entry.shape
        if dtype == PACKED:
            require(shape[-1] % 2 == 0, "expected whole bytes")
            shape = (*shape[:-1], shape[-1] // 2)
        spec, (start, stop) = TensorSpec(dtype, shape), entry.data_offsets
        is_inside = stop - start == spec.num_bytes and stop <= len(body)
        require(is_inside, f"expected {spec.num_bytes} bytes of {name}")
        found[name] = spec, body[start:stop]
    return metadata, found


def in_order(found: Mapping[str, tuple[TensorSpec, Bytes]]) -> tuple[FileLayout, list[Words]]:
    """Return the layout of the tensors of a file, and their words, which may not be aligned."""
    layout = sorted(((name, spec) for name, (spec, _) in found.items()), key=order)
    return layout, [found[name][1].view(spec.word) for name, spec in layout]


def words_by_name(tensors: Mapping[str, torch.Tensor]) -> tuple[FileLayout, Iterator[Words]]:
    """Return the layout of tensors, and the words (N,) of each, which is copied to the CPU in turn.

    Raises:
        UnsupportedState: safetensors does not support a tensor, its type, or its name.
    """
    for name, tensor in tensors.items():
        if not isinstance(name, str) or len(name) > MAX_TEXT:
            message = f"expected names of at most {MAX_TEXT} characters"
            raise UnsupportedState(message, key=str(name)[:80])
        check_storable(tensor, name)
        _check_type(tensor, name)
    layout = sorted(((name, spec_of(each)) for name, each in tensors.items()), key=order)
    plain = (tensors[name].detach().cpu().resolve_conj().resolve_neg() for name, _ in layout)
    return layout, (words_of(tensor.contiguous()) for tensor in plain)


def _check_type(tensor: torch.Tensor, name: str) -> None:
    """Raise :class:`UnsupportedState` unless safetensors supports a tensor's name and type."""
    dtype = spec_of(tensor).dtype
    if name == "__metadata__":
        raise UnsupportedState("safetensors reserves this name", key=name)
    if dtype not in DTYPES:
        raise UnsupportedState(f"safetensors has no {dtype}", key=name)
    if dtype == PACKED and tensor.dim() == 0:
        raise UnsupportedState(f"safetensors has no scalars of {dtype}", key=name)


def export_safetensors(
    store: DeltaStore,
    version: int,
    url: str | os.PathLike[str],
    *,
    names: Collection[str] | None = None,
    options: storage.Options = None,
) -> int:
    """Write the tensors of a version under their paths; omit all other values.

    A tensor that occurs under several paths is written under each of them.

    Args:
        store: The store that contains the version.
        version: The version number; -1 for the newest.
        url: The file to write, ``*.safetensors``.
        names: Parts to export, as for :meth:`DeltaStore.load`, without the prefix of their paths
            (``["model"]`` writes ``model.conv1.weight`` as ``conv1.weight``).
        options: fsspec storage options of the file.

    Returns:
        The size of the file in bytes.

    Raises:
        ValueError: The file name does not end with ``.safetensors``, or two tensors would have the
            same name.
        UnsupportedState: safetensors does not support a tensor's element type.
        VersionUnavailable: The version or a name does not exist.
        StorageError: The file cannot be written.
    """
    url = os.fspath(url)
    if not storage.file_name(url).endswith(".safetensors"):
        raise ValueError(f"expected a name like model.safetensors, got {url.rpartition('/')[2]!r}")
    store.close()
    record, state = store.io.load(version, names)
    parts = {"": state} if names is None else state
    tensors: dict[str, torch.Tensor] = {}
    for part, value in parts.items():
        for leaf in leaves_of(value):
            name = leaf.path or part
            if name in tensors:
                raise ValueError(f"several tensors would be named {name}: export their parts alone")
            # The format has no shared memory, so tied tensors are written once per name.
            tensors[name] = leaf.tensor
    layout, words = words_by_name(tensors)
    about = {"pcrshard_version": str(record.number), "pcrshard_id": record.id.hex()}
    header = file_header(layout, FORMAT | about)
    with storage.atomic_write(url, options=options) as file:
        file.write(header)
        file.writelines(each.data for each in words)
    return len(header) + sum(spec.num_bytes for _, spec in layout)
