"""ScanTuner in Lightning: the callback tunes, logs, and keeps its state in checkpoints."""

import sys

import pytest
import torch
from lightning_jobs import ADVICE, make_module, make_trainer
from torch import nn

from pcrshard import ImageDecoder, PCRDataset, PCRLoader, ScanLevel, ScanTuner
from pcrshard.errors import MissingDependency
from pcrshard.integrations.lightning import lightning_callback

pytestmark = ADVICE


class Classifier:
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 3))

    def training_step(self, batch, _):
        return loss(self, batch)

    def forward(self, images):
        return self.net(images / 128 - 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


def loss(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def make_tuner(folder, level, **options):
    """A tuner that takes scan 1, or with threshold=2 none."""
    decoder = ImageDecoder(32, "center")
    dataset = PCRDataset(folder, scan=level, decoder=decoder, fields=("jpg", "cls"))
    loader = PCRLoader(dataset, 4, seed=1)
    rules = {"candidates": [1], "threshold": -1, "images": 8, "trials": 1, "first": 0} | options
    return ScanTuner(loader, loss, level, **rules)


def fit(tuner, folder, epochs, checkpoint=None):
    batches = [(torch.full((4, 3, 32, 32), 128.0), torch.tensor([0, 1, 2, 0]))] * 2
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    how = {"max_epochs": epochs, "enable_checkpointing": False}
    trainer = make_trainer(folder, callbacks=[lightning_callback(tuner)], **how)
    trainer.fit(make_module(Classifier), loader, ckpt_path=checkpoint)
    return trainer


@pytest.mark.parametrize(("threshold", "scan", "logged"), [(-1, 1, 1.0), (2, "full", 0.0)])
def test_it_tunes_and_logs(threshold, scan, logged, dataset, tmp_path):
    """The level changes before the first batch; the log shows the scan, 0 for full fidelity."""
    level = ScanLevel(5)
    trainer = fit(make_tuner(dataset, level, threshold=threshold), tmp_path, 1)
    assert level.value == scan
    assert float(trainer.callback_metrics["pcrshard/scan"]) == logged
    assert float(trainer.callback_metrics["pcrshard/tuning_seconds"]) > 0


def test_a_checkpoint_keeps_what_was_found(dataset, tmp_path):
    """A resumed job reads at the scan that was found, and does not tune again before it is due."""
    first = make_tuner(dataset, ScanLevel(), every=5)
    trainer = fit(first, tmp_path, 2)
    path = tmp_path / "job.ckpt"
    trainer.save_checkpoint(path)
    level = ScanLevel()
    second = make_tuner(dataset, level, every=5)
    fit(second, tmp_path, 3, checkpoint=path)
    assert level.value == 1
    assert second.reports == first.reports
    assert len(first.reports) == 1


def test_without_lightning_it_says_what_to_install(monkeypatch):
    """The error names the package, as for every optional dependency."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependency, match="pip install lightning"):
        lightning_callback(None)
