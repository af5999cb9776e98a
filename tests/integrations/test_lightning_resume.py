"""Lightning trains with PCRLoader as it is: every sample once per epoch, exact continuation."""

import json
import os
import pathlib

import pytest
import torch
from lightning_jobs import ADVICE, lightning, make_module, make_trainer
from numbered import WRITERS, flat, numbered, scan_of
from support import run_python
from torch import nn

from pcrshard import PCRDataset, PCRLoader

pytestmark = ADVICE
SAMPLES, BATCH, EPOCHS = 48, 4, 4
STEPS = SAMPLES // BATCH


@pytest.fixture(scope="module", params=WRITERS)
def folder(request, tmp_path_factory):
    """8 shards, or plain tars, of 6 small images."""
    return WRITERS[request.param](tmp_path_factory.mktemp("lightning"), numbered(SAMPLES))


class Interrupted(Exception):
    """The job is killed here."""


class Recorder:
    """Notes the samples of each training step, and ends the job before a given one."""

    def __init__(self, stop=None):
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.stop = stop
        self.seen = []

    def training_step(self, batch, _):
        if self.stop is not None and self.global_step == self.stop:
            raise Interrupted
        labels = batch[0]
        self.seen.append(labels.tolist())
        return self.net(labels[:, None].float()).mean()

    def validation_step(self, batch, _):
        self.log("val", self.net(batch[0][:, None].float()).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)


def loaders(folder, **options):
    """Loaders for training and validation."""
    dataset = PCRDataset(folder, scan=scan_of(folder, 1), fields=("cls",))
    return (
        PCRLoader(dataset, BATCH, seed=3, **({"threads": 1} | options)),
        PCRLoader(dataset, BATCH, shuffle=False, drop_last=False),
    )


def fit(folder, root, *, stop=None, checkpoint=None, callbacks=(), loader=None, **options):
    """The samples of each step that a trainer runs, with new loaders."""
    module = make_module(Recorder, stop)
    train, val = loaders(folder, **(loader or {}))
    how = {"max_epochs": EPOCHS, "devices": 1, "enable_checkpointing": bool(callbacks)} | options
    trainer = make_trainer(root, callbacks=callbacks, **how)
    try:
        trainer.fit(module, train, val, ckpt_path=checkpoint)
    except Interrupted:
        assert stop is not None
    return module.seen


def keeping(folder, **rules):
    """Callbacks that keep every checkpoint."""
    how = {"dirpath": folder, "filename": "last", "save_top_k": -1}
    return [lightning.pytorch.callbacks.ModelCheckpoint(**how, **rules)]


def newest(folder):
    """The last checkpoint in a folder, if there is one."""
    return max(map(str, folder.glob("*.ckpt")), key=os.path.getmtime, default=None)


def planned(folder, epochs=EPOCHS, limit=None):
    """The samples of each step, by the loader's own order."""
    train, _ = loaders(folder)
    return [[b[0].tolist() for b in train][:limit] for _ in range(epochs)]


@pytest.mark.parametrize(
    "how", [{}, {"val_check_interval": 5}, {"num_sanity_val_steps": 0}], ids=str
)
def test_each_epoch_has_each_sample_in_another_order(folder, tmp_path, how):
    """Epoch after epoch is the loader's own order, with validation in between, too."""
    expected = planned(folder)
    assert len({str(epoch) for epoch in expected}) == EPOCHS
    assert all(sorted(flat(epoch)) == list(range(SAMPLES)) for epoch in expected)
    assert fit(folder, tmp_path, **how) == flat(expected)


@pytest.mark.parametrize(
    ("every", "stop", "limit"),
    [
        ("step", 3, None),
        ("step", 7, 7),
        ("epoch", 12, None),
        ("third step", 17, None),
        ("validation", 26, None),
        ("validation", 17, 7),
    ],
)
def test_a_job_continues_exactly(folder, tmp_path, every, stop, limit):
    """A killed job that resumes from its last checkpoint trains on the samples of a job that ran
    through: in the middle of an epoch, at its end, and with limited epochs.
    """
    rules = {
        "step": {"every_n_train_steps": 1},
        "third step": {"every_n_train_steps": 3},
        "epoch": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
        "validation": {"save_on_train_epoch_end": False},
    }[every]
    how = {} if limit is None else {"limit_train_batches": limit}
    if every == "validation":
        how["val_check_interval"] = 5 if limit is None else 3
    expected = flat(planned(folder, limit=limit))
    fit(folder, tmp_path, stop=stop, callbacks=keeping(tmp_path, **rules), **how)
    last = newest(tmp_path)  # one that saved nothing starts over
    step = torch.load(last, weights_only=False)["global_step"] if last else 0
    assert step <= stop
    seen = fit(folder, tmp_path, checkpoint=last, **how)
    assert seen == expected[step:]


def test_a_job_of_so_many_steps_continues_exactly(folder, tmp_path):
    """So does one that is trained for ``max_steps``, with workers and accumulated gradients."""
    how = {"max_epochs": None, "max_steps": 20, "accumulate_grad_batches": 2}
    how["loader"] = {"threads": 0, "num_workers": 1}
    expected = flat(planned(folder, 4))[:40]
    assert fit(folder, tmp_path, **how) == expected
    fit(folder, tmp_path, stop=14, callbacks=keeping(tmp_path, every_n_train_steps=2), **how)
    last = newest(tmp_path)
    done = torch.load(last, weights_only=False)["global_step"] * 2
    assert fit(folder, tmp_path, checkpoint=last, **how) == expected[done:]


@pytest.mark.changed("pcrshard/training/loader.py", "pcrshard/training/ranks.py")
@pytest.mark.parametrize("folder", ["shards"], indirect=True)
def test_two_ranks_share_each_epoch_and_continue_exactly(folder, tmp_path, monkeypatch):
    """Two ranks, whose loaders are made before Lightning starts its process group, have each sample
    once per epoch between them, in another order each time, and continue in the middle of an epoch.
    Sums logged with ``sync_dist`` are of every sample once, however few the last steps have.
    """
    script = pathlib.Path(__file__).with_name("lightning_ranks.py")
    known = ("PL_", "LOCAL_", "RANK", "WORLD_SIZE", "MASTER_", "NODE_RANK", "SLURM_")
    for name in [name for name in os.environ if name.startswith(known)]:
        monkeypatch.delenv(name)
    run_python(script, folder, tmp_path, 4, env={"OMP_NUM_THREADS": "1"}, timeout=240)
    each = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in (0, 1)]
    sums = [[size, size, size * (size - 1) // 2] for size in (2, 3, 13, 16, 17)]
    assert [one.pop("sums") for one in each] == [sums, sums]
    seen = {
        name: [a + b for a, b in zip(*(one[name] for one in each), strict=True)] for name in each[0]
    }
    half = STEPS // 2
    through = seen["through"]
    epochs = [flat(through[start : start + half]) for start in range(0, 3 * half, half)]
    assert len(through) == 3 * half
    assert all(sorted(epoch) == list(range(SAMPLES)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert seen["before"] == through[:4]
    assert seen["after"] == through[4:]
