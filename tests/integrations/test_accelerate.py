"""Accelerate's ``prepare`` leaves a PCRLoader as it is, and saves and loads where it is."""

import itertools

import pytest
import torch
from imported_later import Later

from pcrshard import PCRDataset, PCRLoader

accelerate = Later("accelerate", "NO ACCELERATE: pip install accelerate")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("stop", [2, 6])
def test_a_job_goes_on_exactly(dataset, tmp_path, stop):
    """A loop over a prepared loader that saves its state, in the middle of an epoch or at its end,
    continues with the exact next batch.
    """

    def job():
        accelerator = accelerate.Accelerator(cpu=True)
        model = torch.nn.Linear(1, 1)
        loader = PCRLoader(PCRDataset(dataset, scan=1), 4, seed=2)
        model, prepared = accelerator.prepare(model, loader)
        accelerator.register_for_checkpointing(prepared)
        return accelerator, prepared

    _, loader = job()
    expected = [batch["__key__"] for _ in range(2) for batch in loader]
    accelerator, loader = job()
    seen = [batch["__key__"] for batch in itertools.islice(loader, stop)]
    accelerator.save_state(str(tmp_path / "state"))
    accelerator, loader = job()
    accelerator.load_state(str(tmp_path / "state"))
    for _ in range(loader.epoch, 2):
        seen += [batch["__key__"] for batch in loader]
    assert seen == expected


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_skipping_batches_says_how_to_resume(dataset):
    """``skip_first_batches`` raises an error that says how a loader with a position resumes."""
    loader = PCRLoader(PCRDataset(dataset, scan=1), 4)
    with pytest.raises(AttributeError, match="register_for_checkpointing"):
        accelerate.skip_first_batches(loader, 2)
    assert not hasattr(loader, "sampler")
