"""The one door to safetensors: a version as a file that other tools read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .. import storage
from ..errorbound import FLOAT_TYPES, Words, check_error
from ..errors import ErrorBoundViolated, MissingDependency, StorageError
from .held_version import HeldVersion, restore_all, tensor_of
from .tensor_codec import Held
from .tensors import spec_of, words_of


def safetensors_module() -> Any:
    """safetensors, with its module for torch.

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
    version: HeldVersion,
    url: str,
    *,
    options: storage.Options | None = None,
) -> int:
    """Write the tensors of a version under their paths; other values are left out.

    Args:
        version: The version.
        url: The file.
        options: fsspec storage options of the file.

    Returns:
        Bytes of the file.

    Raises:
        MissingDependency: safetensors is not installed.
        StorageError: The file cannot be written.
    """
    words = restore_all(version)
    tensors = {path: tensor_of(held, words[path]) for path, held in version.tensors.items()}
    metadata = {"pcrshard_version": str(version.number), "pcrshard_id": version.id.hex()}
    data = safetensors_module().torch.save(tensors, metadata)
    with storage.atomic_write(url, options=options) as file:
        file.write(data)
    return len(data)


def measure_errors(
    version: HeldVersion,
    url: str,
    *,
    options: storage.Options | None = None,
) -> dict[str, float]:
    """Compare each tensor of a version with the one of its path in a safetensors file.

    Args:
        version: The version.
        url: The file, with what was saved; tensors that it lacks are not compared.
        options: fsspec storage options of the file.

    Returns:
        The largest error of each tensor, as a share of its bound: 0 to 1.

    Raises:
        ErrorBoundViolated: A value is farther off than the bound, or the file is of other values.
        StorageError: The file cannot be read.
    """
    safetensors = safetensors_module()
    data = storage.read_bytes(url, options=options)
    try:
        originals = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise StorageError(f"expected a safetensors file: {error}", url=url) from error
    words = restore_all(version)
    return {
        path: _error(held, words[path], originals[path], path)
        for path, held in version.tensors.items()
        if path in originals
    }


def _error(
    held: Held,
    restored: Words,
    original: torch.Tensor,
    path: str,
) -> float:
    if spec_of(original) != held.spec:
        raise ErrorBoundViolated(f"expected {held.spec}, got {spec_of(original)}", key=path)
    expected = words_of(original.contiguous())
    if held.lattice is not None:
        try:
            return check_error(expected, restored, FLOAT_TYPES[held.spec.dtype], held.lattice)
        except ErrorBoundViolated as error:
            raise ErrorBoundViolated(str(error), key=path) from error
    if not np.array_equal(expected, restored):
        raise ErrorBoundViolated("expected the tensor bit for bit, got another one", key=path)
    return 0.0
