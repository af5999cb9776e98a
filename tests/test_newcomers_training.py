"""The loops of the README's training page, as a newcomer runs them on data as they really are."""

import json
import subprocess
import sys

import pytest
import torch
from support import ROOT

import pcrshard
from pcrshard import BandwidthTuner, ImageDecoder, PCRDataset, PCRLoader, ScanLevel, ScanTuner
from pcrshard.cli.main import main
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


def test_fidelity_of_a_staged_copy(copy, tmp_path, monkeypatch, capsys):
    """The command compares with the highest scan there, says so, and takes one's own network."""
    arguments = ["fidelity", copy, "--num-images", "8"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "reference: 5\n" in text
    assert "top-1" not in text
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def net():\n"
        "    return lambda batch: torch.eye(2)[:1].expand(len(batch), 2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main([*arguments, "--model", "mine:net"]) == 0
    text = capsys.readouterr().out
    assert "of your network at scan 5" in text


RANKS = """
import json, os, sys
sys.path.insert(0, {tests!r})
import torch, torch.distributed as dist
from test_newcomers_training import linear, loss, open_copy, train
from pcrshard import BandwidthTuner, PCRLoader, ScanLevel, ScanTuner
from pcrshard.fidelity import bytes_per_sample
torch.set_num_threads(1)
dist.init_process_group("gloo")
level = ScanLevel()
dataset = open_copy({copy!r}, level)
model = torch.nn.parallel.DistributedDataParallel(linear(dataset.num_classes))
loader = PCRLoader(dataset, 4, num_workers=1)
tuner = ScanTuner(loader, loss, level, images=8, first=0, every=1)
watcher = BandwidthTuner(level, bytes_per_sample(dataset.shards.entries), window=1)
chosen = []
labels = []
for epoch in range(2):
    chosen.append(tuner.step(model, epoch).scan)
    labels += train(dataset, watcher.watch(loader, samples=4), model)
with open({out!r} + str(dist.get_rank()), "w") as file:
    json.dump([chosen, labels], file)
dist.barrier()
dist.destroy_process_group()
# DDP's cycle keeps gloo's threads; one that wants the GIL while Python ends aborts (PyTorch).
os._exit(0)
"""


def test_two_ranks_on_a_staged_copy(copy, tmp_path):
    """Both tuners together under DDP: the same scans, and each sample on one rank."""
    script = tmp_path / "ranks.py"
    out = str(tmp_path / "rank")
    script.write_text(RANKS.format(tests=str(ROOT / "tests"), copy=copy, out=out))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launch, "--nproc-per-node", "2", str(script)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    (scans, first), (others, second) = (
        json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)
    )
    assert scans == others
    assert len(first) == len(second) == 24
    assert sorted(first + second) == [0] * 24 + [1] * 24
