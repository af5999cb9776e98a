"""scripts/train.py checkpoints=delta: every epoch is kept; killed runs go on as with one file."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch
from support import ROOT, wait_for

import pcrshard
from pcrshard import DeltaStore
from pcrshard.testing import make_jpeg

EPOCHS = 60


@pytest.fixture
def train(tmp_path):
    """``train(*settings)`` starts the script on 16 images; ``ranks=2`` by torchrun."""
    with pcrshard.ShardWriter(
        tmp_path / "train", samples_per_shard=4, classes=["a", "b"]
    ) as writer:
        for i in range(16):
            sample = {"__key__": f"k{i}", "jpg": make_jpeg(i, 24, 24), "cls": str(i % 2).encode()}
            writer.write(sample)
    fixed = ["size=16", "workers=0", "data.train=train", "progress=0", f"epochs={EPOCHS}"]

    def start(*settings, ranks=1):
        launch = [sys.executable]
        if ranks > 1:
            launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return subprocess.Popen(
            [*launch, ROOT / "scripts" / "train.py", *fixed, "checkpoints=delta", *settings],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def ended(process, status=0):
    said = process.communicate(timeout=300)[0]
    assert process.returncode == status, said[-3000:]


def rows(folder):
    path = folder / "log.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def losses(folder):
    return [row["loss"] for row in rows(folder)]


def newest(folder):
    """Number of the newest version; 0 for none yet."""
    if not (folder / "checkpoints" / "manifest.pcm").exists():
        return 0
    records = DeltaStore(str(folder / "checkpoints")).versions()
    return records[-1].number if records else 0


def kill_all(process):
    """Kill the process and its descendants, which torchrun puts into separate sessions."""
    pids = [process.pid]
    for pid in pids:
        for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
            pids += map(int, path.read_text().split())
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.long
def test_a_killed_run_goes_on_bit_for_bit(train, tmp_path):
    """Warned by SIGUSR1 in an epoch, later killed while it writes; without a bound nothing differs.

    All that decides the next step comes from the store: weights, momentum, generators, data order.
    """
    exact = ("batch_size=8", "checkpoint_bound=null", "precision=fp16")
    whole = train(*exact, "out=whole")
    run = train(*exact, "out=run")
    wait_for(lambda: newest(tmp_path / "run") >= 3, 120)
    run.send_signal(signal.SIGUSR1)
    ended(run, os.EX_TEMPFAIL)
    stopped = newest(tmp_path / "run")
    assert 3 <= stopped < EPOCHS
    run = train(*exact, "out=run")
    wait_for(lambda: newest(tmp_path / "run") >= stopped + 3, 120)
    kill_all(run)
    assert newest(tmp_path / "run") < EPOCHS
    ended(train(*exact, "out=run"))
    ended(whole)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    stores = [DeltaStore(str(tmp_path / name / "checkpoints")) for name in ("run", "whole")]
    for record, other in zip(*(store.versions() for store in stores), strict=True):
        assert record.metrics["step"] == other.metrics["step"] == 2 * record.number
    last, expected = (store.load(EPOCHS) for store in stores)
    for part in ("model", "optimizer"):
        assert flat(last[part]) == flat(expected[part])
    assert stores[0].verify() == []


def flat(value):
    """A nested state as comparable plain values."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return [(key, flat(item)) for key, item in value.items()]
    return [flat(item) for item in value] if isinstance(value, list | tuple) else value


def test_every_epoch_is_within_its_bound(train, tmp_path):
    """The training itself is not touched by it: a run without a bound has the same losses.

    A finished run says so, and its versions are no larger than half of what they hold.
    """
    runs = [
        train("batch_size=8", f"checkpoint_bound={bound}", f"out={out}", "epochs=4")
        for out, bound in (("exact", "null"), ("bounded", "0.01"))
    ]
    for run in runs:
        ended(run)
    assert losses(tmp_path / "bounded") == losses(tmp_path / "exact")
    exact = DeltaStore(str(tmp_path / "exact" / "checkpoints"))
    bounded = DeltaStore(str(tmp_path / "bounded" / "checkpoints"))
    records = bounded.versions()
    assert [record.metrics["epoch"] for record in records] == [1, 2, 3, 4]
    assert sum(r.file_bytes for r in records) < sum(r.raw_bytes for r in records) / 2
    different = 0
    for number in (1, 4):
        kept = bounded.load(number)
        for name, tensor in exact.load(number)["model"].items():
            error = (kept["model"][name].double() - tensor.double()).abs().max()
            allowed = 0.011 * tensor.double().std() if tensor.dim() > 1 else 0
            assert error <= allowed, name
            different += int(error > 0)
    assert different > 3
    again = train("batch_size=8", "checkpoint_bound=0.01", "out=bounded", "epochs=4")
    assert "is finished; nothing is left to do" in again.communicate(timeout=100)[0]


@pytest.mark.long
def test_two_ranks(train, tmp_path):
    """Rank 0 writes, both go on from there: after a kill the losses are those of a whole run."""
    exact = ("batch_size=4", "checkpoint_bound=null")
    run = train(*exact, "out=run", ranks=2)
    wait_for(lambda: newest(tmp_path / "run") >= 3, 120)
    kill_all(run)
    assert newest(tmp_path / "run") < EPOCHS
    ended(train(*exact, "out=run", ranks=2))
    ended(train(*exact, "out=whole", ranks=2))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert newest(tmp_path / "run") == EPOCHS
    assert DeltaStore(str(tmp_path / "run" / "checkpoints")).verify() == []


def test_an_unknown_way_is_refused(train):
    """The error lists the valid values."""
    run = train("batch_size=8", "checkpoints=all")
    assert "expected checkpoints=last or checkpoints=delta, got 'all'" in run.communicate()[0]
    assert run.returncode != 0
