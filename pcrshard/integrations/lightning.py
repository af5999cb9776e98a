"""Lightning integration: the ScanTuner callback."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..errors import MissingDependency
from ..format.scan import FULL

if TYPE_CHECKING:
    from ..fidelity.tuner import ScanTuner


def lightning_class(module: str, name: str) -> Any:
    """Return a class of Lightning, from whichever of its two packages is installed.

    Raises:
        MissingDependency: Neither ``lightning`` nor ``pytorch_lightning`` is installed.
    """
    for package in ("lightning.pytorch", "pytorch_lightning"):
        with suppress(ImportError):
            return getattr(importlib.import_module(package + module), name)
    raise MissingDependency("Lightning is not installed: pip install lightning")


def lightning_callback(tuner: ScanTuner) -> Any:
    """Return a Lightning callback that tunes at the start of training epochs and logs results.

    It logs ``pcrshard/scan``, 0 for full fidelity, and ``pcrshard/tuning_seconds``.

    Raises:
        MissingDependency: Neither ``lightning`` nor ``pytorch_lightning`` is installed.
    """
    callback_class: Any = lightning_class("", "Callback")

    class ScanTunerCallback(callback_class):  # type: ignore[misc]  # known at run time
        """Tunes before the epoch's first batch; the level applies from the next shard read."""

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            """Tune if due."""
            report = tuner.step(pl_module, trainer.current_epoch)
            if report is not None:
                scan = 0 if report.scan == FULL else report.scan
                pl_module.log("pcrshard/scan", float(scan))
                pl_module.log("pcrshard/tuning_seconds", report.seconds)

        def state_dict(self) -> dict[str, Any]:
            """Return the state for Lightning's checkpoint."""
            return tuner.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Restore the state from Lightning's checkpoint."""
            tuner.load_state_dict(state_dict)

    return ScanTunerCallback()
