"""scripts/train.py: what it refuses, how it resumes, and networks of the published size."""

import doctest
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch
from checkpoint.states import same
from imported_later import Later
from numbered import numbered, write
from support import ROOT, read_log, wait_for

import pcrshard
from pcrshard import DeltaStore

sys.path.insert(0, str(ROOT / "scripts"))
from training import hardware, models

hydra, script = Later("hydra"), Later("train")
EPOCHS = 60
FIXED = ["batch_size=8", "size=16", "workers=0", "threads=1", "progress=0", "data.train=train"]


def labeled():
    """Samples of two classes."""
    return [sample | {"cls": sample["cls"] % 2} for sample in numbered(16)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a small dataset."""
    write(tmp_path / "train", labeled(), 4, classes=("a", "b"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def train(folder):
    """``train(*settings)`` runs the script in this process, and returns its status."""

    def start(*settings):
        with hydra.initialize_config_dir(str(ROOT / "conf" / "train"), version_base="1.3"):
            cfg = hydra.compose("config", [*FIXED, *settings])
        with pytest.raises(SystemExit) as ended:
            script.main.__wrapped__(cfg)
        return ended.value.code

    handler, threads = signal.getsignal(signal.SIGUSR1), torch.get_num_threads()
    yield start
    signal.signal(signal.SIGUSR1, handler)
    torch.set_num_threads(threads)


def test_devices_and_precisions():
    """V100 gets fp16, newer GPUs bf16, CPUs fp32; other precisions are refused."""
    assert doctest.testmod(hardware) == (0, 2)
    with pytest.raises(ValueError, match="expected precision=auto"):
        hardware.precision_of("fp8", hardware.choose_device())


@pytest.mark.parametrize(("name", "parameters"), [("resnet18", 11689512), ("resnet50", 25557032)])
def test_networks_are_those_of_the_papers(name, parameters):
    """They have the published numbers of parameters, for a thousand classes."""
    network = models.MODELS[name](1000)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


def losses(out):
    return [row["loss"] for row in read_log(out)]


@pytest.mark.parametrize("stop", [3, 4])
def test_a_run_goes_on_by_default(train, folder, capsys, stop):
    """A run that stopped in an epoch, or after its last step, resumes to an unbroken run's losses;
    a finished one is kept as it is.

    The scale of fp16 gradients is kept, too.
    """
    settings = ("epochs=3", "precision=fp16")
    assert train(*settings, "out=whole") == 0
    assert train(*settings, "out=run", f"stop_after={stop}") == 0
    with open("run/log.jsonl", "a") as file:
        file.write('{"epoch": 1, "loss": 7}\n')  # as of a job that was killed before it saved
    assert train(*settings, "out=run") == 0
    assert losses("run") == losses("whole")
    assert len(losses("run")) == 3
    before = {path.name: path.read_bytes() for path in (folder / "run").iterdir()}
    assert train(*settings, "out=run", "precision=fp32") == 0
    assert "is finished; to train with other settings" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in (folder / "run").iterdir()} == before


@pytest.mark.parametrize(
    "policy", [["bandwidth"], ["milestones"], ["tuner", "policy.first=0", "policy.images=8"]]
)
def test_each_policy_sets_the_scan(train, folder, policy):
    """The loop is the same with every policy, also on a staged copy, and the log says which scan
    was read.
    """
    pcrshard.stage("train", "staged", 4)
    for data in ("train", "staged"):
        settings = ("epochs=1", f"data.train={data}", f"out=of/{data}")
        assert train(*settings, f"policy={policy[0]}", *policy[1:]) == 0
    assert read_log("of/train")[0]["scan"] in (*range(1, 11), "full")
    assert read_log("of/staged")[0]["scan"] <= 4


def test_milestones_are_those_given(train, folder):
    """The setting replaces the milestones of the file."""
    given = "policy.milestones=[[0,1],[1,3]]"
    assert train("epochs=3", "out=run", "policy=milestones", given) == 0
    assert [row["scan"] for row in read_log("run")] == [1, 3, 3]


def test_wrong_settings_are_refused(train, folder):
    """Validation labels that mean other classes, and unknown values, raise an error at once."""
    write(folder / "val", labeled(), 4, classes=("a", "c"))
    with pytest.warns(UserWarning, match="number their classes differently"):
        assert "other classes than data.train=train: a, c, expected a, b" in train("data.val=val")
    with pytest.raises(ValueError, match="checkpoints=last or checkpoints=delta, got 'all'"):
        train("checkpoints=all")
    assert not (folder / "runs").exists()


def test_every_epoch_is_within_its_bound(train):
    """With ``checkpoints=delta`` every epoch is kept. The bound does not affect the training: a run
    without a bound has the same losses. Versions take at most half of their plain size.
    """
    how = ("checkpoints=delta", "epochs=4")
    for out, bound in (("exact", "null"), ("bounded", "0.01")):
        assert train(*how, f"checkpoint_bound={bound}", f"out={out}") == 0
    assert losses("bounded") == losses("exact")
    exact, bounded = (DeltaStore(f"{out}/checkpoints") for out in ("exact", "bounded"))
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


def start(*settings, ranks):
    """Start the script, with several ranks by torchrun."""
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    how = [*FIXED, "checkpoints=delta", "checkpoint_bound=null", f"epochs={EPOCHS}", *settings]
    return subprocess.Popen(
        [*launch, ROOT / "scripts" / "train.py", *how],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process, status=0):
    said = process.communicate(timeout=300)[0]
    assert process.returncode == status, said[-3000:]


def newest():
    """Number of the newest version of the run; 0 for none yet."""
    if not os.path.exists("run/checkpoints/manifest.pcm"):
        return 0
    records = DeltaStore("run/checkpoints").versions()
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
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.usefixtures("folder")
def test_a_killed_run_goes_on_bit_for_bit(ranks):
    """Killed while it writes, and with one rank first warned by SIGUSR1 in an epoch, a run ends
    like an unbroken one: weights, momentum, generators and data order come from the store.
    """
    how = (f"batch_size={8 // ranks}", "precision=fp16")
    whole = start(*how, "out=whole", ranks=ranks)
    run = start(*how, "out=run", ranks=ranks)
    wait_for(lambda: newest() >= 3, 120)
    stopped = 0
    if ranks == 1:
        run.send_signal(signal.SIGUSR1)
        ended(run, os.EX_TEMPFAIL)
        stopped = newest()
        run = start(*how, "out=run", ranks=ranks)
    wait_for(lambda: newest() >= stopped + 3, 120)
    kill_all(run)
    assert newest() < EPOCHS
    ended(start(*how, "out=run", ranks=ranks))
    ended(whole)
    assert losses("run") == losses("whole")
    stores = [DeltaStore(f"{out}/checkpoints") for out in ("run", "whole")]
    for record, other in zip(*(store.versions() for store in stores), strict=True):
        assert record.metrics["step"] == other.metrics["step"] == 2 * record.number
    last, expected = (store.load(EPOCHS) for store in stores)
    assert all(same(last[part], expected[part]) for part in ("model", "optimizer"))
    assert stores[0].verify() == []
