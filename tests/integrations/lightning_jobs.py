"""Lightning itself, and trainers that say nothing."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning", reason="NO LIGHTNING: pip install lightning")
# About workers and logs.
ADVICE = [
    pytest.mark.filterwarnings(f"ignore::{kind}")
    for kind in ("UserWarning", "DeprecationWarning", "FutureWarning")
]


def make_trainer(root, **options):
    """A trainer on the CPU that logs nothing and shows nothing."""
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    return lightning.Trainer(**quiet, accelerator="cpu", default_root_dir=root, **options)
