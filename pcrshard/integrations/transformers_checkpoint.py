"""Checkpoints of a Hugging Face ``Trainer`` in a DeltaStore."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..checkpoint import DeltaStore
from ..errors import MissingDependency


def delta_trainer_callback(store: DeltaStore) -> Any:
    """Return a callback that adds a version whenever a ``Trainer`` saves.

    The version holds ``model``, ``optimizer``, ``scheduler`` and ``trainer`` (the trainer's state).
    With ``save_only_model=True`` and ``save_total_limit=1`` the Trainer's own folders stay small.

    Args:
        store: The store for the versions; training ends once all of them are stored.

    Raises:
        MissingDependency: transformers is not installed.
    """
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        message = "transformers is not installed: pip install transformers"
        raise MissingDependency(message) from error
    base: Any = TrainerCallback

    class DeltaCallback(base):  # type: ignore[misc]  # known at run time
        """Saves on rank 0."""

        def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            """Add a version."""
            if state.is_world_process_zero:
                store.save(_state(state, given), metrics={"step": state.global_step})

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            """Wait until all versions are in the store."""
            store.close()

    return DeltaCallback()


def _state(trainer: Any, given: dict[str, Any]) -> dict[str, Any]:
    parts = {"model": "model", "optimizer": "optimizer", "scheduler": "lr_scheduler"}
    found = {
        name: given[key].state_dict() for name, key in parts.items() if given.get(key) is not None
    }
    plain = {
        key: value
        for key, value in dataclasses.asdict(trainer).items()
        if isinstance(value, int | float | str | list | dict | None)
    }
    return found | {"trainer": plain}
