"""The one door to safetensors: a version as a file that other tools read."""

from __future__ import annotations

from .. import storage
from ..errors import MissingDependency
from .held_version import HeldVersion, restore_all, tensor_of


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
    try:
        from safetensors.torch import save
    except ImportError as error:
        message = "exporting needs safetensors: pip install 'pcrshard[checkpoint]'"
        raise MissingDependency(message) from error
    words = restore_all(version)
    tensors = {path: tensor_of(held, words[path]) for path, held in version.tensors.items()}
    metadata = {"pcrshard_version": str(version.number), "pcrshard_id": version.id.hex()}
    data = save(tensors, metadata)
    with storage.atomic_write(url, options=options) as file:
        file.write(data)
    return len(data)
