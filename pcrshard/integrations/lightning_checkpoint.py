"""Lightning's checkpoints in a DeltaStore: ``Trainer(plugins=[delta_checkpoint_io(store)])``."""

from __future__ import annotations

import collections
import json
from contextlib import suppress
from typing import Any

from .. import storage
from ..checkpoint import DeltaStore
from ..checkpoint.typed_tree import tokens_of
from ..errors import CorruptCheckpoint
from ..redaction import redact_url
from .lightning import lightning_class

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
    base: Any = lightning_class(".plugins.io", "CheckpointIO")

    class DeltaCheckpointIO(base):  # type: ignore[misc]  # known at run time
        """Versions in a store, each named by a file."""

        # Whether save_checkpoint only raises what a real save would raise.
        is_checking = False

        def save_checkpoint(
            self,
            checkpoint: dict[str, Any],
            path: Any,
            storage_options: Any = None,
        ) -> None:
            """Copy the state; encode and write in the background."""
            checkpoint = _plain(checkpoint)
            if self.is_checking:
                collections.deque(tokens_of(checkpoint), maxlen=0)
                return

            def point(number: int) -> None:
                named = {"pcrshard_store": redact_url(store.url), "version": number}
                pointer = named | {"id": _id(store, number)}
                with storage.atomic_write(str(path)) as file:
                    file.write(json.dumps(pointer).encode())

            # Lightning may link to the file before it is there.
            storage.make_folder(storage.parent(str(path)))
            store.save(checkpoint, metrics={"path": redact_url(str(path))}, on_saved=point)

        def load_checkpoint(self, path: Any, map_location: Any = None, *_: Any, **__: Any) -> Any:
            """Load the version that a file names."""
            store.settled()
            return store.load(_version(store, str(path)), map_location=map_location)

        def remove_checkpoint(self, path: Any) -> None:
            """Remove the file that names the version; the version stays."""
            store.settled()
            if storage.exists(str(path)):
                storage.remove(str(path))

        def teardown(self) -> None:
            """Wait until all versions are in the store."""
            store.close()

    return DeltaCheckpointIO()


def check_checkpoints() -> Any:
    """Return a callback that raises, when training starts, what the first checkpoint would raise.

    For trainers with :func:`delta_checkpoint_io`: ``Trainer(plugins=..., callbacks=...)``.

    Raises:
        MissingDependency: Neither ``lightning`` nor ``pytorch_lightning`` is installed.
    """
    base: Any = lightning_class("", "Callback")

    class CheckCheckpoints(base):  # type: ignore[misc]  # known at run time
        """Makes a checkpoint that is not written."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Check the values of a checkpoint; ``UnsupportedState`` names the path of one."""
            del pl_module
            plugin = trainer.strategy.checkpoint_io
            plugin.is_checking = True
            try:
                trainer.save_checkpoint("not-written.ckpt")
            finally:
                plugin.is_checking = False

    return CheckCheckpoints()


def _plain(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint whose hyperparameters are plain, also if OmegaConf made them."""
    given = checkpoint.get("hyper_parameters")
    if given is None:
        return checkpoint
    plain = dict(checkpoint)
    plain.pop("hparams_type", None)  # OmegaConf's class
    plain["hyper_parameters"] = _without_omegaconf(given)
    return plain


def _without_omegaconf(value: Any) -> Any:
    if type(value) is dict:
        return {key: _without_omegaconf(item) for key, item in value.items()}
    if type(value).__module__.startswith("omegaconf."):
        from omegaconf import OmegaConf

        return OmegaConf.to_container(value, resolve=True)
    return value


def _id(store: DeltaStore, version: int) -> str:
    return store.io.existing().record(version).id.hex()


def _version(store: DeltaStore, path: str) -> int:
    pointer = None
    if (storage.file_bytes(path) or 0) <= _MAX_POINTER_BYTES:
        with suppress(ValueError):
            pointer = json.loads(storage.read_bytes(path))
    match pointer:
        case {"pcrshard_store": str(named), "version": int(version), "id": str(found)}:
            if _id(store, version) != found:
                message = f"expected version {version} of {redact_url(named)}, got another store's"
                raise CorruptCheckpoint(message, url=path)
            return version
    raise CorruptCheckpoint("expected a file that names a version, got another file", url=path)
