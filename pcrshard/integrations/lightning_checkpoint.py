"""Lightning's checkpoints in a DeltaStore: ``Trainer(plugins=[delta_checkpoint_io(store)])``."""

from __future__ import annotations

import json
from typing import Any

from .. import storage
from ..checkpoint import DeltaStore
from ..errors import CorruptCheckpoint
from ..redaction import redact_url
from .lightning import checkpoint_io_class

_KEYS = {"pcrshard_store", "version"}
_MAX_POINTER_BYTES = 1 << 16


def delta_checkpoint_io(store: DeltaStore) -> Any:
    """Return a ``CheckpointIO`` that stores Lightning's checkpoints as versions of a store.

    Instead of a checkpoint file, it writes a small JSON file that names the version, as soon as the
    version is in the store. When Lightning removes a checkpoint, this file is removed; the version
    stays. To remove versions, use ``pcrshard checkpoint delete``.

    Args:
        store: The store for the versions; training ends once all of them are stored.

    Raises:
        MissingDependency: Neither ``lightning`` nor ``pytorch_lightning`` is installed.
    """
    base: Any = checkpoint_io_class()

    class DeltaCheckpointIO(base):  # type: ignore[misc]  # known at run time
        """Versions in a store, each named by a file."""

        def save_checkpoint(
            self,
            checkpoint: dict[str, Any],
            path: Any,
            storage_options: Any = None,
        ) -> None:
            """Copy the state; encode and write in the background."""

            def point(number: int) -> None:
                pointer = {"pcrshard_store": redact_url(store.url), "version": number}
                with storage.atomic_write(str(path)) as file:
                    file.write(json.dumps(pointer).encode())

            store.save(checkpoint, metrics={"path": redact_url(str(path))}, on_saved=point)

        def load_checkpoint(self, path: Any, map_location: Any = None, *_: Any, **__: Any) -> Any:
            """Load the version that a file names."""
            store.close()
            return store.load(_version(store, str(path)), map_location=map_location)

        def remove_checkpoint(self, path: Any) -> None:
            """Remove the file that names the version; the version stays."""
            store.close()
            if storage.exists(str(path)):
                storage.remove(str(path))

        def teardown(self) -> None:
            """Wait until all versions are in the store."""
            store.close()

    return DeltaCheckpointIO()


def _version(store: DeltaStore, path: str) -> int:
    if (storage.file_bytes(path) or 0) > _MAX_POINTER_BYTES:
        raise CorruptCheckpoint("expected a file that names a version, it is too large", url=path)
    try:
        pointer = json.loads(storage.read_bytes(path))
    except ValueError as error:
        raise CorruptCheckpoint(
            f"expected a file that names a version: {error}", url=path
        ) from None
    known = isinstance(pointer, dict) and pointer.keys() == _KEYS
    if not known or type(pointer["version"]) is not int:
        raise CorruptCheckpoint("expected a file that names a version", url=path)
    named = redact_url(str(pointer["pcrshard_store"]))
    expected = redact_url(store.url)
    if named != expected:
        raise CorruptCheckpoint(f"expected a version of {expected}, got one of {named}", url=path)
    return int(pointer["version"])
