"""Lightning itself, and trainers that say nothing."""

import pytest
from imported_later import Later

lightning = Later("lightning", "NO LIGHTNING: pip install lightning")
# About workers and logs.
ADVICE = [
    pytest.mark.filterwarnings(f"ignore::{kind}")
    for kind in ("UserWarning", "DeprecationWarning", "FutureWarning")
]


def make_module(steps, *args):
    """A LightningModule with the methods of the class ``steps``."""
    return type(steps.__name__, (steps, lightning.LightningModule), {})(*args)


def make_trainer(root, **options):
    """A trainer on the CPU that logs nothing and shows nothing."""
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    return lightning.Trainer(**quiet, accelerator="cpu", default_root_dir=root, **options)
