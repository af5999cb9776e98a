"""scripts/train.py: what it refuses, what it computes with, and networks of the right size."""

import doctest
import json
import os
import subprocess
import sys

import pytest
from support import ROOT

import pcrshard
from pcrshard.testing import make_jpeg

sys.path.insert(0, str(ROOT / "scripts"))
from training import hardware, models


def write(folder, classes, count=16):
    with pcrshard.ShardWriter(folder, samples_per_shard=4, classes=list(classes)) as writer:
        for i in range(count):
            cls = str(i % len(classes)).encode()
            writer.write({"__key__": f"k{i}", "jpg": make_jpeg(i, 24, 24), "cls": cls})


@pytest.fixture
def train(tmp_path):
    """``train(*settings)`` runs the script on a small dataset; returns the finished process."""
    write(tmp_path / "train", "ab")
    fixed = ["batch_size=8", "size=16", "workers=0", "out=run", "data.train=train"]

    def start(*settings):
        return subprocess.run(
            [sys.executable, ROOT / "scripts" / "train.py", *fixed, *settings],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )

    return start


def test_devices_and_precisions():
    """V100 gets fp16, newer GPUs bf16, CPUs fp32; a task takes its own GPU or the only one."""
    assert doctest.testmod(hardware).attempted >= 3
    assert doctest.testmod(hardware).failed == 0
    with pytest.raises(ValueError, match="2 for task 3"):
        hardware.gpu_of(3, 2)
    with pytest.raises(ValueError, match="expected precision=auto"):
        hardware.precision_of("fp8", hardware.choose_device({}))


@pytest.mark.parametrize(("name", "parameters"), [("resnet18", 11689512), ("resnet50", 25557032)])
def test_networks_are_those_of_the_papers(name, parameters):
    """They have the published numbers of parameters, for a thousand classes."""
    network = models.MODELS[name](1000)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


def test_a_run_goes_on_by_default(train, tmp_path):
    """A stopped run resumes to an unbroken run's losses; a finished one is kept as it is.

    The scale of fp16 gradients is kept, too.
    """
    settings = ("epochs=3", "precision=fp16")
    assert train(*settings, "out=whole").returncode == 0
    assert train(*settings, "stop_after=3").returncode == 0
    with (tmp_path / "run" / "log.jsonl").open("a") as file:
        file.write('{"epoch": 1, "loss": 7}\n')  # as of a job that was killed before it saved
    last = train(*settings)
    assert last.returncode == 0, last.stderr
    whole, run = (losses(tmp_path / name) for name in ("whole", "run"))
    assert run == whole
    assert len(run) == 3
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    again = train(*settings, "workers=1")
    assert "is finished; nothing is left to do" in again.stdout, again.stderr
    other = train("epochs=3", "precision=fp32", "seed=3")
    assert other.returncode != 0
    assert "finished run with other settings (seed, precision)" in other.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_validation_set_with_other_classes_is_refused(train, tmp_path):
    """Its labels would be other things by the same numbers."""
    write(tmp_path / "val", "ac")
    done = train("data.val=val")
    assert done.returncode != 0
    assert "has other classes than data.train=train: 2 (a, c), expected 2 (a, b)" in done.stderr
    assert not (tmp_path / "run").exists()
