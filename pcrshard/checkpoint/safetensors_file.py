"""Read and export safetensors files; the only import of safetensors."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch

from .. import storage
from ..errors import MissingDependency, UnsupportedState
from .store import DeltaStore
from .tensors import TensorSpec, spec_of
from .typed_tree import leaves_of

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


def check_type(tensor: torch.Tensor, name: str) -> None:
    """Raise :class:`UnsupportedState` unless safetensors supports a tensor's name and type."""
    dtype = spec_of(tensor).dtype
    if name == "__metadata__":
        raise UnsupportedState("safetensors reserves this name", key=name)
    if dtype not in DTYPES:
        raise UnsupportedState(f"safetensors has no {dtype}", key=name)
    if dtype == PACKED and tensor.dim() == 0:
        raise UnsupportedState(f"safetensors has no scalars of {dtype}", key=name)


def file_entry(spec: TensorSpec, start: int) -> dict[str, Any]:
    """Return what the header of a safetensors file says of a tensor whose bytes begin at a place.

    The file counts the two numbers of a byte of :data:`PACKED`, and torch counts the bytes.
    """
    shape = list(spec.shape)
    if spec.dtype == PACKED:
        shape[-1] *= 2
    place = [start, start + spec.num_bytes]
    return {"dtype": DTYPES[spec.dtype], "shape": shape, "data_offsets": place}


def safetensors_module() -> Any:
    """Import safetensors and its torch module.

    Raises:
        MissingDependency: safetensors is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        message = "this needs safetensors: pip install 'pcrshard[checkpoint]'"
        raise MissingDependency(message) from error
    return safetensors


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
        MissingDependency: safetensors is not installed.
        UnsupportedState: safetensors does not support a tensor's element type.
        VersionUnavailable: The version or a name does not exist.
        StorageError: The file cannot be written.
    """
    url = os.fspath(url)
    if not storage.file_name(url).endswith(".safetensors"):
        raise ValueError(f"expected a name like model.safetensors, got {url.rpartition('/')[2]!r}")
    safetensors = safetensors_module()
    store.close()
    record, state = store.io.load(version, names)
    parts = {"": state} if names is None else state
    tensors: dict[str, torch.Tensor] = {}
    for part, value in parts.items():
        for leaf in leaves_of(value):
            name = leaf.path or part
            if name in tensors:
                raise ValueError(f"several tensors would be named {name}: export their parts alone")
            check_type(leaf.tensor, name)
            # The format has no shared memory, so tied tensors are written once per name.
            tensors[name] = leaf.tensor.clone(memory_format=torch.contiguous_format)
    # transformers refuses files without a format.
    metadata = {
        "format": "pt",
        "pcrshard_version": str(record.number),
        "pcrshard_id": record.id.hex(),
    }
    data = safetensors.torch.save(tensors, metadata)
    with storage.atomic_write(url, options=options) as file:
        file.write(data)
    return len(data)
