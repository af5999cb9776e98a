"""The loops of the README's training page, as a newcomer runs them on data as they really are."""

import pytest
import torch

import pcrshard
from pcrshard import BandwidthTuner, ImageDecoder, PCRDataset, PCRLoader, ScanLevel, ScanTuner
from pcrshard.fidelity import bytes_per_sample


@pytest.fixture
def copy(dataset, tmp_path):
    """A copy staged to scan 5, as on a cluster's scratch disk."""
    pcrshard.stage(str(dataset), str(tmp_path / "copy"), 5)
    return str(tmp_path / "copy")


def train(dataset, batches, model):
    """The loop of the page: the labels that were seen."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    seen = []
    for images, labels in batches:
        logits = model(images / 255)
        assert logits.shape == (len(labels), dataset.num_classes)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += labels.tolist()
    return seen


def linear(classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, classes))


def loss(model, batch):
    images, labels = batch
    return torch.nn.functional.cross_entropy(model(images / 255), labels)


def open_copy(copy, level):
    decoder = ImageDecoder(32, "random")
    return PCRDataset(copy, scan=level, decoder=decoder, fields=("jpg", "cls"))


def test_tuners_choose_the_scan_on_a_staged_copy(copy):
    """Gradients and bandwidth choose among the scans of the copy, and no others."""
    level = ScanLevel()
    dataset = open_copy(copy, level)
    assert level.value == 5
    model = linear(dataset.num_classes)
    loader = PCRLoader(dataset, 4, num_workers=2)
    tuner = ScanTuner(loader, loss, level, images=8, first=0, every=1)
    for epoch in range(2):
        assert tuner.step(model, epoch).scan in (1, 2, 3, 4, 5)
        assert set(train(dataset, loader, model)) == {0, 1}
    level.value = 2
    sizes = bytes_per_sample(dataset.shards.entries)
    tuner = BandwidthTuner(level, sizes, floor=2, window=1, ahead=0, max_wait=0.9)
    for _ in range(4):
        assert set(train(dataset, tuner.watch(loader, samples=4), model)) == {0, 1}
    assert level.value in (2, 3, 4, 5)
